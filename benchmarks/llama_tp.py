"""Four layers of Llama 70B with tensor parallelism, those of examples/llama_tp.py, beside NCCL and torch's async-TP.

    python -m benchmarks.llama_tp --ranks 2         on GPUs, about four minutes; benchmarks/results/llama_tp_2.json

| job | captured in a CUDA graph | plan of pkt | of NCCL, whose fastest counts |
|---|---|---|---|
| prefill | yes | the sequence is split | that, and all tokens on every rank |
| decoding, KEPT positions cached | yes | all tokens on every rank | all tokens on every rank |
| training, forward and backward | no | the sequence is split | the sequence is split |

torch.compile has compiled all of them; pkt decodes with `pkt.nn.fused_norms`. async-TP is Inductor's pass that takes
torch's fused operators; it splits the sequence, and takes part in prefill and training. In training all keep the
gathered inputs for the backward pass. Each stack has weights of its own, the same random ones. Errors are those of
outputs, and in training of the input's gradient, against the whole model in fp32 on each rank.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import pkt
from benchmarks import _harness
from benchmarks._process_group import ENVIRONMENT, prepare
from benchmarks._timing import replayed
from examples.llama_tp import Block, Shape, serving, training
from pkt.progress import steps
from pkt.tune.distance import distance

SHAPE = Shape(vocabulary=0, features=8192, layers=4, heads=64, kv_heads=8, hidden=28672)
JOBS = {"prefill": (512, 4096, 16384), "decoding": (1, 16, 64), "training": (4096,)}
"""Tokens; of decoding, sequences."""
KEPT, REPEATS = 1024, 20
FASTER = {"prefill": {512: 1.07, 4096: 1.08, 16384: 1.08}, "decoding": dict.fromkeys((1, 16, 64), 1.15)}
"""How many times as fast as NCCL pkt is to be, on 2 H200."""
TRAINING = 1.07
ASYNC = "torch async-TP"
Outputs = tuple[torch.Tensor, ...]
Run = Callable[[], Outputs]


class Layers(nn.Module):
    """The blocks of a Llama, without what is before and behind them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, caches: Any = None) -> torch.Tensor:
        """x (batch, tokens, features), or this rank's part of the tokens."""
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, positions, cache)
        return x


class Models:
    """The same random model for each stack and plan, made where it is first asked for; and the whole one in fp32."""

    def __init__(self, world: Any, shape: Shape, stacks: dict[str, tuple[Callable[..., nn.Module], Any]]) -> None:
        self.world, self.shape, self.stacks = world, shape, stacks
        self.known: dict[tuple[str, bool], nn.Module] = {}
        self.exact = self.whole().float()

    def whole(self) -> nn.Module:
        torch.manual_seed(0)
        with self.world.torch_device:
            return Layers(self.shape).bfloat16()

    def parallel(self, stack: str, split: bool) -> nn.Module:
        """split: each rank has a part of the sequence between the products."""
        key = stack, split
        if key not in self.known:
            parallelize, where = self.stacks[stack]
            plan = {name: style for name, style in (training() if split else serving()).items() if "blocks" in name}
            self.known[key] = parallelize(self.whole(), where, plan, src_data_rank=None)
        return self.known[key]

    def compiled(self, stack: str, split: bool = True) -> nn.Module:
        """`parallel`, compiled; on pkt where all tokens are on every rank with its fused norms."""
        options = pkt.nn.fused_norms() if stack == "pkt" and not split else None
        return cast(nn.Module, torch.compile(self.parallel(stack, split), options=options))


def by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Any = None, *, is_causal: bool, enable_gqa: bool
) -> torch.Tensor:
    """scaled_dot_product_attention in the memory of one head's scores."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].mT * q.shape[-1] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if is_causal else ~seen
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // group]
    return out


@contextmanager
def fewer_bytes() -> Iterator[None]:
    with mock.patch.object(functional, "scaled_dot_product_attention", by_heads):
        yield


def outputs(model: Callable[..., torch.Tensor], *inputs: Any) -> Outputs:
    """Of a forward pass."""
    return (model(*inputs),)


def gradients(model: nn.Module, x: torch.Tensor, positions: torch.Tensor, grad: torch.Tensor) -> Outputs:
    """The output and x's gradient."""
    model.zero_grad()
    x.grad = None
    y = model(x, positions)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


class Jobs:
    """What each stack runs for a job, and what comes out exactly on this rank."""

    def __init__(self, world: Any, models: Models) -> None:
        self.world, self.models, self.shape = world, models, models.shape
        self.random = torch.Generator(world.torch_device).manual_seed(1)  # the same on all ranks

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.world.torch_device).bfloat16()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence."""
        return x.tensor_split(self.world.size, 1)[self.world.rank].contiguous()

    def prefill(self, tokens: int) -> tuple[dict[str, Run], dict[str, Outputs]]:
        x, positions = self.normal(1, tokens, self.shape.features), self.positions(tokens)
        part, model = self.part(x), self.models.compiled
        runs: dict[str, Run] = {}
        for stack in self.models.stacks:
            runs[f"{stack}, split"] = functools.partial(outputs, model(stack, True), part, positions)
            if stack != "pkt":
                runs[stack] = functools.partial(outputs, model(stack, False), x, positions)
        if "NCCL" in self.models.stacks:
            runs[ASYNC] = functools.partial(outputs, model("NCCL"), part, positions)
        with torch.no_grad(), fewer_bytes():
            exact = self.models.exact(x.float(), positions)
        return runs, {name: (exact,) if name == "NCCL" else (self.part(exact),) for name in runs}

    def decoding(self, batch: int) -> tuple[dict[str, Run], dict[str, Outputs]]:
        shape, size, rank = self.shape, self.world.size, self.world.rank
        x, positions = self.normal(batch, 1, shape.features), self.positions(KEPT)[-1:]
        kept = batch, shape.kv_heads, KEPT, shape.features // shape.heads
        caches = [(self.normal(*kept), self.normal(*kept)) for _ in range(shape.layers)]
        parts = [tuple(t.tensor_split(size, 1)[rank].contiguous() for t in cache) for cache in caches]
        runs: dict[str, Run] = {
            stack: functools.partial(outputs, self.models.compiled(stack, False), x, positions, parts)
            for stack in self.models.stacks
        }
        with torch.no_grad(), fewer_bytes():
            exact = self.models.exact(x.float(), positions, [tuple(t.float() for t in cache) for cache in caches])
        return runs, dict.fromkeys(runs, (exact,))

    def training(self, tokens: int) -> tuple[dict[str, Run], dict[str, Outputs]]:
        whole, dy = (self.normal(1, tokens, self.shape.features) for _ in range(2))
        x, grad, positions = self.part(whole).requires_grad_(), self.part(dy), self.positions(tokens)
        names = [*self.models.stacks, *([ASYNC] if "NCCL" in self.models.stacks else [])]
        models = {name: self.models.compiled("NCCL" if name == ASYNC else name) for name in names}
        runs: dict[str, Run] = {n: functools.partial(gradients, m, x, positions, grad) for n, m in models.items()}
        with fewer_bytes():
            exact = gradients(self.models.exact, whole.float().requires_grad_(), positions, dy.float())
        self.models.exact.zero_grad()
        return runs, dict.fromkeys(runs, tuple(map(self.part, exact)))

    def positions(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens, device=self.world.torch_device)


def errors(world: Any, runs: dict[str, Run], exact: dict[str, Outputs]) -> dict[str, float]:
    """The greatest distance of each stack's outputs from the exact ones. Collective."""
    found = {}
    for name, run in runs.items():
        apart = [distance(got, wanted) for got, wanted in zip(run(), exact[name], strict=True)]
        found[name] = max(world.all_gather_object(max(apart)))
    return found


# ------------------------------------------------------------------------------------------------------------- on GPUs
def measure(world: Any, jobs: dict[str, tuple[int, ...]], end: float, command: str) -> dict[str, dict[str, Any]]:
    """Job and size -> stack -> the milliseconds of each repeat, of the slowest rank, and the error. Rank 0 writes the
    results of each size as soon as it has them. Collective."""
    prepare(world)
    import torch._inductor.config as inductor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cuda", (world.size,))
    kept = functools.partial(pkt.parallelize, keep="whole")
    made = Jobs(world, Models(world, SHAPE, {"pkt": (kept, world), "NCCL": (parallelize_module, mesh)}))
    found: dict[str, dict[str, Any]] = {}
    every = [(job, size) for job, sizes in jobs.items() for size in sizes]
    for job, size in steps(every, "llama_tp", None if world.rank == 0 else False):
        if max(world.all_gather_object(time.time())) > end:
            break
        torch._dynamo.reset()
        with torch.set_grad_enabled(job == "training"):
            runs, exact = getattr(made, job)(size)
            ready: dict[str, Callable[[], Any]] = {}
            apart: dict[str, float] = {}
            for name, run in runs.items():
                with inductor.patch(_micro_pipeline_tp=name == ASYNC):
                    apart |= errors(world, {name: run}, exact)
                    run()
                ready[name] = run if job == "training" else graph_of(world, run)
            times: dict[str, list[float]] = {name: [] for name in ready}
            for repeat in range(REPEATS + 2):
                for name, run in ready.items() if repeat % 2 else reversed(ready.items()):
                    ms = max(world.all_gather_object(replayed(world, run)))
                    times[name] += [ms] if repeat > 1 else []
        found[f"{job}, {size}"] = {name: {"ms": times[name], "error": apart[name]} for name in ready}
        if world.rank == 0:
            print(f"{job}, {size}:", {n: f"{min(ms):.3f} ms, {apart[n]:.1e}" for n, ms in times.items()}, flush=True)
            keep(found, world.size, command)
    return found


def keep(found: dict[str, dict[str, Any]], ranks: int, command: str) -> None:
    """Write the results file."""
    apart = {f"{label}: {name}": one["error"] for label, stacks in found.items() for name, one in stacks.items()}
    more = {"command": command, "ranks": ranks, "errors": apart}
    _harness.kept(f"llama_tp_{ranks}", rows_of(found, ranks), "llama_tp", **more)


def graph_of(world: Any, run: Run) -> Callable[[], None]:
    """A replay of `run`. Collective."""
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def rows_of(found: dict[str, dict[str, Any]], ranks: int) -> list[_harness.Row]:
    """The times, and how many times as fast as the others pkt is, in each repeat."""
    rows = []
    for label, stacks in found.items():
        job, size = label.split(", ")
        rows += [_harness.row(f"{label}: {name}", one["ms"], "ms") for name, one in stacks.items()]
        mine = next(one["ms"] for name, one in stacks.items() if name.startswith("pkt"))
        nccl = [one["ms"] for name, one in stacks.items() if name.startswith("NCCL")]
        limit = TRAINING if job == "training" else FASTER[job][int(size)]
        best = [min(each) / own for own, *each in zip(mine, *nccl)]
        rows.append(_harness.row(f"{label}: NCCL / pkt", best, "", limit if ranks == 2 else None, at_least=True))
        if ASYNC in stacks:
            ratios = [other / own for own, other in zip(mine, stacks[ASYNC]["ms"])]
            rows.append(_harness.row(f"{label}: {ASYNC} / pkt", ratios, "", 1.0, at_least=True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", default=",".join(JOBS), help="words")
    parser.add_argument("--seconds", type=float, default=240.0, help="no size of a job is begun after these")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from benchmarks.llama_tp import measure as importable  # workers cannot import it from __main__

    command = " ".join(["python", "-m", "benchmarks.llama_tp", *sys.argv[1:]])
    args = ({job: JOBS[job] for job in given.jobs.split(",")}, time.time() + given.seconds, command)
    found = pkt.launch(importable, given.ranks, "cuda", args, heap="12GiB", multicast=False, timeout=90)[0]
    _harness.show(f"llama_tp_{given.ranks}", rows_of(found, given.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
