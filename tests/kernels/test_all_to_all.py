"""All-to-all: parts along any axis go to the ranks, which join them along any other, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_to_all import OPERATOR, all_to_all, reference
from pkt.kernels.shared import flagged

from .helpers import LAUNCHES, assert_raises, inputs, on_ranks

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
    launches: int = LAUNCHES,
) -> None:
    shape = tuple(n * world.size if axis == scatter % len(shape) else n for axis, n in enumerate(shape))
    x = pkt.empty(shape, dtype=dtype)
    out = pkt.empty(reference(0, [torch.empty(shape)] * world.size, scatter, gather).shape, dtype=dtype)
    block = None if mode == "copy" else block
    for launch in range(launches):
        everybody = inputs(world, shape, dtype, launch)
        x.copy_(everybody[world.rank])
        got = all_to_all(x, out, scatter=scatter, gather=gather, mode=mode, block=block)
        assert got is out
        assert torch.equal(got.plain(), reference(world.rank, everybody, scatter, gather)), (world.rank, launch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("scatter", "gather"), PAIRS)
def test_any_pair_of_axes(scatter: int, gather: int, mode: str) -> None:
    """Every launch computes the same places, so one launch is enough."""
    on_ranks(3, exchanges, (2, 3, 5, 4), torch.bfloat16, mode, scatter, gather, 16, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 33, 1, 1), (1, 9, 1, 100), (3, 1, 5, 7), (1, 16, 2, 16)])
def test_sizes_that_do_not_divide_the_blocks(shape: tuple[int, ...], mode: str) -> None:
    on_ranks(3, exchanges, shape, torch.float16, mode, 2, 1, 32, 2)
    on_ranks(2, exchanges, shape, torch.float16, mode, -2, -3, None, 2)


def test_small_tensors_are_sent_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ------------------------------------------------------------------------------------------------- bad input
def test_bad_arguments() -> None:
    assert_raises(
        pkt.ShapeError, r"x: found \(5,\), wanted dimension 0 divisible by 2", lambda w: all_to_all(pkt.ones(5))
    )
    assert_raises(pkt.ShapeError, "x: found", lambda w: all_to_all(pkt.ones(())))
    assert_raises(pkt.ShapeError, "dimension 1 divisible by 2", lambda w: all_to_all(pkt.ones(4, 3), scatter=1))
    assert_raises(pkt.ShapeError, "scatter: found 2, wanted an axis", lambda w: all_to_all(pkt.ones(4, 3), scatter=2))
    assert_raises(pkt.ShapeError, "gather: found 4, wanted an axis", lambda w: all_to_all(pkt.ones(4, 3), gather=4))

    def in_place(world: Any) -> None:
        x = pkt.ones(4)
        all_to_all(x, x)

    assert_raises(pkt.ShapeError, "out: found a tensor 0 bytes from x, wanted memory of its own$", in_place)


def test_ranks_that_disagree() -> None:
    assert_raises(
        pkt.CollectiveMismatch,
        "scatter=0.*scatter=1",
        lambda w: all_to_all(pkt.ones(4, 4), scatter=w.rank, gather=w.rank),
    )
