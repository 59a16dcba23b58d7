"""The Gluon kernels of the benchmarks of parts, each with a part left out, compiled for sm_90 without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _parts
from pkt.language.inspect import count_markers
from tests.kernels.gluon_compiling import (
    NARROW,
    TILES,
    Compiled,
    Kernel,
    PushPlan,
    Symmetric,
    World,
    assert_fits,
    compiling_worlds,
    tensors,
)
from tests.kernels.machine_code import sass


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """without(part): a world, and the operator's module without that part."""

    def make(part: str) -> tuple[World, Any]:
        world, module = compiling_worlds(monkeypatch)(), _parts.without(part)
        name = "gluon_inbox_kernel" if part == "links" else "gluon_push_kernel"
        monkeypatch.setattr(module, "empty", Symmetric)
        monkeypatch.setattr(module, "signals", lambda n, **_: Symmetric(n, dtype=torch.int32))
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), world.kernels))
        return world, module

    return make


def launched(world: World, module: Any, part: str, make: Any, *facts: Any) -> Compiled:
    a, b, out, _ = tensors(*facts, torch.bfloat16, False, False)
    make(_parts.Apart(world, module, part), a, b, out)(a, b, out, None)
    return world.kernels[-1]


@pytest.mark.parametrize(("part", "num_comm"), [("wait", 16), ("push", 0), ("product", 16)])
def test_a_push_without_waits_without_pushing_and_without_the_product(
    without: Any, tmp_path: Path, part: str, num_comm: int
) -> None:
    world, module = without(part)
    plan = PushPlan(cut_last=4)
    facts = (1024, 1024), (1024, 1024), (4096, 1024)
    launch = launched(world, module, part, lambda *given: module.push_launch(*given, plan, TILES), *facts)
    assert launch.args[module.gluon_push_kernel.arg_names.index("num_comm")] == num_comm
    assert count_markers(launch.ptx)["wait"] == 0
    code = sass(launch.kernel, tmp_path)
    assert ("HGMMA" in code) == (part != "product")
    assert code.count("UTMASTG.2D") == 2 * 3  # each lane stores one unit on each peer
    if part != "product":
        assert_fits(launch, tmp_path)


@pytest.mark.parametrize("tiles", [TILES, NARROW])
def test_an_inbox_without_links(without: Any, tmp_path: Path, tiles: Any) -> None:
    """The part is left out of the source, so the compiler has no wait or signal of it to lose."""
    world, module = without("links")
    facts = (4096, 1024), (1024, 4096), (1024, 4096)
    launch = launched(world, module, "links", lambda *given: module.inbox_launch(*given, tiles, 3), *facts)
    assert_fits(launch, tmp_path)
    for stage in ("ttgir", "ptx"):
        assert count_markers(launch.kernel.asm[stage]) == {"wait": 0, "signal": 0}
    assert ".global.sys.relaxed" not in launch.ptx
    inbox, *peers = (launch.args[n] for n in (3, 4, 5, 6))
    assert all(peer.base is inbox.base for peer in peers)


def test_a_kernel_without_a_part_has_counters_of_its_own(without: Any) -> None:
    """It shares the operator's inbox, but not the operator's counters."""
    world, module = without("wait")
    mine = module.push_launch  # makes the inbox and the counters
    facts = (1024, 1024), (1024, 1024), (4096, 1024)
    a, b, out, _ = tensors(*facts, torch.bfloat16, False, False)
    mine(world, a, b, out, PushPlan(), TILES)
    (key,) = world.spaces
    inbox, ready = world.spaces[key]
    found = _parts.Apart(world, module, "wait").keep(key, lambda: None)
    assert found[0] is inbox
    assert found[1] is not ready
    assert found[1].shape == ready.shape
