"""The backward pass of ring attention beyond what the registry's suite covers: against torch's gradients of the whole
sequence in fp64, in every layout and mask, to the last bit in every schedule, and registers of compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.ring_attention import exact, exact_backward
from pkt.kernels.ring_attention.backward import rows_kernel
from pkt.kernels.ring_attention.ring_attention_backward import OPERATOR as BACKWARD
from pkt.kernels.ring_attention.ring_attention_backward import tiles_for
from pkt.kernels.ring_attention.sequence import LAYOUTS
from pkt.language.inspect import compile_only
from tests.kernels.helpers import on_ranks
from tests.kernels.launches import SHARED_LIMIT, all_launched
from tests.kernels.machine_code import resources
from tests.kernels.test_ring_attention import operands

TILES = {"tiles": (16, 16), "key_tiles": (16, 16)}
SETTINGS = {**TILES, "num_comm_sms": 1, "chunk": 16}
ENDS = torch.tensor([0, 3, 3, 20, 60], dtype=torch.int32)
"""One document ends in the middle of a rank, one crosses ranks, one is empty, and rows behind the last see nothing."""


def whole_gradients(everybody: list[list[torch.Tensor]], grads: list[Any], documents: Any, told: dict[str, Any]) -> Any:
    """torch's gradients in fp64 of the sum of all ranks' losses: [q, k, v][rank]. grads: of each rank's results."""
    leaves = [[x.detach().double().requires_grad_() for x in xs] for xs in everybody]
    loss: Any = 0
    for rank, (dout, dlse) in enumerate(grads):
        out, lse = exact.reference(rank, *leaves, documents, **told)
        loss = loss + (out * dout.double()).sum() + (torch.where(lse.isfinite(), lse, 0.0) * dlse).sum()
    loss.backward()
    return [[x.grad for x in xs] for xs in leaves]


def few(everybody: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Two heads of queries that share one of keys."""
    return [[x[:, :, :n] for x in xs] for xs, n in zip(everybody, (2, 1, 1))]


def check(
    everybody: list[list[torch.Tensor]], dtype: torch.dtype = torch.float32, cu_seqlens: torch.Tensor | None = None,
    with_lse: bool = True, mode: Any = None, launches: int = 1, **told: Any,
) -> None:  # fmt: skip
    """Gradients through autograd are within the bound, which has the errors of the forward pass in it."""
    everybody = [[x.to(dtype) for x in xs] for xs in everybody]
    size, generator = len(everybody[0]), torch.Generator().manual_seed(9)
    documents = None if cu_seqlens is None else [cu_seqlens] * size
    results = [exact.reference(r, *everybody, documents, **told) for r in range(size)]
    roundings = (2, 3) if mode == "parts" else (1, 1)
    off = [exact.bound(r, dtype, roundings[0], *everybody, documents, **told) for r in range(size)]
    dout = [torch.randn(out.shape, generator=generator).to(dtype) for out, _ in results]
    dlse = [torch.randn(lse.shape, generator=generator) * with_lse for _, lse in results]
    wanted = whole_gradients(everybody, list(zip(dout, dlse)), documents, told)
    given = (dout, *everybody, *map(list, zip(*results)), dlse)

    def run(world: Any) -> None:
        rank = world.rank
        mine = [xs[rank].clone().requires_grad_() for xs in everybody]
        for _ in range(launches):
            for x in mine:
                x.grad = None
            found = pkt.ring_attention(*mine, cu_seqlens=cu_seqlens, return_lse=with_lse, mode=mode, **told)
            if with_lse:
                torch.autograd.backward(found, (dout[rank], dlse[rank]))
            else:
                found.backward(dout[rank])
        told_bound = {**told, "cu_seqlens": documents, "off": tuple(map(list, zip(*off)))}
        limits = exact_backward.bound(rank, dtype, roundings[1], *given, **told_bound)
        for name, x, right, limit in zip("qkv", mine, wanted, limits, strict=True):
            assert x.grad is not None
            error = (x.grad.double() - right[rank]).abs()
            assert (error <= limit).all(), (name, error.max(), (error - limit).max())

    on_ranks(size, run, sms=3)


# -------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize(
    ("size", "told"),
    [
        (1, {"causal": True}),
        (3, {"causal": True, "layout": "zigzag"}),
        (2, {"window": (9, 20), "scale": 0.5}),
        (2, {"length": 53, "layout": "zigzag"}),
    ],
)
def test_gradients_of_layouts_and_masks(size: int, told: dict[str, Any]) -> None:
    everybody = operands(1, rows=37, size=size)
    check(everybody if size == 1 else few(everybody), **told)


@pytest.mark.parametrize(("rows", "size"), [(1, 2), (7, 3), (20, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_torch(rows: int, size: int, layout: Any) -> None:
    """Through autograd, which takes the form of the forward call; launched twice, over what the first one left."""
    everybody = few(operands(5, rows=rows, batch=2, size=size))
    check(everybody, causal=True, layout=layout, scale=0.7, mode="parts", with_lse=False, launches=2)
    check(everybody, torch.bfloat16, layout=layout, mode="parts", with_lse=False)


def test_autograd_takes_the_form_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form "parts" where lse has no gradient; there the other form has none of its plans made."""
    asked: list[str] = []
    for name, form in BACKWARD.forms.items():
        plan = form.plan
        noted = dataclasses.replace(form, plan=lambda call, plan=plan: asked.append(call.mode) or plan(call))
        monkeypatch.setitem(BACKWARD.forms, name, noted)
    everybody = few(operands(6, rows=4))
    check(everybody, mode="parts", with_lse=False)
    check(everybody, mode="parts", with_lse=True)
    assert asked == ["parts"] * 2 + ["fused"] * 2


def test_torch_takes_no_gradient_of_lse() -> None:
    def run(world: Any) -> None:
        x, lse = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 2)
        with pytest.raises(pkt.Unsupported, match="rank 0: .*found dlse, which torch's kernel does not take"):
            pkt.ring_attention_backward(x, x, x, x, x, lse, dlse=lse, mode="parts")

    on_ranks(1, run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_documents(layout: str) -> None:
    packed = [[x[0] for x in xs] for xs in few(operands(2, rows=37))]
    check(packed, cu_seqlens=ENDS, causal=layout == "zigzag", layout=layout)


def test_gradients_of_bf16() -> None:
    """Also where one key gets everything, and where the keys of a rank are far below those of another."""
    q, k, v = few(operands(3, rows=18))
    check([q, k, v], torch.bfloat16, causal=True, with_lse=False)
    check([[8 * x for x in q], [8 * x for x in k], v], torch.bfloat16, causal=True)
    check([q, [k[0] - 30, k[1] + 30], v], torch.bfloat16, causal=True)


def test_no_form_needs_symmetric_memory_on_one_rank() -> None:
    def run(world: Any) -> None:
        q, k, v = (xs[world.rank].requires_grad_() for xs in few(operands(8, rows=20)))
        found = []
        for mode in ("fused", "copy", "unfused", "parts"):
            out, lse = pkt.ring_attention(q, k, v, causal=True, mode=mode, return_lse=True, world=world.alone)
            (grad,) = torch.autograd.grad(out.square().sum(), q)
            found.append((out, lse, grad))
        assert all(torch.allclose(x, y, atol=1e-4) for each in found[1:] for x, y in zip(each, found[0]))
        assert not world.heap.live

    on_ranks(2, run)


def test_the_reference_is_torchs_gradient() -> None:
    """The formula of the backward pass, in fp64, of exact results."""
    everybody = operands(4, rows=9, size=3)
    told: dict[str, Any] = {"causal": True, "layout": "zigzag", "scale": 0.7, "window": (5, -1), "length": 25}
    results = [exact.reference(r, *everybody, **told) for r in range(3)]
    grads = [(torch.randn_like(out), torch.randn_like(lse)) for out, lse in results]
    dout, dlse = map(list, zip(*grads))
    wanted = whole_gradients(everybody, grads, None, told)
    for rank in range(3):
        found = exact_backward.reference(rank, dout, *everybody, *map(list, zip(*results)), dlse, **told)
        for x, right in zip(found, wanted):
            assert torch.allclose(x, right[rank], rtol=1e-9, atol=1e-12)


def test_the_bound_is_small() -> None:
    everybody = [[x.bfloat16() for x in xs] for xs in operands(5)]
    results = [exact.reference(r, *everybody) for r in range(2)]
    dout = [torch.ones_like(out) for out, _ in results]
    limits = exact_backward.bound(0, torch.bfloat16, 1, dout, *everybody, *map(list, zip(*results)))
    assert all(limit.max() < 2.0**-5 for limit in limits)


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = operands(6, rows=4)

    def run(world: Any) -> None:
        mine = [xs[world.rank].clone().requires_grad_() for xs in (q, k, v)]
        out, lse = pkt.ring_attention(*mine, length=3, return_lse=True)
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.where(lse.isfinite(), 1.0, math.nan)))
        seen = torch.arange(4) + 4 * world.rank < 3
        for x in mine:
            assert not x.grad[:, ~seen].any()
            assert x.grad.isfinite().all()
            assert x.grad[:, seen].any() == seen.any()

    on_ranks(2, run)


def test_a_sequence_without_rows_has_gradients() -> None:
    def run(world: Any) -> None:
        mine = [torch.ones(1, 0, 1, 8, requires_grad=True) for _ in range(3)]
        pkt.ring_attention(*mine).sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in mine)

    on_ranks(2, run)


def test_the_numbers_of_rows_that_see_nothing_are_zero() -> None:
    """A kernel may multiply them with weights that are zero, and zero times NaN is none."""

    def run(world: Any) -> None:
        out, dout = torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2, 8)
        lse, dlse = torch.rand(1, 2, 4), torch.rand(1, 2, 4)
        lse[..., 1], dlse[..., 1] = -torch.inf, torch.nan
        rows = torch.empty(2, 1, 2, 4)
        rows_kernel[(1,)](out, dout, lse, dlse, rows, 8, 4, 4, 2, 8, 8, 8, False, 1)
        assert not rows[..., 1].any()
        delta = (out * dout).sum(3).transpose(1, 2) - dlse
        assert torch.allclose(rows[:, :, :, 2:], torch.stack((lse / math.log(2), delta))[..., 2:])

    on_ranks(1, run)


def test_what_the_forward_pass_got_must_not_change() -> None:
    q, k, v = (xs[0].clone().requires_grad_() for xs in operands(6, rows=4, size=1))

    def run(world: Any) -> None:
        keys = k * 1
        out = pkt.ring_attention(q, keys, v)
        keys.data.mul_(1)
        with torch.no_grad():
            keys.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        with pytest.raises(pkt.Unsupported, match="has no gradient"):
            torch.autograd.grad(pkt.ring_attention(q, k, v).sum(), q, create_graph=True)

    on_ranks(1, run)


@pytest.mark.parametrize("shapes", [[(1, 1, 40), (1, 2, 40)], [(2, 1, 32), (2, 2, 16)]])
def test_calls_with_other_tasks_have_another_queue(shapes: list[tuple[int, int, int]]) -> None:
    """One batch and then two, on as many programs: on one rank, which has no chunks to count, and with as many chunks
    in all."""

    def run(world: Any) -> None:
        for _, batch, rows in 2 * shapes:
            x, lse = torch.ones(batch, rows, 1, 16), torch.full((batch, 1, rows), math.log(rows * world.size) + 4.0)
            dq, dk, dv = pkt.ring_attention_backward(x, x, x, x, x, lse, **{**SETTINGS, "tiles": (32, 16)})
            assert not dq.any()  # dout @ v.T is delta everywhere
            assert not dk.any()
            assert torch.allclose(dv, x)

    on_ranks(shapes[0][0], run, sms=2)


# ------------------------------------------------------------------------------------------------------ to the last bit
def test_every_run_is_the_same_to_the_last_bit() -> None:
    """Whatever the schedule and the number of programs, launch after launch: parts are added in a fixed order."""
    q, k, v = ([x.bfloat16() for x in xs] for xs in few(operands(7, rows=18, size=3)))
    lse = [torch.full((1, 2, 18), 3.0) for _ in q]
    first: dict[int, list[torch.Tensor]] = {}

    def run(world: Any) -> None:
        mine = [xs[world.rank] for xs in (q, q, k, v, q, lse)]
        for _ in range(2):
            found = pkt.ring_attention_backward(*mine, layout="zigzag", **SETTINGS)
            right = first.setdefault(world.rank, [x.clone() for x in found])
            assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))

    for seed, sms in ((0, 4), (1, 4), (2, 1), (9, 2)):
        on_ranks(3, run, seed=seed, sms=sms)


# ---------------------------------------------------------------------------------------------------------- refusals
def test_wrong_calls_say_what_is_wrong() -> None:
    q, k, v = (xs[0] for xs in operands(6, rows=4, size=1))
    lse = torch.zeros(1, 4, 4)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((q[:, :2], q, k, v, q, lse), {}, "dout: found .* wanted \\(1, 4, 4, 12\\)"),
        ((q, q, k, v, q[..., :3], lse), {}, "result: found .* wanted \\(1, 4, 4, 12\\)"),
        ((q, q, k, v, q, lse[:, :3]), {}, "lse: found \\(1, 3, 4\\), wanted \\(1, 4, 4\\)"),
        ((q, q, k, v, q, lse.bfloat16()), {}, "lse: found .* wanted float32"),
        ((q, q, k, v, q, lse), {"dlse": lse[:, :, :2]}, "dlse: found \\(1, 4, 2\\), wanted \\(1, 4, 4\\)"),
        ((q, q.bfloat16(), k, v, q, lse), {}, "q: found .* wanted float32"),
        ((q, q, k[:, :, :1].expand(1, 4, 3, 12), v, q, lse), {}, "a number of heads that divides q's 4"),
        ((q, q, k, v, q, lse), {"key_tiles": (16, 8)}, "powers of two from 16"),
        ((q, q, k, v, q, lse), {"num_comm_sms": 0}, "wanted at least 1"),
    ]

    def run(world: Any) -> None:
        for tensors, keywords, said in wrong:
            with pytest.raises(pkt.PktError, match=said):
                pkt.ring_attention_backward(*tensors, **keywords)

    on_ranks(1, run)


# ------------------------------------------------------------------------------------------------------- compilation
@pytest.mark.parametrize("arch", [90, 100])
def test_nothing_is_spilled(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the default tiles, of two parts of the sequence and heads that share keys."""
    tiles, key_tiles = tiles_for(128, 2, arch >= 100)

    def run(world: Any) -> None:
        q, k = torch.empty(1, 4096, 8, 128).bfloat16(), torch.empty(1, 4096, 2, 128).bfloat16()
        pkt.ring_attention_backward(
            q.clone(), q, k, k.clone(), q.clone(), torch.empty(1, 8, 4096), causal=True, layout="zigzag", tiles=tiles,
            key_tiles=key_tiles,
        )  # fmt: skip

    launches = all_launched(run, 2, False, monkeypatch)
    assert len(launches) == 3
    for launch in launches[1:]:
        compiled = compile_only(launch.kernel, *launch.args, arch=arch, **launch.options)
        usage = resources(compiled, tmp_path)
        assert usage["STACK"] == usage["LOCAL"] == 0, (launch.kernel, usage)
        assert compiled.metadata.shared <= SHARED_LIMIT
