"""`pkt.matmul_all_to_all`: its declaration and its kernel in `forms`, and in `copied` the form whose tiles copy engines
move."""

from .forms import OPERATOR, matmul_all_to_all, reference

__all__ = ["OPERATOR", "matmul_all_to_all", "reference"]
