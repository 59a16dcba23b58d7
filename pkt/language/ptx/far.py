"""Calls to ranks of other nodes, which the network carries. One thread speaks for the program.

The simulator has them. Compiled code does not yet: that needs NVSHMEM. Triton's front end alone may see them, because
the simulator checks a kernel's types with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pkt.errors import Unsupported

from .primitive import simulated

_only_types = False


@contextmanager
def only_types() -> Iterator[None]:
    """Inside the `with`, Triton's front end accepts far calls and makes nothing of them."""
    global _only_types
    outer, _only_types = _only_types, True
    try:
        yield
    finally:
        _only_types = outer


def _not_compiled(call: str) -> None:
    if not _only_types:
        raise Unsupported.here(
            f"{call} to a rank of another node",
            "found a compilation for GPUs, and NVSHMEM is not supported yet",
            "make a world of one node, or run the kernel with pkt.launch(fn, ranks=8, node_size=4, device='cpu')",
        )


@simulated
def far_put(dst, src, nbytes, peer, _semantic=None):
    """Let the network copy `nbytes` from my `src` into `dst` of rank `peer`, a number in the world of all ranks.
    nvshmem_putmem_nbi."""
    _not_compiled("pl.put")


@simulated
def far_put_signal(dst, src, nbytes, ptr, value, peer, op, _semantic=None):
    """`far_put`, then add `value` to the counter. op: "add". nvshmem_putmem_signal_nbi."""
    _not_compiled("pl.put_signal")


@simulated
def far_signal(ptr, value, peer, op, _semantic=None):
    """Add `value` to rank `peer`'s counter. op: "add". nvshmemx_signal_op."""
    _not_compiled("pl.signal")


@simulated
def far_fence(_semantic=None):
    """Order my earlier far calls to each rank before my later ones to the same rank. nvshmem_fence."""
    _not_compiled("pl.fence(world)")


@simulated
def far_quiet(_semantic=None):
    """Wait until all my far calls are complete. nvshmem_quiet."""
    _not_compiled("pl.quiet(world)")
