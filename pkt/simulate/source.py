"""The source of device functions, rewritten so that Python gives it Triton's meaning.

`code()` compiles a function's own lines with their own numbers, so that a frame of the simulator points at the user's
line. `HELPERS` has the functions that rewritten code calls, and `NAMES` the Python builtins that mean something else in
a kernel.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import itertools
import operator
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, GeneratorType
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic

from pkt.errors import Unsupported
from pkt.simulate.builder import Builder
from pkt.simulate.constants import integer
from pkt.simulate.loops import POLL, Source, value_of
from pkt.simulate.sites import site


class _Format(str):
    """A string as Triton 3.6 takes it, which is a constexpr there, and as later ones take it."""

    @property
    def value(self) -> str:
        return str(self)


_INTEGERS = {f"{sign}int{bits}": (bits, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)}


class _Semantic(TritonSemantic):
    def _has_native_tma(self) -> bool:
        return True  # Triton's own would ask the GPU driver

    def scalar_constant(self, value, dtype):
        """As Triton's, but an integer is a constant that is kept. Of one that is too large the low bits count."""
        if type(value) is not int or dtype.name not in _INTEGERS:
            return super().scalar_constant(value, dtype)
        bits, signed = _INTEGERS[dtype.name]
        low = -(1 << bits - 1) if signed else 0
        return integer((value - low) % (1 << bits) + low, dtype)

    def _convert_elem_to_ir_value(self, elem, require_i64):
        """As Triton's, which makes an array for each offset of a descriptor's box."""
        value = elem.value if type(elem) is core.constexpr else elem
        if type(value) is int and not require_i64 and -(1 << 31) <= value < 1 << 31:
            return integer(value, tl.int32).handle
        return super()._convert_elem_to_ir_value(elem, require_i64)

    def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *rest):
        formats = (_Format(f.value if isinstance(f, core.constexpr) else f) for f in (lhs_format, rhs_format))
        return super().dot_scaled(lhs, lhs_scale, next(formats), rhs, rhs_scale, next(formats), *rest)


def before_definition(lines: list[str]) -> int:
    """How many of a function's lines, its decorators, are before the `def`."""
    return next(at for at, line in enumerate(lines) if line.lstrip().startswith("def "))


builder = Builder()
semantic: TritonSemantic = _Semantic(builder)


@functools.cache
def _returns_tensors() -> bool:
    """Whether Triton makes a tensor of a number that a helper returns. 3.6 does; in later ones it stays a constant."""
    from triton.compiler import code_generator  # imported here: it imports half of Triton

    return not hasattr(code_generator.CodeGenerator, "decide_return_type")


def _call(name: str, *arguments: ast.expr, at: ast.AST) -> Any:
    return ast.copy_location(ast.Call(ast.Name(f"__pkt_{name}__", ast.Load()), list(arguments), []), at)


def _constant(value: Any) -> ast.Constant:
    return ast.Constant(value)


def _read_after_loops(definition: ast.AST) -> set[str]:
    """Names of the indices of `for` loops that are read outside of every loop over them."""
    nodes = list(ast.walk(definition))
    loops = [(n.target.id, n.body) for n in nodes if isinstance(n, ast.For) and isinstance(n.target, ast.Name)]
    inside = {(name, id(n)) for name, body in loops for statement in body for n in ast.walk(statement)}
    names = {name for name, _ in loops}
    loads = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names)
    return {n.id for n in loads if (n.id, id(n)) not in inside}


class _Gone:
    """The value of a loop's index after the loop."""


def _index(value: Any, name: str) -> Any:
    if isinstance(value, _Gone):
        found = "found the index of a loop after the loop, where it has no value on a GPU"
        raise Unsupported.here(f"{name} at {site()}", found, "assign it to another variable in the loop")
    return value


class _Rewriter(ast.NodeTransformer):
    """Rewrites the statements to which Triton gives another meaning than Python.

    - `x = 3` makes a tensor of the number, as do `x += 3` and a choice by a run-time condition.
    - `and` and `or` of run-time values evaluate every operand, because an expression cannot branch.
    - `not` of a block works element by element, and `is` compares the values of constants.
    - After a loop over `range` its index has no value.
    - A condition must be a scalar. Only conditions ask for the truth of a tensor: `tl` itself takes every tensor for
      true, to tell it from None.

    And it marks what decides when a `while` ends, for pkt.simulate.loops. pkt.simulate.front_end refuses what Triton
    does not compile.
    """

    def __init__(self, definition: ast.AST) -> None:
        self.inside: list[int] = []  # numbers of the loops around this statement
        self.marked: dict[ast.expr, list[tuple[int, int]]] = {}  # expression -> (loop, its index there)
        stored = (n for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        assigned = {n.id for n in stored}
        self.indices = _read_after_loops(definition)
        over = (n.iter for n in ast.walk(definition) if isinstance(n, ast.comprehension))
        self.iterables = {n for iterable in over for n in ast.walk(iterable)}  # where Python allows no `:=`
        self.loops: dict[ast.While, int] = {}
        for node in ast.walk(definition):
            if isinstance(node, ast.While):
                number = self.loops[node] = next(_numbers)
                found = _sources[number] = Source(node, assigned)
                for at in found.widest.guarding - {-1}:
                    expression = found.expressions[at]
                    if any(isinstance(n, ast.Call) for n in ast.walk(expression)):
                        self.marked.setdefault(expression, []).append((number, at))

    def visit(self, node: ast.AST) -> Any:
        marks = self.marked.get(node) if isinstance(node, ast.expr) else None
        new = super().visit(node)
        if not marks:
            return new
        return _call("looked", _call("look", _constant(tuple(marks)), at=node), new, at=node)

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        name = getattr(node.target, "id", None)
        if name not in self.indices:
            return node
        over = f"__pkt_over_{name}__"
        node.iter = ast.copy_location(ast.NamedExpr(ast.Name(over, ast.Store()), node.iter), node.iter)
        gone = ast.Assign([ast.Name(name, ast.Store())], _call("gone", at=node))
        ends = _call("ends", ast.Name(over, ast.Load()), at=node)
        return [node, ast.copy_location(ast.If(ends, [ast.copy_location(gone, node)], []), node)]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.indices:
            return _call("index", node, _constant(node.id), at=node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _call("tensor", node.value, at=node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        # Python's parser shares the contexts, and IPython writes a tree into them.
        contexts = {id(x): x for x in ast.walk(node.target) if isinstance(x, ast.expr_context)}
        total = ast.BinOp(copy.deepcopy(node.target, contexts), node.op, node.value)
        total.left.ctx = ast.Load()  # type: ignore[attr-defined]
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], total), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None or ast.unparse(node.annotation).split(".")[-1] == "constexpr":
            return self.generic_visit(node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            node.left, *node.comparators = [
                v if isinstance(v, ast.Constant) else _call("unwrapped", v, at=v)
                for v in (node.left, *node.comparators)
            ]
        return node

    def visit_List(self, node: ast.List) -> ast.Tuple:  # to Triton a list is a tuple
        self.generic_visit(node)
        return ast.copy_location(ast.Tuple(node.elts, node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        reads = node.attr in ("value", "type") and isinstance(node.ctx, ast.Load)
        return _call(node.attr, node.value, at=node) if reads else node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.generic_visit(node)
        if _returns_tensors() and node.value is not None:
            node.value = _call("tensor", node.value, at=node)
        return self._leaving(node)

    def visit_Break(self, node: ast.Break) -> Any:
        return self._leaving(node)

    def _leaving(self, node: Any) -> Any:
        if not self.inside:
            return node
        left = self.inside[-1:] if isinstance(node, ast.Break) else self.inside
        return [ast.copy_location(ast.Expr(_call("leave", _constant(tuple(left)), at=node)), node), node]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        name = "and" if isinstance(node.op, ast.And) else "or"
        return _call(name, *(ast.Lambda(nothing, value) for value in node.values), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("not", node.operand, at=node) if isinstance(node.op, ast.Not) else node

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _call("true", node.test, at=node)
        return node

    visit_If = _condition

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        if node in self.iterables:
            return self._condition(node)
        kept = "__pkt_condition__"
        node.test = ast.copy_location(ast.NamedExpr(ast.Name(kept, ast.Store()), node.test), node.test)
        self._condition(node)
        for name in ("body", "orelse"):
            value = getattr(node, name)
            setattr(node, name, _call("chosen", ast.Name(kept, ast.Load()), value, at=value))
        return node

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        number = self.loops[node]
        self.inside.append(number)
        self.generic_visit(node)
        self.inside.pop()
        node.test = _call("while", node.test, ast.Constant(number), at=node)
        enter = _call("enter", ast.Constant(number), at=node)
        return [ast.copy_location(ast.Expr(enter), node), node]

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        self.generic_visit(node)
        said = [node.msg] if node.msg is not None else []
        return ast.copy_location(ast.Expr(_call("assert", node.test, *said, at=node)), node)


_numbers = itertools.count(POLL + 1)
_sources: dict[int, Source] = {}


def captured(fn: FunctionType) -> dict[str, Any]:
    """The names that a function can see outside itself, with their values: its globals and its closure."""
    scope = dict(fn.__globals__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        with suppress(ValueError):  # a closure variable that is not yet assigned
            scope[name] = cell.cell_contents
    return scope


def code(fn: FunctionType, lines: list[str], first: int) -> CodeType:
    """The rewritten code of `fn`. Its source, decorators included, is `lines`, which begin at line `first`."""
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    # Defaults and annotations were evaluated when the user's module ran: they come from `fn`.
    arguments = definition.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        a.annotation = None
    _Rewriter(definition).visit(definition)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    module = compile(tree, fn.__code__.co_filename, "exec")
    return next(c for c in module.co_consts if inspect.iscode(c) and c.co_name == fn.__name__)


# -- functions that rewritten code calls ------------------------------------------------------------------------------


def to_tensor(value: Any) -> Any:
    """Convert plain numbers, in tuples too, to tensors; return anything else unchanged."""
    if type(value) is tl.tensor:
        return value
    if type(value) is int and -(2**31) <= value < 2**31:
        return integer(value, tl.int32)
    if isinstance(value, (bool, int, float, core.constexpr)):
        return semantic.to_tensor(value, False)
    return same_tuple(value, map(to_tensor, value)) if isinstance(value, (tuple, core.tuple)) else value


def _unwrapped(value: Any) -> Any:
    return value.value if type(value) is core.constexpr else value


def _type(value: Any) -> Any:
    """The `.type` of a value: a plain number is a constant here."""
    return core.constexpr_type(value) if isinstance(value, (bool, int, float)) else value.type


def _chosen(condition: Any, value: Any) -> Any:
    """The value of `value if condition else ...`: by a run-time condition a tensor."""
    return to_tensor(value) if type(condition) is tl.tensor else value


def same_tuple(like: tuple, values: Iterable[Any]) -> tuple:
    """A tuple of `values`, or a named tuple of the type of `like` if `like` is one."""
    return type(like)(*values) if hasattr(type(like), "_fields") else tuple(values)


def _combined(operands: Iterable[Callable[[], Any]], end: bool, method: str) -> Any:
    """`and` or `or`: a constant that is `end` ends the evaluation; run-time values do not."""
    values: list[Any] = []
    value: Any = None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            values.append(value)
        elif bool(value) is end:
            return value
    if not values:
        return value
    out = values[-1]
    for value in values[-2::-1]:
        out = getattr(value, method)(out)
    return out


def _true(value: Any) -> bool:
    if value is True or value is False:
        return value
    if type(value) is not tl.tensor:
        return _true(value.condition) if hasattr(value, "condition") else bool(value)  # tl.condition of Triton 3.9
    return bool(value.handle.data.reshape(-1)[0])


def _enter(number: int) -> None:
    frame = sys._getframe(1)
    source = _sources[number]
    found = source.widest
    if source.constants:
        variables = frame.f_locals
        found = source.slice(lambda code: value_of(code, variables, frame.f_globals))
    builder.pkt.enter_loop(number, found)


def _while(value: Any, number: int) -> bool:
    if not _true(value):
        builder.pkt.leave_loops((number,))
        return False
    builder.pkt.iterated(number, sys._getframe(1).f_locals)
    return True


def _looked(_: None, value: Any) -> Any:
    builder.pkt.look(())
    return value


def _assert(condition: Any, message: str = "") -> None:
    held = condition.handle.data.all() if isinstance(condition, tl.tensor) else condition
    assert held, message


def range_of_tensors(start: Any, end: Any = None, step: Any = None, **_: Any) -> Iterator[tl.tensor]:
    """`range` and `tl.range`: the index is a run-time integer, whose `//` and `%` are those of C."""
    first, last = (0, start) if end is None else (start, end)
    bounds = (first, last, 1 if step is None else step)
    numbers = [v if type(v) is int else operator.index(v) for v in bounds]
    if numbers[2] < 0 and type(step) is tl.tensor:
        found = "found a negative step that is known at run time only: on a GPU such a loop counts upwards"
        raise Unsupported.here(f"range at {site()}", found, "make the step a tl.constexpr, or count upwards")
    types = [v.dtype if type(v) is tl.tensor else int_type(n) for v, n in zip(bounds, numbers)]
    ty = types[0] if types[0] is types[1] is types[2] else functools.reduce(semantic.integer_promote_impl, types)
    for i in range(*numbers):
        yield integer(i, ty)


def static_range(start: Any, end: Any = None, step: Any = None, **_: Any) -> range:
    """`tl.static_range`: the index is a constant."""
    bounds = (0, start, step) if end is None else (start, end, step)
    return range(*(operator.index(v) for v in (*bounds[:2], 1 if step is None else step)))


def int_type(value: int) -> tl.dtype:
    """The type of an integer that is an argument of a launch or a bound of a loop."""
    if -(2**31) <= value < 2**31:
        return tl.int32
    if -(2**63) <= value < 2**63:
        return tl.int64
    if 0 <= value < 2**64:
        return tl.uint64
    raise OverflowError(f"the integer {value} does not fit 64 bits")


def _extreme(of_constants: Callable, of_tensors: str) -> Callable:
    def call(*values: Any, **named: Any) -> Any:
        if any(isinstance(v, tl.tensor) for v in values):
            return getattr(core, of_tensors)(*values, **named)
        return of_constants(*(getattr(v, "value", v) for v in values))

    return call


def _is_instance(value: Any, kinds: Any) -> bool:
    """As in Triton, where a constant counts as its value, and a tuple is a `tl.tuple`."""
    value = _unwrapped(value)
    return isinstance(value, kinds) or (kinds is core.tuple and isinstance(value, tuple))


NAMES: dict[str, Any] = {
    "isinstance": _is_instance,
    "range": range_of_tensors,
    "min": _extreme(builtins.min, "builtin_min"),
    "max": _extreme(builtins.max, "builtin_max"),
    "print": lambda *values: core.device_print(*values),
}
"""Python's builtins that mean something else in a kernel, unless its module defines the name."""

HELPERS: dict[str, Any] = {
    "__pkt_tensor__": to_tensor,
    "__pkt_chosen__": _chosen,
    "__pkt_unwrapped__": _unwrapped,
    "__pkt_value__": lambda constant: getattr(constant, "value", constant),
    "__pkt_type__": _type,
    "__pkt_and__": lambda *operands: _combined(operands, False, "logical_and"),
    "__pkt_or__": lambda *operands: _combined(operands, True, "logical_or"),
    "__pkt_not__": lambda value: semantic.not_(value) if isinstance(value, tl.tensor) else not value,
    "__pkt_true__": _true,
    "__pkt_while__": _while,
    "__pkt_enter__": _enter,
    "__pkt_leave__": lambda numbers: builder.pkt.leave_loops(numbers),
    "__pkt_look__": lambda numbers: builder.pkt.look(numbers),
    "__pkt_looked__": _looked,
    "__pkt_assert__": _assert,
    "__pkt_ends__": lambda over: isinstance(over, GeneratorType),  # of range_of_tensors
    "__pkt_gone__": _Gone,
    "__pkt_index__": _index,
}
