"""All-gather: every rank has every shard, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather import OPERATOR, all_gather, reference
from pkt.kernels.shared import flagged

from .helpers import LAUNCHES, assert_raises, inputs, on_ranks

MODES = tuple(OPERATOR.forms)


def gathers(
    world: Any, shape: tuple[int, ...], dtype: torch.dtype, mode: str, block: int | None = 16, dim: int = 0
) -> None:
    x = pkt.empty(shape, dtype=dtype)
    out = pkt.empty(reference(0, [torch.empty(shape)] * world.size, dim).shape, dtype=dtype)
    block = None if mode == "copy" else block
    for launch in range(LAUNCHES):
        shards = inputs(world, shape, dtype, launch)
        x.copy_(shards[world.rank])
        got = all_gather(x, out, dim=dim, mode=mode, block=block)
        assert got is out
        assert torch.equal(got.plain(), reference(world.rank, shards, dim)), (world.rank, launch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (70, 1), (5, 33), (3, 16), (9, 100)])
def test_runs_of_any_length(shape: tuple[int, ...], mode: str) -> None:
    on_ranks(3, gathers, shape, torch.bfloat16, mode, 32, 1)
    on_ranks(2, gathers, shape, torch.bfloat16, mode, None, 1)


@pytest.mark.parametrize("mode", ["push", "copy", "low_latency"])
def test_in_place(mode: Any) -> None:
    def run(world: Any) -> None:
        out = pkt.empty(world.size * 5, 3)
        for launch in range(LAUNCHES):
            shards = inputs(world, (5, 3), torch.float32, launch)
            out.chunk(world.size)[world.rank].copy_(shards[world.rank])
            all_gather(out.chunk(world.size)[world.rank], out, mode=mode)
            assert torch.equal(out.plain(), reference(world.rank, shards))

    on_ranks(3, run, seed=2)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "pull"])
def test_in_place_on_one_rank(mode: Any) -> None:
    def run(world: Any) -> None:
        x = pkt.empty(5, 3)
        x.copy_(right := torch.arange(15.0).view(5, 3))
        assert all_gather(x, x, dim=1, mode=mode) is x
        assert torch.equal(x.plain(), right)

    on_ranks(1, run)


@pytest.mark.parametrize("mode", MODES)
def test_one_program_and_the_default_block(mode: str) -> None:
    on_ranks(2, gathers, (100, 7), torch.float16, mode, None, sms=1)


def test_new_tensors_and_the_choice_of_mode() -> None:
    def run(world: Any) -> None:
        x = pkt.full((5,), world.rank, dtype=torch.float32)
        expected = torch.arange(world.size, dtype=torch.float32).repeat_interleave(5)
        for mode in (None, "pull", "low_latency"):
            new = pkt.all_gather(x, mode=mode)  # a plain tensor
            assert type(new) is torch.Tensor
            assert torch.equal(new, expected)
        for mode in (None, "push", "low_latency"):
            pushed = pkt.all_gather(x.plain().clone(), pkt.empty(5 * world.size), mode=mode)  # x need not be symmetric
            assert torch.equal(pushed.plain(), expected)
        neither = pkt.all_gather(x.plain().clone(), torch.empty(5 * world.size), mode="low_latency")
        assert torch.equal(neither, expected)

    on_ranks(3, run)


def test_small_shards_are_gathered_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [flagged.few(3e6, size) for size in (1, 2, 8, 9)] == [True, True, True, False]
    assert not flagged.few(3e6 + 1, 2)
    monkeypatch.setattr(flagged, "FLAG_BYTES", 50)
    made, launch = [], flagged.gather_launch
    monkeypatch.setattr(flagged, "gather_launch", lambda *args: made.append(1) or launch(*args))

    def run(world: Any) -> None:
        for dtype, n in ((torch.float32, 38), (torch.float32, 37), (torch.int16, 75), (torch.int8, 10)):
            made.clear()
            x = torch.ones(n, dtype=dtype)
            gathered = all_gather(x, pkt.empty(2 * n, dtype=dtype))
            assert torch.equal(torch.as_tensor(gathered), x.repeat(2))
            world.barrier()
            assert bool(made) == (x.nbytes <= 150 and dtype in flagged.DTYPES)
            world.barrier()

    on_ranks(2, run)


# ------------------------------------------------------------------------------------------------- bad input
def test_dimensions() -> None:
    assert_raises(
        pkt.ShapeError,
        r"dim: found 2, wanted an axis from -2 to 1 of \(4, 3\)",
        lambda w: all_gather(pkt.empty(4, 3), dim=2),
    )
    assert_raises(
        pkt.ShapeError,
        r"dim: found '0', wanted an axis from -2 to 1 of .*, an integer of Python's$",
        lambda w: all_gather(pkt.empty(4, 3), dim="0"),
    )


def test_memory_that_is_shared_in_part() -> None:
    def beside(world: Any) -> None:
        out = pkt.empty(world.size * 4)
        all_gather(out[4 * (1 - world.rank) :][:4], out)  # the other rank's place

    assert_raises(
        pkt.ShapeError, "out: found a tensor .* bytes from x, wanted memory of its own, or this rank's part", beside
    )

    def pulled(world: Any) -> None:
        out = pkt.empty(world.size * 4)
        all_gather(out[:4], out, mode="pull")

    assert_raises(pkt.ShapeError, "wanted memory of its own$", pulled)

    def columns(world: Any) -> None:
        out = pkt.empty(4, world.size * 4)
        all_gather(out.view(-1)[:16].view(4, 4), out, dim=1)  # not a place of the result

    assert_raises(pkt.ShapeError, "wanted memory of its own$", columns)


def test_ranks_whose_x_is_elsewhere_in_the_heap() -> None:
    def offsets(world: Any) -> None:
        x = pkt.empty(8)
        all_gather(x[world.rank :][:4], mode="pull")  # peers would read another part of x

    assert_raises(pkt.CollectiveMismatch, "heap offset", offsets)
