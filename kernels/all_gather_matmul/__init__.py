"""`pkt.all_gather_matmul`: the operator and its kernels in plain Triton in `plain`, its Gluon form in `gluon`, calls
that keep the gathered A in `kept`, and in `rules` what it takes where nothing is given."""

from . import kept as kept  # which hands itself to `plain`
from .plain import OPERATOR, all_gather_matmul, reference

__all__ = ["OPERATOR", "all_gather_matmul", "reference"]
