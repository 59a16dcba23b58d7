"""Check the Gluon forms, then run all benchmarks of the operators, one after another in the same warm processes.

    python -m benchmarks.operators --out FOLDER --seconds 420

Each benchmark has a share of the seconds and begins no variant after its share. Sizes that are not multiples of the
number of ranks are left out. A run with --ranks 3 into the folder of a run with --ranks 2 compares the times of both.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import pkt
from benchmarks import _command
from benchmarks._case import normal
from benchmarks._check import BOUND, distance
from benchmarks._harness import RESULTS
from benchmarks._process_group import ENVIRONMENT, prepare
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.shared.gluon_fits import TILES
from pkt.kernels.shared.tile_product import Tiles
from pkt.runtime.workers import workers

SHARES = {"all_gather_matmul": 0.33, "matmul_reduce_scatter": 0.2, "matmul_all_reduce": 0.15, "collectives": 0.32}
PLANS: tuple[tuple[Tiles, dict[str, Any]], ...] = (
    (TILES, {"num_comm_sms": 132, "chunk": 512}),
    (TILES, {"num_comm_sms": 0}),
    (Tiles(128, 128, 64, num_stages=6), {"num_comm_sms": 5, "chunk": 256, "rounds_alone": 1, "cut_last": 4}),
)  # of the all-gather
SHAPES = ((512, 512, 512), (128, 256, 64), (96, 264, 200), (333, 1032, 1544), (16, 128, 4096))  # m, N, K


def check(world: Any) -> list[str]:
    """Compare the Gluon forms with fp32 on small and ragged shapes, three launches each; returns a line for each."""
    prepare(world)
    lines = []
    for m, N, K in SHAPES:
        device, size = world.torch_device, world.size
        b, rows = normal((K, N), 100 + world.rank, device), normal((size * m, K), world.rank, device)
        for tiles, plan in PLANS:
            worst = [0.0, 0.0, 0.0]
            for launch in range(3):
                shards = [normal((m, K), 10 * launch + r, device) for r in range(size)]
                out = torch.full((size * m, N), float("nan"), dtype=torch.bfloat16, device=device)
                all_gather_matmul(shards[world.rank], b, out, mode="gluon", tiles=tiles, **plan)
                worst[0] = max(worst[0], distance(out, torch.cat(shards).float() @ b.float(), 1.0))
                scale = float((-2) ** launch)
                part = torch.full((m, N), float("nan"), dtype=torch.bfloat16, device=device)
                copies = 2 * (plan["num_comm_sms"] == 0)
                matmul_reduce_scatter(rows * scale, b, part, mode="gluon", tiles=tiles, copies=copies)
                exact = torch.zeros(m, N, device=device)
                for r in range(size):
                    theirs = normal((size * m, K), r, device)[world.rank * m : (world.rank + 1) * m]
                    exact += theirs.float() @ normal((K, N), 100 + r, device).float()
                worst[1] = max(worst[1], distance(part, exact, scale))
                whole = matmul_all_reduce(rows * scale, b, mode="gluon", tiles=tiles, lag=1 + launch % 2)
                mine = whole[world.rank * m : (world.rank + 1) * m]
                worst[2] = max(worst[2], distance(mine, exact, scale))
            world.barrier()
            right = "right" if max(worst) < BOUND else "WRONG"
            lines.append(
                f"{right}: m {m}, N {N}, K {K}, {tiles[:2]}, {plan}: push {worst[0]:.1e}, inbox {worst[1]:.1e}, "
                f"all-reduce {worst[2]:.1e}"
            )
    return lines


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
    left = dict(SHARES)
    for name in SHARES:
        seconds = (end - time.monotonic()) * left[name] / sum(left.values())
        del left[name]
        module = importlib.import_module(f"benchmarks.{name}")
        arguments = ["--ranks", str(options.ranks), "--seconds", str(seconds), "--out", str(options.out)]
        arguments += ["--sizes", options.sizes, "--only", options.only]
        result |= _command.main(name, module.TITLE, module.TARGETS, arguments)
    return result


if __name__ == "__main__":
    sys.exit(main())
