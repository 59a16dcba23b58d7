"""A job: check and then time the variants of a case, on one rank of `pkt.launch`.

A variant that fails leaves a row with its message. A variant that takes too long ends its process, so nothing hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

import pkt
from benchmarks._case import Case
from benchmarks._check import checked
from benchmarks._process_group import prepare
from benchmarks._timing import PASSES, Settings, summary, timed


def job(
    world: pkt.World, module: str, label: str, arguments: dict, names: list[str], settings: Settings, journal: str
) -> list[dict[str, Any]]:
    """Check and time the variants `names` of a case on this rank; returns a row each. Collective.

    journal: the file to which rank 0 writes the name of each variant that it begins.
    """
    cuda = world.torch_device.type == "cuda"
    if cuda:
        prepare(world)
    case: Case = importlib.import_module(module).case(world, **arguments)
    exact: list[torch.Tensor] = []
    rows = []
    for name in names:
        sent, flops = case.fewer.get(name, case.nbytes), case.more.get(name, case.flops)
        row: dict[str, Any] = {"case": label, "variant": name, "bytes": sent, "flops": flops}
        if world.broadcast(time.time() > settings.end):
            row |= {"failed": "out of time", "skipped": True}
        else:
            with _watched(world, name, settings, journal):
                row |= checked(world, case, name, exact, cuda)
        rows.append(row)
    if cuda:
        sound = [row for row in rows if not row.get("failed")]
        times: dict[str, list[dict[str, Any]]] = {row["variant"]: [] for row in sound}
        for i in range(PASSES):
            for row in random.Random(i).sample(sound, len(sound)):  # in the same order on every rank
                name = row["variant"]
                with _watched(world, name, settings, journal):
                    times[name].append(timed(world, case.variants[name], settings))
        for row in sound:
            row |= summary(times[row["variant"]])
    return rows


@contextlib.contextmanager
def _watched(world: Any, name: str, settings: Settings, journal: str) -> Iterator[None]:
    """End the process if the block takes longer than `settings.seconds`. The last line of the journal then names the
    variant."""
    if not journal:
        yield
        return
    if world.rank == 0:
        with open(journal, "a", encoding="utf-8") as file:
            file.write(name + "\n")
    faulthandler.dump_traceback_later(settings.seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
