"""Device functions: `import pkt.language as pl`, then call `pl.wait(...)` and the others in a @triton.jit function."""

from . import inspect, order, shmem, template, tile
from .address import multicast, peer
from .flagged import put_flagged, take_flagged, take_flagged_all
from .memory import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    load_acquire,
    load_relaxed,
    prefetch,
    put,
    store,
    store_relaxed,
    store_release,
)  # fmt: skip
from .multimem import multimem_load_reduce, multimem_reduce_add, multimem_store
from .sync import (
    barrier,
    epoch,
    fence,
    grid_barrier,
    put_signal,
    quiet,
    signal,
    signal_all,
    test,
    wait,
    world_barrier,
)
from .template import lcsc
from .tile import Layout

# Checks every kernel compiled from here on: the compiler must not drop a wait or a signal.
inspect.install_listener()

__all__ = [
    "Layout", "peer", "multicast",
    "load", "store", "get", "put", "copy", "prefetch",
    "load_acquire", "load_relaxed", "store_release", "store_relaxed",
    "atomic_add", "atomic_cas", "atomic_xchg", "atomic_and", "atomic_or", "atomic_xor", "atomic_min", "atomic_max",
    "signal", "signal_all", "put_signal", "wait", "test",
    "barrier", "grid_barrier", "world_barrier", "fence", "quiet", "epoch",
    "put_flagged", "take_flagged", "take_flagged_all",
    "multimem_load_reduce", "multimem_store", "multimem_reduce_add",
    "tile", "shmem", "order", "template", "lcsc", "inspect",
]  # fmt: skip
