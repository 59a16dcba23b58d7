"""Worlds of two nodes on one host, over NVSHMEM's device calls alone: the parts of cases_nodes in one job of torchrun,
a killed rank, and pkt.launch. A node is one rank, or two: on a host with two GPUs two ranks then share each.

    python -m pytest -s tests/gpu/test_nodes.py        -s shows the parts as they end

A job that ends with a part is started again with the parts behind it. PKT_TEST_SECONDS limits the jobs;
PKT_TEST_REPLAYS and PKT_TEST_TURNS make parts shorter or longer.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import pkt
from pkt.language.ptx import nvshmem
from tests.gpu.cases_nodes import LIMIT, NAMES
from tests.gpu.run import scaled, unless_possible

SECONDS = scaled("SECONDS", 210)
NEAR = (1, 2)  # ranks of a node
DEADLINE = 10  # seconds in which a lost rank must be named
ROOT = Path(__file__).parents[2]
pytestmark = [
    unless_possible(2),
    pytest.mark.skipif(nvshmem.installed() is None, reason=f"no NVSHMEM: {nvshmem.INSTALL}"),
]


def said(process: subprocess.Popen[str], seconds: float) -> list[str]:
    """The lines of a process, shown as they come. It is killed after `seconds`."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    process.wait()
    timer.cancel()
    return lines


def started(near: int, command: list[str], **environment: str) -> subprocess.Popen[str]:
    shared = {"PKT_SHARE_GPU": "1"} if torch.cuda.device_count() < 2 * near else {}
    variables = {**os.environ, **shared, "PKT_NODE_SIZE": str(near), **environment}
    return subprocess.Popen(
        [sys.executable, *command], env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@functools.cache
def outcomes(near: int) -> tuple[dict[str, list[str]], list[int]]:
    """What the ranks said of each part, and the exit codes of the jobs."""
    end, left = time.monotonic() + SECONDS, list(NAMES)
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    codes = []
    while left and time.monotonic() < end:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * near)]
        job = started(near, [*torchrun, "-m", "tests.gpu.cases_nodes", *left])
        lines = said(job, end - time.monotonic())
        codes.append(job.returncode)
        for line in lines:
            for name, rank, text in re.findall(r"PART ([\w ]+): rank (\d): (.*?)(?=PART |$)", line):
                found[name].append(f"rank {rank}: {text}")
        if "\n".join(lines).count("END rank") == 2 * near:
            break
        wrong = (name for name in left if any("WRONG" in line for line in found[name]))
        culprit = next(wrong, next((name for name in left if len(found[name]) < 2 * near), left[-1]))
        found[culprit].append("the job ended: " + " | ".join(lines[-12:]))
        left = left[left.index(culprit) + 1 :]
    for name in left:
        if not found[name]:
            found[name].append(f"not begun after {SECONDS} s")
    return found, codes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("near", NEAR)
def test_part(near: int, name: str) -> None:
    told = outcomes(near)[0][name]
    assert len(told) == 2 * near, told
    assert all(re.match(r"rank \d: right, ", line) for line in told), told


@pytest.mark.parametrize("near", NEAR)
def test_a_job_ends_by_itself(near: int) -> None:
    assert outcomes(near)[1] == [0]


def test_a_killed_rank_is_named() -> None:
    """Without torchrun, which would end the survivor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        started(1, ["-m", "tests.gpu.cases_nodes", "lost"], RANK=str(rank), LOCAL_RANK=str(rank), **where)
        for rank in range(2)
    ]
    try:
        killed, survived = said(ranks[1], LIMIT), said(ranks[0], LIMIT)
    finally:
        for process in ranks:
            process.kill()
    at = next(float(line.split()[1]) for line in killed if line.startswith("KILLED"))
    told = next(line for line in survived if line.startswith("SURVIVED"))
    assert re.search(r"PeerLost: .*rank 1", told), told
    assert float(told.split()[1]) - at < DEADLINE, told
    assert ranks[0].returncode == 0


def places(world: pkt.World) -> tuple[int, int, float]:
    x = torch.full((100,), float(world.rank), device=world.torch_device)
    return world.nodes, world.node, pkt.all_reduce(x)[0].item()


def test_launch_makes_nodes_and_then_one_node() -> None:
    options = {"ranks": 2, "device": "cuda", "heap": "64MiB", "timeout": 30.0, "multicast": False}
    for _ in range(2):
        assert pkt.launch(places, node_size=1, **options) == [(2, 0, 1.0), (2, 1, 1.0)]
    assert pkt.launch(places, **options) == [(1, 0, 1.0), (1, 0, 1.0)]
