"""`pkt.ulysses_attention`: its declaration in `forms`, its kernel in `kernel`, its copies in `groups`, exchanges around
attention in `unfused`, calls whose gradients are wanted in `kept`, the choice of a form in `rules`, and in `local`
attention of whole sequences by torch, with its gradients."""

from .forms import OPERATOR, ulysses_attention

__all__ = ["OPERATOR", "ulysses_attention"]
