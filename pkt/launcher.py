"""pkt.launch: one call runs a function on every rank, on GPUs or in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from pkt.errors import ShapeError, Unsupported
from pkt.runtime.memory.heap import heap_bytes


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
