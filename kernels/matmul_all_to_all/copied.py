"""The form "copy": torch multiplies for one rank after the other, and copy engines move what is there meanwhile.

The product has a part for each rank, the columns of its heads. The peers' parts come first, and the rank's own last, so
only the last peer's part may have to be waited for. Two products of half of the columns take what one of all takes.
Heads are normed and rotated in place behind their product, by a kernel.

The parts go straight to their place in `out` where that is symmetric, else into an inbox, from which a kernel copies
them. Ranks meet twice: before the first copy, on the stream for copies, while the first product runs, because a peer
may still be at what it got last time; and in the end, when all parts have arrived. The first meeting is one program,
and nothing that it waits for is behind it on any rank.
"""

from __future__ import annotations

import torch

from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..shared import copies
from ..shared.grid import barrier_counters
from ..shared.replays import with_product
from ..shared.unfused import matmul, plain
from .unfused import finishing


def copied(call: Call) -> Launch:
    """The plan of the form. Collective."""
    world, out, dtype, (b, s, k), h, d = call.world, call["out"], call.dtype, call["x"].shape, call["h"], call["d"]
    rank, size, device, n = world.rank, world.size, world.torch_device, h * d
    whole = b, size * s, n
    direct = isinstance(out, SymmetricTensor)
    inbox = None if direct else world.keep(
        (call.name, "copy", *whole, dtype),
        lambda: empty(*whole, dtype=dtype, name=f"{call.name}.copy", world=world),
    )  # fmt: skip
    parts = world.keep(
        (call.name, "copy", "parts", *whole, dtype),
        lambda: outside_pools(lambda: torch.empty(size - (b == 1), b, s, n, dtype=dtype, device=device), device),
    )
    at, part = copies.layout(*whole), copies.layout(b, s, n)
    own = at[:, rank * s : (rank + 1) * s]  # of the positions of this rank
    peers = [(rank + i) % size for i in range(1, size)]
    sends = [copies.sent_to(world, copies.boxes(peer, own, part, dtype.itemsize)) for peer in peers]
    others = at[:, : rank * s], at[:, (rank + 1) * s :]
    fetch = copies.within(world, [box for x in others for box in copies.boxes(rank, x, x, dtype.itemsize)])
    keep = copies.within(world, copies.boxes(rank, own, part, dtype.itemsize))
    finish, meet, side = finishing(call, 1), copies.meeting(world), copies.Side(world)
    # In step with nothing but the copies: else the products would follow this meeting.
    begin, bar = beside_launch(world, copies.meet_kernel, (1,), num_warps=1), barrier_counters(world)

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        if world.streams is not None:
            world.streams.follow()  # the world's last call may be on another stream
        rows, matrix = plain(x).view(b * s, k), plain(weight).flatten(1)

        def multiplied(owner: int, part: torch.Tensor) -> torch.Tensor:
            columns = slice(owner * n, (owner + 1) * n)
            matmul(rows, matrix[:, columns], part.view(b * s, n))
            finish(part.view(b, s, h, d), owner, *others)
            return part

        with side.behind(), side.current():
            begin(bar, world.device)  # before overwrite: every rank is done with what it had in `out`, or in its inbox
        for part, peer, send in zip(parts, peers, sends):
            found = multiplied(peer, part)
            with side.behind() as stream:
                send(found, inbox if inbox is not None else out, stream)
        sent = side.mark()
        if b == 1:
            multiplied(rank, out.view(whole)[0, rank * s : (rank + 1) * s])
        else:
            keep(multiplied(rank, parts[-1]), out)
        side.reach(sent)
        meet()  # publish: all parts are there
        if inbox is not None:
            fetch(inbox, out)
        return out

    return with_product(call, launch)
