"""Resources and instructions of a compiled kernel, by the cuobjdump that Triton ships."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import triton


@functools.lru_cache(maxsize=4)  # a test asks for one kernel's instructions again and again, half a second each time
def cuobjdump(cubin: bytes, flag: str, folder: Path) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([program, flag, path], capture_output=True, text=True, check=True).stdout


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """{"REG": n, "STACK": bytes, "LOCAL": bytes, ...} of the kernel's machine code; a register that does not fit
    is spilled to the stack."""
    text = cuobjdump(compiled.asm["cubin"], "-res-usage", folder)
    usage = text[text.index("REG:") :]
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", usage)}


def sass(compiled: Any, folder: Path) -> str:
    """The kernel's instructions."""
    return cuobjdump(compiled.asm["cubin"], "-sass", folder)
