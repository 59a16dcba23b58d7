"""The kernel argument that describes the ranks: `world.device` on the host, `world` in the kernel.

The heap of rank r is mapped at `base + r * stride` in every process, and the multicast window at `base + size *
stride`. So a kernel translates addresses by its own rank, the number of ranks and the stride, with no table.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import triton.language as tl

STATUS_BYTES = 4096
"""Size of the status page of int32 words, at offset 0 of every rank's heap, where peers reach it by arithmetic."""

STATUS_ABORT = 0
"""Word: not 0 once some rank's wait has expired; every wait of this rank then leaves."""
STATUS_RECORDS = 1
"""Word: number of records written since the host last cleared the page."""
STATUS_DEADLINE = 2
"""Words 2 and 3, an int64: nanoseconds that a wait may spin while its counter stands still; 0 is no limit."""
STATUS_FIRST_RECORD = 16
"""First word of the first record."""
RECORD_WORDS = 16
"""Words in a record. A program writes at most one record; records are in the order of arrival."""
MAX_RECORDS = (STATUS_BYTES // 4 - STATUS_FIRST_RECORD) // RECORD_WORDS

RECORD_FIELDS = ("rank", "program", "cmp", "wanted", "found", "offset_low", "offset_high", "epoch", "site", "owner")
"""Words 0 to 9 of a record. `offset` is the counter's byte offset in its rank's heap, an int64 in two words. `epoch`
is 0 where the wait does not know it. `site` is `site_hash` of the kernel's name. `owner` is program + 1, and 0 in a
slot that no program has claimed."""

CMP_CODES = {"ge": 0, "gt": 1, "le": 2, "lt": 3, "eq": 4, "ne": 5, "flip": 6}
"""Low byte of a record's word `cmp`. "flip": the counter's top bit differs from that of `wanted` (barriers)."""
CMP_ABORTED = 256
"""Added to word `cmp` if the wait left because another wait had expired, not because its own time was up."""


def site_hash(kernel: str) -> int:
    """Word `site` of a record: a 31-bit hash of a kernel's name (`CompiledKernel.metadata.name`), or 0 for no name."""
    return zlib.crc32(kernel.encode()) & 0x7FFFFFFF if kernel else 0


class DeviceWorld(NamedTuple):
    """The kernel's world. `rank` is a run-time integer, except that Triton compiles the integer 1 as a constant (use
    `tl.cast`, never `world.rank.to(...)`); `size`, `stride`, `multicast` and `code` are compile-time constants.

    rank: this rank, 0 <= rank < size.
    size: number of ranks.
    stride: bytes between the windows of two ranks; rank r's copy of an address p is `p + (r - rank) * stride`.
    multicast: whether multimem instructions may be used; otherwise every multicast form is a loop over the ranks.
    status: pointer to int32, this rank's status page.
    code: `code_hash()`, part of the kernel's cache key, because Triton's key leaves out the bodies of Python builtins.
    """

    rank: Any
    size: tl.constexpr
    stride: tl.constexpr
    multicast: tl.constexpr
    status: Any
    code: tl.constexpr


@functools.cache
def code_hash() -> int:
    """60 bits of SHA-256 over the names and sources of pkt's device code, a part of every kernel's cache key. It is a
    number, because a kernel cannot put a world with a string into a tuple."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(str(path.relative_to(here)).encode() + b"\0" + path.read_bytes() + b"\0")
    return int(digest.hexdigest()[:15], 16)
