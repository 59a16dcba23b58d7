"""Which form of dispatch and combine is expected to be faster: predicted with the cost model, not measured.

A low-latency form saves barriers, and moves a third more bytes. So it is for few tokens.
"""

from __future__ import annotations

from pkt.model.cost import Estimate
from pkt.model.gpu import H200, Gpu, link_rate

from ..shared.flagged import MOST_RANKS

SENDERS = 24
"""Programs of `push` that send, by default: so many fill the links (see docs/facts.md), and the others memory."""
COLLECTORS = 32
"""Programs of combine's `pull` that load from the ranks, by default."""
IN_FLIGHT = 16384
"""Bytes that one of them moves at a time."""


def leaving(tokens: int, choices: int, size: int) -> float:
    """How often a token leaves its rank if each of `tokens` chooses its experts at random: once for each other rank
    that has an expert of it."""
    return tokens * (size - 1) * (1 - (1 - 1 / size) ** choices)


def predicted(operator: str, tokens: int, nbytes: int, choices: int, size: int, gpu: Gpu = H200) -> dict[str, Estimate]:
    """The parts of the time of each form of "dispatch" or "combine". tokens: of a rank; nbytes: of a token, or of a sum
    that goes home; choices: experts of a token.

    sync: `push` waits twice for all programs of a rank, which is counted as a signal's flight each, for the counts of
    all ranks, and for a chunk of tokens. `pull` waits for all ranks, for a chunk of sums, and for what it asks for,
    there and back. A low-latency form waits for words: one flight.
    """
    moved = leaving(tokens, choices, size) * nbytes
    peers = "one" if size == 2 else "all"
    few = Estimate(0, 0, 0, 4 / 3 * moved / link_rate("register store", gpu.sms, peers=peers), sync=gpu.signal)
    if operator == "dispatch":
        rate = link_rate("register store", SENDERS, IN_FLIGHT, peers)
        return {
            "push": Estimate(0, 0, 0, moved / rate, sync=2 * gpu.signal + gpu.barrier + gpu.signal),
            "low_latency": few,
        }
    rate = link_rate("register load", COLLECTORS, IN_FLIGHT)
    return {"pull": Estimate(0, 0, 0, moved / rate, sync=gpu.barrier + 3 * gpu.signal), "low_latency": few}


def chosen(operator: str, tokens: int | None, nbytes: int, choices: int, size: int) -> str:
    """The form with the least predicted time. Without a promise that no rank has more than `tokens` it is the one that
    needs no place for each of them."""
    found = predicted(operator, tokens or 0, nbytes, choices, size)
    if tokens is None or size > MOST_RANKS:
        return next(iter(found))
    return min(found, key=lambda mode: found[mode].total)
