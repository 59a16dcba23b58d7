"""The Gluon kernel of all_to_all_matmul, compiled for sm_90, and the plan that launches it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.kernels import all_to_all_matmul as operator
from pkt.kernels.all_to_all_matmul import forms, gluon
from pkt.kernels.declaration import Call
from pkt.kernels.shared import gluon_fits
from pkt.kernels.shared.gluon_host import descriptor, half_block, kernel_constants, weights_descriptor
from pkt.kernels.shared.gluon_warps import Sizes
from pkt.language.inspect import Pointer, compile_only, count_markers, device_world
from pkt.runtime.launch.launch import cooperative_launch

from .gluon_compiling import Compiled, assert_fits
from .helpers import on_ranks, random

B, S, K, N = 2, 1000, 512, 1032


def compiled(size: int, dtype: torch.dtype, transposed: bool, bias: bool, tiles: Any) -> Any:
    """The kernel on rank 0."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    weight = empty(N, size * K).t() if transposed else empty(size * K, N)
    block = tiles.block_m, tiles.block_k
    return compile_only(
        gluon.gluon_heads_product_kernel, descriptor(empty(B * size * S, K), block),
        descriptor(empty((size - 1) * B * S, K), block), weights_descriptor(weight, tiles),
        descriptor(empty(B, S, N), (1, *half_block(tiles))), Pointer("int32"), Pointer(name) if bias else None,
        Sizes(S, N, size * K), B, 4, device_world(0, size), kernel_constants(tiles, weight, "none"), num_warps=4,
        grid=(132,),
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [gluon_fits.TILES, gluon_fits.NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("size", "dtype", "transposed", "bias"),
    [(2, torch.bfloat16, False, False), (8, torch.float16, True, True), (3, torch.bfloat16, True, False)],
)
def test_it_fits(
    tmp_path: Path, size: int, dtype: torch.dtype, transposed: bool, bias: bool, tiles: Any
) -> None:  # fmt: skip
    """In the memory and the registers of an SM; one wait, in the loop over peers, and no signal."""
    kernel = compiled(size, dtype, transposed, bias, tiles)
    assert_fits(Compiled(kernel, (132,), {}, ()), tmp_path)
    assert count_markers(kernel.asm["ttgir"]) == {"wait": 1, "signal": 0}


# --------------------------------------------------------------------------------------------- the plan of the form
@triton.jit
def plain_kernel(
    x_ptr, inbox_ptr, weight_ptr, out_ptr, ready_ptr, bias_ptr, M, N, K, sequences, step, world,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """In the place of the Gluon kernel in the simulator. PART: K / size, a power of two."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    copies = tl.cdiv(num_m, step)
    number = tl.load(ready_ptr + (world.size - 1) * sequences * copies)
    rank = tl.cast(world.rank, tl.int32)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, PART)
    for task in range(tl.program_id(0), sequences * num_m * num_n, tl.num_programs(0)):
        i, j, b = task // num_n % num_m, task % num_n, task // num_n // num_m
        row, col = i * BLOCK_M + m, j * BLOCK_N + n
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in range(world.size):
            source = (rank - d + world.size) % world.size
            a_ptr = x_ptr + (b * world.size + rank) * M * PART
            if d > 0:
                pl.wait(ready_ptr + ((d - 1) * sequences + b) * copies + i // step, number, world)
                a_ptr = inbox_ptr + ((d - 1) * sequences + b) * M * PART
            a = tl.load(a_ptr + row[:, None] * PART + k[None, :], mask=(row < M)[:, None], other=0.0)
            at = source * PART + k
            if TRANSPOSED:
                w_ptr = weight_ptr + at[:, None] + col[None, :] * K
            else:
                w_ptr = weight_ptr + at[:, None] * N + col[None, :]
            acc = tl.dot(a, tl.load(w_ptr, mask=(col < N)[None, :], other=0.0), acc)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        inside = (row < M)[:, None] & (col < N)[None, :]
        tl.store(out_ptr + b * M * N + row[:, None] * N + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


def with_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The form "gluon" in the simulator, with a plain kernel of the same tiles. Returns the ranks that have launched it
    so far."""
    started: list[int] = []

    def prepare(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        start = cooperative_launch(world, plain_kernel, grid)

        def launch(x: Any, inbox: Any, weight: Any, out: Any, ready: Any, bias: Any, sizes: Any, *rest: Any) -> None:
            started.append(world.rank)
            sequences, step, device, constants = rest
            transposed = constants.TRANSPOSED.value
            blocks = *half_of(out), sizes.K // world.size
            start(
                x.base,
                inbox.base,
                weight.base,
                out.base,
                ready,
                bias,
                *sizes,
                sequences,
                step,
                device,
                transposed,
                *blocks,
            )

        return launch

    def half_of(out: Any) -> tuple[int, int]:
        return 2 * out.block_shape[1], out.block_shape[2]

    monkeypatch.setattr(gluon_fits, "missing_anywhere", lambda world: "")
    monkeypatch.setattr(gluon, "cooperative_launch", prepare)
    return started


@pytest.mark.parametrize(
    ("size", "b", "s", "transposed", "bias", "offset"),
    [(2, 1, 300, False, True, 0), (3, 2, 70, True, False, 0), (2, 2, 140, True, True, 1), (4, 1, 9, False, False, 3)],
)
def test_the_plan_of_the_form(
    size: int, b: int, s: int, transposed: bool, bias: bool, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, counters and the kernel's arguments, launched twice, also with copies of one row block. offset: elements
    before x, the weight and the result, which TMA then cannot address."""
    monkeypatch.setattr(gluon, "COPY_ROWS", 128)
    monkeypatch.setattr(gluon, "COPIES", 2)
    started = with_plain_kernel(monkeypatch)
    d, n = 32, 24
    x = [random((b, size * s, 2, d), torch.bfloat16, rank) for rank in range(size)]
    weight = random((2 * size, d, n), torch.bfloat16, 9)
    added = random((n,), torch.bfloat16, 8) if bias else None

    def shifted(x: torch.Tensor) -> torch.Tensor:
        room = torch.empty(x.numel() + offset, dtype=x.dtype)
        return room[offset:].view(x.shape).copy_(x)

    def run(world: Any) -> None:
        w = (
            shifted(weight.flatten(0, 1).t().contiguous()).t().unflatten(0, (2 * size, d))
            if transposed
            else shifted(weight)
        )
        right = operator.reference(world.rank, x, [weight] * size, [added] * size if bias else None)
        for _ in range(2):
            out = shifted(torch.zeros(b, s, n, dtype=torch.bfloat16))
            mine = shifted(x[world.rank])
            found = pkt.all_to_all_matmul(mine, w, out, bias=added, mode="gluon")
            assert found is out
            mine.fill_(torch.nan)  # the operands may be overwritten at once
            assert ((found.double() - right).abs() <= 2**-8 * right.abs() + 2**-12).all()

    on_ranks(size, run)
    assert len(started) == 2 * size


def test_copies_of_a_sequences_rows() -> None:
    """Of 512 rows at least, and at most eight."""
    found = {s: gluon.Rows.of(s, 128) for s in (1, 512, 513, 4096, 4097, 16384)}
    assert found == {1: (4, 1), 512: (4, 1), 513: (4, 2), 4096: (4, 8), 4097: (5, 7), 16384: (16, 8)}


def test_the_form_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows of a rank and the share of 132 SMs that have tiles, where the kernel can run the call."""
    monkeypatch.setattr(gluon_fits, "missing_anywhere", lambda world: "")

    def chosen(b: int, s: int, h: int = 32, n: int = 8192, dtype: torch.dtype = torch.bfloat16) -> str:
        x = torch.empty(b, 2 * s, h, 24, dtype=dtype, device="meta")
        call = Call("", SimpleNamespace(size=2, num_sms=132), {"x": x}, {}, {}, None)  # type: ignore[arg-type]
        call.sizes = {"b": b, "s": s, "h": h, "d": 24, "n": n}
        return forms._default(call)

    assert [chosen(1, 511), chosen(1, 512), chosen(2, 256), chosen(0, 512)] == ["unfused", "gluon", "gluon", "unfused"]
    assert [chosen(1, 640), chosen(1, 1024), chosen(1, 1152)] == ["unfused", "gluon", "unfused"], "rounds of 132 tiles"
    assert [chosen(1, 512, n=4096), chosen(1, 1024, n=4096), chosen(1, 512, n=0)] == ["unfused", "gluon", "unfused"]
    assert [chosen(1, 512, h=31), chosen(1, 512, h=0)] == ["unfused", "unfused"], "744 columns of a rank, and none"
    assert chosen(1, 512, dtype=torch.float32) == "unfused"
