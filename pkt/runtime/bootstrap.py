"""From running processes to a world: this process's rank, where the ranks meet, and its GPU.

A process learns its place from torch.distributed (an initialised process group, a subgroup, a dimension of a device
mesh), from torchrun's environment, or from pkt's launcher, which hands every worker its place. Of torch.distributed
only keys of the store are used, no collective of the group, so subgroups may make their worlds in any order. A key is
made of the group, its members, and a count of the group's worlds. Over the same store the ranks find out whether they
are on one host or several (`processes.network`). The store is not believed: on one host it names a directory that only
this user can enter, and several hosts need a PKT_SECRET.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pkt.errors import RankError, ShapeError, Unsupported, WaitTimeout, ranks_named
from pkt.runtime.gpu import nvshmem, topology
from pkt.runtime.gpu.cuda import STRIDE, CudaBackend
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.gpu.nodes import NodesBackend
from pkt.runtime.gpu.sharing import device_of
from pkt.runtime.gpu.symmetric import Libraries
from pkt.runtime.gpu.votes import Votes
from pkt.runtime.gpu.watch import Watch
from pkt.runtime.launch.launch import provide_scratch
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.processes import network, rendezvous
from pkt.runtime.processes.network import Board, Network, this_host
from pkt.runtime.processes.rendezvous import Meeting
from pkt.runtime.processes.transport import Transport
from pkt.runtime.world import World
from pkt.wording import count_text

_JOB = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# Seconds that host code waits longer for a peer than kernels do, because a kernel's record says more.
HOST_GRACE = 1.0

_worlds_of: Counter[tuple[str, tuple[int, ...]]] = Counter()  # how many worlds each group has had in this process


@dataclasses.dataclass(frozen=True)
class Place:
    """One process's place in a world that is about to be made."""

    rank: int
    size: int
    meeting: Meeting
    group: Any = None  # torch's process group of the same ranks, if the world is made from one
    host: str = dataclasses.field(default_factory=this_host)
    board: Board | None = None  # where ranks write their hosts; None: all are on this host
    job: str = ""  # a random text that rank 0 wrote to the board


def place(group: Any, timeout: float) -> Place:
    """This process's place: in `group`, else the default group, else torchrun's job, else alone. timeout: seconds.
    Raises RankError if `group` does not have this process, WaitTimeout if rank 0 does not come."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RankError.outside(dist.get_rank(), "pkt.init(group=)", "outside the group", dist.get_world_size())
    if group is not None and not isinstance(group, dist.ProcessGroup):  # a DeviceMesh; get_group refuses two dimensions
        group = group.get_group()
    if group is not None or (dist.is_available() and dist.is_initialized()):
        group = group or dist.group.WORLD
        rank, members = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
        from torch.distributed.distributed_c10d import _get_default_store

        key = (group.group_name, members)
        found = _place_by_store(_get_default_store(), key, rank, len(members), timeout)
        return dataclasses.replace(found, group=group)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = _job_store(*(os.environ.get(name, "") for name in _JOB), timeout=timeout)
        return _place_by_store(store, ("env", tuple(range(size))), rank, size, timeout)
    return Place(0, 1, rendezvous.prepare())


@functools.cache  # rank 0 may serve the store, so it must live as long as the process
def _job_store(address: str, port: str, rank: str, size: str, timeout: float) -> tuple[Any, int, int]:
    return next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))))


def _place_by_store(store: Any, group: tuple[str, tuple[int, ...]], rank: int, size: int, timeout: float) -> Place:
    _worlds_of[group] += 1
    key = f"pkt/{group[0]}/{'-'.join(map(str, group[1]))}/{_worlds_of[group]}"
    board = Board(store, key, rank, network.secret())
    if rank == 0:
        meeting, job = dataclasses.replace(rendezvous.prepare(), board=board), secrets.token_hex(16)
        try:
            meeting.publish()
            board.write("meeting", 0, [meeting.directory, job])
        except BaseException:
            meeting.remove()
            raise
        return Place(rank, size, meeting, board=board, job=job)
    try:
        found = board.read("meeting", 0, timeout)
    except TimeoutError as error:
        raise WaitTimeout.rendezvous(rank, "pkt.init()", timeout, [0]) from error
    if not isinstance(found, list) or [type(text) for text in found] != [str, str]:
        raise board.refused("meeting", 0, found, "a directory and a name")
    return Place(rank, size, Meeting(found[0], "", board), board=board, job=found[1])


def _meeting_place(where: Place, timeout: float) -> tuple[rendezvous.MeetingPlace, list[str]]:
    """The ranks' meeting place, and every rank's host. Raises Unsupported on several hosts without a PKT_SECRET."""
    board, rank, size = where.board, where.rank, where.size
    if board is None or size == 1:
        return where.meeting, [where.host] * size
    hosts = board.gather("host", rank, size, where.host, timeout)
    if len(set(hosts)) == 1:
        return where.meeting.entered(rank), hosts
    if not board.secret:
        raise Unsupported.no_secret(rank, hosts, network.SECRET_LETTERS)
    addresses = board.gather("address", rank, size, board.address(), timeout)
    return Network(board, board.token(where.job), rank, hosts, addresses), hosts


def own_device() -> int:
    """The GPU of this process: the current one, or that of LOCAL_RANK if none has been used yet."""
    local, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not torch.cuda.is_initialized() and local.isdigit() and device_of(int(local), count) < count:
        torch.cuda.set_device(device_of(int(local), count))
    torch.cuda.synchronize()  # makes torch's context, which the driver's calls need
    return torch.cuda.current_device()


def open_job(job: dict[str, Any]) -> World:
    """The world of one job of pkt.launch, in its worker process: rank r takes GPU r."""
    device = device_of(job["rank"], torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize()  # makes the context
    where = Place(job["rank"], job["size"], Meeting(job["directory"], job["token"]))
    options = {"multicast": job["multicast"], "node_size": job["node_size"]}
    return open_world(where, device, job["heap"], job["timeout"], **options)


def node_size_of(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks of a node, by PKT_NODE_SIZE; None without it. Raises ShapeError if it does not divide
    `size`, unless it is greater: all are then on one node."""
    found = environment.get("PKT_NODE_SIZE", "").strip()
    if not found:
        return None
    if not found.isdecimal() or int(found) < 1 or (int(found) < size and size % int(found)):
        wanted = f"a divisor of the {count_text(size, 'rank')}"
        raise ShapeError.argument("pkt.init", "PKT_NODE_SIZE", repr(found), wanted, rank)
    return min(int(found), size)


def open_world(
    where: Place,
    device: int,
    heap: int | str | None,
    timeout: float,
    *,
    driver: Callable[[int], CudaDriver] = CudaDriver,
    libraries: Libraries = nvshmem.Library,
    stride: int = STRIDE,
    multicast: bool = True,
    node_size: int | None = None,
) -> World:
    """Collective: meet, probe, map, and allocate the status page. A failure leaves nothing behind but NVSHMEM, where it
    has started.

    timeout: seconds for every step and for waits on the GPU. driver: makes the driver of a rank. libraries: makes its
    NVSHMEM. stride: bytes from one rank's window to the next. node_size: ranks of a node; None: by PKT_NODE_SIZE,
    without which a node is the GPUs of a host, or of an NVLink domain.
    """
    keep = False
    try:
        asked = node_size_of(where.rank, where.size) if node_size is None else node_size
        capacity = heap_bytes(heap)
        meeting, hosts = _meeting_place(where, timeout)
        keep = where.board is None and where.size > 1  # pkt.launch removes it; until then a late rank finds notes there
        connections = rendezvous.connect(meeting, where.rank, where.size, timeout)
        keep = False
        transport = Transport(where.rank, where.size, connections, timeout)
        try:
            calls = driver(where.rank)
            found = topology.node_size(Votes(transport, f"cuda:{device}"), calls, device, hosts)
            near = asked or found  # every rank asks, also where only some have PKT_NODE_SIZE: the topology names these
        except BaseException as error:
            transport.give_up(f"{type(error).__name__}: {error}")
            raise
        backend: CudaBackend
        if near < where.size:
            nodes: dict[str, Any] = {"node_size": near, "libraries": libraries}
            backend = NodesBackend(calls, transport, device, capacity, hosts=hosts, **nodes)
        else:
            more: dict[str, Any] = {"stride": stride, "want_multicast": multicast}
            backend = CudaBackend(calls, transport, device, capacity, hosts=hosts, **more)
    finally:
        if where.rank == 0 and not keep:
            where.meeting.remove()
    try:
        world = World(backend, capacity, where.group)
        backend.synchronize()  # the current stream zeroes the status page, and the watch writes to it on another
        watch = Watch(backend, world.heap, timeout)
        backend.attach(watch.check, watch.close)
        provide_scratch()
        transport.timeout = timeout + HOST_GRACE
        world.barrier()
        return world
    except BaseException as error:
        if lost := ranks_named(error):  # other errors here are those of all ranks
            backend.abandon(f"{type(error).__name__}: {error}", lost)
        backend.close()
        raise
