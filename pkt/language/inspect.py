"""Looking at what a kernel was compiled to: without a GPU, and for every compilation of the process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.language import core
from triton.runtime import driver

from .ptx import SIGNAL_MARKER, WAIT_MARKER
from .world import DeviceWorld, code_hash

MARKERS = {WAIT_MARKER: "wait", SIGNAL_MARKER: "signal"}
"""Comment in the assembly -> the call it stands for, as an error names it."""


class Pointer:
    """Stands for a tensor where only its type matters: `Pointer("bf16")`. Aligned to 16 bytes unless told otherwise."""

    def __init__(self, dtype: str, address: int = 4096) -> None:
        self.dtype = dtype
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Target:
    """A driver that names a target and does nothing else: enough to compile, nothing to run on."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> str:
        # The key of the kernel's cache: never a real device's.
        return f"sm_{self.arch}"

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def _targeting(arch: int) -> Iterator[None]:
    # `driver.active` would look for a GPU; what is there may be nothing yet, and is put back as it was.
    before = driver._active
    driver.set_active(_Target(arch))
    try:
        yield
    finally:
        driver._active = before


def device_world(
    rank: int = 0, size: int = 4, stride: int = 1 << 38, multicast: bool = False, code: int | None = None
) -> DeviceWorld:
    """A `world` argument to compile with, of the given constants; the status page is an aligned pointer."""
    return DeviceWorld(
        rank=rank,
        size=core.constexpr(size),
        stride=core.constexpr(stride),
        multicast=core.constexpr(multicast),
        status=Pointer("int32"),
        code=core.constexpr(code_hash() if code is None else code),
    )


def compile_only(
    kernel: Any, *args: Any, arch: int = 90, grid: tuple[int, ...] = (1,), **kwargs: Any
) -> triton.compiler.CompiledKernel:
    """Compile `kernel` for sm_`arch` through the ordinary JIT path, on any machine; returns what a launch would run.

    kernel: a @triton.jit or @gluon.jit function; args, kwargs: as for a launch, where a string "*bf16" stands for an
    aligned pointer to bf16 and `device_world()` for the world. `.asm` of the result has "ttir", "ttgir", "llir",
    "ptx" and "cubin"; `.metadata.shared` the shared memory in bytes. The active driver is left as it was. Raises
    LostSync when the compiler dropped a wait or a signal.
    """

    def argument(x: Any) -> Any:
        return Pointer(x[1:]) if isinstance(x, str) and x.startswith("*") else x

    with _targeting(arch):
        compiled = kernel.warmup(*(argument(x) for x in args), grid=grid, **{k: argument(x) for k, x in kwargs.items()})
    check_sync(compiled.asm, compiled.metadata.name)
    return compiled


def count_markers(text: str) -> dict[str, int]:
    """How many waits and signals a stage of compilation holds: {"wait": n, "signal": m}."""
    return {call: len(re.findall(re.escape(marker) + r"\b", text)) for marker, call in MARKERS.items()}


def check_sync(asm: Mapping[str, str], kernel: str = "kernel") -> None:
    """Raise errors.LostSync if a wait or signal of the source did not reach the PTX, or stands where it has no effect.

    asm: stage -> text, as `CompiledKernel.asm`; Gluon has no "ttir", its "ttgir" is the source.

    In `tl.range(warp_specialize=True)` Triton drops the assembly without a word on sm_90 (in the passes from TTIR to
    TTGIR) and lets TMA loads pass it on sm_100; at other numbers of warps it keeps it. So a call in such a loop is an
    error whatever became of it. From TTGIR to PTX only a call that is gone altogether is one: LLVM may merge the
    calls at the end of two branches into one behind them, or unroll a loop and make more of it.
    """
    ttir, ttgir, ptx = (asm.get(stage, "") for stage in ("ttir", "ttgir", "ptx"))
    specialized = count_markers("\n".join(_specialized_loops(ttir)))
    source, middle, final = count_markers(ttir or ttgir), count_markers(ttgir or ttir), count_markers(ptx)
    for call in MARKERS.values():
        lost = middle[call] < source[call] or (ptx and source[call] and not final[call])
        if specialized[call] or lost:
            from pkt.errors import LostSync

            if specialized[call]:
                raise LostSync.specialized(kernel, call, specialized[call])
            raise LostSync.compiled(kernel, call, source[call], min(middle[call], final[call]) if ptx else middle[call])


def _specialized_loops(ttir: str) -> Iterator[str]:
    """The bodies of the loops that TTIR marks `tt.warp_specialize`, found by indentation."""
    lines = ttir.splitlines()
    for end, line in enumerate(lines):
        if re.match(r"\s*\} \{[^}]*tt\.warp_specialize", line):
            indent = line[: len(line) - len(line.lstrip())]
            start = end - 1
            while start > 0 and not re.match(rf"{indent}(%\S+ = )?scf\.(for|while)\b", lines[start]):
                start -= 1
            yield "\n".join(lines[start:end])


class _Listener:
    """`knobs.compilation.listener` that checks each compilation, after the listener that was there before."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Mapping[str, str], **rest: Any) -> None:
        if self.before is not None:
            self.before(src=src, metadata=metadata, metadata_group=metadata_group, **rest)
        asm = {}
        for path in metadata_group.values():
            stage = Path(str(path)).suffix[1:]
            if stage in ("ttir", "ttgir", "ptx"):
                asm[stage] = Path(path).read_text()
        check_sync(asm, metadata.get("name", "kernel"))


def install_listener() -> None:
    """Check every kernel that this process compiles or takes from Triton's cache; a lost wait or signal then raises
    errors.LostSync at its first launch. Idempotent; keeps a listener that was installed before. Not possible with
    TRITON_STORE_BINARY_ONLY, where the cache holds no text."""
    if not isinstance(triton.knobs.compilation.listener, _Listener):
        triton.knobs.compilation.listener = _Listener(triton.knobs.compilation.listener)


def remove_listener() -> None:
    """Undo `install_listener`, if no other listener was installed over it."""
    if isinstance(triton.knobs.compilation.listener, _Listener):
        triton.knobs.compilation.listener = triton.knobs.compilation.listener.before
