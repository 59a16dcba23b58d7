"""Gradients of operators beside what the conformance suite checks: what is saved, refused, skipped and agreed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pkt
from pkt.kernels.operator import Operator, operators

from .helpers import on_ranks


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, world: Any) -> torch.Tensor:
    """A sequence-parallel MLP: x (m, k), up (n, k) and down (k, n) as of Linears."""
    hidden = pkt.all_gather_matmul(x, up.t(), epilogue="gelu", world=world)
    return pkt.matmul_reduce_scatter(hidden, down.t(), world=world)


def operands(world: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return leaf(4, 8, seed=world.rank), leaf(6, 8, seed=10 + world.rank), leaf(8, 6, seed=20 + world.rank)


def of_block(world: Any, run: Any = block) -> list[torch.Tensor]:
    mine = operands(world)
    run(*mine, world).square().sum().backward()
    return [x.grad for x in mine]


def exact(world: Any) -> list[torch.Tensor]:
    everybody = [[x.detach().double().requires_grad_() for x in xs] for xs in world.all_gather_object(operands(world))]
    x = torch.cat([xs[0] for xs in everybody])
    total = sum(torch.nn.functional.gelu(x @ up.t()) @ down.t() for _, up, down in everybody)
    total.square().sum().backward()
    return [x.grad for x in everybody[world.rank]]


def assert_like(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4), (a, b)


@pytest.mark.parametrize("seed", range(6))
def test_a_block_in_many_schedules(seed: int) -> None:
    on_ranks(3, lambda world: assert_like(of_block(world), exact(world)), seed=seed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    def again(*arguments: Any) -> Any:
        return checkpoint(block, *arguments, use_reentrant=reentrant)

    on_ranks(2, lambda world: assert_like(of_block(world, again), exact(world)), seed=1)


def test_a_graph_that_is_kept() -> None:
    def run(world: Any) -> None:
        mine = operands(world)
        loss = block(*mine, world).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_like([x.grad / 2 for x in mine], exact(world))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    on_ranks(2, run)


def penalty(mine: Any, forward: Any) -> list[torch.Tensor]:
    """Gradients of the squared gradients of `forward`."""
    first = torch.autograd.grad(forward(*mine).pow(3).sum(), mine, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), mine))


COLLECTIVES = {
    "all_gather": lambda x, w: pkt.all_gather(x.square(), dim=1, world=w),
    "reduce_scatter": lambda x, w: pkt.reduce_scatter(x.square(), world=w),
    "all_reduce": lambda x, w: pkt.all_reduce(x.square(), world=w),
    "all_to_all": lambda x, w: pkt.all_to_all(x.square(), gather=1, world=w),
    "broadcast": lambda x, w: pkt.broadcast(x.square(), 1, world=w),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_of_gradients_of_collectives(name: str) -> None:
    operator = operators()[name]
    arguments = {"all_gather": {"dim": 1}, "all_to_all": {"gather": 1}, "broadcast": {"root": 1}}.get(name, {})

    def run(world: Any) -> None:
        found = penalty([x := leaf(4, 3, seed=world.rank)], lambda x: COLLECTIVES[name](x, world))
        xs = [y.detach().double().requires_grad_() for y in world.all_gather_object(x)]
        losses = [operator.reference(r, [y.square() for y in xs], **arguments).pow(3).sum() for r in range(world.size)]
        first = torch.autograd.grad(sum(losses), xs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), xs, materialize_grads=True)
        assert_like(found, [second[world.rank]])

    on_ranks(2, run, seed=1)


def test_gradients_of_gradients_of_a_block() -> None:
    def run(world: Any) -> None:
        mine = operands(world)
        found = penalty(mine, lambda *xs: block(*xs, world))
        everybody = [[x.detach().double().requires_grad_() for x in xs] for xs in world.all_gather_object(mine)]
        leaves = [x for xs in everybody for x in xs]
        x = torch.cat([xs[0] for xs in everybody])
        total = sum(torch.nn.functional.gelu(x @ up.t()) @ down.t() for _, up, down in everybody)
        first = torch.autograd.grad(total.pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        for a, b in zip(found, second[3 * world.rank :]):
            assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max(), (a, b)

    on_ranks(2, run)


# -------------------------------------------------------------------------------------------------- what is not moved
def test_what_nobody_needs_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    call = Operator.__call__

    def counted(self: Operator, *arguments: Any, **more: Any) -> Any:
        names.append(self.name)
        return call(self, *arguments, **more)

    monkeypatch.setattr(Operator, "__call__", counted)

    def moved(world: Any, name: str, a: bool, b: bool, bias: bool) -> list[str]:
        x, w, v = leaf(4, 8).requires_grad_(a), leaf(8, 6).requires_grad_(b), leaf(6).requires_grad_(bias)
        result = getattr(pkt, name)(x, w, bias=v, world=world)
        names.clear()
        result.sum().backward()
        return list(names)

    def run(world: Any) -> None:
        assert moved(world, "all_gather_matmul", True, False, False) == ["matmul_reduce_scatter"]
        assert moved(world, "all_gather_matmul", False, True, True) == ["all_gather"]
        assert moved(world, "matmul_reduce_scatter", True, True, True) == ["all_gather_matmul_kept", "all_gather"]
        assert moved(world, "matmul_reduce_scatter", True, False, False) == ["all_gather"]
        assert moved(world, "matmul_all_reduce", True, True, False)[0] == "all_reduce"
        for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            assert moved(world, name, False, False, True) == []

    on_ranks(1, run)


def test_only_what_a_gradient_needs_is_saved() -> None:
    kept: list[tuple[int, ...]] = []

    def run(world: Any) -> None:
        a, b = leaf(4, 8), leaf(8, 6)
        for wants, shapes in (((True, False), [(8, 6)]), ((False, True), [(4, 8)])):
            kept.clear()
            a.requires_grad_(wants[0]), b.requires_grad_(wants[1])
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
                pkt.all_gather_matmul(a, b, world=world)
            assert kept == shapes

    on_ranks(1, run)


def test_a_call_without_gradients_records_nothing() -> None:
    def run(world: Any) -> None:
        x = leaf(4)
        with torch.no_grad():
            assert not pkt.all_gather(x, world=world).requires_grad
        with torch.inference_mode():
            assert not pkt.all_gather(x, world=world).requires_grad
        assert not pkt.all_gather(x.detach(), world=world).requires_grad
        found = pkt.all_gather(x, world=world)
        assert type(found.grad_fn).__name__ == "AllGatherBackward"

    on_ranks(2, run)


# ------------------------------------------------------------------------------------------------------------- refused
def refused(match: str, call: Any) -> None:
    def run(world: Any) -> None:
        before = world.heap.ledger.free_bytes
        with pytest.raises(pkt.Unsupported, match=rf"rank {world.rank}: \w+: found .*{match}"):
            call(world)
        assert world.heap.ledger.free_bytes == before

    on_ranks(2, run)


def test_a_given_output_is_refused() -> None:
    refused("out=.*leave out= away", lambda w: pkt.all_gather(leaf(4), torch.empty(8), world=w))
    refused("out=.*leave out= away", lambda w: pkt.all_reduce(leaf(4), torch.empty(4), world=w))
    refused("out=", lambda w: pkt.all_gather(torch.ones(4), leaf(8) * 2, world=w))
    ones = torch.ones(8, 2)
    refused("out=", lambda w: pkt.all_gather_matmul(leaf(4, 8), [ones] * 2, [ones] * 2, world=w))


def test_other_reductions_are_refused() -> None:
    refused("op='max', which has no gradient", lambda w: pkt.reduce_scatter(leaf(4), op="max", world=w))
    refused("op='min', which has no gradient", lambda w: pkt.all_reduce(leaf(4) * 2, op="min", world=w))


def test_sums_of_a_dtype_that_nothing_sums_are_refused() -> None:
    refused("float64, which has no gradient", lambda w: pkt.all_gather(leaf(4).double(), world=w))


def test_transforms_are_refused() -> None:
    refused("a transform of torch.func", lambda w: torch.func.grad(lambda x: pkt.all_gather(x, world=w).sum())(leaf(4)))


# --------------------------------------------------------------------------------------------------- what is agreed on
@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_need_other_gradients_are_told(warm: bool) -> None:
    def run(world: Any) -> None:
        a, b = leaf(4, 8), leaf(8, 6)
        if warm:
            pkt.all_gather_matmul(a, b, world=world)
        pkt.all_gather_matmul(a.requires_grad_(world.rank == 0), b.clone()[:, :4].contiguous(), world=world)

    with pytest.raises(pkt.CollectiveMismatch, match="requires_grad='a b'|requires_grad='a'"):
        on_ranks(2, run)


def test_a_rank_without_a_backward_pass_is_found() -> None:
    def run(world: Any) -> None:
        x = leaf(4)
        loss = pkt.all_gather(x, world=world).sum()
        if world.rank:
            loss.backward()

    with pytest.raises(pkt.PktError, match="rank 1"):
        on_ranks(2, run)


# ------------------------------------------------------------------------------------------------------- what is saved
def test_a_saved_operand_that_is_overwritten_raises() -> None:
    def run(world: Any) -> None:
        for symmetric in (False, True):
            a = pkt.ones(4, 8) if symmetric else torch.ones(4, 8)
            loss = pkt.all_gather_matmul(a, leaf(8, 6), world=world).sum()
            pkt.all_reduce(a, world=world)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    on_ranks(2, run)


def test_a_saved_operand_that_is_freed_raises() -> None:
    def run(world: Any) -> None:
        a = pkt.ones(4, 8)
        loss = pkt.all_gather_matmul(a, leaf(8, 6), world=world).sum()
        a.free()
        with pytest.raises(pkt.UseAfterFree):
            loss.backward()

    on_ranks(2, run)


def test_a_reduction_in_place_of_what_is_needed_raises() -> None:
    def run(world: Any) -> None:
        result = leaf(3).exp()  # whose backward pass needs its result
        loss = pkt.all_reduce(result, world=world).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(2, run)


def test_what_is_written_is_the_result_that_autograd_sees() -> None:
    def run(world: Any) -> None:
        x = leaf(3)
        y = x * 2
        assert pkt.all_reduce(y, world=world) is y
        assert type(y.grad_fn).__name__ == "AllReduceBackward"
        y.sum().backward()
        assert x.grad.eq(4).all()

    on_ranks(2, run)


def test_a_workspace_serves_the_backward_pass_too() -> None:
    def run(world: Any) -> None:
        a = leaf(4, 8)
        with pkt.Workspace(world) as workspace:
            before = world.heap.ledger.free_bytes
            loss = pkt.all_gather_matmul(a, torch.ones(8, 6), workspace=workspace, world=world).sum()
            loss.backward(retain_graph=True)
        assert world.heap.ledger.free_bytes == before
        with pytest.raises(pkt.Closed, match="workspace"):
            loss.backward()

    on_ranks(2, run)
