"""Resources and instructions of a compiled kernel, by the programs that Triton ships."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton

OLD = triton.__version__.startswith("3.6")
of_old = pytest.mark.skipif(not OLD, reason="registers and the order of instructions are those of Triton 3.6")


@functools.lru_cache(maxsize=32)  # tests ask for one kernel's instructions again and again, half a second each time
def said(cubin: bytes, folder: Path, program: str, *flags: str) -> str:
    """What one of the programs says about a kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [getattr(triton.knobs.nvidia, program).path, *flags, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """{"REG": n, "STACK": bytes, "LOCAL": bytes, ...} of the kernel's machine code; a register that does not fit
    is spilled to the stack."""
    text = said(compiled.asm["cubin"], folder, "cuobjdump", "-res-usage")
    usage = text[text.index("REG:") :]
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", usage)}


def sass(compiled: Any, folder: Path) -> str:
    """The kernel's instructions, without what nvdisasm finds out about the flow of data."""
    return said(compiled.asm["cubin"], folder, "nvdisasm", "-c", "-ndf")
