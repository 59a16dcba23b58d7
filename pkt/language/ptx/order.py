"""Loads, fences and barriers: what orders a program's accesses."""

from __future__ import annotations

from typing import Any

from triton.language import core

from .primitive import asm, capability, plain, primitive, simulator

SIGNAL_MARKER = "// pkt.signal"
"""In the assembly of what may be lost in compilation; `pkt.language.inspect` looks for it."""


@primitive
def load_relaxed(ptr, _semantic=None):
    """`ld.relaxed.sys.global.{b32,b64}` of a scalar or a block, in every thread."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.load_relaxed(ptr)
    bits = ptr.dtype.element_ty.primitive_bitwidth
    if bits not in (32, 64):
        raise ValueError(f"load_relaxed reads 32 or 64 bits, not {ptr.dtype.element_ty}")
    register = "r" if bits == 32 else "l"
    return asm(f"ld.relaxed.sys.global.b{bits} $0, [$1];", f"={register},l", [ptr], ptr.dtype.element_ty, _semantic)


@primitive
def fence(_semantic=None):
    """`fence.acq_rel.sys`, in every thread."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.fence()
    asm("fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def proxy_fence(world, _semantic=None):
    """What the program accesses later by TMA (and, where `world.multicast`, through the multicast window) is ordered
    after what this thread has acquired: `fence.proxy.async.global`, `fence.proxy.alias`."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.proxy_fence()
    fences = proxy_fences(world, _semantic)
    if fences:
        asm(f"{fences} mov.b32 $0, 0;", "=r", [], core.int32, _semantic)
    return None


@primitive
def drain(world, pending=0, _semantic=None):
    """This thread's TMA stores have been performed, not only read from shared memory, and are, with its stores
    through the multicast window, ordered before what it does next: `cp.async.bulk.wait_group 0` and the proxy fences.
    The part of a signal that may be lost in compilation, so it carries the marker. world=None: as if
    `world.multicast`. pending: newest TMA stores (commit groups) of this thread that need not have been performed."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.drain()
    lines = [SIGNAL_MARKER]
    if capability(_semantic) >= 90:
        lines.append(f"cp.async.bulk.wait_group {pending};")
    lines.append(proxy_fences(world, _semantic))
    lines.append("mov.b32 $0, 0;")
    asm("\n".join(line for line in lines if line), "=r", [], core.int32, _semantic)
    return None


def proxy_fences(world: Any, semantic: Any) -> str:
    # The async proxy is TMA's; one memory at two virtual addresses, mine and the multicast window's, is two as well.
    fences = ["fence.proxy.async.global;"] if capability(semantic) >= 90 else []
    if world is None or plain(world.multicast):
        fences.append("fence.proxy.alias;")
    return "\n".join(fences)


@primitive
def cta_barrier(_semantic=None):
    """`bar.sync` of the program's threads; in a Gluon partition, of the partition's. `tl.debug_barrier` under a name
    that Gluon's module has too."""
    core.debug_barrier(_semantic=_semantic)
    return None
