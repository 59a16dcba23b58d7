"""Which `while` loops can never end: those whose next iteration depends only on values that have not changed.

`Source` finds, in the source of a `while`, the variables and the expressions that decide when the loop ends: those of
its condition, those that they are assigned from, and those of the branches around such assignments. A variable that
only counts polls is none of them. `Loop` follows one loop of one program. As long as the variables and the values that
the expressions load stay the same, no iteration can be the last, unless another program changes memory. They may also
repeat in turn, as those of a loop that looks at every rank's flag: then all of them must repeat.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

if TYPE_CHECKING:
    from pkt.simulate.ending import Ending

POLL = 1  # number of the loop inside `tl.atomic_poll`; the loops of sources have greater ones
SURE = 8  # iterations without a change after which a loop counts as spinning
# Iterations without a change after which it counts as stuck where a branch around a store or a signal depends on a
# variable that does change, such as a count of polls: the store may come later, and let another program go on. The same
# where the variable decides which word it loads. A loop over random words has more iterations, PROBES for each word.
UNSURE = 512
PROBES = 16
# The same where a word that a loop polls changes meanwhile, such as a lock: the loop may have looked at bad moments,
# in spite of the turns that `whose_turn` gives.
CONTENDED = 32
UNPAUSED = 512  # iterations of a `while`, or polls of host code, after which other programs run
# Host code counts as stuck after so many reads in a row that are all like earlier ones. The number is high, because the
# loop may end by something that `sites.host_state` does not see.
HOST_POLLS = 4096
# The same where its variables change meanwhile, as where it counts its polls: it may give up after some. 3 seconds.
COUNTED_POLLS = 1 << 15
_MOST = 1024  # states of a loop that are kept, and so the most that may repeat in turn
_EXIT = "<exit>"  # assigned by `break` and `return`


@dataclass
class _Statement:
    """A statement of a loop's body. A branch or an inner loop has `body` and `orelse`, an assignment has `targets`."""

    names: set[str]  # that its expression uses
    values: set[str] = field(default_factory=set)  # those of them outside of arguments of loads and atomics
    expression: int = -1  # its index in Source.expressions
    targets: set[str] = field(default_factory=set)
    changes: bool = False  # it may change memory
    constant: Any = None  # code of a condition that may be known before the loop begins
    body: list[_Statement] = field(default_factory=list)
    orelse: list[_Statement] = field(default_factory=list)


@dataclass(frozen=True)
class Slice:
    """Of one loop, the names and the indices of expressions that decide when it ends; and with those that decide which
    stores and signals an iteration makes, and which words it loads."""

    decides: tuple[str, ...]
    expressions: frozenset[int]
    guards: tuple[str, ...]
    guarding: frozenset[int]
    ending: Ending | None = None  # the comparison that ends it


class Source:
    """The statements of one `while` in a function that assigns to `assigned` names."""

    def __init__(self, loop: ast.While, assigned: set[str]) -> None:
        self.assigned = assigned
        self.expressions: list[ast.expr] = []
        self.constants: list[Any] = []
        from pkt.simulate.ending import ending  # only here: kernels without such loops do not need it

        self.ending = ending(loop, _finds)
        self.test = self._statement(loop.test)
        self.body = self._read(loop.body)
        self.slices: dict[tuple, Slice] = {}
        self.widest = self.slice(lambda code: None)

    def slice(self, known: Callable[[Any], bool | None]) -> Slice:
        """The slice without the branches that are never taken. known: the value of a condition that is known now."""
        taken = {id(code): known(code) for code in self.constants}
        key = tuple(taken.values())
        if key not in self.slices:
            assignments: list[tuple[_Statement, list[_Statement]]] = []
            around: list[_Statement] = []
            self._walk(self.body, [], taken, assignments, around)
            decides = self._closure([self.test], assignments, lambda s: s.values)
            guards = self._closure([self.test, *around], assignments, lambda s: s.names)
            self.slices[key] = Slice(*decides, *guards, self.ending)
        return self.slices[key]

    def _walk(self, body: list, around: list, taken: dict, assignments: list, guards: list) -> None:
        for s in body:
            if s.targets:
                assignments.append((s, around))
            if s.changes:
                guards += around
            if s.body or s.orelse:
                known = taken.get(id(s.constant))
                inside = around if known is not None else [*around, s]
                for part, wanted in ((s.body, True), (s.orelse, False)):
                    if known is None or known is wanted:
                        self._walk(part, inside, taken, assignments, guards)

    @staticmethod
    def _closure(
        used: list, assignments: list, names: Callable[[_Statement], set[str]]
    ) -> tuple[tuple[str, ...], frozenset[int]]:
        found, expressions = {_EXIT}.union(*map(names, used)), {s.expression for s in used}
        before = -1
        while len(found) != before:
            before = len(found)
            for statement, around in assignments:
                if statement.targets & found:
                    for s in (statement, *around):
                        found |= names(s)
                        expressions.add(s.expression)
        return tuple(sorted(found - {_EXIT})), frozenset(expressions)

    def _read(self, nodes: Iterable[Any]) -> list[_Statement]:
        out = []
        for node in nodes:
            if isinstance(node, (ast.If, ast.While, ast.For)):
                s = self._statement(node.iter if isinstance(node, ast.For) else node.test)
                if isinstance(node, ast.For):
                    s.targets = _names(node.target)
                elif isinstance(node, ast.If) and not (s.changes or s.names & self.assigned):
                    s.constant = compile(ast.Expression(node.test), "<condition>", "eval")
                    self.constants.append(s.constant)
                s.body, s.orelse = self._read(node.body), self._read(node.orelse)
            elif isinstance(node, (ast.Break, ast.Return)):
                value = getattr(node, "value", None)
                s = self._statement(value) if value is not None else _Statement(set())
                s.targets = {_EXIT}
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                s = self._statement(node.value)
                s.targets = set().union(*map(_names, getattr(node, "targets", None) or [node.target]))  # type: ignore
                if isinstance(node, ast.AugAssign):
                    s.names |= s.targets
                    s.values |= s.targets
            elif isinstance(node, ast.Expr):
                s = self._statement(node.value)
            else:
                continue
            out.append(s)
        return out

    def _statement(self, value: ast.expr) -> _Statement:
        self.expressions.append(value)
        changes = any(isinstance(n, ast.Call) and _changes(n.func) for n in ast.walk(value))
        return _Statement(_names(value), _values(value), len(self.expressions) - 1, changes=changes)


def _changes(called: ast.expr) -> bool:
    """Whether the call may change memory: unless it is one of `tl` that only computes or loads."""
    of_tl = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "tl"
    return not of_tl or called.attr.startswith(("atomic", "store"))  # type: ignore[attr-defined]


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _values(node: ast.AST) -> set[str]:
    """The names in an expression, but none in the arguments of loads and atomics: the words that these find decide."""
    if isinstance(node, ast.Call) and _finds(node.func):
        return set()
    return {node.id} if isinstance(node, ast.Name) else set().union(*map(_values, ast.iter_child_nodes(node)))


def _finds(called: ast.expr) -> bool:
    """Whether the call returns a word of memory: a load or an atomic of `tl` or `pl`."""
    of_pkt = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in ("tl", "pl")
    return of_pkt and called.attr.startswith(("load", "atomic"))  # type: ignore[attr-defined]


def value_of(code: Any, variables: dict[str, Any], names: dict[str, Any]) -> bool | None:
    """The value of a condition that uses no variable of the loop; None if it is known at run time only."""
    try:
        value = eval(code, names, variables)
    except Exception:  # the branch is not reached: as Triton, so do not evaluate what it guards
        return None
    return None if isinstance(value, tl.tensor) else bool(value)


class Loop:
    """One `while` that a program is in. `Accesses._saw` adds to `seen` and `guards_seen` what an iteration loads."""

    __slots__ = ("slice", "seen", "guards_seen", "states", "turns", "same", "period", "polled", "before", "steps",
                 "progress", "alone", "round", "round_same", "round_sure")  # fmt: skip

    def __init__(self, of: Slice) -> None:
        self.slice = of
        self.seen = self.guards_seen = 0  # hashes of the values loaded in this iteration
        self.states: dict[int, tuple[int, int]] = {}  # hash of an iteration -> the last one like it, with its guards
        self.turns = self.same = 0  # iterations, and those of them that lately were like earlier ones
        # The most iterations from one of those to the next like it. While memory stands still, these are no more than
        # there are states. A word that others change to and fro may have rare values, which come back much later.
        self.period = 0
        self.polled: dict[int, Any] = {}  # accesses that decided since it last saw something new, by first address
        self.before = self.polled  # those until then
        self.steps = self.progress = -1  # the machine's at the last iteration
        self.alone = 0  # iterations since the program last made an access
        self.round = -1  # of the machine, when all programs spun
        self.round_same = self.round_sure = 0  # iterations alike in that round; those alike in their stores, too

    @property
    def spins(self) -> bool:
        return self.same >= max(SURE, self.period)

    def stuck(self, machine: Any) -> bool:
        """Whether it has seen the same for long enough in this round of `machine`."""
        if self.round != machine.round:
            return False
        enough = CONTENDED if machine.contended else SURE
        return self.round_sure >= max(enough, self.period) or self.round_same >= max(UNSURE, PROBES * self.period)

    def turned(self, decides: Any, guards: Any) -> bool:
        """Begin an iteration with these values of the variables; return whether it is like an earlier one."""
        state, with_guards = hash((self.seen, decides)), hash((self.guards_seen, guards))
        last = self.states.get(state)
        if last is not None:
            self.same += 1
            self.period = min(max(self.period, self.turns - last[0]), len(self.states))
            self.round_same += 1
            self.round_sure = self.round_sure + 1 if with_guards == last[1] else 0
        else:
            self.same = self.period = self.round_same = self.round_sure = 0
            self.before, self.polled = self.polled, {}
            if len(self.states) == _MOST:
                self.states.clear()
        self.states[state] = self.turns, with_guards
        self.seen = self.guards_seen = 0
        self.turns += 1
        return last is not None


class HostLoop(Loop):
    """Host code that reads the same values of the heap again and again."""

    __slots__ = "again", "known"

    def __init__(self, of: Slice) -> None:
        super().__init__(of)
        self.known: set[int] = set()  # hashes of reads
        self.again = 0  # reads that lately were like earlier ones, whatever the variables were

    @property
    def spins(self) -> bool:
        return super().spins or self.again >= HOST_POLLS

    @property
    def pauses(self) -> bool:
        """Whether other tasks run before the next read."""
        return super().spins or not self.turns % UNPAUSED

    def stuck(self, machine: Any) -> bool:
        same = self.round_same >= HOST_POLLS or self.again >= COUNTED_POLLS
        return self.round == machine.round and same

    def turned(self, decides: Any, guards: Any) -> bool:
        if self.seen in self.known:
            self.again += 1
        else:
            self.again = 0
            if len(self.known) == _MOST:
                self.known.clear()
            self.known.add(self.seen)
        return super().turned(decides, guards) or self.again >= HOST_POLLS


def digest(value: Any, depth: int = 3) -> Any:
    """A hashable that differs when the value of a variable differs."""
    data = getattr(getattr(value, "handle", None), "data", None)
    if isinstance(data, np.ndarray):
        return data.tobytes()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return tuple([digest(v, depth) for v in value])
    if depth and hasattr(value, "__dict__") and not callable(value):
        return tuple([digest(v, depth - 1) for v in vars(value).values()])
    return None
