"""The Gluon kernel of Ulysses attention, compiled for sm_90, and the plan that launches it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.kernels.ring_attention import rules
from pkt.kernels.ring_attention.kernel import Attention
from pkt.kernels.ring_attention.planning import GLUON_TILES
from pkt.kernels.shared import gluon_fits, tile_attention
from pkt.kernels.shared.gluon_host import descriptor
from pkt.kernels.ulysses_attention import gluon
from pkt.kernels.ulysses_attention import rules as ulysses_rules
from pkt.language.inspect import Pointer, compile_only, device_world
from pkt.runtime.launch.launch import cooperative_launch

from .machine_code import of_old, resources, sass
from .test_ulysses_attention import ROWS, check, operands

B, R, H, KV, GROUP = 2, 1024, 8, 4, 2


def compiled(
    size: int, d: int, dtype: torch.dtype, repeats: int, causal: bool, packed: bool = False, meeting: bool = False
) -> Any:  # fmt: skip
    """The kernel on rank 0. packed: with documents. meeting: programs meet before each task."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    block_m, block_n = GLUON_TILES[:2]
    shape = {"H": H, "KV": KV, "D": d, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": d, "CHUNK": gluon.WHOLE}
    constants = {**shape, "WAY": "copied", "ZIGZAG": False, "WHOLE": True, "BLOCK": 64}
    right = 0 if causal else 1 << 20
    numbers = {"B": B, "S": R, "left": 1 << 20, "right": right, "length": size * R, "scale": 0.1, "num_comm_sms": 0,
               "joined": 1}  # fmt: skip
    pointers = {"out_ptr": Pointer(name), "ready_ptr": Pointer("int32")}
    pointers |= {name: Pointer("int32") for name, told in (("spans_ptr", packed), ("bar_ptr", meeting)) if told}
    p = Attention(**{
        **dict.fromkeys(Attention._fields), **pointers, **numbers, **{n: tl.constexpr(x) for n, x in constants.items()},
    })  # fmt: skip

    def rows(outer: int, heads: int, block: int) -> Any:
        return descriptor(torch.empty(outer, R, heads * d, dtype=dtype, device="meta"), (1, block, d))

    queries, keys = rows(B, size * H, block_m // 2), rows(B, size * KV // repeats, block_n)
    q_inbox, k_inbox = rows((size - 1) * B, H, block_m // 2), rows((size - 1) * B, KV, block_n)
    return compile_only(
        gluon.gluon_heads_kernel, queries, keys, keys, q_inbox, k_inbox, k_inbox, p, 8, device_world(0, size),
        GROUP=GROUP, REPEATS=repeats, STAGES=gluon.STAGES, num_warps=4, grid=(132,),
    )  # fmt: skip


@of_old
@pytest.mark.parametrize(
    ("size", "d", "dtype", "repeats", "causal", "packed", "meeting"),
    [(2, 128, torch.bfloat16, 1, False, False, True), (4, 128, torch.float16, 2, True, False, False),
     (2, 64, torch.float16, 1, True, False, False), (2, 128, torch.bfloat16, 1, True, True, False),
     (2, 128, torch.bfloat16, 1, False, False, False)],
)  # fmt: skip
def test_products_overlap_and_nothing_is_spilled_between_them(
    tmp_path: Path, size: int, d: int, dtype: torch.dtype, repeats: int, causal: bool, packed: bool, meeting: bool
) -> None:
    """As those of ring attention, whose loops these are."""
    kernel = compiled(size, d, dtype, repeats, causal, packed, meeting)
    usage, code = resources(kernel, tmp_path), sass(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
    assert usage["STACK"] <= (176 if packed else 96)
    steps_of_scores, steps_of_results = d // 16, GLUON_TILES.block_n // 16
    events = re.findall(r"HGMMA\.64x(?:64|128)x16|WARPGROUP\.DEPBAR|\bSTL\b", code)
    consumers = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
    assert len(consumers) == 2 * 2 * (steps_of_scores + steps_of_results)
    half = len(consumers) // 2
    before = steps_of_scores if packed else 0  # what documents spill is stored before the loop
    for first, last in ((consumers[before], consumers[half - 1]), (consumers[half + before], consumers[-1])):
        assert "STL" not in events[first : last + 1]
    assert events.count("WARPGROUP.DEPBAR") == 2 * 4
    assert len(re.findall(r"\bSTG\.E\.128", code)) == 2 * d // 16  # results leave 16 bytes a thread


# --------------------------------------------------------------------------------------------- the plan of the form
@triton.jit
def _rows(own_ptr, inbox_ptr, distance, b, HEADS, p):
    """The rows of the rank at a distance, of HEADS heads."""
    shard = p.S * HEADS * p.D
    if distance == 0:
        return own_ptr + b * shard
    return inbox_ptr + ((distance - 1) * p.B + b) * shard


@triton.jit
def plain_heads_kernel(
    q_ptr, k_ptr, v_ptr, q_inbox_ptr, k_inbox_ptr, v_inbox_ptr, p, world, GROUP: tl.constexpr
):  # fmt: skip
    """In the place of the Gluon kernel in the simulator. q, k, v: of this rank's own heads alone."""
    number = tl.load(p.ready_ptr + p.B * (p.H // GROUP) * (world.size - 1))
    rank = tl.cast(world.rank, tl.int32)
    tiles = tl.cdiv(p.S, p.BLOCK_M)
    m, d = tl.arange(0, p.BLOCK_M), tl.arange(0, p.BLOCK_D)
    tasks, programs = p.B * p.H * world.size * tiles, tl.num_programs(0)
    for task in range(tl.program_id(0), tasks, programs):
        if p.bar_ptr is not None:
            if (task // programs + 1) * programs <= tasks:
                pl.grid_barrier(p.bar_ptr, world)
        row, distance, head = task % tiles * p.BLOCK_M, task // tiles % world.size, task // tiles // world.size
        b, h, source = head // p.H, head % p.H, (rank - distance + world.size) % world.size
        group = (b // p.joined * p.joined * p.H + h) // GROUP
        for i in range(world.size - 1):
            pl.wait(p.ready_ptr + group * (world.size - 1) + i, number, world)
        position, rows = source * p.S + row, tl.minimum(p.S - row, p.BLOCK_M)
        low, high, least, most, all_from, all_to = tile_attention.sight(
            position, world.size * p.S, rows, position, p.left, p.right, p, p.BLOCK_M
        )
        inside = (m < rows)[:, None] & (d < p.D)[None, :]
        at = (row + m)[:, None]
        q = tl.load(_rows(q_ptr, q_inbox_ptr, distance, b, p.H, p) + (at * p.H + h) * p.D + d[None, :], mask=inside)
        top, total, acc = tile_attention.nothing(p)
        column = h // (p.H // p.KV) * p.D
        for i in range(world.size):
            start = (rank - i + world.size) % world.size * p.S
            begin, end, full, unmasked, masked = tile_attention.blocks(
                start, p.S, least, most, all_from, all_to, p.BLOCK_N
            )  # fmt: skip
            keys = _rows(k_ptr, k_inbox_ptr, i, b, p.KV, p) + column
            values = _rows(v_ptr, v_inbox_ptr, i, b, p.KV, p) + column
            top, total, acc = tile_attention.attend(
                top, total, acc, q, keys, values, begin, full, unmasked, masked, end, start, low, high, p
            )
        out, _ = tile_attention.finished(top, total, acc)
        to = pl.peer(p.out_ptr, source, world) + ((b * p.S + at) * world.size * p.H + rank * p.H + h) * p.D
        tl.store(to + d[None, :], out.to(p.out_ptr.dtype.element_ty), mask=inside)


def with_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The form "gluon" in the simulator, with a plain kernel of the same tiles. Returns, of each launch so far, whether
    its programs meet."""
    started: list[bool] = []

    def prepare(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        start = cooperative_launch(world, plain_heads_kernel, grid)

        def of_heads(x: torch.Tensor, p: Attention, held: int, repeats: int) -> torch.Tensor:
            sent = [(world.rank * held + i) // repeats for i in range(held)]
            return x.view(p.B, p.S, -1, p.D.value)[:, :, sent].contiguous()

        def launch(q: Any, k: Any, v: Any, q_inbox: Any, k_inbox: Any, v_inbox: Any, p: Attention, *rest: Any) -> None:
            started.append(p.bar_ptr is not None)
            held = (p.H.value, 1), (p.KV.value, options["REPEATS"]), (p.KV.value, options["REPEATS"])
            own = [of_heads(x.base, p, *one) for x, one in zip((q, k, v), held)]
            start(*own, q_inbox.base, k_inbox.base, v_inbox.base, p, world.device, options["GROUP"])

        return launch

    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")
    monkeypatch.setattr(gluon, "cooperative_launch", prepare)
    return started


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "group", "symmetric", "told"),
    [
        (2, 8, 2, 1, False, {"causal": True}),  # four groups share a head of keys, which came with the first
        (2, 8, 4, 4, True, {"window": (5, 2)}),  # a group has two heads of keys
        (3, 6, 2, 2, False, {}),  # one rank needs two heads of keys, the others one
        (4, 8, 2, None, True, {"causal": True}),  # fewer heads of keys than ranks
    ],
)
@pytest.mark.parametrize(("long", "joined"), [(True, 1), (False, 2)], ids=["together", "joined"])
def test_the_plan_of_the_form(
    size: int, heads: int, kv_heads: int, group: int | None, symmetric: bool, told: dict[str, Any], long: bool,
    joined: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Copies, counters, the kernel's arguments and where results go, launched twice. long: programs begin their tasks
    together. joined: of three batches so many travel together."""
    monkeypatch.setattr(gluon, "is_long", lambda call: long)
    monkeypatch.setattr(ulysses_rules, "JOIN", joined * ROWS * 2 * 64 * 2)
    started = with_plain_kernel(monkeypatch)
    everybody = operands(8, heads, kv_heads, size, 3 if size == 3 else 1, torch.bfloat16, 64)
    check(everybody, symmetric, 2, mode="gluon", heads=group, **told)
    assert started == 2 * size * [long]


def test_the_plan_with_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plain_kernel(monkeypatch)
    packed = [[x[0] for x in xs] for xs in operands(9, 4, 2, dtype=torch.float16, d=64)]
    ends = torch.tensor([0, 3, 3, 20, 31], dtype=torch.int32)
    check(packed, launches=2, mode="gluon", cu_seqlens=ends, causal=True)
