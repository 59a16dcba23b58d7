"""World.scratch(): what operators keep in a world, given back.

An operator's workspaces and plans live as long as the world, which is right for a program that calls it again, and
wrong for a search that tries a hundred settings, each with an inbox of its own. What a workspace allocated is known
from the heap alone, before and after its `make`: a workspace may be anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pkt.errors import SignalIndexError

if TYPE_CHECKING:
    from pkt.runtime.memory.heap import Allocation
    from pkt.runtime.world import World

Made = dict[int, "Allocation"]
"""What workspaces allocated, by number: in the order of the calls, which is the same on every rank."""


@contextmanager
def made(world: World) -> Iterator[None]:
    """What is allocated meanwhile, also where that ends in an error, is the innermost scope's."""
    before = world.heap.allocations
    try:
        yield
    finally:
        if world._scopes:
            live = world._heap.live.values()
            world._scopes[-1].update({a.number: a for a in live if a.number > before})


@contextmanager
def scratch(world: World) -> Iterator[None]:
    """As World.scratch says."""
    workspaces, plans = len(world._workspaces), len(world._plans)
    mine: Made = {}
    world._scopes.append(mine)
    try:
        yield
    except BaseException:
        # Perhaps on this rank alone: whatever is freed or awaited here would not be on the others.
        world._scopes.pop()
        if world._scopes:
            world._scopes[-1].update(mine)
        raise
    world._scopes.pop()
    if world.closed:
        return
    for kept, count in ((world._workspaces, workspaces), (world._plans, plans)):
        for key in list(kept)[count:]:
            del kept[key]
    free(world, mine, "scratch()", "the end of world.scratch()")


def free(world: World, mine: Made, call: str, site: str) -> None:
    """Collective where there is something to free: it goes back to the heap when no kernel uses it any more. Raises
    SignalIndexError when all is freed."""
    heap = world.heap
    error: SignalIndexError | None = None
    numbers = [number for number in sorted(mine) if heap.live.get(mine[number].block.offset) is mine[number]]
    if not numbers:  # on every rank, or those that have some find this one in another call
        return
    heap.collective_point(call)  # no kernel uses them any more
    for number in numbers:
        try:
            heap.free(mine[number], site)
        except SignalIndexError as found:  # said when all is freed, as it is on the other ranks
            error = error or found
    heap.collective_point(call)
    if error is not None:
        raise error
