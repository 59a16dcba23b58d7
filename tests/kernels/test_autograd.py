"""Operators beside autograd: nothing is recorded, and a backward pass that needs what they overwrote raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Call
from pkt.kernels.shared import products

from .helpers import on_ranks


def overwrites_a_result(world: Any) -> torch.Tensor:
    result = torch.ones(3, requires_grad=True).exp()  # the backward pass of exp needs its result
    return pkt.all_reduce(result, mode="low_latency", world=world)


def overwrites_an_operand(world: Any) -> torch.Tensor:
    gathered = pkt.all_gather(pkt.ones(4, 4), pkt.empty(4 * world.size, 4))
    product = gathered.plain() @ torch.ones(4, 4, requires_grad=True)
    with torch.no_grad():
        pkt.all_gather(pkt.zeros(4, 4), gathered)
    return product


def overwrites_a_view(world: Any) -> torch.Tensor:
    x = pkt.ones(8)
    product = x * torch.ones(8, requires_grad=True)
    pkt.broadcast(x[4:], 1)
    return product


@pytest.mark.parametrize("forward", [overwrites_a_result, overwrites_an_operand, overwrites_a_view])
def test_a_backward_pass_that_needs_what_was_overwritten_raises(forward: Any) -> None:
    def run(world: Any) -> None:
        product = forward(world)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    on_ranks(2, run)


def test_ranks_agree_whether_a_result_is_empty() -> None:
    """Whether or not one of them has nothing to multiply or to attend to."""

    def main(world: Any) -> None:
        for rows, columns in ((0, 4), (2, 0), (2, 4)):
            k = 8 * world.rank
            a, b = (torch.zeros(shape, requires_grad=True) for shape in ((2 * rows, k), (k, columns)))
            pkt.matmul_reduce_scatter(a, b, world=world).sum().backward()
            assert a.grad.count_nonzero() == b.grad.count_nonzero() == 0
        q, cache = torch.zeros(0, 1, 2, 16), torch.zeros(2 * world.rank, 4, 1, 16)
        table, lens = (torch.zeros(0, 1, dtype=torch.int32) for _ in range(2))
        out, lse = pkt.flash_decode(q, cache, cache, table, lens, world=world)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])

    pkt.launch(main, ranks=2, device="cpu")


def test_an_empty_product_has_the_gradient_of_its_bias() -> None:
    def run(world: Any) -> None:
        bias = torch.ones(4, requires_grad=True)
        given = {"bias": bias, "world": world}
        found = pkt.all_gather_matmul(torch.ones(4, 0), torch.ones(0, 4), **given)
        found.sum().backward()
        assert bias.grad.tolist() == [8.0] * 4
        trained = torch.zeros(8, 4, requires_grad=True)
        with torch.no_grad():
            assert pkt.all_gather_matmul(torch.ones(4, 0), torch.ones(0, 4), trained, **given) is trained
        assert torch.equal(trained, torch.ones(8, 4))

    on_ranks(2, run)


def test_a_trained_output_that_no_descriptor_reaches_is_filled() -> None:
    """The Gluon forms copy their result to such an output."""

    def plan(call: Call) -> Any:
        return lambda a, b, out, bias: out.detach().fill_(3)

    trained = torch.zeros(33)[1:].view(4, 8).requires_grad_()
    assert trained.is_leaf
    assert trained.data_ptr() % 16
    tensors = {"a": torch.ones(4, 8), "b": torch.ones(8, 8), "out": trained}
    launch = products.fitted(plan, out=True)(Call("test", None, tensors, {}, {}, None))
    assert launch(torch.ones(4, 8), torch.ones(8, 8), trained, None) is trained
    assert trained.eq(3).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_leaf_that_requires_grad_is_not_overwritten(symmetric: bool) -> None:
    """As torch's mul_ refuses it: its gradient would be that of the value before."""

    def run(world: Any) -> None:
        x = (pkt.ones(4) if symmetric else torch.ones(4)).requires_grad_()
        for overwrite in (pkt.all_reduce, pkt.broadcast):
            with pytest.raises(pkt.Unsupported, match="a leaf that requires grad.*call it under torch.no_grad"):
                overwrite(x, world=world)
        assert x.sum().item() == 4
        with torch.no_grad():
            assert pkt.all_reduce(x, world=world).sum().item() == 8

    on_ranks(2, run)


VIEWS = {  # of a tensor that requires grad, to which torch lets nobody write, and what the error says
    "of a leaf": (lambda x: x[:2], "a view of a leaf that requires grad"),
    "one of several": (lambda x: (x * 1).split(2)[0], "one of several views"),
    "of an element": (lambda x: (x * 1).unbind()[0], "one of several views"),
}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("view", "said"), VIEWS.values(), ids=VIEWS)
def test_a_view_that_torch_does_not_write_to_is_not_overwritten(view: Any, said: str, symmetric: bool) -> None:
    def run(world: Any) -> None:
        x = (pkt.ones(4) if symmetric else torch.ones(4)).requires_grad_()
        for overwrite in (pkt.all_reduce, pkt.broadcast):
            part = view(x)
            with pytest.raises(pkt.Unsupported, match=rf"rank {world.rank}: {overwrite.__name__}: found .*{said}"):
                overwrite(part, world=world)
            assert part.eq(1).all()
            overwrite(part.clone(), world=world).sum().backward()
            with torch.no_grad():
                overwrite(part.clone(), world=world)

    on_ranks(2, run)


@pytest.mark.timeout(60)
def test_a_symmetric_tensor_with_a_history_is_reduced_in_place() -> None:
    def run(world: Any) -> None:
        x, buffer = torch.ones(4, requires_grad=True), pkt.empty(4)
        buffer.copy_(x * 3)
        assert pkt.all_reduce(buffer, world=world).eq(6).all()
        buffer.sum().backward()
        assert x.grad is not None
        assert x.grad.eq(6).all()

    on_ranks(2, run)


def test_in_inference_mode() -> None:
    """Tensors have no version there."""

    def run(world: Any) -> None:
        with torch.inference_mode():
            x = torch.ones(3)
            for factor in (2, 4):
                assert pkt.all_reduce(x, mode="low_latency", world=world).eq(factor).all()

    on_ranks(2, run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_with_torchs_negative_bit(ranks: int) -> None:
    """As the imaginary part of a conjugate has. With one element it is contiguous."""

    def main(world: Any) -> None:
        a, b = torch.ones(ranks, 4, requires_grad=True), torch.ones(4, 1)
        y = pkt.matmul_reduce_scatter(a, b) if ranks > 1 else pkt.all_gather_matmul(a, b)
        y.register_hook(lambda grad: seen.append(grad.is_neg()))
        torch.complex(torch.zeros_like(y), y).conj().sum().imag.backward()
        assert a.grad.tolist() == [[-1.0] * 4] * ranks

    seen: list[bool] = []
    pkt.launch(main, ranks=ranks, device="cpu")
    assert seen == [True] * ranks
