"""Ring attention beside torch's attention alone and behind NCCL's all-gather, bf16.

    python -m benchmarks.ring_attention --ranks 2     on GPUs, some minutes; results/ring_attention_2.json
    python -m benchmarks.ring_attention --sizes S6144 --only parts,torch      some cases and variants
    python -m benchmarks.ring_attention --ranks 1     the kernel alone, beside torch's
    python -m benchmarks.ring_attention --quick       on the CPU, small, checked and not timed

A sequence of S positions is split among the ranks. "torch alone" is scaled_dot_product_attention with cuDNN of a rank's
queries with all keys, which are there already; with a causal mask, of a rank's queries with its own keys, whose rate is
that of the mask. "torch alone, in parts" takes as many keys at a time as a rank has, and merges nothing. TFLOP/s are
those of the pairs that a rank's queries see; a forward and backward pass has 3.5 times as many. All variants of a case
take turns (`_timing.take_turns`); a repeat's time is the greatest of the ranks. Every variant's result is compared with
torch's first, and, where the sequence is short, the gradients with those of torch over all of it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pkt
from benchmarks import _harness
from benchmarks._check import BOUND
from benchmarks._timing import gate, take_turns
from pkt.progress import steps
from pkt.runtime.groups import process_group
from pkt.tune.distance import distance

TORCH, NCCL = "torch alone", "NCCL + torch"
BOTH = "forward + backward"
"""The last words of variants that also compute the gradients of q, k and v."""
LONG = 4096
"""Positions from which on gradients are not compared: torch would keep all scores."""
TILES = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3))
PUSHING = (8, 16, 32)


class Case(NamedTuple):
    """S: positions in all. H, KV: heads of queries and keys."""

    B: int
    S: int
    H: int
    KV: int
    D: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal zigzag" if self.causal else "full"
        return f"{mask} B{self.B} S{self.S} H{self.H}/{self.KV} D{self.D}"

    def tflop(self, size: int) -> float:
        """Of a rank: two products of the pairs that its queries see."""
        return 4e-12 * self.B * self.H * self.D * self.S * (self.S / size) / (1 + self.causal)

    def work(self, name: str, size: int) -> float:
        """TFLOP of a rank in a variant. A backward pass has five products of the pairs, where a forward pass has
        two."""
        return self.tflop(size) * (3.5 if name.endswith(BOTH) else 1)


LONGER = ((16, 6144, 16, 16), (4, 24576, 16, 16), (1, 98304, 16, 16), (1, 131072, 32, 8))
SHAPES = ((16, 512, 32, 8), (8, 1024, 32, 8), (8, 2048, 16, 16), (8, 4096, 16, 16), *LONGER)
CASES = tuple(
    Case(*shape, causal)
    for shape in (*((*shape, 128) for shape in SHAPES), (16, 4096, 16, 16, 64))
    for causal in (False, True)
)
QUICK = (Case(1, 48, 2, 1, 16, False), Case(1, 48, 2, 1, 16, True))
Run = Callable[[], torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's, of (B, S, H, D)."""
    backends = [SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH]
    with sdpa_kernel(backends):
        a, b, c = (x.transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
    return found.transpose(1, 2)


def variants(case: Case, world: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
    """pkt's forms with the default settings, the fused one with others, and torch's."""
    layout: Literal["contiguous", "zigzag"] = "zigzag" if case.causal else "contiguous"
    call = functools.partial(pkt.ring_attention, q, k, v, causal=case.causal, layout=layout)
    small = {} if q.is_cuda else {"tiles": (16, 16)}
    found: dict[str, Run] = {mode: functools.partial(call, mode=mode, **small) for mode in ("fused", "copy", "unfused")}
    modes: tuple[Any, ...] = ("parts", "gluon") if q.is_cuda else ("parts",)
    for mode in modes:
        found[mode] = functools.partial(call, mode=mode)
    for mode in ("fused", *modes):
        both = functools.partial(pkt.ring_attention, causal=case.causal, layout=layout, mode=mode)
        found[f"{mode}, {BOTH}"] = functools.partial(trained, both, q, k, v)
    if not q.is_cuda:
        return found
    for tiles in TILES:
        found[f"fused {'x'.join(map(str, tiles))}"] = functools.partial(call, mode="fused", tiles=tiles)
    if world.size > 1:
        for pushing in PUSHING:
            found[f"fused {pushing} push"] = functools.partial(call, mode="fused", num_comm_sms=pushing)
        if not case.causal:
            found[NCCL] = functools.partial(gathered, case, world, q, k, v)
            found[f"{TORCH}, in parts"] = functools.partial(in_parts, world.size, q, k, v)
    keys, values = (x if case.causal else x.repeat(1, world.size, 1, 1) for x in (k, v))
    found[TORCH] = functools.partial(attend, q, keys, values, case.causal)
    found[f"{TORCH}, {BOTH}"] = functools.partial(
        trained, functools.partial(attend, causal=case.causal), q, keys, values
    )
    return found


def trained(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """The result of a call, after a backward pass with q as the result's gradient. The gradients of q, k and v are in
    its attribute `gradients`."""
    leaves = [x.detach().requires_grad_() for x in operands]
    result = call(*leaves)
    found = result.detach()
    found.gradients = torch.autograd.grad(result, leaves, operands[0])  # type: ignore[attr-defined]
    return found


def wanted_gradients(case: Case, world: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Those of this rank's q, k and v by torch, in fp64, from all ranks' operands."""
    order: dict[str, Any] = {"layout": "zigzag" if case.causal else "contiguous", "world": world}
    whole = [pkt.unshard_sequence(pkt.all_gather(x, dim=1), **order).double().requires_grad_() for x in (q, k, v)]
    heads = [x.repeat_interleave(case.H // x.shape[2], 2).transpose(1, 2) for x in whole]
    scores = heads[0] @ heads[1].transpose(2, 3) * case.D**-0.5
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    result = (scores.softmax(3) @ heads[2]).transpose(1, 2)
    return [pkt.shard_sequence(x, **order) for x in torch.autograd.grad(result, whole, whole[0].detach())]


def gathered(case: Case, world: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """NCCL's all-gather of keys and values, then torch's attention."""
    import torch.distributed as dist

    whole, group = [], process_group(world)
    for x in (k, v):
        room = torch.empty(world.size, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(room, x.contiguous(), group=group)
        whole.append(room.transpose(0, 1).reshape(x.shape[0], -1, *x.shape[2:]))
    return attend(q, whole[0], whole[1], False)


def in_parts(size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention to the keys of so many ranks, one rank after the other; the last one's result."""
    return [attend(q, k, v, False) for _ in range(size)][-1]


def wanted(case: Case, world: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This rank's result by torch, from all ranks' keys; with a causal mask, of 64 rows of the first batch."""
    layout: Literal["contiguous", "zigzag"] = "zigzag" if case.causal else "contiguous"
    order = {"layout": layout, "world": world}
    keys, values = (pkt.unshard_sequence(pkt.all_gather(x, dim=1), **order) for x in (k, v))
    if not case.causal:
        return attend(q, keys, values, False)
    at, all_at = pkt.sequence_positions(case.S, **order), torch.arange(case.S, device=q.device)
    heads = [x[:1].repeat_interleave(case.H // case.KV, 2).transpose(1, 2) for x in (keys, values)]
    rows = torch.linspace(0, len(at) - 1, 64, device=q.device).long()  # of the first batch
    scores = q[:1, rows].transpose(1, 2).float() @ heads[0].float().transpose(2, 3) * case.D**-0.5
    scores.masked_fill_(all_at > at[rows][:, None], -torch.inf)
    return (scores.softmax(3) @ heads[1].float()).transpose(1, 2)


def measure(world: Any, case: Case, only: str) -> list[tuple[str, float, list[float]]]:
    """Variant, error and milliseconds of every repeat on this rank, of the variants whose name has a word of only."""
    rows, device = case.S // world.size, world.torch_device
    random = torch.Generator(device=device).manual_seed(world.rank)
    q, k, v = (
        torch.randn(case.B, rows, heads, case.D, generator=random, dtype=torch.bfloat16, device=device)
        for heads in (case.H, case.KV, case.KV)
    )
    exact = wanted(case, world, q, k, v)
    slopes = wanted_gradients(case, world, q, k, v) if case.S < LONG else []
    found, good = [], []
    with world.scratch():
        for name, run in variants(case, world, q, k, v).items():
            if not any(word in name for word in only.split(",")):
                continue
            result, errors = run(), [0.0]
            if not name.startswith(TORCH):
                errors += [distance(x, y) for x, y in zip(getattr(result, "gradients", ()), slopes)]
                if exact.shape != result.shape:
                    result = result[:1, torch.linspace(0, rows - 1, 64, device=device).long()]
                errors.append(distance(result, exact))
            times: list[float] = []
            found.append((name, max(errors), times))
            good.append((times, run))
        if q.is_cuda:
            take_turns(good, 500e-6, functools.partial(gate, world))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="", help="words: only cases whose name has one of them")
    parser.add_argument("--only", default="", help="words: only variants whose name has one of them")
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins after these")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    from benchmarks.ring_attention import CASES as all_cases  # workers cannot import from __main__
    from benchmarks.ring_attention import QUICK as small
    from benchmarks.ring_attention import measure as importable

    words = given.sizes.split(",")
    cases = [case for case in (small if given.quick else all_cases) if any(word in str(case) for word in words)]
    device: Literal["cpu", "cuda"] = "cpu" if given.quick else "cuda"
    heap, end = "64MiB" if given.quick else "4GiB", time.monotonic() + given.seconds
    rows, wrong = [], []
    for case in steps(cases, "attention"):
        if time.monotonic() > end:
            print(f"{case}: out of time")
            continue
        ranks = pkt.launch(importable, given.ranks, device, (case, given.only), heap=heap, multicast=False)
        for each in zip(*ranks):
            name = each[0][0]
            error, times = max(one[1] for one in each), [max(ts) for ts in zip(*(one[2] for one in each))]
            if error > BOUND:
                wrong.append(f"{case}, {name}: error {error:.2g}, wanted at most {BOUND:g}")
            if times:
                median = statistics.median(times)
                speed = 1e3 * case.work(name, given.ranks) / median
                print(f"{median:9.3f} ms {speed:6.0f} TFLOP/s  error {error:.1e}  {case}, {name}", flush=True)
                rows.append(_harness.row(f"{case}, {name}", times, "ms", None))
            else:
                print(f"error {error:.1e}  {case}, {name}")
        if rows:  # after each case, so that none is lost
            _harness.write(f"ring_attention_{given.ranks}", rows, "ring_attention", failed=wrong)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
