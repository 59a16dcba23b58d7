"""`pkt.all_to_all_matmul`: its declaration and its kernel in plain Triton in `forms`, its Gluon form in `gluon`."""

from .forms import OPERATOR, all_to_all_matmul, reference

__all__ = ["OPERATOR", "all_to_all_matmul", "reference"]
