"""`pkt.ulysses_attention`: its declaration in `forms`, its kernel in `kernel`, and in `local` attention of whole
sequences by torch, with its gradients."""

from .forms import OPERATOR, ulysses_attention

__all__ = ["OPERATOR", "ulysses_attention"]
