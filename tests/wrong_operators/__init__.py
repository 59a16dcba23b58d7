"""Operators that take no square matrices: right operands, and what is wrong for each name, by its error."""

from .attention import ATTENTION
from .experts import EXPERTS
from .norms import NORMS
from .tried import Tried, parameters

__all__ = ["OTHERS", "Tried", "parameters"]

OTHERS = (*EXPERTS, *NORMS, *ATTENTION)
