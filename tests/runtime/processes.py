"""Worlds of real processes on the CPU: the CUDA backend over the fake driver, opened as a worker opens its job."""

from __future__ import annotations

import os
from typing import Any

from pkt.runtime import bootstrap
from pkt.runtime.rendezvous import Meeting
from pkt.runtime.world import World

from .fake_driver import FakeDriver

STRIDE = 1 << 30
OPENER = "tests.runtime.processes:open_fake"
last: list[FakeDriver] = []  # this process's drivers, for what they leak


def open_fake(job: dict[str, Any]) -> World:
    """bootstrap.open_job with a FakeDriver; job["fail"] is {rank: {call: occurrence}}."""
    where = bootstrap.Place(job["rank"], job["size"], Meeting(job["directory"], job["token"]))
    if job.get("before") is not None:
        job["before"](job["rank"])
    driver = FakeDriver(job["rank"], fail=job.get("fail", {}).get(job["rank"]), gpus=job.get("gpus"))
    last[:] = [driver]
    return bootstrap.open_world(
        where, job["rank"], job.get("heap", 1 << 20), job["timeout"], driver=lambda rank: driver, stride=STRIDE
    )


def open_fds() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
