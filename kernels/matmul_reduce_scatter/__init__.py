"""`pkt.matmul_reduce_scatter`: `plain` has the operator and its kernels in plain Triton, `gluon` its Gluon form."""

from .plain import matmul_reduce_scatter, reference

__all__ = ["matmul_reduce_scatter", "reference"]
