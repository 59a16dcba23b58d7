"""pkt.launch and pkt.init: how a program gets its world, on GPUs or in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from pkt.errors import ShapeError, Unsupported
from pkt.runtime import world as worlds
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.world import World, check_counts, check_flags, check_function
from pkt.wording import count_text, size_text


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    device: Literal["cuda", "cpu"] = "cuda",
    args: Sequence[Any] = (),
    *,
    heap: int | str | None = None,
    timeout: float | None = None,
    multicast: bool = True,
    node_size: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run `fn(world, *args)` on `ranks` ranks and return their results, in rank order.

    device: "cuda" runs one process per GPU, "cpu" the simulator in this process; `fn` and its kernels are the same.
    heap, timeout, multicast: as in pkt.init; no timeout expires in the simulator. node_size: ranks of a node, a divisor
    of `ranks`; None: one node. On GPUs ranks of other nodes are reached through NVSHMEM alone: docs/scale-out.md.
    options: for the simulator only, see pkt.simulate.

    On GPUs the processes stay warm between calls, and the output of a rank appears with its number. Threads may launch
    at the same time: launches of one size on GPUs, and all launches in the simulator, run one after the other.

    Raises RankFailed, which carries the rank's traceback, where a rank raises; in the simulator its first finding, such
    as DataRace or Deadlock; ShapeError or DtypeError for a wrong argument; Unsupported for another device, an option
    that the device does not have, and too few GPUs.
    """
    from pkt.runtime.processes.transport import timeout_seconds  # here, because importing pkt should load little

    check_counts("pkt.launch", ranks=ranks)
    check_function("pkt.launch", fn, args)
    check_flags("pkt.launch", multicast=multicast)
    seconds = timeout_seconds(timeout, "pkt.launch")
    if device == "cpu":
        from pkt.simulate.run import OPTIONS, run

        for name in options.keys() - OPTIONS:
            raise Unsupported.here("pkt.launch", f"found the option {name!r}", f"wanted {', '.join(sorted(OPTIONS))}")
        options |= {"multicast": multicast, "node_size": node_size}
        return run(fn, ranks, args=tuple(args), heap=heap_bytes(heap), **options)
    if device != "cuda":
        raise Unsupported.here("pkt.launch", f"found device {device!r}", 'wanted "cuda" or "cpu"')
    if node_size is not None:
        if isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1 or ranks % node_size:
            wanted = f"a divisor of the {count_text(ranks, 'rank')}"
            raise ShapeError.argument("pkt.launch", "node_size", repr(node_size), wanted)
    from pkt.runtime.gpu.sharing import may_share

    found = torch.cuda.device_count()
    if found < (1 if may_share() else ranks):
        raise Unsupported.no_gpu("pkt.launch", f"wanted {count_text(ranks, 'GPU')}, found {found}")
    for name in options:
        raise Unsupported.here("pkt.launch", f"found the option {name!r}", 'it is for device="cpu" only')
    from pkt.runtime.workers.workers import warm

    # The arguments first: a wrong one must start no process.
    opener, capacity = "pkt.runtime.bootstrap:open_job", heap_bytes(heap)
    return warm(ranks).run(fn, args, opener, seconds, heap=capacity, multicast=multicast, node_size=node_size)


def init(
    heap: int | str | None = None, *, group: Any = None, timeout: float | None = None, multicast: bool = True
) -> World:
    """The world of this process: the one it runs in, as inside pkt.launch, or a new one over its GPU.

    heap: most bytes of symmetric memory that a rank may come to hold ("8GiB" or a number; None: PKT_HEAP, then 1 GiB).
    group: a ProcessGroup or a DeviceMesh of one dimension (mesh["tp"]), whose ranks make the world; None: the default
    process group, else torchrun's environment, else this process alone. Rank and size are those of the group.
    timeout: seconds for every step of the rendezvous and every wait (None: PKT_TIMEOUT, then 60).
    multicast: False makes no multicast window. Otherwise there is one if every rank supports it.

    Hosts with no NVLink between them are nodes of one world, over NVSHMEM, with as many ranks on each host; so are
    PKT_NODE_SIZE ranks of a host, to try that out. It has never run over a network: docs/scale-out.md.

    Raises ShapeError for a wrong heap or timeout, before anything is made; Unsupported if there is no GPU, with a
    remedy, and if the ranks' GPUs cannot work together, with a table of them.
    """
    from pkt.runtime.processes.transport import timeout_seconds  # here, because importing pkt should load little

    check_flags("pkt.init", multicast=multicast)
    seconds = timeout_seconds(timeout)
    world = worlds._current()
    if world is not None and group is None:
        if heap is not None and heap_bytes(heap) > world.heap.capacity:
            found, wanted = size_text(heap_bytes(heap)), size_text(world.heap.capacity)
            wanted = f"at most {wanted}, which this world was made with"
            raise ShapeError.argument("pkt.init", "heap", found, wanted, world.rank)
        return world
    if not torch.cuda.is_available():
        raise Unsupported.no_gpu("pkt.init()", "found no CUDA GPU here and no world around this code")
    from pkt.runtime import bootstrap  # here, so that importing pkt loads no driver and no torch.distributed

    # Rank 0 makes a directory in `place`, so whatever can fail before goes before.
    capacity, device = heap_bytes(heap), bootstrap.own_device()
    world = bootstrap.open_world(bootstrap.place(group, seconds), device, capacity, seconds, multicast=multicast)
    return world.__enter__()
