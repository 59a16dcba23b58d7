"""Reduce-scatter: each rank has its part of the sum, in fp32 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.reduce_scatter import OPERATOR, Op, reduce_scatter, reference
from pkt.kernels.shared import grid, inbox

from .helpers import DTYPES, LAUNCHES, SEEDS, assert_raises, assert_within, inputs, on_ranks, sum_bound

MODES = tuple(OPERATOR.forms)


def scatters(
    world: Any,
    part: tuple[int, ...],
    dtype: torch.dtype,
    mode: Any,
    block: int | None = 16,
    dim: int = 0,
    op: Op = "sum",
    chunks: int | None = None,
) -> torch.Tensor:
    chunks = chunks or (3 if mode == "copy" else None)
    shape = reference_shape(part, dim, world.size)
    x = pkt.empty(shape, dtype=dtype)
    for launch in range(LAUNCHES):
        everybody = inputs(world, shape, dtype, launch)
        x.copy_(everybody[world.rank])
        got = reduce_scatter(x, dim=dim, op=op, mode=mode, block=block, chunks=chunks)
        exact = reference(world.rank, everybody, dim, op)
        bound = sum_bound(everybody).chunk(world.size, dim)[world.rank] if op == "sum" else torch.zeros_like(exact)
        assert_within(got, exact, bound, world.rank, launch)
    return got


def reference_shape(part: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return tuple(torch.cat([torch.empty(part)] * size, dim).shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", [(1, 1), (1, 40), (70, 1), (5, 33), (3, 16), (9, 100)])
def test_runs_of_any_length(part: tuple[int, ...], mode: str) -> None:
    on_ranks(3, scatters, part, torch.bfloat16, mode, 32, 1)
    on_ranks(2, scatters, part, torch.bfloat16, mode, None, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["min", "max"])
def test_least_and_greatest(op: Op, dtype: torch.dtype) -> None:
    for mode in MODES:
        on_ranks(3, scatters, (13, 3), dtype, mode, 16, 1, op)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_a_nan_of_any_rank_is_a_nan(op: Op, mode: Any) -> None:
    def run(world: Any) -> None:
        x = pkt.full((world.size * 4,), float(world.rank))
        x[world.rank :: 4] = float("nan")  # element i of each part is NaN on rank i, for i < 3
        got = reduce_scatter(x, op=op, mode=mode)
        assert got[:3].isnan().all()
        assert got[3] == {"sum": 3, "min": 0, "max": 2}[op]

    on_ranks(3, run)


@pytest.mark.parametrize("mode", MODES)
def test_in_place(mode: Any) -> None:
    def run(world: Any) -> None:
        x = pkt.empty(world.size * 5, 3)
        for launch in range(LAUNCHES):
            everybody = inputs(world, (world.size * 5, 3), torch.float32, launch)
            x.copy_(everybody[world.rank])
            got = reduce_scatter(x, x.chunk(world.size)[world.rank], mode=mode)
            bound = sum_bound(everybody).chunk(world.size)[world.rank]
            assert_within(got.plain(), reference(world.rank, everybody), bound, world.rank, launch)

    on_ranks(3, run, seed=2)


@pytest.mark.parametrize("mode", MODES)
def test_in_place_on_one_rank(mode: Any) -> None:
    def run(world: Any) -> None:
        x = pkt.empty(5, 3)
        x.copy_(right := torch.arange(15.0).view(5, 3))
        assert reduce_scatter(x, x, dim=1, mode=mode) is x
        assert torch.equal(x.plain(), right)

    on_ranks(1, run)


def test_every_schedule_and_form_gives_the_same_bits() -> None:
    runs = [on_ranks(4, scatters, (40,), torch.bfloat16, mode, seed=seed, sms=2) for seed in SEEDS for mode in MODES]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_one_program_and_the_default_block(mode: str) -> None:
    on_ranks(2, scatters, (100, 7), torch.float16, mode, None, sms=1)


@pytest.mark.parametrize("chunks", [1, 2, 100])
@pytest.mark.parametrize(("part", "dim"), [((33,), 0), ((2, 100), 1), ((17, 6), 1), ((40, 3), 1), ((5, 1, 3), 2)])
def test_chunks_of_any_number(part: tuple[int, ...], dim: int, chunks: int) -> None:
    """Chunks are rows of tiles, or tiles where there is one row."""
    on_ranks(3, scatters, part, torch.bfloat16, "copy", 16, dim, "sum", chunks, seed=chunks)


def test_sizes_in_turn_share_an_inbox() -> None:
    def run(world: Any) -> None:
        for n in (70, 33, 70, 100, 16, 70):  # some with the same grid, some not
            scatters(world, (n,), torch.float32, "push")
        assert sum("inboxes" in key for key in world._scopes[-1].kept if isinstance(key, tuple)) == 2

    on_ranks(3, run, seed=3, sms=2)


@pytest.mark.parametrize(
    ("ranks", "kib", "mode"),
    [
        (1, 1, "low_latency"),
        *((ranks, 1 << 10, "low_latency") for ranks in (2, 3, 4, 8)),
        *((ranks, 4 << 10, "push") for ranks in (2, 4, 9)),
        (2, 2 << 10, "low_latency"),
        (9, 1, "push"),
        *((ranks, 512 << 10, mode) for ranks, mode in ((2, "push"), (3, "copy"), (4, "copy"))),
        *((2, kib, mode) for kib, mode in ((2047 << 10, "push"), (2 << 20, "copy"))),
    ],
)
def test_the_default_mode_follows_size_and_ranks(ranks: int, kib: int, mode: str) -> None:
    def run(world: Any) -> None:
        x = torch.empty(kib << 9, dtype=torch.bfloat16, device="meta")
        call = Call("reduce_scatter", world, {"x": x}, {"dim": 0}, {}, None)
        call.shape = (1 << 13,)
        assert OPERATOR.default(call) == mode

    on_ranks(ranks, run)


@pytest.mark.parametrize(
    ("part", "itemsize", "elements"),
    [
        (1, 2, 512),
        (1 << 13, 4, 256),
        (1 << 17, 2, 1 << 11),
        (3 << 19, 2, 1 << 14),
        (1 << 26, 2, 1 << 15),
        (1 << 26, 4, 1 << 14),
    ],
)
def test_signals_are_few(part: int, itemsize: int, elements: int) -> None:
    assert inbox.pushed_room(part, itemsize, 3) == elements


@pytest.mark.parametrize(
    ("shape", "dim", "tile", "room"),
    [
        ((3072, 1024), 0, 1 << 13, 1 << 14),
        ((1024, 3072), 1, 1 << 13, 1 << 14),  # of the part, not of a run
        ((4096, 3072), 1, 1 << 13, 1 << 15),
        ((4096, 3012), 1, 1 << 12, 1 << 15),  # of runs of whole 8 bytes, half of it
        ((4096, 3006), 1, 1 << 11, 1 << 15),
        ((4096, 3003), 1, 1 << 11, 1 << 15),
    ],
)
def test_the_default_tile_follows_the_part(
    shape: tuple[int, int], dim: int, tile: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    parts: list[Any] = []
    make = inbox.inboxes
    monkeypatch.setattr(inbox, "inboxes", lambda programs, room, *of: rooms.append(room) or make(programs, room, *of))
    monkeypatch.setattr(grid, "cooperative_launch", lambda *_, **__: lambda *args: parts.append(args[4]))
    on_ranks(3, lambda world: reduce_scatter(torch.empty(shape, dtype=torch.bfloat16), dim=dim, mode="push") is None)
    assert rooms == 3 * [room]
    assert [part.ROWS.value * part.COLS.value for part in parts] == 3 * [tile]


@pytest.mark.parametrize(("ranks", "slots"), [(1, 1), (2, 1), (3, 2)])
def test_an_inbox_has_slots_for_peers_only(ranks: int, slots: int) -> None:
    def run(world: Any) -> None:
        assert tuple(inbox.inboxes(2, 16, torch.float32, world).inbox.shape) == (2, slots, 2, 16)

    on_ranks(ranks, run)


@pytest.mark.parametrize(("shape", "dim"), [((300_000,), 0), ((37, 9001), 1), ((4099, 66), 1), ((5, 2, 30_007), 2)])
@pytest.mark.parametrize("block", [1 << 10, 1 << 13])
def test_many_tiles_have_one_signal(shape: tuple[int, ...], dim: int, block: int) -> None:
    """Tiles of one run and of many, even and uneven; the last tiles may be empty. There are more tiles than one signal
    covers, and a program's first signal covers fewer."""

    def run(world: Any) -> None:
        whole = (*shape[:dim], shape[dim] * world.size, *shape[dim + 1 :])
        everybody = [torch.arange(math.prod(whole)).add(r).remainder(13).view(whole).bfloat16() for r in range(2)]
        for _ in range(2):
            got = reduce_scatter(everybody[world.rank], dim=dim, mode="push", block=block)
            assert torch.equal(got.double(), reference(world.rank, everybody, dim))

    on_ranks(2, run)


def test_programs_are_out_of_step() -> None:
    """Four programs have 32 tiles each, four for each signal. All but the first begin with a signal of fewer tiles, and
    end with one of the rest."""

    def run(world: Any) -> None:
        part = 1 << 14
        room = inbox.pushed_room(part, 2, world.size)
        reduce_scatter(torch.ones(2 * part, dtype=torch.bfloat16), mode="push", block=room // 4)
        sent = inbox.inboxes(4, room, torch.bfloat16, world).counters.plain().view(4, 2)[:, world.rank]
        assert sent.tolist() == [8, 9, 9, 9]

    on_ranks(2, run, sms=4)


# ------------------------------------------------------------------------------------------------- bad input
def test_bad_arguments() -> None:
    assert_raises(pkt.ShapeError, "divisible by 2 ranks", lambda w: reduce_scatter(pkt.ones(5)))
    assert_raises(pkt.ShapeError, "divisible by 2 ranks", lambda w: reduce_scatter(pkt.ones(())))
    assert_raises(pkt.ShapeError, "dimension 1 divisible by 2 ranks", lambda w: reduce_scatter(pkt.ones(4, 3), dim=1))
    assert_raises(pkt.ShapeError, "dim: found -2, wanted an axis", lambda w: reduce_scatter(pkt.ones(4), dim=-2))
