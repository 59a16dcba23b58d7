"""The grouped product of experts on one GPU: every tile configuration beside torch._grouped_mm, bf16.

    python -m benchmarks.grouped_matmul             on one GPU, some minutes; results/grouped_matmul.json
    python -m benchmarks.grouped_matmul --quick     on the CPU, small, checked and not timed

One rank of two that share 256 experts: T tokens choose 8 experts each at random, and this rank multiplies the rows of
its 128 experts, (rows, 7168) @ (128, 7168, 2048). Weights lie row-major, (experts, K, N), or transposed. All of a
size's variants take turns (`_timing.take_turns`). Each is compared with the product in fp32 before it is timed.

--routing: "random" as above; "balanced" gives every expert as many rows; "skewed" chooses experts by Zipf's law.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from triton.runtime.errors import OutOfResources

import pkt
from benchmarks import _harness
from benchmarks._check import BOUND
from benchmarks._timing import take_turns
from pkt.kernels.grouped_matmul import grouped_matmul
from pkt.kernels.shared.tile_product import Tiles
from pkt.progress import steps
from pkt.tune.distance import distance

EXPERTS, OWN, CHOSEN, K, N = 256, 128, 8, 7168, 2048
TOKENS = (256, 1024, 4096, 8192, 16384)
TORCH = "torch._grouped_mm"
TINY = Tiles(16, 16, 16)
WEIGHTS_SECONDS = 1.0e-3
"""Limit for 256 tokens: the weights, 3.76 GB, take 0.87 ms at 4.3 TB/s."""

SMALL = (
    Tiles(16, 64, 256, num_warps=4, num_stages=3),
    Tiles(16, 128, 128, num_warps=4, num_stages=3),
    Tiles(16, 128, 128, num_warps=4, num_stages=4),
    Tiles(16, 256, 64, num_warps=4, num_stages=4),
    Tiles(32, 128, 128, num_warps=4, num_stages=3),
)
MIDDLE = (
    Tiles(64, 64, 128, num_warps=4, num_stages=4),
    Tiles(64, 128, 64, num_warps=4, num_stages=4),
    Tiles(64, 128, 128, num_warps=4, num_stages=4),
    Tiles(64, 256, 64, num_warps=4, num_stages=4),
    Tiles(64, 256, 64, num_warps=8, num_stages=4),
    Tiles(128, 128, 64, num_warps=4, num_stages=3),
    Tiles(128, 128, 64, num_warps=8, num_stages=5),
)
LARGE = (
    Tiles(128, 256, 64, num_stages=3),
    Tiles(128, 256, 64, num_stages=4),
    Tiles(128, 256, 64, group=4, num_stages=4),
    Tiles(128, 256, 64, group=16, num_stages=4),
    Tiles(256, 128, 64, num_stages=4),
    Tiles(256, 128, 64, num_stages=3),
)


def candidates(tokens: int) -> tuple[Tiles, ...]:
    """Tiles worth trying for so many tokens in all."""
    rows = tokens * CHOSEN // EXPERTS  # an expert, on average
    return (*SMALL * (rows <= 32), *MIDDLE * (rows <= 256), *LARGE * (rows >= 64))


def routed(tokens: int, routing: str, device: torch.device) -> torch.Tensor:
    """int32 (OWN + 1,): where the rows of each of this rank's experts begin, and where the last one's end."""
    random = torch.Generator(device=device).manual_seed(tokens)
    if routing == "balanced":
        counts = torch.full((OWN,), tokens * CHOSEN // EXPERTS, device=device)
    else:
        weight = torch.ones(EXPERTS, device=device)
        if routing == "skewed":
            weight = 1 / torch.arange(1, EXPERTS + 1, device=device)
            weight = weight[torch.randperm(EXPERTS, generator=random, device=device)]
        chosen = torch.multinomial(weight.expand(tokens, -1), CHOSEN, generator=random)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)[:OWN]
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def exact(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The product in fp32, without tf32."""
    out = torch.empty(x.shape[0], w.shape[2], dtype=torch.float32, device=x.device)
    ends = offsets.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(ends)):
        out[first:last] = x[first:last].float() @ w[expert].float()
    return out


@dataclass
class Timed:
    """A variant of a size: its error, the milliseconds of each repeat, and why it failed, if it did."""

    tokens: int
    rows: int
    layout: str
    variant: str
    error: float = 0.0
    ms: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.ms) if self.ms else float("inf")


Run = Callable[[], torch.Tensor]


def variants(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, choices: Sequence[Tiles]
) -> dict[str, Run]:
    """The product with each of these tiles, with the default ones, and torch's on GPUs."""

    def run(tiles: Tiles | None) -> Run:
        return lambda: grouped_matmul(x, w, offsets, out, tiles=tiles)

    found = {f"{t.block_m}x{t.block_n}x{t.block_k} g{t.group} w{t.num_warps} s{t.num_stages}": run(t) for t in choices}
    found["default"] = run(None)
    if x.is_cuda:
        found[TORCH] = lambda: torch._grouped_mm(x, w, offs=offsets[1:])
    return found


def measure(world: Any, sizes: Sequence[int], routing: str, layouts: Sequence[str]) -> list[Timed]:
    """Every variant of every size."""
    device = world.torch_device
    cuda = device.type == "cuda"
    k, n = (K, N) if cuda else (64, 32)
    random = torch.Generator(device=device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for part in made.flatten().split(1 << 26):
            part.copy_(torch.randn(part.shape, generator=random, device=device))
        return made

    memory = normal(OWN, k, n)
    found: list[Timed] = []
    for tokens in steps(sizes, "products"):
        offsets = routed(tokens, routing, device)
        rows = int(offsets[-1])
        x, out = normal(rows, k), torch.empty(rows, n, dtype=torch.bfloat16, device=device)
        for layout in layouts:
            w = memory if layout == "row-major" else memory.view(OWN, n, k).transpose(1, 2)
            wanted = exact(x, w, offsets)
            good: list[tuple[list[float], Run]] = []
            for name, run in variants(x, w, offsets, out, candidates(tokens) if cuda else (TINY,)).items():
                one = Timed(tokens, rows, layout, name)
                found.append(one)
                out.fill_(float("nan"))
                try:
                    one.error = distance(run(), wanted)
                except (RuntimeError, pkt.PktError, OutOfResources) as error:
                    one.failed = f"{type(error).__name__}: {error}"[:300]
                    continue
                if one.error > BOUND:
                    one.failed = f"wrong: error {one.error:.2g}, wanted at most {BOUND:g}"
                else:
                    good.append((one.ms, run))
            if cuda:
                take_turns(good, 200e-6)
    return found


def figures(found: Sequence[Timed], routing: str) -> list[_harness.Row]:
    """The rows of the results file. The default is held against torch, and with 256 tokens against the weights."""
    torchs = {(one.tokens, one.layout): one.median for one in found if one.variant == TORCH}
    rows = []
    for one in found:
        limit = torchs.get((one.tokens, one.layout)) if one.variant == "default" else None
        if limit is not None and one.tokens == 256:
            limit = min(limit, 1e3 * WEIGHTS_SECONDS)
        case = f"{one.tokens} tokens, {routing}, {one.rows} rows, {one.layout}, {one.variant}"
        if one.ms:
            rows.append(_harness.row(case, one.ms, "ms", None if limit == float("inf") else limit))
    return rows


def report(found: Sequence[Timed]) -> None:
    """Print the variants of each size, the fastest first."""
    for tokens, layout in dict.fromkeys((one.tokens, one.layout) for one in found):
        here = [one for one in found if (one.tokens, one.layout) == (tokens, layout)]
        print(f"\n{tokens} tokens, {here[0].rows} rows, {layout}")
        for one in sorted(here, key=lambda one: one.median):
            if one.ms:
                speed = f"{2e-9 * one.rows * K * N / one.median:5.0f} TFLOP/s"
                weights = f"{2e-9 * OWN * K * N / one.median:5.2f} TB/s of weights"
                print(f"{one.median:8.3f} ms {speed} {weights}  error {one.error:.1e}  {one.variant}")
            else:
                print(f"{one.failed or 'right'}: {one.variant}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--routing", choices=("random", "balanced", "skewed"), default="random")
    parser.add_argument("--layouts", default="row-major,transposed")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    from benchmarks.grouped_matmul import measure as importable  # workers cannot import it from __main__

    sizes = (16,) if given.quick else tuple(int(word) for word in given.tokens.split(","))
    device: Literal["cpu", "cuda"] = "cpu" if given.quick else "cuda"
    args = (sizes, given.routing, given.layouts.split(","))
    (found,) = pkt.launch(importable, 1, device, args, heap="64MiB", multicast=False)
    report(found)
    failures = [f"{one.tokens} tokens, {one.layout}, {one.variant}: {one.failed}" for one in found if one.failed]
    if not given.quick:
        name = "grouped_matmul" if given.routing == "random" else f"grouped_matmul_{given.routing}"
        _harness.write(name, figures(found, given.routing), "grouped_matmul", routing=given.routing, failed=failures)
    return int(any(one.failed for one in found if one.variant != TORCH))


if __name__ == "__main__":
    sys.exit(main())
