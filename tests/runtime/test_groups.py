"""The torch process group of a world: its own group, the default group, or a new default group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pkt
from pkt.errors import Unsupported
from pkt.runtime import bootstrap
from pkt.runtime.groups import process_group

from . import forked
from .test_bootstrap import in_gloo, opened


def reduced(group: Any, value: int) -> float:
    x = torch.tensor([float(value)])
    dist.all_reduce(x, group=group)
    return x.item()


def on_cpu(world: Any) -> Any:
    """Return `world` with a CPU device, because the fake driver's memory lies on the CPU."""
    world.torch_device = torch.device("cpu")
    return world


def test_a_world_without_a_group_makes_the_default_one():
    def main(world: Any) -> Any:
        group = process_group(on_cpu(world))
        assert group is dist.group.WORLD
        assert process_group(world) is group
        return dist.get_rank(group), dist.get_world_size(group), reduced(group, 1 + world.rank)

    ends = forked.in_worlds(3, main)
    assert [end.value for end in ends] == [(rank, 3, 6.0) for rank in range(3)], ends


def test_subgroups_and_the_default_group_are_taken_as_they_are(tmp_path):
    def main(rank: int) -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = groups[rank % 2]
        with opened(bootstrap.place(mine, 10.0)) as small, opened(bootstrap.place(None, 10.0)) as whole:
            assert process_group(on_cpu(small)) is mine
            assert process_group(on_cpu(whole)) is dist.group.WORLD
            return reduced(process_group(small), 1 << rank), reduced(process_group(whole), 1 << rank)

    ends = in_gloo(tmp_path, 4, main)
    assert [end.value for end in ends] == [(5.0, 15.0), (10.0, 15.0)] * 2, ends


def test_a_default_group_of_other_ranks_is_refused(tmp_path):
    def main(rank: int) -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        with opened(bootstrap.place(groups[rank % 2], 10.0)) as world:
            world.group = None  # as in a world that the launcher opens
            with pytest.raises(Unsupported, match=r"of 4 in torch's default group.*pkt.init\(group=") as raised:
                process_group(on_cpu(world))
            return f"rank {world.rank}:" in str(raised.value)

    ends = in_gloo(tmp_path, 4, main)
    assert [end.value for end in ends] == [True] * 4, ends


def test_the_simulator_has_no_process_group():
    def main(world: Any) -> None:
        with pytest.raises(Unsupported, match="whose ranks share a process"):
            process_group(world)

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")
