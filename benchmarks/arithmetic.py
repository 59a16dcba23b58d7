"""Values of Triton's expressions in the simulator beside those of a GPU, bit by bit.

    python -m benchmarks.arithmetic --programs 2000       on one GPU, in about three minutes on 16 cores

Inputs are ordinary numbers, limits of the dtype, infinities, NaN and random bits. A result counts as the same if its
bits are, or if both are NaN. Of the others the file has the largest distance for each expression and dtype of its
result, in units of the dtype's epsilon, of integers in units. Infinite: one of the two is infinite or NaN.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import pkt
from benchmarks import _harness
from benchmarks._expressions import INTEGERS, Case, N, expressions, program
from pkt.progress import steps

TORCH = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
         torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
         torch.float8_e5m2)  # fmt: skip
"""The torch dtypes of `_expressions.TYPES`."""

_IMPORTS = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from benchmarks._expressions import either, exclusive, larger, one, plus, put, times


"""


def text(case: Case) -> str:
    """A module whose `kernel` stores each result and the place of its type in `TYPES`."""
    inputs = [f"x{k}" for k in range(len(case.dtypes))]
    outputs = [f"o{k}" for k in range(len(case.results))]
    body = ["i = tl.arange(0, N)", *(f"{name} = tl.load({x} + i)" for name, x in zip("abc", inputs)), *case.lines]
    body += [f"put({out}, kind + {k}, {result})" for k, (out, result) in enumerate(zip(outputs, case.results))]
    arguments = ", ".join([*inputs, *outputs, "kind", "N: tl.constexpr"])
    return f"{_IMPORTS}@triton.jit\ndef kernel({arguments}):\n" + "".join(f"    {line}\n" for line in body)


def values(dtype: str, seed: int) -> torch.Tensor:
    """N elements: a third are random bits, a third ordinary, a third limits of the dtype and special values."""
    rng = np.random.RandomState(seed)
    like = getattr(torch, dtype)
    size = like.itemsize
    bits = torch.from_numpy(rng.randint(0, 256, N * size).astype(np.uint8)).view(getattr(torch, f"int{8 * size}"))
    if dtype == "bool":
        return (bits & 1).bool()
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        limits = np.array([0, 1, 2, info.max - 1, info.max, info.min, info.min + 1, 31, 33], dtype=object)
        special = torch.from_numpy(limits.astype(dtype))
        ordinary = torch.from_numpy(rng.randint(-20 if info.min else 0, 20, N)).to(like)
    else:
        small = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            -2.5,
            0.1,
            3.0,
            448.0,
            57344.0,
            float("nan"),
            float("inf"),
            -float("inf"),
        ]
        large = [1e-40, -1e-40, 6e-8, 65504.0, 65520.0, 3e38, -3e38, 2147483648.0, -2147483648.0, 4294967296.0, 1.9e19]
        special = torch.tensor(small if size == 1 else small + large).to(like)
        ordinary = torch.from_numpy(rng.randn(N) * 10.0 ** rng.randint(-1, 3, N)).float().clamp(-400, 400).to(like)
    raw = special.view(bits.dtype)[torch.from_numpy(rng.randint(0, len(special), N))]
    which = torch.from_numpy(rng.randint(0, 3, N))
    return torch.where(which == 0, bits, torch.where(which == 1, ordinary.view(bits.dtype), raw)).view(like)


def run(kernel: Any, case: Case, device: str) -> list[torch.Tensor]:
    """The results on `device`."""
    inputs = [values(dtype, 7 * k + len(dtype)).to(device) for k, dtype in enumerate(case.dtypes)]
    outputs = [torch.zeros(16 * N, dtype=torch.int8, device=device) for _ in case.results]
    kinds = torch.full((len(outputs),), -1, dtype=torch.int32, device=device)
    kernel[(1,)](*inputs, *outputs, kinds, N)
    return [out.cpu().view(TORCH[kind]) for out, kind in zip(outputs, kinds.tolist())]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, int, float, float] | None:
    """(epsilons, place, found, wanted) of the element that differs most; None where all are the same."""
    if found.dtype != wanted.dtype:
        raise TypeError(f"the simulator has {found.dtype}, the GPU {wanted.dtype}")
    whole = torch.uint8 if found.dtype == torch.bool else getattr(torch, f"int{8 * found.itemsize}")
    other = found.view(whole) != wanted.view(whole)
    if found.is_floating_point():
        other &= ~(found.double().isnan() & wanted.double().isnan())
    if not other.any():
        return None
    x, y = found[other].double(), wanted[other].double()
    if found.is_floating_point():
        info = torch.finfo(found.dtype)
        far = ((x - y).abs() / (info.eps * y.abs().clamp(min=info.tiny))).nan_to_num(nan=float("inf"))
    else:
        far = (x - y).abs()
    worst = int(far.argmax())
    return far[worst].item(), int(other.nonzero()[worst]), x[worst].item(), y[worst].item()


def compared(folder: str, numbered: tuple[int, Case]) -> tuple[str, Case, list[tuple[str, Any]]]:
    """(what came out, `case`, (dtype, distance) of each result that differs)."""
    number, case = numbered
    path = Path(folder, f"case_{number}.py")
    path.write_text(text(case))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    simulated, why = None, ""
    try:
        [simulated] = pkt.launch(lambda world: run(module.kernel, case, "cpu"), ranks=1, device="cpu")
    except pkt.CompileError:  # by Triton's front end, which GPUs have, too
        return "refused", case, []
    except pkt.PktError as error:
        why = str(error).splitlines()[0]
    try:
        measured = run(module.kernel, case, "cuda")
    except RuntimeError as error:
        if simulated is None:
            return "refused", case, []
        return f"refused by Triton only: {str(error).splitlines()[0]}", case, []
    if simulated is None:
        return f"refused by the simulator only: {why}", case, []
    pairs = [(x, distance(x, y)) for x, y in zip(simulated, measured)]
    different = [(str(x.dtype).removeprefix("torch."), far) for x, far in pairs if far is not None]
    return "different" if different else "same", case, different


def _quiet() -> None:
    """Triton prints the code that it does not compile."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    np.seterr(all="ignore")
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000, help="how many random programs of integers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=_harness.RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no GPU: the simulator's values are compared with a GPU's")
    cases = [*expressions(), *map(program, range(args.programs))]
    counts: collections.Counter[str] = collections.Counter()
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    refused = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), initializer=_quiet) as pool,
    ):
        outcomes = pool.map(functools.partial(compared, folder), enumerate(cases), chunksize=16)
        for what, case, different in steps(outcomes, "arithmetic", total=len(cases)):
            kind = "program" if case.name.startswith("program") else "expression"
            counts[f"{kind}s, {what.partition(':')[0]}"] += 1
            if ":" in what:
                refused.append({"expression": case.name, "dtypes": case.dtypes, "what": what})
            for dtype, (far, place, found, wanted) in different:
                row = worst.setdefault((case.name, dtype), {"distance": -1.0, "of": 0})
                row["of"] += 1
                if far > row["distance"]:
                    at = [values(d, 7 * k + len(d))[place].item() for k, d in enumerate(case.dtypes)]
                    row |= {"distance": far, "dtypes": case.dtypes, "inputs": at, "simulator": found, "GPU": wanted}
    print(*(f"{what}: {n}" for what, n in sorted(counts.items())), sep="\n")
    rows = [{"expression": name, "result": dtype, **row} for (name, dtype), row in worst.items()]
    made = {
        "benchmark": "arithmetic_1",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python", "-m", "benchmarks.arithmetic", *sys.argv[1:]]),
        "commit": _harness.commit(),
        "host": _harness.host(),
        "counts": dict(counts),
        "refused by one only": refused,
        "different": sorted(rows, key=lambda row: -row["distance"]),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    Path(args.out, "arithmetic_1.json").write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
