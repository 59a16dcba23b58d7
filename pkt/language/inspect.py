"""Compile a kernel without a GPU to look at its PTX, and check every compilation of the process for lost waits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.language import core
from triton.runtime import driver

from .ptx import SIGNAL_MARKER, WAIT_MARKER
from .world import DeviceWorld, Network, code_hash, step_of, team_constants

MARKERS = {WAIT_MARKER: "wait", SIGNAL_MARKER: "signal"}
"""Comment in the assembly -> name of its call in errors."""
ARENA = 1 << 22
"""Of `device_world` with several nodes: the bytes for counters."""


class Pointer:
    """A stand-in for a tensor where only its type matters: `Pointer("bf16")`; by default aligned to 16 bytes."""

    def __init__(self, dtype: str, address: int = 4096) -> None:
        self.dtype = dtype
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Target:
    """A driver that only names a target: enough to compile, not to run."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> str:
        # The key of the kernel's cache, which must differ from every real device's.
        return f"sm_{self.arch}"

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def targeting(arch: int) -> Iterator[None]:
    # `driver.active` would look for a GPU; `driver._active` may still be unset.
    before = driver._active
    driver.set_active(_Target(arch))
    try:
        yield
    finally:
        driver._active = before


def device_world(
    rank: int = 0,
    size: int = 4,
    stride: int = 1 << 38,
    multicast: bool = False,
    code: int | None = None,
    team: Sequence[int] | None = None,
    node_size: int = 0,
    ring: int = 0,
) -> DeviceWorld:
    """A `world` argument with the given constants to compile with; its status page is an aligned pointer. team: some of
    the `size` ranks; `rank` is then one of the team's. node_size: ranks of a node; 0 where there is one node. ring:
    windows in the ring of a node; 0: one for each of its ranks."""
    constants, members, step = (0, 0), size, 1
    if team is not None:
        constants, members, step = team_constants(team, size), len(team), step_of(team) or 1
    network, library = 0, ""
    if node_size:
        from .ptx import nvshmem

        network, library = Network(node_size, ARENA, ring or node_size).constant, nvshmem.identity()
        step = 1  # the stride is that of the ring
    return DeviceWorld(
        rank=rank,
        size=core.constexpr(members),
        stride=core.constexpr(stride * step),
        multicast=core.constexpr(multicast),
        status=Pointer("int32"),
        code=core.constexpr(code_hash(library) if code is None else code),
        team=core.constexpr(constants[0]),
        table=core.constexpr(constants[1]),
        node_size=core.constexpr(node_size),
        network=core.constexpr(network),
    )


def compile_only(
    kernel: Any, *args: Any, arch: int = 90, grid: tuple[int, ...] = (1,), **kwargs: Any
) -> triton.compiler.CompiledKernel:
    """Compile `kernel` for sm_`arch` through the ordinary JIT path, on any machine; return the kernel of a launch.

    kernel: a @triton.jit or @gluon.jit function; args, kwargs: as for a launch, where a string "*bf16" stands for an
    aligned pointer to bf16 and `device_world()` for the world. `.asm` of the result has "ttir", "ttgir", "llir", "ptx"
    and "cubin"; `.metadata.shared` is the shared memory in bytes. The active driver stays as it was. Raises LostSync if
    the compiler dropped a wait or a signal.
    """

    def argument(x: Any) -> Any:
        return Pointer(x[1:]) if isinstance(x, str) and x.startswith("*") else x

    with targeting(arch):
        compiled = kernel.warmup(*(argument(x) for x in args), grid=grid, **{k: argument(x) for k, x in kwargs.items()})
    check_sync(compiled.asm, compiled.metadata.name)
    return compiled


def count_markers(text: str) -> dict[str, int]:
    """Number of waits and signals in the text of a stage of compilation: {"wait": n, "signal": m}."""
    return {call: len(re.findall(re.escape(marker) + r"\b", text)) for marker, call in MARKERS.items()}


def repeated_waits(asm: Mapping[str, Any]) -> int:
    """Waits that a kernel of Triton has in its PTX beyond those of its source; 0 for one of Gluon. asm: as of
    `check_sync`."""
    if "ttir" not in asm:
        return 0
    source, made = (count_markers(asm[stage])["wait"] for stage in ("ttir", "ptx"))
    return max(0, made - source)


def check_sync(asm: Mapping[str, str], kernel: str = "kernel") -> None:
    """Raise errors.LostSync if a wait or signal of the source did not reach the PTX, or has no effect where it is.

    asm: stage -> text, as `CompiledKernel.asm`; Gluon has no "ttir", so its "ttgir" counts as the source.

    - Every call in `tl.range(warp_specialize=True)` is an error. There Triton drops the assembly silently on sm_90 (in
      the passes from TTIR to TTGIR), lets TMA loads pass it on sm_100, and keeps it with other numbers of warps.
    - A call that is missing in the TTGIR is an error.
    - From TTGIR to PTX the loss of all calls of a kind is an error. Their number may change: LLVM may merge the calls
      at the ends of two branches, or unroll a loop.
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
    """Yield the bodies of the loops that TTIR marks `tt.warp_specialize`, found by their indentation."""
    lines = ttir.splitlines()
    for end, line in enumerate(lines):
        if re.match(r"\s*\} \{[^}]*tt\.warp_specialize", line):
            indent = line[: len(line) - len(line.lstrip())]
            start = end - 1
            while start > 0 and not re.match(rf"{indent}(%\S+ = )?scf\.(for|while)\b", lines[start]):
                start -= 1
            yield "\n".join(lines[start:end])


class _Listener:
    """A `knobs.compilation.listener` that calls the listener installed before it, then checks the compilation."""

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
    """Check every kernel that this process compiles or takes from Triton's cache, so that a lost wait or signal raises
    errors.LostSync at its first launch. Idempotent; calls a listener that was installed before, too. Has no effect with
    TRITON_STORE_BINARY_ONLY, where the cache holds no text."""
    if not isinstance(triton.knobs.compilation.listener, _Listener):
        triton.knobs.compilation.listener = _Listener(triton.knobs.compilation.listener)
