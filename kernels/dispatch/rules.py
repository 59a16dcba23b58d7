"""Which form of dispatch and combine is expected to be faster, by the links' rates and what was measured on 2 H200.

A low-latency form saves barriers, moves a third more bytes, and takes longer for each byte. So it is for few tokens.
"""

from __future__ import annotations

from pkt.model.cost import Estimate
from pkt.model.gpu import H200, Gpu, link_rate

from ..shared.flagged import MOST_RANKS

SENDERS = 32
"""Programs of `push` that send, by default: so many fill the links, and the others memory."""
IN_FLIGHT = 32768
"""Bytes that a program has on their way."""
COPIED, STAGES = 16384, 4
"""Of push: bytes that a program copies at a time, and how many such copies are on their way at once. With 32 KiB and
one copy, dispatch of 16,384 and 32,768 tokens takes 1 to 3 % longer on 2 and 4 H200 (`dispatch_matmul_tried.json`)."""
BESIDE: dict[tuple[str, str], tuple[float, float]] = {
    ("dispatch", "push"): (34e-6, 0.72e-9), ("dispatch", "low_latency"): (11e-6, 2.5e-9),
    ("combine", "pull"): (26e-6, 0.53e-9), ("combine", "low_latency"): (9.8e-6, 2.2e-9),
}  # fmt: skip
"""What a form takes beside the links' time, in seconds: at all, and for each KiB of a rank's tokens. Counts, waits,
copies and sums, fitted to 2 H200 (`dispatch_2.json`), for tokens of 7168 elements within a fifth of what was measured
there."""


def leaving(tokens: int, choices: int, size: int) -> float:
    """How often a token leaves its rank if each of `tokens` chooses its experts at random: once for each other rank
    that has an expert of it."""
    return tokens * (size - 1) * (1 - (1 - 1 / size) ** choices)


def collectors(choices: int, size: int, programs: int) -> int:
    """Of the programs of combine's `pull`, how many collect sums by default: as many as their part of the rows that
    are loaded and stored, if a token's experts are chosen at random."""
    away = leaving(1, choices, size)
    added, collected = choices * (size - 1) / size + away, choices / size + away + 1
    return round(programs * collected / (added + collected))


def predicted(operator: str, tokens: int, nbytes: int, choices: int, size: int, gpu: Gpu = H200) -> dict[str, Estimate]:
    """The parts of the time of each form of "dispatch" or "combine". tokens: of a rank; nbytes: of a token, or of a sum
    that goes home; choices: experts of a token. What BESIDE says counts as `sync`."""
    moved = leaving(tokens, choices, size) * nbytes
    peers = "one" if size == 2 else "all"
    if operator == "dispatch":
        mode, rate = "push", link_rate("register store", SENDERS, IN_FLIGHT, peers)
    else:
        mode, rate = "pull", link_rate("register load", collectors(choices, size, gpu.sms), IN_FLIGHT)
    few = 4 / 3 * moved / link_rate("register store", gpu.sms, peers=peers)
    links = {mode: moved / rate, "low_latency": few}
    return {form: _estimate(operator, form, tokens * nbytes, links[form]) for form in links}


def _estimate(operator: str, mode: str, nbytes: int, links: float) -> Estimate:
    """nbytes: of a rank's tokens; links: the seconds that the links take."""
    at_all, each = BESIDE[operator, mode]
    return Estimate(0, 0, 0, links, sync=at_all + each * nbytes / 1024)


def chosen(operator: str, tokens: int | None, nbytes: int, choices: int, size: int) -> str:
    """The form with the least predicted time. Without a promise that no rank has more than `tokens` it is the one that
    needs no place for each of them."""
    found = predicted(operator, tokens or 0, nbytes, choices, size)
    if tokens is None or size > MOST_RANKS:
        return next(iter(found))
    return min(found, key=lambda mode: found[mode].total)
