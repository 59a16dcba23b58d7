"""Helpers of the GPU tests: run a program on real ranks, or many programs in one world."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import RankFailed
from pkt.runtime.gpu.sharing import may_share

HEAP = "256MiB"
TIMEOUT = 30.0  # seconds that a rank may compile while its peers wait
FOUND = 8 if may_share() else torch.cuda.device_count()
MULTICAST = os.environ.get("PKT_TEST_MULTICAST") == "1"  # off: not every host's GPUs survive a multicast object
RANKS = os.environ.get("PKT_TEST_RANKS", "1,2,3,4")


def unless_possible(ranks: int) -> pytest.MarkDecorator:
    """Skip, with the reason, where there are too few GPUs or PKT_TEST_RANKS leaves this number out."""
    if ranks > FOUND:
        return pytest.mark.skipif(True, reason=f"needs {ranks} GPUs, found {FOUND}")
    return pytest.mark.skipif(str(ranks) not in RANKS.split(","), reason=f"PKT_TEST_RANKS is {RANKS}")


def on_ranks(*ranks: int) -> pytest.MarkDecorator:
    """Parametrise `ranks`; a number that this machine or PKT_TEST_RANKS rules out is skipped."""
    return pytest.mark.parametrize("ranks", [pytest.param(r, marks=unless_possible(r)) for r in ranks])


def scaled(name: str, count: int) -> int:
    """`count`, or the environment variable PKT_TEST_<name> if it is set, for shorter or longer runs."""
    return int(float(os.environ.get(f"PKT_TEST_{name}", count)))


def on_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for a worker process: tensors made without device= are on its GPU, and the GPU has finished at the end."""

    def run(world: Any, *args: Any) -> Any:
        with world.torch_device:
            result = fn(world, *args)
        world.synchronize()
        return result

    return run


def launch(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run `fn(world, *args)` on that many GPUs; returns each rank's result."""
    return pkt.launch(
        on_device(fn), ranks=ranks, device="cuda", args=args, heap=HEAP, timeout=timeout, multicast=MULTICAST
    )


class Batch:
    """Runs many programs one after the other in one world, because a world costs more than most programs.

    A program that fails ends its world. The programs after it run in a new world.
    """

    def __init__(self, programs: dict[str, Callable[[Any], None]]) -> None:
        self.programs = programs
        self.failures: dict[int, dict[str, BaseException]] = {}

    def check(self, name: str, ranks: int) -> None:
        """Raise the error of `name` on that many ranks, if it failed."""
        if ranks not in self.failures:
            self.failures[ranks] = self._run(ranks)
        error = self.failures[ranks].get(name)
        if error is not None:
            raise error

    def _run(self, ranks: int) -> dict[str, BaseException]:
        failed: dict[str, BaseException] = {}
        names = list(self.programs)
        while names:
            start = time.perf_counter()
            try:
                launch(one_after_the_other, ranks, [(name, self.programs[name]) for name in names])
                print(f"{len(names)} programs on {ranks} ranks: {time.perf_counter() - start:.1f} s")
                return failed
            except RankFailed as error:
                said = [name for name in re.findall(r"in program (\S+):", str(error)) if name in names]
                culprit = said[-1] if said else names[0]
                failed[culprit] = error
                names = names[names.index(culprit) + 1 :]
        return failed


def one_after_the_other(world: Any, programs: Sequence[tuple[str, Callable[[Any], None]]]) -> None:
    """Run each program, then the next. An error names the program that it happened in."""
    for name, fn in programs:
        try:
            fn(world)
            world.synchronize()
        except Exception as error:
            raise RuntimeError(f"in program {name}: {type(error).__name__}: {error}") from error
