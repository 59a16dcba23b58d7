"""`pkt.combine`: `host` has the operator, `plans` its launches, `pull` and `low_latency` the kernels, `nodes` that
over several nodes, `reference` the exact result and its bound."""

from .host import OPERATOR, combine
from .reference import reference

__all__ = ["OPERATOR", "combine", "reference"]
