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
    """(x, topk_idx, topk_weights) of a rank, on the CPU: other numbers of tokens, and tokens without an expert."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(T[rank], 2 * OWN, generator=generator, device="cpu")
    weights, idx = scores.topk(K)
    idx[0, 1] = -1
    idx[-1] = -1 if rank else idx[-1]
    return random((T[rank], H), torch.float32, rank, 0), idx, weights


def layer(rank: int, weighted: bool = True) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    x, idx, weights = operands(rank)
    factors = torch.where(idx >= 0, (idx + 1) * (weights if weighted else 1), 0).sum(1)
    return x.double() * factors[:, None]


def mine(world: Any) -> list[torch.Tensor]:
    """The operands of this rank, on its device."""
    return [x.to(world.torch_device) for x in operands(world.rank)]


def close(found: torch.Tensor, rank: int) -> bool:
    """Whether `found` is the layer's result within some roundings in fp32."""
    wanted = layer(rank)
    return bool(((found.cpu().double() - wanted).abs() <= 2.0**-20 * (1 + wanted.abs())).all())


def normal(world: Any, worst: int) -> None:
    buffer, (x, idx, weights) = Buffer(), mine(world)
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
    assert torch.equal(got[: len(sent)].cpu(), torch.stack([operands(r)[0][t] for r, t in sent]))
    assert got.shape[0] == (worst or len(sent))
    assert (got_idx[len(sent) :] == -1).all()
    assert (got_weights[got_idx < 0] == 0).all()
    assert counts == ([] if worst else [-(-int((got_idx == e).sum()) // 4) * 4 for e in range(OWN)])
    alone = buffer.dispatch(x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, num_worst_tokens=worst)
    assert alone[3] == ([] if worst else [int((got_idx == e).sum()) for e in range(OWN)])
    factors = torch.where(got_idx >= 0, (got_idx + 1 + world.rank * OWN) * got_weights, 0).sum(1)
    y, home, _ = buffer.combine(got * factors[:, None], handle, topk_weights=got_weights)
    assert close(y, world.rank)
    assert home is not None
    assert torch.equal(home, torch.where(idx >= 0, weights, 0))
    once_more, *nothing, _ = buffer.dispatch(2 * x, handle=handle)
    assert nothing == [None] * 4
    assert torch.equal(once_more[: len(sent)], 2 * got[: len(sent)])


@pytest.mark.parametrize("worst", [0, 9])
def test_a_layer(worst: int) -> None:
    on_ranks(2, lambda world: normal(world, worst), sms=2)


def low_latency(world: Any) -> None:
    buffer, (x, idx, weights), device = Buffer(low_latency_mode=True), mine(world), world.torch_device
    stats = torch.ones(OWN, dtype=torch.int32, device=device)
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
    y = got * (torch.arange(OWN, device=device) + 1 + world.rank * OWN)[:, None, None]
    out = torch.empty(T[world.rank], H, device=device)
    combined, _, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out)
    assert combined is out
    assert close(combined, world.rank)


def test_a_low_latency_layer() -> None:
    on_ranks(2, low_latency, sms=2)


def scaled(world: Any, hidden: int, groups: int) -> None:
    def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = random((T[rank], hidden), torch.float32, rank, 2).to(torch.float8_e4m3fn)
        return x, random((T[rank], groups), torch.float32, rank, 3)

    buffer, (_, idx, weights) = Buffer(), mine(world)
    x, scales = (part.to(world.torch_device) for part in tokens(world.rank))
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * OWN)
    found = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    got, got_idx, _, _, handle, _ = buffer.dispatch((x, scales), **found, topk_idx=idx, topk_weights=weights)
    sent = [(r, t) for r in range(2) for t in range(T[r]) if (operands(r)[1][t] // OWN == world.rank).any()]
    assert got_idx is not None
    assert len(got_idx) == len(sent)
    again = buffer.dispatch((x, 2 * scales), handle=handle)[0]
    for (rows, of_rows), times in ((got, 1), (again, 2)):
        assert rows.dtype == torch.float8_e4m3fn
        assert torch.equal(rows.cpu().float(), torch.stack([tokens(r)[0][t].float() for r, t in sent]))
        assert torch.equal(of_rows.cpu(), torch.stack([times * tokens(r)[1][t] for r, t in sent]))


@pytest.mark.parametrize(("hidden", "groups"), [(8, 1), (256, 2)])
def test_fp8_travels_with_its_scales(hidden: int, groups: int) -> None:
    on_ranks(2, scaled, hidden, groups, sms=2)


def quantised(world: Any) -> None:
    hidden, most = 256, 4

    def tokens(rank: int) -> torch.Tensor:
        x = random((T[rank], hidden), torch.bfloat16, rank, 4)
        x[0, :128], x[1, 128] = 0, 2**20
        return x

    buffer, (_, idx, weights), device = Buffer(), mine(world), world.torch_device
    x = tokens(world.rank).to(device)
    (got, scales), counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, 2 * OWN)
    assert got.dtype == torch.float8_e4m3fn
    assert tuple(scales.shape) == (OWN, 2 * most, 2)
    assert scales.stride()[1:] == (1, 2 * most)
    for e in range(OWN):
        own = world.rank * OWN + e
        sent = [tokens(r)[t] for r in range(2) for t, row in enumerate(operands(r)[1]) for k in row if k == own]
        assert counts[e] == len(sent)
        if sent:
            exact = torch.stack(sent).double().view(-1, 2, 128)
            scale = exact.abs().amax(2).clamp(min=1e-4) / 448
            found = scales[e, : len(sent)].cpu().double()
            assert ((found - scale).abs() <= 2.0**-23 * scale).all()
            values = got[e, : len(sent)].cpu().double().view(-1, 2, 128) * found[:, :, None]
            # e4m3 has 3 bits behind the point, and its least number is 2^-9.
            limit = (2.0**-4 + 2.0**-21) * exact.abs() + 2.0**-10 * scale[:, :, None]
            assert ((values - exact).abs() <= limit).all()
    y = torch.zeros(OWN, 2 * most, hidden, dtype=torch.bfloat16, device=device)
    combined = buffer.low_latency_combine(y, idx, weights, handle)[0]
    assert tuple(combined.shape) == (T[world.rank], hidden)
    assert not combined.any()


def test_low_latency_fp8_is_quantised_by_128_elements() -> None:
    """A group of zeros, and one whose least element is far below its greatest, too."""
    on_ranks(2, quantised, sms=2)


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "a layer": (normal, 0),
    "a layer with room": (normal, 9),
    "low latency": (low_latency,),
    "scales": (scaled, 256, 2),
    "quantised": (quantised,),
}
"""What the GPU tests run, too: functions and their arguments."""


def test_refuses() -> None:
    def run(world: Any) -> None:
        buffer, (x, idx, weights) = Buffer(world), operands(0)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        found = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        handle = buffer.dispatch(x, **found)[4]
        packed, _, few, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
        rest, narrow, none = (idx, weights, few), x.to(torch.float8_e4m3fn), weights[:, :0]
        wrongs = [
            (pkt.DtypeError, "x", lambda: buffer.dispatch((x, x), **found)),
            (pkt.DtypeError, "x", lambda: buffer.dispatch((narrow,), **found)),
            (pkt.DtypeError, r"x\[1\]", lambda: buffer.dispatch((narrow, narrow), **found)),
            (pkt.ShapeError, r"x\[1\]", lambda: buffer.dispatch((narrow, x), **found)),
            (pkt.ShapeError, "x", lambda: buffer.dispatch(x[0], **found)),
            (pkt.DtypeError, "is_token_in_rank", lambda: buffer.dispatch(x)),
            (pkt.ShapeError, "is_token_in_rank", lambda: buffer.dispatch(x, None, None, None, idx, per_expert)),
            (pkt.ShapeError, "num_tokens_per_expert", lambda: buffer.dispatch(x, None, None, None, in_rank, [1, 2])),
            (pkt.ShapeError, "expert_alignment", lambda: buffer.dispatch(x, **found, expert_alignment=0)),
            (pkt.ShapeError, "num_worst_tokens", lambda: buffer.dispatch(x, **found, num_worst_tokens=-1)),
            (pkt.ShapeError, "num_worst_tokens", lambda: buffer.dispatch(x, **found, num_worst_tokens=True)),
            (pkt.ShapeError, "topk_weights", lambda: buffer.dispatch(x, **found, topk_idx=idx)),
            (pkt.ShapeError, "topk_weights", lambda: buffer.dispatch(x, **found, topk_idx=idx, topk_weights=x)),
            (pkt.ShapeError, "K from 1", lambda: buffer.dispatch(x, **found, topk_idx=idx[:, :0], topk_weights=none)),
            (pkt.DtypeError, "is_token_in_rank", lambda: buffer.dispatch(x, None, None, None, [True], per_expert)),
            (pkt.ShapeError, "expert_alignment", lambda: buffer.dispatch(x, **found, expert_alignment=1.5)),
            (pkt.ShapeError, "the handle's 4 tokens", lambda: buffer.dispatch(x[:2], handle)),
            (pkt.DtypeError, "handle: found LowLatencyHandle", lambda: buffer.dispatch(x, few)),
            (pkt.ShapeError, "num_experts", lambda: buffer.get_dispatch_layout(idx, 0)),
            (pkt.ShapeError, "num_experts", lambda: buffer.get_dispatch_layout(idx, "4")),
            (pkt.DtypeError, "topk_idx", lambda: buffer.get_dispatch_layout(x, 4)),
            (pkt.ShapeError, "topk_idx", lambda: buffer.get_dispatch_layout(idx[0], 4)),
            (pkt.ShapeError, "x", lambda: buffer.combine(x[:1], handle)),
            (pkt.DtypeError, "handle: found NoneType", lambda: buffer.combine(x, None)),
            (pkt.DtypeError, "topk_weights", lambda: buffer.combine(x, handle, topk_weights=[1])),
            (pkt.Unsupported, "bias", lambda: buffer.combine(x, handle, bias=x)),
            (pkt.ShapeError, "use_fp8", lambda: buffer.low_latency_dispatch(x, idx, 4, 4)),
            (pkt.DtypeError, "x", lambda: buffer.low_latency_dispatch(narrow, idx, 4, 4)),
            (pkt.Unsupported, "use_ue8m0", lambda: buffer.low_latency_dispatch(x, idx, 4, 4, use_ue8m0=True)),
            (pkt.ShapeError, "tokens_per_rank", lambda: buffer.low_latency_dispatch(x, idx, 3, 4, use_fp8=False)),
            (pkt.ShapeError, "_tokens_per_rank", lambda: buffer.low_latency_dispatch(x, idx, 4.0, 4, use_fp8=False)),
            (pkt.ShapeError, "stats", lambda: buffer.low_latency_dispatch(x, idx, 4, 4, [0] * 4, use_fp8=False)),
            (pkt.ShapeError, "x", lambda: buffer.low_latency_combine(packed[:1], *rest)),
            (pkt.ShapeError, "topk_idx", lambda: buffer.low_latency_combine(packed, idx[:1], weights, few)),
            (pkt.ShapeError, "topk_weights", lambda: buffer.low_latency_combine(packed, idx, weights[:, :1], few)),
            (pkt.DtypeError, "handle: found Handle", lambda: buffer.low_latency_combine(packed, idx, weights, handle)),
            (pkt.Unsupported, "zero_copy", lambda: buffer.low_latency_combine(packed, *rest, zero_copy=True)),
        ]  # fmt: skip
        for error, word, call in wrongs:
            with pytest.raises(error, match=word):
                call()
        assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 0

    on_ranks(1, run)


def test_dispatch_refuses_more_ranks_than_a_token_can_have_experts() -> None:
    def run(world: Any) -> None:
        buffer, idx = Buffer(world), torch.zeros(1, 1, dtype=torch.int64)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 17)
        with pytest.raises(pkt.ShapeError, match="rank .*: dispatch: group: found 17 ranks, wanted at most 16"):
            buffer.dispatch(torch.ones(1, 8), num_tokens_per_expert=per_expert, is_token_in_rank=in_rank)

    on_ranks(17, run)


def test_set_num_sms_reaches_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", None)
    Buffer.set_num_sms(1)
    on_ranks(2, lambda world: normal(world, 9), sms=2)


def test_with_num_worst_tokens_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CUDA graph can capture the call."""

    def waits(*_: Any) -> None:
        raise AssertionError("the host reads from the device")

    def run(world: Any) -> None:
        buffer, (x, idx, weights) = Buffer(), operands(world.rank)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * OWN)
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "__int__", "__bool__"):
                patch.setattr(torch.Tensor, name, waits)
            patch.setattr(type(world), "all_gather_object", waits)
            result = buffer.dispatch(
                x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
                topk_weights=weights, num_worst_tokens=9,
            )  # fmt: skip
        assert result[3] == []

    on_ranks(1, run, sms=2)


def test_too_few_worst_tokens() -> None:
    """Each rank sends all its tokens to rank 1, and one to rank 0."""

    def run(world: Any) -> None:
        buffer, x = Buffer(), operands(world.rank)[0]
        in_rank = torch.zeros(len(x), 2, dtype=torch.bool)
        in_rank[:, 1] = in_rank[0, 0] = True
        told = {"is_token_in_rank": in_rank, "num_tokens_per_expert": in_rank.sum(0)}
        rows, *_, handle, _ = buffer.dispatch(x, **told, num_worst_tokens=6)
        assert handle is not None
        if world.rank == 0:
            handle.check()
        else:
            assert not rows.any()
            with pytest.raises(pkt.ShapeError, match="rank 1: dispatch: num_worst_tokens: found 6, wanted at least 7"):
                handle.check()
        buffer.dispatch(x, **told, num_worst_tokens=7)[4].check()

    on_ranks(2, run, sms=2)
