"""The kernel that makes one result of attention of results over disjoint sets of keys."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logarithms(lse_ptr, first, head, rows, S):
    """Of a head's rows in a part whose rows begin at `first`: -inf for those before."""
    inside = (rows >= first) & (rows < S)
    return tl.load(lse_ptr + head * (S - first) + rows - first, mask=inside, other=float("-inf"))


@triton.jit
def merge_kernel(
    outs,  # pointers to a result (B, S - first, H, D) of each part, this rank's
    lses,  # fp32 (B, H, S - first) of each part
    firsts,  # of each part: the first row that it has; 0 for the first part
    out_ptr,  # (B, S, H, D) this rank's
    lse_ptr,  # fp32 (B, H, S) this rank's
    S,
    H,
    D,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of a head, in fp32, the parts in their order. Weights are at most 1, so nothing overflows."""
    blocks = tl.cdiv(S, ROWS)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)  # of all batches
    b, h = head // H, head % H
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    top = _logarithms(lses[0], 0, head, rows, S)
    for i in tl.static_range(1, len(lses)):
        top = tl.maximum(top, _logarithms(lses[i], firsts[i], head, rows, S))
    top = tl.where(rows < S, top, 0.0)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i in tl.static_range(len(lses)):
        weight = tl.exp2((_logarithms(lses[i], firsts[i], head, rows, S) - top) * LOG2E)
        inside = ((rows >= firsts[i]) & (rows < S))[:, None] & (d < D)[None, :]
        places = ((b * (S - firsts[i]) + rows - firsts[i]) * H + h)[:, None] * D + d[None, :]
        acc += weight[:, None] * tl.load(outs[i] + places, mask=inside, other=0.0).to(tl.float32)
        total += weight
    inside = (rows < S)[:, None] & (d < D)[None, :]
    places = ((b * S + rows) * H + h)[:, None] * D + d[None, :]
    tl.store(out_ptr + places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + head * S + rows, top + tl.log2(total) / LOG2E, mask=rows < S)
