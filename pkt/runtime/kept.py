"""Scopes: the buffers, counters and plans that operators keep between calls, and how long they keep them.

| scope | used by | ends |
|---|---|---|
| the world's own | every call, unless another scope is open | with the world |
| `pkt.Workspace` | the calls that it is given to | at its close() |
| `World.scratch()` | the calls inside the `with` | at the end of the `with` |

The world's own scope is right for a program that repeats its calls. It is wrong for a search that tries a hundred
settings, each with an inbox of its own: such a search opens a scratch scope for each.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from pkt.errors import SignalIndexError
from pkt.runtime.memory.heap import Allocation, SymmetricHeap

T = TypeVar("T")


class Planned(NamedTuple):
    """What launches calls with some values, and those of the values that equal others of another type, each with its
    place: True equals 1 and 1.0, and a plan for one is none for the others."""

    launch: Callable[..., Any]
    known: list[tuple[int, Any]]


def planned(launch: Callable[..., Any], key: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    """What to keep under `key`, which has `values` in it: the launch itself where no other values equal these, or where
    another plan has the key already and `by_types` made this one."""
    known = [(at, value) for at, value in enumerate(values) if value is not None and type(value) is not str]
    return Planned(launch, known) if known and type(key[-1]) is not Types else launch


class Types(tuple[Any, ...]):
    """The types of a call's values, at the end of a key."""


def by_types(key: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call whose plain `key` belongs to values of other types."""
    return *key, Types(_types(values))


def _types(values: tuple[Any, ...]) -> Iterator[Any]:
    return (tuple(_types(value)) if type(value) is tuple else type(value) for value in values)


def same(value: Any, known: Any) -> bool:
    """Whether two values, which are equal, have one type, and so have the parts of tuples."""
    return type(value) is type(known) and (type(value) is not tuple or all(map(same, value, known)))


class Scope:
    """What some calls keep, under keys, and the symmetric memory that they allocated for it."""

    def __init__(self, heap: SymmetricHeap, outer: Scope | None = None) -> None:
        """outer: a scope whose contents are found here too."""
        # Of the pkt.Workspace that this is, or that is open around it.
        self.number: int | None = outer.number if outer else None
        self.kept: ChainMap[Hashable, Any] = outer.kept.new_child() if outer else ChainMap()
        # What operators derived from their arguments, by these; a dict, because every call looks here.
        self.plans: dict[Hashable, Any] = dict(outer.plans) if outer else {}
        self._heap = heap
        self._made: dict[int, Allocation] = {}  # by number: in the order of the calls, which is the same on every rank

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of the first `make()` for `key`. The scope owns all that `make` allocates, even if it raises."""
        if key not in self.kept:
            before = self._heap.allocations
            try:
                self.kept[key] = make()
            finally:  # a result may be any object: only the heap knows what was allocated for it
                live = self._heap.live.values()
                self._made.update({a.number: a for a in live if a.number > before})
        return self.kept[key]

    def take_over(self, inner: Scope) -> None:
        """Own everything that `inner`, a scope inside this one, owns."""
        self.kept.update(inner.kept.maps[0])
        self.plans.update(inner.plans)
        self._made.update(inner._made)

    def clear(self) -> None:
        """Forget everything kept; its memory stays allocated."""
        self.kept.clear()
        self.plans.clear()

    def free(self, call: str, site: str) -> None:
        """Collective where there is something to free: give all memory back to the heap, once no kernel uses it.

        call: named to ranks that make another one. site: named to later users of the memory. Raises SignalIndexError,
        after everything is freed, if a guard word was overwritten.
        """
        heap, error = self._heap, None
        mine = [a for _, a in sorted(self._made.items()) if heap.live.get(a.block.offset) is a]
        if not mine:  # on every rank; a rank that differs is found by its next collective call
            return
        heap.collective_point(call)  # no kernel uses the memory any more
        for allocation in mine:
            try:
                heap.free(allocation, site)
            except SignalIndexError as found:  # the other ranks free the rest, so this one does too before it raises
                error = error or found
        heap.collective_point(call)
        if error is not None:
            raise error


@contextmanager
def entered(scopes: list[Scope], scope: Scope) -> Iterator[None]:
    """`scope` is the innermost of `scopes` inside the `with`."""
    scopes.append(scope)
    try:
        yield
    finally:
        scopes.pop()


@contextmanager
def scratch(scopes: list[Scope], heap: SymmetricHeap) -> Iterator[None]:
    """See World.scratch."""
    outer = scopes[-1]
    mine = Scope(heap, outer)
    try:
        with entered(scopes, mine):
            yield
    except BaseException:
        # The error may be this rank's alone: other ranks would neither free nor meet here, so this one does not either.
        outer.take_over(mine)
        raise
    if not heap.closed:
        mine.free("scratch()", "the end of world.scratch()")
