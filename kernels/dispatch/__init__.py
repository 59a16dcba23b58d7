"""`pkt.dispatch`: `host` has the operator, `plans` its launches, `push` and `low_latency` the kernels with their
`arguments`. Below `push` are `choices`, `totals` and `numbering`, below `low_latency` `sending` and `words`. `result`
is what a rank gets, `reference` works it out with lists, `rules` choose a form here and in combine, `examples` are for
tests. `dispatch_again` is an operator of its own, `again` its kernel; `gradients` has the backward passes of dispatch,
combine and it. `nodes` and `nodes_again` are their kernels over several nodes."""

from .host import OPERATOR, dispatch
from .reference import reference
from .result import Dispatched

__all__ = ["OPERATOR", "Dispatched", "dispatch", "reference"]
