"""The Gluon kernels' own source under many orders of events: results, deadlocks, launches that overlap."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from triton import cdiv

from .gluon_machine import Descriptor, Machine, Pointer, Stuck, Vector, as_python

gluon = pytest.importorskip("pkt.kernels._gluon")
from pkt.kernels import _gluon_all_gather_matmul as push  # noqa: E402
from pkt.kernels import _gluon_matmul_all_reduce as two_shot  # noqa: E402
from pkt.kernels import _gluon_matmul_reduce_scatter as scatter  # noqa: E402
from pkt.kernels._push_plan import SPLITS  # noqa: E402

BM, BN, BK = 8, 8, 4  # (BN // 2) * BM = BK * BN: half a tile fits where a step of B was


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32)


def weights(b: np.ndarray, transposed: bool, width: int = BN) -> Descriptor:
    return Descriptor(b.T, width, BK) if transposed else Descriptor(b, BK, width)


def bias(N: int, finish: bool) -> Vector | None:
    return Vector(np.arange(N, dtype=np.float32) - N // 2) if finish else None


def finished(exact: np.ndarray) -> np.ndarray:
    """With that bias, and relu."""
    n = exact.shape[1]
    return np.maximum(exact + np.arange(n) - n // 2, 0)


def run_push(size, m, N, K, programs, seed, launches=3, broken=None, transposed=False, finish=False, **plan):
    width, chunk, split = (plan.pop(name, default) for name, default in (("width", BN), ("chunk", 8), ("split", 2)))
    push_rows, num_comm, skip = (plan.pop(name, 1) for name in ("push_rows", "num_comm", "skip"))
    whole, copied = plan.pop("whole", 99), num_comm == 0 and size > 1
    chunk = cdiv(K, BK) * BK if copied else chunk
    options = {"CHUNK": chunk, "SPLIT": split, "GROUP": 2, "STAGES": 3, "HALF": None, "HALF_PART": None} | plan
    options |= {
        "COPIED": copied,
        "REGISTERS": 72,
        "EPILOGUE": "relu" if finish else "none",
        "LEAVE_OUT": "",
        "num_warps": 8,
    }
    machine = Machine(size, programs, seed)
    functions = as_python([gluon, push], machine)
    if broken:
        broken(functions)
    rng = np.random.default_rng(seed)
    num_m, chunks = -(-m // BM), -(-K // chunk)
    blocks = num_m * chunks * (chunk // BK)
    shape, groups = (2 * size * blocks * BM, BK), cdiv(num_m, min(push_rows, num_m))
    inbox = [np.full((size * m, K) if copied else shape, np.nan, np.float32) for _ in range(size)]
    counters = [np.zeros(size * groups + 1 if copied else size * num_m * chunks, np.int64) for _ in range(size)]
    per_rank, checks = [], []
    a = [[integers(rng, m, K) for _ in range(launches)] for _ in range(size)]
    for rank in range(size):
        bodies = []
        for e in range(launches):
            b, c = integers(rng, K, N), np.full((size, m, N), np.nan, np.float32)
            world = SimpleNamespace(rank=rank, size=size, launch=e + 1)
            peers = [Descriptor(inbox[(rank + d) % size], BM, BK) for d in range(1, size)]
            arguments = (
                Descriptor(a[rank][e], BM, BK), Descriptor(inbox[rank], BM, BK),
                weights(b, transposed, width), weights(b, transposed, width // split),
                Descriptor(c, 1, BM, width // 2), Descriptor(c, 1, BM, width // split // 2),
                *peers, *[None] * (7 - len(peers)), Pointer(counters, rank), bias(N, finish),
                m, N, K, min(num_comm, programs) if size > 1 else 0, skip, whole, min(push_rows, num_m), m, world,
                BM, width, BK,
            )  # fmt: skip
            these = options | {"TRANSPOSED": transposed}

            def body(p, x=arguments, o=these, rank=rank, e=e):
                if copied:
                    begin_copies(machine, [step[e] for step in a], rank, e, p, inbox, counters, min(push_rows, num_m))
                functions["gluon_push_kernel"](*x, **o)

            bodies.append(body)
            checks.append((c, b, e))
        per_rank.append(bodies)
    machine.run(per_rank)
    for c, b, e in checks:
        exact = np.concatenate([a[r][e] for r in range(size)]) @ b
        np.testing.assert_array_equal(c.reshape(size * m, N), finished(exact) if finish else exact)


def begin_copies(machine, shards, rank, e, program, inbox, counters, push_rows):
    """What _copies.gathering does, as the test of it has it: its `begin`, which a launch of every rank is behind."""
    size, m = machine.size, len(shards[rank])
    groups = (len(counters[rank]) - 1) // size
    if program == 0:
        counters[rank][-1] += 1
    machine.until(lambda: all(c[-1] == e + 1 for c in counters))

    def copy(g: int, peer: int) -> None:
        rows = slice(g * push_rows * BM, min((g + 1) * push_rows * BM, m))
        inbox[peer].reshape(size, m, -1)[rank, rows] = shards[rank][rows]
        counters[peer][rank * groups + g] = e + 1

    def engine() -> None:
        for g in range(groups):
            for d in range(1, size):
                machine.copied(lambda g=g, d=d: copy(g, (rank + d) % size))

    if program == 0:
        machine.start(rank, 0, engine)


def run_copied(size, m, N, K, *args, **options):
    """By copy engines."""
    run_push(size, m, N, K, *args, num_comm=0, **options)


def run_short_push(size, m, N, K, *args, **options):
    """A step of K: the next tile is finished before the last one is out."""
    run_push(size, m, N, BK, *args, STAGES=6, **options)


def run_inbox(
    size, m, N, K, programs, seed, launches=3, broken=None, stages=3, lag=1, transposed=False, finish=False, copies=0
):
    machine = Machine(size, programs, seed)
    functions = as_python([gluon, scatter], machine)
    if broken:
        broken(functions)
    rng = np.random.default_rng(seed)
    num_m, num_n = cdiv(m, BM), cdiv(N, BN)
    tiles, copied = num_m * num_n, copies > 0 and size > 1
    parcel = cdiv(tiles, copies) if copied else 1
    lag = tiles if copied else lag
    rows, words = (2 - copied) * (size - 1) * tiles * BM, max(size - 1, 1) * cdiv(tiles, parcel)
    inbox, outbox = ([np.full((rows, BN), np.nan, np.float32) for _ in range(size)] for _ in range(2))
    counters = [np.zeros(2 * words + 1 if copied else words, np.int64) for _ in range(size)]
    a = [[integers(rng, size * m, K) for _ in range(launches)] for _ in range(size)]
    b = [[integers(rng, K, N) for _ in range(launches)] for _ in range(size)]
    options = {"STAGES": stages, "GROUP": 2, "HALF": None, "REGISTERS": 72, "LEAVE_OUT": "", "num_warps": 8}
    options |= {"TRANSPOSED": transposed, "EPILOGUE": "relu" if finish else "none", "COPIED": copied}
    per_rank, checks = [], []
    for rank in range(size):
        bodies = []
        for e in range(launches):
            out = np.full((m, N), np.nan, np.float32)
            part = (BM, BN // 2)
            owners = [Descriptor(inbox[(rank + d) % size], *part) for d in range(1, size)]
            owners = [Descriptor(outbox[rank], *part)] if copied else owners
            arguments = (
                Descriptor(a[rank][e], BM, BK), weights(b[rank][e], transposed), Descriptor(inbox[rank], *part),
                Descriptor(out, *part), *owners, *[None] * (7 - len(owners)), Pointer(counters, rank),
                bias(N, finish), m, N, K, min(lag, tiles), parcel,
                SimpleNamespace(rank=rank, size=size, launch=e + 1), BM, BN, BK,
            )  # fmt: skip

            def body(p, x=arguments, rank=rank, e=e):
                if copied:
                    begin_parcels(machine, rank, e, p, inbox, outbox, counters, tiles, parcel)
                functions["gluon_inbox_kernel"](*x, **options)

            bodies.append(body)
            checks.append((out, rank, e))
        per_rank.append(bodies)
    machine.run(per_rank)
    for out, rank, e in checks:
        exact = sum(a[r][e] @ b[r][e] for r in range(size))[rank * m : (rank + 1) * m]
        np.testing.assert_array_equal(out, finished(exact) if finish else exact)


def begin_parcels(machine, rank, e, program, inbox, outbox, counters, tiles, parcel):
    """What _copies.scattering does: its `begin`, which a launch of every rank is behind, and what it returns."""
    size, parcels = machine.size, cdiv(tiles, parcel)
    words = (size - 1) * parcels
    if program == 0:
        counters[rank][words + 1 :] = 0
        counters[rank][words] += 1
    machine.until(lambda: all(c[words] == e + 1 for c in counters))

    def engine():
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


def run_parcels(size, m, N, K, *args, **options):
    """By copy engines."""
    run_inbox(size, m, N, K, *args, copies=2, **options)


def run_two_shot(size, M, N, K, programs, seed, launches=3, broken=None, lag=1, transposed=False, finish=False):
    """Each rank has one output for all launches: what is in it when the next launch begins there is looked at."""
    machine = Machine(size, programs, seed)
    functions = as_python([gluon, two_shot], machine)
    if broken:
        broken(functions)
    rng = np.random.default_rng(seed)
    part, count = (BM, BN // 2), cdiv(cdiv(M, BM) * cdiv(N, BN), size)
    inbox = [np.full(((size - 1) * count * BM, BN), np.nan, np.float32) for _ in range(size)]
    outs = [np.full((M, N), np.nan, np.float32) for _ in range(size)]
    counters = [np.zeros((size - 1) * count + 1, np.int64) for _ in range(size)]
    a = [[integers(rng, M, K) for _ in range(launches)] for _ in range(size)]
    b = [[integers(rng, K, N) for _ in range(launches)] for _ in range(size)]
    found: list[list[np.ndarray]] = [[] for _ in range(size)]
    options = {"STAGES": 3, "GROUP": 2, "HALF": None, "REGISTERS": 72, "TRANSPOSED": transposed, "num_warps": 8}
    options["EPILOGUE"] = "relu" if finish else "none"

    def launch(rank, e):
        boxes, results = ([Descriptor(x[(rank + d) % size], *part) for d in range(size)] for x in (inbox, outs))
        unused = [None] * (8 - size)
        arguments = (
            Descriptor(a[rank][e], BM, BK), weights(b[rank][e], transposed), boxes[0], results[0],
            *boxes[1:], *unused, *results[1:], *unused, Pointer(counters, rank), bias(N, finish), M, N, K,
            min(lag, count), SimpleNamespace(rank=rank, size=size, launch=e + 1), BM, BN, BK,
        )  # fmt: skip

        def body(program):
            if len(found[rank]) < e:
                found[rank].append(outs[rank].copy())
            functions["gluon_two_shot_kernel"](*arguments, **options)

        return body

    machine.run([[launch(rank, e) for e in range(launches)] for rank in range(size)])
    for rank in range(size):
        for e, out in enumerate([*found[rank], outs[rank]]):
            exact = sum(a[r][e] @ b[r][e] for r in range(size))
            np.testing.assert_array_equal(out, finished(exact) if finish else exact)


SIZES = [(1, 16, 16, 16), (2, 16, 24, 16), (3, 8, 8, 20), (4, 24, 16, 12), (4, 13, 10, 18)]
PLANS = [
    {},
    {"num_comm": 9, "split": 1, "chunk": 4},  # all push
    {"num_comm": 2, "skip": 2, "push_rows": 2, "STAGES": 4, "width": 16, "split": 4},
    {"skip": 99, "chunk": 16, "push_rows": 2, "split": 4},
    {"skip": 2, "whole": 0, "split": 2},
    {"skip": 3, "whole": 1, "width": 16, "split": 4, "STAGES": 4},
    {"num_comm": 0},
    {"num_comm": 0, "push_rows": 2, "whole": 1, "width": 16, "split": 4, "STAGES": 4},
]


@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize(("size", "m", "N", "K"), [*SIZES, (5, 9, 20, 10)])
def test_push(plan, size, m, N, K):
    for seed in range(3):
        run_push(size, m, N, K, 2 + seed, seed, **PLANS[plan])


@pytest.mark.parametrize("stages", [3, 4, 6])
@pytest.mark.parametrize("chunk", [4, 12, 32])
def test_chunks_of_few_and_many_units(chunk, stages):
    """Of one, of more than are stored at a time, and of more than a row has; and more programs push than there are
    chunks for."""
    for num_comm in (1, 2, 3):
        run_push(3, 21, 16, 18, 3, num_comm, chunk=chunk, STAGES=stages, num_comm=num_comm, skip=2)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_copied_tiles_come_in_the_order_of_the_copies(size):
    """Which go to rank + 1 first: some row blocks of every peer at a time, the last ones fewer."""
    functions = as_python([gluon, push], Machine(1, 1, 0))
    num_m, num_n, push_rows = 5, 3, 2
    for rank in range(size):
        order = (rank, num_m, num_n, size, 2, push_rows, True)
        tiles = [functions["_tile"](t, *order) for t in range(size * num_m * num_n)]
        came = list(dict.fromkeys((source, i // push_rows) for source, i, _, own in tiles if not own))
        assert came == [((rank - d) % size, g) for g in range(3) for d in range(1, size)]
        assert sorted(tiles) == sorted(
            (source, i, j, source == rank) for source in range(size) for i in range(num_m) for j in range(num_n)
        )


def test_fewer_tiles_than_programs():
    for seed in range(3):
        for split in (1, 2, 4):
            run_push(2, 5, 7, 6, 5, seed, num_comm=1 + seed, split=split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("programs", [1, 2, 5, 8])
def test_every_tile_and_every_part_once(programs, split):
    """Whoever pushes, however many rounds without them, however many tiles; and those who push are left out of as many
    rounds as there are, or as are asked for."""
    machine = SimpleNamespace(programs=programs, here=lambda: here, random=None)
    here = SimpleNamespace(program=0)
    functions = as_python([gluon, push], Machine(1, programs, 0))
    functions["gl"].program_id = lambda axis: here.program
    functions["gl"].num_programs = lambda axis: machine.programs
    for num_m, num_n in ((0, 3), (1, 1), (1, 3), (2, 2), (3, 3), (5, 4), (7, 6)):
        tiles = num_m * num_n
        for num_comm in range(programs + 1):
            for skip, most in ((0, 99), (1, 99), (2, 99), (5, 99), (99, 99), (0, 0), (2, 0), (1, 1), (4, 1), (1, 2)):
                seen = []
                counts = []
                for here.program in range(programs):
                    begin, end, alone, begin_part, end_part, late, cut = functions["_share"](
                        tiles, num_comm, skip, most, split
                    )
                    order = (0, num_m, num_n, 1, 2, 1, False)
                    whole = list(range(begin, end, programs))
                    seen += [
                        (i, j * split + part)
                        for _, i, j, _ in (functions["_place"](v, 0, alone, num_comm, 1, order) for v in whole)
                        for part in range(split)
                    ]
                    left = range(begin_part, end_part, programs)
                    places = [functions["_place"](v, tiles - cut, late, num_comm, split, order) for v in left]
                    seen += [(i, j) for _, i, j, _ in places]
                    counts.append(len(whole))
                assert sorted(seen) == [(i, j) for i in range(num_m) for j in range(num_n * split)]
                assert alone == min(skip, most, tiles // max(programs - num_comm, 1))
                assert late <= max(skip - alone, 0)
                if most == 99:
                    assert cut < programs
                if split > 1 and 0 < num_comm < programs:  # whole rounds for all
                    assert set(counts[:num_comm]) == {counts[-1] - alone}
                    assert len(set(counts[num_comm:])) == 1
                    assert counts[-1] <= most


@pytest.mark.parametrize("stages", [3, 4, 6])
def test_a_short_inner_dimension(stages):
    """Fewer steps than slots: the ring comes round more than once before a tile is out."""
    for seed in range(4):
        run_push(2, 16, 32, 4, 2, seed, STAGES=stages)
        run_push(2, 16, 40, 4, 3, seed, STAGES=stages, split=4)
        run_inbox(3, 16, 32, 3, 2, seed, stages=stages)


def test_transposed_weights():
    for seed in range(3):
        run_push(3, 13, 10, 18, 2, seed, transposed=True)
        run_inbox(3, 13, 10, 18, 2, seed, transposed=True)
        run_two_shot(3, 29, 10, 18, 2, seed, transposed=True)


def test_bias_and_epilogue():
    """Once, by who finishes a tile, each half of it with its own columns of the bias."""
    for seed in range(3):
        for size in (1, 3):
            run_push(size, 13, 10, 18, 2, seed, finish=True)
            run_inbox(size, 13, 10, 18, 2, seed, finish=True)
            run_two_shot(size, 29, 10, 18, 2, seed, finish=True)


def test_push_on_eight_ranks():
    run_push(8, 8, 8, 8, 2, 0, launches=2)


@pytest.mark.parametrize(("size", "m", "N", "K"), SIZES)
@pytest.mark.parametrize(("stages", "lag"), [(3, 1), (4, 2), (3, 99)])
def test_inbox(size, m, N, K, stages, lag):
    for seed in range(4):
        run_inbox(size, m, N, K, 1 + seed, seed, stages=stages, lag=lag)


@pytest.mark.parametrize(("size", "m", "N", "K"), [*SIZES, (5, 9, 20, 10)])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_parcels(size, m, N, K, copies):
    """Copied; also more copies than tiles."""
    for seed in range(3):
        run_inbox(size, m, N, K, 1 + seed, seed, copies=copies, finish=seed == 1)


@pytest.mark.parametrize(("size", "M", "N", "K"), [*SIZES, (3, 8, 8, 20), (4, 40, 24, 12), (2, 57, 33, 7)])
@pytest.mark.parametrize("lag", [1, 2, 99])
def test_two_shot(size, M, N, K, lag):
    """Also with fewer tiles than ranks."""
    for seed in range(4):
        run_two_shot(size, M, N, K, 1 + seed, seed, lag=lag)


def test_on_eight_ranks():
    run_inbox(8, 8, 8, 8, 2, 0, launches=2)
    run_two_shot(8, 24, 24, 8, 2, 0, launches=2)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("programs", [1, 4, 6, 132])
def test_turns(size, programs):
    """Every tile of every rank once, in order; and a rank comes to a tile of its own `lag` tiles at least after the
    others have come to it."""
    functions = as_python([gluon], Machine(1, programs, 0))
    for count in (1, 2, 7, 40):
        for lag in {1, min(5, count), count}:
            order = [functions["turn"](t, count, lag, size) for t in range(size * count)]
            assert sorted(order) == [(d, index) for d in range(size) for index in range(count)]
            for d in range(size):
                assert [index for far, index in order if far == d] == list(range(count))
            at = {what: t for t, what in enumerate(order)}
            for index in range(count):
                ahead = [at[0, index] - at[d, index] for d in range(1, size)]
                assert min(ahead, default=lag) >= lag
            if lag == count:
                assert order == [(d % size, index) for d in range(1, size + 1) for index in range(count)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_turns_of_the_programs(size):
    """None of them has many more tiles of its own rank, which take longer, than another."""
    functions = as_python([gluon], Machine(1, 132, 0))
    mine = np.zeros(132, int)
    for t in range(8 * 132 * size):
        mine[t % 132] += functions["turn"](t, 8 * 132, 33, size)[0] == 0
    assert np.ptp(mine) <= 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 7), (16, 9)], ids=str)
def test_every_tile_has_one_owner_and_a_place(size, shape):
    """Every rank works on every tile once; no two tiles of an owner share a place; and what is no tile is skipped."""
    functions = as_python([gluon, two_shot], Machine(size, 1, 0))
    tiles = shape[0] * shape[1]
    count = cdiv(tiles, size)
    for lag in {1, count}:
        owners: dict[tuple, set] = {}
        for rank in range(size):
            found = [functions["_tile"](t, rank, *shape, lag, size, 2) for t in range(size * count)]
            real = [((i, j), ((rank + d) % size, place)) for d, place, i, j in found if j >= 0]
            assert len(real) == tiles
            for cell, owner in real:
                owners.setdefault(cell, set()).add(owner)
        assert sorted(owners) == [(i, j) for i in range(shape[0]) for j in range(shape[1])]
        assert all(len(who) == 1 for who in owners.values())
        places = [who.pop() for who in owners.values()]
        assert len(set(places)) == tiles
        assert all(0 <= place < count for _, place in places)


def without(name, *path):
    """A fault: the function or attribute does nothing."""

    def broken(functions):
        if path:
            setattr(functions[name], path[0], lambda *args, **kwargs: None)
        else:
            functions[name] = lambda *args, **kwargs: None

    return broken


def goes_wrong(run, seeds, *sizes, **options):
    """Whether a run of two programs gives a wrong result or stands still, in one of the orders."""
    for seed in seeds:
        try:
            run(*sizes, 2, seed, **options)
        except (AssertionError, Stuck):
            return True
    return False


@pytest.mark.parametrize(
    "broken",
    [without("pl", "wait"), without("ptx", "drain"), without("tma", "store_wait"), without("mbarrier", "wait")],
    ids=["wait", "drain", "store_wait", "mbarrier.wait"],
)
@pytest.mark.parametrize("run", [run_push, run_inbox, run_two_shot])
def test_what_is_left_out_is_found(run, broken):
    assert goes_wrong(run, range(6), 3, 16, 16, 16, broken=broken)


def skipping(name, attribute, line, seen):
    """A fault: the call of `name.attribute` in that line does nothing. `seen`: the lines that call it."""

    def broken(functions):
        whole = getattr(functions[name], attribute)

        def call(*args, **kwargs):
            caller = sys._getframe(1)
            here = (caller.f_code.co_filename, caller.f_code.co_name, caller.f_lineno)
            seen.add(here)
            return None if here == line else whole(*args, **kwargs)

        setattr(functions[name], attribute, call)

    return broken


@pytest.mark.parametrize(
    ("run", "name", "attribute", "places"),
    [
        (run_push, "pl", "wait", 1),
        (run_copied, "pl", "wait", 1),
        (run_push, "gl", "atomic_add", 1),
        (run_push, "ptx", "drain", 2),
        (run_push, "tma", "store_wait", 3),
        (run_short_push, "mbarrier", "wait", 7),
        (run_inbox, "pl", "wait", 1),
        (run_inbox, "gl", "atomic_add", 1),
        (run_parcels, "pl", "wait", 1),
        (run_parcels, "gl", "atomic_add", 1),
        (run_two_shot, "pl", "wait", 2),
        (run_two_shot, "gl", "atomic_add", 2),
        (run_two_shot, "tma", "store_wait", 2),
    ],
)
def test_each_wait_and_each_signal_is_needed(run, name, attribute, places):
    lines: set = set()
    run(3, 16, 16, 16, 2, 0, broken=skipping(name, attribute, None, lines))
    assert len(lines) == places
    for line in lines:
        broken = skipping(name, attribute, line, set())
        assert goes_wrong(run, range(24), 3, 32, 32, 16, launches=2, broken=broken), f"nothing wrong without {line}"


def test_a_signal_before_the_data_is_found():
    """As long as the stores are only waited for somewhere else."""

    def broken(functions):
        functions["publish"] = lambda world: None

    for run in (run_two_shot, run_parcels):
        assert goes_wrong(run, range(12), 3, 32, 16, 16, broken=broken), run
