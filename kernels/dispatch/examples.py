"""A routing for tests, other in each launch: what `dispatch` would return, as far as `combine` reads it."""

from __future__ import annotations

import torch

from ..declaration import Call, Shape
from .result import chunk_of


def slot_of(call: Call, rank: int, t: int, d: int) -> int:
    """The slot on rank `d` of token t of `rank`, -1 for none. Chunks are numbered as `dispatch` does."""
    s, k, r, size, chunk = call["s"], call["k"], call["r"], call.world.size, chunk_of(call["r"])
    slot = (t // chunk * size + rank) * chunk + t % chunk
    goes = t % chunk == 0 or (7 * rank + 5 * t + 3 * d + call.world.launch) % 4 > 0
    if k == 1:  # a rank's tokens are on no rank above it, so that lower ranks get nothing from higher ones
        goes = d <= rank
    return slot if goes and t < call["t"] and slot < s and slot * k < r * (k > 0) else -1


def _token(call: Call, slot: int) -> tuple[int, int]:
    """The rank and the token in a slot of this rank; (-1, -1) for none."""
    chunk = chunk_of(call["r"])
    turn, rank = divmod(slot // chunk, call.world.size)
    t = turn * chunk + slot % chunk
    return (rank, t) if slot_of(call, rank, t, call.world.rank) == slot else (-1, -1)


def some_rows(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of each slot: each row is one token's at most, and a third of the places have none."""
    slots, K = shape
    found, none = torch.full(shape, -1), torch.rand(shape, generator=generator) < 1 / 3
    for slot in range(slots):
        for k in range(K):
            at = slot * K + k
            if _token(call, slot)[0] >= 0 and at < call["r"] and not (k and none[slot, k]):
                found[slot, k] = (at + call.world.launch) % call["r"]
    return found.int()


def some_sources(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Rank, token and number of each row, those of rows that have no token too."""
    K, found = call["k"], torch.full((call["r"], 3), -1)
    for at in range(min(call["r"], call["s"] * K)):
        found[(at + call.world.launch) % call["r"]] = torch.tensor((*_token(call, at // K), at % K))
    return found.view(shape).int()


def some_slots(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of each token on each rank."""
    every = [slot_of(call, call.world.rank, t, d) for t in range(call["t"]) for d in range(call.world.size)]
    return torch.tensor(every, dtype=torch.int32).view(shape)


def some_weights(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of each row."""
    return torch.rand(shape, generator=generator)
