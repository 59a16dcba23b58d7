"""Several ranks on one GPU, which runs their kernels in turns of some milliseconds each: right, but slow.

For tests on a machine with fewer GPUs than ranks. Nothing measured there says how fast a program is. NCCL and multicast
objects want a GPU for every rank, so both are off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def may_share(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks may be on one GPU: PKT_SHARE_GPU=1."""
    return environment.get("PKT_SHARE_GPU", "").strip() == "1"


def device_of(rank: int, count: int) -> int:
    """The GPU of a rank on a host with `count` GPUs: its own, or in turns where they are shared."""
    return rank % count if may_share() else rank
