"""What each rank gets, worked out with lists, and what of it is undefined."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from .result import chunk_of, slots_of


def reference(
    rank: int, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor],
    num_experts: int, max_tokens: int, alignment: int, clear: bool | None = None,
    scales: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What `rank` gets; without scales it gets none."""
    size, R, (T, K) = len(x), max_tokens, topk_idx[rank].shape
    own, chunk = triton.cdiv(num_experts, size), chunk_of(max_tokens)
    chosen = [[[e if 0 <= e < num_experts else -1 for e in token] for token in idx.tolist()] for idx in topk_idx]
    places = torch.full((T, size), -1)
    mine: dict[tuple[int, int], int] = {}  # (source rank, token) -> its slot here
    for d in range(size):
        sent = [[t for t, token in enumerate(of) if any(e >= 0 and e // own == d for e in token)] for of in chosen]
        chunks = [-(-len(tokens) // chunk) for tokens in sent]
        if ends_of(chosen, own, d, alignment)[1][-1] > R:
            continue
        for r in (rank,) if d != rank else range(size):
            for j, t in enumerate(sent[r]):
                turns = (min(n, j // chunk + (q < r)) for q, n in enumerate(chunks))
                slot = sum(turns) * chunk + j % chunk
                if r == rank:
                    places[t, d] = slot
                if d == rank:
                    mine[r, t] = slot
    counts, ends = ends_of(chosen, own, rank, alignment)
    rows, weights = x[0].new_zeros(R, x[0].shape[1]), topk_weights[0].new_zeros(R)
    of_rows = None if scales is None else scales[0].new_zeros(R, scales[0].shape[1])
    source, tokens = torch.full((R, 3), -1), torch.full((slots_of(R, size), K), -1)
    if ends[-1] <= R:
        pairs = [(r, t, k, e) for r, of in enumerate(chosen) for t, token in enumerate(of) for k, e in enumerate(token)]
        free = list(ends)
        for r, t, k, e in pairs:
            if e >= 0 and e // own == rank:
                row, free[e % own] = free[e % own], free[e % own] + 1
                rows[row], weights[row] = x[r][t], topk_weights[r][t, k]
                source[row], tokens[mine[r, t], k] = torch.tensor((r, t, k)), row
                if scales is not None and of_rows is not None:
                    of_rows[row] = scales[r][t]
    offsets = torch.tensor(ends if ends[-1] <= R else [0] * (own + 1))
    needed = torch.tensor([ends[-1], rank])
    found = rows, weights, torch.tensor(counts), offsets, source, tokens, places.flatten(), needed
    return found if of_rows is None else (*found, of_rows)


def ends_of(chosen: list[list[list[int]]], own: int, rank: int, alignment: int) -> tuple[list[int], list[int]]:
    """Tokens of each of a rank's experts, and where the rows of each begin, with the end of the last."""
    every = collections.Counter(e for of in chosen for token in of for e in token)
    counts = [every[e] for e in range(rank * own, (rank + 1) * own)]
    return counts, [0, *itertools.accumulate(-(-n // alignment) * alignment for n in counts)]


def undefined(
    rank: int, dtype: torch.dtype, roundings: int, **operands: Any
) -> tuple[torch.Tensor | float, ...]:  # fmt: skip
    """Infinite for the elements and scales of rows behind the last expert's that are not cleared, 0 for everything
    else."""
    own, R = triton.cdiv(operands["num_experts"], len(operands["x"])), operands["max_tokens"]
    chosen = [torch.where(idx < operands["num_experts"], idx, -1).tolist() for idx in operands["topk_idx"]]
    _, ends = ends_of(chosen, own, rank, operands["alignment"])
    limit = torch.zeros(R, 1)
    if operands["clear"] is False:
        limit[ends[-1] if ends[-1] <= R else 0 :] = float("inf")
    rows = limit.expand(R, operands["x"][0].shape[1])
    scales = operands.get("scales")
    return rows, *(0.0,) * 7, *(() if scales is None else (limit.expand(R, scales[0].shape[1]),))
