"""Calls to far ranks over NVSHMEM on two GPUs, each a node of its own: every call of benchmarks.far is right.

PKT_TEST_TURNS changes how many turns a check takes.
"""

import subprocess
import sys

import pytest

from pkt.language.ptx import nvshmem
from tests.gpu.run import scaled, unless_possible

TURNS = scaled("TURNS", 10_000)
pytestmark = [
    unless_possible(2),
    pytest.mark.skipif(nvshmem.installed() is None, reason=f"no NVSHMEM: {nvshmem.INSTALL}"),
]


def test_calls_to_far_ranks() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "benchmarks.far", "--turns", str(TURNS),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=240)
    print(found.stdout)
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.count("right: ") == 8
