"""Runs of the Gluon kernel of all_to_all_matmul on the machine of `gluon_machine`, see `gluon_runs`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from triton import cdiv

from pkt.kernels.all_to_all_matmul import gluon as heads

from .gluon_machine import Descriptor, Pointer
from .gluon_runs import (
    BK,
    BM,
    BN,
    Broken,
    assert_exact,
    bias,
    constants,
    integers,
    poison,
    ready,
    warps,
    weights,
    world,
)


def run_heads(
    size: int, B: int, S: int, k: int, N: int, programs: int, seed: int, launches: int = 3,
    broken: Broken | None = None, stages: int = 3, transposed: bool = False, finish: bool = False, step: int = 1,
) -> None:  # fmt: skip
    """Each rank's S positions of B sequences by (size * k, N), of k columns from each rank. step: row blocks of a
    copy."""
    machine, functions = ready(heads, size, programs, seed, broken)
    rng = np.random.default_rng(seed)
    copies, others = cdiv(cdiv(S, BM), step), max(size - 1, 1)
    inboxes = [poison(others, B, S, k) for _ in range(size)]
    counters = [np.zeros((size - 1) * B * copies + 1, np.int64) for _ in range(size)]
    x = [[integers(rng, B, size, S, k) for _ in range(launches)] for _ in range(size)]
    w = [[integers(rng, size * k, N) for _ in range(launches)] for _ in range(size)]
    outs = [[poison(B, S, N) for _ in range(launches)] for _ in range(size)]

    def send(rank: int, e: int, b: int, c: int, d: int) -> None:
        peer, rows = (rank + d) % size, slice(c * step * BM, (c + 1) * step * BM)
        inboxes[peer][d - 1, b, rows] = x[rank][e][b, peer, rows]
        counters[peer][((d - 1) * B + b) * copies + c] = e + 1

    def engine(rank: int, e: int) -> None:
        machine.until(lambda: all(c[-1] >= e + 1 for c in counters))  # the ranks' meeting
        for b, c, d in product(range(B), range(copies), range(1, size)):
            machine.copied(lambda b=b, c=c, d=d: send(rank, e, b, c, d))

    def launch(rank: int, e: int) -> Callable[[int], None]:
        arguments = (
            Descriptor(x[rank][e].reshape(-1, k), BM, BK), Descriptor(inboxes[rank].reshape(-1, k), BM, BK),
            weights(w[rank][e], transposed), Descriptor(outs[rank][e], 1, BM // 2, BN), Pointer(counters, rank),
            bias(N, finish), warps.Sizes(S, N, size * k), B, step, world(rank, size, e),
            constants(stages, transposed, finish), 4,
        )  # fmt: skip

        def body(program: int) -> None:
            if program == 0:
                counters[rank][-1] += 1
                machine.start(rank, 0, lambda: engine(rank, e))
            machine.until(lambda: counters[rank][-1] == e + 1)
            functions["gluon_heads_product_kernel"](*arguments)

        return body

    machine.run([[launch(rank, e) for e in range(launches)] for rank in range(size)])
    for rank, e, b in product(range(size), range(launches), range(B)):
        rows = np.concatenate([x[source][e][b, rank] for source in range(size)], 1)
        assert_exact(outs[rank][e][b], rows @ w[rank][e], finish)
