"""World: the ranks that work together, the collective calls of host code, and what operators keep between calls."""

from __future__ import annotations

import inspect
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
import triton.language as tl

from pkt.errors import Closed, DtypeError, RankError, ShapeError, Unsupported, ranks_named
from pkt.language.world import DeviceWorld, code_hash
from pkt.runtime.backend import Backend
from pkt.runtime.kept import Scope, entered, scratch
from pkt.runtime.launch.streams import OneInFlight
from pkt.runtime.memory.heap import SymmetricHeap, heap_bytes
from pkt.runtime.processes import wire
from pkt.runtime.team import TeamBackend, check_agreed, check_translated, checked_ranks
from pkt.wording import count_text, dtype_text, found_text, html_text, size_text, table

T = TypeVar("T")
SHOWN = 16  # allocations that a notebook shows of a world

_open: list[World] = []  # this process's worlds; the last one is current
_names = itertools.count()
_named: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
_shared: weakref.WeakSet[World] = weakref.WeakSet()  # worlds of several processes that are not closed


def _current() -> World | None:
    """The world that host code runs in. The simulator, where many ranks share a thread, puts its own function here."""
    return _open[-1] if _open else None


current_name = ""
"""In compiled code, of the current world: its `of_size`, "" if there is none. torch compiles anew where it changes. The
simulator puts its own here."""


def _opened(those: list[World]) -> None:
    global current_name
    _open[:] = those
    current_name = of_size(_open[-1].size) if _open else ""


def of_size(ranks: int) -> str:
    """How names in compiled code tell the ranks of a world: torch's caches know code by them, not by its shapes."""
    return f"of {ranks}"


def op_begins(name: str) -> None:
    """Called before an op of compiled code runs. The simulator puts its own function here."""


def op_ends() -> None:
    """Called behind an op of compiled code, which reads results without asking the simulator: it puts its own here."""


def current_world(call: str = "pkt.current_world()") -> World:
    """The world this code runs in; Unsupported if there is none."""
    world = _current()
    if world is None:
        raise Unsupported.no_world(call)
    return world


ALONE = "/alone"
"""The name of a `World.alone` is that of its world, and then this."""
_ALONE_ENDS = f"{ALONE} {of_size(1)}"


def named_world(name: str) -> World:
    """The world or team of that name in this rank; the current one for "" or its `current_name`. Raises Unsupported if
    there is none."""
    world = _current()
    if name.endswith(_ALONE_ENDS):  # here it may not exist yet: another rank has compiled the code
        return named_world(name.rpartition(ALONE)[0]).alone
    found = (None if world is None else world._by_name.get(name)) or _named.get(name)
    if found is None:
        call = f"an operator in compiled code, of world {name!r}"
        if world is None or not name.startswith("of "):
            raise Unsupported.no_world(call)
        text, remedy = f"found a world {of_size(world.size)}", "compile or export the code in this world"
        raise Unsupported.here(f"rank {world.rank}: {call}", text, remedy)
    return found


def numbered_workspace(number: int, world: World) -> Workspace:
    """The workspace of that number. Raises Closed if there is none."""
    found = world.lasting.get(_WORKSPACES, {}).get(number)
    if found is None:
        raise Closed.used(world.rank, "an operator in compiled code", f"workspace {number}", "pkt.Workspace()")
    return found


class World:
    """One rank's view of the ranks that work together. Made by pkt.init() or pkt.launch().

    A context manager; `close()` may be called twice; every other use after it raises Closed. A process that is forked
    from a rank has no part in the world: every use there raises Closed, and close() does nothing. Threads of a rank
    must take turns with collective calls; a call during another thread's raises Unsupported.
    """

    def __init__(
        self, backend: Backend, heap: int | str | None = None, group: Any = None, parent: World | None = None,
        label: str = "",
    ) -> None:  # fmt: skip
        """Collective: `heap` bytes (see pkt.init) of symmetric memory on `backend`. group: torch's process group of the
        same ranks, where there is one. parent: the world that this is a team of. label: tells it from other teams."""
        self._backend, self.group, self.parent = backend, group, parent
        self.lineage: tuple[World, ...] = (self, *parent.lineage) if parent else (self,)
        """This world, the one that it is a team of, and so on up to the world of all ranks."""
        self._teams: list[World] = []
        self.rank, self.size = backend.rank, backend.size
        self._made = 0  # calls of team() so far
        self._by_name: dict[str, World] = {}  # of a world of all ranks: itself and its teams
        if parent is None:
            self._by_name |= {"": self, of_size(self.size): self}
        if parent is not None:
            first = f"{parent.name}{label}"
        else:  # simulated ranks run the code that one of them compiles
            first = "simulated" if backend.gpu == "simulated" else f"world{next(_names)}"
        self.name: str = f"{first} {of_size(self.size)}"
        """In compiled code, of this process. Members give a team one name, and other teams others."""
        self.lineage[-1]._by_name[self.name] = _named[self.name] = self
        self._closed = False
        self._pid = os.getpid()
        self._device: DeviceWorld | None = None
        whole = parent.lineage[-1] if parent else None
        self._heap: SymmetricHeap = SymmetricHeap(backend, heap_bytes(heap), self, whole._heap if whole else None)
        self._scopes = [Scope(self._heap)]  # the world's own, then those that are open, innermost last
        self.span: range = whole.span if whole else range(backend.base, backend.base + self._heap.end)
        """Addresses of this rank's window, of a team's that of the world of all ranks."""
        self._places = [rank // backend.node_size for rank in self.ranks]  # the ranks' nodes in the world of all ranks
        self._on_node: World | None = None
        self._rail: World | None = None
        self._alone: World | None = None
        self.torch_device, self.num_sms = backend.torch_device, backend.num_sms
        on_gpu = backend.torch_device.type == "cuda" and torch.cuda.is_available()
        # A team's operators share the GPU's SMs with those of the world, and so run one after the other with them.
        self.streams: OneInFlight | None = whole.streams if whole else None
        if on_gpu and whole is None and backend.copies is not None:
            self.streams = OneInFlight(backend.torch_device, backend.copies.stream)
        if backend.timeout is not None:
            _shared.add(self)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        team = f", team {list(self.ranks)}" if self.parent else ""
        return f"World(rank {self.rank} of {self.size} on {self.torch_device}{team}{closed})"

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        """The world itself: a copy of a module stays in its world."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        remedy = "save a module's state_dict(), or pkt.nn.full_state_dict(module) on all ranks"
        raise Unsupported.here(f"rank {self.rank}: pickle", f"found {self}, which lives in this process", remedy)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members by their numbers in the world of all ranks: of a world that is no team, 0, 1, ..."""
        return self._backend.ranks if isinstance(self._backend, TeamBackend) else tuple(range(self.size))

    # -------------------------------------------------------------------------------------------- nodes
    @property
    def nodes(self) -> int:
        """Number of nodes with ranks of this world. Ranks of one node reach each other's memory by loads and stores."""
        return len(set(self._places))

    @property
    def node(self) -> int:
        """This rank's node, 0 <= node < nodes."""
        return sorted(set(self._places)).index(self._places[self.rank])

    @property
    def node_size(self) -> int:
        """Number of ranks of this world on this rank's node."""
        return self._places.count(self._places[self.rank])

    @property
    def local_rank(self) -> int:
        """This rank among those of its node, 0 <= local_rank < node_size."""
        return self._places[: self.rank].count(self._places[self.rank])

    @property
    def on_node(self) -> World:
        """The team of this rank's node, in which local_rank is the rank; this world where it has one node. Made by
        `team` at the first use, which is collective."""
        if self.nodes == 1:
            return self
        if self._on_node is None:
            self._on_node = self.team([r for r, place in enumerate(self._places) if place == self._places[self.rank]])
        assert self._on_node is not None
        return self._on_node

    @property
    def rail(self) -> World:
        """The team of the ranks with this local_rank, one from each node, in which node is the rank; this world where
        nodes have one rank. Made by `team` at the first use, which is collective. Raises Unsupported if the nodes have
        different numbers of ranks."""
        counts = {place: self._places.count(place) for place in sorted(set(self._places))}
        if len(set(counts.values())) > 1:
            found = f"found nodes of {', '.join(map(str, counts.values()))} ranks"
            remedy = "a rail takes one rank of each node: use a world with equally many ranks on each"
            raise Unsupported.here(f"rank {self.rank}: world.rail", found, remedy)
        if self.node_size == 1:
            return self
        if self._rail is None:
            mine = self.local_rank
            self._rail = self.team([r for r, place in enumerate(self._places) if self._places[:r].count(place) == mine])
        assert self._rail is not None
        return self._rail

    @property
    def alone(self) -> World:
        """This rank as a team of one, without a heap: for parts of an operator that need no peer and keep no symmetric
        memory. This world where it has one rank. Not collective."""
        self._check("alone")
        if self.size == 1:
            return self
        if self._alone is None:
            backend = TeamBackend(self._backend, [self.rank], offset=0, capacity=0)
            self._alone = World(backend, self._heap.capacity, parent=self, label=ALONE)
            self._teams.append(self._alone)
        return self._alone

    def _repr_html_(self) -> str:
        """As a notebook shows it: the symmetric memory, too."""
        if self._closed:
            return html_text(repr(self))
        ledger, live = self._heap.ledger, [a.block for a in self._heap.live.values()]
        rows = [(b.name, b.kind, str(b.shape), dtype_text(b.dtype), size_text(b.nbytes)) for b in live[:SHOWN]]
        more = f"\n  ... and {len(live) - SHOWN} more" if len(live) > SHOWN else ""
        free = f"symmetric heap: {count_text(len(live), 'allocation')}, {size_text(ledger.free_bytes)} free"
        names = table(("name", "kind", "shape", "dtype", "bytes"), rows) if rows else ""
        return html_text(f"{self!r}\n{free}\n{names}{more}".rstrip())

    @property
    def backend(self) -> Backend:
        """The machine below. Raises Closed after close()."""
        self._check("backend")
        return self._backend

    @property
    def heap(self) -> SymmetricHeap:
        """The symmetric heap. Raises Closed after close()."""
        self._check("heap")
        return self._heap

    @property
    def multicast(self) -> bool:
        """The multicast window exists, on every rank."""
        return self._backend.multicast

    @property
    def capturing(self) -> bool:
        """The current stream records a CUDA graph."""
        return self.streams is not None and self.streams.capturing()

    @property
    def device(self) -> DeviceWorld:
        """The `world` argument of a kernel, passed by value: rank, size and addresses, see pkt.language."""
        self._check("device")
        self._heap.agreement.settle()
        if self._device is None:
            backend = self._backend
            team, table = backend.constants if isinstance(backend, TeamBackend) else (0, 0)
            self._device = DeviceWorld(
                rank=backend.rank,
                size=tl.constexpr(backend.size),
                stride=tl.constexpr(backend.stride),
                multicast=tl.constexpr(backend.multicast),
                status=self.lineage[-1]._heap.tensor(self._heap.status),
                code=tl.constexpr(code_hash(backend.library)),
                team=tl.constexpr(team),
                table=tl.constexpr(table),
                node_size=tl.constexpr(backend.node_size if self.nodes > 1 else 0),
                network=tl.constexpr(backend.network),
            )
        return self._device

    # -------------------------------------------------------------------------------------------- teams
    def team(self, ranks: Sequence[int], heap: int | str | None = None) -> World | None:
        """Collective among all ranks of this world: the team of `ranks`, in which the caller has the rank of its place
        in the list; None on ranks outside it. For a team, `operator(..., world=team)`, `team.device`, `team.barrier()`.

        ranks: the same on all members, so disjoint teams are made in one call: [0, 1] on ranks 0 and 1, [2, 3] on ranks
        2 and 3. Any number of ranks with equal steps, as in range(0, 8, 2); at most 10 ranks of 64 with others.
        heap: bytes of this world's heap (see pkt.init) for the team's own tensors and the buffers of its operators, an
        eighth of the heap where None. The share lasts as long as this world. Disjoint teams may work at the same time;
        ranks that two teams have in common call them in one order. Symmetric tensors of this world work in the team.
        Raises RankError, ShapeError, Unsupported, CollectiveMismatch, HeapFull.
        """
        self._check("team()")
        members = checked_ranks(ranks, self.rank, self.size)
        nbytes = heap_bytes(self._heap.capacity // 8 if heap is None else heap)
        check_translated([self.ranks[r] for r in members], self.lineage[-1].size, self.rank)
        self._heap.collective_point("team()")
        said = self._backend.exchange([members, nbytes], "team()")
        check_agreed({rank: (list(found), share) for rank, (found, share) in enumerate(said)})
        offset, arena = self._heap.share(nbytes, "team()")
        self._made += 1
        if self.rank not in members:
            return None
        backend = TeamBackend(self._backend, members, offset, nbytes, arena)
        made = World(backend, nbytes, parent=self, label=f"/{self._made}")
        self._teams.append(made)
        self._heap.shares.append(made.heap)
        return made

    # -------------------------------------------------------------------------------------------- collectives
    def barrier(self) -> None:
        """Collective: return when every rank has called it and its device work is done."""
        self._check("barrier()")
        self._heap.collective_point("barrier()")

    def synchronize(self) -> None:
        """Return when this rank's device work is done."""
        self._check("synchronize()")
        self._backend.synchronize()

    def all_gather_object(self, obj: T) -> list[T]:
        """Collective: every rank's `obj`, in rank order, each a copy. For the types see pkt.runtime.processes.wire."""
        self._check("all_gather_object()")
        what = "all_gather_object()"
        texts = self._backend.exchange(wire.encode(obj, "all_gather_object"), what)
        return [wire.received(text, self.rank, peer, what) for peer, text in enumerate(texts)]

    def broadcast(self, obj: T, root: int = 0) -> T:
        """Collective: a copy of `root`'s `obj`; the `obj` of other ranks is ignored. Raises RankError."""
        self._check("broadcast()")
        root = check_rank(root, self, "broadcast(root=)")
        text = wire.encode(obj, "broadcast") if self.rank == root else None
        what = f"broadcast() from rank {root}"
        return wire.received(self._backend.exchange(text, what)[root], self.rank, root, what)

    # ------------------------------------------------------------------------------------------ kept between calls
    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of the first `make()` for `key` in the innermost open scope, see pkt.runtime.kept: the buffers of
        an operator. Collective if `make` is. Raises Unsupported if it would have to call `make` during the capture of a
        CUDA graph."""
        self._check("keep()")
        scope = self._scopes[-1]
        if key in scope.kept:
            return cast(T, scope.kept[key])
        if self.capturing:
            raise Unsupported.captured(self.rank, key)
        with torch.inference_mode(False):  # later calls, outside of that mode, write to the tensors, too
            return scope.keep(key, make)

    def scratch(self) -> AbstractContextManager[None]:
        """Collective: a scope around a search or an experiment. Operators inside find all that is kept already; what
        they keep in addition is given back at the end of the `with`.

        The end frees buffers and counters once the device work of every rank is done, and drops the plans. Tensors that
        the user allocated inside stay. Scopes may be nested. A graph that was captured inside must not be replayed
        afterwards. Raises SignalIndexError as SymmetricTensor.free does.

        On an exception nothing is freed and no rank is awaited, because the failure may be this rank's alone: the
        enclosing scope owns what was made. Ranks that leave the scope normally then wait there, and find this rank in
        another call, or lost.
        """
        self._check("scratch()")
        return scratch(self._scopes, self._heap)

    @contextmanager
    def using(self, workspace: Workspace, call: str) -> Iterator[None]:
        """Operators inside keep everything in `workspace`. Raises Closed if it is closed, DtypeError or Unsupported if
        it is no pkt.Workspace of this world."""
        if not isinstance(workspace, Workspace):
            raise DtypeError.argument(call, "workspace", type(workspace).__name__, "a pkt.Workspace", self.rank)
        if workspace.world is not self:
            found = f"found workspace {workspace.number} of another world"
            raise Unsupported.here(f"rank {self.rank}: {call}", found, "make one with pkt.Workspace(world)")
        if workspace.closed:
            raise Closed.used(self.rank, call, f"workspace {workspace.number}", "pkt.Workspace()")
        with entered(self._scopes, workspace):
            yield

    @property
    def handed_in(self) -> int | None:
        """The number of the pkt.Workspace that the current call was given; None if it was given none."""
        return self._scopes[-1].number

    @property
    def plans(self) -> dict[Hashable, Any]:
        """What operators derived from their arguments, in the innermost open scope; this rank's own. Raises Closed."""
        if self._closed:
            self._check("an operator")
        return self._scopes[-1].plans

    @property
    def lasting(self) -> MutableMapping[Hashable, Any]:
        """What the world's own scope keeps, whatever scopes are open: choices of the tuner, a process group, torch's
        pool. Raises Closed."""
        self._check("an operator")
        return self._scopes[0].kept.maps[0]

    def forget_plans(self) -> None:
        """Operators derive everything anew at their next call; buffers stay."""
        for scope in self._scopes:
            scope.plans.clear()

    def check(self) -> None:
        """Raise SignalIndexError if a guard word around this rank's signals, or a team's, was overwritten."""
        self._check("check()")
        self._heap.check_guards("check()")
        for team in (team for team in self._teams if not team.closed):
            team.check()

    # --------------------------------------------------------------------------------------------------- life
    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Release everything, a world's teams too, after a check of the guard words. Every rank must close its world,
        but none waits for the others. A second call does nothing. The share of a team goes back with the world."""
        if self._closed:
            return
        try:
            for team in self._teams:
                team.close()
            self._heap.check_guards("close()")
        finally:
            self._discard()

    def __enter__(self) -> World:
        self._check("with world")
        if self.parent is None:  # the current world is one of all ranks
            _opened([*_open, self])
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._backend.abandon(f"{type(error).__name__}: {error}", ranks_named(error))
            self._discard()  # without the check of guard words: the error that is raised says more

    def _discard(self) -> None:
        self._closed = True
        for team in self._teams:
            if not team.closed:
                team._discard()
        _shared.discard(self)
        self._heap.close()
        for scope in self._scopes:
            scope.clear()
        self._device = None
        _opened([world for world in _open if world is not self])
        self._backend.close()

    def _check(self, call: str) -> None:
        if self._closed:
            raise self.closed_error(call)

    def closed_error(self, call: str) -> Closed:
        """The error of a use by `call` after the end, or in a forked process."""
        if os.getpid() != self._pid:
            return Closed.forked(self.rank, call, self._pid)
        return Closed.used(self.rank, call)


def _forked() -> None:
    """In a forked process: its copies of the connections and of the journal's memory are the parent's."""
    for world in list(_shared):
        world._closed = True
        world._heap.close()
    _opened([world for world in _open if world not in _shared])
    _shared.clear()


os.register_at_fork(after_in_child=_forked)


def check_rank(rank: Any, world: World | Backend, call: str) -> int:
    """`rank` as an int. Raises RankError if it is none from 0 to world.size - 1."""
    try:
        index = -1 if isinstance(rank, bool) else operator.index(rank)
    except TypeError:
        index = -1
    if not 0 <= index < world.size:
        raise RankError.outside(world.rank, call, rank, world.size)
    return index


def check_function(call: str, fn: Any, args: Any) -> None:
    """Raise DtypeError unless `fn` is a function and `args` a sequence of its further arguments."""
    if not callable(fn):
        raise DtypeError.argument(call, "fn", found_text(fn), "a function of the world")
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        wanted = "a plain function: a call of one with yield, or of an async one, runs nothing of it"
        raise DtypeError.argument(call, "fn", f"{fn!r:.40}", wanted)
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise DtypeError.argument(call, "args", found_text(args), "a tuple, as in (x,)")


def check_counts(call: str, **counts: Any) -> None:
    """Raise ShapeError unless each of `counts` is an integer from 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError.argument(call, name, repr(value), "an integer from 1")


def check_flags(call: str, **flags: Any) -> None:
    """Raise ShapeError unless each of `flags` is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ShapeError.argument(call, name, repr(value), "True or False")


class Workspace(Scope):
    """Buffers, counters and plans of the calls that it is given to as `workspace=`. A context manager:

        with pkt.Workspace() as workspace:
            for x in layers:
                y = pkt.matmul_all_reduce(x, w, workspace=workspace)
        # its memory is free again

    Every rank makes its workspaces in the same order and gives them to the same calls; otherwise the first call with
    given shapes raises CollectiveMismatch. Making one allocates nothing and is not collective. The first call with
    given shapes allocates, so it must come before the capture of a graph. A workspace that is never closed lasts as
    long as the world.

    Calls with different workspaces share no memory. They still run in the order in which host code makes them, on
    whatever streams, like all operators of a world: each takes as many SMs as it can get, so two at once might each
    wait for peers that run the other.
    """

    def __init__(self, world: World | None = None) -> None:
        """world: the current one where None."""
        if world is not None and not isinstance(world, World):
            raise DtypeError.argument("pkt.Workspace", "world", type(world).__name__, "a pkt.World")
        self.world = world or current_world("pkt.Workspace")
        super().__init__(self.world.heap)
        numbers = self.world.lasting.setdefault(_NUMBERS, itertools.count(1))
        self.number = next(numbers)  # by which ranks find out that they gave different ones to a call
        self.closed = False
        self.world.lasting.setdefault(_WORKSPACES, weakref.WeakValueDictionary())[self.number] = self

    def __repr__(self) -> str:
        return f"Workspace({self.number} of {self.world}{', closed' if self.closed else ''})"

    def close(self) -> None:
        """Collective: free everything once the device work of every rank is done. A second call does nothing. Every
        other use afterwards raises Closed, and a graph that was captured with it must not be replayed. Raises
        SignalIndexError as SymmetricTensor.free does."""
        if not self.closed:
            self._forget()
            if not self.world.closed:
                self.free("Workspace.close()", f"the end of workspace {self.number}")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:  # the error may be this rank's alone, and freeing is collective: the memory stays allocated
            self._forget()

    def _forget(self) -> None:
        self.closed = True
        self.clear()


_NUMBERS, _WORKSPACES = "pkt.Workspace", "pkt.Workspace.numbered"
