"""All-reduce: every rank has the same sum, in fp32 and rounded once."""

from __future__ import annotations

import importlib
from threading import get_ident
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_reduce import OPERATOR, TWO_SHOT_PUSH_BYTES, Op, all_reduce, reference
from pkt.kernels.shared import flagged, grid, inbox
from tests.runtime.eager_worlds import Rank, eager_worlds

from .helpers import (
    DTYPES,
    LAUNCHES,
    SEEDS,
    assert_raises,
    assert_same_on_all,
    assert_within,
    inputs,
    on_ranks,
    sum_bound,
)

MODES = tuple(OPERATOR.forms)
FORMS = [(mode, True) for mode in MODES] + [("multimem", False)]  # (mode, whether there is a switch)


def reduces(
    world: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mode: str | None,
    in_place: bool = False,
    block: int | None = 16,
    op: Op = "sum",
) -> torch.Tensor:
    x, out = pkt.empty(shape, dtype=dtype), pkt.empty(shape, dtype=dtype)
    for launch in range(LAUNCHES):
        everybody = inputs(world, shape, dtype, launch)
        x.copy_(everybody[world.rank])
        chunks = 3 if mode == "copy" else None
        got = all_reduce(x, None if in_place else out, op=op, mode=mode, block=block, chunks=chunks)
        assert got is (x if in_place else out)
        exact = reference(world.rank, everybody, op)
        bound = sum_bound(everybody) if op == "sum" else torch.zeros_like(exact)
        assert_within(got.plain(), exact, bound, world.rank, launch)
    return got.plain().clone()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("mode", "multicast"), FORMS)
def test_every_schedule_gives_the_same_bits(mode: str, in_place: bool, multicast: bool) -> None:
    runs = [
        on_ranks(4, reduces, (50,), torch.bfloat16, mode, in_place, seed=seed, sms=2, multicast=multicast)
        for seed in SEEDS
    ]
    for run in runs:
        assert all(torch.equal(r, runs[0][0]) for r in run)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_one_program_and_the_default_block(mode: str | None) -> None:
    on_ranks(2, lambda world: reduces(world, (100, 7), torch.float16, mode, block=None), sms=1)


@pytest.mark.parametrize(
    ("mode", "multicast", "dtype"),
    [(m, c, t) for m, c in [(None, True), *FORMS] for t in DTYPES[: 2 if m == "multimem" else 3]],  # bf16, fp16, fp32
)
@pytest.mark.parametrize("op", ["min", "max"])
def test_least_and_greatest(op: Op, dtype: torch.dtype, mode: str | None, multicast: bool) -> None:
    assert_same_on_all(on_ranks(3, reduces, (13, 3), dtype, mode, multicast, 16, op, multicast=multicast))


@pytest.mark.parametrize("mode", [None, "low_latency", "low_latency_two_shot", "one_shot", "two_shot", "copy"])
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_a_nan_of_any_rank_is_a_nan(op: Op, mode: Any) -> None:
    def run(world: Any) -> None:
        x = pkt.full((4,), float(world.rank), dtype=torch.bfloat16)
        x[world.rank] = float("nan")
        got = all_reduce(x, pkt.empty(4, dtype=torch.bfloat16), op=op, mode=mode)
        assert got[:3].isnan().all()
        assert got[3] == {"sum": 3, "min": 0, "max": 2}[op]

    on_ranks(3, run)


def test_tensors_that_need_not_be_symmetric() -> None:
    def run(world: Any) -> None:
        out = torch.empty(6)
        assert all_reduce(pkt.ones(6), out, mode="one_shot") is out
        assert torch.equal(out, torch.full((6,), float(world.size)))
        for mode in ("low_latency", "low_latency_two_shot"):
            assert all_reduce(torch.ones(6), out, mode=mode) is out
            assert torch.equal(out, torch.full((6,), float(world.size)))
            assert all_reduce(out, mode=mode) is out
            assert torch.equal(out, torch.full((6,), float(world.size**2)))
        pushed = all_reduce(torch.ones(6), pkt.empty(6), mode="two_shot_push")
        assert torch.equal(pushed.plain(), torch.full((6,), float(world.size)))
        copied = all_reduce(torch.ones(6), pkt.empty(6), mode="copy")
        assert torch.equal(copied.plain(), torch.full((6,), float(world.size)))

    on_ranks(3, run)


@pytest.mark.parametrize("multicast", [False, True])
def test_the_default_mode_follows_the_operands(multicast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(all_reduce.__module__)
    launched = []

    def bound(world: Any, kernel: Any, *_: Any, **__: Any) -> Any:
        return lambda *args: launched.append(kernel)

    monkeypatch.setattr(grid, "cooperative_launch", bound)
    monkeypatch.setattr(flagged, "cooperative_launch", bound)
    monkeypatch.setattr(flagged, "FLAG_BYTES", 40_000)
    monkeypatch.setattr(flagged, "PLAIN_FLAG_BYTES", 60_000)

    def run(world: Any) -> None:
        few = pkt.empty(60_000, dtype=torch.bfloat16)
        more = pkt.empty(60_002, dtype=torch.bfloat16)
        in_switch = module.multimem_kernel if multicast else module.two_shot_kernel
        for wanted, call in (
            (flagged.one_shot_kernel, lambda: all_reduce(few)),
            (flagged.one_shot_kernel, lambda: all_reduce(more, torch.empty_like(more.plain()))),
            (in_switch, lambda: all_reduce(more)),
        ):
            call()
            assert launched.pop() is wanted
        for call in (lambda: all_reduce(more, op="max"), lambda: all_reduce(more[1:])):
            call()
            assert launched.pop() is module.two_shot_kernel
        most = pkt.empty(TWO_SHOT_PUSH_BYTES // 2, dtype=torch.bfloat16)
        for x, wanted in ((most, module.two_shot_push_kernel), (most[:-8], module.two_shot_kernel)):
            all_reduce(x, op="max")
            assert launched.pop() is wanted
        all_reduce(most, torch.empty_like(most.plain()))
        assert launched.pop() is module.two_shot_push_kernel, "by inboxes"
        with monkeypatch.context() as patch:
            patch.setattr(module, "COPIED_BYTES", most.nbytes // 2)
            all_reduce(most[: most.numel() // 2])
            assert launched == ([module.multimem_kernel] if multicast else []), "the switch first, then copies"

    on_ranks(1, run, multicast=multicast)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", ["one_shot", "two_shot", "two_shot_push", "copy"])
def test_a_rest_of_less_than_16_bytes_is_sent_apart(mode: Any, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From REST_BYTES on, and only if there is a rest. The kernel of the other elements then moves whole 16 bytes."""
    module = importlib.import_module(all_reduce.__module__)
    monkeypatch.setattr(module, "REST_BYTES", 256)
    tails: list[int] = []
    make = flagged.reduce_launch

    def reduce_launch(world: Any, x: torch.Tensor, *of: Any) -> Any:
        tails.append(x.numel())
        return make(world, x, *of)

    monkeypatch.setattr(flagged, "reduce_launch", reduce_launch)

    def run(world: Any, n: int, dtype: torch.dtype) -> None:
        for step in range(2):
            everybody = [torch.arange(n).add(r + step).remainder(11).to(dtype) for r in range(world.size)]
            x = pkt.empty(n, dtype=dtype)
            out = x if in_place else pkt.empty(n, dtype=dtype)
            assert all_reduce(x.copy_(everybody[world.rank]), out, mode=mode) is out
            assert torch.equal(out.double(), reference(world.rank, everybody))

    for n, dtype, rest in (
        (1001, torch.bfloat16, 1), (1007, torch.float16, 7), (1003, torch.float32, 3), (1008, torch.bfloat16, 0),
        (127, torch.bfloat16, 0),
    ):  # fmt: skip
        tails.clear()
        on_ranks(3, run, n, dtype)
        assert set(tails) == ({rest} if rest else set()), n


@pytest.mark.parametrize("mode", ["one_shot", "two_shot", "two_shot_push"])
def test_the_rest_is_cut_off_symmetric_tensors_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view of one takes as long as a launch. Plain tensors may be others in each call."""
    monkeypatch.setattr(importlib.import_module(all_reduce.__module__), "REST_BYTES", 256)
    called: dict[int, list[str]] = {}
    torch_function = pkt.SymmetricTensor.__torch_function__.__func__

    def spied(cls: Any, func: Any, *args: Any) -> Any:
        called.setdefault(get_ident(), []).append(func.__name__)
        return torch_function(cls, func, *args)

    monkeypatch.setattr(pkt.SymmetricTensor, "__torch_function__", classmethod(spied))
    taken: dict[int, list[torch.Tensor]] = {}

    def rest(world: Any, x: torch.Tensor, out: torch.Tensor, *args: Any) -> None:
        taken.setdefault(get_ident(), [])[:] = x, out

    def main(rank: Rank) -> None:
        x, y = (pkt.empty(1001, world=rank.world) for _ in range(2))
        plain = [torch.empty(1001) for _ in range(3)]
        for _ in range(3):
            all_reduce(x, y, mode=mode, world=rank.world)
            now, called[get_ident()] = called.get(get_ident(), []), []
            ends = [t.data_ptr() for t in taken[get_ident()]]
            assert ends == [t.data_ptr() + 4 * 1000 for t in (x, y)]
        assert now == []
        if mode == "one_shot":
            for out in plain:
                all_reduce(x, out, mode=mode, world=rank.world)
                assert taken[get_ident()][1].data_ptr() == out.data_ptr() + 4 * 1000

    assert eager_worlds(2, main, {"one_shot_kernel": rest}) == [None] * 2


def test_ranks_whose_x_begins_elsewhere_send_the_same_tiles() -> None:
    """x need not be symmetric. On a rank where it does not begin at 16 bytes its blocks are smaller."""

    def run(world: Any) -> None:
        n = 3 * (1 << 18)
        everybody = [torch.arange(n).add(r).remainder(11).bfloat16() for r in range(world.size)]
        x = torch.empty(n + 8, dtype=torch.bfloat16)[8 * (world.rank != 1) :][(world.rank == 1) :][:n]
        assert (x.data_ptr() % 16 != 0) == (world.rank == 1)
        out = pkt.empty(n, dtype=torch.bfloat16)
        all_reduce(x.copy_(everybody[world.rank]), out, mode="two_shot_push")
        assert torch.equal(out.double(), reference(world.rank, everybody))

    on_ranks(3, run)


def test_a_tile_of_many_blocks() -> None:
    """The last tile has fewer blocks, or ends inside a block; in place, too."""

    def run(world: Any) -> None:
        for n in (24 * 512, 24 * 512 - 700, 24 * 512 + 3):
            everybody = [torch.arange(n).add(r).remainder(11).bfloat16() for r in range(world.size)]
            for out in (pkt.empty(n, dtype=torch.bfloat16), None):
                x = pkt.empty(n, dtype=torch.bfloat16).copy_(everybody[world.rank])
                got = all_reduce(x, out, mode="two_shot_push", block=64)
                assert torch.equal(got.double(), reference(world.rank, everybody))

    on_ranks(3, run, sms=2)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, None), (2, 1), (3, 100), (4, None), (5, 3), (8, 2)])
def test_chunks_of_any_number(ranks: int, chunks: int | None) -> None:
    """The last parts have no chunk, one, or several."""

    def run(world: Any) -> None:
        for n in (1, 64 * ranks - 63, 64 * ranks + 1, 777):
            everybody = [torch.arange(n).add(r).remainder(11).bfloat16() for r in range(world.size)]
            for dtype in (torch.bfloat16, torch.float32):
                x, out = everybody[world.rank].to(dtype), pkt.empty(n, dtype=dtype)
                all_reduce(x, out, mode="copy", block=16, chunks=chunks)
                assert torch.equal(out.double(), reference(world.rank, everybody)), n

    on_ranks(ranks, run, seed=ranks)


@pytest.mark.parametrize(("part", "elements"), [(1, 512), (1 << 18, 1 << 12), (1 << 20, 1 << 14), (1 << 22, 1 << 15)])
def test_the_default_tile_of_two_shot_push(part: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile follows the size of a rank's part of x."""
    blocks: list[int] = []
    make = inbox.inboxes
    monkeypatch.setattr(inbox, "inboxes", lambda grid, block, *of: blocks.append(block) or make(grid, block, *of))
    monkeypatch.setattr(grid, "cooperative_launch", lambda *_, **__: lambda *args: None)
    on_ranks(3, lambda world: all_reduce(pkt.empty(3 * part, dtype=torch.bfloat16), mode="two_shot_push") is None)
    assert blocks == 3 * [elements]


def test_sizes_and_types_in_turn() -> None:
    def run(world: Any) -> None:
        for n in (6, 70, 6, 1, 70):
            for mode in ("low_latency", "low_latency_two_shot"):
                reduces(world, (n,), torch.bfloat16, mode)
                reduces(world, (n // 2 + 1,), torch.float32, mode, block=64)
                gathered = pkt.all_gather(torch.full((n,), float(world.rank)), mode="low_latency")
                assert torch.equal(gathered, torch.arange(3.0).repeat_interleave(n))
        spaces = [key for key in world._scopes[-1].kept if key[:2] == ("pkt.kernels", "flagged")]
        assert spaces == [("pkt.kernels", "flagged", flagged.LEAST_ROOM)], "one workspace for all calls"

    on_ranks(3, run, seed=3)


def test_a_view_that_is_not_aligned() -> None:
    def run(world: Any) -> None:
        x = pkt.ones(64, dtype=torch.bfloat16)
        all_reduce(x[3:40])  # two_shot: the switch could not take it
        expected = torch.ones(64)
        expected[3:40] = world.size
        assert torch.equal(x.plain().float(), expected)

    on_ranks(3, run)


# ------------------------------------------------------------------------------------------------- bad input
def test_types_and_alignments_that_the_switch_refuses() -> None:
    assert_raises(
        pkt.Unsupported,
        r"multimem'\): found op 'min' of float32, and the switch has it for 16-bit floats only",
        lambda w: all_reduce(pkt.ones(4), op="min", mode="multimem"),
    )
    assert_raises(
        pkt.Unsupported,
        "multimem moves runs of 16 bytes",
        lambda w: all_reduce(pkt.ones(9)[1:], mode="multimem"),
    )
