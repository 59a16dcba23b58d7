"""`pkt.dispatch`: `host` has the operator, `push` the kernel, with `choices`, `totals` and `numbering` below it and its
`arguments`. `result` is what a rank gets, `reference` works it out with lists."""

from .host import OPERATOR, dispatch
from .reference import reference
from .result import Dispatched

__all__ = ["OPERATOR", "Dispatched", "dispatch", "reference"]
