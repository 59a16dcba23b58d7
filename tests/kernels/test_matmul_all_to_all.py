"""matmul_all_to_all beyond what the registry's suite covers: attention, strides, results in place, times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pkt
from pkt.kernels import matmul_all_to_all as module
from pkt.kernels.declaration import Call
from pkt.kernels.matmul_all_to_all import forms
from pkt.kernels.operator import operators
from pkt.kernels.shared.heads import Matrix
from pkt.model.gpu import H200
from tests.kernels.helpers import on_ranks, random
from tests.kernels.launches import compile_checked, launched

PUSH: dict[str, Any] = {"mode": "push", "tiles": (16, 16, 16)}
COPY, UNFUSED = {"mode": "copy"}, {"mode": "unfused"}


# -------------------------------------------------------------------------------------------------------------- heads
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
def test_a_chain_is_attention(size: int, kv_heads: int) -> None:
    """join_heads, matmul_all_to_all, torch's attention and all_to_all_matmul: no copy, no permutation, right results
    and gradients. With 4 ranks there are fewer heads of keys than ranks."""
    b, s, k, h, d = 2, 5, 24, 2 * size, 8
    kv = kv_heads * (3 if size == 3 else 1)
    q, key, value = (random((k, n, d), torch.float32, at) / 5 for at, n in enumerate((h, kv, kv)))
    project, tokens = random((h, d, k), torch.float32, 4) / 5, random((b, size * s, k), torch.float32, 5)

    def attended(there: torch.Tensor, heads: list[int]) -> torch.Tensor:
        parts = [x.transpose(1, 2) for x in there.split(heads, 2)]
        return F.scaled_dot_product_attention(*parts, enable_gqa=heads[0] != heads[1]).transpose(1, 2)

    leaves = [x.double().requires_grad_() for x in (tokens, q, key, value, project)]
    there = torch.einsum("bsk,khd->bshd", leaves[0], torch.cat(leaves[1:4], 1))
    right = torch.einsum("bshd,hdn->bsn", attended(there, [h, kv, kv]), leaves[4])
    grads = torch.autograd.grad(right.square().sum(), leaves)

    def run(world: Any) -> tuple[Any, ...]:
        mine = [x.clone().requires_grad_() for x in (pkt.shard_sequence(tokens), q, key, value, project)]
        weight = pkt.join_heads(*mine[1:4], ranks=size)
        found = pkt.matmul_all_to_all(mine[0], weight, **PUSH)
        held = [h // size, max(kv // size, 1), max(kv // size, 1)]
        assert found.shape == (b, size * s, sum(held), d)
        out = pkt.all_to_all_matmul(attended(found, held), mine[4], mode="push", tiles=(16, 16, 16))
        out.square().sum().backward()
        assert (out.double() - pkt.shard_sequence(right)).abs().max() < 2**-17 * right.abs().max()
        return tuple(x.grad for x in mine)

    found = list(zip(*on_ranks(size, run, sms=3)))
    for x, y in zip([torch.cat(found[0], 1), *(sum(parts) for parts in found[1:])], grads, strict=True):
        assert (x.double() - y).abs().max() < 2**-16 * y.abs().max()


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    def run(world: Any) -> None:
        x, weight = torch.ones(1, 3, 8), torch.ones(8, 4, 2)
        with pytest.raises(pkt.ShapeError, match=r"weight: found \(8, 4, 2\), wanted dimension 1 divisible by 3 ranks"):
            pkt.matmul_all_to_all(x, weight)
        with pytest.raises(pkt.ShapeError, match="dimension 1 divisible by 3 ranks"):
            pkt.matmul_all_to_all(x, weight[:, :2])

    on_ranks(3, run)


# --------------------------------------------------------------------------------------------------- norm and rotation
@pytest.mark.parametrize("keywords", [PUSH | {"tiles": (16, 64, 16)}, COPY, UNFUSED], ids=["push", "copy", "unfused"])
def test_queries_and_keys_are_normed_and_rotated_as_models_do(keywords: dict[str, Any]) -> None:
    """As Qwen3 does: torch's RMSNorm of each head, then rotate_half with tables as long as a head. Two heads of queries
    and one of keys of a rank; values stay as they are. Without the norm, as Llama does."""
    s, k, d, size = 5, 12, 16, 2
    x, parts = random((2, size * s, k), torch.float32, 0), [random((k, n, d), torch.float32, n) for n in (4, 2, 2)]
    of_q, of_k = random((d,), torch.float32, 7), random((d,), torch.float32, 8)
    angles = torch.arange(size * s)[:, None] * 10.0 ** -torch.arange(d // 2)
    table = torch.cat([angles, angles], 1)[:, None].double()

    def rotated(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * table.cos() + torch.cat([-second, first], -1) * table.sin()

    def run(world: Any) -> None:
        weight = pkt.join_heads(*parts, ranks=size)
        norm = pkt.join_heads(of_q.expand(4, d), of_k.expand(2, d), torch.ones(2, d), ranks=size)
        mine, own = pkt.shard_sequence(x), angles[world.rank * s :][:s]
        q, keys, values = (
            torch.einsum("bsk,khd->bshd", x.double(), w.double()).chunk(size, 2)[world.rank] for w in parts
        )
        normed = [F.rms_norm(y, (d,), w.double(), 1e-5) for y, w in ((q, of_q), (keys, of_k))]
        for given, pair in ((norm, normed), (None, (q, keys))):
            found = pkt.matmul_all_to_all(
                mine, weight, norm=given, cos=own.cos(), sin=own.sin(), qk_heads=3, eps=1e-5, **keywords
            )
            right = torch.cat([*map(rotated, pair), values], 2)
            assert (found.double() - right).abs().max() < 1e-5 * right.abs().max()

    on_ranks(size, run, sms=3)


def test_what_cannot_be_rotated_is_refused() -> None:
    def run(world: Any) -> None:
        def call(d: int, given: str = "norm", **keywords: Any) -> None:
            tensors = {"norm": torch.ones(2, d), "cos": torch.ones(3, d // 2), "sin": torch.ones(3, d // 2)}
            named = {name: tensors[name] for name in given.split()}
            pkt.matmul_all_to_all(torch.ones(1, 3, 8), torch.ones(8, 2, d), **named, **keywords)

        free = world.heap.ledger.free_bytes
        for error, words, arguments in (
            (pkt.ShapeError, "qk_heads: found None, wanted how many heads of a rank", (16,)),
            (pkt.ShapeError, "cos and sin: found only cos, wanted both or none", (16, "cos")),
            (pkt.ShapeError, "weight: found heads of 9 elements, wanted an even number", (9,)),
            (pkt.Unsupported, "heads of 6 elements, not a power of two from 16", (6,)),
            (pkt.ShapeError, "BLOCK_N a multiple of a head's 32 elements", (32,)),
        ):
            keywords = {} if "None" in words else {"qk_heads": 1}
            with pytest.raises(error, match=words):
                call(*arguments, mode="push", tiles=(16, 16, 16), **keywords)
        assert world.heap.ledger.free_bytes == free
        with pytest.raises(pkt.Unsupported, match="qk_heads=1"):
            pkt.matmul_all_to_all(
                torch.ones(1, 3, 8, requires_grad=True), torch.ones(8, 2, 16), norm=torch.ones(2, 16), qk_heads=1
            )

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
def test_norm_and_rotation_do_not_spill(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the default tiles: 178 registers on sm_90 and 253 on sm_100, where the product alone takes 108 and 110."""

    def run(world: Any) -> None:
        x, weight, norm = (torch.empty(s, dtype=torch.bfloat16) for s in ((1, 4096, 1024), (1024, 10, 128), (10, 128)))
        cos = torch.empty(4096, 64)
        pkt.matmul_all_to_all(x, weight, norm=norm, cos=cos, sin=cos, qk_heads=4, mode="push")

    compile_checked(launched(run, 2, True, monkeypatch), arch, tmp_path)


# ------------------------------------------------------------------------------------------------------------ strides
def strided(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same weight (K, H, D) with other strides: a view of a Linear's weight, some of its columns, every other row,
    and heads behind their elements."""
    k, h, d = weight.shape
    linear = weight.flatten(1).t().contiguous()
    return {
        "linear": linear.t().unflatten(1, (h, d)),
        "columns": torch.cat((weight, weight), 1)[:, :h],
        "rows": weight.repeat_interleave(2, 0)[::2],
        "turned": weight.transpose(1, 2).contiguous().transpose(1, 2),
    }


@pytest.mark.parametrize("keywords", [PUSH, COPY, UNFUSED], ids=["push", "copy", "unfused"])
def test_weights_of_any_strides(keywords: dict[str, Any]) -> None:
    x, weight = random((1, 5, 12), torch.float32, 0), random((12, 4, 6), torch.float32, 1)

    def run(world: Any) -> None:
        right = module.reference(world.rank, [x, x], [weight, weight])
        for name, other in strided(weight).items():
            assert torch.equal(other, weight)
            found = pkt.matmul_all_to_all(x, other, **keywords)
            assert (found.double() - right).abs().max() < 1e-5, name

    on_ranks(2, run)


def test_a_linears_weight_is_not_copied() -> None:
    weights = {name: (w, Matrix.of(w, 1)) for name, w in strided(torch.ones(12, 4, 6)).items()}
    shared = {n: matrix.rows(w).data_ptr() == w.data_ptr() for n, (w, matrix) in weights.items()}
    assert shared == {"linear": True, "columns": False, "rows": False, "turned": False}
    weight, matrix = weights["linear"]
    assert matrix.transposed
    assert matrix.rows(weight) is weight, "the kernel takes its address: no view is made"
    assert Matrix.of(weight.permute(1, 2, 0), 0).rows(weight.permute(1, 2, 0)).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_ranks_that_are_late(seed: int) -> None:
    """In random order, and with one rank that runs only where no other can: a row block comes in several tiles."""
    x, weight = random((1, 17, 8), torch.float32, 0), random((8, 3, 40), torch.float32, 1)

    def run(world: Any) -> None:
        right = module.reference(world.rank, [x] * 3, [weight] * 3)
        for _ in range(2):
            assert (pkt.matmul_all_to_all(x, weight, **PUSH).double() - right).abs().max() < 1e-5

    on_ranks(3, run, seed=seed, sms=2)


# -------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("keywords", [PUSH, COPY], ids=["push", "copy"])
def test_a_symmetric_result_needs_no_inbox(keywords: dict[str, Any]) -> None:
    x, weight = random((2, 16, 8), torch.float32, 0), random((8, 4, 64), torch.float32, 1)

    def run(world: Any) -> None:
        right = module.reference(world.rank, [x, x], [weight, weight])
        for out, least, most in ((None, right.numel() * 4, 1 << 20), (pkt.empty(tuple(right.shape)), 0, 4096)):
            before = world.heap.ledger.free_bytes
            found = pkt.matmul_all_to_all(x, weight, out, **keywords)
            assert least <= before - world.heap.ledger.free_bytes <= most
            assert (found.double() - right).abs().max() < 1e-5

    on_ranks(2, run)


def test_buffers_of_a_call_in_inference_mode_serve_later_calls() -> None:
    def run(world: Any) -> bool:
        x, weight = torch.randn(1, 4, 8), torch.randn(8, 4, 2)
        with torch.inference_mode():
            first = pkt.matmul_all_to_all(x, weight, mode="unfused")
        return torch.equal(pkt.matmul_all_to_all(x.requires_grad_(), weight, mode="unfused"), first)

    assert all(pkt.launch(run, 2, device="cpu"))


# ----------------------------------------------------------------------------------------------------------- gradients
def test_the_gradient_of_x_alone_is_one_exchange_with_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the weight, too, is one exchange for both."""
    called: list[str] = []
    known = operators()
    for name in ("all_to_all", "all_to_all_matmul"):
        function = known[name].function

        def counted(*args: Any, name: str = name, function: Any = function, **keywords: Any) -> Any:
            called.append(name)
            return function(*args, **keywords)

        monkeypatch.setattr(known[name], "function", counted)

    def run(world: Any) -> None:
        x, weight = torch.ones(1, 3, 8, requires_grad=True), torch.ones(8, 2, 4)
        pkt.matmul_all_to_all(x, weight).sum().backward()
        pkt.matmul_all_to_all(x, weight.requires_grad_()).sum().backward()

    on_ranks(1, run)
    assert called == ["all_to_all_matmul", "all_to_all"]


# --------------------------------------------------------------------------------------------------------------- times
def test_the_form_by_default() -> None:
    """By the part of a rank, as large as those that were measured on 2 H200. More ranks have smaller ones."""
    found = {}
    for size, b, s, n in (
        (2, 1, 512, 5120),
        (2, 1, 511, 5120),
        (2, 4, 128, 5120),
        (8, 1, 512, 1280),
        (1, 1, 4096, 5120),
    ):
        call = Call("", SimpleNamespace(size=size), {}, {}, {}, None)  # type: ignore[arg-type]
        call.sizes = {"b": b, "s": s, "h": n // 128, "d": 128}
        found[size, b, s] = forms._default(call)
    assert [key for key, mode in found.items() if mode == "copy"] == [(2, 1, 512), (2, 4, 128)]
    assert {*found.values()} == {"copy", "unfused"}


@pytest.mark.parametrize("name", ["matmul_all_to_all", "all_to_all_matmul"])
@pytest.mark.parametrize("size", [2, 8])
def test_predicted_times(name: str, size: int) -> None:
    """Of Llama 70B with 32768 tokens: "push" and copy engines hide most of the exchange, and no form is faster than the
    product or the links. Nothing was measured, so "unfused" is taken."""
    N = 10240 if name == "matmul_all_to_all" else 8192
    key = {"M": 32768 // size, "N": N, "K": 8192, "dtype": torch.bfloat16, "size": size}
    operator = operators()[name]
    engines = "copy" if name == "matmul_all_to_all" else "gluon"
    push, copied, unfused = (operator.predicted({"mode": mode}, key, H200) for mode in ("push", engines, "unfused"))
    assert push is not None
    assert copied is not None
    assert unfused is not None
    moved = key["M"] * (N if name == "matmul_all_to_all" else 8192) * 2 * (size - 1) / size
    for found in (push, copied, unfused):
        assert found.total > max(2 * key["M"] * N * 8192 / H200.flops, moved / H200.link)
        assert found.communication >= moved / H200.link
    assert unfused.exposed > 0.9 * unfused.communication
    for found in (push, copied):
        assert found.exposed + found.sync < 0.6 * found.communication
    assert operator.forecast(key, H200).order[0] == "unfused"
