"""Calls to ranks of other nodes, which NVSHMEM's device library carries out.

The program's threads are synchronised before each of them. Then all threads move a put's bytes where NVSHMEM can store
to the rank, and one thread speaks for the program in everything else.

A rank's window is NVSHMEM's memory, at NVSHMEM's address. A counter of a world of several nodes has two lanes. Ranks of
this node add to the counter itself. The network adds to a uint64 of its own, because its atomics and those of GPUs do
not mix. `lane` finds it by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.language import core

from pkt.errors import Unsupported

from .. import world as page
from .primitive import plain, primitive, simulated, simulator

_only_types = False
_LIBRARY = "pkt_far"


@contextmanager
def only_types() -> Iterator[None]:
    """Inside the `with`, Triton's front end accepts far calls and makes nothing of them."""
    global _only_types
    outer, _only_types = _only_types, True
    try:
        yield
    finally:
        _only_types = outer


def _call(name: str, call: str, args: list, semantic: Any) -> None:
    """Call `pkt_far_<name>` with integers: all of 64 bits but the last, a rank."""
    if _only_types:
        return
    if "gluon" in type(semantic).__module__:
        raise Unsupported.here(
            f"{call} to a rank of another node",
            "found a Gluon kernel, whose partitions NVSHMEM cannot synchronise",
            "call it in a @triton.jit kernel",
        )
    from . import nvshmem  # here, because most programs have one node

    path = nvshmem.library(f"{call} to a rank of another node")
    # The options of this one compilation, which links the libraries that they name. Other kernels read nothing of it.
    options = semantic.builder.options
    libraries = dict(options.extern_libs) | {_LIBRARY: str(path)}
    object.__setattr__(options, "extern_libs", tuple(libraries.items()))
    types = [core.int64] * (len(args) - 1) + [core.int32] * bool(args)
    args = [core.cast(semantic.to_tensor(x), dtype, _semantic=semantic) for x, dtype in zip(args, types)]
    core.extern_elementwise(
        "", "", args, {tuple(types): (f"pkt_far_{name}", core.int32)}, is_pure=False, _semantic=semantic
    )


@primitive
def ring(world, _semantic=None):
    """Number of windows in the ring of this rank's node: see `Network`."""
    return core.constexpr(page.Network.of(plain(world.network)).ring)


@primitive
def lane(ptr, world, _semantic=None):
    """Pointer to the network's lane, an int64, of my counter `*ptr`. The counters of a window lie in its first `arena`
    bytes, behind the status page. Their lanes lie behind these, with twice their distance from the window's start."""
    arena = page.Network.of(plain(world.network)).arena
    start = core.cast(world.status, core.int64, _semantic=_semantic)
    at = _semantic.sub(core.cast(ptr, core.int64, _semantic=_semantic), start, False)
    at = _semantic.add(_semantic.add(at, at, False), arena, False)
    return core.cast(_semantic.add(start, at, False), core.pointer_type(core.int64), _semantic=_semantic)


@simulated
def far_put(dst, src, nbytes, peer, world, _semantic=None):
    """Let the network copy `nbytes` from my `src` into `dst` of rank `peer`, a number in the world of all ranks.
    nvshmemx_putmem_nbi_block."""
    _call("put", "pl.put", [dst, src, nbytes, peer], _semantic)


@simulated
def far_put_signal(dst, src, nbytes, ptr, value, peer, op, world, _semantic=None):
    """`far_put`, then add `value` to the counter's lane. op: "add". nvshmemx_putmem_signal_nbi_block."""
    _adds(op, "pl.put_signal")
    to = _lane_of(ptr, world, _semantic)
    _call("put_signal", "pl.put_signal", [dst, src, nbytes, to, value, peer], _semantic)


@simulated
def far_signal(ptr, value, peer, op, world, _semantic=None):
    """Add `value` to the lane of rank `peer`'s counter. op: "add". nvshmemx_signal_op, which releases nothing."""
    _adds(op, "pl.signal")
    _call("signal", "pl.signal", [_lane_of(ptr, world, _semantic), value, peer], _semantic)


@simulated
def far_fence(_semantic=None):
    """Order my earlier far calls to each rank before my later ones to the same rank. nvshmem_fence."""
    _call("fence", "pl.fence(world=world)", [], _semantic)


@simulated
def far_quiet(_semantic=None):
    """Wait until all my far calls are complete. nvshmem_quiet."""
    _call("quiet", "pl.quiet(world)", [], _semantic)


@primitive
def near_only(call, world, _semantic=None):
    """Refuse to compile a call that accesses other ranks' memory, where some are on other nodes. A simulated run, whose
    kernels are compiled before, finds the access itself."""
    if plain(world.node_size) and simulator(_semantic) is None:
        raise Unsupported.here(
            plain(call),
            "found a world of several nodes, in which only the network reaches the others' memory",
            "make the call in the team world.on_node, and send what other nodes need with pl.put_signal",
        )


def _lane_of(ptr: Any, world: Any, semantic: Any) -> Any:
    return lane(ptr, world, _semantic=semantic)


def _adds(op: str, call: str) -> None:
    if op != "add":
        raise Unsupported.here(
            f"{call}(op={op!r})",
            "found a world of several nodes, and the network only adds to counters",
            'use op="add" and wait for a count that only grows, or make the call in the team world.on_node',
        )
