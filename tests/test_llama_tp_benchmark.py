"""benchmarks.llama_tp: what it compares is right on simulated ranks, and its rows say who is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pkt
from benchmarks import llama_tp
from examples.llama_tp import Shape

TINY = Shape(vocabulary=0, features=64, layers=2, heads=4, kv_heads=2, hidden=48)
BOUND = 0.02  # bf16, two layers


@pytest.mark.parametrize(("job", "size"), [("prefill", 6), ("decoding", 3), ("training", 6)])
def test_every_job_is_right(job: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_tp, "KEPT", 8)
    monkeypatch.setattr(
        llama_tp.Models, "compiled", lambda models, stack, split=True: models.parallel(stack, split)
    )  # fmt: skip

    def main(world: Any) -> dict[str, float]:
        jobs = llama_tp.Jobs(world, llama_tp.Models(world, TINY, {"pkt": (pkt.parallelize, world)}))
        with torch.set_grad_enabled(job == "training"):
            runs, exact = getattr(jobs, job)(size)
            return llama_tp.errors(world, runs, exact)

    for found in pkt.launch(main, ranks=2, device="cpu"):
        assert list(found) == (["pkt, split"] if job == "prefill" else ["pkt"])
        assert 0 < max(found.values()) < BOUND


def test_the_fastest_of_nccl_counts() -> None:
    times = {"pkt, split": [1.0, 1.0], "NCCL, split": [1.2, 1.2], "NCCL": [1.1, 1.3], llama_tp.ASYNC: [0.9, 0.9]}
    found = {"prefill, 4096": {name: {"ms": ms, "error": 0.0} for name, ms in times.items()}}
    *_, nccl, torchs = llama_tp.rows_of(found, 2)
    assert (nccl.value, nccl.held) == (pytest.approx(1.15), True)
    assert (torchs.value, torchs.held) == (pytest.approx(0.9), False)
