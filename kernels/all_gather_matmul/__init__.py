"""`pkt.all_gather_matmul`: `host` has the operator, `plain` and `gluon` its kernels, `kept` calls that keep the
gathered A, `rules` the settings of calls that give none."""

from . import kept as kept  # which hands itself to `host`
from .host import OPERATOR, all_gather_matmul, reference

__all__ = ["OPERATOR", "all_gather_matmul", "reference"]
