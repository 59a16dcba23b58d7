"""Operands for tests: experts of tokens; and a routing, other in each launch, as far as `combine` reads what `dispatch`
returns."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..declaration import Call, Shape
from .result import chunk_of


def slots(call: Call, rank: torch.Tensor | int, t: torch.Tensor, d: torch.Tensor | int) -> torch.Tensor:
    """The slots on ranks `d` of tokens t of ranks `rank`, -1 for none. Chunks are numbered as `dispatch` does."""
    k, r, size, chunk = call["k"], call["r"], call.world.size, chunk_of(call["r"])
    slot = (t // chunk * size + rank) * chunk + t % chunk
    goes = (t % chunk == 0) | ((7 * rank + 5 * t + 3 * d + call.world.launch) % 4 > 0)
    if k == 1:  # a rank's tokens are on no rank above it, so that lower ranks get nothing from higher ones
        goes = torch.as_tensor(d <= rank).expand_as(slot)
    inside = (t < call["t"]) & (slot < call["s"]) & (slot * k < r * (k > 0))
    return torch.where(goes & inside, slot, -1)


def _tokens(call: Call, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank and the token in slots of this rank; -1 and -1 for none."""
    chunk = chunk_of(call["r"])
    turn, rank = slot // chunk // call.world.size, slot // chunk % call.world.size
    t = turn * chunk + slot % chunk
    there = slots(call, rank, t, call.world.rank) == slot
    return torch.where(there, rank, -1), torch.where(there, t, -1)


def some_rows(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of each slot: each row is one token's at most, and a third of the places have none."""
    count, K = shape
    none = torch.rand(shape, generator=generator) < 1 / 3
    none[:, :1] = False
    at = torch.arange(count * K).view(shape)
    there = (_tokens(call, torch.arange(count))[0] >= 0)[:, None] & (at < call["r"]) & ~none
    return torch.where(there, (at + call.world.launch) % max(call["r"], 1), -1).int()


def some_sources(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Rank, token and number of each row, those of rows that have no token too."""
    K, R = call["k"], call["r"]
    found, at = torch.full((R, 3), -1), torch.arange(min(R, call["s"] * K))
    if len(at):
        found[(at + call.world.launch) % R] = torch.stack((*_tokens(call, at // K), at % K), 1)
    return found.view(shape).int()


def some_slots(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of each token on each rank."""
    t, d = torch.arange(call["t"])[:, None], torch.arange(call.world.size)[None, :]
    return slots(call, call.world.rank, t.expand(-1, call.world.size), d).int().view(shape)


def some_experts(count: Callable[[Call], int]) -> Callable[[Shape, torch.Generator, Call], torch.Tensor]:
    """Of each token, of so many experts; a third of the places have none."""

    def make(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
        chosen = torch.randint(0, count(call), shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 1 / 3, -1, chosen)

    return make


def some_weights(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """From 0 to 1."""
    return torch.rand(shape, generator=generator)
