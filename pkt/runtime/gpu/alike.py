"""What must be alike on all ranks although the GPUs have nothing to do with it: versions, deadlines, heaps, switches.

Ranks that differ would choose different forms, or wait for each other in different calls. GPUs may differ in their SMs,
clocks and memory: pkt then counts on the fewest SMs, and on rank 0's model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import triton

from pkt.errors import AllocationMismatch, Unsupported
from pkt.language.world import code_hash
from pkt.wording import ranks_text, size_text

_HEAP = "heap= or PKT_HEAP"
_REMEDIES = {
    "timeout= or PKT_TIMEOUT": "give every rank the same deadline",
    "PKT_NCCL": "set it on every rank or on none",
    "Triton": "start every rank with one environment",
    "torch": "start every rank with one environment",
    "pkt's device code": "start every rank with one version of pkt",
    "ranks of a node (PKT_NODE_SIZE)": "set it on every rank or on none",
    "NVSHMEM": "start every rank with one environment",
}


def said(heap: int, timeout: float, node_size: int, library: str) -> dict[str, str]:
    """What this rank tells the others. heap: bytes, timeout: seconds. library: of the backend."""
    nccl = os.environ.get("PKT_NCCL", "").strip()
    found = (
        f"{timeout:g} s", "0" if nccl == "0" else "not 0", triton.__version__, torch.__version__, str(code_hash()),
        str(node_size), library or "not used",
    )  # fmt: skip
    return {_HEAP: f"{size_text(heap)} ({heap} bytes)", **dict(zip(_REMEDIES, found))}


def check(everybody: Sequence[Mapping[str, str]]) -> None:
    """Raise AllocationMismatch for other heaps, Unsupported for any other difference, on every rank."""
    for what in (_HEAP, *_REMEDIES):
        values = dict(enumerate(str(one.get(what, "nothing")) for one in everybody))
        if len(set(values.values())) > 1 and what == _HEAP:
            raise AllocationMismatch.differs(what, values)
        if len(set(values.values())) > 1:
            found = f"{what} differs, {ranks_text(values)}"
            raise Unsupported.here("pkt.init", found, f"wanted one on all ranks: {_REMEDIES[what]}")
