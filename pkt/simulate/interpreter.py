"""Triton source as Python: rewrites `@triton.jit` functions and, for as long as a simulation runs, makes `tl` execute.

Nothing has to be set before triton is imported. `interpreting()` patches `tl`, and what was patched is put back at the
end; `interpret(jit_function)` gives the Python function of a kernel or helper, compiled from its own source with its own
line numbers, so that a frame of the simulator points at the user's line.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as base
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from pkt.simulate import reductions, shortcuts
from pkt.simulate.builder import Builder

builder = Builder()
semantic: TritonSemantic = TritonSemantic(builder)

# -- source ---------------------------------------------------------------------------------------------------------

_TENSOR = "__pkt_tensor__"


class _Assignments(ast.NodeTransformer):
    """`x = value` becomes `x = __pkt_tensor__(value)`: Triton makes a tensor of every plain number that is assigned."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name(_TENSOR, ast.Load()), [node.value], [])
        return node


def _to_tensor(value: Any) -> Any:
    return semantic.to_tensor(value, False) if isinstance(value, (bool, int, float, core.constexpr)) else value


def _code(fn: FunctionType) -> Any:
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    # Defaults and annotations were evaluated when the user's module ran: taken from `fn`, not evaluated again.
    arguments = definition.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        a.annotation = None
    _Assignments().visit(definition)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    module = compile(tree, fn.__code__.co_filename, "exec")
    return next(c for c in module.co_consts if inspect.iscode(c) and c.co_name == fn.__name__)


class _Interpreted:
    """The functions of one simulation; a new one sees the globals as they are then (a notebook redefines helpers)."""

    code: dict[FunctionType, Any] = {}

    def __init__(self) -> None:
        self.functions: dict[int, Callable] = {}

    def __call__(self, jit: Any) -> Callable:
        # By id: a JITFunction's hash compiles, which is not possible while `tl` is patched.
        known = self.functions.get(id(jit))
        return known if known is not None else self._make(jit)

    def _make(self, jit: Any) -> Callable:
        fn = jit.fn
        code = self.code.get(fn)
        if code is None:
            code = self.code[fn] = _code(fn)
        scope = {**fn.__globals__, _TENSOR: _to_tensor}
        if fn.__closure__:
            scope.update({name: cell.cell_contents for name, cell in zip(fn.__code__.co_freevars, fn.__closure__)})
        made = FunctionType(code, scope, fn.__name__, fn.__defaults__)
        made.__kwdefaults__ = fn.__kwdefaults__
        self.functions[id(jit)] = made
        return made


interpret = _Interpreted()

# -- arguments ------------------------------------------------------------------------------------------------------


def argument(value: Any, specialize: bool = True) -> Any:
    """A launch argument as the kernel sees it. An int that is 1 stays a Python number, because Triton compiles it as a
    constant (`rank.to(tl.int64)` fails there, on rank 1 only); `specialize=False` for `do_not_specialize`."""
    if isinstance(value, core.constexpr):
        return value.value
    if value is None or isinstance(value, (str, core.dtype, JITFunction)):
        return value
    if isinstance(value, bool):
        return tl.tensor(TensorHandle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, int):
        if value == 1 and specialize:
            return 1
        ty, dtype = _int_type(value)
        return tl.tensor(TensorHandle(np.array([value], dtype), ty), ty)
    if isinstance(value, float):
        return float(np.float32(value))
    if hasattr(value, "data_ptr"):
        return base._implicit_cvt(value)
    if isinstance(value, tuple):
        items = [argument(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        strides = [argument(s, specialize=False) for s in value.strides[:-1]] + [core.constexpr(1)]
        return semantic.make_tensor_descriptor(
            argument(value.base),
            [argument(s, specialize=False) for s in value.shape],
            strides,
            [core.constexpr(b) for b in value.block_shape],
            value.padding,
        )
    return value


def _int_type(value: int) -> tuple[tl.dtype, Any]:
    if -(2**31) <= value < 2**31:
        return tl.int32, np.int32
    if -(2**63) <= value < 2**63:
        return tl.int64, np.int64
    if 0 <= value < 2**64:
        return tl.uint64, np.uint64
    raise OverflowError(f"the integer {value} does not fit 64 bits")


# -- the language ---------------------------------------------------------------------------------------------------


def _bound(member: Callable) -> Callable:
    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*args, **named)

    return call


_MISSING: Any = object()


class _Patches:
    def __init__(self) -> None:
        self.saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # A class's own dictionary, not getattr, which would bind descriptors and find inherited names.
        self.saved.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self.saved:
            owner, name, old = self.saved.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _range(start: Any, end: Any = None, step: Any = None, **_: Any) -> range:
    first, last = (0, start) if end is None else (start, end)
    return range(*(operator.index(v) for v in (first, last, 1 if step is None else step)))


def _attribute(value: Any, *_: Any) -> Any:
    return value


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def _truth(self: tl.tensor) -> bool:
    data = self.handle.data
    if data.size != 1:
        raise ValueError(f"a block of shape {tuple(data.shape)} has no truth value; use tl.where, or reduce it first")
    return bool(data.reshape(-1)[0])


def _transposed(self: tl.tensor) -> tl.tensor:
    return semantic.permute(self, (1, 0))


def _method(jit: JITFunction) -> Callable:
    return lambda self, *args, **named: interpret(jit)(self, *args, **named)


def _shortcut(owner: Any, name: str, slow: Callable) -> Callable:
    if owner is tl.tensor and name in shortcuts.OPERATORS:
        return shortcuts.binary(name, slow)
    if name in shortcuts.ATOMICS and owner in (tl, core):
        return shortcuts.atomic(name, slow, builder)
    if name in ("cast", "to"):
        return shortcuts.cast(slow)
    if name == "load" and owner in (tl, core):
        return shortcuts.load(slow, builder)
    if name == "store" and owner in (tl, core):
        return shortcuts.store(slow, builder)
    return slow


def _install(patches: _Patches, launch: Callable) -> None:
    owners = (tl, core, tl.math, tl.tensor, core.tensor_descriptor_base, core.tensor_descriptor)
    for owner in owners:
        for name, member in list(vars(owner).items()):
            if core.is_builtin(member):
                bound = _bound(member)
                patches.set(owner, name, _shortcut(owner, name, bound))
            elif owner is tl.tensor and isinstance(member, JITFunction):
                patches.set(owner, name, _method(member))
    for owner in (tl, core):
        for name, value in (
            ("range", _range),
            ("static_range", _range),
            ("static_assert", _static_assert),
            ("static_print", print),
            ("multiple_of", _attribute),
            ("max_contiguous", _attribute),
            ("max_constancy", _attribute),
            ("reduce", reductions.reduce),
            ("associative_scan", reductions.associative_scan),
        ):
            patches.set(owner, name, value)
    patches.set(tl.tensor, "__init__", shortcuts.tensor_init)
    patches.set(TensorHandle, "__post_init__", lambda self: None)  # a check of sizes, at every operation
    patches.set(tl.tensor, "reduce", reductions.reduce)
    patches.set(tl.tensor, "associative_scan", reductions.associative_scan)
    patches.set(tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
    patches.set(tl.tensor, "__bool__", _truth)
    patches.set(tl.tensor, "__repr__", lambda self: repr(self.handle.data))
    patches.set(tl.tensor, "__str__", lambda self: str(self.handle.data))
    patches.set(tl.tensor, "T", property(_transposed))
    if hasattr(tl, "condition"):
        patches.set(tl.condition, "__bool__", lambda self: bool(self.condition))
    patches.set(core.dtype, "to_ir", _to_ir)
    # Builtins of pkt.language, called with no `_semantic`, take this one.
    patches.set(base, "interpreter_semantic", semantic)
    patches.set(base, "interpreter_builder", builder)
    patches.set(JITFunction, "__call__", lambda self, *args, **named: interpret(self)(*args, **named))
    # A plain function, so that it binds to the kernel.
    run = lambda kernel, *args, **named: launch(kernel, *args, **named)  # noqa: E731
    patches.set(JITFunction, "run", run)
    patches.set(base.InterpretedFunction, "__call__", lambda self, *args, **named: interpret(self)(*args, **named))
    patches.set(base.InterpretedFunction, "run", run)


_IR_TYPES = {"fp16": "half", "bf16": "bf16", "fp32": "float", "fp64": "double"}


def _to_ir(self: core.dtype, b: Builder) -> Any:
    # Signedness matters to numpy, not to the IR: Triton's own mapping drops it.
    name = _IR_TYPES.get(self.name, self.name)
    return getattr(b, f"get_{name}_ty")()


@contextmanager
def interpreting(launch: Callable) -> Iterator[None]:
    """While it lasts, calls of `tl` compute, calls of jit functions run their source, and `kernel[grid](...)` calls
    `launch(kernel, *args, grid=..., warmup=..., **named)`. May be nested; the innermost launch is the one used."""
    patches = _Patches()
    try:
        _install(patches, launch)
        with np.errstate(all="ignore"):
            yield
    finally:
        patches.undo()
        interpret.functions.clear()
