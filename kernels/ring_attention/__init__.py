"""`pkt.ring_attention`: its declaration in `forms`, its kernel in `kernel`, layouts of a sequence and masks in
`sequence`, and what its tests hold it against in `exact`. `ring_attention_backward` is an operator of its own, with
its kernels in `backward` and what its tests hold it against in `exact_backward`."""

from .forms import OPERATOR, ring_attention

__all__ = ["OPERATOR", "ring_attention"]
