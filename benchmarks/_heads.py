"""The sizes of the products around Ulysses attention, and what exchanges heads with NCCL."""

from __future__ import annotations

from typing import Any

import torch

HIDDEN, QUERIES, KEYS, D = 8192, 64, 8, 128
"""Of Llama 70B: elements of a token, heads of queries, of keys and of values, elements of a head."""
TOKENS = (4096, 32768)
"""Of all ranks."""


def cases(quick: bool, heads: int) -> dict[str, dict[str, Any]]:
    """Label -> tokens of all ranks, elements of a token, heads and elements of a head."""
    if quick:
        return {"24 tokens": {"T": 24, "k": 20, "h": 4, "d": 12}}
    return {f"{T} tokens": {"T": T, "k": HIDDEN, "h": heads, "d": D} for T in TOKENS}


def to_heads(rows: torch.Tensor, size: int) -> torch.Tensor:
    """(B, S, H, D), positions of this rank, as all positions of its heads, with the copies that NCCL needs."""
    import torch.distributed as dist

    b, s, h, d = rows.shape
    sent = rows.view(b, s, size, h // size, d).permute(2, 0, 1, 3, 4).contiguous()
    got = torch.empty_like(sent)  # (rank of the positions, b, s, heads, d)
    dist.all_to_all_single(got, sent)
    return got.permute(1, 0, 2, 3, 4).reshape(b, size * s, h // size, d)


def to_rows(there: torch.Tensor, size: int) -> torch.Tensor:
    """The other way."""
    import torch.distributed as dist

    b, S, n, d = there.shape
    sent = there.view(b, size, S // size, n, d).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)  # (rank of the heads, b, s, heads, d)
    dist.all_to_all_single(got, sent)
    return got.permute(1, 2, 0, 3, 4).reshape(b, S // size, size * n, d)
