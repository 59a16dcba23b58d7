"""A device library with the names and types of NVSHMEM's, made up for tests on machines without it.

It is linked as NVSHMEM's is. Each function leaves a line in the PTX instead of doing anything: `// nvshmem_quiet`. It
reads the state that NVSHMEM's host gives to a module, and holds a function that nobody calls.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from pkt.language.ptx import nvshmem

FUNCTIONS = {  # name: types of its arguments
    "nvshmemx_putmem_nbi_block": "ptr ptr i64 i32",
    "nvshmemx_putmem_signal_nbi_block": "ptr ptr i64 ptr i64 i32 i32",
    "nvshmemx_signal_op": "ptr i64 i32 i32",
    "nvshmem_fence": "",
    "nvshmem_quiet": "",
    "nvshmem_unused": "",
}
STATE = "nvshmemi_device_state_d"
_HEAD = f"""
target triple = "nvptx64-nvidia-cuda"
@{STATE} = addrspace(4) externally_initialized global i64 0, align 8
@llvm.compiler.used = appending global [1 x ptr] [ptr addrspacecast (ptr addrspace(4) @{STATE} to ptr)]
define ptr @nvshmem_ptr(ptr %to, i32 %peer) {{
  %base = load i64, ptr addrspace(4) @{STATE}
  %none = icmp eq i64 %base, 0
  %there = select i1 %none, ptr null, ptr %to
  ret ptr %there
}}
"""


def text() -> str:
    """The library as LLVM's text."""
    return _HEAD + "".join(_function(name, types.split()) for name, types in FUNCTIONS.items())


def _function(name: str, types: list[str]) -> str:
    """A function that names itself and its arguments, so that none of these is optimised away."""
    said = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(types))
    kinds = ",".join("r" if kind == "i32" else "l" for kind in types)
    values = " ".join(f"${i}" for i in range(len(types)))
    line = f'call void asm sideeffect "// {name} {values}", "{kinds}{"," if kinds else ""}~{{memory}}"({said})'
    return f"define void @{name}({said}) {{\n  {line}\n  ret void\n}}\n"


PACKAGE = f"made-up-{zlib.crc32(text().encode()):x}"
"""A name of its own for each text, by which Triton's cache tells them apart."""


def install(patch: pytest.MonkeyPatch, folder: Path, version: str = nvshmem.TRIED[-1], package: str = PACKAGE) -> Path:
    """Let pkt find the library, as that version, in `folder`, and keep what it makes of it there, too. Returns the
    folder of what is kept."""
    lib, kept = folder / "lib", folder / "kept"
    lib.mkdir(parents=True, exist_ok=True)
    (lib / "libnvshmem_device.bc").write_text(text())
    patch.setattr(nvshmem, "installed", lambda: (package, version, lib))
    patch.setattr(nvshmem, "_folder", lambda: kept)
    return kept
