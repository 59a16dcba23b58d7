"""Check a variant against an fp32 reference, after each launch.

An input in which the result is linear is multiplied by powers of two between launches, so that data left over from an
earlier launch is wrong. Where a case names no such input, three launches have the same inputs, two in the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._case import Case
from pkt.errors import PktError, Unsupported, WaitTimeout
from pkt.tune.distance import distance

BOUND = 1e-2  # greatest `distance` in bf16; a wrong or late tile is far above it
SCALES = (1.0, -2.0, -2.0, 1.0, 4.0)  # of the inputs, launch by launch; they reach both halves of a double buffer
SIMULATED = (1.0, -2.0, 4.0)  # in the simulator, where a launch is dear: they reach the first half again


def checked(world: Any, case: Case, name: str, exact: list, cuda: bool) -> dict[str, Any]:
    """The row of a variant: its greatest error on any rank and the seconds of its first calls, or why it failed.
    Collective."""
    if name in case.skipped:
        return {"failed": case.skipped[name], "skipped": True}
    run, problem, left_out, error = case.variants.get(name), "", False, 0.0
    start = time.perf_counter()
    if run is None:
        return {"failed": "no such variant", "skipped": True}
    try:
        if name in case.unchecked:
            run()
        else:
            error = _error(case, run, exact, cuda)
        world.synchronize()
    except (WaitTimeout, torch.AcceleratorError):
        raise  # the device cannot launch again: end the job
    except Unsupported as unfit:  # on all ranks
        problem, left_out = str(unfit), name in case.optional
    except (PktError, RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as failure:
        problem = f"{type(failure).__name__}: {failure}"
        if cuda:
            torch.cuda.synchronize()  # raises if the context is lost
    problems = world.all_gather_object(problem)
    if any(problems):
        return {"failed": next(p for p in problems if p)[:600]} | ({"skipped": True} if left_out else {})
    errors = world.all_gather_object(error)
    row: dict[str, Any] = {
        "error": None if name in case.unchecked else max(errors),
        "first_s": time.perf_counter() - start,
    }
    bound = case.bounds.get(name, BOUND)
    if row["error"] is not None and not row["error"] <= bound:
        row["failed"] = f"wrong: error {row['error']:.2g}, wanted at most {bound:.2g}"
    return row


def _error(case: Case, run: Callable[[], torch.Tensor], exact: list[torch.Tensor], cuda: bool) -> float:
    """The greatest relative error over the launches."""
    if not exact:
        exact.append(case.exact())
    before, worst = 1.0, 0.0
    if case.scaled is None:
        return max(distance(run(), exact[0], 1.0) for _ in range(3 if cuda else 2))
    for scale in SCALES if cuda else SIMULATED:
        case.scaled.mul_(scale / before)
        before = scale
        worst = max(worst, distance(run(), exact[0], scale))
    case.scaled.mul_(1.0 / before)
    return worst
