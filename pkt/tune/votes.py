"""The steps that all ranks take together: after each step every rank knows the result of all.

No decision depends on a clock, and no rank decides alone. In a step a rank does something by itself; then all ranks
exchange their results. A step that fails on one rank has failed on all. Ctrl-C on one rank is known to all after the
same step.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pkt.errors import CandidateMismatch, CollectiveMismatch, PktError, RankFailed
from pkt.model.config import Config
from pkt.runtime.processes import wire
from pkt.runtime.workers.interrupts import Interrupts
from pkt.runtime.world import World
from pkt.wording import TUNING, count_text, ranks_text

_REASON = 300  # characters of a reason that are kept


class Votes:
    """One rank's side of the steps of a search. `stopped`: Ctrl-C has asked some rank to stop."""

    def __init__(self, world: World, what: str, interrupts: Interrupts) -> None:
        self.world, self.interrupts = world, interrupts
        self.stopped = False
        self._call = f"{TUNING}{what}"

    def step(self, alone: Callable[[], Any], doing: str) -> tuple[list[Any], str]:
        """Collective: every rank's `alone()`, JSON values in rank order, and "" or why it failed, naming ranks.

        An exception on any rank is a failure on all, except where the world itself was lost: that is raised, with a
        note of what this rank was `doing`.
        """
        value, failed, error = None, "", None
        try:
            try:
                value = alone()
            except KeyboardInterrupt:
                if self.interrupts.asked:
                    raise
                self.interrupts.asked = True  # another handler took the signal
                failed = "interrupted"
            except Exception as raised:
                failed, error = reason(raised), raised
                self.world.synchronize()  # raises if waits were cut short, because such a world cannot go on
            said = self.world.backend.exchange([value, failed, self.interrupts.asked], self._call)
        except PktError as lost:
            # A CollectiveMismatch closes the connections: the exchange fails, too, and its error would hide that one.
            ended = error if isinstance(error, CollectiveMismatch) else lost
            ended.add_note(f"rank {self.world.rank} was {self._call}: {doing}")
            raise ended from (error if ended is lost else None)
        self.stopped = self.stopped or any(asked for _, _, asked in said)
        return [v for v, _, _ in said], ranks_text({r: f for r, (_, f, _) in enumerate(said) if f})


def settle(
    world: World,
    what: str,
    key: Mapping[str, Any],
    candidates: Callable[[], Sequence[Config]],
    offer: Callable[[Sequence[Config]], Any],
) -> tuple[Sequence[Config], Any]:
    """Collective: the candidates, which are the same on every rank, and rank 0's offer.

    offer: called on rank 0 with the candidates; its result is sent to all (see `pkt.runtime.processes.wire`). Raises
    CollectiveMismatch if the ranks tune different things, CandidateMismatch if their candidates or the order differ,
    RankFailed if `candidates` or `offer` raised on another rank.
    """
    mine: Sequence[Config] = ()
    said: dict[str, Any] = {"case": f"tune {what} for {case_text(key)}"}
    error: Exception | None = None
    try:
        mine = candidates()
        said["digest"] = hashlib.sha256("\n".join(c.text for c in mine).encode()).hexdigest()
        if world.rank == 0:
            said["offer"] = wire.encode(offer(mine), "tune")
    except Exception as raised:
        error, said["failed"] = raised, traceback.format_exc()
    everybody = world.backend.exchange(said, "tune")
    if error is not None:
        raise error
    for rank, other in enumerate(everybody):
        if "failed" in other:
            raise RankFailed.raised(rank, other["failed"])
    cases = {rank: other["case"] for rank, other in enumerate(everybody)}
    if len(set(cases.values())) > 1:
        raise CollectiveMismatch.calls(cases)
    if len({other["digest"] for other in everybody}) > 1:
        _name_difference(world, what, mine)
    return mine, wire.decode(everybody[0]["offer"])


def _name_difference(world: World, what: str, mine: Sequence[Config]) -> None:
    """Collective: raise CandidateMismatch with the first difference of each rank from rank 0."""
    first = world.broadcast([config.text for config in mine])
    at = next((i for i, (a, b) in enumerate(zip(first, mine)) if a != b.text), min(len(first), len(mine)))
    places = [place for place in world.all_gather_object(at if at < max(len(first), len(mine)) else -1) if place >= 0]
    shown = min(places)
    text = repr(mine[shown]) if shown < len(mine) else "none"
    said = world.all_gather_object(f"{count_text(len(mine), 'config')}, number {shown} is {text}")
    raise CandidateMismatch.differs(what, dict(enumerate(said)))


def case_text(key: Mapping[str, Any]) -> str:
    """`m=8192, dtype=bf16`."""
    return ", ".join(f"{name}={value}" for name, value in key.items()) or "every case"


def reason(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_REASON]
