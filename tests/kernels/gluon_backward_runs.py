"""Runs of the Gluon kernels of ring attention's backward pass on the machine of `gluon_machine`, as in gluon_runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from pkt.kernels.ring_attention import backward, exact, gluon, gluon_dkv, gluon_dq, sequence

from .gluon_machine import Descriptor, Machine, Pointer, as_python
from .gluon_runs import BK, BM, RING, Broken, assert_near, flat, poison, warps, world

MODULES = [warps, *RING, backward, gluon, gluon_dq, gluon_dkv]
HALF = BM // 2
assert HALF == BK


def run_ring_backward(
    size: int, S: int, H: int, KV: int, programs: int, seed: int, launches: int = 2, broken: Broken | None = None,
    B: int = 1, D: int = 4, causal: bool = True, zigzag: bool = False, window: tuple[int, int] | None = None,
    chunk: int = 8, together: int = 1, stages: int = 2, length: int | None = None, documents: list[int] | None = None,
    low: bool = False, joined: int = 1,
) -> None:  # fmt: skip
    """dq, dk and dv of each rank, with lse and delta that are any numbers. A rank's launch has two steps: dq beside the
    copies of its keys and queries, then dk and dv. Padding is NaN. low: all scores of the second query are so low that
    a weight of the score 0 overflows. joined: batches whose chunks come together."""
    machine = Machine(size, programs, seed)
    functions = as_python(MODULES, machine)
    if broken:
        broken(functions)
    rng, layout = np.random.default_rng(seed), "zigzag" if zigzag else "contiguous"
    view = exact.view_of(S, size, causal, window, length)
    at = [sequence.positions(S, layout, rank, size).numpy() for rank in range(size)]
    everywhere = torch.arange(size * S)
    spans = documents and sequence.spans(torch.tensor(documents, dtype=torch.int32), everywhere, size * S)
    chunks = [sequence.pieces(S, layout, rank, size, chunk) for rank in range(size)]
    pieces = [sequence.pieces(S, layout, rank, size, HALF) for rank in range(size)]
    ready, others = (size - 1) * B * len(chunks[0]), max(size - 1, 1)
    inboxes = [[poison(others * B, S, heads * D) for _ in range(size)] for heads in (KV, KV, H, H)]
    places = len(pieces[0]) * HALF
    number_inboxes = [poison(others, 2, B, H, places) for _ in range(size)]
    counters = [np.zeros(2 * ready + 1, np.int64) for _ in range(size)]
    q, k, v, dout = (
        [[rng.standard_normal((B, S, heads * D)).astype(np.float32) for _ in range(launches)] for _ in range(size)]
        for heads in (H, KV, KV, H)
    )
    for one in (x for xs in k for x in xs if low):
        one[..., ::D] = 1
    for one in (x for xs in q for x in xs if low):
        one[:, 1, ::D] = -95 * D**0.5
    last = documents[-1] if documents else view.length
    for rank, x, e in product(range(size), (q, k, v, dout), range(launches)):
        x[rank][e][:, at[rank] >= last] = np.nan
    rows = [[rng.uniform(-1, 3, (2, B, H, S)).astype(np.float32) for _ in range(launches)] for _ in range(size)]
    for one in (x for xs in rows for x in xs):
        if low:
            one[0, :, :, 1] -= 95 / math.log(2)
        one[1, 0, 0, 0] = -200  # as an lse, behind those of the last head, it would give infinite weights
    parts_of = sequence.parts(S, layout, 0, 1)

    def placed(numbers: np.ndarray) -> np.ndarray:
        """With whole pieces of each part."""
        found = np.zeros((2, B, H, len(parts_of), places // len(parts_of)), np.float32)
        for i, part in enumerate(parts_of):
            found[..., i, : part.rows] = numbers[..., part.row : part.row + part.rows]
        return found.reshape(2, B, H, places)

    of_rows = [[placed(x) for x in xs] for xs in rows]
    dq = [[poison(B, S, H * D) for _ in range(launches)] for _ in range(size)]
    of_keys = [[poison(2, B, S, KV, D) for _ in range(launches)] for _ in range(size)]

    def begin(rank: int, e: int, program: int) -> None:
        """Wait for this launch on every rank, then copy each chunk to the peers that need it."""
        if program == 0:
            counters[rank][-1] += 1
        machine.until(lambda: all(c[-1] >= e + 1 for c in counters))
        if program == 0:
            machine.start(rank, 0, lambda: engine(rank, e))

    def engine(rank: int, e: int) -> None:
        for first, turned in ((0, False), (2, True)):
            for i, c, d in product(range(0, B, joined), range(len(chunks[0])), range(1, size)):
                peer, one = (rank + d) % size, view.turned if turned else view
                if sequence.needed(chunks[rank][c], one, S, layout, peer, size):
                    machine.copied(lambda i=i, c=c, d=d, first=first: copy(rank, e, i, c, d, first))

    def copy(rank: int, e: int, i: int, c: int, d: int, first: int) -> None:
        """Of keys and values, or of queries, dout and their numbers."""
        piece, peer = chunks[rank][c], (rank + d) % size
        here, end = slice(piece.row, piece.row + piece.rows), min(i + joined, B)
        for inbox, x in zip(inboxes[first : first + 2], (k, v, q, dout)[first : first + 2]):
            inbox[peer][(d - 1) * B + i : (d - 1) * B + end, here] = x[rank][e][i:end, here]
        if first:
            number_inboxes[peer][d - 1, :, i:end] = of_rows[rank][e][:, i:end]
        counters[peer][(first > 0) * ready + ((d - 1) * B + i) * len(chunks[0]) + c] = e + 1

    def sees(rank: int, source: int) -> np.ndarray:
        """(S, S): which keys of `source` the queries of `rank` see."""
        mine, theirs = at[rank][:, None], at[source][None, :]
        seen = (theirs - mine >= -view.left) & (theirs - mine <= view.right) & (np.maximum(mine, theirs) < view.length)
        if documents:
            first, behind = spans[:, at[rank], None].numpy()
            seen &= (theirs >= first) & (theirs < behind)
        return seen

    def steps(rank: int, e: int) -> list[Callable[[int], None]]:
        p = backward.Backward(
            *[None] * 4, flat(spans.numpy()) if documents else None, flat(of_rows[rank][e]), flat(dq[rank][e]),
            *map(flat, of_keys[rank][e]), *[None] * 5, Pointer(counters, rank), None,
            Pointer(counters, rank, len(counters[0]) - 1), None, None, 0, B, S, *view, D**-0.5 / math.log(2),
            joined, H, KV, D, zigzag, True, BM, HALF, D, chunk, 0, 1, HALF,
        )  # fmt: skip
        mine = [Descriptor(x, 1, HALF, D) for x in (q[rank][e], dout[rank][e])]
        keys = [Descriptor(x, 1, HALF, D) for x in (k[rank][e], v[rank][e])]
        their_keys, theirs = ([Descriptor(x[rank], 1, HALF, D) for x in xs] for xs in (inboxes[:2], inboxes[2:]))
        numbers, inbox = (Descriptor(x.reshape(-1), HALF) for x in (of_rows[rank][e], number_inboxes[rank]))
        last = (world(rank, size, e), stages, 4)

        def queries(program: int) -> None:
            begin(rank, e, program)
            functions["gluon_dq_kernel"](*mine, *keys, *their_keys, p, together, *last)

        def gradients_of_keys(program: int) -> None:
            behind = p._replace(BLOCK_M=HALF)
            functions["gluon_dkv_kernel"](*mine, numbers, *keys, *theirs, inbox, behind, together, *last)

        return [queries, gradients_of_keys]

    machine.run([[step for e in range(launches) for step in steps(rank, e)] for rank in range(size)])
    q, k, v, dout = ([[np.nan_to_num(x) for x in xs] for xs in operand] for operand in (q, k, v, dout))
    for e in range(launches):
        wanted = np.zeros((size, 2, B, S, KV, D))
        for rank, b, h in product(range(size), range(B), range(H)):
            mine, g = np.s_[b, :, h * D : h * D + D], h // (H // KV)
            wanted_dq = np.zeros((S, D))
            for source in range(size):
                its = np.s_[b, :, g * D : g * D + D]
                scores = q[rank][e][mine].astype(float) @ k[source][e][its].T * D**-0.5
                weights = np.where(sees(rank, source), np.exp(scores - rows[rank][e][0, b, h][:, None] * np.log(2)), 0)
                slopes = weights * (dout[rank][e][mine] @ v[source][e][its].T - rows[rank][e][1, b, h][:, None])
                wanted_dq += slopes @ k[source][e][its] * D**-0.5
                wanted[source, 0, b, :, g] += slopes.T @ q[rank][e][mine] * D**-0.5
                wanted[source, 1, b, :, g] += weights.T @ dout[rank][e][mine]
            assert_near(dq[rank][e][mine], wanted_dq, 100 if low else 1)
        for rank in range(size):
            assert_near(of_keys[rank][e], wanted[rank], 100 if low else 1)
