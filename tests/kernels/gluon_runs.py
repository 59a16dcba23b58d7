"""Runs of the Gluon kernels on the machine of `gluon_machine`, in an order of events by seed: results must be exact.

Each of the `launches` has operands of its own, and nothing is reset between them. broken: a fault, which changes the
functions before they run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import cdiv

from pkt.kernels.all_gather_matmul import gluon as push
from pkt.kernels.all_gather_matmul import gluon_keep, gluon_order
from pkt.kernels.flash_decode import gluon as decode
from pkt.kernels.flash_decode import gluon_loading, gluon_units
from pkt.kernels.matmul_all_reduce import gluon as two_shot
from pkt.kernels.matmul_reduce_scatter import gluon as scatter
from pkt.kernels.ring_attention import exact, gluon_tasks, sequence
from pkt.kernels.ring_attention import gluon as ring
from pkt.kernels.ring_attention import kernel as ring_kernel
from pkt.kernels.shared import gluon_slots
from pkt.kernels.shared import gluon_warps as warps
from pkt.kernels.ulysses_attention import gluon as ulysses

from .gluon_machine import Descriptor, Machine, Pointer, Vector, as_python

BM, BN, BK = 8, 8, 4  # (BM // 2) * BN = BK * BN: half a tile fits where a step of B was
HALF, SWIZZLED = (BM // 2, BN), 2
SIZES = [(1, 16, 16, 16), (2, 16, 24, 16), (3, 8, 8, 20), (4, 24, 16, 12), (4, 13, 10, 18)]  # (ranks, m, N, K)

RING = [ring_kernel, gluon_tasks, gluon_slots]
PARTS = {
    decode: [gluon_slots, gluon_units, gluon_loading], push: [gluon_order, gluon_keep], ring: RING,
    ulysses: [*RING, ring],
}  # fmt: skip
"""More modules of a kernel."""
PUSH = [warps, *PARTS[push], push]
Functions = dict[str, Any]
Broken = Callable[[Functions], None]


# ------------------------------------------------------------------------------------------------- what runs share
def ready(module: ModuleType, size: int, programs: int, seed: int, broken: Broken | None) -> tuple[Machine, Functions]:
    """A machine, and the functions of a form to run there."""
    machine = Machine(size, programs, seed)
    functions = as_python([warps, *PARTS.get(module, ()), module], machine)
    functions["SWIZZLED"] = SWIZZLED  # tiles are small here
    functions["KEPT"] = BM // 2
    if broken:
        broken(functions)
    return machine, functions


def world(rank: int, size: int, e: int) -> SimpleNamespace:
    """A rank's world in launch e, from 0."""
    return SimpleNamespace(rank=rank, size=size, launch=e + 1)


def constants(stages: int, transposed: bool, finish: bool, gated: bool = False) -> Any:
    return warps.Constants(stages, 2, transposed, "swiglu" if gated else "relu" if finish else "none")


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32)


def poison(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def flat(tensor: np.ndarray) -> Vector:
    """A pointer to a tensor's first element."""
    return Vector(tensor.reshape(-1))


def weights(b: np.ndarray, transposed: bool, width: int = BN) -> Descriptor:
    return Descriptor(b.T, width, BK) if transposed else Descriptor(b, BK, width)


def bias(N: int, finish: bool) -> Vector | None:
    return Vector(np.arange(N, dtype=np.float32) - N // 2) if finish else None


class Wrong(AssertionError):
    """A result that is not the exact one; no other assertion of a run says so."""


def assert_exact(found: np.ndarray, exact: np.ndarray, finish: bool, gated: bool = False) -> None:
    """finish: add `bias` and apply relu to `exact` first. gated: swiglu in its place, where silu(x) is x. Raises
    Wrong."""
    n = exact.shape[1]
    if finish:
        exact = exact + np.arange(n) - n // 2
    if gated:
        exact = exact[:, 0::2] * exact[:, 1::2]
    try:
        np.testing.assert_array_equal(found, np.maximum(exact, 0) if finish and not gated else exact)
    except AssertionError as error:
        raise Wrong(str(error)) from None


# ----------------------------------------------------------------------------------------------- all_gather_matmul
def run_push(
    size: int, m: int, N: int, K: int, programs: int, seed: int, launches: int = 3, broken: Broken | None = None,
    stages: int = 3, transposed: bool = False, finish: bool = False, width: int = BN, chunk: int = 8, cut_last: int = 2,
    push_rows: int = 1, num_comm: int = 1, rounds_alone: int = 1, whole_rounds: int = 99, gated: bool = False,
    more: int = 0, keep: bool = False,
) -> None:  # fmt: skip
    """Shards (m, K) gathered and multiplied by (K, N). num_comm: 0 where copy engines move them. more: columns of a
    second weight, which a launch behind each one multiplies with what that one has gathered. keep: A, as
    keep="whole" does; copy engines move it then."""
    machine, functions = ready(push, size, programs, seed, broken)
    copied = num_comm == 0 and size > 1
    rng = np.random.default_rng(seed)
    num_m, chunks = cdiv(m, BM), cdiv(K, chunk)
    push_rows = min(push_rows, num_m)
    shape = (size * m, K) if copied else (2 * size * num_m * chunks * (chunk // BK) * BM, BK)
    inbox = [poison(*shape) for _ in range(size)]
    words = size * cdiv(num_m, push_rows) * chunks + 1 if copied else size * num_m * chunks
    counters = [np.zeros(words, np.int64) for _ in range(size)]
    a = [[integers(rng, m, K) for _ in range(launches)] for _ in range(size)]
    b = [[integers(rng, K, N) for _ in range(launches)] for _ in range(size)]
    each = 2 if gated else 1
    outs = [[poison(size, m, N // each) for _ in range(launches)] for _ in range(size)]
    others = [[integers(rng, K, more) for _ in range(launches)] for _ in range(size)]
    ends = [[poison(size, m, more // each) for _ in range(launches)] for _ in range(size)]
    wholes = [[poison(size, m, K) for _ in range(launches)] for _ in range(size)]

    def launch(rank: int, e: int, again: bool = False) -> Callable[[int], None]:
        peers = [Descriptor(inbox[(rank + d) % size], BM, BK) for d in range(1, size)]
        weight, out = (others[rank][e], ends[rank][e]) if again else (b[rank][e], outs[rank][e])
        pushing, alone = (0, 0) if again or size == 1 else (min(num_comm, programs), rounds_alone)
        stored = width // each
        arguments = (
            Descriptor(a[rank][e], BM, BK),
            weights(weight, transposed, width), weights(weight, transposed, width // cut_last),
            Descriptor(out, 1, BM // 2, stored), Descriptor(out, 1, BM // 2, stored // cut_last),
            Descriptor(inbox[rank], BM, BK), *peers, *[None] * (7 - len(peers)), Pointer(counters, rank),
            bias(weight.shape[1], finish), None, None,
            gluon_keep.Keeping(*map(flat, (a[rank][e], inbox[rank], wholes[rank][e]))) if keep else None,
            warps.Sizes(m, weight.shape[1], K), pushing, alone, whole_rounds, push_rows, world(rank, size, e),
            constants(stages, transposed, finish, gated), chunk, cut_last, copied, again, 4,
        )  # fmt: skip

        def body(program: int) -> None:
            if copied and not again:
                begin_copies(machine, [step[e] for step in a], rank, e, program, inbox, counters, push_rows, chunk)
            functions["gluon_push_kernel"](*arguments)

        return body

    behind = [lambda rank, e: launch(rank, e, True)] * bool(more)
    machine.run([[start(rank, e) for e in range(launches) for start in (launch, *behind)] for rank in range(size)])
    for rank in range(size):
        for e in range(launches):
            gathered = np.concatenate([step[e] for step in a])
            if keep:
                assert_exact(wholes[rank][e].reshape(size * m, K), gathered, False)
            assert_exact(outs[rank][e].reshape(size * m, N // each), gathered @ b[rank][e], finish, gated)
            if more:
                assert_exact(ends[rank][e].reshape(size * m, -1), gathered @ others[rank][e], finish, gated)


def begin_copies(
    machine: Machine, shards: list[np.ndarray], rank: int, e: int, program: int, inbox: list[np.ndarray],
    counters: list[np.ndarray], push_rows: int, chunk: int,
) -> None:  # fmt: skip
    """As copies.gathering does: wait for this launch on every rank, then copy the shard to the peers."""
    size, (m, K) = machine.size, shards[rank].shape
    groups, chunks = cdiv(cdiv(m, BM), push_rows), cdiv(K, chunk)
    if program == 0:
        counters[rank][-1] += 1
    machine.until(lambda: all(c[-1] == e + 1 for c in counters))

    def copy(g: int, peer: int, c: int) -> None:
        rows, columns = slice(g * push_rows * BM, min((g + 1) * push_rows * BM, m)), slice(c * chunk, (c + 1) * chunk)
        inbox[peer].reshape(size, m, K)[rank, rows, columns] = shards[rank][rows, columns]
        counters[peer][(rank * groups + g) * chunks + c] = e + 1

    def engine() -> None:
        for g, d, c in product(range(groups), range(1, size), range(chunks)):
            machine.copied(lambda g=g, d=d, c=c: copy(g, (rank + d) % size, c))

    if program == 0:
        machine.start(rank, 0, engine)


def run_copied(*args: int, **options: Any) -> None:
    """run_push by copy engines."""
    run_push(*args, num_comm=0, **options)


def run_kept(size: int, m: int, N: int, K: int, *args: int, **options: Any) -> None:
    """run_copied with twice the columns of A, which is kept."""
    run_copied(size, m, N, 2 * K, *args, keep=True, **options)


def run_short_push(size: int, m: int, N: int, K: int, *args: int, **options: Any) -> None:
    """run_push with one step of K: the next tile is finished before the last one is stored."""
    run_push(size, m, N, BK, *args, stages=6, **options)


# ------------------------------------------------------------------------------------------- matmul_reduce_scatter
def run_inbox(
    size: int, m: int, N: int, K: int, programs: int, seed: int, launches: int = 3, broken: Broken | None = None,
    stages: int = 3, transposed: bool = False, finish: bool = False, lag: int = 1, copies: int = 0,
) -> None:  # fmt: skip
    """Rows m of the sum over ranks of (size * m, K) by (K, N). copies: parcels of a rank's tiles that copy engines
    move to each peer, 0 where the kernel stores there."""
    machine, functions = ready(scatter, size, programs, seed, broken)
    rng = np.random.default_rng(seed)
    tiles, copied = cdiv(m, BM) * cdiv(N, BN), copies > 0 and size > 1
    parcel = cdiv(tiles, copies) if copied else 1
    lag = tiles if copied else min(lag, tiles)
    rows, words = (2 - copied) * (size - 1) * tiles * BM, max(size - 1, 1) * cdiv(tiles, parcel)
    inbox, outbox = ([poison(rows, BN) for _ in range(size)] for _ in range(2))
    counters = [np.zeros(2 * words + 1 if copied else words, np.int64) for _ in range(size)]
    a = [[integers(rng, size * m, K) for _ in range(launches)] for _ in range(size)]
    b = [[integers(rng, K, N) for _ in range(launches)] for _ in range(size)]
    outs = [[poison(m, N) for _ in range(launches)] for _ in range(size)]

    def launch(rank: int, e: int) -> Callable[[int], None]:
        owners = [Descriptor(inbox[(rank + d) % size], *HALF) for d in range(1, size)]
        owners = [Descriptor(outbox[rank], *HALF)] if copied else owners
        arguments = (
            Descriptor(a[rank][e], BM, BK), weights(b[rank][e], transposed),
            Descriptor(outs[rank][e], *HALF), Descriptor(inbox[rank], *HALF), *owners, *[None] * (7 - len(owners)),
            Pointer(counters, rank),
            bias(N, finish), None, warps.Sizes(m, N, K), lag, parcel, world(rank, size, e),
            constants(stages, transposed, finish), copied, 4,
        )  # fmt: skip

        def body(program: int) -> None:
            if copied:
                begin_parcels(machine, rank, e, program, inbox, outbox, counters, tiles, parcel)
            functions["gluon_inbox_kernel"](*arguments)

        return body

    machine.run([[launch(rank, e) for e in range(launches)] for rank in range(size)])
    for e in range(launches):
        exact = sum(a[r][e] @ b[r][e] for r in range(size))
        for rank in range(size):
            assert_exact(outs[rank][e], exact[rank * m : (rank + 1) * m], finish)


def begin_parcels(
    machine: Machine, rank: int, e: int, program: int, inbox: list[np.ndarray], outbox: list[np.ndarray],
    counters: list[np.ndarray], tiles: int, parcel: int,
) -> None:  # fmt: skip
    """As copies.scattering does: wait for this launch on every rank, then copy each parcel once its tiles are done."""
    size, parcels = machine.size, cdiv(tiles, parcel)
    words = (size - 1) * parcels
    if program == 0:
        counters[rank][words + 1 :] = 0
        counters[rank][words] += 1
    machine.until(lambda: all(c[words] == e + 1 for c in counters))

    def engine() -> None:
        for at in range(words):
            d, g = 1 + at // parcels, at % parcels
            peer, finished = (rank + d) % size, min(parcel, tiles - g * parcel)
            machine.until(lambda at=at, finished=finished: counters[rank][words + 1 + at] >= finished)
            begin = ((d - 1) * tiles + g * parcel) * BM
            rows = slice(begin, begin + finished * BM)
            machine.copied(lambda peer=peer, rows=rows: inbox[peer].__setitem__(rows, outbox[rank][rows]))
            counters[peer][at] = e + 1

    if program == 0:
        machine.start(rank, 0, engine)


def run_parcels(*args: int, **options: Any) -> None:
    """run_inbox by copy engines."""
    run_inbox(*args, copies=2, **options)


# ----------------------------------------------------------------------------------------------- matmul_all_reduce
def run_two_shot(
    size: int, M: int, N: int, K: int, programs: int, seed: int, launches: int = 3, broken: Broken | None = None,
    transposed: bool = False, finish: bool = False, lag: int = 1, copied: bool = False,
) -> None:  # fmt: skip
    """The sum over ranks of (M, K) by (K, N). Each rank has one output for all launches, which is checked as it is when
    the rank's next launch begins. copied: peers cannot reach the outputs, one for each launch."""
    machine, functions = ready(two_shot, size, programs, seed, broken)
    functions["RUN"] = 2  # tiles are small here
    rng = np.random.default_rng(seed)
    tiles = cdiv(M, BM) * cdiv(N, BN)
    count = cdiv(tiles, size)
    early = seed % 3 * (size - 1) * count // 2  # of other ranks' tiles none, half or all
    inbox = [poison((size - 1) * count * BM, BN) for _ in range(size)]
    landed = [poison(M, N) for _ in range(size)]
    outs = [[poison(M, N) if copied else landed[rank] for _ in range(launches)] for rank in range(size)]
    counters = [np.zeros((size - 1) * count + tiles, np.int64) for _ in range(size)]
    a = [[integers(rng, M, K) for _ in range(launches)] for _ in range(size)]
    b = [[integers(rng, K, N) for _ in range(launches)] for _ in range(size)]
    found: list[list[np.ndarray]] = [[] for _ in range(size)]

    def launch(rank: int, e: int) -> Callable[[int], None]:
        boxes, results = ([Descriptor(x[(rank + d) % size], *HALF) for d in range(size)] for x in (inbox, landed))
        moved = [None] * 2
        if copied:
            moved = [Vector(x.reshape(-1)) for x in (landed[rank], outs[rank][e])]
            results[0] = Descriptor(outs[rank][e], *HALF)
        unused = [None] * (8 - size)
        arguments = (
            Descriptor(a[rank][e], BM, BK), weights(b[rank][e], transposed), *boxes, *unused, *results, *unused,
            Pointer(counters, rank), *moved, bias(N, finish), None,
            warps.Sizes(M, N, K), (cdiv(M, BM), cdiv(N, BN)), min(lag, count), early, world(rank, size, e),
            constants(3, transposed, finish), 4,
        )  # fmt: skip

        def body(program: int) -> None:
            if len(found[rank]) < e and not copied:
                found[rank].append(landed[rank].copy())
            functions["gluon_two_shot_kernel"](*arguments)

        return body

    machine.run([[launch(rank, e) for e in range(launches)] for rank in range(size)])
    for e in range(launches):
        exact = sum(a[r][e] @ b[r][e] for r in range(size))
        for rank in range(size):
            assert_exact(outs[rank][e] if copied else [*found[rank], landed[rank]][e], exact, finish)


def run_landed(*args: int, **options: Any) -> None:
    """run_two_shot with outputs that peers cannot reach."""
    run_two_shot(*args, copied=True, **options)


# -------------------------------------------------------------------------------------------------- ring_attention
def run_ring(
    size: int, S: int, H: int, KV: int, programs: int, seed: int, launches: int = 2, broken: Broken | None = None,
    B: int = 1, D: int = 4, causal: bool = True, zigzag: bool = False, window: tuple[int, int] | None = None,
    chunk: int = 8, together: int = 1, stages: int = 2, length: int | None = None, documents: list[int] | None = None,
    joined: int = 1,
) -> None:  # fmt: skip
    """Attention of each rank's S queries to the keys of all ranks, in tiles of BM queries and BK keys. Keys and values
    of padding are NaN. joined: batches whose chunks come together."""
    machine, functions = ready(ring, size, programs, seed, broken)
    functions["SWIZZLED"] = D  # rows of shared memory lie as here
    rng, layout = np.random.default_rng(seed), "zigzag" if zigzag else "contiguous"
    view = exact.view_of(S, size, causal, window, length)
    pieces = [sequence.pieces(S, layout, rank, size, chunk) for rank in range(size)]
    at = np.concatenate([sequence.positions(S, layout, rank, size) for rank in range(size)]).reshape(size, S)
    chunks, others = len(pieces[0]), max(size - 1, 1)
    inboxes = [[poison(others * B, S, KV * D) for _ in range(size)] for _ in "kv"]
    counters = [np.zeros((size - 1) * B * chunks + 1, np.int64) for _ in range(size)]
    q, k, v = (
        [[rng.standard_normal((B, S, heads * D)).astype(np.float32) for _ in range(launches)] for _ in range(size)]
        for heads in (H, KV, KV)
    )
    last = documents[-1] if documents else view.length
    for rank, x, e in product(range(size), (k, v), range(launches)):
        x[rank][e][:, at[rank] >= last] = np.nan
    ends = documents and torch.tensor(documents, dtype=torch.int32)
    outs = [[poison(B, S, H * D) for _ in range(launches)] for _ in range(size)]
    lses = [[poison(B, H, S) for _ in range(launches)] for _ in range(size)]

    def begin(rank: int, e: int, program: int) -> None:
        """As forms._copying does: wait for this launch on every rank, then copy each chunk to the peers that need
        it."""
        if program == 0:
            counters[rank][-1] += 1
        machine.until(lambda: all(c[-1] == e + 1 for c in counters))

        def copy(i: int, c: int, d: int) -> None:
            piece, peer, end = pieces[rank][c], (rank + d) % size, min(i + joined, B)
            rows = slice(piece.row, piece.row + piece.rows)
            for inbox, x in zip(inboxes, (k, v)):
                inbox[peer][(d - 1) * B + i : (d - 1) * B + end, rows] = x[rank][e][i:end, rows]
            counters[peer][((d - 1) * B + i) * chunks + c] = e + 1

        def engine() -> None:
            for i, c, d in product(range(0, B, joined), range(chunks), range(1, size)):
                if sequence.needed(pieces[rank][c], view, S, layout, (rank + d) % size, size):
                    machine.copied(lambda i=i, c=c, d=d: copy(i, c, d))

        if program == 0:
            machine.start(rank, 0, engine)

    def launch(rank: int, e: int) -> Callable[[int], None]:
        spans = flat(sequence.spans(ends, torch.arange(size * S), size * S).numpy()) if documents else None
        p = ring_kernel.Attention(
            *[None] * 3, spans, flat(outs[rank][e]), flat(lses[rank][e]), *[None] * 2, Pointer(counters, rank),
            *[None] * 3, B, S, *view, D**-0.5 / np.log(2), 0, joined, H, KV, D, "copied", zigzag, True, BM, BK, D,
            chunk, 0,
        )  # fmt: skip
        keys = [Descriptor(x, 1, BK, D) for x in (k[rank][e], v[rank][e], inboxes[0][rank], inboxes[1][rank])]
        arguments = (Descriptor(q[rank][e], 1, BM // 2, D), *keys, p, together, world(rank, size, e), stages, 4)

        def body(program: int) -> None:
            begin(rank, e, program)
            functions["gluon_attention_kernel"](*arguments)

        return body

    machine.run([[launch(rank, e) for e in range(launches)] for rank in range(size)])
    for e, rank, b, h in product(range(launches), range(size), range(B), range(H)):
        mine, of_keys = slice(h * D, h * D + D), slice(h // (H // KV) * D, h // (H // KV) * D + D)
        keys, values = (np.concatenate([x[r][e][b, :, of_keys] for r in range(size)]) for x in (k, v))
        scores = q[rank][e][b, :, mine].astype(float) @ keys.T * D**-0.5
        distance = at.reshape(1, -1) - at[rank][:, None]
        apart = (distance < -view.left) | (distance > view.right)
        apart |= np.maximum(at.reshape(1, -1), at[rank][:, None]) >= view.length
        if documents:
            of = [np.searchsorted(documents, x, side="right") for x in (at.reshape(1, -1), at[rank][:, None])]
            apart |= (of[0] != of[1]) | (of[0] == 0) | (of[0] == len(documents))
        scores[apart] = -np.inf
        total = np.exp(scores).sum(1)
        with np.errstate(divide="ignore"):
            assert_near(lses[rank][e][b, h], np.log(total))
        weights = np.exp(scores) / np.where(total, total, 1.0)[:, None]
        assert_near(outs[rank][e][b, :, mine], weights @ np.nan_to_num(values))


def assert_near(found: np.ndarray, exact: np.ndarray, size: float = 1) -> None:
    """But for rounding in fp32 of terms of about this size. Raises Wrong."""
    if not np.allclose(found, exact, rtol=1e-4, atol=1e-4 * size):
        raise Wrong(f"{np.abs(found - exact).max()}")
