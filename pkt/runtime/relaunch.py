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
from triton import knobs
from triton.runtime import _allocation, driver
from triton.runtime.jit import JITFunction

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this is a release of Triton whose launcher takes what is passed here."""
MOST_ENCODED = 16
"""Addresses for which a descriptor is kept encoded."""

_run = JITFunction.run

Repeat = Callable[[tuple[Any, ...], int], Any]


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
        for at, place, address in moved:
            found = address(args[at])
            if found is None:
                return None
            now[place] = found
        room = _allocation._allocator.get()(scratch, align, stream) if scratch else None
        launch(x, y, z, stream, function, cooperative, pdl, room, None, packed, None, None, None, *now)
        return compiled

    return repeat


def _watched() -> bool:
    """Whether somebody wants to see each launch, or has put another one in its place."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return JITFunction.run is not _run or bool(getattr(before, "calls", True) or getattr(after, "calls", True))


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (int, float, str)) and a == b


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
) -> tuple[list[tuple[int, int, Callable[[Any], Any]]], list[tuple[int, Any]], list[Any]]:
    """Of the arguments those that may move, by their place in `args` and in what is passed, and what is passed for one;
    those that may not, likewise; and what is passed."""
    moved: list[tuple[int, int, Callable[[Any], Any]]] = []
    fixed: list[tuple[int, Any]] = []
    passed: list[Any] = []
    meta = iter(metas)
    for at, name in enumerate(kernel.arg_names):
        value = args[at] if at < len(args) else named.get(name, kernel.signature.parameters[name].default)
        if hasattr(value, "block_shape"):
            how = next(meta)
            address = _address(value.base) if how is None else _encoded(value, how)
            base = (lambda d, address=address: address(d.base)) if how is None else address
            moved.append((at, len(passed), base))
            sizes = [*value.shape, *value.strides]
            passed += [base(value), *([*sizes, value.padding == "nan"] if how is None else []), *sizes]
        elif hasattr(value, "data_ptr"):
            address = _address(value)
            moved.append((at, len(passed), address))
            passed.append(address(value))
        else:
            if at < len(args):
                fixed.append((at, value))
            passed.append(_addresses(value))
    return moved, fixed, passed


def _address(of: Any) -> Callable[[Any], int | None]:
    """address(tensor), of one like `of`; None where another kernel might be compiled for it."""
    dtype, aligned = of.dtype, of.data_ptr() % 16 == 0

    def address(tensor: Any) -> int | None:
        if getattr(tensor, "dtype", None) is not dtype:
            return None
        found: int = tensor.data_ptr()
        return found if (found % 16 == 0) is aligned else None

    return address


def _encoded(of: Any, how: dict[str, Any]) -> Callable[[Any], Any]:
    """encoded(descriptor) of one whose `base` alone changes."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    dtype, kept = of.base.dtype, dict[int, Any]()
    encode = driver.active.utils.fill_tma_descriptor
    shape, strides, padding = of.shape, of.strides, int(of.padding == "nan")
    element = TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]]

    def encoded(descriptor: Any) -> Any:
        if descriptor is not of or of.base.dtype is not dtype:
            return None
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


def _addresses(value: Any) -> Any:
    """A tuple's pointers as addresses; they are the world's, or of the plan."""
    if isinstance(value, tuple):
        inside = [_addresses(v) for v in value]
        return type(value)(*inside) if hasattr(value, "_fields") else tuple(inside)
    return value.data_ptr() if hasattr(value, "data_ptr") else value
