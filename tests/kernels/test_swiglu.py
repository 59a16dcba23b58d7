"""Epilogue "swiglu" of all_gather_matmul: gate and up in one weight, half as many columns in the result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather_matmul import all_gather_matmul, reference
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.shared.gating import gate_kernel, gating
from pkt.kernels.shared.tile_product import finished
from pkt.language.inspect import compile_only
from tests.conformance.inputs import SLOPE

from .helpers import (
    DTYPES,
    GATHER_FORMS,
    UNIT,
    as_weight,
    assert_raises,
    assert_within,
    inputs,
    on_ranks,
    product_bound,
    random,
    rounded,
)
from .launches import all_launched
from .machine_code import resources

SIZES = [(20, 24, 16), (7, 13, 21), (33, 8, 1), (1, 40, 8)]  # (m, k, columns of the result)


def layer(
    world: Any, mode: Any, shard: Any, sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool, bias: bool
) -> None:
    """silu(A @ gate + its bias) * (A @ up + its bias), from two weights and two biases, against fp64."""
    m, k, n = sizes
    shards = inputs(world, (m, k), dtype, 0)
    rows = k * (world.size if shard == "columns" else 1)
    gate, up = (random((rows, n), dtype, world.rank, i) for i in range(2))
    added = [random((n,), dtype, world.rank, i) for i in range(2, 4)] if bias else None
    b = pkt.interleave(as_weight(gate), as_weight(up)) if transposed else pkt.interleave(gate, up)
    assert b.t().is_contiguous() == (transposed and n > 1)
    tiles = {} if mode == "unfused" else {"tiles": (16, 16, 16)}
    both = pkt.interleave(*added) if added else None
    got = all_gather_matmul(shards[world.rank], b, mode=mode, shard=shard, bias=both, epilogue="swiglu", **tiles)
    whole = torch.cat(shards, dim=0 if shard == "rows" else 1)
    g, u = (whole.double() @ x.double() + (y.double() if bias else 0) for x, y in zip((gate, up), added or [0, 0]))
    exact = torch.nn.functional.silu(g) * u
    torch.testing.assert_close(reference(0, shards, [b], [both] if bias else None, "swiglu", shard), exact)
    errors = [product_bound(whole, x) + 2.0**-24 * (y.abs() + 1) for x, y in ((gate, g), (up, u))]
    if mode == "unfused":  # product, and sum with the bias, are rounded to the dtype
        errors = [e + 2 * UNIT[dtype] * (y.abs() + 10) for e, y in zip(errors, (g, u))]
    limit = SLOPE * errors[0] * (u.abs() + errors[1]) + errors[1] * g.abs() + 2.0**-20 * (g * u).abs()
    limit = limit + (2 * UNIT[dtype] * exact.abs() if mode == "unfused" else 0)
    assert_within(got, exact, rounded(exact, limit, dtype), world.rank, mode, sizes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("mode", "shard"), GATHER_FORMS)
def test_one_weight_of_two(mode: Any, shard: Any, ranks: int) -> None:
    def run(world: Any) -> None:
        for i, sizes in enumerate(SIZES):
            for j, dtype in enumerate(DTYPES):
                if mode != "copy" or sizes[1] * dtype.itemsize % 16 == 0:
                    layer(world, mode, shard, sizes, dtype, transposed=(i + j) % 2 == 1, bias=j != 1)

    on_ranks(ranks, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_behind_a_librarys_product_compiles(
    dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One kernel, which reads 16 bytes at a time and spills nothing."""

    def run(world: Any) -> None:
        a, b, bias = (torch.empty(shape, dtype=dtype) for shape in ((16, 512), (2048, 1024), (1024,)))
        all_gather_matmul(a, b, mode="unfused", shard="columns", bias=bias, epilogue="swiglu")

    (launch,) = [x for x in all_launched(run, 4, False, monkeypatch) if x.kernel is gate_kernel]
    compiled = compile_only(launch.kernel, *launch.args, arch=arch, **launch.options)
    usage = resources(compiled, tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert re.search(r"ld\.global\.v4\.b32", compiled.asm["ptx"])
    assert not re.search(r"st\.global\.b(16|8)\b", compiled.asm["ptx"])


def test_what_is_not_a_number_stays_so() -> None:
    def run(world: Any) -> None:
        a = torch.eye(4)
        gate, up = torch.tensor([[-200.0, torch.nan, 1.0, 0.0]]).repeat(4, 1), torch.ones(4, 4)
        up[:, 2] = torch.inf
        found = all_gather_matmul(a, pkt.interleave(gate, up), epilogue="swiglu")
        assert found[:, 0].eq(0).all()
        assert found[:, 1].isnan().all()
        assert not found[:, 2].isfinite().any()
        assert all_gather_matmul(a, gate, epilogue="relu")[:, 1].isnan().all()

    on_ranks(1, run)


def test_the_kernel_behind_a_librarys_product_takes_any_number_of_columns() -> None:
    def run(world: Any) -> None:
        product, bias = torch.randn(19, 2 * 301), torch.randn(2 * 301)
        out = torch.zeros(19, 301)
        gating(world, *product.shape)(product, bias, out)
        torch.testing.assert_close(out, finished(product, bias, "swiglu"))

    on_ranks(1, run, sms=2)


def test_interleave() -> None:
    gate, up = torch.arange(6.0).view(2, 3), -torch.arange(6.0).view(2, 3)
    both = pkt.interleave(gate, up)
    assert both.is_contiguous()
    assert torch.equal(both[:, 0::2], gate)
    assert torch.equal(both[:, 1::2], up)
    transposed = pkt.interleave(as_weight(gate), as_weight(up))
    assert transposed.t().is_contiguous()
    assert torch.equal(transposed, both)
    assert pkt.interleave(gate, as_weight(up)).is_contiguous()
    assert pkt.interleave(gate[0], up[0]).tolist() == [0, 0, 1, -1, 2, -2]
    with pytest.raises(pkt.ShapeError, match=r"pkt.interleave: gate and up: found \(2, 3\) and \(3,\), wanted two of"):
        pkt.interleave(gate, up[0])
    with pytest.raises(pkt.DtypeError, match="up: found fp16, wanted gate's, torch.float32"):
        pkt.interleave(gate, up.half())


def test_interleave_takes_two_dense_tensors_of_one_device() -> None:
    weight = torch.ones(4, 3)
    for wrong in (3, None, [1.0], weight.to_sparse()):
        with pytest.raises(pkt.DtypeError, match=r"pkt.interleave: up: found .*, wanted a dense tensor"):
            pkt.interleave(weight, wrong)  # type: ignore[arg-type]
    with pytest.raises(pkt.DtypeError, match="up: found a tensor on meta, wanted one on cpu, as gate"):
        pkt.interleave(weight, weight.to("meta"))


def test_what_does_not_fit_is_refused() -> None:
    a, b = torch.ones(4, 4), torch.ones(4, 6)
    remedy = r'b: found \(4, 5\), wanted an even number of columns for epilogue "swiglu".*pkt.interleave\(gate, up\)'
    assert_raises(pkt.ShapeError, remedy, lambda world: all_gather_matmul(a, b[:, :5].contiguous(), epilogue="swiglu"))
    options: Any = {"epilogue": "swiglu"}
    assert_raises(
        pkt.ShapeError,
        r"bias: found \(3,\), wanted \(6,\)",
        lambda world: all_gather_matmul(a, b, bias=b[0, :3], **options),
    )
    assert_raises(
        pkt.ShapeError,
        r"out: found \(8, 6\), wanted \(8, 3\)",
        lambda world: all_gather_matmul(a, b, torch.ones(8, 6), **options),
    )
    assert_raises(pkt.ShapeError, "b: found .*wanted 2 dimensions", lambda world: all_gather_matmul(a, b[0], **options))
    for sums in (matmul_reduce_scatter, matmul_all_reduce):
        match = "found epilogue 'swiglu': wanted 'none' or 'relu'"
        assert_raises(pkt.Unsupported, match, lambda world, sums=sums: sums(a, b, **options))
