"""`pkt.all_gather_grouped_matmul`: `host` has the operator, `sorting` the routing, `push` a kernel. `result` is what a
rank gets, `reference` works it out with lists."""

from .host import OPERATOR, all_gather_grouped_matmul
from .reference import reference
from .result import Gathered

__all__ = ["OPERATOR", "Gathered", "all_gather_grouped_matmul", "reference"]
