"""Random operators, shapes, forms, workspaces, streams, graphs, frees, in worlds that open and close: nothing may grow.

    python -m benchmarks.soak --device cpu --seconds 60           simulated ranks
    python -m benchmarks.soak --device cuda --seconds 1200        GPUs

Every result is compared with the exact one, tile by tile. Between two worlds it notes the caller's resident memory,
descriptors, threads and objects of pkt. It fails if one of them is greater in the last third than in the middle one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

import pkt
from pkt.kernels.operator import operators
from pkt.progress import following
from pkt.runtime.world import World
from pkt.tune.distance import distance
from tests.conformance import inputs

CALLS = 12  # in each world
SLACK = {"resident MiB": 24.0, "descriptors": 2.0, "threads": 1.0, "worlds": 0.0, "plans": 0.0}
"""By how much the median of the last third may be above that of the middle third."""
BF16 = torch.bfloat16
BOUND = 2e-2  # greatest distance in bf16, after up to 8 roundings


def work(world: World, seed: int, calls: int) -> dict[str, float]:
    """Random calls on one rank, alike on all; the greatest distance and the descriptors of this process."""
    pick, worst, kept = random.Random(seed), 0.0, list[Any]()
    cuda = world.torch_device.type == "cuda"
    for launch in range(calls):
        name = pick.choice(sorted(operators()))
        operator = operators()[name]
        mode = pick.choice([m for m, form in operator.forms.items() if cuda or not form.gpu])
        case = pick.choice(list(inputs.cases_of(operator, mode)))
        dtype = inputs.usual(operator)
        everybody = inputs.everybody(operator, case, world.size, seed + launch, dtype)
        symmetric = operator.forms[mode].symmetric
        mine: dict[str, torch.Tensor | None] = {
            n: None if ts is None else inputs.placed(world, ts[world.rank], n in symmetric)
            for n, ts in everybody.items()
        }
        exact = inputs.exact(operator, case, world.rank, everybody)
        limit = inputs.bounds(operator, mode, case, world.rank, world.size, everybody, dtype)[0]
        if "out" in symmetric:
            mine["out"] = pkt.empty(tuple(exact.shape), dtype=BF16, world=world)
        way = pick.choice(("here", "stream", "graph")) if cuda else "here"
        try:
            if pick.random() < 0.3 and "workspace" in inspect.signature(operator.function).parameters:
                with pkt.Workspace(world) as workspace:
                    found = inputs.called(operator, mode, mine, case, world=world, workspace=workspace)
                    found = inputs.defined(found, exact, limit).clone()
            else:
                call = functools.partial(inputs.called, operator, mode, mine, case, world=world)
                found = inputs.defined(called(way, call, mine), exact, limit).clone()
            near = torch.as_tensor(limit, device=found.device)
            close = inputs.within(found.double(), exact.to(found.device), near)
            assert close.all(), (
                f"call {launch} of seed {seed}, {name}, {mode}, {way}, {case}: {off(found, exact, close.cpu())}"
            )
            if found.dtype == BF16:  # of which BOUND is
                worst = max(worst, distance(found, exact.to(found.device)))
        except pkt.Unsupported:
            continue  # on all ranks
        finally:
            kept += [t for n, t in mine.items() if n in symmetric and t is not None]
        while kept and pick.random() < 0.7:
            kept.pop(pick.randrange(len(kept))).free()
    return {"distance": worst, "descriptors": float(len(os.listdir("/proc/self/fd")))}


def called(way: str, call: Callable[[], Any], operands: Mapping[str, torch.Tensor | None]) -> Any:
    """What `call` returns here, on another stream, or in a graph that is replayed twice with the same operands."""
    if way == "here":
        return call()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensors = [t for t in operands.values() if t is not None]
        before = [t.clone() for t in tensors]  # some calls overwrite an operand
        found = call()
        if way == "graph":
            with torch.cuda.graph(graph, stream=stream):
                found = call()
            for _ in range(2):
                for tensor, kept in zip(tensors, before):
                    tensor.copy_(kept)
                graph.replay()
    stream.synchronize()
    return found


def off(found: torch.Tensor, exact: torch.Tensor, close: torch.Tensor) -> str:
    """How many elements are wrong, and the first of them."""
    wrong = (~close).nonzero().tolist()
    at = tuple(wrong[0])
    return f"{len(wrong)} of {close.numel()} elements; at {at} found {found[at].item():g}, wanted {exact[at].item():g}"


def state() -> dict[str, float]:
    """What may not grow in this process, after a collection of garbage."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    worlds = [found for found in gc.get_objects() if type(found) is World]
    return {
        "resident MiB": resident,
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(threading.active_count()),
        "worlds": float(len(worlds)),
        "plans": float(sum(len(scope.plans) for world in worlds for scope in world._scopes)),
    }


def grown(states: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """What grew from the middle third of the states to the last one by more than SLACK."""
    third = max(1, len(states) // 3)
    found = {}
    for name, slack in SLACK.items():
        before, after = (statistics.median(s[name] for s in part) for part in (states[third:-third], states[-third:]))
        if after > before + slack:
            found[name] = f"{before:g} -> {after:g}"
    return found


def soak(device: Literal["cpu", "cuda"], seconds: float, seed: int, ranks: int, calls: int = CALLS) -> dict[str, Any]:
    """Open worlds for so many seconds, three at least. {"worlds", "distance", "grown"}."""
    end, states, worst, pick = time.monotonic() + seconds, list[dict[str, float]](), 0.0, random.Random(seed)
    with following("soak, s", int(seconds), lambda: min(int(seconds), int(time.monotonic() - end + seconds))):
        while time.monotonic() < end or len(states) < 3:
            size = pick.randint(2, ranks) if device == "cpu" else ranks
            more: dict[str, Any] = {"sms": 4} if device == "cpu" else {}
            of_ranks = pkt.launch(work, size, device, (pick.randrange(1 << 30), calls), heap="64MiB", **more)
            worst = max(worst, *(one["distance"] for one in of_ranks))
            found = state()
            if device == "cuda":  # the workers are warm, and theirs may not grow either
                found["descriptors"] = max(one["descriptors"] for one in of_ranks)
            states.append(found)
    return {"worlds": len(states), "distance": worst, "grown": grown(states), "last": states[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    found = soak(options.device, options.seconds, options.seed, options.ranks)
    print(found)
    return 1 if found["grown"] or found["distance"] > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
