"""The torch.distributed group of a world's ranks, for collectives that NCCL runs and not pkt's kernels."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from pkt.errors import Unsupported
from pkt.runtime.world import World

_KEY = "pkt.process_group"


def process_group(world: World) -> dist.ProcessGroup:
    """The group of exactly this world's ranks, in their order. Collective the first time.

    It is the group that the world was made from, else torch's default group, else a default group that is made here and
    lives as long as the process: over NCCL if the world is on GPUs, else over gloo. Raises Unsupported in the
    simulator, whose ranks share a process, and if the default group has other ranks.
    """
    if _KEY not in world.lasting:
        world.lasting[_KEY] = world.group or _default(world)
    return world.lasting[_KEY]


def _default(world: World) -> dist.ProcessGroup:
    call = f"rank {world.rank}: torch's process group of a world"
    seconds = world.backend.timeout
    if seconds is None:
        raise Unsupported.here(call, "found the simulator, whose ranks share a process", "pkt's own forms run there")
    if world.parent is not None:
        remedy = "pkt's own forms run there; a world from pkt.init(group=...) has a group"
        raise Unsupported.here(call, "found a team, for which torch has made none", remedy)
    if not dist.is_available():
        raise Unsupported.here(call, "found a torch without torch.distributed", "pkt's own forms do without")
    if not dist.is_initialized():
        _initialise(world, datetime.timedelta(seconds=seconds))
    group = dist.group.WORLD
    assert group is not None
    places = world.all_gather_object([dist.get_rank(), dist.get_world_size()])
    if places != [[rank, world.size] for rank in range(world.size)]:
        found = f"found ranks {[rank for rank, _ in places]} of {places[0][1]} in torch's default group"
        raise Unsupported.here(call, found, "make the world from a group of its own ranks: pkt.init(group=...)")
    return group


def _initialise(world: World, timeout: datetime.timedelta) -> None:
    """Make a default group over a store that rank 0 serves on a free port."""
    cuda = world.torch_device.type == "cuda"
    store = None
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world.size, is_master=True, wait_for_workers=False, timeout=timeout)
    port: int = world.broadcast(store.port if store else 0)
    store = store or dist.TCPStore("127.0.0.1", port, world.size, is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout,
        device_id=world.torch_device if cuda else None,
    )  # fmt: skip
