"""The same launch again with other addresses, without the work that Triton repeats for each launch.

`kernel[grid](...)` binds and specialises every argument, asks the driver about every pointer and encodes every tensor
descriptor. On an H200's host a launch takes 18 to 62 us, and 65 to 88 us with descriptors (eager_2.json of
benchmarks/results); the kernel itself may take 7 us. Between the launches of a plan nothing changes but the addresses,
and often not even those.

`repeated` calls the function in C that Triton's launcher calls, with the same arguments, an address for each pointer.
That function is internal to Triton, so this is enabled only for releases that were checked. For other releases, and
whenever anything else has changed, `repeat` launches nothing and returns None, and the caller lets Triton launch.
Triton's check that the kernel's globals still have their values is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

from pkt.runtime.launch.passing import passing

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
KNOWN = (3, 6) <= _VERSION <= (3, 9)
"""Whether the launcher of this release of Triton was checked to take the arguments that are passed here."""

_run = JITFunction.run
_NO_HOOKS = None, None, None  # what a hook would be told, the one before and the one behind

Repeat = Callable[[tuple[Any, ...], int], Any]


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
    defaults = {name: p.default for name, p in kernel.signature.parameters.items()}
    pass_on = passing(kernel.arg_names, args, defaults | named, encodings)
    launcher, packed = compiled.run, compiled.packed_metadata
    x, y, z = (*grid, 1, 1)[:3]
    scratch, align = launcher.global_scratch_size * x * y * z * launcher.num_ctas, launcher.global_scratch_align
    how = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    if _VERSION == (3, 6):
        pass_in = lambda stream, room, now: launch(x, y, z, stream, *how, room, None, packed, *_NO_HOOKS, *now)  # noqa: E731
    else:
        types = launcher.arg_annotations, launcher.kernel_signature
        pass_in = lambda stream, room, now: launch(x, y, z, stream, *how, packed, *_NO_HOOKS, room, None, *types, now)  # noqa: E731

    def repeat(args: tuple[Any, ...], stream: int) -> Any:
        if _watched(kernel):
            return None
        now = pass_on(args)
        if now is None:
            return None
        room = _allocation._allocator.get()(scratch, align, stream) if scratch else None
        pass_in(stream, room, now)
        return compiled

    return repeat


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
    if getattr(launcher, "gsan_enabled", False):  # Triton's race detector
        return None
    if not inspect.isfunction(launcher.launch):
        return launcher.launch, []
    # A closure in Python, which encodes the descriptors and then calls the function in C.
    inside = inspect.getclosurevars(launcher.launch).nonlocals
    places = inside.get("relevant_paths", {})  # index of a descriptor, or of a tuple -> those inside
    encodings = inside["tensordesc_meta"] or [None] * len(places)
    if any(places.values()) or any(how and (how["fp4_padded"] or how.get("is_im2col")) for how in encodings):
        return None
    return inside["launcher"], encodings
