"""All inline PTX of pkt, and the choice between compiled and simulated code (see `primitive`). Everything else in
pkt.language is plain Triton over these primitives.

Inline assembly runs in every thread of the program. An operation that must happen once, such as an atomic on a scalar,
uses `tl.atomic_*`, which Triton executes in one thread.
"""

from .far import far_fence, far_put, far_put_signal, far_quiet, far_signal, lane, near_only, ring
from .flagged import put_flagged, take_flagged
from .multimem import multimem_can, multimem_load_reduce, multimem_reduce_add, multimem_store
from .order import SIGNAL_MARKER, cta_barrier, drain, fence, load_relaxed, prefetch, proxy_fence
from .primitive import mark, member, retype_tuples, threads_to_agree, unknown
from .spin import POLLS_PER_CHECK, WAIT_MARKER, wait

__all__ = [
    "load_relaxed", "prefetch", "fence", "proxy_fence", "drain", "cta_barrier", "SIGNAL_MARKER",
    "wait", "WAIT_MARKER", "POLLS_PER_CHECK",
    "put_flagged", "take_flagged",
    "far_put", "far_put_signal", "far_signal", "far_fence", "far_quiet", "lane", "near_only", "ring",
    "multimem_can", "multimem_load_reduce", "multimem_store", "multimem_reduce_add",
    "mark", "member", "retype_tuples", "threads_to_agree", "unknown",
]  # fmt: skip
