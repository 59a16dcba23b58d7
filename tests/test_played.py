"""benchmarks.played without a GPU: the places of counters and inboxes, the settings, and the compiled kernels."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
from benchmarks import played
from pkt.kernels.all_gather_matmul.gluon import LANES
from tests.kernels.gluon_compiling import SIGNAL, Kernel, Symmetric, compiling_worlds


@triton.jit
def signal_kernel(flags, world, SIZE: tl.constexpr):
    for d in tl.static_range(1, SIZE):
        tl.atomic_add(played._peer(flags + 2, d, world), d, sem="relaxed", scope="sys")


def test_peer_finds_each_ranks_counters_on_the_other_gpu() -> None:
    def main(world: Any) -> list[int]:
        flags = pkt.signals(20)
        four = played.Played(world, 5)
        assert (four.rank, four.size, four.other) == (0, 4, 1 - world.rank)
        signal_kernel[(1,)](flags, four.device, four.size)
        world.barrier()
        return flags.tolist()

    wanted = [0] * 20
    wanted[7], wanted[12], wanted[17] = 1, 2, 3
    assert pkt.launch(main, ranks=2, device="cpu") == [wanted, wanted]


def test_inbox_holds_the_ranks_rows_in_rank_order() -> None:
    def main(world: Any) -> list[list[int]]:
        module = played.played("gathered", True, "")
        inbox = module.empty(2 * played.SIZE * 3, 2, dtype=torch.int32, name="inbox", world=played.Played(world, 0))
        inbox.plain().zero_()
        world.barrier()
        for rank in range(1, played.SIZE):
            inbox.peer(rank)[:3] = rank
        world.barrier()
        return inbox.plain()[:, 0].view(-1, 3).tolist()

    assert pkt.launch(main, ranks=2, device="cpu") == [[[r] * 3 for r in (0, 1, 2, 3, 0, 0, 0, 0)]] * 2


def test_plan_chooses_the_settings_that_were_played() -> None:
    """If the rule changes, benchmarks/results/played_2.json no longer shows the rule's settings."""
    dealt = {N: {played.plan(N, **given)[2:] for given in played.PUSHED.values()} for N in played.GATHERED}
    assert dealt == {4096: {(0, 2, 1, 1)}, 6144: {(0, 3, 1, 2)}}
    assert {played.plan(N)[:2] for N in played.GATHERED} == {(16, 128)}


def test_every_variant_compiles_and_signals_three_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that send nothing have no signal. A tile's owner is found at run time, so one signal is compiled. Every
    variant that sends has a fence, except those without fences."""
    world = compiling_worlds(monkeypatch)(1, 2)
    monkeypatch.setattr(played.factories, "empty", Symmetric)
    monkeypatch.setattr(played.factories, "signals", lambda n, **_: Symmetric(n, dtype=torch.int32))
    monkeypatch.setattr(played, "normal", lambda shape, *_: torch.empty(shape, dtype=torch.bfloat16))
    world.torch_device = torch.device("cpu")
    for module, name in (
        (played.played("gathered", True, ""), "gluon_push_kernel"),
        (played.played("gathered", True, "wait"), "gluon_push_kernel"),
        (played.played("gathered", True, "product"), "gluon_push_kernel"),
        (played.played("gathered", False, "product"), "gluon_push_kernel"),
        (played.played("scattered", True, ""), "gluon_inbox_kernel"),
        (played.played("scattered", True, "links"), "gluon_inbox_kernel"),
    ):
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), world.kernels))
    seen = set()
    for arguments in (arguments for arguments in played.cases(True).values() if arguments["N"] == 4096):
        made = (played._scattered if arguments["scattered"] else played._gathered)(world, arguments["N"])
        for name, run in made.variants.items():
            if name != played.BASELINE:
                run()
                ptx = world.kernels[-1].ptx
                signals = 0 if name in played.KEPT else 1 if arguments["scattered"] else 3 * LANES.value
                assert len(re.findall(SIGNAL, ptx)) == signals, name
                assert ("fence.acq_rel.sys" in ptx) == (name not in played.NO_FENCE and name not in played.KEPT), name
                seen.add(name)
    assert seen == set(played.variants("cuda", True)) - {played.BASELINE}


@pytest.mark.parametrize(("ranks", "device"), [(4, "cuda"), (1, "cuda"), (2, "cpu")])
def test_case_refuses_anything_but_two_gpus(ranks: int, device: str) -> None:
    world = SimpleNamespace(size=ranks, torch_device=torch.device(device))
    with pytest.raises(pkt.Unsupported, match=rf"found {ranks} ranks on {device}: wanted 2 GPUs: --ranks 2"):
        played.case(world, N=4096, scattered=False)
