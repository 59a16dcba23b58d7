"""Ulysses attention beyond what the registry's suite covers: groups of heads, documents, hard inputs, gradients."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.ring_attention import forms as ring
from pkt.kernels.ring_attention import rules as ring_rules
from pkt.kernels.ulysses_attention import forms, groups, local, rules
from pkt.kernels.ulysses_attention.heads import heads_of, is_group
from tests.kernels.helpers import UNIT, on_ranks

from .launches import compile_checked, launched

RANKS, ROWS, D = 2, 21, 12
SMALL = {"mode": "push", "tiles": (16, 16), "chunk": 16, "num_comm_sms": 3}  # a group has two pieces
COPY = {"mode": "copy"}
ENDS = torch.tensor([0, 3, 3, 20, 31], dtype=torch.int32)  # one crosses the ranks, one is empty, some rows have none


def operands(
    seed: int, heads: int, kv_heads: int, size: int = RANKS, batch: int = 1, dtype: torch.dtype = torch.float32,
    d: int = D,
) -> list[list[torch.Tensor]]:  # fmt: skip
    """q, k and v of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(batch, ROWS, n, d, generator=generator).to(dtype) for _ in range(size)]
        for n in (heads, kv_heads, kv_heads)
    ]  # fmt: skip


def check(everybody: list[list[torch.Tensor]], symmetric: bool = False, launches: int = 1, **keywords: Any) -> None:
    """Results of all ranks are within the bound, launch after launch. symmetric: `out` is, else it is new."""
    q, k, v = everybody
    told = {n: x for n, x in keywords.items() if n in ("causal", "window", "scale")}
    documents = None if keywords.get("cu_seqlens") is None else [keywords["cu_seqlens"]] * len(q)

    def run(world: Any) -> None:
        rank = world.rank
        right = forms.reference(rank, q, k, v, documents, **told)
        (limit,) = forms.bound(rank, q[rank].dtype, 1, q, k, v, documents, **told)
        out = pkt.empty(tuple(q[rank].shape), dtype=q[rank].dtype) if symmetric else None
        for _ in range(launches):
            found = pkt.ulysses_attention(q[rank], k[rank], v[rank], out, **keywords)
            off = (found.double() - right).abs()
            assert (off <= limit).all(), (off.max(), (off - limit).max())

    on_ranks(len(q), run, sms=4)


# ---------------------------------------------------------------------------------------------------------- heads
def test_each_head_finds_its_keys() -> None:
    for size, queries, kv_heads in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 6), (1, 2, 3, 8, 24)):
        heads = size * queries
        if heads % kv_heads:
            continue
        held = heads_of(heads, kv_heads, size)
        assert size * held.keys == held.repeats * kv_heads
        for rank, i in itertools.product(range(size), range(queries)):
            sent = rank * held.keys + i // held.sharing
            assert sent // held.repeats == (rank * queries + i) // (heads // kv_heads)
        for n in (n for n in range(1, queries + 1) if is_group(n, held)):
            cut = groups.groups_of(held, n)
            assert [i for group in cut for i in group.queries] == list(range(queries))
            assert [j for group in cut if group.first for j in group.keys] == list(range(held.keys))
            assert all({i // held.sharing for i in group.queries} == set(group.keys) for group in cut)
        if kv_heads % size == 0 or size % kv_heads == 0:  # no rank gets a head of keys twice
            assert held.keys == max(kv_heads // size, 1)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "group", "symmetric"),
    [
        (2, 8, 2, 1, False),  # four groups share a head of keys, which came with the first
        (2, 8, 4, 4, True),  # a group has two heads of keys
        (3, 6, 2, 2, False),  # one rank needs two heads of keys, the others one
        (4, 8, 2, None, True),  # fewer heads of keys than ranks
    ],
)
@pytest.mark.parametrize("keywords", [SMALL, COPY], ids=["push", "copy"])
def test_groups_of_heads(
    size: int, heads: int, kv_heads: int, group: int | None, symmetric: bool, keywords: dict[str, Any]
) -> None:
    batch = 2 if size == 3 else 1
    check(operands(1, heads, kv_heads, size, batch), symmetric, batch, causal=size == 3, heads=group, **keywords)


def test_heads_that_make_no_group_are_refused() -> None:
    def run(world: Any) -> None:
        q, k, v = (xs[0] for xs in operands(2, 12, 3))
        wrong = (3, "wanted a divisor of 6 and a divisor or a multiple of 2"), (0, "wanted at least 1")
        for (heads, said), mode in itertools.product(wrong, ("push", "copy")):
            with pytest.raises(pkt.ShapeError, match=f"heads: found {heads}, {said}"):
                pkt.ulysses_attention(q, k, v, mode=mode, heads=heads)
        with pytest.raises(pkt.ShapeError, match="q: found .*, wanted a number of heads that 2 ranks divide"):
            pkt.ulysses_attention(q[:, :, :3], k, v)
        with pytest.raises(pkt.ShapeError, match="wanted a number of heads that divides q's 12"):
            pkt.ulysses_attention(q, torch.cat((k, k[:, :, :2]), 2), torch.cat((k, k[:, :, :2]), 2))

    on_ranks(2, run)


def test_groups_by_default() -> None:
    """At most GROUPS, of one head of keys or several."""
    for heads, kv_heads, group in ((128, 128, 8), (64, 8, 4), (8, 8, 1), (24, 2, 2), (26, 26, 13)):
        call = Call("", SimpleNamespace(size=2), {}, {}, {}, None)
        call.sizes = {"h": heads, "g": kv_heads}
        assert rules.pushed_heads(call) == group


def test_programs_begin_their_tasks_together() -> None:
    """Where tasks are equal, and a head's keys and values have more bytes than the L2 cache holds."""
    assert [rules.is_long(planned(2, 64, 64, positions)) for positions in (32768, 65536)] == [False, True]
    for told in ({"causal": True}, {"window": (9, 9)}, {"cu_seqlens": ENDS}):
        assert not rules.is_long(planned(2, 64, 64, 65536, **told))


def test_small_groups_and_batches_travel_together() -> None:
    """In copies of JOIN bytes of queries."""
    for positions, heads, batches, group, joined in (
        (4096, 64, 4, 4, 1), (8192, 32, 1, 2, 1), (1024, 32, 1, 16, 1), (512, 32, 16, 16, 2), (512, 32, 1, 16, 1),
        (64, 2, 3, 1, 3),
    ):  # fmt: skip
        call = planned(2, heads, heads // 2, positions)
        call.sizes["b"] = batches
        call.settings = {"heads": rules.gluon_heads(call)}
        assert (call["heads"], rules.joined_batches(call)) == (group, joined)


def test_forms_in_turn() -> None:
    """None pushes into memory that another has left without a meeting of the ranks."""
    everybody = [[x[:, :3] for x in xs] for xs in operands(8, 4, 2)]
    right = [forms.reference(rank, *everybody) for rank in range(RANKS)]

    def run(world: Any) -> None:
        mine = [xs[world.rank] for xs in everybody]
        for options in (COPY, {"mode": "unfused"}, COPY, SMALL, COPY):
            found = pkt.ulysses_attention(*mine, **options)
            assert torch.allclose(found.double(), right[world.rank], atol=1e-4)

    for seed in (0, 3):
        on_ranks(RANKS, run, seed=seed)


# -------------------------------------------------------------------------------------------------------- results
def planned(size: int, heads: int, kv_heads: int, positions: int, **arguments: Any) -> Call:
    """A call in bf16 with D = 128, of `positions` in all."""
    q = torch.empty(1, positions // size, heads, 128, dtype=torch.bfloat16, device="meta")
    named = {"causal": False, "window": None, **arguments}
    world, tensors = (
        SimpleNamespace(size=size, torch_device="cpu"),
        {"q": q, "cu_seqlens": named.pop("cu_seqlens", None)},
    )
    call = Call("", world, tensors, named, {}, None)  # type: ignore[arg-type]
    call.sizes = {"b": 1, "s": positions // size, "h": heads, "g": kv_heads, "d": 128}
    return call


def test_the_form_by_default() -> None:
    """By predicted time, so that the first exchange and the last way home are short and the groups are few."""
    long = planned(2, 128, 128, 16384)
    assert rules.default(long) == "copy"
    best = rules.default_heads(long)
    assert 1 < best < 64
    assert rules.seconds_copied(long, best) < min(rules.seconds_copied(long, n) for n in (1, 64))
    assert rules.default(planned(2, 128, 128, 16384, cu_seqlens=ENDS)) == "unfused"
    assert rules.default(planned(2, 128, 128, 16384, window=(9, 0))) == "unfused"
    assert rules.default(planned(1, 64, 64, 16384)) == "unfused"  # nothing to exchange
    assert rules.default(planned(8, 64, 8, 1024)) == "unfused"  # many copies of little
    empty = planned(2, 128, 128, 0)
    assert (rules.default(empty), rules.default_heads(empty)) == ("unfused", 1)
    empty.given["heads"] = 2
    assert rules.default(empty) == "copy"


def test_the_form_by_default_where_gluon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was measured on 2 H200."""
    monkeypatch.setattr(ring_rules, "missing_anywhere", lambda world: "")
    for named in ({"cu_seqlens": ENDS}, {"window": (9, 0)}):
        assert rules.default(planned(2, 32, 8, 32768, causal=True, **named)) == "gluon"
        assert rules.default(planned(1, 32, 8, 32768, causal=True, **named)) == "unfused"
    assert all(rules.default(planned(2, 128, 128, positions)) == "gluon" for positions in (16384, 65536))
    assert rules.default_heads(planned(2, 128, 128, 65536)) == 4, "whose last waves are not full"
    for positions in (8192, 32768):
        causal = planned(2, 32, 8, positions, causal=True)
        assert rules.default(causal) == "gluon"
        assert rules.seconds_copied(causal, rules.default_heads(causal)) < rules.seconds_unfused(causal)
    assert rules.default(planned(8, 64, 8, 1024)) == "unfused"


@pytest.mark.parametrize("keywords", [SMALL, COPY, {"mode": "unfused"}], ids=["push", "copy", "unfused"])
def test_documents_of_any_lengths(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention, which would need masks, has no part in it."""
    monkeypatch.setattr(local.F, "scaled_dot_product_attention", None)
    packed = [[x[0] for x in xs] for xs in operands(3, 4, 2)]
    check(packed, cu_seqlens=ENDS, causal=True, launches=2, **keywords)
    check(packed, cu_seqlens=ENDS, window=(5, 2), **keywords)
    check(operands(3, 4, 2, batch=2), window=(5, 2), **keywords)


def test_where_torch_needs_masks() -> None:
    for causal, window, masked in (
        (False, None, False), (True, None, False), (False, (-1, 0), False), (False, (30, 30), False),
        (True, (30, -1), False), (False, (29, -1), True), (True, (5, -1), True), (False, (-1, 1), True),
    ):  # fmt: skip
        assert local.Local(31, causal, window, None).is_masked(None) == masked, (causal, window)
    assert local.Local(31, False, None, None).is_masked(ENDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_that_break_a_careless_softmax(dtype: torch.dtype) -> None:
    """Scores of some thousands, of which one key gets everything; scores that are all equal; and keys of one rank whose
    scores are far below or above those of the other."""
    q, k, v = operands(4, 2, 2)
    for hard in ([[64 * x for x in q], [64 * x for x in k]], [[0 * x for x in q], k], [q, [k[0] - 100, k[1] + 100]]):
        check([[x.to(dtype) for x in xs] for xs in (*hard, v)], causal=True, **SMALL)


def test_padding_may_be_nan_in_a_push() -> None:
    """As memory that nobody has written may be: the result is the one beside padding of zeros."""
    ends = torch.tensor([0, 5, 13], dtype=torch.int32)

    def run(world: Any) -> None:
        drawn = torch.Generator().manual_seed(world.rank)
        parts = torch.randn(3, 8, 4, 8, generator=drawn)
        found = []
        for padding in (0.0, float("nan")):
            parts[:, max(13 - 8 * world.rank, 0) :] = padding
            found.append(pkt.ulysses_attention(*parts.clone(), cu_seqlens=ends, mode="push", tiles=(16, 16)))
        assert torch.equal(*found)

    on_ranks(2, run, sms=2)


# ------------------------------------------------------------------------------------------------------ gradients
def gradients(
    everybody: list[list[torch.Tensor]], cu_seqlens: torch.Tensor | None = None, **keywords: Any
) -> list[list[torch.Tensor]]:  # fmt: skip
    """Those of q, k and v of all ranks, of losses whose gradients are the ranks' q, from two backward passes alike."""

    def run(world: Any) -> list[torch.Tensor]:
        rank, found = world.rank, []
        for _ in range(2):
            leaves = [xs[rank].clone().requires_grad_() for xs in everybody]
            out = pkt.ulysses_attention(*leaves, cu_seqlens=cu_seqlens, **keywords)
            out.backward(everybody[0][rank])
            found.append([x.grad for x in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*found))
        return found[0]

    return on_ranks(len(everybody[0]), run, sms=3)


def exact_gradients(
    everybody: list[list[torch.Tensor]], cu_seqlens: torch.Tensor | None = None, **keywords: Any
) -> list[list[torch.Tensor]]:  # fmt: skip
    leaves = [[x.double().requires_grad_() for x in xs] for xs in everybody]
    size = len(leaves[0])
    documents = None if cu_seqlens is None else [cu_seqlens] * size
    outs = [forms.reference(rank, *leaves, documents, **keywords) for rank in range(size)]
    sum((out * x.detach()).sum() for out, x in zip(outs, leaves[0])).backward()
    return [[xs[rank].grad for xs in leaves] for rank in range(size)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "keywords"),
    [
        (4, 1, torch.float32, {"causal": True}),  # the gradients of one head of keys come from both ranks
        (4, 2, torch.float32, {"window": (20, 9), "cu_seqlens": ENDS}),  # in several parts
        (4, 1, torch.bfloat16, {"window": (9, 4), "scale": 0.5}),
    ],
)
def test_gradients_of_a_push(
    heads: int, kv_heads: int, dtype: torch.dtype, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MASK", 600)
    mine = operands(5, heads, kv_heads, dtype=dtype)
    if "cu_seqlens" in keywords:
        mine = [[x[0] for x in xs] for xs in mine]
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused form on CPUs approximates, by how much depends on the processor
        all_found = gradients(mine, **SMALL, **keywords)
    for found, right in zip(all_found, exact_gradients(mine, **keywords), strict=True):
        for x, y in zip(found, right, strict=True):
            assert x.dtype == dtype
            # A few roundings of weights, of their gradients and of results, each of numbers up to the greatest.
            assert (x.double() - y).abs().max() <= 8 * UNIT[dtype] * y.abs().max()


@pytest.mark.parametrize("keywords", [{"cu_seqlens": ENDS, "causal": True}, {"window": (9, 4), "scale": 0.5}])
def test_gradients_by_the_kernels(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Gluon runs, torch has no part in those of documents and windows."""
    gluon = pytest.importorskip("pkt.kernels.ring_attention.gluon")
    from .test_gluon_ring_backward import with_plain_kernels

    def planned(call: Call, plan: Any) -> Any:
        return ring._attention(call, plan, "gathered", 2)

    started = with_plain_kernels(monkeypatch)
    monkeypatch.setattr(gluon, "planned_attention", planned)
    monkeypatch.setattr(local.F, "scaled_dot_product_attention", None)
    mine = operands(7, 4, 2, dtype=torch.bfloat16, d=64)
    if "cu_seqlens" in keywords:
        mine = [[x[0] for x in xs] for xs in mine]
    all_found = gradients(mine, mode="unfused", **keywords)
    assert len(started) == 2 * RANKS
    for found, right in zip(all_found, exact_gradients(mine, **keywords), strict=True):
        for x, y in zip(found, right, strict=True):
            assert (x.double() - y).abs().max() <= 8 * UNIT[torch.bfloat16] * y.abs().max()


def test_gradients_of_nothing() -> None:
    def run(world: Any) -> None:
        q, k, v = (torch.ones(1, 3, n, 4, requires_grad=True) for n in (0, 1, 1))
        pkt.ulysses_attention(q, k, v).sum().backward()
        assert not k.grad.any()
        assert v.grad.shape == v.shape

    on_ranks(2, run)


def test_gradients_of_gradients() -> None:
    def run(world: Any) -> None:
        mine = [xs[world.rank].requires_grad_() for xs in operands(6, 2, 1)]
        first = torch.autograd.grad(pkt.ulysses_attention(*mine).pow(2).sum(), mine, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), mine)
        everybody = world.all_gather_object([x.detach() for x in mine])
        leaves = [[x.double().requires_grad_() for x in xs] for xs in zip(*everybody)]
        flat = [x for xs in leaves for x in xs]
        loss = sum(forms.reference(rank, *leaves).pow(2).sum() for rank in range(world.size))
        again = torch.autograd.grad(loss, flat, create_graph=True)
        right = torch.autograd.grad(sum(g.square().sum() for g in again), flat)[world.rank :: world.size]
        for x, y in zip(found, right, strict=True):
            assert (x.double() - y).abs().max() <= 2.0**-14 * y.abs().max()

    on_ranks(2, run)


# ---------------------------------------------------------------------------------------------------- compilation
@pytest.mark.parametrize("arch", [90, 100])
def test_large_heads_fit_into_registers(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the tiles of this GPU. The registry's suite compiles smaller heads."""

    def run(world: Any) -> None:
        q, k = (torch.empty(2, 1024, n, 128, dtype=torch.bfloat16) for n in (16, 4))
        call = Call("", world, {"q": q}, {}, {}, None)
        call.sizes = {"d": 128}
        tiles = forms.tiles_on((arch // 10, 0), call)
        pkt.ulysses_attention(q, k, k.clone(), causal=True, mode="push", tiles=tiles)

    compile_checked(launched(run, 2, True, monkeypatch), arch, tmp_path)
