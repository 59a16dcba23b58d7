"""`pkt.flash_decode`: `attention` is one pass over a rank's keys, `merging` makes one result of partial ones, and
`device` has the kernels, `nodes` that over several nodes, `gluon` that of latent caches, with `gluon_units` and
`gluon_loading` below it. `host` has the operator and its forms, `reference` the exact
result and its bound."""

from .host import OPERATOR, flash_decode
from .reference import reference

__all__ = ["OPERATOR", "flash_decode", "reference"]
