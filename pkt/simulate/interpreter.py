"""Triton source as Python: rewrites `@triton.jit` functions and, for as long as a simulation runs, makes `tl` execute.

Nothing has to be set before triton is imported. `interpreting()` patches `tl`, and what was patched is put back at the
end; `interpret(jit_function)` gives the Python function of a kernel or helper, compiled from its own source with its
own line numbers, so that a frame of the simulator points at the user's line.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import operator
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.compiler import code_generator
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as base
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from pkt.simulate import reductions, shortcuts
from pkt.simulate.builder import Builder, np_dtype


class _Semantic(TritonSemantic):
    def _has_native_tma(self) -> bool:
        return True  # and there is no driver to ask


builder = Builder()
semantic: TritonSemantic = _Semantic(builder)

# -- source ---------------------------------------------------------------------------------------------------------

_TENSOR, _AND, _OR, _NOT = "__pkt_tensor__", "__pkt_and__", "__pkt_or__", "__pkt_not__"
# Triton 3.6 makes a tensor of a number that a helper returns; later it stays a constant.
_RETURNS_TENSORS = not hasattr(code_generator.CodeGenerator, "decide_return_type")


class _Rewriter(ast.NodeTransformer):
    """Where Triton's meaning of a statement is not Python's.

    `x = 3` makes a tensor of the number. `and` and `or` of run-time values evaluate every operand, because there is
    nothing to branch on inside an expression; so does `not` of a block, element by element.
    """

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name(_TENSOR, ast.Load()), [node.value], [])
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.generic_visit(node)
        if _RETURNS_TENSORS and node.value is not None:
            node.value = ast.Call(ast.Name(_TENSOR, ast.Load()), [node.value], [])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later: list[ast.expr] = [ast.Lambda(nothing, value) for value in node.values]
        name = _AND if isinstance(node.op, ast.And) else _OR
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), later, []), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(ast.Call(ast.Name(_NOT, ast.Load()), [node.operand], []), node)


def _to_tensor(value: Any) -> Any:
    if type(value) is tl.tensor:
        return value
    if isinstance(value, (bool, int, float, core.constexpr)):
        return semantic.to_tensor(value, False)
    return _same_tuple(value, map(_to_tensor, value)) if isinstance(value, tuple) else value


def _same_tuple(like: tuple, values: Iterable[Any]) -> tuple:
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)


def _both(*operands: Callable[[], Any]) -> Any:
    """`and`: a false constant ends it, run-time values are all evaluated."""
    return _combined(operands, False, "logical_and")


def _either(*operands: Callable[[], Any]) -> Any:
    return _combined(operands, True, "logical_or")


def _combined(operands: Iterable[Callable[[], Any]], end: bool, method: str) -> Any:
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


def _not(value: Any) -> Any:
    return semantic.not_(value) if isinstance(value, tl.tensor) else not value


def _code(fn: FunctionType, lines: list[str], first: int) -> Any:
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
    _Rewriter().visit(definition)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    module = compile(tree, fn.__code__.co_filename, "exec")
    return next(c for c in module.co_consts if inspect.iscode(c) and c.co_name == fn.__name__)


class _Interpreted:
    """The functions of one simulation; a new one sees the globals as they are then (a notebook redefines helpers)."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Any, Callable]] = {}
        self.replaced: dict[int, Any] = {}  # id of a function of `tl` -> what stands for it now
        self.code: weakref.WeakKeyDictionary[FunctionType, Any] = weakref.WeakKeyDictionary()

    def __call__(self, jit: Any) -> Callable:
        # By id: a JITFunction's hash compiles, which is not possible while `tl` is patched.
        known = self.functions.get(id(jit))
        return known[1] if known is not None else self._make(jit)

    def _make(self, jit: Any) -> Callable:
        fn = jit.fn
        code = self.code.get(fn)
        if code is None:
            # As they were when it was decorated: its file may have changed since.
            lines, first = (
                (jit.raw_src, jit.starting_line_number) if hasattr(jit, "raw_src") else inspect.getsourcelines(fn)
            )
            code = self.code[fn] = _code(fn, lines, first)
        scope = {"range": _range, **fn.__globals__}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with suppress(ValueError):  # assigned later than the kernel was defined, and not yet
                scope[name] = cell.cell_contents
        for name, value in scope.items():  # `from triton.language import load`
            if id(value) in self.replaced:
                scope[name] = self.replaced[id(value)]
        scope |= {_TENSOR: _to_tensor, _AND: _both, _OR: _either, _NOT: _not}
        made = FunctionType(code, scope, fn.__name__, fn.__defaults__)
        made.__kwdefaults__ = fn.__kwdefaults__
        self.functions[id(jit)] = jit, made  # kept, so that its id stays its own
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
        return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    if hasattr(value, "data_ptr"):
        return base._implicit_cvt(value)
    if isinstance(value, tuple):
        return _same_tuple(value, (argument(v, specialize) for v in value))
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        strides = [argument(s, specialize=False) for s in value.strides[:-1]] + [core.constexpr(1)]
        made = semantic.make_tensor_descriptor(
            argument(value.base),
            [argument(s, specialize=False) for s in value.shape],
            strides,
            [core.constexpr(b) for b in value.block_shape],
            value.padding,
        )
        made.handle.round_f32_to_tf32 = getattr(value, "round_f32_to_tf32", False)  # Triton 3.9
        return made
    return value


def _int_type(value: int) -> tuple[tl.dtype, Any]:
    if -(2**31) <= value < 2**31:
        return tl.int32, np.int32
    if -(2**63) <= value < 2**63:
        return tl.int64, np.int64
    if 0 <= value < 2**64:
        return tl.uint64, np.uint64
    raise OverflowError(f"the integer {value} does not fit 64 bits")


@functools.cache
def launch_options() -> frozenset[str]:
    """The keywords of a launch that are no parameter of the kernel: num_warps and so on."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return frozenset(CUDAOptions.__dataclass_fields__)


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
        old = vars(owner).get(name, _MISSING)
        self.saved.append((owner, name, old))
        if owner in (tl, core, tl.math) and old is not _MISSING:
            interpret.replaced[id(old)] = value
        setattr(owner, name, value)

    def undo(self) -> None:
        while self.saved:
            owner, name, old = self.saved.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _range(start: Any, end: Any = None, step: Any = None, **_: Any) -> Iterator[tl.tensor]:
    """`range` and `tl.range`: the index is a run-time integer, whose `//` and `%` are those of C."""
    first, last = (0, start) if end is None else (start, end)
    bounds = [first, last, 1 if step is None else step]
    types = [v.dtype for v in bounds if isinstance(v, tl.tensor)]
    types += [_int_type(operator.index(v))[0] for v in bounds if not isinstance(v, tl.tensor)]
    ty = functools.reduce(semantic.integer_promote_impl, types)
    dtype = np_dtype(ty)
    for i in range(*(operator.index(v) for v in bounds)):
        yield tl.tensor(TensorHandle(np.array([i], dtype), ty), ty)


def _static_range(start: Any, end: Any = None, step: Any = None, **_: Any) -> range:
    """`tl.static_range`: the index is a constant."""
    bounds = (0, start, step) if end is None else (start, end, step)
    if any(isinstance(v, tl.tensor) for v in bounds):
        raise TypeError("tl.static_range takes constants; for a run-time number of rounds there is tl.range")
    return range(*(operator.index(v) for v in (*bounds[:2], 1 if step is None else step)))


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


def _install(patches: _Patches) -> None:
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
            ("static_range", _static_range),
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
    patches.set(JITFunction, "run", _launch)
    patches.set(base.InterpretedFunction, "__call__", lambda self, *args, **named: interpret(self)(*args, **named))
    patches.set(base.InterpretedFunction, "run", _launch)
    patches.set(Autotuner, "run", _autotuned)


def _autotuned(self: Autotuner, *args: Any, **named: Any) -> Any:
    """The first configuration that pruning leaves: a simulated time is no measure, and every run is the same."""
    self.nargs = dict(zip(self.arg_names, args))
    try:
        config = self.prune_configs(named)[0]
    finally:
        values, self.nargs = self.nargs, None
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**values, **named, **config.all_kwargs()})
    return self.fn.run(*args, **named, **config.all_kwargs())


_IR_TYPES = {"fp16": "half", "bf16": "bf16", "fp32": "float", "fp64": "double"}


def _to_ir(self: core.dtype, b: Builder) -> Any:
    # Signedness matters to numpy, not to the IR: Triton's own mapping drops it.
    name = _IR_TYPES.get(self.name, self.name)
    return getattr(b, f"get_{name}_ty")()


_launchers: list[Callable] = []


def _launch(kernel: Any, *args: Any, **named: Any) -> Any:
    return _launchers[-1](kernel, *args, **named)


@contextmanager
def interpreting(launch: Callable | None = None) -> Iterator[None]:
    """While it lasts, calls of `tl` compute, calls of jit functions run their source, and `kernel[grid](...)` calls
    `launch(kernel, *args, grid=..., warmup=..., **named)`. May be nested: the inner one only changes who launches, so
    an outer one without a launch keeps `tl` patched over many runs."""
    outermost = not _launchers
    patches, replaced, thresholds = _Patches(), dict(interpret.replaced), gc.get_threshold()
    _launchers.append(launch or _refuse)
    try:
        if outermost:
            _install(patches)
            # An operation makes a handful of objects and no cycle; torch and triton are a million that never go.
            gc.freeze()
            gc.set_threshold(100_000, *thresholds[1:])
        with np.errstate(all="ignore"):
            yield
    finally:
        _launchers.pop()
        patches.undo()
        if outermost:
            interpret.functions.clear()
            gc.unfreeze()
            gc.set_threshold(*thresholds)
        interpret.replaced = replaced


def _refuse(kernel: Any, *args: Any, **named: Any) -> None:
    raise RuntimeError(f"{kernel.fn.__name__}: no simulated rank launches here")
