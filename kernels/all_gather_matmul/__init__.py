"""`pkt.all_gather_matmul`: `plain` has the operator and its kernels in plain Triton, `gluon` its Gluon form."""

from .plain import all_gather_matmul, reference

__all__ = ["all_gather_matmul", "reference"]
