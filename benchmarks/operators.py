"""Check the forms for GPUs, then run all benchmarks of the operators, one after another in the same warm processes.

    python -m benchmarks.operators --out FOLDER --seconds 420

Each benchmark has a share of the seconds and begins no variant after its share. Sizes that are not multiples of the
number of ranks are left out. A run with --ranks 3 into the folder of a run with --ranks 2 compares the times of both.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pkt
from benchmarks import _command, collectives
from benchmarks._check import BOUND
from benchmarks._collective import module_of
from benchmarks._harness import RESULTS
from benchmarks._process_group import ENVIRONMENT, prepare
from pkt.kernels.declaration import Case
from pkt.kernels.operator import operators
from pkt.runtime.workers import workers
from pkt.tune.distance import distance
from tests.conformance import inputs

SHAPES = ((512, 512, 512), (128, 64, 256), (96, 200, 264), (333, 1544, 1032), (16, 4096, 128))  # of letters, in order


def modules() -> dict[str, ModuleType]:
    """The benchmark modules to run: those of single operators that have a SHARE of the time, and the collectives'."""
    found = {name: module_of(name) for name in operators()}
    return {n: m for n, m in found.items() if m and hasattr(m, "SHARE")} | {"collectives": collectives}


def check(world: Any) -> list[str]:
    """Compare the forms that run on GPUs alone with the reference on small and ragged shapes, three launches each, with
    the settings that the operator's benchmark has in CHECKED. Returns a line for each shape and form."""
    prepare(world)
    lines = []
    for name, operator in operators().items():
        letters = inputs.letters_of(operator)
        checked: tuple[dict[str, Any], ...] = getattr(module_of(name), "CHECKED", ({},))
        for mode, form in operator.forms.items() if letters and not operator.cases[0].large else ():
            for settings in checked if form.gpu and form.settings else ():
                for shape in SHAPES:
                    worst = _worst(world, name, mode, Case(sizes=dict(zip(letters, shape))), settings)
                    right = "right" if worst < BOUND else "WRONG"
                    sizes = ", ".join(f"{letter} {n}" for letter, n in zip(letters, shape))
                    lines.append(f"{right}: {name} {mode}, {sizes}, {settings}: {worst:.1e}")
    return lines


def _worst(world: Any, name: str, mode: str, case: Case, settings: dict[str, Any]) -> float:
    """The greatest relative error of three launches with other operands in the same `out`."""
    operator, device, worst, out = operators()[name], world.torch_device, 0.0, None
    for launch in range(3):
        operands = inputs.everybody(operator, case, world.size, launch, inputs.usual(operator))
        on_gpu = {n: None if ts is None else [t.to(device) for t in ts] for n, ts in operands.items()}
        exact = inputs.exact(operator, case, world.rank, on_gpu)
        out = torch.empty(exact.shape, dtype=torch.bfloat16, device=device) if out is None else out
        mine = {n: None if ts is None else ts[world.rank] for n, ts in on_gpu.items()}
        found = operator.function(**mine, out=out.fill_(float("nan")), mode=mode, world=world, **settings)
        worst = max(worst, distance(found, exact.float(), 1.0))
    world.barrier()
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    end = time.monotonic() + options.seconds
    try:
        start = time.perf_counter()
        from benchmarks.operators import check as importable  # workers cannot import it from __main__

        answers = pkt.launch(importable, options.ranks, "cuda", heap="2GiB", timeout=20, multicast=False)
        for rank, lines in enumerate(answers):
            shown = lines if rank == 0 else [line for line in lines if not line.startswith("right")]
            print(*(f"rank {rank}: {line}" for line in shown), sep="\n", flush=True)
        print(f"check: {time.perf_counter() - start:.0f} s", flush=True)
    except Exception:  # the benchmarks record failures in more detail, so go on
        traceback.print_exc()
        if options.ranks in workers._warm:
            workers.warm(options.ranks).kill()
    result = 0
    left = {name: module.SHARE for name, module in modules().items()}
    for name, module in modules().items():
        seconds = (end - time.monotonic()) * left[name] / sum(left.values())
        del left[name]
        arguments = ["--ranks", str(options.ranks), "--seconds", str(seconds), "--out", str(options.out)]
        arguments += ["--sizes", options.sizes, "--only", options.only]
        result |= _command.main(name, module.TITLE, module.TARGETS, arguments)
    return result


if __name__ == "__main__":
    sys.exit(main())
