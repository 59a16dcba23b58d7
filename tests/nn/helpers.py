"""Shared by the tests of modules: an unsplit model in fp64, and how near a split one in fp32 must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pkt

PRODUCTS, TERMS = 12, 32
"""Products in a row, forwards and backwards, and terms of a sum in them, at most: each rounds TERMS times in fp32."""
BOUND = PRODUCTS * TERMS * 2.0**-24


def on_ranks(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(world, *args)` on simulated ranks, with the race detector."""
    return pkt.launch(fn, ranks, device="cpu", args=args, heap="64MiB", sms=4, races=True)


def near(found: torch.Tensor, exact: torch.Tensor, what: str = "", least: float = 0.0) -> None:
    """least: what the largest element counts as at least, for gradients that cancel, as of a bias of keys."""
    assert found.shape == exact.shape, (what, found.shape, exact.shape)
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp_min(least)
    assert error <= BOUND, f"{what}: off by {error:.2g} of the largest element, allowed {BOUND:.2g}"


def part(whole: torch.Tensor, like: torch.Tensor, world: Any) -> torch.Tensor:
    """This rank's part of a tensor: of the dimension in which `like` is smaller."""
    for dim in range(whole.ndim):
        if whole.shape[dim] != like.shape[dim]:
            return whole.chunk(world.size, dim)[world.rank]
    return whole


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """With grouped heads."""

    def __init__(self, features: int, heads: int, kv_heads: int, bias: bool = False) -> None:
        super().__init__()
        self.head = features // heads
        wide = [heads * self.head, kv_heads * self.head, kv_heads * self.head]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(features, n, bias=bias) for n in wide)
        self.o_proj = nn.Linear(features, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        each = [w(x).view(b, s, -1, self.head).transpose(1, 2) for w in (self.q_proj, self.k_proj, self.v_proj)]
        seen = functional.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(hidden, features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, features: int = 16) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(features, eps=1e-5), nn.RMSNorm(features, eps=1e-5)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


def whole_block() -> Block:
    """Not split, the same on every rank, with norms that differ from one."""
    torch.manual_seed(3)
    block = Block(Attention(16, 8, 4, bias=True), MLP(16, 24))
    for norm in (block.before, block.between):
        nn.init.normal_(norm.weight)
    return block


def gradients(module: nn.Module, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result, and the gradients of its sum with other weights for each element."""
    x = x.detach().requires_grad_()
    result = module(x)
    loss = (result * scale).square().sum()
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [x, *named.values()])
    return {"result": result.detach(), **dict(zip(["x", *named], found))}
