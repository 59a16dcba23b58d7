"""All-to-all: parts of any axis to the ranks, put together along any other, bit for bit and in the natural layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_to_all import OPERATOR, all_to_all, reference
from pkt.kernels.shared import flagged
from pkt.kernels.shared.checks import NUMBERS

from .helpers import DTYPES, LAUNCHES, RANKS, SEEDS, inputs, on_ranks

MODES = tuple(OPERATOR.forms)
PAIRS = tuple(itertools.product(range(4), repeat=2))


def exchanges(
    world: Any,
    shape: tuple[int, ...],  # with axis `scatter` already divided
    dtype: torch.dtype,
    mode: str,
    scatter: int = 0,
    gather: int = 0,
    block: int | None = 16,
) -> None:
    shape = tuple(n * world.size if axis == scatter % len(shape) else n for axis, n in enumerate(shape))
    x = pkt.empty(shape, dtype=dtype)
    out = pkt.empty(reference(0, [torch.empty(shape)] * world.size, scatter, gather).shape, dtype=dtype)
    block = None if mode == "copy" else block
    for launch in range(LAUNCHES):
        everybody = inputs(world, shape, dtype, launch)
        x.copy_(everybody[world.rank])
        got = all_to_all(x, out, scatter=scatter, gather=gather, mode=mode, block=block)
        assert got is out
        assert torch.equal(got.plain(), reference(world.rank, everybody, scatter, gather)), (world.rank, launch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_plain(ranks: int, dtype: torch.dtype, mode: str) -> None:
    on_ranks(ranks, exchanges, (13, 3), dtype, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("scatter", "gather"), PAIRS)
def test_any_pair_of_axes(scatter: int, gather: int, mode: str) -> None:
    on_ranks(3, exchanges, (2, 3, 5, 4), torch.bfloat16, mode, scatter, gather)


@pytest.mark.parametrize(
    ("scatter", "gather", "mode"), [(2, 1, "push"), (1, 2, "pull"), (2, 1, "copy"), (1, 2, "low_latency")]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_heads_and_sequence(ranks: int, scatter: int, gather: int, mode: str) -> None:
    on_ranks(ranks, exchanges, (2, 5, 2, 8), torch.bfloat16, mode, scatter, gather, 64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 33, 1, 1), (1, 9, 1, 100), (3, 1, 5, 7), (1, 16, 2, 16)])
def test_sizes_that_do_not_divide_the_blocks(shape: tuple[int, ...], mode: str) -> None:
    on_ranks(3, exchanges, shape, torch.float16, mode, 2, 1, 32)
    on_ranks(2, exchanges, shape, torch.float16, mode, -2, -3, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule(seed: int, mode: str) -> None:
    def run(world: Any) -> None:
        exchanges(world, (2, 5, 3), torch.float32, mode, 1, 0)

    on_ranks(4, run, seed=seed, sms=2)


def test_tensors_of_this_rank_alone_in_flagged_words() -> None:
    def run(world: Any) -> None:
        everybody = inputs(world, (2, 3 * world.size), torch.bfloat16, 0)
        got = all_to_all(everybody[world.rank], scatter=1, gather=0, mode="low_latency")
        assert torch.equal(got, reference(world.rank, everybody, 1, 0))

    on_ranks(3, run)


def test_what_is_small_is_sent_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagged, "FLAG_BYTES", 50)
    made, launch = [], flagged.exchange_launch
    monkeypatch.setattr(flagged, "exchange_launch", lambda *args: made.append(1) or launch(*args))

    def run(world: Any) -> None:
        for dtype, n in ((torch.float32, 36), (torch.float32, 38), (torch.int16, 74), (torch.int8, 10)):
            made.clear()
            x = torch.arange(n).remainder(100).to(dtype)
            sent = all_to_all(x, pkt.empty(n, dtype=dtype))
            assert torch.equal(torch.as_tensor(sent), x.view(2, -1)[world.rank].repeat(2))
            world.barrier()
            assert bool(made) == (x.nbytes <= 150 and dtype in flagged.DTYPES)
            world.barrier()

    on_ranks(2, run)


def test_there_and_back() -> None:
    def run(world: Any) -> None:
        x = pkt.empty(2, 5, 2 * world.size, 3)
        x.copy_(inputs(world, tuple(x.shape), torch.float32, 0)[world.rank])
        heads = all_to_all(x, pkt.empty(2, 5 * world.size, 2, 3), scatter=2, gather=1)
        assert torch.equal(all_to_all(heads, scatter=1, gather=2), x.plain())

    on_ranks(3, run)


def test_any_element_type_and_an_input_of_this_rank_alone() -> None:
    def run(world: Any) -> None:
        for dtype in NUMBERS:
            everybody = [torch.arange(10).add(40 * r).to(dtype) for r in range(world.size)]
            out = pkt.empty(10, dtype=dtype)
            assert all_to_all(everybody[world.rank], out) is out
            assert torch.equal(out.plain(), reference(world.rank, everybody))

    on_ranks(2, run)


def test_a_new_tensor() -> None:
    def run(world: Any) -> None:
        got = pkt.all_to_all(pkt.full((world.size, 3), float(world.rank)))
        assert type(got) is torch.Tensor
        assert torch.equal(got, torch.arange(world.size).float()[:, None].expand(-1, 3))

    on_ranks(3, run)


def test_nothing_to_send() -> None:
    on_ranks(2, lambda world: all_to_all(pkt.empty(0, 4), gather=1).shape == (0, 8) or pytest.fail("shape"))


# ------------------------------------------------------------------------------------------------- bad input
def bad(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        on_ranks(2, call)


def test_bad_arguments() -> None:
    bad(pkt.NotSymmetric, "all_to_all: x must be a symmetric tensor", lambda w: all_to_all(torch.ones(4)))
    bad(
        pkt.NotSymmetric,
        "all_to_all: out must be a symmetric tensor",
        lambda w: all_to_all(pkt.ones(4), torch.ones(4), mode="push"),
    )
    bad(pkt.ShapeError, r"x: found \(5,\), wanted dimension 0 divisible by 2", lambda w: all_to_all(pkt.ones(5)))
    bad(pkt.ShapeError, "x: found", lambda w: all_to_all(pkt.ones(())))
    bad(pkt.ShapeError, "dimension 1 divisible by 2", lambda w: all_to_all(pkt.ones(4, 3), scatter=1))
    bad(pkt.ShapeError, "scatter: found 2, wanted an axis", lambda w: all_to_all(pkt.ones(4, 3), scatter=2))
    bad(pkt.ShapeError, "gather: found 4, wanted an axis", lambda w: all_to_all(pkt.ones(4, 3), gather=4))
    bad(
        pkt.ShapeError,
        r"out: found \(4, 4\), wanted \(2, 8\)",
        lambda w: all_to_all(pkt.ones(4, 4), pkt.ones(4, 4), gather=1),
    )
    bad(pkt.DtypeError, "out: found fp16", lambda w: all_to_all(pkt.ones(4), pkt.ones(4, dtype=torch.float16)))
    bad(pkt.DtypeError, "x: found complex64", lambda w: all_to_all(pkt.empty(4, dtype=torch.complex64)))
    bad(
        pkt.NotSymmetric,
        "all_to_all: out must be a symmetric tensor",
        lambda w: all_to_all(pkt.ones(4), torch.ones(4), mode="copy"),
    )
    bad(pkt.Unsupported, "wanted 'push' or 'pull' or 'copy'", lambda w: all_to_all(pkt.ones(4), mode="send"))
    bad(pkt.ShapeError, "block: found 3, wanted a power of two", lambda w: all_to_all(pkt.ones(4), block=3))
    bad(
        pkt.ShapeError,
        'block: found 4, wanted none with mode "copy"',
        lambda w: all_to_all(pkt.ones(4), pkt.empty(4), mode="copy", block=4),
    )

    def in_place(world: Any) -> None:
        x = pkt.ones(4)
        all_to_all(x, x)

    bad(pkt.ShapeError, "out: found a tensor 0 bytes from x, wanted memory of its own$", in_place)


def test_ranks_that_disagree() -> None:
    bad(
        pkt.CollectiveMismatch,
        "scatter=0.*scatter=1",
        lambda w: all_to_all(pkt.ones(4, 4), scatter=w.rank, gather=w.rank),
    )
