"""Benchmark of the three fused products with fp8 operands and bf16 results.

    python -m benchmarks.fp8_products --ranks 2                             on GPUs; results/fp8_products_2.json
    python -m benchmarks.fp8_products --ranks 2 --sizes "down 4096 rows"    cases whose label has these words
    python -m benchmarks.fp8_products --device cpu --quick --ranks 2        check in the simulator; time nothing

A case is a product of benchmarks/zoo.py: M (rows of all ranks), K and N are of the product that each rank computes, by
default those of Llama 3 70B on two ranks, on any number of ranks. Weights are the transposed view of a Linear's. Rows
of A and columns of B have scales of their own; in cases "one scale" each operand has one.

"torch._scaled_mm alone" multiplies an A that is there already. "fast" is torch's use_fast_accum=True and pkt's
fast_accum=True, whose error is shown but not judged. "captured" is a replayed CUDA graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from benchmarks._process_group import group_name, torch_symmetric
from benchmarks._zoo_cases import COLUMN, MODELS, ROW, SHORT
from benchmarks._zoo_inputs import ONE_SHOT
from pkt.kernels.operator import operators
from pkt.kernels.shared.fp8 import FP8, LARGEST, LEAST_SCALE

TITLE = "Fused products of fp8 operands, bf16 results"
ROWS = (16, 256, 512, 1024, 4096, 16384)
SQUARES = (4096, 6144, 8192)
ONE, ONE_ROWS = ("qkv", "down"), 4096  # the cases with one scale
ONE_SCALE = 8 / LARGEST  # normal numbers are smaller than 8
QUICK = (32, 64, 160)  # rows, N and K: K is more than one of the steps that are accumulated accurately

ACCUMULATIONS = {"": False, " fast": True}
SHARED: dict[str, dict[str, Any]] = {
    f"{name}{fast}": {"mode": mode, "fast_accum": allowed}
    for name, mode in {"pkt default": None, "pkt gluon": "gluon", "pkt unfused": "unfused"}.items()
    for fast, allowed in ACCUMULATIONS.items()
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "all_gather_matmul": SHARED | {"pkt push": {"mode": "push"}},
    "matmul_reduce_scatter": SHARED | {"pkt inbox": {"mode": "inbox"}},
    "matmul_all_reduce": SHARED | {"pkt lcsc": {"mode": "lcsc"}},
}
"""Of each operator: the variants of pkt and their keywords."""
EAGER = "pkt default"
"""The variant of pkt that is timed without a graph, too."""
ALONE, NCCL, FUSED = "torch._scaled_mm alone", "NCCL + torch._scaled_mm", "torch symm_mem fused"
TWO_SHOT, ONE_SHOTS = "torch._scaled_mm + torch two-shot", "torch._scaled_mm + torch one-shot"
Run = Callable[[], torch.Tensor]


def variants(device: str, quick: bool) -> list[str]:
    ours = list(dict.fromkeys(name for of in VARIANTS.values() for name in of))
    if device == "cpu":
        return [name for name in ours if not name.startswith("pkt gluon")]
    theirs = [f"{name}{fast}" for name in (ALONE, NCCL, FUSED, TWO_SHOT, ONE_SHOTS) for fast in ACCUMULATIONS]
    return [*(f"{name}{c}" for name in theirs for c in (", captured", "")), *(f"{n}, captured" for n in ours), EAGER]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    """Labels such as "AG+GEMM qkv 16 rows, K = 8192, N = 5120": --sizes "qkv 16 rows" takes this one."""
    found: dict[str, dict[str, Any]] = {}

    def add(operator: str, name: str, rows: int, n: int, k: int, one: bool = False) -> None:
        label = f"{SHORT[operator]} {name} {rows} rows, K = {k}, N = {n}{', one scale' if one else ''}"
        found[label] = {"operator": operator, "rows": rows, "n": n, "k": k, "one": one}

    layers = MODELS["Llama 3 70B"].products(2)
    for operator in (*COLUMN, *ROW):
        if quick:
            for one in (False, True):
                add(operator, "small", *QUICK, one)
            continue
        for name, (of, n, k) in layers.items():
            for rows in ROWS if operator in of else ():
                add(operator, name, rows, n, k)
                if rows == ONE_ROWS and name in ONE:
                    add(operator, name, rows, n, k, one=True)
        for side in SQUARES:
            add(operator, "square", side, side, side)
    return found


class Scaled(NamedTuple):
    """fp8 elements and fp32 scales."""

    elements: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.elements.float() * self.scales


class Operands(NamedTuple):
    a: Scaled  # (rows, K), scales (rows, 1) or (1, 1)
    b: Scaled  # (K, N), the transposed view, scales (1, N) or (1, 1)


def quantised(x: torch.Tensor, one: bool) -> Scaled:
    """x with a scale for each row, its greatest magnitude / 448, or with ONE_SCALE."""
    if one:
        scales = torch.full((1, 1), ONE_SCALE, device=x.device)
    else:
        scales = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    return Scaled((x / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales)


def operands(rank: int, rows: int, n: int, k: int, one: bool, device: torch.device) -> Operands:
    """A rank's, the same wherever they are made."""
    a = quantised(normal((rows, k), rank, device), one)
    w = quantised(normal((n, k), 100 + rank, device), one)
    return Operands(a, Scaled(w.elements.t(), w.scales.view(1, -1)))


def bound(operator: str, k: int, size: int) -> float:
    """The greatest `distance` of a result whose products are added in fp32 every some hundred elements.

    Each rounding to bf16 is off by 2^-8 of the result at most: there is one of a gathered product, and as many as ranks
    of a sum. The sums are off by 2^-11 of the sum of magnitudes, which for normal numbers is 2 / pi * sqrt(terms) times
    the norm of the result.
    """
    roundings, terms = (1, k) if operator in COLUMN else (size, size * k)
    return roundings * 2**-8 + 2**-11 * 2 / math.pi * math.sqrt(terms)


def case(world: Any, operator: str, rows: int, n: int, k: int, one: bool) -> Case:
    size, device = world.size, world.torch_device
    m = -(-rows // size)  # a rank's rows of A or of the result, where ranks share them
    gathers, scatters = operator in COLUMN, operator == "matmul_reduce_scatter"
    M = rows if operator == "matmul_all_reduce" else m * size
    shape = (m if gathers else M, n, k)
    mine = operands(world.rank, *shape, one, device)
    out = torch.empty(m if scatters else M, n, dtype=torch.bfloat16, device=device)

    def exact() -> torch.Tensor:
        """The result of dequantised operands, with no communication."""
        if gathers:
            weights = mine.b.values()
            return torch.cat([operands(rank, *shape, one, device).a.values() @ weights for rank in range(size)])
        own = slice(world.rank * m, (world.rank + 1) * m) if scatters else slice(None)
        total = torch.zeros(out.shape, device=device)
        for rank in range(size):
            a, b = operands(rank, *shape, one, device)
            total.addmm_(a.values()[own], b.values())
        return total

    runs = _ours(world, operator, mine, out)
    if device.type == "cuda":
        theirs = _gathered(mine, out, size, one) if gathers else _summed(mine, out, size, scatters)
        eager = theirs | {EAGER: runs[EAGER]}
        runs = {f"{name}, captured": captured(run) for name, run in (theirs | runs).items()} | eager
    sent = {
        "all_gather_matmul": (size - 1) * sum(x.nbytes for x in (mine.a if not one else mine.a[:1])),
        "matmul_reduce_scatter": (size - 1) * m * n * 2,
        "matmul_all_reduce": 2 * (size - 1) / size * M * n * 2,
    }[operator]
    alone = frozenset(name for name in runs if name.startswith(ALONE))
    judged = bound(operator, k, size)
    return Case(
        nbytes=float(sent),
        fewer=dict.fromkeys(alone, 0.0),
        flops=2.0 * M * n * k,
        variants=runs,
        exact=exact,
        scaled=mine.a.scales,
        unchecked=alone,
        bounds={name: 1.0 if " fast" in name else judged for name in runs},
    )


def _ours(world: Any, operator: str, mine: Operands, out: torch.Tensor) -> dict[str, Run]:
    declared, (a, b), gpu = operators()[f"{operator}_scaled"], mine, world.torch_device.type == "cuda"

    def run(keywords: dict[str, Any]) -> Run:
        mode = keywords["mode"]
        small = {} if gpu or mode is None else declared.forms[mode].small
        given = {"scale_a": a.scales, "scale_b": b.scales, "world": world, **keywords, **small}
        return lambda: declared.function(a.elements, b.elements, out, **given)

    return {name: run(keywords) for name, keywords in VARIANTS[operator].items()}


def multiplied(a: Scaled, b: Scaled, out: torch.Tensor, fast: bool) -> torch.Tensor:
    """torch's product, in `out`."""
    return torch._scaled_mm(
        a.elements, b.elements, a.scales, b.scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out
    )


def _gathered(mine: Operands, out: torch.Tensor, size: int, one: bool) -> dict[str, Run]:
    """Baselines of the product of a gathered A. Collective."""
    import torch.distributed as dist

    a, b = mine
    whole = Scaled(a.elements.repeat(size, 1), a.scales if one else a.scales.repeat(size, 1))
    symm = torch.ops.symm_mem

    def gather() -> None:
        dist.all_gather_into_tensor(whole.elements.view(torch.uint8), a.elements.view(torch.uint8))
        if not one:  # the ranks have the same
            dist.all_gather_into_tensor(whole.scales, a.scales)

    def runs(fast: bool) -> dict[str, Run]:
        def nccl() -> torch.Tensor:
            gather()
            return multiplied(whole, b, out, fast)

        def fused() -> torch.Tensor:
            return symm.fused_all_gather_scaled_matmul(
                a.elements, [b.elements], a.scales, [b.scales], 0, group_name(), biases=[None], result_scales=[None],
                out_dtypes=[torch.bfloat16], use_fast_accum=[fast],
            )[1][0]  # fmt: skip

        return {ALONE: lambda: multiplied(whole, b, out, fast), NCCL: nccl, FUSED: fused}

    return {f"{name}{key}": run for key, fast in ACCUMULATIONS.items() for name, run in runs(fast).items()}


def _summed(mine: Operands, out: torch.Tensor, size: int, scatters: bool) -> dict[str, Run]:
    """Baselines of the sum of the ranks' products: of this rank's rows, or of all."""
    import torch.distributed as dist

    (a, b), symm = mine, torch.ops.symm_mem
    M, n = a.elements.shape[0], b.elements.shape[1]
    product = torch.empty(M, n, dtype=out.dtype, device=out.device) if scatters else out
    shared: list[torch.Tensor] = []

    def symmetric() -> torch.Tensor:
        """Room for a product in torch's symmetric memory, made in the first call. Collective."""
        if not shared:
            shared.append(torch_symmetric(out))
        return shared[0]

    def runs(fast: bool) -> dict[str, Run]:
        def nccl() -> torch.Tensor:
            multiplied(a, b, product, fast)
            if scatters:
                dist.reduce_scatter_tensor(out, product)
            else:
                dist.all_reduce(out)
            return out

        def fused() -> torch.Tensor:
            return symm.fused_scaled_matmul_reduce_scatter(
                a.elements, b.elements, a.scales, b.scales, "sum", 0, 0, group_name(), [M, n],
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip

        def two_shot() -> torch.Tensor:
            return symm.two_shot_all_reduce_(multiplied(a, b, symmetric(), fast), "sum", group_name())

        def one_shot() -> torch.Tensor:
            return symm.one_shot_all_reduce(multiplied(a, b, symmetric(), fast), "sum", group_name())

        found: dict[str, Run] = {ALONE: lambda: multiplied(a, b, product, fast), NCCL: nccl}
        if scatters:
            return found | {FUSED: fused}
        return found | {TWO_SHOT: two_shot} | ({ONE_SHOTS: one_shot} if out.nbytes <= ONE_SHOT else {})

    return {f"{name}{key}": run for key, fast in ACCUMULATIONS.items() for name, run in runs(fast).items()}


if __name__ == "__main__":
    sys.exit(main("fp8_products", TITLE, alone=ALONE))
