"""The loads, fences and barriers that order a program's accesses."""

from __future__ import annotations

from typing import Any

from triton.language import core

from .primitive import asm, capability, plain, primitive, simulated

SIGNAL_MARKER = "// pkt.signal"
"""Comment in the assembly of a signal, which the compiler may drop; `pkt.language.inspect` counts it."""


@simulated
def load_relaxed(ptr, _semantic=None):
    """`ld.relaxed.sys.global.{b32,b64}` of a scalar or a block, in every thread."""
    bits = ptr.dtype.element_ty.primitive_bitwidth
    if bits not in (32, 64):
        raise ValueError(f"load_relaxed reads 32 or 64 bits, not {ptr.dtype.element_ty}")
    register = "r" if bits == 32 else "l"
    return asm(f"ld.relaxed.sys.global.b{bits} $0, [$1];", f"={register},l", [ptr], ptr.dtype.element_ty, _semantic)


@simulated
def prefetch(ptr, mask, _semantic=None):
    """`prefetch.global.L2` of the cache line at each pointer, where the mask is true. The simulator has no caches."""
    if mask is None:
        asm("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr], core.int32, _semantic)
        return
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    mask = core.cast(_semantic.to_tensor(mask), core.int32, _semantic=_semantic)
    asm(text, "=r,l,r", [ptr, mask], core.int32, _semantic)


@simulated
def fence(sc=False, _semantic=None):
    """`fence.acq_rel.sys`, or `fence.sc.sys` if `sc`, in every thread."""
    asm(f"fence.{'sc' if sc else 'acq_rel'}.sys; mov.b32 $0, 0;", "=r", [], core.int32, _semantic)


@simulated
def proxy_fence(world, _semantic=None):
    """Order the program's later TMA accesses, and with `world.multicast` those through the multicast window, after
    everything this thread has acquired: `fence.proxy.async.global`, `fence.proxy.alias`."""
    fences = proxy_fences(world, _semantic)
    if fences:
        asm(f"{fences} mov.b32 $0, 0;", "=r", [], core.int32, _semantic)


@simulated
def drain(world, pending=0, _semantic=None):
    """Wait until this thread's TMA stores have been performed, not only read from shared memory, and order them and its
    stores through the multicast window before its next accesses: `cp.async.bulk.wait_group 0` and the proxy fences.

    The compiler may drop this part of a signal, so it carries the marker. world=None: as if
    `world.multicast`. pending: number of this thread's newest TMA stores (commit groups) that need not be performed."""
    lines = [SIGNAL_MARKER]
    if capability(_semantic) >= 90:
        lines.append(f"cp.async.bulk.wait_group {pending};")
    lines.append(proxy_fences(world, _semantic))
    lines.append("mov.b32 $0, 0;")
    asm("\n".join(line for line in lines if line), "=r", [], core.int32, _semantic)


def proxy_fences(world: Any, semantic: Any) -> str:
    # TMA is a proxy of its own (async). So is each virtual address of one memory: mine, and the multicast window's.
    fences = ["fence.proxy.async.global;"] if capability(semantic) >= 90 else []
    if world is None or plain(world.multicast):
        fences.append("fence.proxy.alias;")
    return "\n".join(fences)


@primitive
def cta_barrier(_semantic=None):
    """`bar.sync` of the program's threads, or in a Gluon partition of the partition's threads. `tl.debug_barrier` under
    a name that works in Gluon, too."""
    core.debug_barrier(_semantic=_semantic)
