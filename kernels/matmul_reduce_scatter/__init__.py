"""`pkt.matmul_reduce_scatter`: the operator and its kernels in plain Triton in `plain`, its Gluon form in `gluon`, and
in `rules` what it takes where nothing is given."""

from .plain import OPERATOR, matmul_reduce_scatter, reference

__all__ = ["OPERATOR", "matmul_reduce_scatter", "reference"]
