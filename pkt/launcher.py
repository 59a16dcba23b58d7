"""pkt.launch and pkt.init: how a program gets its world, on GPUs or in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from pkt.errors import ShapeError, Unsupported
from pkt.runtime import world as worlds
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.world import World
from pkt.wording import size_text


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    device: Literal["cuda", "cpu"] = "cuda",
    args: Sequence[Any] = (),
    *,
    heap: int | str | None = None,
    timeout: float | None = None,
    multicast: bool = True,
    **options: Any,
) -> list[Any]:
    """Run `fn(world, *args)` on `ranks` ranks and return what each returned, in rank order.

    device "cuda" runs one process a GPU, "cpu" the simulator in this process; `fn` and its kernels are the same, and
    so are `heap`, `timeout` and `multicast`, as in pkt.init; the simulator has no time, so no timeout passes there. On
    GPUs processes stay warm between calls, and what a rank prints appears with its number; on the CPU further options
    go to the simulator (see pkt.simulate). A rank that raises ends the run with RankFailed, which carries that rank's
    traceback.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ShapeError.argument("pkt.launch", "ranks", ranks, "an integer from 1")
    if device == "cpu":
        from pkt.simulate.run import OPTIONS, run

        for name in options.keys() - OPTIONS:
            raise Unsupported.here("pkt.launch", f"found the option {name!r}", f"wanted {', '.join(sorted(OPTIONS))}")
        return run(fn, ranks, args=tuple(args), heap=heap_bytes(heap), multicast=multicast, **options)
    if device != "cuda":
        raise Unsupported.here("pkt.launch", f"found device {device!r}", 'wanted "cuda" or "cpu"')
    found = torch.cuda.device_count()
    if found < ranks:
        raise Unsupported.no_gpu("pkt.launch", f"wanted {ranks} GPUs, found {found}")
    for name in options:
        raise Unsupported.here("pkt.launch", f"found the option {name!r}", 'it is for device="cpu" only')
    from pkt.runtime.processes.transport import timeout_seconds
    from pkt.runtime.workers.workers import warm

    return warm(ranks).run(
        fn,
        args,
        "pkt.runtime.bootstrap:open_job",
        timeout_seconds(timeout),
        heap=heap_bytes(heap),
        multicast=multicast,
    )


def init(
    heap: int | str | None = None,
    *,
    group: Any = None,
    timeout: float | None = None,
    multicast: bool = True,
) -> World:
    """The world of this process: the one it runs in, or a new one over its GPU.

    group: a ProcessGroup or a DeviceMesh of one dimension (mesh["tp"]) whose ranks make the world; without it the
    default process group, else torchrun's environment, else this process alone. Rank and size are those of the group.
    timeout: seconds for every step of the rendezvous and every wait (PKT_TIMEOUT, then 60 where None). multicast: False
    does without the multicast window; it is used only if every rank has it. heap: most bytes of symmetric memory a rank
    may come to hold ("8GiB" or a number; PKT_HEAP, then 1 GiB where None). Inside pkt.launch the world is there
    already. Raises Unsupported where there is no GPU, with what to do instead, and where the ranks' GPUs cannot work
    together, with a table of them: ranks on several hosts need one NVLink domain over these.
    """
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
    from pkt.runtime.processes.transport import timeout_seconds

    seconds = timeout_seconds(timeout)
    where = bootstrap.place(group, seconds)
    world = bootstrap.open_world(where, bootstrap.own_device(), heap, seconds, multicast=multicast)
    return world.__enter__()
