"""A call that comes again costs the host few calls of Python, from its first line to its last launch, and one call of
the driver: on the fake driver, whose launches are one call each and whose part is left out."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import pytest
import torch

import pkt
from benchmarks.eager import FIRST, Sizes, ordered
from pkt.kernels.declaration import making
from tests.runtime.eager_worlds import Rank, eager_worlds

WARM = 4  # calls until all is planned and recorded
MOST = 35
MORE = {"ring_attention, parts": 154, "ring_attention_backward, parts": 389}
"""Forms of several calls of the driver, with their calls of Python: they queue many copies, and torch's attention to
each rank's keys, and are not replayed."""


class Cost(NamedTuple):
    """Of a call that comes again: calls of Python and of the driver."""

    python: int
    driver: int


def costs(rank: Rank) -> dict[str, Cost]:
    """By form."""
    found = {}
    for name, call in ordered(rank.world, Sizes(4096, 16), "", gpu=False):
        count = 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and f"{os.sep}tests{os.sep}" not in frame.f_code.co_filename

        try:
            call()
        except pkt.Unsupported:  # on every rank
            continue
        for _ in range(WARM):
            call()
        rank.world.barrier()
        if rank.world.rank == 0:
            before = rank.driver.calls.total()
            sys.setprofile(profile)
            try:
                call()
            finally:
                sys.setprofile(None)
            found[name] = Cost(count, rank.driver.calls.total() - before)
        rank.world.barrier()
    return found


def test_a_call_that_comes_again_is_few_calls_of_python_and_one_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: out)
    found = eager_worlds(2, costs, heap=1 << 26)[0]
    assert not isinstance(found, BaseException), found
    assert len(found) > 60
    assert any(word in name for name in found for word in FIRST)
    dear = {name: cost for name, cost in found.items() if cost.python > MORE.get(name, MOST)}
    assert not dear, f"more calls than {MOST} or {MORE}: {dear}"
    assert {name for name, cost in found.items() if cost.driver != 1} == set(MORE)


def test_torchs_deterministic_mode_fills_results() -> None:
    """As it fills torch.empty's, so that a read of memory that nobody wrote is found."""
    make = making([((1 << 16,), torch.float32)], torch.device("cpu"))
    torch.use_deterministic_algorithms(True)
    try:
        assert make()[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
