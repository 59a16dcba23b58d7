"""Benchmark of a layer of experts in bf16: 256 experts, 8 of them a token, 7168 -> 2048 -> 7168, with swiglu.

    python -m benchmarks.moe --ranks 2                      one run with all baselines
    python -m benchmarks.moe --ranks 2 --sizes "skewed"     some cases
    python -m benchmarks.moe --device cpu --quick           check in the simulator; time nothing

"T = 4096" are the tokens of all ranks. They choose experts at random, or skewed: by Zipf's law. "products alone" are
both grouped products and the activation, over the rows that pkt's dispatch brings. They exchange nothing, so their
result is not checked; neither are dispatch and combine alone. "torch._grouped_mm alone" is the same with torch's
product. "NCCL + torch._grouped_mm" sorts the pairs of token and expert, sends a row for each pair, and waits on the
host for the counts. Variants "with gradients" also run the backward pass, of x, the weights of the tokens, w1 and w2.
"captured" is a replayed CUDA graph. "dispatch_matmul + matmul_combine" is the layer with its products joined to
dispatch and combine: "push" in a launch each, "unfused" in two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pkt
from benchmarks._case import Case, captured, normal, routed
from benchmarks._command import main
from pkt.kernels.dispatch.rules import leaving
from pkt.kernels.shared.tile_product import finished

TITLE = "A layer of experts, bf16"
EXPERTS, CHOSEN, H, F = 256, 8, 7168, 2048
TOKENS = (128, 256, 1024, 4096, 8192, 16384)
FUSED = tuple(f"dispatch_matmul + matmul_combine, {mode}" for mode in ("push", "unfused"))
PKT = ("pkt moe", "pkt moe, with gradients", *(f"{name}{more}" for name in FUSED for more in ("", ", with gradients")))
ALONE = ("products alone", "torch._grouped_mm alone", "dispatch alone", "combine alone")
NCCL = ("NCCL + torch._grouped_mm", "NCCL + torch._grouped_mm, with gradients")


def variants(device: str, quick: bool) -> list[str]:
    return [*PKT[:2], FUSED[0]] if device == "cpu" else [*ALONE, *NCCL, "pkt moe, captured", *PKT]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    if quick:
        return {"T = 6, skewed": {"T": 6, "experts": 4, "chosen": 2, "H": 16, "F": 8, "skewed": True}}
    sizes: dict[str, dict[str, Any]] = {f"T = {T}, random": {"T": T} for T in TOKENS}
    return sizes | {f"T = {T}, skewed": {"T": T, "skewed": True} for T in (1024, 8192)}


def case(
    world: Any, T: int, experts: int = EXPERTS, chosen: int = CHOSEN, H: int = H, F: int = F, skewed: bool = False
) -> Case:  # fmt: skip
    size, device = world.size, world.torch_device
    own, each = experts // size, T // size
    x = normal((each, H), 1000 + world.rank, device)
    idx, weights = routed(each, experts, chosen, world.rank, device, skewed)
    mine = [_expert(world.rank * own + e, H, F, device) for e in range(own)]
    w1, w2 = (torch.stack(ws) for ws in zip(*mine))
    del mine

    def exact() -> torch.Tensor:
        """Expert by expert, in fp32, with no communication."""
        out = torch.zeros(each, H, device=device)
        for e in range(experts):
            t, k = (idx == e).nonzero(as_tuple=True)
            if len(t):
                up, down = (w.float() for w in _expert(e, H, F, device))
                y = finished(x[t].float() @ up, None, "swiglu") @ down
                out.index_add_(0, t, weights[t, k, None] * y)
        return out

    leaves = [tensor.detach().requires_grad_() for tensor in (x, weights, w1, w2)]
    layers: dict[str, Callable[..., torch.Tensor]] = {
        "pkt moe": lambda x, weights, w1, w2: pkt.moe(x, idx, weights, w1, w2, world=world)
    }
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    room = max(1, size * idx.numel())

    def fused(mode: str) -> Callable[..., torch.Tensor]:
        def layer(x: Any, weights: Any, w1: Any, w2: Any) -> torch.Tensor:
            more = {"mode": mode, "world": world}
            there, hidden = pkt.dispatch_matmul(x, idx, weights, w1, max_tokens=room, clear=False, **more)
            hidden = pkt.grouped_activation(hidden, there.offsets, clear=False, world=world)
            return pkt.matmul_combine(hidden, w2, there, tokens_per_rank=each, **more)

        return layer

    layers |= {name: fused(mode) for name, mode in zip(FUSED, ("push", "unfused"))}
    if device.type == "cuda":
        layers["NCCL + torch._grouped_mm"] = lambda x, weights, w1, w2: with_nccl(
            x, idx, weights, own, lambda rows, offsets: _products(rows, w1, w2, offsets)
        )
        runs |= _alone(world, x, idx, weights, w1, w2)
        runs["pkt moe, captured"] = captured(lambda: layers["pkt moe"](x, weights, w1, w2))
    for name, layer in layers.items():
        runs[name] = _forwards(layer, (x, weights, w1, w2))
        runs[f"{name}, with gradients"] = _both_ways(layer, leaves)
    one_way = 2.0 * H * leaving(each, chosen, size)
    return Case(
        nbytes=2 * one_way,
        fewer=dict.fromkeys(ALONE[:2], 0.0) | dict.fromkeys(ALONE[2:], one_way),
        flops=6.0 * T * chosen * H * F / size,
        variants=runs,
        exact=exact,
        scaled=None,
        unchecked=frozenset(ALONE),
    )


def _expert(e: int, H: int, F: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 (H, 2 * F) and w2 (F, H) of an expert, the same wherever they are made."""
    return normal((H, 2 * F), 2 * e, device, H**-0.5), normal((F, H), 2 * e + 1, device, F**-0.5)


def _forwards(layer: Callable[..., torch.Tensor], tensors: Any) -> Callable[[], torch.Tensor]:
    return lambda: layer(*tensors)


def _both_ways(layer: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The layer and its gradients, for a gradient of ones."""

    def run() -> torch.Tensor:
        out = layer(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out.detach()

    return run


def _alone(world: Any, x: Any, idx: Any, weights: Any, w1: Any, w2: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Parts, over the rows of a dispatch."""
    room, experts = max(1, world.size * idx.numel()), world.size * len(w1)

    def dispatched() -> Any:
        return pkt.dispatch(x, idx, weights, experts, max_tokens=room, clear=False, world=world)

    there = dispatched()
    y = torch.randn(room, w2.shape[2], device=x.device).bfloat16()
    rows = there.rows[: int(there.offsets[-1])]

    def products() -> torch.Tensor:
        hidden = pkt.grouped_matmul(rows, w1, there.offsets, clear=False, world=world)
        hidden = pkt.grouped_activation(hidden, there.offsets, clear=False, world=world)
        return pkt.grouped_matmul(hidden, w2, there.offsets, clear=False, world=world)

    return {
        "products alone": products,
        "torch._grouped_mm alone": lambda: _products(rows, w1, w2, there.offsets[1:]),
        "dispatch alone": lambda: dispatched().rows,
        "combine alone": lambda: pkt.combine(y, there, world=world),
    }


def _products(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Both products and the activation, by torch. ends: of each expert's rows."""
    hidden = finished(torch._grouped_mm(rows, w1, offs=ends), None, "swiglu")
    return torch._grouped_mm(hidden, w2, offs=ends)


def with_nccl(x: Any, idx: Any, weights: Any, own: int, experts: Callable[[Any, Any], Any]) -> torch.Tensor:
    """torch.distributed: a row for each pair of token and expert there and back. own: experts of a rank. experts: what
    they make of their rows, given these, by expert, and the end of each expert's."""
    from torch.distributed.nn.functional import all_to_all_single

    (T, K), (rows, ends, way) = idx.shape, there_with_nccl(x, idx, own)
    y = experts(rows, ends)
    back = torch.empty_like(y).index_copy(0, way.by_expert, y)
    home = all_to_all_single(y.new_empty(T * K, y.shape[1]), back, way.sent, way.received)
    scaled = home.float() * weights.flatten()[way.order, None]
    return torch.zeros(T, y.shape[1], device=x.device).index_add(0, way.order // K, scaled).bfloat16()


class Way(NamedTuple):
    """How pairs of token and expert came to their experts' ranks."""

    order: torch.Tensor  # of this rank's pairs, by expert
    by_expert: torch.Tensor  # of the rows that arrived
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


def there_with_nccl(x: Any, idx: Any, own: int) -> tuple[torch.Tensor, torch.Tensor, Way]:
    """The rows of this rank's experts, in the order of experts, ranks and tokens; the end of each expert's; and how
    they came. own: experts of a rank."""
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_to_all_single

    K, size = idx.shape[1], dist.get_world_size()
    order = idx.flatten().argsort(stable=True)
    counts = torch.bincount(idx.flatten(), minlength=size * own)
    theirs = torch.empty_like(counts)  # of each rank, how many rows of each of my experts it sends
    dist.all_to_all_single(theirs, counts)
    sent, received = (n.view(size, own).sum(1).tolist() for n in (counts, theirs))  # the host waits
    rows = all_to_all_single(x.new_empty(sum(received), x.shape[1]), x[order // K], received, sent)
    expert = torch.arange(own, device=x.device).repeat(size).repeat_interleave(theirs)
    by_expert = expert.argsort(stable=True)
    ends = theirs.view(size, own).sum(0).cumsum(0).int()
    return rows[by_expert], ends, Way(order, by_expert, sent, received)


if __name__ == "__main__":
    sys.exit(main("moe", TITLE))
