"""The Gluon kernel of flash decode, compiled for sm_90, and the plan that launches it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.flash_decode import attention, flash_decode, gluon, planning, reference, rules
from pkt.kernels.flash_decode.attention import Decode
from pkt.kernels.flash_decode.nodes import launch_merging
from pkt.kernels.flash_decode.reference import bound
from pkt.kernels.shared import gluon_fits
from pkt.kernels.shared.gluon_host import descriptor
from pkt.language.inspect import Pointer, compile_only
from pkt.runtime.launch.launch import cooperative_launch

from .helpers import on_ranks
from .launches import all_launched, compile_checked
from .machine_code import of_old, resources, sass
from .test_flash_decode import operands

D, E, B, PAGES = 576, 512, 3, 40


def compiled(
    dtype: torch.dtype, heads: int, tokens: int, page: int, capped: bool, scaled: bool, cache: str | None = None
) -> Any:
    """The kernel for B sequences. cache: its dtype, if it is of fp8."""
    blocks = triton.cdiv(tokens * heads, 64)
    constants = {"BATCH": 4, "TOKENS": 2, "SQ": tokens, "HEADS": heads, "D": D, "E": E, "PAGE": page, "CAPPED": capped,
                 "BLOCKS": blocks}  # fmt: skip
    numbers = {"B": B, "pages_of": PAGES, "most": PAGES * page, "scale": 0.1, "cap": 1.5}
    pointers = {"lens_ptr": Pointer("int32"), "table_ptr": Pointer("int32")}
    pointers |= {"k_scale_ptr": Pointer("fp32")} if scaled else {}
    p = Decode(**{
        **dict.fromkeys(Decode._fields), **pointers, **numbers, **{n: tl.constexpr(x) for n, x in constants.items()},
    })  # fmt: skip
    queries = descriptor(torch.empty(1, B * tokens * heads, D, dtype=dtype, device="meta"), (1, 64, 64))
    keys = None
    if cache:
        p = p._replace(k_ptr=Pointer(cache), k_page=page * D, k_token=D)
    else:
        keys = descriptor(torch.empty(PAGES, page, D, dtype=dtype, device="meta"), (1, min(page, 64), 64))
    return compile_only(gluon.gluon_decode_kernel, queries, keys, Pointer("fp32"), p, num_warps=4, grid=(132,))


@of_old
@pytest.mark.parametrize(
    ("dtype", "heads", "tokens", "page", "capped", "scaled"),
    [(torch.bfloat16, 128, 1, 64, False, False), (torch.float16, 16, 2, 16, True, True)],
)
def test_products_overlap_and_nothing_is_spilled_between_them(
    tmp_path: Path, dtype: torch.dtype, heads: int, tokens: int, page: int, capped: bool, scaled: bool
) -> None:
    """The first consumer begins the scores of a tile with the product of the tile before it. The second one has one
    product in its loop."""
    kernel = compiled(dtype, heads, tokens, page, capped, scaled)
    usage, code = resources(kernel, tmp_path), sass(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
    assert usage["STACK"] <= 8  # of the loader
    events = re.findall(r"HGMMA\.64x\d+|WARPGROUP\.DEPBAR|\bSTL\b", code)
    values, wait, scores = ["HGMMA.64x256"] * 4, ["WARPGROUP.DEPBAR"], ["HGMMA.64x64"] * 36
    assert [event for event in events if event != "STL"] == [
        *values, *wait, *scores, *wait, *values, *scores, *wait, *wait, *values, *wait
    ]  # fmt: skip
    consumers = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
    for first, last in ((consumers[0], consumers[3]), (consumers[4], consumers[-1])):
        assert "STL" not in events[first : last + 1]


@of_old
@pytest.mark.parametrize(
    ("dtype", "cache", "page", "capped", "stack"),
    [(torch.bfloat16, "fp8e4nv", 64, False, 16), (torch.float16, "fp8e5", 24, True, 32)],
)
def test_a_cache_in_fp8_is_loaded_at_once(
    tmp_path: Path, dtype: torch.dtype, cache: str, page: int, capped: bool, stack: int
) -> None:
    """A thread of the loader has all that it loads of a tile on its way, 16 bytes at a time, before it converts. To
    divide by pages of 24 keys takes registers, so it spills what is the same for all tiles."""
    kernel = compiled(dtype, 128, 1, page, capped, True, cache)
    usage, code = resources(kernel, tmp_path), sass(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
    assert usage["STACK"] <= stack
    assert "F2F.BF16.F16" not in code  # an eighth of the throughput
    events = re.findall(r"LDG\.E\.128|F2FP\.F16\.E\dM\d\.UNPACK|\bST[LS]\.128|\bSTL\b|HGMMA\.64x\d+", code)
    stores = events.index("STS.128")
    assert events[:stores].count("LDG.E.128") == events.count("LDG.E.128") == 64 * D // (128 * 16)
    assert events.count("STS.128") >= 2 * 64 * D // (128 * 16)
    products = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
    assert len(products) == 3 * 4 + 2 * 36
    assert "STL" not in events[products[4] : products[-1] + 1]


# --------------------------------------------------------------------------------------------- the plan of the form
@triton.jit
def plain_decode_kernel(parts_ptr, p):
    """In the place of the Gluon kernel in the simulator."""
    tiles = attention.tiles_of_all(attention.lens_of_all(p), p)
    share = attention.share_of(tiles, tl.num_programs(0), p)
    boxes = attention.boxes(p.PAGE, p)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, tl.sum(tiles, 0) * p.UNITS)
    lses_ptr = parts_ptr + (tl.num_programs(0) + p.B * p.UNITS) * p.ROWS * p.E
    if begin < end:
        for unit in range(attention.unit_at(begin, tiles, p), attention.unit_at(end - 1, tiles, p) + 1):
            first, count = attention.tiles_of(unit, tiles, p)
            part, lse = attention.attend(
                unit, tl.maximum(begin - first, 0), tl.minimum(end - first, count), boxes, p
            )  # fmt: skip
            i = tl.arange(0, p.ROWS)
            _, _, _, _, exists = attention.place_of(unit, i, p)
            row = (tl.program_id(0) + unit) * p.ROWS + i
            tl.store(parts_ptr + row[:, None] * p.E + tl.arange(0, p.E)[None, :], part, mask=exists[:, None])
            tl.store(lses_ptr + row, lse, mask=exists)


def with_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The form "gluon" in the simulator, with a plain kernel. Returns, of each launch so far, the blocks that TMA would
    load, and where from."""
    started: list[tuple[Any, ...]] = []

    def prepare(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        if kernel is not gluon.gluon_decode_kernel:
            return cooperative_launch(world, kernel, grid, **options)
        start = cooperative_launch(world, plain_decode_kernel, grid)

        def launch(queries: Any, keys: Any, parts: Any, p: Decode) -> None:
            assert torch.equal(queries.base.flatten(), p.q_ptr.flatten())
            if keys is None:
                assert p.k_ptr.dtype == torch.float8_e4m3fn
                started.append((queries.block_shape,))
            else:
                assert keys.base.data_ptr() == p.k_ptr.data_ptr() or len(p.k_ptr) == 0
                started.append((queries.block_shape, keys.block_shape, keys.shape, keys.strides))
            start(parts, p)

        return launch

    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")
    monkeypatch.setattr(gluon, "cooperative_launch", prepare)
    return started


def tensors(rank: int, size: int, heads: int, page: int, lens: list[list[int]], dtype: torch.dtype) -> dict[str, Any]:
    """Those of `operands`, of all ranks; rank r has r keys fewer."""
    fewer = [[[max(n - r, 0) for n in of] for of in lens] for r in range(size)]
    every = operands(3, fewer, heads, 1, D, None, 1.0, pages=4, page=page)
    every |= {name: [x.to(dtype) for x in every[name]] for name in ("q", "k_cache")}
    every["sinks"] = [torch.linspace(-1, 1, heads)] * size
    return every


@pytest.mark.parametrize("few", [1 << 19, 0], ids=["in words", "gathered"])
@pytest.mark.parametrize(
    ("size", "heads", "page", "lens", "dtype"),
    [
        (1, 80, 64, [[200], [0], [70]], torch.bfloat16),  # two units a sequence, of which the second has 16 rows
        (2, 16, 128, [[60, 61], [500, 512]], torch.float16),
        (3, 5, 64, [[256]], torch.bfloat16),
    ],
)
def test_the_plan_of_the_form(
    size: int, heads: int, page: int, lens: list[list[int]], dtype: torch.dtype, few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The kernel's arguments, how its parts are merged and what comes behind, launched twice. Cut into many programs
    and few."""
    monkeypatch.setattr(rules, "FEW", few)
    started = with_plain_kernel(monkeypatch)

    def run(world: Any) -> None:
        every = tensors(world.rank, size, heads, page, lens, dtype)
        mine = {name: x[world.rank] if x else None for name, x in every.items()}
        for _ in range(2):
            found = flash_decode(**mine, v_dim=E, mode="gluon")
        exact = reference(world.rank, **every, v_dim=E)
        for result, right, limit in zip(found, exact, bound(world.rank, dtype, 1, **every, v_dim=E), strict=True):
            assert ((result == right) | ((result.double() - right).abs() <= limit)).all()

    for sms in (2, 5):
        on_ranks(size, run, sms=sms)
    for queries, keys, shape, strides in started:
        assert (queries, keys, shape, strides) == ([1, 64, 64], [1, 64, 64], [4, page, D], [page * D, D, 1])
    assert len(started) == 2 * 2 * size


@pytest.mark.parametrize("few", [1 << 19, 0], ids=["in words", "gathered"])
def test_the_plan_with_a_cache_in_fp8(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages of any size, on a rank of none."""
    monkeypatch.setattr(rules, "FEW", few)
    started = with_plain_kernel(monkeypatch)

    def run(world: Any) -> None:
        every = tensors(world.rank, 3, 16, 24, [[60], [96]], torch.bfloat16)
        every["k_cache"] = [x.to(torch.float8_e4m3fn) for x in every["k_cache"]]
        every["k_scale"] = [torch.tensor([0.5 + rank]) for rank in range(3)]
        every["k_cache"][2], every["seq_lens"][2] = every["k_cache"][2][:0], torch.zeros(2, 1, dtype=torch.int32)
        mine = {name: x[world.rank] if x else None for name, x in every.items()}
        found = flash_decode(**mine, v_dim=E, mode="gluon")
        exact = reference(world.rank, **every, v_dim=E)
        for result, right, limit in zip(
            found, exact, bound(world.rank, torch.bfloat16, 1, **every, v_dim=E), strict=True
        ):
            assert ((result == right) | ((result.double() - right).abs() <= limit)).all()

    on_ranks(3, run, sms=2)
    assert started == 3 * [([1, 64, 64],)]


@pytest.mark.parametrize(("size", "taken"), [(2, "gathered"), (3, "shared")])
def test_more_than_two_ranks_share_rows_out(size: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gathering", lambda *_: lambda argument: "gathered")
    monkeypatch.setattr(planning, "launch_merging", lambda *_: lambda p: "shared")
    call = SimpleNamespace(world=SimpleNamespace(size=size), shape=(2, 1, 4, 8))
    assert planning.exchanging(call, None)(lambda memory: None) == taken  # type: ignore[arg-type]


def test_shares_of_rows_are_right_in_every_schedule() -> None:
    """The kernel that merges many rows of more than two ranks, see `planning.exchanging`."""
    rows, columns = 5, 16

    @functools.cache  # all schedules have the same
    def results(launch: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """What each rank has, and the right rows with their lse. The last rank has no key of the first row."""
        make = torch.Generator().manual_seed(launch)
        parts = torch.randn(size, rows, columns + 1, generator=make)
        parts[-1, 0, -1] = -torch.inf
        weights = parts[..., -1:].double().softmax(0)
        return list(parts), (weights * parts[..., :-1]).sum(0), parts[..., -1].double().logsumexp(0)

    def run(world: Any) -> None:
        mine, out, lse = pkt.empty(rows, columns + 1), torch.empty(rows, columns), torch.empty(rows)
        merge = launch_merging(world, rows, columns, 2, mine)
        constants = {"SQ": 1, "HEADS": 1, "E": columns, "COLUMNS": columns}
        p = Decode(**{
            **dict.fromkeys(Decode._fields), "B": rows, "out_ptr": out, "lse_ptr": lse,
            **{name: tl.constexpr(n) for name, n in constants.items()},
        })  # fmt: skip
        for launch in range(3):
            parts, right, right_lse = results(launch, world.size)
            mine.copy_(parts[world.rank])
            merge(p)
            assert torch.allclose(out.double(), right, rtol=1e-5, atol=1e-5)
            assert torch.allclose(lse.double(), right_lse, rtol=1e-5, atol=1e-5)

    report = pkt.simulate(run, ranks=3, seeds=20, mutants=True, lost_signals=True, lost_ranks=2, sms=2)
    report.check()
    assert report.mutants
    assert report.signals


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("size", [3, 8])
def test_the_kernel_that_merges_shares_does_not_spill(
    size: int, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(world: Any) -> None:
        mine = pkt.empty(300, E + 1)
        constants = {"SQ": 1, "HEADS": 100, "E": E, "COLUMNS": E}
        p = Decode(**{
            **dict.fromkeys(Decode._fields), "B": 3, "out_ptr": torch.empty(300, E, dtype=torch.bfloat16),
            "lse_ptr": torch.empty(300), "sinks_ptr": torch.empty(100),
            **{name: tl.constexpr(n) for name, n in constants.items()},
        })  # fmt: skip
        launch_merging(world, 300, E, planning.ROWS, mine)(p)

    (launch,) = all_launched(run, size, True, monkeypatch)
    compile_checked(launch, arch, tmp_path)


def test_a_rank_may_have_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    started = with_plain_kernel(monkeypatch)

    def run(world: Any) -> None:
        every = tensors(world.rank, 2, 16, 64, [[130]], torch.bfloat16)
        every["k_cache"][1], every["seq_lens"][1] = every["k_cache"][1][:0], torch.zeros(1, 1, dtype=torch.int32)
        mine = {name: x[world.rank] if x else None for name, x in every.items()}
        out, _ = flash_decode(**mine, v_dim=E, mode="gluon")
        exact, _ = reference(world.rank, **every, v_dim=E)
        limit, _ = bound(world.rank, torch.bfloat16, 1, **every, v_dim=E)
        assert ((out.double() - exact).abs() <= limit).all()

    on_ranks(2, run, sms=2)
    assert [shape for _, _, shape, _ in started].count([1, 64, D]) == 1


def test_which_calls_the_form_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")

    def call(
        key: int = D, value: int = E, heads: int = 1, page: int = 64, dtype: torch.dtype = torch.bfloat16,
        cache: torch.dtype | None = None, v: torch.Tensor | None = None, **given: Any,
    ) -> Call:  # fmt: skip
        tensors = {
            "q": torch.empty(1, 1, 16, key, dtype=dtype, device="meta"), "v_cache": v,
            "k_cache": torch.empty(4, page, heads, key, dtype=cache or dtype, device="meta"),
        }  # fmt: skip
        made = Call("", SimpleNamespace(size=1), tensors, {}, given, None)  # type: ignore[arg-type]
        made.sizes, made.shape = {"d": key, "g": heads, "n": page}, (1, 1, 16, value)
        return made

    fp8 = torch.float8_e4m3fn
    for fits in (
        call(), call(dtype=torch.float16), call(520), call(page=8), call(page=32), call(page=192), call(cache=fp8),
        call(cache=torch.float8_e5m2, page=48),
    ):  # fmt: skip
        assert rules.fits_gluon(fits) == ""
        assert rules.default_form(fits) == "gluon"
    assert rules.default_form(call(block=32)) == "fused"
    for unfit, words in (
        (call(E), "keys of 512"), (call(640), "keys of 640"), (call(value=256), "values of 256"),
        (call(heads=2), "2 KV heads"), (call(page=48), "pages of 48"), (call(page=4), "pages of 4"),
        (call(dtype=torch.float32), "float32"), (call(dtype=torch.float32, cache=fp8), "float32"),
        (call(v=torch.empty(1, device="meta")), "a v_cache"),
    ):  # fmt: skip
        assert words in rules.fits_gluon(unfit)
        assert rules.default_form(unfit) == "fused"
    nothing = call()
    nothing.shape = 0, 1, 16, E
    assert "no queries" in rules.fits_gluon(nothing)
    odd = call()
    odd.tensors["k_cache"] = torch.empty(4, 64, 1, D + 1, dtype=torch.bfloat16)[..., :D]
    assert "strides" in rules.fits_gluon(odd)
