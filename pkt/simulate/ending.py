"""What a `while` of a kernel waits for, where its condition compares a word of memory with a number."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CodeType, FrameType

import triton.language as tl

# The comparison that a loop goes on for -> the one that ends it.
_ENDS: dict[type[ast.cmpop], str] = {
    ast.Eq: "ne", ast.NotEq: "eq", ast.Lt: "ge", ast.LtE: "gt", ast.Gt: "le", ast.GtE: "lt",
}  # fmt: skip
_MIRRORED = {"ne": "ne", "eq": "eq", "ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}
_NEGATED = {"ne": "eq", "eq": "ne", "ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


class Ending:
    """The comparison that ends a loop: the polled word must compare by `compare`, as in `operator`, with `number`."""

    def __init__(self, loop: ast.While, compare: str, number: CodeType) -> None:
        self.loop, self.compare, self._number = loop, compare, number

    def number(self, frame: FrameType | None) -> int | None:
        """The number now, in the innermost frame of user code; None if it is unknown, as in a function that the loop
        calls."""
        if frame is None or not self.loop.lineno <= frame.f_lineno <= (self.loop.end_lineno or 0):
            return None
        try:
            value = eval(self._number, frame.f_globals, frame.f_locals)
            value = value.handle.data.item() if isinstance(value, tl.tensor) else getattr(value, "value", value)
        except Exception:  # a name of another function, or a block
            return None
        return value if type(value) is int else None


def ending(loop: ast.While, finds: Callable[[ast.expr], bool]) -> Ending | None:
    """The comparison that ends `loop`, if there is one. finds: whether the call of a function returns a word."""
    test, negated = loop.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, not negated
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in _ENDS:
        return None
    compare, word, number = _ENDS[type(test.ops[0])], test.left, test.comparators[0]
    if not _is_word(word, loop, finds):
        compare, word, number = _MIRRORED[compare], number, word
    if not _is_word(word, loop, finds) or any(isinstance(n, ast.Call) for n in ast.walk(number)):
        return None
    code = compile(ast.Expression(number), "<number>", "eval")
    return Ending(loop, _NEGATED[compare] if negated else compare, code)


def _is_word(value: ast.expr, loop: ast.While, finds: Callable[[ast.expr], bool]) -> bool:
    """Whether an expression is a call that returns a word, or a variable to which the loop assigns nothing else."""
    if isinstance(value, ast.Call):
        return finds(value.func)
    if not isinstance(value, ast.Name):
        return False
    inside = list(ast.walk(loop))
    stores = [n for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == value.id]
    assigned = [n.value for n in inside if isinstance(n, ast.Assign) and n.targets[0] in stores]
    return 0 < len(assigned) == len(stores) and all(isinstance(v, ast.Call) and finds(v.func) for v in assigned)
