"""Modes "unfused" and "nccl" of the fused operators: "unfused" on simulated ranks, "nccl" in processes over gloo,
against the references of pkt's own forms."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import CollectiveMismatch, ShapeError, Unsupported
from pkt.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from pkt.kernels.operator import Operator
from pkt.kernels.shared import flagged as _low_latency
from pkt.kernels.shared import replays
from pkt.kernels.shared.tile_product import finished
from pkt.runtime.launch import replay
from tests.runtime import forked
from tests.runtime.eager_worlds import Rank, eager_worlds

from .helpers import (
    DTYPES,
    FINISHES,
    LAUNCHES,
    RANKS,
    SEEDS,
    SLOPE,
    UNIT,
    as_weight,
    assert_within,
    finished_bound,
    inputs,
    on_ranks,
    operands,
    product_bound,
    random,
    rounded,
    sum_of_products_bound,
)


def gather(shards: Any, b: torch.Tensor, shard: Any = "rows", bias: Any = None, epilogue: Any = "none") -> torch.Tensor:
    return all_gather_matmul.reference(0, shards, [b], bias if bias is None else [bias], epilogue, shard)


def scatter(ops: Any, rank: int, bias: Any = None, epilogue: Any = "none") -> torch.Tensor:
    biases = None if bias is None else [bias] * len(ops)
    return matmul_reduce_scatter.reference(rank, *zip(*ops), biases, epilogue)


def reduce(ops: Any, bias: Any = None, epilogue: Any = "none") -> torch.Tensor:
    return matmul_all_reduce.reference(0, *zip(*ops), bias if bias is None else [bias], epilogue)


# --------------------------------------------------------------------------------------------------- unfused
def finishes(exact: torch.Tensor, error: torch.Tensor, bias: torch.Tensor | None, epilogue: Any) -> torch.Tensor:
    """As finished_bound, where the sum with the bias is rounded before the epilogue."""
    dtype = torch.float32 if bias is None else bias.dtype
    size = exact.abs() if bias is None else (exact + bias.double()).abs()
    again = 0.0 if bias is None else SLOPE[epilogue] * UNIT[dtype] * (size + error)
    return error + again


def tensor(world: Any, shape: tuple[int, int], dtype: torch.dtype, kind: str) -> torch.Tensor | None:
    """An output: None, plain, symmetric, or symmetric where nothing can be reduced in place."""
    if kind == "none":
        return None
    if kind == "odd":
        return pkt.empty(shape[0] * shape[1] + 1, dtype=dtype, world=world)[1:].view(shape)
    return torch.empty(shape, dtype=dtype) if kind == "plain" else pkt.empty(*shape, dtype=dtype, world=world)


def multiplies(world: Any, sizes: tuple[int, int, int], dtype: torch.dtype, kind: str = "none") -> list[torch.Tensor]:
    """All three operators, launch after launch on new values, with nothing between the launches."""
    (M, k, N), size, rank = sizes, world.size, world.rank
    shapes = [(size * M, N), (M, N), (M, N), (M, N)]
    outs = [tensor(world, shape, dtype, kind) for shape in shapes]
    for launch in range(LAUNCHES):
        lying = as_weight if launch % 2 else torch.Tensor.contiguous
        shards, b, tall = (
            inputs(world, (M, k), dtype, launch),
            random((k, N), dtype, 1),
            random((size * k, N), dtype, 2),
        )
        many, ops = (
            operands(world, (size * M, k), (k, N), dtype, launch),
            operands(world, (M, k), (k, N), dtype, launch),
        )
        (x, y), (v, w), given = many[rank], ops[rank], {"mode": "unfused", "world": world}
        found = [
            pkt.all_gather_matmul(shards[rank], lying(b), outs[0], **given),
            pkt.all_gather_matmul(shards[rank], lying(tall), outs[1], shard="columns", **given),
            pkt.matmul_reduce_scatter(x, lying(y), outs[2], **given),
            pkt.matmul_all_reduce(v, lying(w), outs[3], **given),
        ]
        assert kind == "none" or all(one is out for one, out in zip(found, outs))
        rows, beside = torch.cat(shards), torch.cat(shards, dim=1)
        exact = [gather(shards, b), gather(shards, tall, "columns"), scatter(many, rank), reduce(ops)]
        limits = [
            rounded(exact[0], product_bound(rows, b), dtype),
            rounded(exact[1], product_bound(beside, tall), dtype),
            sum_of_products_bound(many, reduce(many)).chunk(size)[rank],
            sum_of_products_bound(ops, reduce(ops)),
        ]
        for i in range(4):
            assert_within(found[i], exact[i], limits[i], i, rank, launch, sizes, kind)
    return [one.clone() for one in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_equal_the_references(ranks: int, dtype: torch.dtype) -> None:
    kind = {1: "plain", 2: "symmetric", 3: "odd", 4: "none", 5: "symmetric", 8: "plain"}[ranks]
    found = on_ranks(ranks, multiplies, (7, 13, 21), dtype, kind, multicast=ranks % 2 == 0)
    assert all(torch.equal(one[3], found[0][3]) for one in found), "all ranks hold the same sum"


@pytest.fixture
def without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all sums were too large for the low-latency all-reduce."""
    for most in ("FLAG_BYTES", "PLAIN_FLAG_BYTES"):
        monkeypatch.setattr(_low_latency, most, 0)


@pytest.mark.parametrize("kind", ["none", "plain", "symmetric", "odd"])
@pytest.mark.usefixtures("without_flags")
def test_sums_too_large_for_low_latency(kind: str) -> None:
    """Such sums are made in the output, or in a workspace by the switch, which does not reach a plain output."""

    def run(world: Any) -> Any:
        multiplies(world, (18, 24, 20), torch.float32, kind)
        return [key for key in world._scopes[-1].kept if key[:3] == ("kernels.unfused", 18, 20)]

    keys = on_ranks(3, run, multicast=kind == "plain")
    assert [len(found) for found in keys] == [1 if kind == "plain" else 0] * 3


@pytest.mark.usefixtures("without_flags")
def test_every_schedule_gives_the_same_bits_without_flags() -> None:
    test_every_schedule_gives_the_same_bits((18, 24, 20))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 24, 40), (16, 0, 8)], ids=str)
def test_every_schedule_gives_the_same_bits(sizes: tuple[int, int, int]) -> None:
    runs = [on_ranks(3, multiplies, sizes, torch.float32, seed=seed, multicast=False) for seed in SEEDS[:4]]
    for run in runs:
        for found, first in zip(run, runs[0]):
            assert all(torch.equal(x, y) for x, y in zip(found, first))


def again(world: Any, name: str, N: int, options: dict[str, Any]) -> None:
    """One operator, launch after launch, on integers that fp32 adds and multiplies exactly."""
    size, rank, operator = world.size, world.rank, getattr(pkt, name)
    columns = "shard" in options
    for launch in range(4):
        shards = [torch.full((12, 8), float(1 + r + 5 * launch)) for r in range(size)]
        b = values((8 * size if columns else 8, N), launch)
        found = operator(shards[rank], b, mode="unfused", world=world, **options)
        if name == "all_gather_matmul":
            same(found, gather(shards, b, **options))
        else:
            whole = reduce([(shard, b) for shard in shards])
            same(found, whole.chunk(size)[rank] if name == "matmul_reduce_scatter" else whole)


@pytest.mark.parametrize(
    ("name", "N", "options"),
    [
        ("all_gather_matmul", 24, {}),
        ("all_gather_matmul", 24, {"shard": "columns"}),
        ("matmul_reduce_scatter", 24, {}),
        ("matmul_all_reduce", 24, {}),
    ],
)
def test_the_next_product_waits_for_the_collective_on_every_rank(name: str, N: int, options: dict[str, Any]) -> None:
    """In any order of the ranks. The product overwrites memory that peers read, and peers store where it reads."""
    for seed in SEEDS:
        on_ranks(3, again, name, N, options, seed=seed, multicast=False)


@pytest.mark.usefixtures("without_flags")
def test_the_next_product_waits_for_the_all_reduce_without_flags() -> None:
    for seed in SEEDS:
        on_ranks(3, again, "matmul_all_reduce", 24, {}, seed=seed, multicast=False)


@pytest.mark.parametrize(("epilogue", "with_bias", "dtype"), [finish[:3] for finish in FINISHES])
def test_bias_and_epilogue(epilogue: Any, with_bias: bool, dtype: torch.dtype) -> None:
    """Bias and epilogue are applied once, to the rounded sum, whatever the number of ranks."""

    def run(world: Any) -> None:
        rank, size, (M, k, N) = world.rank, world.size, (6, 20, 24)
        bias = random((N,), dtype, 1) if with_bias else None
        given = {"mode": "unfused", "world": world, "bias": bias, "epilogue": epilogue}
        shards, b = inputs(world, (M, k), dtype, 0), random((k, N), dtype, 1)
        many, ops = operands(world, (size * M, k), (k, N), dtype, 0), operands(world, (M, k), (k, N), dtype, 0)
        whole = gather(shards, b)
        for found, exact, error in (
            (
                pkt.all_gather_matmul(shards[rank], b, **given),
                whole,
                rounded(whole, product_bound(torch.cat(shards), b), dtype),
            ),
            (
                pkt.matmul_reduce_scatter(*many[rank], **given),
                scatter(many, rank),
                sum_of_products_bound(many, reduce(many)).chunk(size)[rank],
            ),
            (pkt.matmul_all_reduce(*ops[rank], **given), reduce(ops), sum_of_products_bound(ops, reduce(ops))),
        ):
            limit = finished_bound(exact, finishes(exact, error, bias, epilogue), bias, epilogue, dtype)
            assert_within(found, finished(exact, bias, epilogue), limit, rank, epilogue)

    on_ranks(3, run)


def test_weights_that_are_trained() -> None:
    """cuBLAS' product is recorded as a kernel of pkt's own is: once, by the operator."""

    def run(world: Any) -> None:
        weight = torch.ones(4, 4, requires_grad=True)
        bias = torch.ones(4, requires_grad=True)
        for operator in (pkt.all_gather_matmul, pkt.matmul_reduce_scatter, pkt.matmul_all_reduce):
            found = operator(torch.ones(4, 4), weight.t(), mode="unfused", bias=bias, world=world)
            assert found.unique().tolist() == [5.0 if operator is pkt.all_gather_matmul else 9.0]
            assert found.requires_grad
            rows = 4.0 if operator is pkt.matmul_reduce_scatter else 8.0  # that a weight's column meets, in all losses
            weight.grad = None
            found.sum().backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [rows]
            with torch.no_grad():
                assert not operator(torch.ones(4, 4), weight.t(), mode="unfused", bias=bias, world=world).requires_grad

    on_ranks(2, run)


def test_no_rows_or_columns() -> None:
    def run(world: Any) -> None:
        for M, N in ((0, 4), (4, 0)):
            a, b = torch.ones(M, 4), torch.ones(4, N)
            assert pkt.matmul_all_reduce(a, b, mode="unfused").shape == (M, N)
            assert pkt.matmul_reduce_scatter(a, b, mode="unfused").shape == (M // 2, N)
            assert pkt.all_gather_matmul(a, b, mode="unfused").shape == (2 * M, N)

    on_ranks(2, run)


def test_a_product_waits_for_the_last_call_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product writes where the collective of that call may still read."""

    def run(world: Any) -> list[str]:
        said: list[str] = []
        for operator in (pkt.matmul_reduce_scatter, pkt.matmul_all_reduce):
            operator(torch.ones(4, 4), torch.ones(4, 4), mode="unfused")
        mm = torch.mm

        def spied(*args: Any, **named: Any) -> torch.Tensor:
            said.append("multiply")
            return mm(*args, **named)

        world.streams = SimpleNamespace(follow=lambda: said.append("follow"), capturing=lambda: False)
        monkeypatch.setattr(torch, "mm", spied)
        for operator in (pkt.matmul_reduce_scatter, pkt.matmul_all_reduce):
            operator(torch.ones(4, 4), torch.ones(4, 4), mode="unfused")
        monkeypatch.undo()
        world.streams = None
        return said

    assert on_ranks(1, run) == [["follow", "multiply"] * 2], "the collectives were planned in a world without streams"


def test_one_buffer_is_kept_for_operators_of_one_shape() -> None:
    def run(world: Any) -> None:
        a, b = torch.ones(90, 90), torch.ones(90, 200)
        for _ in range(2):
            assert pkt.matmul_all_reduce(a, b, mode="unfused").eq(180).all()
            assert pkt.matmul_reduce_scatter(a, b, mode="unfused").eq(180).all()
        assert sum(key[0] == "kernels.unfused" for key in world._scopes[-1].kept) == 1

    on_ranks(2, run)


# ------------------------------------------------------------------------------------------------------ nccl
PROCESSES = 3


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Integers that fp32 adds and multiplies exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def everybodys(*shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [values(shape, seed + rank) for rank in range(PROCESSES)]


def same(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert torch.equal(found.double(), exact), (found, exact)


def products(world: Any) -> None:
    rank, many = world.rank, everybodys(6, 4)
    b, bias = everybodys(4, 5, seed=10), values((5,), 30)
    ops = list(zip(many, b))
    for options in ({}, {"bias": bias, "epilogue": "relu"}):
        given = {"mode": "nccl", "world": world, **options}
        same(pkt.all_gather_matmul(many[rank], b[rank], **given), gather(many, b[rank], **options))
        tall, out = values((12, 5), 20 + rank), torch.empty(6, 5)
        assert pkt.all_gather_matmul(many[rank], tall, out, shard="columns", **given) is out
        same(out, gather(many, tall, "columns", **options))
        same(pkt.matmul_reduce_scatter(many[rank], b[rank], **given), scatter(ops, rank, **options))
        same(pkt.matmul_all_reduce(many[rank], as_weight(b[rank]), **given), reduce(ops, **options))
    symmetric = pkt.empty(6, 5, dtype=torch.float32, name="out", world=world)
    assert pkt.matmul_all_reduce(many[rank], b[rank], symmetric, mode="nccl", world=world) is symmetric
    same(symmetric.plain(), reduce(ops))


def test_nccl_gives_exact_results() -> None:
    def run(world: Any) -> bool:
        # The fake driver's memory is this process's own.
        world.torch_device, world.streams = torch.device("cpu"), None
        products(world)
        return True

    ends = forked.in_worlds(PROCESSES, run)
    assert [end.value for end in ends] == [True] * PROCESSES, ends


def test_the_simulator_has_no_nccl() -> None:
    def main(world: Any) -> None:
        a = torch.zeros(4, 4)
        with pytest.raises(Unsupported, match="pkt's own forms run there"):
            pkt.all_gather_matmul(a, a, mode="nccl", world=world)

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("mode", ["unfused", "nccl"])
def test_settings_of_the_fused_forms_are_refused(mode: str) -> None:
    def main(world: Any) -> None:
        a = torch.zeros(4, 4)
        before = world.heap.ledger.free_bytes
        for operator, setting in (
            (pkt.matmul_all_reduce, {"tiles": (16, 16, 16)}),
            (pkt.matmul_all_reduce, {"num_comm_sms": 2}),
            (pkt.matmul_reduce_scatter, {"tiles": (16, 16, 16)}),
            (pkt.all_gather_matmul, {"chunk": 64}),
        ):
            with pytest.raises(ShapeError, match=f'{next(iter(setting))}.*none with mode "{mode}"'):
                operator(a, a, mode=mode, world=world, **setting)
        assert world.heap.ledger.free_bytes == before

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_ranks_in_different_modes_are_refused() -> None:
    def main(world: Any) -> None:
        pkt.matmul_all_reduce(torch.zeros(4, 4), torch.zeros(4, 4), mode="unfused" if world.rank else "lcsc")

    with pytest.raises(CollectiveMismatch, match="mode='lcsc'.*mode='unfused'"):
        on_ranks(2, main)


# ------------------------------------------------------------------------------------------------- what a call costs
def three(rank: Any, out: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of the operators on two ranks, by name."""
    a, b = torch.ones(4, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)
    rows = {"all_gather_matmul": 8, "matmul_reduce_scatter": 2, "matmul_all_reduce": 4}
    outs = {name: torch.empty(n, 8, dtype=dtype) if out else None for name, n in rows.items()}
    return {
        name: lambda name=name: getattr(pkt, name)(a, b, outs[name], mode="unfused", world=rank.world) for name in rows
    }


def test_a_collective_is_planned_with_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call looks one plan up, and checks nothing a second time."""
    looked_up: dict[int, int] = {}
    call = Operator.__call__

    def counted(self: Any, *args: Any) -> torch.Tensor:
        looked_up[get_ident()] = looked_up.get(get_ident(), 0) + 1
        return call(self, *args)

    monkeypatch.setattr(Operator, "__call__", counted)

    def main(rank: Rank) -> None:
        for run in three(rank, True, torch.float32).values():
            looked_up[get_ident()] = 0
            for times in (1, 2, 3, 4):
                run()
                assert looked_up[get_ident()] == times

    assert eager_worlds(2, main) == [None] * 2


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_call_that_comes_again_is_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's settings of then. Not in fp32, whose settings have two forms."""
    settings: dict[int, bool] = {}
    monkeypatch.setitem(replays.PRECISION, torch.bfloat16, lambda: settings.get(get_ident(), True))

    def main(rank: Rank) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            run = three(rank, True, dtype)[name]
            found = []
            for turn in range(replay.CALLS + 4):
                settings[get_ident()] = turn != replay.CALLS + 2
                before = rank.driver.calls.copy()
                run()
                found.append(dict(rank.driver.calls - before))
            once = found[0] and {"launch": 1}
            assert found[1 : replay.CALLS] == [once] * (replay.CALLS - 1)
            recorded = {"launch": 1, "uncouple": 1, "record": 1, "replay": 1}
            again = [recorded, {"replay": 1}, once, {"replay": 1}]
            assert found[replay.CALLS :] == (again if dtype == torch.bfloat16 else [once] * 4)

    assert eager_worlds(2, main) == [None] * 2
