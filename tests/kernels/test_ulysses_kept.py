"""Calls of Ulysses attention whose gradients are wanted: their backward pass attends to nothing again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import gradients as recorded
from pkt.kernels.ulysses_attention import local

from .helpers import on_ranks
from .test_ulysses_attention import ENDS, RANKS, UNIT, exact_gradients, gradients, operands

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "keywords"),
    [
        (4, 1, {"causal": True}),  # one head of keys is on both ranks
        (4, 4, {"scale": 0.5}),
        (4, 2, {"causal": True, "cu_seqlens": ENDS}),
        (4, 2, {"window": (20, 9)}),
    ],
)
def test_gradients(heads: int, kv_heads: int, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.F, "scaled_dot_product_attention", None)  # which would compute attention again
    mine = operands(5, heads, kv_heads, dtype=BF16)
    if "cu_seqlens" in keywords:
        mine = [[x[0] for x in xs] for xs in mine]
    found = gradients(mine, **keywords)
    for each, right in zip(found, exact_gradients(mine, **keywords), strict=True):
        for x, y in zip(each, right, strict=True):
            assert x.dtype == BF16
            assert (x.double() - y).abs().max() <= 8 * UNIT[BF16] * y.abs().max()


def test_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention had and gave, which another call leaves as it is; and of q alone there may be a gradient."""
    grads: dict[int, list[bool]] = {}

    class Seen(recorded.Recorded):
        def __init__(self, call: Any, *more: Any) -> None:
            super().__init__(call, *more)
            grads[call.world.rank] = [grad is not None for grad in self.grads]

    monkeypatch.setattr(recorded, "Recorded", Seen)

    def run(world: Any) -> None:
        q, k, v = (xs[world.rank] for xs in operands(6, 4, 2, dtype=BF16))
        q.requires_grad_()
        kept_bytes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept_bytes.append(t.nbytes) or t, lambda t: t):
            out = pkt.ulysses_attention(q, k, v, causal=True)
        rows = q.shape[0] * q.shape[1] * world.size
        assert sorted(kept_bytes) == sorted([q.nbytes, k.nbytes, v.nbytes, q.nbytes, rows * 4 // world.size * 4])
        pkt.ulysses_attention(*(torch.randn_like(x, requires_grad=True) for x in (q, k, v)), causal=True)
        (found,) = torch.autograd.grad(out, q, out.detach())
        assert grads[world.rank] == [True, *[False] * 5]  # no zeros of their sizes are made
        (again,) = torch.autograd.grad(pkt.ulysses_attention(q, k, v, causal=True, mode="unfused"), q, out.detach())
        assert (found.float() - again.float()).abs().max() <= 8 * UNIT[BF16] * again.abs().max()

    on_ranks(RANKS, run)


def test_whose_backward_pass_finds_what_is_kept() -> None:
    """Where no form is asked for, in bf16 and fp16."""

    def run(world: Any) -> None:
        for dtype in (BF16, torch.float16, torch.float32):
            q, k, v = (xs[0].requires_grad_() for xs in operands(7, 2, 1, dtype=dtype))
            wanted = "UlyssesAttentionKept" if dtype.itemsize == 2 else "UlyssesAttention"
            assert pkt.ulysses_attention(q, k, v).grad_fn.name() == f"{wanted}Backward"
            for options in ({"mode": "unfused"}, {"heads": 1}):
                assert pkt.ulysses_attention(q, k, v, **options).grad_fn.name() == "UlyssesAttentionBackward"
            with torch.no_grad():
                assert pkt.ulysses_attention(q, k, v).grad_fn is None
            assert pkt.ulysses_attention(q.detach(), k.detach(), v.detach()).grad_fn is None
            with pytest.raises(pkt.Unsupported, match="ulysses_attention: found out=, which autograd does not record"):
                pkt.ulysses_attention(q, k, v, torch.empty_like(q))

    on_ranks(1, run)


def test_errors_name_the_function_that_was_called() -> None:
    def run(world: Any) -> None:
        q, k, v = (xs[0].requires_grad_() for xs in operands(7, 2, 1, dtype=BF16))
        with pytest.raises(pkt.ShapeError, match=f"rank {world.rank}: ulysses_attention: q: found"):
            pkt.ulysses_attention(q[:, :, :1], k, v)

    on_ranks(2, run)


def test_gradients_of_gradients_are_refused() -> None:
    def run(world: Any) -> None:
        q, k, v = (xs[world.rank].requires_grad_() for xs in operands(8, 2, 1, dtype=BF16))
        out = pkt.ulysses_attention(q, k, v)
        found = 'rank .: ulysses_attention: found create_graph=True.* with mode="unfused"'
        with pytest.raises(pkt.Unsupported, match=found):
            torch.autograd.grad(out.sum(), q, create_graph=True)

    on_ranks(RANKS, run)


@pytest.mark.parametrize("documents", [False, True])
def test_compiled(documents: bool) -> None:
    def run(world: Any) -> None:
        mine = [xs[world.rank] for xs in operands(9, 4, 2, dtype=BF16)]
        if documents:
            mine = [x[0] for x in mine]
        mine = [x.requires_grad_() for x in mine]
        ends = ENDS if documents else None
        step = lambda q, k, v: pkt.ulysses_attention(q, k, v, cu_seqlens=ends, causal=True) * 2  # noqa: E731
        wanted = torch.autograd.grad(step(*mine).float().sum(), mine)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        found = torch.autograd.grad(compiled(*mine).float().sum(), mine)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted))

    on_ranks(RANKS, run)
