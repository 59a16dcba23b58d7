"""torch.compile(mode="reduce-overhead"): compiled code in CUDA graphs of torch's, that no eager call has prepared."""

from __future__ import annotations

from typing import Any

import torch

import pkt
from tests.gpu.run import launch, on_ranks
from tests.kernels.test_traced import Block, gradients

STEPS = 6  # torch runs the code once, then records it, then replays the graph


def recorded(world: Any) -> int:
    """How many CUDA graphs torch has recorded on this rank; it has left none out."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_manager(world.torch_device.index, create_if_none_exists=False)
    return 0 if manager is None else nodes(manager.roots)


def nodes(lists: dict[Any, list[Any]]) -> int:
    """Of torch's tree of graphs: those in the lists, and what was recorded behind them."""
    return sum(1 + nodes(node.children) for each in lists.values() for node in each)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4 * (1 + b.abs().max()), (a - b).abs().max()


def trained(world: Any) -> int:
    """A Llama layer, forwards and backwards, on other tokens in each step."""
    torch.manual_seed(world.rank)
    block, x = Block(), torch.randn(4, 16, requires_grad=True)
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for _ in range(STEPS):
        with torch.no_grad():
            x.normal_()
        torch.compiler.cudagraph_mark_step_begin()
        found = [one.clone() for one in gradients(compiled, x, block.parameters())]
        assert_close(found, gradients(block, x, block.parameters()))
    return recorded(world)


def attended(world: Any) -> int:
    """Operators whose plans keep tensors beside the symmetric heap."""
    compiled = torch.compile(
        lambda q, k, v: (pkt.ring_attention(q, k, v), pkt.ulysses_attention(q, k, v)),
        mode="reduce-overhead", fullgraph=True,
    )  # fmt: skip
    for _ in range(STEPS):
        inputs = [torch.randn(1, 16, 4, 16, dtype=torch.bfloat16) for _ in range(3)]
        torch.compiler.cudagraph_mark_step_begin()
        ring, ulysses = (one.clone().float() for one in compiled(*inputs))
        q, k, v = inputs
        assert torch.equal(ring, pkt.ring_attention(q, k, v).float())
        assert (ring - ulysses).abs().max() <= 2**-6 * (1 + ring.abs().max())
    return recorded(world)


@on_ranks(1, 2, 4)
def test_a_llama_layer_is_recorded(ranks: int) -> None:
    assert min(launch(trained, ranks, timeout=120.0)) >= 2  # forwards and backwards


@on_ranks(1, 2, 4)
def test_attention_is_recorded(ranks: int) -> None:
    assert min(launch(attended, ranks, timeout=120.0)) >= 1
