"""MLP layers one after the other, as a tensor-parallel model calls them, beside NCCL and cuBLAS.

    python -m benchmarks.layers --ranks 2           on GPUs, about a minute; benchmarks/results/layers_2.json

A layer gathers its rows, multiplies by the rank's columns of the first weight, by its rows of the second, and
reduce-scatters: x (tokens / W, 8192) -> x. Every layer has weights of its own, so none of them is in L2. Tensors are
ordinary, and each product has a new output, as in a model.

captured: LAYERS layers in one CUDA graph, timed by events, behind a barrier of all ranks.
eager: LOOP layers called one after the other, wall-clock time until the GPU is done, with the host's calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pkt
from benchmarks import _harness
from benchmarks._process_group import ENVIRONMENT, prepare
from benchmarks._timing import replayed
from pkt.progress import steps
from pkt.tune.distance import distance

HIDDEN, WIDE = 8192, 28672
LAYERS, LOOP = 4, 16
TOKENS = (2, 16, 64, 256, 1024, 4096, 8192)
REPEATS = 20
LIMIT = {64: 0.56}
"""Milliseconds of LAYERS captured layers on 2 H200, by tokens: their weights take 0.44 at 4.3 TB/s."""
Weights = Sequence[tuple[torch.Tensor, torch.Tensor]]
Layers = Callable[[torch.Tensor, Weights], torch.Tensor]


def by_pkt(world: Any) -> Layers:
    def layers(x: torch.Tensor, weights: Weights) -> torch.Tensor:
        for first, second in weights:
            x = pkt.matmul_reduce_scatter(pkt.all_gather_matmul(x, first, world=world), second, world=world)
        return x

    return layers


def by_nccl(world: Any) -> Layers:
    import torch.distributed as dist

    def layers(x: torch.Tensor, weights: Weights) -> torch.Tensor:
        for first, second in weights:
            whole = x.new_empty(world.size * x.shape[0], x.shape[1])
            dist.all_gather_into_tensor(whole, x)
            part = torch.mm(torch.mm(whole, first), second)
            x = torch.empty_like(x)
            dist.reduce_scatter_tensor(x, part)
        return x

    return layers


def exact(x: torch.Tensor, weights: Weights, world: Any) -> torch.Tensor:
    """This rank's rows after LAYERS layers, in fp32."""
    import torch.distributed as dist

    x = x.float()
    for first, second in weights[:LAYERS]:
        whole = x.new_empty(world.size * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, x)
        part = whole @ first.float() @ second.float()
        dist.all_reduce(part)
        x = part.tensor_split(world.size)[world.rank]
    return x


def measure(world: Any, tokens: Sequence[int], end: float) -> dict[str, list[float]]:
    """Case -> the milliseconds of each repeat, of the slowest rank; "error ..." -> the error. Collective."""
    prepare(world)
    device, size = world.torch_device, world.size
    random = torch.Generator(device=device).manual_seed(world.rank)

    def normal(rows: int, cols: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, cols, generator=random, device=device).mul_(scale).bfloat16()

    weights = [
        (normal(HIDDEN, WIDE // size, HIDDEN**-0.5), normal(WIDE // size, HIDDEN, WIDE**-0.5)) for _ in range(LOOP)
    ]
    ways = {"pkt": by_pkt(world), "NCCL + cuBLAS": by_nccl(world)}
    found: dict[str, list[float]] = {}
    for count in steps(tokens, "layers", None if world.rank == 0 else False):
        if max(world.all_gather_object(time.time())) > end:
            break
        x = normal(count // size, HIDDEN, 1.0)
        wanted, graphs = exact(x, weights, world), {}
        for name, layers in ways.items():
            for _ in range(3):
                result = layers(x, weights[:LAYERS])
            found[f"error {count} tokens, {name}"] = [max(world.all_gather_object(distance(result, wanted, 1.0)))]
            world.barrier()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                layers(x, weights[:LAYERS])
        for repeat in range(REPEATS):
            for name, layers in ways.items() if repeat % 2 else reversed(ways.items()):
                captured = replayed(world, graphs[name].replay)
                eager = _eager(world, layers, x, weights)
                for kind, ms in zip(("captured", "eager"), map(max, zip(*world.all_gather_object((captured, eager))))):
                    found.setdefault(f"{kind}, {count} tokens, {name}", []).append(ms)
        world.synchronize()
    return found


def _eager(world: Any, layers: Layers, x: torch.Tensor, weights: Weights) -> float:
    world.barrier()
    start = time.perf_counter()
    layers(x, weights)
    world.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=60.0, help="no number of tokens is begun after these")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from benchmarks.layers import measure as importable  # workers cannot import it from __main__

    tokens = [int(word) for word in given.tokens.split(",")]
    args = (tokens, time.time() + given.seconds)
    found = pkt.launch(importable, given.ranks, "cuda", args, heap="8GiB", multicast=False, timeout=20)[0]
    errors = {case.removeprefix("error "): value for case, (value, *_) in found.items() if case.startswith("error")}
    rows = []
    for case, times in found.items():
        if case.startswith("error"):
            continue
        kind, count, name = case.split(", ")
        other = found[f"{kind}, {count}, NCCL + cuBLAS"] if kind == "eager" and name == "pkt" else None
        limit = sorted(other)[len(other) // 2] if other else None
        if kind == "captured" and name == "pkt" and given.ranks == 2:
            limit = LIMIT.get(int(count.split()[0]))
        rows.append(_harness.row(f"{LAYERS if kind == 'captured' else LOOP} layers, {case}", times, "ms", limit))
    _harness.write(f"layers_{given.ranks}", rows, "layers", ranks=given.ranks, errors=errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
