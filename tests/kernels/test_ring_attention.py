"""Ring attention beyond what the registry's suite covers: layouts, documents, padding, inputs that break softmax."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.ring_attention import exact, forms, parts, planning, rules, sequence
from pkt.kernels.ring_attention.merge import merge_kernel
from pkt.kernels.ring_attention.parts import ROWS as ROWS_MERGED
from pkt.kernels.ring_attention.parts import rectangle
from pkt.kernels.ring_attention.sequence import LAYOUTS, View
from pkt.kernels.shared import torch_attention
from pkt.language.inspect import Pointer, compile_only
from tests.kernels.helpers import on_ranks
from tests.kernels.machine_code import resources

RANKS, ROWS, HEADS, KV, D = 2, 37, 4, 2, 12
SMALL = {"tiles": (16, 16)}
PUSHED = {**SMALL, "num_comm_sms": 1, "chunk": 16}


def operands(seed: int, rows: int = ROWS, batch: int = 1, size: int = RANKS) -> list[list[torch.Tensor]]:
    """q, k and v of all ranks, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(batch, rows, heads, D, generator=generator) for _ in range(size)] for heads in (HEADS, KV, KV)
    ]  # fmt: skip


def check(
    everybody: list[list[torch.Tensor]], dtype: torch.dtype = torch.float32, launches: int = 1, size: int = RANKS,
    cu_seqlens: torch.Tensor | None = None, **keywords: Any,
) -> None:  # fmt: skip
    """Results of all ranks are within the bound, and rows that see no key are 0 and -inf."""
    q, k, v = ([x.to(dtype) for x in xs] for xs in everybody)
    documents = None if cu_seqlens is None else [cu_seqlens] * size
    told = {n: x for n, x in keywords.items() if n not in ("mode", "tiles", "num_comm_sms", "chunk")}

    def run(world: Any) -> None:
        rank = world.rank
        wanted = exact.reference(rank, q, k, v, documents, **told)
        limits = exact.bound(rank, dtype, 1, q, k, v, documents, **told)
        for _ in range(launches):
            found = pkt.ring_attention(q[rank], k[rank], v[rank], cu_seqlens=cu_seqlens, return_lse=True, **keywords)
            assert found[1].dtype == torch.float32
            for x, right, limit in zip(found, wanted, limits, strict=True):
                assert x.shape == right.shape
                off = (x.double() - right).abs()
                assert ((x.double() == right) | (off <= limit)).all(), (off.max(), (off - limit).max())

    on_ranks(size, run, sms=3)


# -------------------------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 3), (6, 2), (7, 4)])
def test_a_sequence_goes_to_the_ranks_and_back(layout: Any, rows: int, size: int) -> None:
    length = rows * size - (size - 1)

    def run(world: Any) -> None:
        x = torch.arange(2.0 * length).reshape(2, length, 1) + 1
        mine = pkt.shard_sequence(x, layout=layout)
        at = pkt.sequence_positions(length, layout=layout)
        assert mine.shape == (2, rows, 1)
        assert at.shape == (rows,)
        padded = torch.cat((x, torch.zeros(2, rows * size - length, 1)), 1)
        assert torch.equal(mine, padded[:, at])
        whole = pkt.unshard_sequence(pkt.all_gather(mine, dim=1), length=length, layout=layout)
        assert torch.equal(whole, x)

    on_ranks(size, run)


def test_wrong_arguments_of_layouts() -> None:
    def run(world: Any) -> None:
        def refused(found: str, call: Any, error: Any = pkt.DtypeError) -> None:
            with pytest.raises(error, match=rf"^rank {world.rank}: pkt\.{found}"):
                call()

        x: Any = torch.ones(1, 6, 2)
        for name in ("shard_sequence", "unshard_sequence"):
            function: Any = getattr(pkt, name)
            refused(f"{name}: x: found list, wanted a tensor", lambda function=function: function([1.0]))
            refused(f"{name}: dim: found str '1', wanted an integer", lambda function=function: function(x, "1"))
            refused(f"{name}: world: found int", lambda function=function: function(x, world=3))
            refused(f"{name}: x: found layout torch.sparse", lambda function=function: function(x.to_sparse()))
            lines: Any = torch.ones(9, 9).numpy()
            found = rf"{name}: found layout array[^\n]*: wanted one of"
            refused(found, lambda function=function, lines=lines: function(x, layout=lines), pkt.Unsupported)
        positions, whole = pkt.sequence_positions, pkt.unshard_sequence
        refused("sequence_positions: length: found float 3.0", lambda: positions(3.0))  # type: ignore[arg-type]
        refused("sequence_positions: length: found -1, wanted at least 0", lambda: positions(-1), pkt.ShapeError)
        refused("unshard_sequence: length: found float 3.0", lambda: whole(x, length=3.0))  # type: ignore[arg-type]
        for length in (-1, 7):
            found = f"unshard_sequence: length: found {length}, wanted from 0 to 6"
            refused(found, lambda length=length: whole(x, length=length), pkt.ShapeError)

    on_ranks(2, run)


def test_a_sequence_is_sharded_without_memory() -> None:
    """The host does not wait for a device to know which rows are padding."""

    def run(world: Any) -> None:
        assert pkt.shard_sequence(torch.ones(1, 5, 2, device="meta"), layout="zigzag").shape == (1, 3, 2)

    on_ranks(2, run)


def test_zigzag_gives_a_rank_two_chunks() -> None:
    assert [sequence.positions(4, "zigzag", rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_is_what_somebody_sees(layout: str) -> None:
    """Chunk by chunk, against every pair of positions."""
    rows, size, most = 7, 3, 2
    total = rows * size
    for left, right, length in itertools.product((0, 2, total), (0, 3, total), (0, 11, total)):
        view = View(left, right, length)
        for sender, receiver in itertools.permutations(range(size), 2):
            queries = [p for p in sequence.positions(rows, layout, receiver, size).tolist() if p < length]
            seen = {j for p in queries for j in range(max(p - left, 0), min(p + right + 1, length))}
            for piece in sequence.pieces(rows, layout, sender, size, most):
                keys = range(piece.position, piece.position + piece.rows)
                assert sequence.needed(piece, view, rows, layout, receiver, size) == any(j in seen for j in keys)


def test_each_position_has_its_document() -> None:
    """The first position and the one behind the last, in ascending order also where there is no document; the exact
    results of other tests take the same function."""
    ends, at = torch.tensor([2, 4, 4, 7], dtype=torch.int32), torch.arange(9)
    first, behind = sequence.spans(ends, at, 9).tolist()
    assert [*zip(first, behind)] == [(2, 2)] * 2 + [(2, 4)] * 2 + [(4, 7)] * 3 + [(9, 7)] * 2


def test_pieces_are_the_rows_of_a_rank() -> None:
    for layout, rows, size in itertools.product(LAYOUTS, (1, 5, 8), (1, 3)):
        for rank in range(size):
            pieces = sequence.pieces(rows, layout, rank, size, 2)
            assert [p.row + i for p in pieces for i in range(p.rows)] == list(range(rows))
            found = [p.position + i for p in pieces for i in range(p.rows)]
            assert found == sequence.positions(rows, layout, rank, size).tolist()


# -------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize(
    ("mode", "keywords"),
    [
        ("fused", {"causal": True, "layout": "zigzag"}),
        ("fused", {"window": (9, 20), "scale": 0.5}),
        ("copy", {"causal": True, "window": (30, -1), "layout": "zigzag"}),
        ("fused", {"length": 2 * ROWS - 21}),  # the last rank has rows that are padding alone
        ("unfused", {"length": 5, "layout": "zigzag"}),
        ("unfused", {"window": (40, 9)}),  # blocks of keys that all queries of a tile see lie between others
    ],
)
def test_several_chunks_and_tiles(mode: str, keywords: dict[str, Any]) -> None:
    settings = {name: value for name, value in PUSHED.items() if mode == "fused" or name != "num_comm_sms"}
    check(operands(1, batch=1), mode=mode, **(SMALL if mode == "unfused" else settings), **keywords)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["fused", "unfused"])
@pytest.mark.parametrize("ends", [{"length": 17}, {"cu_seqlens": torch.tensor([0, 5, 17], dtype=torch.int32)}])
def test_padding_may_be_nan(ends: dict[str, Any], mode: str, layout: Any) -> None:
    """As memory that nobody has written may be: results and gradients are those beside padding of zeros."""

    def run(world: Any) -> None:
        at = pkt.sequence_positions(21, layout=layout)
        drawn = torch.Generator().manual_seed(0)
        whole = torch.randn(3, 21, 2, 8, generator=drawn)
        found = []
        for padding in (0.0, math.nan):
            whole[:, 17:] = padding
            q, k, v = (x[at.clamp(max=20)].requires_grad_() for x in whole.unbind())
            batch = [x if "cu_seqlens" in ends else x[None] for x in (q, k, v)]
            out = pkt.ring_attention(*batch, causal=True, layout=layout, mode=mode, tiles=(16, 16), **ends)
            upstream = (at < 17)[:, None, None].expand(out.shape).float()
            found.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
        for zeros, nans in zip(*found):
            assert torch.equal(zeros, nans)

    on_ranks(3, run, sms=2)


@pytest.mark.parametrize(("rows", "size"), [(5, 1), (1, 2), (7, 3), (37, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_attends_to_one_rank_after_the_other(layout: Any, rows: int, size: int) -> None:
    everybody = operands(9, rows=rows, batch=2, size=size)
    check(everybody, launches=2, size=size, causal=True, layout=layout, mode="parts", scale=0.7)
    check(everybody, torch.bfloat16, size=size, layout=layout, mode="parts", window=(-1, -1), length=rows * size)


def test_parts_with_far_apart_keys() -> None:
    """The inputs of the merge's tests below: scores of one rank's keys are far above or below those of another's."""
    q, k, v = operands(3, rows=18)
    check([q, [k[0] - 100, k[1] + 100], v], mode="parts")
    check([[64 * x for x in q], [64 * x for x in k], v], torch.bfloat16, causal=True, mode="parts", layout="zigzag")


def test_the_merge_of_eight_ranks_spills_no_registers(tmp_path: Path) -> None:
    outs, lses, out, lse = ((Pointer("bf16", 4096),) * 8, (Pointer("fp32", 4096),) * 8, *map(Pointer, ("bf16", "fp32")))
    args = (outs, lses, (0, 0, 0, *[384] * 5), out, lse, 768, 16, 128, 128, ROWS_MERGED)
    usage = resources(compile_only(merge_kernel, *args, arch=90), tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage


def test_rectangles_are_what_is_seen() -> None:
    for layout, rows, size, causal in itertools.product(LAYOUTS, (1, 4, 5), (1, 2, 4), (False, True)):
        for rank, source in itertools.product(range(size), repeat=2):
            mine, theirs = (sequence.positions(rows, layout, at, size) for at in (rank, source))
            seen = (theirs <= mine[:, None]) | (not causal)
            found, held = torch.zeros(rows, rows, dtype=torch.bool), rectangle(rows, layout, causal, rank, source)
            if held is not None:
                found[held.queries, held.keys] = True
                assert held.queries.stop == rows, "the merge takes all queries from one on"
                assert found.any(), "nothing is computed"
            assert torch.equal(found.tril() if held and held.causal else found, seen)


def test_what_torch_cannot_attend_to_is_refused() -> None:
    q, k, v = (xs[0] for xs in operands(6, rows=4, size=1))
    packed, ends = (q[0], k[0], v[0]), torch.tensor([0, 4], dtype=torch.int32)
    wrong = [(packed, {"cu_seqlens": ends}), ((q, k, v), {"length": 3}), ((q, k, v), {"window": (2, 0)})]

    def run(world: Any) -> None:
        for tensors, keywords in wrong:
            with pytest.raises(pkt.Unsupported, match="mode='parts'.*found .*torch's kernel"):
                pkt.ring_attention(*tensors, mode="parts", **keywords)

    on_ranks(1, run)


def test_a_gpu_without_a_kernel_for_the_rows_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is asked about every rectangle of any rank, cuDNN first."""
    asked = []

    def refuse(_: Any) -> bool:
        asked.append(1)
        return len(asked) < 3

    monkeypatch.setattr(torch_attention, "_described", lambda *_: None)
    monkeypatch.setattr(torch_attention, "can_use_cudnn_attention", refuse)
    monkeypatch.setattr(torch_attention, "can_use_flash_attention", refuse)
    x = torch.empty(1, 4, 2, 8, device="meta")
    calls = [r for source in range(3) if (r := rectangle(4, "zigzag", True, 1, source))]
    assert torch_attention.kernel_for(x, x, x, calls) is None
    assert len(asked) == 4
    x = torch.empty(1, 4, 2, 12, device="meta")
    assert torch_attention.kernel_for(x, x, x, calls) is None
    assert len(asked) == 4, "FlashAttention would raise for D that is no multiple of 8"
    x = torch.empty(1, 4, 2, 136, device="meta")
    asked.clear()
    assert torch_attention.kernel_for(x, x, x, calls[:2]) is torch_attention.FLASH


def test_cudnn_takes_wide_heads_on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    q: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    for capability, most in (((9, 0), 256), ((8, 0), 128), ((10, 0), 128)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert torch_attention._most_of_cudnn(q) == most


def planned(rows: int, size: int = 2, given: dict[str, int] | None = None, **named: Any) -> Call:
    """A call in bf16 with 16 heads and D = 128, of so many rows of each rank."""
    x = torch.empty(1, dtype=torch.bfloat16).expand(1, rows, 16, 128)
    tensors = {"q": x, "k": x, "v": x, "cu_seqlens": named.pop("cu_seqlens", None), "dlse": named.pop("dlse", None)}
    arguments = {"causal": False, "layout": "zigzag", "scale": None, "window": None, "length": None, **named}
    call = Call("", SimpleNamespace(size=size, torch_device="cpu"), tensors, arguments, given or {}, None)  # type: ignore[arg-type]
    call.sizes = {"b": 1, "s": rows, "h": 16, "g": 16, "d": 128}
    return call


@pytest.mark.parametrize("joined", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_several_batches_in_one_copy(joined: int, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = operands(5, batch=3)
    monkeypatch.setattr(planning, "JOIN", everybody[1][0][0].nbytes * joined)
    plans: list[planning.Plan] = []
    monkeypatch.setattr(forms, "joining", lambda *of: plans.append(planning.joining(*of)) or plans[-1])
    check(everybody, mode="copy", tiles=(16, 16), causal=True, layout=layout, launches=2)
    assert {plan.joined for plan in plans} == {joined}


def test_elements_of_a_chunk_are_counted_in_32_bits() -> None:
    call = planned(1 << 20)
    call.world.rank, call.settings = 0, {"chunk": 1 << 20}  # type: ignore[misc]
    assert 1 << 29 < planning.planned(call, planning.GLUON_TILES).chunk * 16 * 128 < 1 << 31


def test_the_form_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """By predicted time: torch's attention where there is much to compute."""
    for choose in (rules.default, rules.default_backward):
        assert choose(planned(4096)) == choose(planned(4096, causal=True)) == "parts"
        assert choose(planned(64)) == choose(planned(256, size=64)) == "fused"
        for named in ({"window": (9, 0)}, {"cu_seqlens": torch.tensor([0, 8192])}, {"given": {"chunk": 64}}):
            assert choose(planned(4096, **named)) == "fused"
    assert rules.default_backward(planned(4096, dlse=torch.empty(1, 16, 4096))) == "fused"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert (rules.default(planned(4096)), rules.default_backward(planned(4096))) == ("parts", "fused")


def test_the_form_by_default_where_gluon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "gluon" where torch's attention cannot compute a call and the kernel can, and where it is predicted to be the
    quickest, as it was measured to be."""
    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")
    for named in ({"window": (9, 0)}, {"cu_seqlens": torch.tensor([0, 8192])}, {"length": 5}):
        assert rules.default(planned(4096, **named)) == rules.default_backward(planned(4096, **named)) == "gluon"
    for causal in (False, True):
        short, long = (planned(rows, causal=causal) for rows in (3072, 49152))
        short.tensors["q"] = short.tensors["k"] = short.tensors["v"] = short["q"].expand(16, -1, -1, -1)
        assert (rules.default(short), rules.default_backward(short)) == ("gluon", "gluon")
        assert (rules.default(long), rules.default_backward(long)) == ("gluon", "parts")
        short, long = (planned(rows, size=1, causal=causal) for rows in (1024, 8192))
        assert (rules.default(short), rules.default_backward(short)) == ("gluon", "gluon")
        assert (rules.default(long), rules.default_backward(long)) == ("gluon", "parts")
    assert rules.default(planned(64)) == rules.default_backward(planned(64)) == "fused"
    assert rules.default(planned(4096, window=(9, 0), given={"chunk": 64})) == "fused"
    narrow, wide, none = planned(1024, size=1), planned(4096, window=(9, 0)), planned(4096)
    narrow.sizes["d"] = 64
    narrow.tensors["q"] = narrow["q"][..., :64]
    assert (rules.default(narrow), rules.default_backward(narrow)) == ("gluon", "parts")
    wide.tensors["q"] = torch.empty(1, 4096, 16, 256, dtype=torch.bfloat16, device="meta")
    assert rules.fits_gluon(wide) == "D 256, not 64 or 128"
    assert rules.default(wide) == rules.default_backward(wide) == "fused"
    none.tensors["q"] = torch.empty(0, 4096, 16, 128, dtype=torch.bfloat16)
    assert rules.fits_gluon(none) == "no queries"


def test_gluon_is_refused_where_it_does_not_run() -> None:
    q, k, v = (xs[0] for xs in operands(6, rows=4, size=1))

    def run(world: Any) -> None:
        with pytest.raises(pkt.Unsupported, match="mode='gluon'.*found the simulator, and Gluon is compiled only"):
            pkt.ring_attention(q, k, v, mode="gluon")

    on_ranks(1, run)


@pytest.mark.parametrize(("rank", "size"), [(2, 3), (0, 3)])
def test_what_is_sent_goes_on_behind_the_current_stream_also_if_it_is_nothing(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    """The last rank has nobody who sees its keys. A graph that is captured must have the other stream before a wait for
    it."""
    done: dict[int, list[str]] = {}

    class Side:
        def __init__(self, world: Any) -> None:
            calls = done[world.rank] = []
            self.behind = lambda: calls.append("behind") or nullcontext()
            self.mark = lambda: calls.append("mark")
            self.reach = lambda mark: calls.append("reach")

    monkeypatch.setattr(parts.copies, "Side", Side)

    def run(world: Any) -> None:
        x = torch.randn(1, 4, 2, 8)
        pkt.ring_attention(x, x, x, causal=True, mode="parts")

    on_ranks(size, run)
    assert done[rank] == ["behind", "mark", "reach"]


@pytest.mark.parametrize("mode", ["fused", "unfused"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_any_lengths(mode: str, layout: str) -> None:
    """One ends in the middle of a rank, one crosses ranks, one is empty, and rows behind the last see nothing."""
    packed = [[x[0] for x in xs] for xs in operands(2)]
    ends = torch.tensor([0, 3, 3, 20, 60], dtype=torch.int32)
    settings = PUSHED if mode == "fused" else SMALL
    check(packed, cu_seqlens=ends, causal=layout == "zigzag", layout=layout, mode=mode, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_that_break_a_careless_softmax(dtype: torch.dtype) -> None:
    """Scores of some thousands, of which one key gets everything; scores that are all equal; and keys of one rank whose
    scores are far below or above those of another."""
    q, k, v = operands(3, rows=18)
    hot = [[64 * x for x in xs] for xs in (q, k)]
    check([*hot, v], dtype, causal=True, mode="fused", **PUSHED)
    check([[0 * x for x in q], k, v], dtype, mode="fused", **PUSHED)
    check([q, [k[0] - 100, k[1] + 100], v], dtype, mode="fused", **PUSHED)


def test_an_overflow_of_a_merge_is_told_from_a_right_result() -> None:
    """The inputs above are such that exp of a difference of logarithms is infinite in fp32, in either direction."""
    q, k, v = operands(3, rows=18)
    moved = [k[0] - 100, k[1] + 100]
    parts = [
        exact.weights_of(0, [q[0]], [one], [v[0]], None, False, "contiguous", None, None, None).lse for one in moved
    ]
    assert (parts[1] - parts[0]).max() > 88.8
    assert (parts[0] - parts[1]).max() > 88.8


def test_a_row_without_keys_is_zero_and_its_logarithm_minus_infinity() -> None:
    q, k, v = operands(4, rows=4)

    def run(world: Any) -> None:
        rank = world.rank
        out, lse = pkt.ring_attention(q[rank], k[rank], v[rank], length=3, return_lse=True, mode="fused", **PUSHED)
        seen = torch.arange(4) + 4 * rank < 3
        assert not out[:, ~seen].any()
        assert (lse[..., ~seen] == -math.inf).all()
        assert out[:, seen].abs().gt(0).all()
        assert lse[..., seen].isfinite().all()

    on_ranks(RANKS, run)


def test_the_bound_is_small() -> None:
    """A bound that grew with the inputs' size would pass anything."""
    q, k, v = operands(5)
    bf16 = [[x.bfloat16() for x in xs] for xs in (q, k, v)]
    out, lse = exact.bound(0, torch.bfloat16, 1, *bf16)
    assert out.max() < 2.0**-6
    assert lse.max() < 2.0**-12


# -------------------------------------------------------------------------------------------------------- refusals
def test_wrong_calls_say_what_is_wrong() -> None:
    q, k, v = (xs[0] for xs in operands(6, rows=4, size=1))
    ends = torch.tensor([0, 4], dtype=torch.int32)
    wrong = [
        (
            (q, k[:, :, :1].expand(1, 4, 3, D), v),
            {},
            "found \\(1, 4, 3, 12\\), wanted a number of heads that divides q's 4",
        ),
        ((q, k, v[..., :3]), {}, "v: found .* wanted \\(1, 4, 2, 12\\)"),
        ((q[0], k[0], v[0]), {}, "wanted 4 dimensions without cu_seqlens"),
        ((q, k, v), {"cu_seqlens": ends}, "wanted 3 dimensions with cu_seqlens"),
        ((q[0], k[0], v[0]), {"cu_seqlens": ends, "length": 2}, "wanted None with cu_seqlens"),
        ((q[0], k[0], v[0]), {"cu_seqlens": ends.long()}, "wanted int32"),
        ((q, k, v), {"length": 5}, "wanted at most 4"),
        ((q, k, v), {"scale": 0.0}, "wanted more than 0"),
        ((q, k, v), {"window": (-2, 0)}, "wanted at least -1"),
        ((q, k, v), {"num_comm_sms": 0, "mode": "fused"}, "wanted at least 1"),
        ((q, k, v), {"tiles": (16, 8)}, "powers of two from 16"),
        ((torch.ones(1, 1, 1, 512),) * 3, {}, "at most 256"),
    ]

    def run(world: Any) -> None:
        for tensors, keywords, said in wrong:
            with pytest.raises(pkt.PktError, match=said):
                pkt.ring_attention(*tensors, **keywords)

    on_ranks(1, run)
