"""The experts that tokens have chosen, and the ranks that have these experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share(tokens, programs):
    """This program's share of a rank's tokens if the first `programs` share them: its first one, and the one behind its
    last."""
    each = tl.cdiv(tokens, programs)
    first = tl.minimum(tl.program_id(0) * each, tokens)
    return first, tl.minimum(first + each, tokens)


@triton.jit
def experts(idx_ptr, t, k, inside, p):
    """The expert of each pair, -1 for none."""
    idx = tl.load(idx_ptr + tl.cast(t, tl.int64) * p.K + k, mask=inside & (k < p.K), other=-1)
    return tl.where((idx >= 0) & (idx < p.CHOICES), idx, -1).to(tl.int32)


@triton.jit
def owner(expert, p):
    return tl.where(expert >= 0, expert // p.OWN, -1)


@triton.jit
def goes(expert, p, world):
    """Of pairs (tokens, K): whether the token has an expert on each rank, (tokens, W), 1 or 0."""
    ranks = tl.arange(0, triton.next_power_of_2(world.size))[None, None, :]
    return tl.max((owner(expert, p)[:, :, None] == ranks).to(tl.int32), 1)


@triton.jit
def rows_and_weights(idx_ptr, w_ptr, t, inside, rank, routes_ptr, p):
    """Of tokens t (ROWS, 1): rows on `rank` of their pairs, -1 for none, and the weights' bits, (ROWS, K2)."""
    k = tl.arange(0, p.K2)[None, :]
    at = tl.cast(t, tl.int64) * p.K + k
    inside = inside & (k < p.K)
    here = owner(experts(idx_ptr, t, k, inside, p), p) == rank
    rows = tl.where(here, tl.load(routes_ptr + at, mask=inside, other=-1), -1)
    return rows, tl.load(w_ptr + at, mask=inside, other=0).to(tl.int32, bitcast=True)
