"""The same launch again with other addresses, without the work that Triton repeats for each launch.

`kernel[grid](...)` binds and specialises every argument, asks the driver about every pointer and encodes every tensor
descriptor. On an H200's host this takes 15 to 20 us, and 60 to 80 us for a kernel with a dozen descriptors; the kernel
itself may take 7 us. Between the launches of a plan nothing changes but the addresses, and often not even those.

`repeated` calls the function in C that Triton's launcher calls, with the same arguments, an address for each pointer.
That function is internal to Triton, so this is enabled only for releases that were checked. For other releases, and
whenever anything else has changed, `repeat` launches nothing and returns None, and the caller lets Triton launch.
Triton's check that the kernel's globals still have their values is left out.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import _allocation, driver
from triton.runtime.jit import JITFunction

from pkt.language.world import DeviceWorld

KNOWN = triton.__version__.startswith("3.6.")
"""Whether the launcher of this release of Triton was checked to take the arguments that are passed here."""
MOST_ENCODED = 16
"""Addresses for which the encoding of a descriptor is kept."""

_lasting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The descriptors that `lasts` was told of, by id: they are compared by their contents, so no set can hold them."""

_run = JITFunction.run

Repeat = Callable[[tuple[Any, ...], int], Any]
Take = Callable[[Any], Any]
"""take(argument): the value to pass for it, or OTHER if another kernel might have to be compiled for it."""
OTHER = object()


def repeated(kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Repeat:
    """repeat(args, stream): launch `compiled` again on the stream with this handle, as kernel.run(*args, **named) has
    just done, and return it. Returns None, with nothing launched, if these arguments might need another kernel.

    Tensors, and the tensors of descriptors, may be others of the same dtype and the same alignment to 16 bytes. All
    other arguments have to be equal. A descriptor has to be the same object, and only its `base` may change; not even
    that if it `lasts`.
    """
    found = _in_c(kernel, compiled.run)
    if found is None:
        return lambda args, stream: None
    launch, encodings = found
    moving, fixed, passed = _arguments(kernel, args, named, encodings)
    launcher, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = (*grid, 1, 1)[:3]
    scratch, align = launcher.global_scratch_size * x * y * z * launcher.num_ctas, launcher.global_scratch_align
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl

    def repeat(args: tuple[Any, ...], stream: int) -> Any:
        if _watched(kernel):
            return None
        for at, value in fixed:
            if args[at] is not value and not _equal(args[at], value):
                return None
        now = passed.copy()
        for at, place, take in moving:
            found = now[place] = take(args[at])
            if found is OTHER:
                return None
        room = _allocation._allocator.get()(scratch, align, stream) if scratch else None
        launch(x, y, z, stream, function, cooperative, pdl, room, None, packed, None, None, None, *now)
        return compiled

    return repeat


def lasts(descriptor: Any) -> Any:
    """`descriptor`, whose tensor and its address stay the same as long as it is launched with: of a buffer of pkt's.
    A kernel that pushes has eight of them, and looking their addresses up takes a third of the time of `repeat`."""
    _lasting[id(descriptor)] = descriptor
    return descriptor


def _watched(kernel: Any) -> bool:
    """Whether a hook wants to see each launch, or something has replaced Triton's launch."""
    return bool(kernel.pre_run_hooks) or hooked()


def hooked() -> bool:
    """Whether a hook wants to see the launches of all kernels, or something has replaced Triton's launch."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Triton's chain of hooks has `calls`; a user may have put a function in its place.
    return bool(getattr(before, "calls", True) or getattr(after, "calls", True)) or JITFunction.run is not _run


def _in_c(kernel: Any, launcher: Any) -> tuple[Callable[..., None], list[Any]] | None:
    """The function in C behind `launcher`, and how Triton encodes each descriptor for it; None if Triton has to
    launch."""
    if not KNOWN or not isinstance(kernel, JITFunction) or _watched(kernel):
        return None
    if type(launcher).__name__ != "CudaLauncher" or launcher.profile_scratch_size:
        return None
    if not inspect.isfunction(launcher.launch):
        return launcher.launch, []
    # A closure in Python, which encodes the descriptors and then calls the function in C.
    inside = inspect.getclosurevars(launcher.launch).nonlocals
    encodings = inside["tensordesc_meta"]
    return None if any(how and how["fp4_padded"] for how in encodings) else (inside["launcher"], encodings)


def _arguments(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any], encodings: list[Any]
) -> tuple[list[tuple[int, int, Take]], list[tuple[int, Any]], list[Any]]:
    """The arguments that may change, as (index in `args`, index in the list passed, take); those that may not, as
    (index in `args`, value); and the list passed for `args`."""
    moving: list[tuple[int, int, Take]] = []
    fixed: list[tuple[int, Any]] = []
    passed: list[Any] = []
    remaining = iter(encodings)
    for at, name in enumerate(kernel.arg_names):
        if at >= len(args):
            passed.append(named.get(name, kernel.signature.parameters[name].default))
            continue
        value, sizes = args[at], list[Any]()
        if hasattr(value, "block_shape"):  # a descriptor, Triton's or Gluon's, which have no class in common
            how = next(remaining)
            take: Take | None = _descriptor(value, how)
            sizes = [*value.shape, *value.strides]
            if how is None:
                sizes += [value.padding == "nan", *sizes]
        else:
            take = _pointers(value)
        if take is None or _lasting.get(id(value)) is value:
            fixed.append((at, value))
        else:
            moving.append((at, len(passed), take))
        passed += [value if take is None else take(value), *sizes]
    return moving, fixed, passed


def _equal(a: Any, b: Any) -> bool:
    """Whether one kernel serves both of two arguments without pointers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(x is y or _equal(x, y) for x, y in zip(a, b))
    if isinstance(a, tl.constexpr):
        return a.value is b.value or _equal(a.value, b.value)
    return isinstance(a, (int, str)) and a == b


def _pointers(of: Any) -> Take | None:
    """How to take arguments like `of`; None if it has no pointers."""
    if isinstance(of, torch.Tensor):
        return _address(of)
    if isinstance(of, tuple):
        takes = [_pointers(x) for x in of]
        if isinstance(of, DeviceWorld):  # the world's own, whose status page lasts as long as the world
            passed = tuple(take(x) if take else x for x, take in zip(of, takes))
            return lambda world: passed if world is of else OTHER
        return _elements(of, takes) if any(takes) else None
    return None


def _address(of: torch.Tensor) -> Take:
    """How to take a tensor like `of`."""
    dtype, aligned = of.dtype, of.data_ptr() % 16 == 0

    def take(tensor: Any) -> Any:
        if getattr(tensor, "dtype", None) is not dtype:  # by its dtype, because isinstance is slow where it says no
            return OTHER
        found = tensor.data_ptr()
        return found if (found % 16 == 0) is aligned else OTHER

    return take


def _elements(of: tuple[Any, ...], takes: list[Take | None]) -> Take:
    """How to take a tuple like `of`, element by element. Keeps no tensor."""
    kind, fixed = type(of), [None if take else x for x, take in zip(of, takes)]

    def take_all(values: Any) -> Any:
        if type(values) is not kind or len(values) != len(takes):
            return OTHER
        found = []
        for value, take, wanted in zip(values, takes, fixed):
            if take is not None:
                value = take(value)
                if value is OTHER:
                    return OTHER
            elif value is not wanted and not _equal(value, wanted):
                return OTHER
            found.append(value)
        return tuple(found)

    return take_all


def _descriptor(of: Any, how: dict[str, Any] | None) -> Take:
    """How to take the descriptor `of`: the address of its tensor if `how` is None, else encoded as `how` says."""
    if how is None:
        address = _address(of.base)
        return lambda descriptor: address(of.base) if descriptor is of else OTHER
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    dtype, kept = of.base.dtype, dict[int, Any]()
    encode = driver.active.utils.fill_tma_descriptor
    form = how["swizzle"], how["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]], how["block_size"]
    extent = of.shape, of.strides, int(of.padding == "nan")

    def encoded(descriptor: Any) -> Any:
        if descriptor is not of or of.base.dtype is not dtype:
            return OTHER
        at = of.base.data_ptr()
        found = kept.get(at)
        if found is None:
            if len(kept) == MOST_ENCODED:
                kept.clear()
            found = kept[at] = encode(at, *form, *extent)
        return found

    return encoded
