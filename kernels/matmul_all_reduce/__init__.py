"""`pkt.matmul_all_reduce`: `plain` has the operator and its kernels in plain Triton, `gluon` its Gluon form."""

from .plain import matmul_all_reduce, reference

__all__ = ["matmul_all_reduce", "reference"]
