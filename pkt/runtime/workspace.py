"""pkt.Workspace: what operators keep between calls, owned by whoever made it.

    with pkt.Workspace() as workspace:
        for x in layers:
            y = pkt.matmul_all_reduce(x, w, workspace=workspace)
    # its memory is free again

Without one it is the world's, as long as the world. A workspace is a scope like World.scratch(), entered for each call
that it is given to and left for good by `close()`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from pkt.errors import Closed, DtypeError, Unsupported
from pkt.runtime import scratch
from pkt.runtime.world import World, current_world

_KEY = "pkt.Workspace"


class Workspace:
    """Buffers, counters and plans of the calls that it is given to as `workspace=`. A context manager.

    Made by every rank, in the same order as others, and given to the same calls: a difference is CollectiveMismatch at
    the first call with these shapes. Making one allocates nothing and meets nobody: the first call with given shapes
    makes what it needs, so that it comes before a capture. Never closed, it is kept as long as the world.

    Calls with different workspaces share no memory. They still run in the order in which host code makes them, on
    whatever streams, as all operators of a world: each takes as many SMs as it can get, and two of which one waits for
    peers that run the other would wait for ever.
    """

    def __init__(self, world: World | None = None) -> None:
        """world: the current one where None."""
        self.world = world or current_world("pkt.Workspace")
        lasting = self.world.lasting
        self.number = lasting[_KEY] = lasting.get(_KEY, 0) + 1
        """Which one of the world's, from 1: what ranks that give different ones are told."""
        self.closed = False
        self._workspaces: dict[Hashable, Any] = {}
        self._plans: dict[Hashable, Any] = {}
        self._made: scratch.Made = {}

    def __repr__(self) -> str:
        return f"Workspace({self.number} of {self.world}{', closed' if self.closed else ''})"

    def close(self) -> None:
        """Collective: give all of it back; the device work of every rank is done first. A second call does nothing,
        every other use afterwards raises Closed, and a graph that was captured with it must not be replayed. Raises
        SignalIndexError as SymmetricTensor.free does."""
        if not self.closed:
            self._forget()
            if not self.world.closed:
                scratch.free(self.world, self._made, "Workspace.close()", f"the end of workspace {self.number}")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # perhaps this rank's alone, which would wait for the others: its memory stays, as that of a scope
            self._forget()

    def _forget(self) -> None:
        self.closed = True
        self._workspaces.clear()
        self._plans.clear()


@contextmanager
def kept_in(workspace: Workspace, world: World, call: str) -> Iterator[None]:
    """What operators keep meanwhile is kept in `workspace`. Raises Closed, and DtypeError or Unsupported where it is no
    workspace of `world`."""
    if not isinstance(workspace, Workspace):
        raise DtypeError.argument(call, "workspace", type(workspace).__name__, "a pkt.Workspace", world.rank)
    if workspace.world is not world:
        found = f"found workspace {workspace.number} of another world"
        raise Unsupported.here(f"rank {world.rank}: {call}", found, "make one with pkt.Workspace(world)")
    if workspace.closed:
        raise Closed.used(world.rank, call, f"workspace {workspace.number}", "pkt.Workspace()")
    with world._keeping(workspace.number, workspace._workspaces, workspace._plans, workspace._made):
        yield
