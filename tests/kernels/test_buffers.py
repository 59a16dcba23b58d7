"""Calls that differ in one setting only take turns, so that a buffer or a counter that they should not share shows; and
what the ranks must have alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import CollectiveMismatch, ShapeError
from pkt.kernels.shared import copies, grid
from pkt.kernels.shared.checks import check_apart

from .helpers import on_ranks, operands

TURNS = 3
TILES = (16, 16, 16)
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}  # in a buffer of another dtype more is lost


def takes_turns(world: Any, operator: Any, exact: Any, shapes: tuple, *calls: dict[str, Any]) -> None:
    """The calls one after the other, TURNS times, each with new operands and the right result."""
    for launch in range(TURNS * len(calls)):
        given = dict(calls[launch % len(calls)])
        dtype = given.pop("dtype", torch.bfloat16)
        everybody = operands(world, *given.pop("shapes", shapes), dtype, launch)
        given.setdefault("tiles", TILES)
        if given.pop("symmetric", False):
            given["out"] = pkt.empty(shapes[0][0], shapes[1][1], dtype=dtype)
        found = operator(*everybody[world.rank], **given)
        wanted = exact(world, everybody)
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        assert error < BOUND[dtype], (launch, given, error)


def gathered(world: Any, everybody: list) -> torch.Tensor:
    return torch.cat([a.double() for a, _ in everybody]) @ everybody[world.rank][1].double()


def summed(world: Any, everybody: list) -> torch.Tensor:
    return sum(a.double() @ b.double() for a, b in everybody)


def scattered(world: Any, everybody: list) -> torch.Tensor:
    return summed(world, everybody).chunk(world.size)[world.rank]


GATHER, SCATTER = ((48, 64), (64, 32)), ((96, 32), (32, 48))
CALLS = {
    "gather, chunk": (pkt.all_gather_matmul, gathered, GATHER, [
        {"mode": "push", "num_comm_sms": 1, "chunk": 16}, {"mode": "push", "num_comm_sms": 1, "chunk": 32},
    ]),
    "gather, columns, and so tasks": (pkt.all_gather_matmul, gathered, GATHER, [
        {"mode": "push", "num_comm_sms": 1, "chunk": 16, "shapes": ((16, 64), (64, 48))},
        {"mode": "push", "num_comm_sms": 1, "chunk": 16, "shapes": ((16, 64), (64, 64))},
    ]),
    "gather, communicators, and so programs": (pkt.all_gather_matmul, gathered, ((16, 64), (64, 16)), [
        {"mode": "push", "num_comm_sms": 1, "chunk": 16}, {"mode": "push", "num_comm_sms": 2, "chunk": 16},
    ]),
    "gather, rows of a tile": (pkt.all_gather_matmul, gathered, GATHER, [
        {"mode": "push", "num_comm_sms": 1, "chunk": 16},
        {"mode": "push", "num_comm_sms": 1, "chunk": 16, "tiles": (32, 16, 16)},
    ]),
    "scatter, dtype": (pkt.matmul_reduce_scatter, scattered, SCATTER, [
        {"mode": "inbox"}, {"mode": "inbox", "dtype": torch.float16}, {"mode": "inbox", "dtype": torch.float32},
    ]),
    "scatter, dtype, add": (pkt.matmul_reduce_scatter, scattered, SCATTER, [
        {"mode": "add"}, {"mode": "add", "dtype": torch.float16}, {"mode": "add", "dtype": torch.float32},
    ]),
    "scatter, mode": (pkt.matmul_reduce_scatter, scattered, SCATTER, [{"mode": "inbox"}, {"mode": "add"}]),
    "scatter, tiles": (pkt.matmul_reduce_scatter, scattered, SCATTER, [
        {"mode": "inbox"}, {"mode": "inbox", "tiles": (32, 16, 16)},
    ]),
    "reduce, where out is": (pkt.matmul_all_reduce, summed, SCATTER, [
        {"mode": "lcsc", "num_comm_sms": 1, "symmetric": True}, {"mode": "lcsc", "num_comm_sms": 1},
    ]),
    "reduce, dtype": (pkt.matmul_all_reduce, summed, SCATTER, [
        {"mode": "lcsc", "num_comm_sms": 1}, {"mode": "lcsc", "num_comm_sms": 1, "dtype": torch.float16},
    ]),
    "reduce, tiles": (pkt.matmul_all_reduce, summed, SCATTER, [
        {"mode": "lcsc", "num_comm_sms": 1}, {"mode": "lcsc", "num_comm_sms": 1, "tiles": (32, 32, 16)},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_in_one_setting_share_nothing(name: str) -> None:
    operator, exact, shapes, calls = CALLS[name]
    on_ranks(2, takes_turns, operator, exact, shapes, *calls)


@pytest.mark.parametrize("chunks", [(8, 16), (16, 8), (None, 8)])
def test_gatherings_of_other_chunks_have_other_counters(chunks: tuple) -> None:
    """A counter for each chunk: shared ones would be too few, or stand for other columns."""

    def main(world: Any) -> None:
        found = [copies.gathering(world, 8, 32, torch.float32, 4, chunk) for chunk in (*chunks, chunks[0])]
        first, second, again = (gathering.counters for gathering in found)
        for chunk, counters in zip(chunks, (first, second)):
            assert counters.numel() == world.size * 2 * (32 // (chunk or 32)) + 1
        assert first.data_ptr() == again.data_ptr() != second.data_ptr()

    on_ranks(2, main)


@pytest.mark.parametrize(("tasks", "wanted"), [(10, 3), (2, 2), (0, 1)])
def test_a_grid_fits_the_rank_with_the_fewest_sms(tasks: int, wanted: int) -> None:
    assert grid.num_programs(SimpleNamespace(num_sms=3), tasks) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", [pkt.all_gather_matmul, pkt.matmul_reduce_scatter, pkt.matmul_all_reduce])
def test_ranks_with_other_epilogues_are_told(operator: Any) -> None:
    def main(world: Any) -> None:
        a = torch.ones(32, 32)
        with pytest.raises(CollectiveMismatch, match=r"(?s)epilogue='relu'.*epilogue='gelu'"):
            operator(a, a, epilogue="gelu" if world.rank else "relu")

    on_ranks(2, main)


def test_memory_that_only_touches_is_not_shared() -> None:
    world = SimpleNamespace(rank=0)
    room = torch.zeros(96)
    x = room[32:64]
    for apart in (room[:32], room[64:], room[:16], room[80:]):
        check_apart("call", x, apart, world, None, "x")
    for over in (room[1:33], room[63:95], room[31:33], room[40:48], room, x):
        with pytest.raises(ShapeError, match="memory of its own"):
            check_apart("call", x, over, world, None, "x")
    check_apart("call", x, x, world, 0, "x")
    check_apart("call", x, room[48:64], world, 1, "x")
    with pytest.raises(ShapeError, match="this rank's part"):
        check_apart("call", x, room[32:48], world, 1, "x")
