"""What the conformance suite has no operands for: lengths that change, no keys, sinks, caps, latent caches, strides."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.flash_decode import OPERATOR, flash_decode, reference, rules
from pkt.kernels.flash_decode.reference import bound
from pkt.kernels.shared import flagged
from pkt.language.inspect import count_markers

from .helpers import on_ranks
from .launches import all_launched, compile_checked
from .machine_code import sass

PAGE, PAGES = 4, 12
FP8 = torch.float8_e4m3fn


def operands(
    seed: int, lens: list[list[list[int]]], heads: int, kv_heads: int, D: int, E: int | None, size: float,
    pages: int = PAGES, cache: torch.dtype = torch.float32, page: int = PAGE,
) -> dict[str, Any]:  # fmt: skip
    """Of all ranks, by name. lens: of each rank (B, SQ); cache: the dtype of keys and values; page: keys of one."""
    make = torch.Generator().manual_seed(seed)
    ranks, B, SQ = len(lens), len(lens[0]), len(lens[0][0])
    q = torch.randn(B, SQ, heads, D, generator=make) * size
    caches = [torch.randn(pages, page, kv_heads, D, generator=make).to(cache) for _ in range(ranks)]
    values = [torch.randn(pages, page, kv_heads, E, generator=make).to(cache) for _ in range(ranks)] if E else None
    tables = [torch.stack([torch.randperm(pages, generator=make) for _ in range(B)]).int() for _ in range(ranks)]
    return {
        "q": [q] * ranks, "k_cache": caches, "v_cache": values, "block_table": tables,
        "seq_lens": [torch.tensor(own, dtype=torch.int32) for own in lens], "sinks": None,
    }  # fmt: skip


def check(world: Any, every: dict[str, Any], keep: dict[str, Any], **arguments: Any) -> tuple[Any, Any]:
    """Both results are right. keep: tensors of the call before, whose memory is used again."""
    mine = {name: None if ranks is None else ranks[world.rank] for name, ranks in every.items()}
    for name, tensor in mine.items():
        if tensor is not None:
            keep.setdefault(name, tensor.clone()).copy_(tensor)
    changes = {name: value for name, value in arguments.items() if name in OPERATOR.arguments}
    exact = reference(world.rank, **every, **changes)
    limits = bound(world.rank, mine["q"].dtype, 1, **every, **changes)
    found = flash_decode(**{name: keep.get(name) for name in mine}, block=16, stages=1, **arguments)
    for result, right, limit in zip(found, exact, limits, strict=True):
        close = (result == right) | ((result.double() - right).abs() <= limit)
        assert close.all(), ((result.double() - right).abs().max(), limit.max())
    return found


LENGTHS = [
    [[[0, 0], [48, 47]], [[0, 0], [0, 1]], [[0, 0], [20, 20]]],  # the first sequence has no key anywhere
    [
        [[5, 6], [0, 0]],
        [[-3, 0], [99, 99]],
        [[48, 48], [1, 2]],
    ],  # below 0 is 0, and beyond the pages all that they hold
]


@pytest.mark.parametrize("mode", ["fused", "waits", "unfused"])
def test_one_rank_keeps_no_words(mode: str) -> None:
    """Its results go where they belong, with the sink, and it has no memory to exchange them in."""

    def run(world: Any) -> None:
        every = operands(8, [[[40, 41], [0, 0], [9, 9]]], 40, 1, 16, 16, 1.0)
        every["sinks"] = [torch.linspace(-1, 1, 40)]
        for programs in (1, 4):
            check(world, every, {}, mode=mode, programs=programs)
        words = flagged.slots_of(world, 0)[2]
        assert words == flagged.LEAST_ROOM
        assert words < 3 * 2 * 40 * 6 * world.size  # of this call, if it put any

    on_ranks(1, run, sms=4)


@pytest.mark.parametrize("mode", ["fused", "waits", "unfused"])
def test_lengths_may_change_between_launches(mode: str) -> None:
    every_rank = {}

    def run(world: Any) -> None:
        keep: dict[str, Any] = {}
        for launch, lens in enumerate(LENGTHS):
            every = operands(launch, lens, 4, 2, 16, 16, 1.0, pages=PAGES - 1)  # which end inside of a block of keys
            out, lse = check(world, every, keep, mode=mode, programs=4)
            if launch == 0:
                assert (out[0] == 0).all()
                assert (lse[0] == -torch.inf).all()
            every_rank.setdefault(launch, []).append(torch.cat([out.flatten(), lse.flatten()]))

    on_ranks(3, run, sms=4)
    for results in every_rank.values():
        assert all(torch.equal(results[0], other) for other in results[1:]), "ranks hold other bits"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "E", "tiles", "programs"),
    [(2, 1, 16, 20, 20), (2, 1, 128, 12, 12), (2, 1, 128, 70, 70), (256, 4, 16, 9, 7)],
)
def test_many_programs_share_a_unit(heads: int, kv_heads: int, E: int, tiles: int, programs: int) -> None:
    """The parts of a row are merged in 16 runs of one part or two, in four runs of three, in four of 17 or 18, and in
    one run. On the first rank there are so many tiles of 16 keys, on the others four fewer."""

    def run(world: Any) -> None:
        lens = [[[16 * tiles]], [[16 * (tiles - 4)]], [[16 * (tiles - 4) + 1]]]
        every = operands(6, lens, heads, kv_heads, 16, E, 1.0, pages=4 * tiles)
        check(world, every, {}, programs=programs)

    on_ranks(3, run, sms=programs)


@pytest.mark.parametrize(
    ("D", "E", "dtype"),
    [
        (16, 16, torch.float16),
        (40, 24, torch.float16),
        (40, None, torch.float16),
        (40, 24, torch.float8_e4m3fn),
        (40, None, torch.float8_e5m2),
    ],
    ids=["heads", "padded", "latent", "fp8", "latent fp8"],
)
def test_pages_of_whole_tiles(D: int, E: int | None, dtype: torch.dtype) -> None:
    """TMA loads them. Behind the last key of a sequence a page may hold anything, and so may a page of no sequence."""

    def run(world: Any) -> None:
        lens = [[[33, 30]], [[63, 64]], [[0, 0]]]
        every = operands(5, lens, 4, 2, D, E, 1.0, pages=5, page=32)
        every["q"] = [x.half() for x in every["q"]]
        every |= {name: [x.to(dtype) for x in every[name]] for name in ("k_cache", "v_cache") if every[name]}
        for rank, (tokens,) in enumerate(lens):
            end, table = max(tokens), every["block_table"][rank][0].long()
            for cache in (every[name][rank] for name in ("k_cache", "v_cache") if every[name]):
                cache[table[end // 32], end % 32 :] = torch.nan
                cache[table[end // 32 + 1 :]] = torch.nan
        for programs in (5, 1):
            check(world, every, {}, programs=programs, **({} if E else {"v_dim": 16}))

    on_ranks(3, run, sms=5)


def test_which_caches_tma_loads() -> None:
    def boxed(k: torch.Tensor, v: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> bool:
        tensors = {"q": torch.empty(1, dtype=dtype), "k_cache": k, "v_cache": v}
        return rules.boxed(Call("", SimpleNamespace(), tensors, {}, {}, None), 32)  # type: ignore[arg-type]

    def cache(page: int = 64, D: int = 16, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
        return torch.empty(3 * page * 2 * D + offset, dtype=dtype)[offset:].view(3, page, 2, D)

    assert boxed(cache())
    assert boxed(cache(), cache(D=24))
    assert boxed(cache().transpose(1, 2).contiguous().transpose(1, 2)), "heads before keys"
    assert not boxed(cache(), cache(D=20)), "rows of 40 bytes"
    assert not boxed(cache(), cache(offset=4)), "8 bytes behind a multiple of 16"
    assert not boxed(cache(page=48)), "a tile in two pages"
    assert not boxed(cache()[:0]), "no pages"
    assert boxed(cache(dtype=torch.float8_e4m3fn))
    assert not boxed(cache(dtype=torch.float8_e4m3fn, D=24)), "rows of 24 bytes"
    assert not boxed(cache(dtype=torch.float8_e4m3fn), dtype=torch.float32)
    assert not boxed(cache(dtype=torch.float32), dtype=torch.float32)


@pytest.mark.parametrize(
    ("D", "v_dim", "dtype", "cache", "settings"),
    [
        (576, 512, torch.bfloat16, torch.bfloat16, (32, 2)),
        (576, 512, torch.float16, torch.float8_e4m3fn, (64, 3)),
        (576, 512, torch.float32, torch.float32, (16, 2)),
        (576, 576, torch.bfloat16, torch.float8_e5m2, (32, 2)),  # values are loaded beside keys
        (576, 256, torch.bfloat16, torch.float8_e5m2, (32, 2)),
        (128, 128, torch.bfloat16, torch.bfloat16, (128, 2)),
        (128, 128, torch.bfloat16, torch.float8_e4m3fn, (64, 2)),
    ],
)
def test_default_settings_of_latent_caches(
    D: int, v_dim: int, dtype: torch.dtype, cache: torch.dtype, settings: tuple[int, int]
) -> None:
    tensors = {"q": torch.empty(1, 1, 16, D, dtype=dtype, device="meta"), "v_cache": None}
    tensors["k_cache"] = torch.empty(3, 64, 1, D, dtype=cache, device="meta")
    call = Call("", SimpleNamespace(), tensors, {}, {}, None)  # type: ignore[arg-type]
    call.sizes, call.shape = {"s": 1, "h": 16, "g": 1, "d": D, "n": 64}, (1, 1, 16, v_dim)
    assert (rules.default_block(call), rules.default_stages(call)) == settings


@pytest.mark.parametrize(
    ("cache", "page", "D", "given", "each"),
    [
        (FP8, 64, 128, {}, 4), (FP8, 192, 80, {}, 4), (FP8, 96, 128, {}, 2), (FP8, 64, 72, {}, 2),
        (FP8, 64, 128, {"block": 128}, 2), (torch.bfloat16, 64, 128, {}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_programs_of_an_sm(
    cache: torch.dtype, page: int, D: int, given: dict[str, int], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share its registers."""

    def run(world: Any) -> None:
        q, k = torch.empty(4, 1, 64, D, dtype=torch.bfloat16), torch.empty(4, page, 8, D, dtype=cache)
        flash_decode(q, k, k, torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32), **given)

    monkeypatch.setattr(Call, "on_gpu", True)
    (launch,) = all_launched(run, 2, True, monkeypatch)
    assert launch.options["maxnreg"] == {2: 255, 4: 128}[each]


def test_many_programs_of_an_sm_are_left_enough_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the launch refuses them."""

    def run(world: Any) -> None:
        q, k = torch.empty(4, 1, 64, 128, dtype=torch.bfloat16), torch.empty(4, 64, 8, 128, dtype=torch.bfloat16)
        table, lens = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)
        flash_decode(q, k, k, table, lens, programs=16 * world.num_sms)

    monkeypatch.setattr(Call, "on_gpu", True)
    (launch,) = all_launched(run, 2, True, monkeypatch)
    assert launch.options["maxnreg"] == 64


@pytest.mark.parametrize("size", [1.0, 300.0], ids=["usual", "one-hot"])
def test_sinks_caps_and_latent_caches(size: float) -> None:
    def run(world: Any) -> None:
        every = operands(3, [[[7], [0]], [[40], [0]]], 3, 1, 24, None, size)
        every["sinks"] = [torch.tensor([0.5, -torch.inf, 30.0])] * 2
        _, lse = check(world, every, {}, v_dim=16, soft_cap=20.0, scale=0.3, programs=3)
        assert torch.equal(lse[1, 0], every["sinks"][0]), "without keys the sink is all"
        check(world, every, {})  # V is all of K

    on_ranks(2, run, sms=3)


@pytest.mark.parametrize(
    ("cache", "dtype", "mode"),
    [
        (torch.float8_e4m3fn, torch.float32, "fused"),
        (torch.float8_e4m3fn, torch.bfloat16, "waits"),
        (torch.float8_e5m2, torch.float16, "unfused"),
    ],
    ids=str,
)
def test_fp8_caches(cache: torch.dtype, dtype: torch.dtype, mode: str) -> None:
    """Right as of the dequantised cache, which each rank scales in its own way. In fp32 a rounded key would be seen. In
    bf16 a head of q is beyond fp16's range, in which it is multiplied."""

    def run(world: Any) -> None:
        every = operands(7, [[[9, 10]], [[38, 40]]], 4, 2, 24, 16, 0.5, cache=cache)
        sizes = torch.tensor([1, 2.0**17 if dtype == torch.bfloat16 else 1, 0.25, 1])
        every["q"] = [(q * sizes[:, None]).to(dtype) for q in every["q"]]
        heads, whole = [torch.tensor([0.25, 3.0]), torch.tensor([1.5, 0.5])], [torch.tensor(2.5), torch.tensor([0.5])]
        for k_scale, v_scale in ((heads, heads[::-1]), (whole[:1] * 2, None), (None, whole[1:] * 2)):
            check(world, every | {"k_scale": k_scale, "v_scale": v_scale}, {}, mode=mode, programs=3)
        check(world, every | {"v_cache": None, "k_scale": heads}, {}, mode=mode, v_dim=16, programs=3)

    on_ranks(2, run, sms=3)


def test_caches_are_used_where_they_are() -> None:
    def run(world: Any) -> None:
        every = operands(4, [[[9]], [[30]]], 2, 2, 16, 16, 1.0)
        both = torch.stack(
            [every["k_cache"][world.rank], every["v_cache"][world.rank]], 1
        )  # (pages, 2, page, heads, D)
        by_heads = every["k_cache"][world.rank].transpose(1, 2).contiguous().transpose(1, 2)
        q, table, lens = (every[name][world.rank] for name in ("q", "block_table", "seq_lens"))
        exact, _ = reference(world.rank, **every)
        for k in (both[:, 0], by_heads):
            found, _ = flash_decode(q, k, both[:, 1], table, lens, block=16, stages=1, programs=2)
            assert torch.allclose(found.double(), exact, atol=1e-5, rtol=1e-5)
        with pytest.raises(pkt.ShapeError, match="lie together"):
            flash_decode(
                q, every["k_cache"][world.rank].transpose(1, 3).contiguous().transpose(1, 3), None, table, lens
            )

    on_ranks(2, run, sms=2)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"v_dim": 4}, "v_dim"),
        ({"v_cache": None, "v_dim": 17}, "v_dim"),
        ({"block": 8}, "block"),
        ({"warps": 3}, "warps"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], found: str) -> None:
    def run(world: Any) -> None:
        every = operands(5, [[[9]]], 2, 1, 16, 16, 1.0)
        with pytest.raises(pkt.ShapeError, match=rf"rank 0: flash_decode: {found}: found"):
            flash_decode(**{name: ranks and ranks[0] for name, ranks in every.items()} | change)

    on_ranks(1, run)


def test_heads_must_be_a_multiple_of_kv_heads() -> None:
    def run(world: Any) -> None:
        q, cache = torch.zeros(1, 1, 3, 16), torch.zeros(1, 4, 2, 16)
        with pytest.raises(pkt.ShapeError, match="3 heads, wanted a multiple of the 2 KV heads"):
            flash_decode(q, cache, cache, torch.zeros(1, 1).int(), torch.zeros(1, 1).int())

    on_ranks(1, run)


def test_no_kv_head_is_no_key() -> None:
    """Also with the default settings, which depend on how many heads share a KV head."""

    def run(world: Any) -> None:
        q, cache, sinks = torch.ones(2, 1, 4, 16), torch.zeros(3, 4, 0, 16), torch.arange(4.0)
        table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32)
        out, lse = flash_decode(q, cache, cache, table, lens, sinks)
        assert not out.any()
        assert torch.equal(lse, sinks.expand(2, 1, 4))

    on_ranks(2, run)


@pytest.mark.parametrize("arch", [90, 100])
def test_four_programs_of_caches_in_fp8_do_not_spill_in_their_loops(
    arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten numbers that are needed behind the loops over tiles are spilled before them."""

    def run(world: Any) -> None:
        q, k = torch.empty(4, 1, 64, 128, dtype=torch.bfloat16), torch.empty(4, 64, 8, 128, dtype=FP8)
        table, lens, scale = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32), torch.ones(8)
        flash_decode(q, k, k, table, lens, k_scale=scale, v_scale=scale)

    monkeypatch.setattr(Call, "on_gpu", True)
    (launch,) = all_launched(run, 2, True, monkeypatch)
    assert launch.options["maxnreg"] == 128
    compiled = compile_checked(launch, arch, tmp_path, signals=False, stack=40)
    products = itertools.groupby(re.findall(r"\bHMMA|\bSTL|\bLDL", sass(compiled, tmp_path)))
    assert [len(list(of)) for name, of in products if name == "HMMA"] == [32, 32], "of whole tiles, and of the last one"
    assert 4 * (compiled.metadata.shared + 1024) <= 228 << 10, "an SM's; a KiB of each program is reserved"


@pytest.mark.parametrize(("arch", "dtype"), [(90, torch.bfloat16), (90, FP8), (100, FP8)], ids=str)
def test_latent_caches_of_512_columns_do_not_spill_in_their_loop(
    arch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In fp8 up to six numbers, which are needed behind the loop, are spilled before it, see `rules._latent_fp8`."""

    def run(world: Any) -> None:
        q, cache = torch.empty(4, 1, 128, 576, dtype=torch.bfloat16), torch.empty(4, 64, 1, 576, dtype=dtype)
        table, lens = torch.zeros(4, 512, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)
        scale = None if dtype == q.dtype else torch.ones(1)
        flash_decode(q, cache, None, table, lens, k_scale=scale, v_dim=512)

    (launch,) = all_launched(run, 2, True, monkeypatch)
    compiled = compile_checked(launch, arch, tmp_path, signals=False, stack=24 if dtype == FP8 else 0)
    products = re.findall(r"\bHMMA|\bUTCHMMA|\bSTL|\bLDL", sass(compiled, tmp_path))
    loop = [i for i, name in enumerate(products) if "HMMA" in name]
    assert len(loop) > 100
    assert all("HMMA" in name for name in products[loop[0] : loop[-1]])
    # Few parts, many parts and the ranks, two kinds of words each: no word is taken again for another layout.
    assert count_markers(compiled.asm["ttgir"])["wait"] == 6
