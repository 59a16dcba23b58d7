"""What a dispatch returns, and how many slots a rank has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from pkt.errors import ShapeError
from pkt.wording import count_text

from ..declaration import Call

MOST_CHUNK = 32
"""Tokens between two signals, at most: with 7168 elements a signal takes some hundredths of their time."""
MOST_ROWS = 1 << 30
"""That alignment may add, at most."""


def chunk_of(max_tokens: int) -> int:
    """Tokens between two signals: less where there are few tokens, so that several programs work."""
    return min(MOST_CHUNK, max(2, triton.next_power_of_2(max_tokens // 256)))


def slots_of(max_tokens: int, size: int) -> int:
    """Places in an inbox for max_tokens tokens, where each source begins a chunk."""
    chunk = chunk_of(max_tokens)
    return (triton.cdiv(max_tokens, chunk) + size) * chunk


def slots_filled(slots: int, max_tokens: int, size: int, promised: int | None) -> int:
    """How many of `slots` tokens can be in, if no rank has more than `promised` tokens; None promises nothing."""
    chunk = chunk_of(max_tokens)
    return slots if promised is None else min(slots, size * triton.cdiv(promised, chunk) * chunk)


def flat(source: Any) -> Any:
    """The source of a `Dispatched`, (R, 3), as operators take it: in one dimension."""
    whole = isinstance(source, torch.Tensor) and source.ndim == 2 and source.layout is torch.strided
    return source.flatten() if whole else source


def check_promise(call: Call, name: str, promised: int | None) -> None:
    """Raise ShapeError if this rank has more tokens, in operand `name`, than `promised`; None promises nothing."""
    if promised is not None and call.sizes["t"] > promised:
        found = f"{count_text(call.sizes['t'], 'token')} of this rank"
        if "tokens_per_rank" not in call.given:
            raise call.refuse(name, found, f"at most {promised}: promise more, as tokens_per_rank")
        other = "" if call.world.nodes > 1 else ", or take another mode"
        raise call.refuse(name, found, f"at most tokens_per_rank={promised}: promise more{other}")


def check_alignment(call: Call, experts: int) -> None:
    """Raise ShapeError if the rows that `experts` are filled up with may be more than an int32 counts."""
    most = MOST_ROWS // max(1, experts)
    if call["alignment"] > most:
        wanted = f"at most {most} for {count_text(experts, 'expert')}, so that an int32 counts their rows"
        raise call.refuse("alignment", call["alignment"], wanted)


class Dispatched(NamedTuple):
    """What a rank has received, and what `combine` needs to send it back. All tensors are on the device.

    R is max_tokens, E the experts of a rank, K the experts of a token, T this rank's tokens, W the number of ranks.
    """

    rows: torch.Tensor
    """(R, H) of x's dtype: the tokens, by expert. Rows that fill an expert up to `alignment` are 0; those behind the
    last expert's are 0 if they were cleared, and else undefined."""
    weights: torch.Tensor
    """fp32 (R,): the weight of each row, 0 where it is no token's."""
    counts: torch.Tensor
    """int32 (E,): tokens of each of this rank's experts, true also where they do not fit."""
    offsets: torch.Tensor
    """int32 (E + 1,): where the rows of each expert begin, and where the last one's end."""
    source: torch.Tensor
    """int32 (R, 3): the rank, token and number among the token's experts that each row comes from; -1 if from none."""
    tokens: torch.Tensor
    """int32 (S, K): the rows of each token that this rank has received, by slot; -1 for none."""
    places: torch.Tensor
    """int32 (T * W,): the slot of each of this rank's tokens on each rank; -1 for none."""
    needed: torch.Tensor
    """int32 (2,): the max_tokens that this rank would need, and the rank."""
    scales: torch.Tensor | None = None
    """fp32 (R, G): the scales of each row's token; 0, or undefined, where the row is. None if tokens have none."""

    def check(self) -> None:
        """Raise ShapeError if this rank's rows do not fit into max_tokens: it has received none. Waits for the GPU."""
        needed, rank = self.needed.tolist()
        room = self.rows.shape[0]
        if needed > room:
            counts = self.counts.tolist()
            expert = max(range(len(counts)), key=counts.__getitem__)
            most = f"expert {rank * len(counts) + expert} has {counts[expert]} of {sum(counts)} rows"
            raise ShapeError.argument("dispatch", "max_tokens", room, f"at least {needed}: {most}", rank)
