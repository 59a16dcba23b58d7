"""Runs of the Gluon kernel of Ulysses attention on the machine of `gluon_machine`, see `gluon_runs`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from pkt.kernels.ring_attention import exact, sequence
from pkt.kernels.ring_attention.kernel import Attention
from pkt.kernels.shared.copies import turn
from pkt.kernels.ulysses_attention import gluon as ulysses
from pkt.kernels.ulysses_attention.groups import groups_of
from pkt.kernels.ulysses_attention.heads import heads_of

from .gluon_machine import Descriptor, Pointer, Symmetric
from .gluon_runs import BK, BM, Broken, assert_near, flat, poison, ready, world


def run_ulysses(
    size: int, R: int, H: int, KV: int, programs: int, seed: int, launches: int = 2, broken: Broken | None = None,
    B: int = 1, D: int = 4, group: int = 1, causal: bool = True, window: tuple[int, int] | None = None,
    together: int = 1, documents: list[int] | None = None, meets: bool = True, stages: int = 2,
    meeting: bool = False, joined: int = 1,
) -> None:  # fmt: skip
    """Attention of size * R positions to each other, with H heads in all: tiles of BM queries and BK keys, and groups
    of `group` heads. Keys and values behind the last document are NaN. meets: whether ranks meet when a launch ends.
    meeting: programs meet before each task that all of them have. joined: batches whose groups come together."""
    machine, functions = ready(ulysses, size, programs, seed, broken)
    functions["SWIZZLED"] = D  # rows of shared memory lie as here
    rng, held, total = np.random.default_rng(seed), heads_of(H, KV, size), size * R
    view, groups = exact.view_of(R, size, causal, window, None), groups_of(held, group)
    q, k, v = (
        [[rng.standard_normal((B, R, heads, D)).astype(np.float32) for _ in range(launches)] for _ in range(size)]
        for heads in (H, KV, KV)
    )
    last = documents[-1] if documents else total
    for rank, x, e in product(range(size), (k, v), range(launches)):
        x[rank][e][:, max(last - rank * R, 0) :] = np.nan
    inboxes = {
        name: [poison(size - 1, B, R, n, D) for _ in range(size)]
        for name, n in (("q", held.queries), ("k", held.keys), ("v", held.keys))
    }
    counters = [np.zeros(B * len(groups) * (size - 1) + 1, np.int64) for _ in range(size)]
    homes = [poison(B, R, H, D) for _ in range(size)]
    bars = [np.zeros(1, np.int64) for _ in range(size)]
    outs = [[poison(B, R, H, D) for _ in range(launches)] for _ in range(size)]
    met = [0] * size
    ends = documents and torch.tensor(documents, dtype=torch.int32)
    spans = flat(sequence.spans(ends, torch.arange(total), total).numpy()) if documents else None

    def send(rank: int, e: int, i: int, at: int, d: int) -> None:
        """A group of heads to the peer at distance d."""
        peer, heads, batches = (rank + d) % size, groups[at], slice(i, i + joined)
        for name, x in (("q", q), ("k", k), ("v", v))[: 3 if heads.first else 1]:
            n, repeats = (held.queries, 1) if name == "q" else (held.keys, held.repeats)
            for j in heads.queries if name == "q" else heads.keys:
                inboxes[name][peer][d - 1, batches, :, j] = x[rank][e][batches, :, (peer * n + j) // repeats]
        counters[peer][(i * len(groups) + at) * (size - 1) + d - 1] = e + 1

    def engine(rank: int, e: int) -> None:
        for i, at in product(range(0, B, joined), range(len(groups))):
            for d in turn(size, at):
                machine.copied(lambda i=i, at=at, d=d: send(rank, e, i, at, d))

    def attention(rank: int, e: int) -> Callable[[int], None]:
        bar = Pointer(bars, rank) if meeting else None
        p = Attention(
            *[None] * 3, spans, Symmetric(homes), *[None] * 3, Pointer(counters, rank), *[None] * 2, bar, B, R, *view,
            D**-0.5 / np.log(2), 0, joined, held.queries, held.keys, D, "copied", False, True, BM, BK, D,
            ulysses.WHOLE, 0,
        )  # fmt: skip
        blocks = [1, BM // 2, D], [1, BK, D], [1, BK, D]
        mine = [Descriptor(x[rank][e].reshape(B, R, -1), *block) for x, block in zip((q, k, v), blocks)]
        theirs = [
            Descriptor(x[rank].reshape((size - 1) * B, R, -1), *block) for x, block in zip(inboxes.values(), blocks)
        ]
        arguments = (*mine, *theirs, p, together, world(rank, size, e), group, held.repeats, stages, 4)

        def body(program: int) -> None:
            if program == 0:
                counters[rank][-1] += 1
                machine.start(rank, 0, lambda: engine(rank, e))
            machine.until(lambda: counters[rank][-1] == e + 1)
            functions["gluon_heads_kernel"](*arguments)

        return body

    def meet(rank: int, e: int, program: int) -> None:
        if program == 0:
            met[rank] += 1
            machine.until(lambda: not meets or min(met) >= e + 1)

    def take(rank: int, e: int, program: int) -> None:
        if program == 0:
            machine.pause()
            outs[rank][e][...] = homes[rank]

    def steps(rank: int, e: int) -> list[Callable[[int], None]]:
        return [attention(rank, e), lambda program: meet(rank, e, program), lambda program: take(rank, e, program)]

    machine.run([[step for e in range(launches) for step in steps(rank, e)] for rank in range(size)])
    tasks = B * held.queries * size * -(-R // BM)
    assert all(bar == meeting * launches * (tasks // programs) * programs for bar in bars)
    at = np.arange(total)
    distance = at[None] - at[:, None]
    apart = (distance < -view.left) | (distance > view.right)
    if documents:
        of = np.searchsorted(documents, at, side="right")
        apart |= (of[:, None] != of) | (of == 0) | (of == len(documents))
    for e, b, h in product(range(launches), range(B), range(H)):
        queries, keys, values, found = (
            np.concatenate([x[rank][e][b, :, i] for rank in range(size)])
            for x, i in ((q, h), (k, h // (H // KV)), (v, h // (H // KV)), (outs, h))
        )
        scores = np.where(apart, -np.inf, queries.astype(float) @ np.nan_to_num(keys).T * D**-0.5)
        weights = np.exp(scores)
        sums = weights.sum(1)
        assert_near(found, weights / np.where(sums, sums, 1.0)[:, None] @ np.nan_to_num(values))
