"""The messages for wrong arguments. The conformance suite tests that every operator refuses them."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

import pkt
from pkt.kernels.shared.tile_product import Tiles


def refused(error: type[Exception], wanted: str, name: str, *tensors: Any, **options: Any) -> None:
    """Assert that every rank refuses the call with these words."""

    def main(world: Any) -> None:
        with pytest.raises(error, match=rf"^rank {world.rank}: {name}: {re.escape(wanted)}"):
            getattr(pkt, name)(*(tensors or [pkt.ones(64)]), **({"world": world} | options))

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_block() -> None:
    refused(pkt.DtypeError, "block: found float 2.0, wanted an integer", "all_reduce", block=2.0)
    refused(pkt.DtypeError, "block: found str '16', wanted an integer", "all_reduce", block="16")
    refused(pkt.DtypeError, "block: found int64 ", "all_reduce", block=numpy.int64(16))
    refused(pkt.ShapeError, "block: found 2097152, wanted a power of two up to 1048576", "all_reduce", block=1 << 21)


def test_integers() -> None:
    refused(pkt.DtypeError, "chunks: found str '2', wanted an integer", "all_reduce", mode="copy", chunks="2")
    refused(pkt.ShapeError, "chunks: found 0, wanted at least 1", "all_reduce", mode="copy", chunks=0)


def test_tiles() -> None:
    def tiles(error: type[Exception], wanted: str, value: Any) -> None:
        whole = torch.ones(16, 16)
        refused(error, wanted, "matmul_all_reduce", whole, whole, tiles=value)

    tiles(pkt.DtypeError, "tiles: found int 16, wanted a sequence of integers", 16)
    tiles(pkt.DtypeError, "tiles: found bytes b'16', wanted a sequence of integers", b"16")
    tiles(pkt.DtypeError, "tiles: found tuple (16, None, 16), wanted a sequence", (16, None, 16))
    tiles(pkt.DtypeError, "tiles[0]: found str '16', wanted an integer", ("16", 16, 16))
    tiles(pkt.DtypeError, "tiles[2]: found float 16.0, wanted an integer", [16, 16, 16.0])
    for blocks in ((8, 16, 16), (16, 48, 16), (16, 16)):
        tiles(pkt.ShapeError, f"tiles: found {blocks}, wanted three blocks, powers of two from 16", blocks)
    many = (16, 16, 16, 8, 4, 4, 256)
    wanted = "num_warps a power of two up to 16, maxnreg up to 255, everything from 1"
    tiles(pkt.ShapeError, f"tiles: found {many}, wanted {wanted}", many)
    for blocks in ((4096, 4096, 64), (16, 4096, 4096), (4096, 16, 4096)):
        found = f"tiles: found {tuple(Tiles(*blocks))}, wanted at most 1048576 elements in a block"
        tiles(pkt.ShapeError, found, blocks)


@pytest.mark.parametrize("value", ["mean", 3, numpy.array(["none", "sum"]), torch.ones(2)], ids=repr)
def test_words_of_a_call_with_a_gradient(value: Any) -> None:
    trained = torch.ones(4, 4, requires_grad=True)
    for name in ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"):
        refused(pkt.Unsupported, "found epilogue ", name, trained, trained, epilogue=value)
    if not isinstance(value, str):
        refused(pkt.Unsupported, "found op ", "reduce_scatter", trained, op=value)


@pytest.mark.parametrize("name", ["matmul_all_reduce", "matmul_reduce_scatter"])
def test_an_epilogue_of_another_product_in_a_call_with_a_gradient(name: str) -> None:
    trained = torch.ones(4, 4, requires_grad=True)
    refused(pkt.Unsupported, "found epilogue 'swiglu': wanted 'none' or ", name, trained, trained, epilogue="swiglu")


def test_an_odd_number_of_columns_in_a_call_with_a_gradient() -> None:
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 5)
    refused(pkt.ShapeError, "b: found (4, 5), wanted an even number", "all_gather_matmul", a, b, epilogue="swiglu")


def test_world() -> None:
    refused(pkt.DtypeError, "world: found int, wanted a pkt.World", "all_reduce", world=3)


def test_no_tensor() -> None:
    whole = torch.ones(16, 16)
    refused(pkt.DtypeError, "x: found int, wanted a tensor", "all_reduce", 5)
    refused(pkt.DtypeError, "b: found list, wanted a tensor", "matmul_all_reduce", whole, [1.0])
    refused(pkt.DtypeError, "out: found int, wanted a tensor", "matmul_all_reduce", whole, whole, 5)


def test_a_scalar_output() -> None:
    def main(world: Any) -> None:
        whole = torch.ones(16, 16)
        with pytest.raises(pkt.ShapeError, match=r"matmul_all_reduce: out: found \(\), wanted \(16, 16\)"):
            pkt.matmul_all_reduce(whole, whole, pkt.empty(()))

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_tensors_that_are_not_dense() -> None:
    whole = torch.ones(16, 16)
    sparse, found = whole.to_sparse(), "found a tensor with layout sparse_coo, wanted a dense one"
    refused(pkt.DtypeError, f"x: {found}: x.to_dense()", "all_gather", sparse)
    refused(pkt.DtypeError, f"out: {found}", "all_reduce", whole, sparse, mode="low_latency")
    bias = whole[0].to_sparse()
    refused(pkt.DtypeError, f"bias: {found}: bias.to_dense()", "matmul_all_reduce", whole, whole, bias=bias)


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_a_product_of_a_tensor_with_torchs_negative_bit(name: str) -> None:
    ones = torch.ones(2, 2)
    tensors = {"a": ones, "b": ones, "out": ones.clone()}
    tensors[name] = torch._neg_view(tensors[name])
    remedy = "" if name == "out" else f": {name}.resolve_neg()"
    wanted = f"{name}: found a tensor with torch's negative bit, wanted one without, as kernels do not see it{remedy}"
    refused(pkt.DtypeError, wanted, "matmul_all_reduce", tensors["a"], tensors["b"], out=tensors["out"])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    refused(pkt.DtypeError, "x: found a nested tensor, wanted a dense one: x.to_padded_tensor(0)", "all_gather", nested)
    assert nested.to_padded_tensor(0).shape == (2, 3)


def test_a_tensor_whose_storage_was_freed() -> None:
    def main(world: Any) -> None:
        x, freed = torch.ones(64), torch.ones(64)
        freed.untyped_storage().resize_(0)
        pkt.all_gather(x)
        with pytest.raises(pkt.DtypeError, match="rank 0: all_gather: x: found a tensor whose storage"):
            pkt.all_gather(freed)  # not by the plan of the call before
        pkt.all_gather(x, x.clone())
        with pytest.raises(pkt.DtypeError, match="rank 0: all_gather: out: found a tensor whose storage"):
            pkt.all_gather(x, freed)

    pkt.launch(main, ranks=1, device="cpu", heap="1MiB")


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_activation"])
def test_a_freed_operand_of_a_local_operator(name: str) -> None:
    def main(world: Any) -> None:
        x, offsets = pkt.ones(4, 8), torch.tensor([0, 4], dtype=torch.int32)
        x.free()
        others = (torch.ones(1, 8, 8),) if name == "grouped_matmul" else ()
        with pytest.raises(pkt.UseAfterFree, match=f"rank {world.rank}: {name} uses 'x' after it was freed"):
            getattr(pkt, name)(x, *others, offsets)

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")
