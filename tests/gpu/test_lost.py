"""A rank that is killed or stopped while kernels of all ranks wait for each other: every survivor leaves in time."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pkt.errors import PktError
from tests.gpu.cases_graphs import Exchange
from tests.gpu.run import launch, on_ranks, scaled

LOSSES = scaled("LOSSES", 5)  # of each kind; a lost process takes seconds to replace
DEADLINE = 5.0


def with_a_loss(world: Any, how: int, victim: int, after: float, folder: str) -> None:
    """Launch until the victim is gone; each survivor writes down its error and the seconds until it."""
    departure, program = Path(folder, "departure"), Exchange(world)

    def leave() -> None:
        departure.write_text(repr(time.time()))
        os.kill(os.getpid(), how)

    program.launch()
    world.synchronize()
    world.barrier()
    if world.rank == victim:
        threading.Timer(after, leave).start()
    try:
        while True:
            for _ in range(50):
                program.launch()
            world.synchronize()
    except PktError as error:
        told = {"after": time.time() - float(departure.read_text()), "error": f"{type(error).__name__}: {error}"}
        Path(folder, f"rank{world.rank}").write_text(json.dumps(told))
        raise


@on_ranks(2, 4)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_leave_in_time(how: int, ranks: int, tmp_path: Path) -> None:
    chance = random.Random(ranks)
    for loss in range(LOSSES):
        folder, victim = tmp_path / str(loss), loss % ranks
        folder.mkdir()
        with pytest.raises(PktError):
            launch(with_a_loss, ranks, int(how), victim, 0.05 * chance.random(), str(folder), timeout=DEADLINE)
        told = {path.name: json.loads(path.read_text()) for path in folder.glob("rank*")}
        assert set(told) == {f"rank{rank}" for rank in range(ranks) if rank != victim}
        for name, what in told.items():
            assert what["after"] < DEADLINE + 2, (name, what)
            if how == signal.SIGKILL:
                assert f"rank {victim}" in what["error"], (name, what)
        worst = max(what["after"] for what in told.values())
        print(f"rank {victim} of {ranks} lost: survivors left after {worst:.2f} s")
