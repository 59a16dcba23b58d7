"""Arguments of the wrong kind, or beyond what Triton takes: pkt's error names rank, call and argument, and nothing was
launched or allocated."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

import pkt
from pkt.kernels.shared.tile_product import Tiles

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def arguments(name: str) -> list[torch.Tensor]:
    if name in FUSED:
        return [torch.ones(32, 16), torch.ones(16, 16)]
    symmetric = [pkt.ones(64)]
    return symmetric if name != "all_to_all" else [*symmetric, pkt.empty(64)]


def refused(error: type[Exception], wanted: str, name: str, *tensors: Any, **options: Any) -> None:
    """By every rank, in these words."""

    def main(world: Any) -> None:
        given = list(tensors) or arguments(name)
        room = world.heap.ledger.free_bytes
        with pytest.raises(error, match=rf"^rank {world.rank}: {name}: {re.escape(wanted)}"):
            getattr(pkt, name)(*given, **({"world": world} | options))
        assert world.heap.ledger.free_bytes == room

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_block(name: str) -> None:
    refused(pkt.DtypeError, "block: found float 2.0, wanted an integer", name, block=2.0)
    refused(pkt.DtypeError, "block: found str '16', wanted an integer", name, block="16")
    refused(pkt.DtypeError, "block: found int64 ", name, block=numpy.int64(16))
    refused(pkt.ShapeError, "block: found 2097152, wanted a power of two up to 1048576", name, block=1 << 21)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_chunks(name: str) -> None:
    refused(pkt.DtypeError, "chunks: found str '2', wanted an integer", name, mode="copy", chunks="2")
    refused(pkt.DtypeError, "chunks: found float 1.5, wanted an integer", name, mode="copy", chunks=1.5)


@pytest.mark.parametrize("name", FUSED)
def test_tiles(name: str) -> None:
    refused(pkt.DtypeError, "tiles: found int 16, wanted a sequence of integers", name, tiles=16)
    refused(pkt.DtypeError, "tiles: found tuple (16, None, 16), wanted a sequence", name, tiles=(16, None, 16))
    refused(pkt.DtypeError, "tiles[0]: found str '16', wanted an integer", name, tiles=("16", 16, 16))
    refused(pkt.DtypeError, "tiles[2]: found float 16.0, wanted an integer", name, tiles=[16, 16, 16.0])
    for blocks in ((4096, 4096, 64), (16, 4096, 4096), (4096, 16, 4096)):
        found = f"tiles: found {tuple(Tiles(*blocks))}, wanted at most 1048576 elements in a block"
        refused(pkt.ShapeError, found, name, tiles=blocks)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("all_gather_matmul", {"mode": "copy", "push_rows": 1.5}),
        ("all_gather_matmul", {"mode": "push", "num_comm_sms": 1.5}),
        ("all_gather_matmul", {"mode": "push", "chunk": "16"}),
        ("all_gather_matmul", {"mode": "gluon", "cut_last": 2.0}),
        ("matmul_reduce_scatter", {"mode": "gluon", "lag": 1.5}),
        ("matmul_reduce_scatter", {"mode": "gluon", "copies": "1"}),
        ("matmul_all_reduce", {"num_comm_sms": 1.5}),
        ("matmul_all_reduce", {"mode": "gluon", "lag": "1"}),
    ],
)
def test_settings_of_the_fused_forms(name: str, options: dict[str, Any]) -> None:
    setting, value = list(options.items())[-1]
    found = f"{setting}: found {type(value).__name__} {value!r}, wanted an integer"
    refused(pkt.DtypeError, found, name, **options)


@pytest.mark.parametrize("name", [*COLLECTIVES, *FUSED])
def test_world(name: str) -> None:
    refused(pkt.DtypeError, "world: found int, wanted a pkt.World", name, world=3)


def test_no_tensor() -> None:
    whole = torch.ones(16, 16)
    refused(pkt.DtypeError, "x: found int, wanted a tensor", "all_reduce", 5)
    refused(pkt.DtypeError, "b: found list, wanted a tensor", "matmul_all_reduce", whole, [1.0])
    for name in FUSED:
        refused(pkt.DtypeError, "out: found int, wanted a tensor", name, *arguments(name), 5)

    def main(world: Any) -> None:
        for name in ("all_reduce", "reduce_scatter"):
            with pytest.raises(pkt.DtypeError, match=f"{name}: out: found int, wanted a tensor"):
                getattr(pkt, name)(pkt.ones(64), 5)
        with pytest.raises(pkt.ShapeError, match=r"matmul_all_reduce: out: found \(\), wanted \(16, 16\)"):
            pkt.matmul_all_reduce(whole, whole, pkt.empty(()))

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_tensors_that_are_not_dense() -> None:
    whole = torch.ones(16, 16)
    sparse, found = whole.to_sparse(), "found a tensor with layout sparse_coo, wanted a dense one"
    refused(pkt.DtypeError, f"x: {found}: x.to_dense()", "all_gather", sparse)
    refused(pkt.DtypeError, f"x: {found}: x.to_dense()", "all_reduce", sparse, mode="low_latency")
    refused(pkt.DtypeError, f"out: {found}", "all_reduce", whole, sparse, mode="low_latency")
    refused(pkt.DtypeError, f"x: {found}", "broadcast", sparse)
    for name in FUSED:
        refused(pkt.DtypeError, f"a: {found}: a.to_dense()", name, sparse, whole)
        refused(pkt.DtypeError, f"b: {found}: b.to_dense()", name, whole, sparse)
        refused(pkt.DtypeError, f"out: {found}", name, whole, whole, sparse)
        refused(pkt.DtypeError, f"bias: {found}: bias.to_dense()", name, whole, whole, bias=whole[0].to_sparse())
