"""all_gather_matmul(keep="whole"): the same results and gradients, from an A that was gathered once and kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels import gradients
from pkt.kernels.all_gather_matmul import host, kept

from .gluon_compiling import chosen_by
from .helpers import on_ranks


def operands(world: Any, shard: str, k: int, seed: int = 0) -> list[torch.Tensor]:
    """a, b and a bias; small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(10 * seed + world.rank)
    shapes = (6, k), (k if shard == "rows" else k * world.size, 8), (8,)
    return [torch.randint(-4, 5, shape, generator=generator).float().requires_grad_() for shape in shapes]


def exact(world: Any, tensors: list[torch.Tensor], shard: str) -> list[torch.Tensor]:
    """The result and the gradients of its sum of squares on all ranks, in fp64."""
    every = [[t.double().requires_grad_() for t in ts] for ts in world.all_gather_object([t.detach() for t in tensors])]
    whole = torch.cat([a for a, _, _ in every], dim=0 if shard == "rows" else 1)
    results = [whole @ b + bias for _, b, bias in every]
    sum(y.square().sum() for y in results).backward()
    return [results[world.rank].detach(), *(t.grad for t in every[world.rank])]


@pytest.mark.parametrize(("ranks", "k"), [(2, 8), (3, 7)])
@pytest.mark.parametrize("shard", ["rows", "columns"])
def test_gradients(shard: str, ranks: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "all_gather", None)  # the backward pass gathers nothing

    grads: dict[int, list[bool]] = {}

    class Seen(gradients.Recorded):
        def __init__(self, call: Any, *more: Any) -> None:
            super().__init__(call, *more)
            grads[call.world.rank] = [grad is not None for grad in self.grads]

    monkeypatch.setattr(gradients, "Recorded", Seen)

    def run(world: Any) -> None:
        tensors, others = (operands(world, shard, k, seed) for seed in range(2))
        kept: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t)
        with hooks:
            y = pkt.all_gather_matmul(*tensors[:2], bias=tensors[2], shard=shard, keep="whole")
        assert sorted(kept) == sorted([tensors[1].nbytes, world.size * tensors[0].nbytes])
        pkt.all_gather_matmul(*others[:2], shard=shard, keep="whole")  # which fills the same inbox
        y.square().sum().backward()
        assert grads[world.rank] == [True, False]  # no zeros are made of A's size
        found = [y.detach(), *(t.grad for t in tensors)]
        for one, wanted in zip(found, exact(world, tensors, shard), strict=True):
            assert torch.equal(one.double(), wanted)

    on_ranks(ranks, run)


def test_an_epilogue_and_no_gradient_of_b() -> None:
    def run(world: Any) -> None:
        both = []
        for keep in ("shard", "whole"):
            a, b, bias = operands(world, "rows", 8)
            y = pkt.all_gather_matmul(a, b, bias=bias, epilogue="swiglu", keep=keep)
            y.sum().backward()
            both.append((y.detach(), a.grad, b.grad, bias.grad))
            assert pkt.all_gather_matmul(a, b.detach(), mode="push", keep=keep).grad_fn is not None  # keeps nothing
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-4) for one, other in zip(*both))

    on_ranks(2, run)


def test_compiled() -> None:
    def run(world: Any) -> None:
        a, b, _ = operands(world, "rows", 8)
        step = lambda a, b: pkt.all_gather_matmul(a, b, epilogue="silu", keep="whole") * 2  # noqa: E731
        wanted = torch.autograd.grad(step(a, b).sum(), (a, b))
        found = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(a, b).sum(), (a, b))
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-4) for one, other in zip(found, wanted))

    on_ranks(2, run)


def test_what_is_refused() -> None:
    def run(world: Any) -> None:
        a, b, _ = operands(world, "rows", 8)
        for name, given in (("several b", [b, b]), ("tiles", b)):
            more = {"tiles": (16, 16, 16)} if name == "tiles" else {}
            match = f'rank {world.rank}: all_gather_matmul: found {name}, and keep="whole": leave {name} away'
            with pytest.raises(pkt.Unsupported, match=match):
                pkt.all_gather_matmul(a, given, keep="whole", **more)
        with pytest.raises(pkt.PktError, match="all_gather_matmul: found mode 'push': wanted 'copy' or 'gluon'"):
            pkt.all_gather_matmul(a, b, mode="push", keep="whole")
        with pytest.raises(pkt.ShapeError, match=r"b: found \(8, 7\), wanted an even number of columns"):
            pkt.all_gather_matmul(a, b[:, :7].detach().clone().requires_grad_(), epilogue="swiglu", keep="whole")
        with pytest.raises(pkt.PktError, match="all_gather_matmul: found keep 'all': wanted 'shard'"):
            pkt.all_gather_matmul(a, b, keep="all")

    on_ranks(2, run)


def test_the_default_form_on_gpus(h200s: Any) -> None:
    """By predicted times, of the forms that can keep what they gather."""
    a, b = torch.empty(2048, 8192, dtype=torch.bfloat16), torch.empty(8192, 5120, dtype=torch.bfloat16)
    for rows, taken in ((8, "unfused"), (2048, "gluon")):
        call = partial(pkt.all_gather_matmul, a[:rows], b.requires_grad_(), keep="whole", world=h200s(0, 2))
        assert chosen_by(call)["mode"] == taken


@pytest.mark.parametrize("widths", [(8, 8), (8, 5), (8, 0), (0, 0)])
def test_ranks_may_differ_in_columns(widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of matmul_reduce_scatter, whose backward pass this is, may in k. Then nothing is overlapped."""
    taken: list[str] = []
    for mode, form in kept.OPERATOR.forms.items():
        plan = lambda call, mode=mode, form=form: taken.append(mode) or form.plan(call)  # noqa: E731
        monkeypatch.setitem(kept.OPERATOR.forms, mode, replace(form, plan=plan))

    def run(world: Any) -> None:
        generator = torch.Generator().manual_seed(world.rank)
        k = widths[world.rank]
        a, b = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((12, k), (k, 8)))
        grads = []
        for recorded in (False, True):
            x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
            y = pkt.matmul_reduce_scatter(x, w)
            grads.append(torch.autograd.grad(y.square().sum(), (x, w), create_graph=recorded))
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)
        if widths != (8, 8):
            with pytest.raises(pkt.Unsupported, match="ranks with different numbers of columns, or none"):
                kept.all_gather_matmul_kept(torch.zeros(4, 8), torch.zeros(8, k), mode="copy")

    on_ranks(2, run)
    assert set(taken) == {"copy" if widths == (8, 8) else "unfused"}
