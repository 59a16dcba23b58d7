"""Teams: some ranks of a world work together in a share of its heap.

A team is a `World` over a `TeamBackend`, which hands its calls to the backend of the world of all ranks: it numbers the
ranks anew, moves offsets to the share, and lets only its members meet. A symmetric tensor of the world works in the
team, because the members' copies lie where they lay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pkt.errors import CollectiveMismatch, RankError, ShapeError, Unsupported
from pkt.language.world import LISTED, LISTED_WORLD, step_of, team_constants
from pkt.runtime.backend import Backend, Block, CopyEngines


class TeamBackend:
    """One rank's side of a team, as a pkt.runtime.backend.Backend."""

    journal, multicast = None, False

    def __init__(
        self, parent: Backend, ranks: Sequence[int], offset: int, capacity: int, arena: range = range(0)
    ) -> None:
        """ranks: the members, by their ranks in `parent`. offset, capacity: of the share in `parent`'s window. arena:
        its offsets for counters there."""
        whole: Backend = parent
        self.arena = range(arena.start - offset, arena.stop - offset) if arena else arena
        if isinstance(parent, TeamBackend):
            whole, ranks, offset = parent.whole, [parent.ranks[r] for r in ranks], parent.offset + offset
        self.whole: Backend = whole
        self.ranks: tuple[int, ...] = tuple(ranks)
        """The members, by their ranks in the world of all ranks."""
        self.rank, self.size = self.ranks.index(whole.rank), len(self.ranks)
        self.offset: int = offset
        self.capacity, self.base = capacity, whole.base + offset
        self.torch_device, self.num_sms, self.gap, self.gpu = whole.torch_device, whole.num_sms, whole.gap, whole.gpu
        self.node_size, self.network, self.library = whole.node_size, whole.network, whole.library
        # Over nodes windows form a ring, and steps in a team's ranks are none in addresses.
        self.stride = whole.stride if self.network else whole.stride * (step_of(self.ranks) or 1)
        self.constants = team_constants(self.ranks, whole.size)

    @property
    def timeout(self) -> float | None:
        return self.whole.timeout

    @property
    def copies(self) -> CopyEngines | None:
        return self.whole.copies

    @property
    def timed(self) -> Callable[[Callable[[], Any]], tuple[Any, float]] | None:
        timed = self.whole.timed
        return None if timed is None else lambda run: timed(run, self.ranks)

    def window(self, rank: int) -> int:
        return self.whole.window(self.ranks[rank]) + self.offset

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.whole.view(self.ranks[rank], self.offset + offset, nbytes, dtype)

    def reserve(self, nbytes: int) -> None:
        """Nothing to do: the world took physical memory for the share."""

    def allocated(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        self.whole.allocated(block._replace(offset=self.offset + block.offset), self.ranks)

    def freed(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        self.whole.freed(block._replace(offset=self.offset + block.offset), self.ranks)

    def exchange(self, value: Any, what: str, among: tuple[int, ...] | None = None) -> list[Any]:
        return self.whole.exchange(value, f"{what} of team {list(self.ranks)}", self.ranks)

    def barrier(self, what: str) -> None:
        self.exchange(None, what)

    def synchronize(self) -> None:
        self.whole.synchronize()

    def abandon(self, why: str, lost: Mapping[int, str]) -> None:
        """Nothing to do: the error that ends a team on this rank goes on to the world's `with`."""

    def close(self) -> None:
        """Nothing to do: the share lasts as long as the world."""


def checked_ranks(ranks: Any, rank: int, size: int) -> list[int]:
    """`ranks` as a list of integers. Raises RankError or ShapeError, on rank `rank` of `size`."""
    try:
        members = [_index(r) for r in ranks]
    except TypeError:
        found = f"{ranks!r:.80}"
        raise ShapeError.argument("team", "ranks", found, "ranks, as in [0, 2] or range(4)", rank) from None
    for one in members:
        if not 0 <= one < size:
            raise RankError.outside(rank, "team(ranks=)", one, size)
    if not members or len(set(members)) < len(members):
        raise ShapeError.argument("team", "ranks", members, "at least one rank, and each once", rank)
    return members


def _index(one: Any) -> int:
    if isinstance(one, bool):
        raise TypeError("a number is wanted")
    return operator.index(one)


def check_translated(ranks: Sequence[int], whole: int, rank: int) -> None:
    """Raise Unsupported unless kernels can translate the members' addresses. ranks: in the world of `whole` ranks."""
    if step_of(ranks) is None and (len(ranks) > LISTED or whole > LISTED_WORLD):
        found = f"found {len(ranks)} ranks of {whole}, with unequal steps"
        remedy = f"unequal steps take at most {LISTED} ranks of {LISTED_WORLD}; equal ones, as range(0, 8, 2), any"
        raise Unsupported.here(f"rank {rank}: team({list(ranks)})", found, remedy)


def check_agreed(said: Mapping[int, tuple[list[int], int]]) -> None:
    """Raise CollectiveMismatch unless every rank of each team names the same team, and all the same heap. said: ranks
    and heap by rank."""
    teams = {rank: ranks for rank, (ranks, _) in said.items() if rank in ranks}
    alike = all(teams.get(member) == ranks for ranks in teams.values() for member in ranks)
    outside = [rank for rank in said if rank not in teams]
    alike = alike and all(teams.get(member) == said[rank][0] for rank in outside for member in said[rank][0])
    if not alike or len({heap for _, heap in said.values()}) > 1:
        raise CollectiveMismatch.calls({rank: f"team({ranks}, heap={heap})" for rank, (ranks, heap) in said.items()})
