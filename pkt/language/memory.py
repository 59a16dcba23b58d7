"""Loads, stores, copies and atomics on any rank's copy of a symmetric tensor.

Pointers are into my own heap; `peer` is the rank whose copy is accessed. Blocks and masks are those of `tl`. Plain
accesses have no order of their own: `signal` publishes them, and they are visible after `wait`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, nodes, ptx

_ACQ_REL = tl.constexpr("acq_rel")
_SYS = tl.constexpr("sys")


@triton.jit
def load(ptr, peer, world, mask=None, other=None):
    """The values at `ptr` of rank `peer`'s copy, as `tl.load`: `ld.global`, up to 16 bytes a thread.

    ptr: scalar or block of pointers; mask: bool block; other: value where the mask is false.
    """
    return tl.load(address.near(ptr, peer, world, "pl.load"), mask=mask, other=other)


@triton.jit
def store(ptr, value, peer, world, mask=None):
    """Store into rank `peer`'s copy, as `tl.store`: `st.global`, up to 16 bytes a thread. Visible after a `signal`."""
    tl.store(address.near(ptr, peer, world, "pl.store"), value, mask=mask)


@triton.jit
def copy(dst, src, to_rank, from_rank, world, mask=None):
    """Copy rank `from_rank`'s `src` into rank `to_rank`'s `dst` through registers. Any two ranks; blocks of equal shape
    and element type."""
    value = tl.load(address.near(src, from_rank, world, "pl.copy"), mask=mask)
    tl.store(address.near(dst, to_rank, world, "pl.copy"), value, mask=mask)


@triton.jit
def get(peer, world, mask=None, dst=None, src=None):
    """Copy rank `peer`'s `src` into my `dst`. Name both pointers: `pl.get(dst=y, src=x, peer=1, world=world)`."""
    tl.static_assert(dst is not None and src is not None, "name the pointers: pl.get(dst=, src=, peer=, world=)")
    tl.store(dst, tl.load(address.near(src, peer, world, "pl.get"), mask=mask), mask=mask)


@triton.jit
def put(peer, world, mask=None, dst=None, src=None, nbytes=None, BLOCK: tl.constexpr = 1024):
    """Copy my `src` into rank `peer`'s `dst`. Visible there after a `signal`. Name both pointers, as in `get`: other
    libraries put the source first.

    Without `nbytes` the pointers are scalars or blocks, and `peer` is on this node. With it they are scalars: a run of
    `nbytes`, a multiple of the element size, goes to a rank on any node, on this one BLOCK elements at a time. Both
    runs lie in the symmetric heap. To a rank of another node the network carries it: the data comes later than a
    `signal` unless `fence(world=world)` or `quiet(world)` stands between, and `src` may be written again only after
    `quiet(world)`, or after an answer of the rank that saw it. See pkt.language.nodes.
    """
    tl.static_assert(dst is not None and src is not None, "name the pointers: pl.put(dst=, src=, peer=, world=)")
    if nbytes is None:
        tl.store(address.near(dst, peer, world, "pl.put"), tl.load(src, mask=mask), mask=mask)
    else:
        tl.static_assert(mask is None, "a run of nbytes takes no mask")
        nodes.put(dst, src, nbytes, peer, world, BLOCK)


@triton.jit
def prefetch(ptr, mask=None):
    """Ask for the cache line at each `ptr` to be brought into L2, and wait for nothing: `prefetch.global.L2`.

    ptr: scalar or block of pointers into this GPU's memory, one for each line of 128 bytes; mask: bool block. Changes
    no result. A program that must wait for other ranks first prefetches what it will read then.
    """
    ptx.prefetch(ptr, mask)


@triton.jit
def _before_release(sem: tl.constexpr):
    # One thread executes an atomic on a scalar. Before a release all threads must have done their accesses, and Triton
    # 3.6 puts no barrier there.
    if sem == "release" or sem == "acq_rel":
        ptx.cta_barrier()


@triton.jit
def _words(ptr):
    # As integers: adding 0 to a float would change -0.0.
    size: tl.constexpr = ptr.dtype.scalar.element_ty.primitive_bitwidth
    tl.static_assert(size == 32 or size == 64, "an element of 32 or 64 bits")
    if size == 32:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr.to(tl.pointer_type(tl.int64))


@triton.jit
def _read(ptr, sem: tl.constexpr, scope: tl.constexpr):
    found = tl.atomic_add(_words(ptr), 0, sem=sem, scope=scope)
    return found.to(ptr.dtype.scalar.element_ty, bitcast=True)


@triton.jit
def _write(ptr, value, sem: tl.constexpr, scope: tl.constexpr):
    words = _words(ptr)
    value = tl.cast(value, ptr.dtype.scalar.element_ty).to(words.dtype.scalar.element_ty, bitcast=True)
    tl.atomic_xchg(words, value, sem=sem, scope=scope)


@triton.jit
def load_acquire(ptr, peer, world, scope: tl.constexpr = _SYS):
    """The value at `ptr` of rank `peer`'s copy. What was done before the release that wrote it is visible afterwards.

    ptr: scalar or block of pointers to elements of 32 or 64 bits; scope: "sys", or "gpu" where only programs of one GPU
    meet. One thread reads a scalar and tells the others, so that the value may steer control flow:
    an atomic addition of 0, which Triton compiles to `ld.global.<scope>.acquire`, then `bar.sync`. It does not order
    TMA loads, and a loop around it has no deadline: `wait` has both.
    """
    found = _read(address.near(ptr, peer, world, "pl.load_acquire"), "acquire", scope)
    ptx.cta_barrier()
    return found


@triton.jit
def load_relaxed(ptr, peer, world, scope: tl.constexpr = _SYS):
    """As `load_acquire`, without its order. Unlike `load`, it may meet stores of other programs."""
    return _read(address.near(ptr, peer, world, "pl.load_relaxed"), "relaxed", scope)


@triton.jit
def store_release(ptr, value, peer, world, scope: tl.constexpr = _SYS):
    """Publish the plain accesses that this program has done, then store `value` into rank `peer`'s copy.

    ptr, scope: as for `load_acquire`. `bar.sync`, `atom.global.release.<scope>.exch`, for a scalar in one thread. It
    does not wait for TMA stores: `signal` does.
    """
    _before_release("release")
    _write(address.near(ptr, peer, world, "pl.store_release"), value, "release", scope)


@triton.jit
def store_relaxed(ptr, value, peer, world, scope: tl.constexpr = _SYS):
    """As `store_release`, without its order. Unlike `store`, other programs may load or store the element meanwhile."""
    _write(address.near(ptr, peer, world, "pl.store_relaxed"), value, "relaxed", scope)


@triton.jit
def atomic_add(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr += value` on rank `peer`; returns the old value. `atom.global.<sem>.sys.add`.

    ptr: scalar or block of pointers to 32- or 64-bit integers or floats, fp16 or bf16; sem: "relaxed", "acquire",
    "release", "acq_rel"; scope: "sys", or "gpu" where only programs of one GPU meet. A release covers the plain
    accesses of the whole program, but not its TMA stores: use `signal` for those. The other atomics are alike.
    """
    _before_release(sem)
    return tl.atomic_add(address.near(ptr, peer, world, "pl.atomic_add"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def _as_element(value, ptr):
    """`value` in the type and the shape of what `ptr` points to: `tl.atomic_cas` alone casts nothing."""
    value = tl.cast(value, ptr.dtype.element_ty)
    if ptr.type.is_block():
        value = tl.broadcast_to(value, ptr.shape)
    return value


@triton.jit
def atomic_cas(ptr, expected, value, peer, world, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr = value` on rank `peer` if it is `expected`; returns the old value. `atom.global.<sem>.sys.cas`. Takes no
    mask, like `tl.atomic_cas`."""
    _before_release(sem)
    at = address.near(ptr, peer, world, "pl.atomic_cas")
    return tl.atomic_cas(at, _as_element(expected, at), _as_element(value, at), sem=sem, scope=scope)


@triton.jit
def atomic_xchg(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr = value` on rank `peer`; returns the old value. `atom.global.<sem>.sys.exch`."""
    _before_release(sem)
    return tl.atomic_xchg(address.near(ptr, peer, world, "pl.atomic_xchg"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_and(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr &= value` on rank `peer`; returns the old value. `atom.global.<sem>.sys.and`."""
    _before_release(sem)
    return tl.atomic_and(address.near(ptr, peer, world, "pl.atomic_and"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_or(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr |= value` on rank `peer`; returns the old value. `atom.global.<sem>.sys.or`."""
    _before_release(sem)
    return tl.atomic_or(address.near(ptr, peer, world, "pl.atomic_or"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_xor(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr ^= value` on rank `peer`; returns the old value. `atom.global.<sem>.sys.xor`."""
    _before_release(sem)
    return tl.atomic_xor(address.near(ptr, peer, world, "pl.atomic_xor"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_min(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr = min(*ptr, value)` on rank `peer`; returns the old value. `atom.global.<sem>.sys.min`."""
    _before_release(sem)
    return tl.atomic_min(address.near(ptr, peer, world, "pl.atomic_min"), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_max(ptr, value, peer, world, mask=None, sem: tl.constexpr = _ACQ_REL, scope: tl.constexpr = _SYS):
    """`*ptr = max(*ptr, value)` on rank `peer`; returns the old value. `atom.global.<sem>.sys.max`."""
    _before_release(sem)
    return tl.atomic_max(address.near(ptr, peer, world, "pl.atomic_max"), value, mask=mask, sem=sem, scope=scope)
