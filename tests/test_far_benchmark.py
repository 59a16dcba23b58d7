"""benchmarks.far without a GPU: its check in the simulator, and its kernels, compiled with a world made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from benchmarks import far
from examples.all_gather_nodes import all_gather_kernel
from pkt.errors import RankFailed
from pkt.language.inspect import Pointer, compile_only
from tests import device_library


def test_every_call_passes_the_check() -> None:
    passed = pkt.launch(far.simulated, ranks=2, node_size=1, device="cpu")
    assert passed[0] == passed[1]
    assert len(passed[0]) == 2 * len(far.WAYS) + 2


def test_the_check_finds_wrong_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks send from where they receive."""
    one: dict[int, Any] = {}
    ground = far.Ground

    def shared(rank: int, worlds: Any, empty: Any, *rest: Any) -> far.Ground:
        return ground(rank, worlds, lambda count: one.setdefault(rank, empty(count)), *rest)

    monkeypatch.setattr(far, "Ground", shared)
    with pytest.raises(RankFailed, match="put_signal with counters of 32 bits: .* differ from what was sent"):
        pkt.launch(far.simulated, ranks=2, node_size=1, device="cpu", races=False)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("rank", [0, 1])
def test_its_kernels_compile(rank: int, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device_library.install(monkeypatch, tmp_path)
    node = far.Node.__new__(far.Node)
    node.rank, node.status, node.meet = rank, Pointer("int32"), lambda: None
    world, alone, rail = node.ground().worlds
    for dtype in ("*i32", "*i64"):
        for how in far.WAYS:
            args = ("*i32", "*i32", dtype, dtype, "*i32", far.ELEMENTS, 4000, 2000, world, how)
            ptx = compile_only(far.exchange_kernel, *args, arch=arch).asm["ptx"]
            assert ("// nvshmem_fence" in ptx) == (how == "fence")
            assert ("// nvshmem_quiet" in ptx) == (how == "quiet")
            assert ("// nvshmemx_putmem_signal_nbi_block" in ptx) == (how == "put_signal")
    compile_only(far.barrier_kernel, "*i32", "*i32", "*i32", "*i32", 2000, world, arch=arch)
    compile_only(far.ping_kernel, "*i32", "*i32", "*i32", 1000, 1000, world, arch=arch)
    compile_only(far.send_kernel, "*i32", "*i32", far.BIG // 4, world, arch=arch, num_warps=16)
    worlds = (world, alone, rail)
    compile_only(all_gather_kernel, *["*i32"] * 5, far.ELEMENTS, *worlds, 1024, arch=arch)


def test_memory_by_hand_holds_counters_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind 64 bytes for its epoch word, and data behind the lanes."""
    node = far.Node.__new__(far.Node)
    node._base, node._used = 1 << 40, {"arena": 4096, "data": 3 * far.ARENA}
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(node, "tensor", lambda at, count, dtype: made.append((at - node._base, count * dtype.itemsize)))
    node.signals(3, torch.int32)
    node.signals(5, torch.int64)
    node.empty(100)
    node.empty(100)
    assert made == [(4096 + 64, 12), (4352 + 64, 40), (3 * far.ARENA, 400), (3 * far.ARENA + 512, 400)]
    with pytest.raises(AssertionError, match="arena is full"):
        node.signals(far.ARENA, torch.int32)
