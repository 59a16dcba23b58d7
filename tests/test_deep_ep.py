"""DeepEP's names: a layer written for DeepEP gives what its formula says, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.deep_ep import Buffer
from tests.kernels.helpers import on_ranks, random

T, H, K, OWN = (4, 3), 8, 2, 2


def operands(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, topk_idx, topk_weights) of a rank: other numbers of tokens, and tokens without an expert."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(T[rank], 2 * OWN, generator=generator)
    weights, idx = scores.topk(K)
    idx[0, 1] = -1
    idx[-1] = -1 if rank else idx[-1]
    return random((T[rank], H), torch.float32, rank, 0), idx, weights


def layer(rank: int, weighted: bool = True) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    x, idx, weights = operands(rank)
    factors = torch.where(idx >= 0, (idx + 1) * (weights if weighted else 1), 0).sum(1)
    return x.double() * factors[:, None]


def normal(world: Any, worst: int, again: bool = False) -> None:
    buffer, (x, idx, weights) = Buffer(), operands(world.rank)
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, 2 * OWN)
    assert per_rank.tolist() == [int(((idx >= 0) & (idx // OWN == r)).any(1).sum()) for r in range(2)]
    assert per_expert.tolist() == [int((idx == e).any(1).sum()) for e in range(2 * OWN)]
    got, got_idx, got_weights, counts, handle, event = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
        topk_weights=weights, expert_alignment=4, num_worst_tokens=worst, previous_event=event, async_finish=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert got_idx is not None
    assert got_weights is not None
    assert handle is not None
    sent = [(r, t) for r in range(2) for t in range(T[r]) if (operands(r)[1][t] // OWN == world.rank).any()]
    assert torch.equal(got[: len(sent)], torch.stack([operands(r)[0][t] for r, t in sent]))
    assert got.shape[0] == (worst or len(sent))
    assert (got_idx[len(sent) :] == -1).all()
    assert (got_weights[got_idx < 0] == 0).all()
    assert counts == [-(-int((got_idx == e).sum()) // 4) * 4 for e in range(OWN)]
    factors = torch.where(got_idx >= 0, (got_idx + 1 + world.rank * OWN) * got_weights, 0).sum(1)
    y, home, _ = buffer.combine(got * factors[:, None], handle, topk_weights=got_weights)
    assert ((y.double() - layer(world.rank)).abs() <= 2.0**-20 * (1 + layer(world.rank).abs())).all()
    assert home is not None
    assert torch.equal(home, torch.where(idx >= 0, weights, 0))
    once_more, *nothing, _ = buffer.dispatch(2 * x, handle=handle)
    assert nothing == [None] * 4
    assert torch.equal(once_more[: len(sent)], 2 * got[: len(sent)])


@pytest.mark.parametrize("worst", [0, 9])
def test_a_layer(worst: int) -> None:
    on_ranks(2, lambda world: normal(world, worst), sms=2)


def test_a_low_latency_layer() -> None:
    def run(world: Any) -> None:
        buffer, (x, idx, weights) = Buffer(low_latency_mode=True), operands(world.rank)
        stats = torch.ones(OWN, dtype=torch.int32)
        got, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, 4, 2 * OWN, cumulative_local_expert_recv_stats=stats, use_fp8=False, return_recv_hook=True
        )
        hook()
        event.current_stream_wait()
        assert tuple(got.shape) == (OWN, 8, H)
        assert counts.tolist() == [
            sum(int((operands(r)[1] == world.rank * OWN + e).sum()) for r in range(2)) for e in range(OWN)
        ]
        assert torch.equal(stats, counts + 1)
        y = got * (torch.arange(OWN) + 1 + world.rank * OWN)[:, None, None]
        out = torch.empty(T[world.rank], H)
        combined, _, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out)
        assert combined is out
        wanted = layer(world.rank)
        assert ((combined.double() - wanted).abs() <= 2.0**-20 * (1 + wanted.abs())).all()

    on_ranks(2, run, sms=2)


def test_refuses() -> None:
    def run(world: Any) -> None:
        buffer, (x, idx, weights) = Buffer(world), operands(0)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        found = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        handle = buffer.dispatch(x, **found)[4]
        packed, _, few, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
        rest = idx, weights, few
        wrongs = [
            (pkt.DtypeError, "x", lambda: buffer.dispatch((x, x), **found)),
            (pkt.ShapeError, "x", lambda: buffer.dispatch(x[0], **found)),
            (pkt.DtypeError, "is_token_in_rank", lambda: buffer.dispatch(x)),
            (pkt.ShapeError, "is_token_in_rank", lambda: buffer.dispatch(x, None, None, None, idx, per_expert)),
            (pkt.ShapeError, "num_experts", lambda: buffer.get_dispatch_layout(idx, 0)),
            (pkt.DtypeError, "topk_idx", lambda: buffer.get_dispatch_layout(x, 4)),
            (pkt.ShapeError, "topk_idx", lambda: buffer.get_dispatch_layout(idx[0], 4)),
            (pkt.ShapeError, "x", lambda: buffer.combine(x[:1], handle)),
            (pkt.Unsupported, "bias", lambda: buffer.combine(x, handle, bias=x)),
            (pkt.Unsupported, "use_fp8", lambda: buffer.low_latency_dispatch(x, idx, 4, 4)),
            (pkt.ShapeError, "tokens_per_rank", lambda: buffer.low_latency_dispatch(x, idx, 3, 4, use_fp8=False)),
            (pkt.ShapeError, "x", lambda: buffer.low_latency_combine(packed[:1], *rest)),
            (pkt.Unsupported, "zero_copy", lambda: buffer.low_latency_combine(packed, *rest, zero_copy=True)),
        ]  # fmt: skip
        for error, word, call in wrongs:
            with pytest.raises(error, match=word):
                call()
        assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 0

    on_ranks(1, run)


def test_set_num_sms_reaches_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", None)
    Buffer.set_num_sms(1)
    on_ranks(2, lambda world: normal(world, 9), sms=2)
