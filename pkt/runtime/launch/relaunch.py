"""The same launch again with other addresses, past what Triton does anew for each.

`kernel[grid](...)` binds and specialises every argument, asks the driver about every pointer and encodes every tensor
descriptor: on an H200's host 15 to 20 us, and 60 to 80 for a kernel with a dozen descriptors, while what it computes
may take 7. Of a plan's launches all of that is the same but for the addresses, and often for them, too.

What is passed here is what Triton's own launcher passes on, an address for each pointer. It is Triton's inside, so it
is done for releases that were looked at; for others, and where anything has changed, `repeat` says no, and Triton
launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import _allocation, driver
from triton.runtime.jit import JITFunction

from pkt.language.world import DeviceWorld

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this is a release of Triton whose launcher takes what is passed here."""
MOST_ENCODED = 16
"""Addresses for which a descriptor is kept encoded."""

_run = JITFunction.run

Repeat = Callable[[tuple[Any, ...], int], Any]
Take = Callable[[Any], Any]
"""take(argument): what is passed for it; OTHER where another kernel might be compiled for it."""
OTHER = object()


def repeated(kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Repeat:
    """repeat(args, stream): launch `compiled` again, as kernel.run(*args, **named) has just done, on a stream by its
    handle, and return it; None, with nothing launched, where these arguments might need another kernel.

    Pointers and the tensors of descriptors may be others, of the same dtype and the same alignment to 16 bytes; what
    else is passed has to be the same. A descriptor is one of the plan's, of which nothing but its `base` changes.
    """
    raw = _raw(kernel, compiled)
    if raw is None:
        return lambda args, stream: None
    launch, metas = raw
    moved, fixed, passed = _laid_out(kernel, args, named, metas)
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = (*grid, 1, 1)[:3]
    scratch, align = launcher.global_scratch_size * x * y * z * launcher.num_ctas, launcher.global_scratch_align
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl

    def repeat(args: tuple[Any, ...], stream: int) -> Any:
        if _watched():
            return None
        for at, value in fixed:
            if args[at] is not value and not _same(args[at], value):
                return None
        now = passed.copy()
        for at, place, take in moved:
            found = now[place] = take(args[at])
            if found is OTHER:
                return None
        room = _allocation._allocator.get()(scratch, align, stream) if scratch else None
        launch(x, y, z, stream, function, cooperative, pdl, room, None, packed, None, None, None, *now)
        return compiled

    return repeat


def _watched() -> bool:
    """Whether somebody wants to see each launch, or has put another one in its place."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return JITFunction.run is not _run or bool(getattr(before, "calls", True) or getattr(after, "calls", True))


def _same(a: Any, b: Any) -> bool:
    """Of what is no tensor: whether one kernel serves both."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(x is y or _same(x, y) for x, y in zip(a, b))
    if isinstance(a, tl.constexpr):
        return a.value is b.value or _same(a.value, b.value)
    return isinstance(a, (int, str)) and a == b


def _raw(kernel: Any, compiled: Any) -> tuple[Callable[..., None], list[Any]] | None:
    """What launches in C, and how each descriptor is encoded; None where Triton is to launch."""
    if not KNOWN or _watched() or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        return None
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or launcher.profile_scratch_size:
        return None
    launch = launcher.launch
    if not inspect.isfunction(launch):
        return launch, []
    kept = inspect.getclosurevars(launch).nonlocals  # it encodes the descriptors, and then calls the one in C
    metas = kept["tensordesc_meta"]
    return None if any(meta and meta["fp4_padded"] for meta in metas) else (kept["launcher"], metas)


def _laid_out(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any], metas: list[Any]
) -> tuple[list[tuple[int, int, Take]], list[tuple[int, Any]], list[Any]]:
    """Of the arguments those that may move: where in `args`, where in what is passed, and how they are taken; those
    that may not; and what is passed."""
    moved: list[tuple[int, int, Take]] = []
    fixed: list[tuple[int, Any]] = []
    passed: list[Any] = []
    meta = iter(metas)
    for at, name in enumerate(kernel.arg_names):
        if at >= len(args):
            passed.append(named.get(name, kernel.signature.parameters[name].default))
            continue
        value = args[at]
        described = hasattr(value, "block_shape")
        how = next(meta) if described else None
        take = _described(value, how) if described else _taken(value)
        if take is None:
            fixed.append((at, value))
            passed.append(value)
        else:
            moved.append((at, len(passed), take))
            passed.append(take(value))
        if described:
            sizes = [*value.shape, *value.strides]
            passed += sizes if how else [*sizes, value.padding == "nan", *sizes]
    return moved, fixed, passed


def _taken(of: Any) -> Take | None:
    """How what is like `of` is taken; None where it has no pointers, and may not move."""
    if hasattr(of, "data_ptr"):
        return _address(of)
    if isinstance(of, DeviceWorld):  # it stays while there are launches, its status page too
        passed = tuple(take(x) if (take := _taken(x)) else x for x in of)
        return lambda world: passed if world is of else OTHER
    if isinstance(of, tuple):
        takes = [_taken(x) for x in of]
        return _each(of, takes) if any(takes) else None
    return None


def _address(of: Any) -> Take:
    """Of a tensor."""
    dtype, aligned = of.dtype, of.data_ptr() % 16 == 0

    def address(tensor: Any) -> Any:
        if getattr(tensor, "dtype", None) is not dtype:
            return OTHER
        found = tensor.data_ptr()
        return found if (found % 16 == 0) is aligned else OTHER

    return address


def _each(of: tuple[Any, ...], takes: list[Take | None]) -> Take:
    """Of a tuple with tensors, which are not kept."""
    kind, fixed = type(of), [None if take else x for x, take in zip(of, takes)]

    def each(values: Any) -> Any:
        if type(values) is not kind or len(values) != len(takes):
            return OTHER
        found = []
        for value, take, same in zip(values, takes, fixed):
            if take is None:
                if value is not same and not _same(value, same):
                    return OTHER
                found.append(value)
            else:
                found.append(take(value))
                if found[-1] is OTHER:
                    return OTHER
        return tuple(found)

    return each


def _described(of: Any, how: dict[str, Any] | None) -> Take:
    """Of a descriptor: its tensor's address where how is None, else encoded so."""
    if how is None:
        address = _address(of.base)
        return lambda descriptor: address(of.base) if descriptor is of else OTHER
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    dtype, kept = of.base.dtype, dict[int, Any]()
    encode = driver.active.utils.fill_tma_descriptor
    shape, strides, padding = of.shape, of.strides, int(of.padding == "nan")
    element = TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]]

    def encoded(descriptor: Any) -> Any:
        if descriptor is not of or of.base.dtype is not dtype:
            return OTHER
        at = of.base.data_ptr()
        found = kept.get(at)
        if found is None:
            if len(kept) == MOST_ENCODED:
                kept.clear()
            found = kept[at] = encode(
                at, how["swizzle"], how["elem_size"], element, how["block_size"], shape, strides, padding
            )
        return found

    return encoded
