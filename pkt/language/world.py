"""The kernel argument that describes the ranks: `world.device` on the host, `world` in the kernel.

The heap of rank r is mapped at `base + r * stride` in every process, and the multicast window at `base + size *
stride`. So a kernel translates addresses by its own rank, the number of ranks and the stride, with no table. Over
several nodes the windows of a node form a ring, see `Network`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Sequence
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

RECORD_FIELDS = (
    "rank", "program", "cmp", "wanted", "found", "offset_low", "offset_high", "epoch", "site", "owner",
    "wanted_high", "found_high", "data",
)  # fmt: skip
"""Words 0 to 12 of a record. `offset` is the counter's byte offset in its rank's heap, an int64 in two words. `epoch`
is 0 where the wait does not know it. `site` is `site_hash` of the kernel's name. `owner` is program + 1, and 0 in a
slot that no program has claimed. The two `_high` are written for counters of 64 bits only (CMP_WIDE), and `data`, a mix
of what words with a flag held, for these only: nobody reads it (ptx.spin)."""

CMP_CODES = {"ge": 0, "gt": 1, "le": 2, "lt": 3, "eq": 4, "ne": 5, "flip": 6}
"""Low byte of a record's word `cmp`. "flip": the counter's top bit differs from that of `wanted` (barriers)."""
CMP_ABORTED = 256
"""Added to word `cmp` if the wait left because another wait had expired, not because its own time was up."""
CMP_WIDE = 512
"""Added to word `cmp` if the counter has 64 bits: `wanted` and `found` are then low halves."""


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
    team, table: `team_constants` of a team; 0 in a world of all ranks. A team's status page is that of the world of all
        ranks. With a table `stride` is that world's, and only `pl.peer` knows where the copies are.
    node_size: ranks of a node in the world of all ranks; 0 where all ranks here are on one node, so that no code for
        other nodes is compiled.
    network: `Network.constant` of a world of several nodes and of its teams; 0 in a world of one node. Windows then
        form a ring, and `stride` is that of neighbours in it, in teams, too: only `pl.peer` knows where the copies are.
    """

    rank: Any
    size: tl.constexpr
    stride: tl.constexpr
    multicast: tl.constexpr
    status: Any
    code: tl.constexpr
    team: tl.constexpr = tl.constexpr(0)
    table: tl.constexpr = tl.constexpr(0)
    node_size: tl.constexpr = tl.constexpr(0)
    network: tl.constexpr = tl.constexpr(0)


_TEAM_BITS, TABLE_BITS = 20, 6
LISTED = 60 // TABLE_BITS
"""Most ranks of a team whose ranks have unequal steps."""
LISTED_WORLD = 1 << TABLE_BITS
"""Most ranks of a world with such a team."""


def step_of(ranks: Sequence[int]) -> int | None:
    """The distance of neighbours in `ranks`, 1 for one rank; None if there are several."""
    steps = {b - a for a, b in itertools.pairwise(ranks)} or {1}
    return steps.pop() if len(steps) == 1 else None


def team_constants(ranks: Sequence[int], whole: int) -> tuple[int, int]:
    """`team` and `table` of the team of the given ranks of a world of `whole`: numbers of 60 bits, because a kernel
    cannot put a world with a tuple into a tuple. They hold `whole`, and how a team's rank becomes one of that world:
    first + rank * step, or a table with TABLE_BITS for each rank."""
    step = step_of(ranks)
    if step is None:
        return whole, sum(rank << TABLE_BITS * at for at, rank in enumerate(ranks))
    return whole | ranks[0] << _TEAM_BITS | (step % (1 << _TEAM_BITS)) << 2 * _TEAM_BITS, 0


def listed_rank(table: int, rank: int) -> int:
    """The rank in the world of all ranks of a team's rank, by its `table`."""
    return table >> TABLE_BITS * rank & (1 << TABLE_BITS) - 1


class Team(NamedTuple):
    """A `team` constant taken apart. step: 0 with a table."""

    whole: int
    first: int
    step: int

    @classmethod
    def of(cls, team: int) -> Team:
        """The parts of `team`, which is not 0."""
        mask = (1 << _TEAM_BITS) - 1
        step = team >> 2 * _TEAM_BITS & mask
        return cls(team & mask, team >> _TEAM_BITS & mask, step - (mask + 1) * (step >> _TEAM_BITS - 1))


_NETWORK_BITS = 20
ARENA_UNIT = 1 << 16
"""Bytes that the arena of a world of several nodes has a multiple of."""


class Network(NamedTuple):
    """What kernels know of the network in a world of several nodes.

    node_size: ranks of a node, whose windows are mapped.
    arena: bytes at the start of a window in which all counters lie, a multiple of ARENA_UNIT.
    ring: NVSHMEM maps the windows of the ranks that it reaches by loads and stores behind this rank's own, in the order
        of ranks, and goes on with rank 0 after the last. So the window of rank r of this node lies
        (r - rank) mod `ring` strides behind this rank's. `ring` counts those ranks; they may be more than the node's.
    """

    node_size: int
    arena: int
    ring: int

    @property
    def constant(self) -> int:
        """All three as a number of 60 bits, for the reason of `team_constants`."""
        return self.node_size | self.ring << _NETWORK_BITS | self.arena // ARENA_UNIT << 2 * _NETWORK_BITS

    @classmethod
    def of(cls, constant: int) -> Network:
        """The parts of a `network` constant."""
        mask = (1 << _NETWORK_BITS) - 1
        return cls(constant & mask, (constant >> 2 * _NETWORK_BITS) * ARENA_UNIT, constant >> _NETWORK_BITS & mask)


@functools.cache
def code_hash(library: str = "") -> int:
    """60 bits of SHA-256 over the names and sources of pkt's device code, a part of every kernel's cache key. It is a
    number, because a kernel cannot put a world with a string into a tuple. library: what else a kernel is linked with,
    in a world of several nodes."""
    digest = hashlib.sha256(library.encode())
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(str(path.relative_to(here)).encode() + b"\0" + path.read_bytes() + b"\0")
    return int(digest.hexdigest()[:15], 16)
