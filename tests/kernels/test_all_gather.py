"""All-gather: every rank has every shard, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather import OPERATOR, all_gather, reference
from pkt.kernels.shared import flagged
from pkt.kernels.shared.checks import NUMBERS

from .helpers import DTYPES, LAUNCHES, RANKS, SEEDS, inputs, on_ranks

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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_reference(ranks: int, dtype: torch.dtype, mode: str) -> None:
    on_ranks(ranks, gathers, (13, 3), dtype, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (5, 1, 3), (64, 4), (333,)])
def test_sizes_that_do_not_divide_the_blocks(shape: tuple[int, ...], mode: str) -> None:
    on_ranks(3, gathers, shape, torch.bfloat16, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dim", [1, -1])
def test_along_any_dimension(dim: int, ranks: int, mode: str) -> None:
    on_ranks(ranks, gathers, (2, 3, 5, 2), torch.float16, mode, 16, dim)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(seed: int, mode: str) -> None:
    on_ranks(4, gathers, (40,), torch.float32, mode, seed=seed, sms=2)


@pytest.mark.parametrize("mode", MODES)
def test_one_program_and_the_default_block(mode: str) -> None:
    on_ranks(2, gathers, (100, 7), torch.float16, mode, None, sms=1)


def test_any_element_type() -> None:
    def run(world: Any) -> None:
        for dtype in NUMBERS:
            x = torch.arange(11, dtype=torch.int64).add(100 * world.rank % 100).to(dtype)
            out = pkt.empty(11 * world.size, dtype=dtype)
            assert torch.equal(all_gather(x, out).plain(), x.repeat(world.size))

    on_ranks(2, run)


def test_new_tensors_and_the_choice_of_mode() -> None:
    def run(world: Any) -> None:
        x = pkt.full((5,), world.rank, dtype=torch.float32)
        expected = torch.arange(world.size, dtype=torch.float32).repeat_interleave(5)
        for mode in (None, "pull", "low_latency"):
            new = pkt.all_gather(x, mode=mode)  # of this rank's
            assert type(new) is torch.Tensor
            assert torch.equal(new, expected)
        for mode in (None, "push", "low_latency"):
            pushed = pkt.all_gather(x.plain().clone(), pkt.empty(5 * world.size), mode=mode)  # x need not be symmetric
            assert torch.equal(pushed.plain(), expected)
        neither = pkt.all_gather(x.plain().clone(), torch.empty(5 * world.size), mode="low_latency")
        assert torch.equal(neither, expected)

    on_ranks(3, run)


def test_what_is_small_is_gathered_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_empty_shards() -> None:
    on_ranks(2, lambda world: all_gather(pkt.empty(0, 4)).shape == (0, 4) or pytest.fail("shape"))


def test_shapes_in_turn_share_nothing_that_matters() -> None:
    def run(world: Any) -> None:
        for shape in ((3,), (70,), (3,), (33, 2)):
            gathers(world, shape, torch.float32, "push")
            gathers(world, shape, torch.float32, "pull")

    on_ranks(3, run, seed=3)


# ------------------------------------------------------------------------------------------------- bad input
def bad(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        on_ranks(2, call)


def test_a_pulled_tensor_must_be_symmetric() -> None:
    bad(pkt.NotSymmetric, "all_gather: x must be a symmetric tensor", lambda w: all_gather(torch.ones(4)))


def test_a_pushed_output_must_be_symmetric() -> None:
    bad(
        pkt.NotSymmetric,
        "all_gather: out must be a symmetric tensor",
        lambda w: all_gather(torch.ones(4), torch.ones(8), mode="push"),
    )


def test_shapes_and_dtypes_must_fit() -> None:
    bad(pkt.ShapeError, r"out: found \(7,\), wanted \(8,\)", lambda w: all_gather(torch.ones(4), pkt.empty(7)))
    bad(
        pkt.DtypeError,
        "out: found fp16, wanted float32",
        lambda w: all_gather(torch.ones(4), pkt.empty(8, dtype=torch.float16)),
    )
    bad(pkt.ShapeError, "wanted a contiguous tensor", lambda w: all_gather(pkt.empty(4, 4).t()))
    bad(pkt.DtypeError, "x: found int8", lambda w: all_gather(pkt.empty(4, dtype=torch.int8), mode="low_latency"))
    bad(pkt.DtypeError, "x: found complex64", lambda w: all_gather(pkt.empty(4, dtype=torch.complex64)))


def test_dimensions_and_blocks() -> None:
    bad(
        pkt.ShapeError,
        r"dim: found 2, wanted an axis from -2 to 1 of \(4, 3\)",
        lambda w: all_gather(pkt.empty(4, 3), dim=2),
    )
    bad(
        pkt.ShapeError,
        r"out: found \(8, 3\), wanted \(4, 6\)",
        lambda w: all_gather(pkt.empty(4, 3), pkt.empty(8, 3), dim=1),
    )
    bad(pkt.ShapeError, "block: found 24, wanted a power of two", lambda w: all_gather(pkt.empty(4), block=24))


def test_memory_that_is_shared_in_part() -> None:
    def beside(world: Any) -> None:
        out = pkt.empty(world.size * 4)
        all_gather(out[4 * (1 - world.rank) :][:4], out)  # the other rank's place

    bad(pkt.ShapeError, "out: found a tensor .* bytes from x, wanted memory of its own, or this rank's part", beside)

    def pulled(world: Any) -> None:
        out = pkt.empty(world.size * 4)
        all_gather(out[:4], out, mode="pull")

    bad(pkt.ShapeError, "wanted memory of its own$", pulled)

    def columns(world: Any) -> None:
        out = pkt.empty(4, world.size * 4)
        all_gather(out.view(-1)[:16].view(4, 4), out, dim=1)  # not a place of the result

    bad(pkt.ShapeError, "wanted memory of its own$", columns)


def test_an_unknown_mode() -> None:
    bad(pkt.Unsupported, "wanted 'push' or 'pull'", lambda w: all_gather(pkt.empty(4), mode="send"))


def test_ranks_that_disagree() -> None:
    def shapes(world: Any) -> None:
        x = pkt.empty(8)
        all_gather(x[: 4 + world.rank])

    bad(pkt.CollectiveMismatch, r"rank 0: all_gather\(x=\(4,\).*rank 1: all_gather\(x=\(5,\)", shapes)

    def offsets(world: Any) -> None:
        x = pkt.empty(8)
        all_gather(x[world.rank :][:4], mode="pull")  # peers would read another part than is meant

    bad(pkt.CollectiveMismatch, "heap offset", offsets)


def test_a_freed_tensor() -> None:
    def run(world: Any) -> None:
        x = pkt.empty(8)
        x.free()
        all_gather(x)

    bad(pkt.UseAfterFree, "all_gather uses 'x' after it was freed", run)


def test_a_closed_world() -> None:
    def run(world: Any) -> None:
        x = pkt.empty(8)
        world.close()
        all_gather(x)

    bad(pkt.Closed, "closed", run)
