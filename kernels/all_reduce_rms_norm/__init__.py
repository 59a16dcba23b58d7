"""`pkt.all_reduce_rms_norm`: its declaration in `host`, the form in flagged words in `low_latency`, the others in
`tiles`."""

from .host import OPERATOR, all_reduce_rms_norm, bound, default, reference, seconds

__all__ = ["OPERATOR", "all_reduce_rms_norm", "bound", "default", "reference", "seconds"]
