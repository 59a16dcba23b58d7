"""The Gluon kernel of ring attention, compiled for sm_90."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

from pkt.kernels.declaration import Call
from pkt.kernels.ring_attention import gluon as ring
from pkt.kernels.ring_attention.kernel import Attention
from pkt.kernels.ring_attention.planning import GLUON_TILES, planned
from pkt.kernels.shared import gluon_fits
from pkt.kernels.shared.gluon_host import descriptor
from pkt.language.inspect import Pointer, compile_only, device_world

from .machine_code import of_old, resources, sass

B, S, H, KV = 2, 1024, 16, 8


def compiled(size: int, d: int, dtype: torch.dtype, zigzag: bool, packed: bool = False) -> Any:
    """The kernel for causal attention on rank 0. packed: with documents."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    block_m, block_n = GLUON_TILES[:2]
    shape = {"H": H, "KV": KV, "D": d, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": d, "CHUNK": 512, "BLOCK": 64}
    constants = {**shape, "WAY": "copied", "ZIGZAG": zigzag, "WHOLE": True}
    numbers = {"B": B, "S": S, "left": 1 << 20, "right": 0, "length": size * S, "scale": 0.1, "num_comm_sms": 0,
               "joined": 2}  # fmt: skip
    pointers = {"out_ptr": Pointer(name), "lse_ptr": Pointer("fp32"), "ready_ptr": Pointer("int32")}
    pointers |= {"spans_ptr": Pointer("int32")} if packed else {}
    p = Attention(**{
        **dict.fromkeys(Attention._fields), **pointers, **numbers, **{n: tl.constexpr(x) for n, x in constants.items()},
    })  # fmt: skip

    def rows(outer: int, heads: int, block: int) -> Any:
        return descriptor(torch.empty(outer, S, heads * d, dtype=dtype), (1, block, d))

    keys, theirs = rows(B, KV, block_n), rows(max(size - 1, 1) * B, KV, block_n)
    return compile_only(
        ring.gluon_attention_kernel, rows(B, H, block_m // 2), keys, keys, theirs, theirs, p, 8, device_world(0, size),
        STAGES=ring.STAGES, num_warps=4, grid=(132,),
    )  # fmt: skip


@of_old
@pytest.mark.parametrize(
    ("size", "d", "dtype", "zigzag"),
    [(1, 128, torch.bfloat16, False), (2, 128, torch.bfloat16, True), (4, 128, torch.float16, False),
     (2, 64, torch.float16, True)],
)  # fmt: skip
def test_products_overlap_and_nothing_is_spilled_between_them(
    tmp_path: Path, size: int, d: int, dtype: torch.dtype, zigzag: bool
) -> None:
    """Each consumer begins the scores of the first block, those of a later one with the product of the block before it,
    and the last product. It waits for the first and the last, and for each of the two. Some values of the setup go to
    the stack before the first product."""
    kernel = compiled(size, d, dtype, zigzag)
    usage, code = resources(kernel, tmp_path), sass(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
    assert usage["STACK"] <= 96
    steps_of_scores, steps_of_results = d // 16, GLUON_TILES.block_n // 16
    events = re.findall(r"HGMMA\.64x(?:64|128)x16|WARPGROUP\.DEPBAR|\bSTL\b", code)
    consumers = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
    assert len(consumers) == 2 * 2 * (steps_of_scores + steps_of_results)
    half = len(consumers) // 2
    for first, last in ((consumers[0], consumers[half - 1]), (consumers[half], consumers[-1])):
        assert events[first : last + 1].count("WARPGROUP.DEPBAR") == 3
        assert "STL" not in events[first : last + 1]
    assert events.count("WARPGROUP.DEPBAR") == 2 * 4


@of_old
@pytest.mark.parametrize(("size", "d", "zigzag"), [(2, 128, True), (2, 64, True)])
def test_documents_spill_outside_the_loop(tmp_path: Path, size: int, d: int, zigzag: bool) -> None:
    """What a task of documents sees is loaded, so it takes registers, where it else is computed again. They go to the
    stack before the loop over blocks, whose products come behind the first scores."""
    kernel = compiled(size, d, torch.bfloat16, zigzag, packed=True)
    assert resources(kernel, tmp_path)["STACK"] <= 136
    events = re.findall(r"HGMMA\.64x(?:64|128)x16|\bSTL\b", sass(kernel, tmp_path))
    products = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
    half = len(products) // 2
    for first, last in ((products[d // 16], products[half - 1]), (products[half + d // 16], products[-1])):
        assert "STL" not in events[first : last + 1]


def test_operands_that_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA is given copies of those that do not begin at a multiple of 16 bytes, and no tensor is kept."""
    launched: list[list[torch.Tensor]] = []
    descriptors: list[Any] = []

    def start(*args: Any) -> None:
        descriptors[:] = args[:3]
        launched.append([one.base for one in descriptors])

    monkeypatch.setattr(ring, "cooperative_launch", lambda *_, **__: start)
    monkeypatch.setattr(ring, "num_programs", lambda world, tasks: tasks)
    heads = {"q": H, "k": KV, "v": KV}
    flat = {name: torch.randn(B * S * n * 64 + 1).bfloat16() for name, n in heads.items()}
    given = {name: flat[name][name != "k" :][: B * S * n * 64].view(B, S, n, 64) for name, n in heads.items()}
    arguments = {"causal": True, "layout": "contiguous", "scale": None, "window": None, "length": None}
    world = SimpleNamespace(size=1, rank=0, device=None)
    call = Call("", world, {**given, "cu_seqlens": None}, arguments, {"chunk": 512}, None)  # type: ignore[arg-type]
    call.sizes = {"b": B, "s": S, "h": H, "g": KV, "d": 64}
    launch = ring.planned_attention(call, planned(call, GLUON_TILES))
    launch(*given.values(), torch.empty(0), None, torch.empty(0))
    for (name, x), found in zip(given.items(), launched[0], strict=True):
        assert torch.equal(found, x)
        assert found.data_ptr() % 16 == 0
        assert (found is x) == (name == "k")
    assert all(one.base is None for one in descriptors)
