"""benchmarks.far without a GPU: its check in the simulator, and its kernels, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triton.language import constexpr

import pkt
from benchmarks import far
from examples.all_gather_nodes import all_gather_kernel
from pkt.errors import RankFailed
from pkt.language.inspect import compile_only, device_world
from pkt.language.world import team_constants
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
    world = device_world(rank, 2, node_size=1)
    team = constexpr(team_constants([rank], 2)[0])
    alone = world._replace(rank=0, size=constexpr(1), team=team, node_size=constexpr(0))
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
    worlds = (world, alone, world)
    compile_only(all_gather_kernel, *["*i32"] * 5, far.ELEMENTS, *worlds, 1024, arch=arch)
