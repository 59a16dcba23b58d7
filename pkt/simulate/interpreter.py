"""While a simulation runs, functions of `tl` compute, and calls of `@triton.jit` functions run their own source.

Nothing has to be set before triton is imported. `interpreting()` patches `tl` and undoes its patches at the end.
`interpret(jit_function)` returns the Python function of a kernel or helper (see pkt.simulate.source).
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.compiler import ASTSource
from triton.language import core
from triton.language.extra import libdevice
from triton.runtime import interpreter as base
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from pkt.errors import Unsupported
from pkt.language import address
from pkt.simulate import constants, shortcuts, source
from pkt.simulate.builder import Builder, np_dtype
from pkt.simulate.patches import Patches
from pkt.simulate.sites import in_user_code
from pkt.simulate.source import builder, semantic
from pkt.simulate.tasks import drop_runners

_ADDRESSES = address.of_rank, address.near, address.peer


class _Interpreted:
    """The Python functions of one simulation. A new simulation makes them anew, because globals may have changed: a
    notebook redefines helpers."""

    def __init__(self) -> None:
        self.functions: dict[int, tuple[Any, Callable, str | None]] = {}
        self.replaced: dict[int, Any] = {}  # id of a function of `tl` -> the function that replaces it
        self.code: weakref.WeakKeyDictionary[FunctionType, Any] = weakref.WeakKeyDictionary()

    def __call__(self, jit: Any) -> Callable:
        # By id: a JITFunction's hash compiles, which is not possible while `tl` is patched.
        known = self.functions.get(id(jit))
        return known[1] if known is not None and known[2] is getattr(jit, "_src", None) else self._make(jit)

    def _make(self, jit: Any) -> Callable:
        fn = jit.fn
        text: Any = getattr(jit, "_src", None)
        code = self.code.setdefault(fn, {}).get(text)
        if code is None:
            # The source as it was when the function was decorated: its file may have changed since.
            known = hasattr(jit, "raw_src")
            lines, first = (jit.raw_src, jit.starting_line_number) if known else inspect.getsourcelines(fn)
            if known and not textwrap.dedent("".join(lines)).endswith(text):  # host code has given it another source
                lines, first = text.splitlines(keepends=True), first + source.before_definition(lines)
            code = self.code[fn][text] = source.code(fn, lines, first)
        scope = {**source.NAMES, **source.captured(fn)}
        for name, value in scope.items():  # names from `from triton.language import load`
            if id(value) in self.replaced:
                scope[name] = self.replaced[id(value)]
        scope |= source.HELPERS
        made = FunctionType(code, scope, fn.__name__, fn.__defaults__)
        made.__kwdefaults__ = fn.__kwdefaults__
        called = shortcuts.peer(made, builder) if any(jit is known for known in _ADDRESSES) else made
        self.functions[id(jit)] = jit, called, text  # jit is kept alive, so that no other object gets its id
        return called


interpret = _Interpreted()

# -- arguments ------------------------------------------------------------------------------------------------------


def argument(value: Any, specialize: bool = True, annotated: str = "") -> Any:
    """Return a launch argument as the kernel sees it.

    The int 1 stays a Python number, because Triton compiles it as a constant (`rank.to(tl.int64)` fails on rank 1
    only). specialize: false for a parameter in `do_not_specialize`, where 1 is an ordinary number. annotated: the type
    that the parameter is annotated with, such as "i64", which a number then has whatever its value; "" for none."""
    if annotated and isinstance(value, (bool, int, float)):
        wide = tl.float64 if isinstance(value, float) else tl.int64 if value < 1 << 63 else tl.uint64
        return semantic.cast(_number(value, wide), _annotated(annotated))
    if isinstance(value, core.constexpr):
        return value.value
    if value is None or isinstance(value, (str, core.dtype, JITFunction)):
        return value
    if isinstance(value, bool):
        return _number(value, tl.int1)
    if isinstance(value, int):
        return 1 if value == 1 and specialize else constants.integer(value, source.int_type(value))
    if isinstance(value, float):
        return _number(value, tl.float32)
    if isinstance(value, torch.Tensor):
        # In each of many runs the heap is at the same address: the constants that follow from it are used again.
        make = constants.address if len(_launchers) > 1 else _number
        return make(value.data_ptr(), _pointer_to(value.dtype))
    if hasattr(value, "data_ptr"):
        return base._implicit_cvt(value)
    if isinstance(value, tuple):
        return source.same_tuple(value, (argument(v, specialize) for v in value))
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


@functools.cache
def _pointer_to(dtype: torch.dtype) -> tl.dtype:
    """The type of a tensor's argument; Triton would parse its name at every launch."""
    return base._implicit_cvt(torch.empty(0, dtype=dtype, device="cpu")).type


@functools.cache
def _annotated(name: str) -> tl.dtype:
    return tl.str_to_ty(name, None)


def _number(value: float, ty: tl.dtype) -> tl.tensor:
    return constants.new_tensor(np.array([value], np_dtype(ty)), ty, True)


def refuse_gluon(kernel: Any) -> None:
    """Raise Unsupported for a kernel of Gluon, which has layouts, shared memory and warps."""
    if isinstance(kernel, JITFunction) and kernel.is_gluon():
        place = f"{kernel.fn.__code__.co_filename}:{kernel.starting_line_number}"
        remedy = "write it in triton.language, or run it on GPUs"
        raise Unsupported.simulated(f"the Gluon kernel {kernel.fn.__name__}", place, remedy)


@functools.cache
def launch_options() -> frozenset[str]:
    """Names of a launch's keyword arguments that are no parameters of the kernel: num_warps and so on."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return frozenset(CUDAOptions.__dataclass_fields__)


# -- the language ---------------------------------------------------------------------------------------------------


def _takes_semantic(member: Any) -> bool:
    """Whether a method is one that Triton has not marked as a builtin but calls as one, such as `x.exp()`."""
    return inspect.isfunction(member) and "_semantic" in inspect.signature(member).parameters


def _bound(member: Callable) -> Callable:
    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*args, **named)

    return call


_patches = Patches()
compiling = _patches.aside
"""A context in which Triton can compile: without the patches."""


def _apply() -> None:
    """Patch `tl`. The patches of the last time serve again, unless one of their owners has changed."""
    if not _patches.serve():
        _patches.clear()
        _install()
    interpret.replaced = interpret.replaced | _patches.replaced
    _patches.apply()


def _multiple_of(value: Any, values: Any, *_: Any) -> Any:
    """`value`. To the compiler the first element along each axis is a multiple of that axis's number in `values`. Of an
    address the numbers are bytes, and 16 of them matter. Of several long axes only that one matters along which most
    elements follow one another, for it is the one that is loaded in wide words."""
    data, scalar = value.handle.data, value.dtype.scalar
    data = data if data.itemsize == 8 else data.astype(np.int64)  # where every number fits
    unit = max(1, scalar.element_ty.primitive_bitwidth // 8) if scalar.is_ptr() else 1
    following = [int((np.diff(data, axis=axis) == unit).sum()) for axis in range(data.ndim)]
    for axis, step in enumerate(values if isinstance(values, (list, tuple)) else (values,)):
        if data.shape[axis] > 1 and following[axis] < max(following):
            continue
        number = getattr(step, "value", step)
        wanted = min(number, 16) if scalar.is_ptr() else number
        first = data.take(0, axis)
        if (first % data.dtype.type(wanted)).any():
            builder.pkt.assumed_falsely(f"tl.multiple_of({number})")
    return value


def _hint() -> Callable:
    """A function of its own for each name: who imports it gets the right one back, see pkt.simulate.patches."""
    return lambda value, *_: value


_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)


def _of_constants(method: Callable) -> Callable:
    """A binary operator of constexpr, which leaves a tensor on its right to the tensor's own."""
    return lambda self, other: NotImplemented if type(other) is tl.tensor else method(self, other)


def _reflected(method: Callable) -> Callable:
    return lambda self, other: method(core.constexpr(other), self)


def _of_value(function: Callable) -> Callable:
    return lambda self: function(self.value)


def _method(jit: JITFunction) -> Callable:
    return lambda self, *args, **named: interpret(jit)(self, *args, **named)


def _shortcut(owner: Any, name: str, slow: Callable) -> Callable:
    if owner is tl.tensor and name in shortcuts.OPERATORS:
        return shortcuts.binary(name, slow)
    if owner is tl.tensor and name == "__getitem__":
        return shortcuts.getitem(slow)
    if name in shortcuts.ATOMICS and owner in (tl, core):
        return shortcuts.atomic(name, slow, builder)
    if name == "atomic_cas" and owner in (tl, core):
        return shortcuts.atomic_cas(slow, builder)
    if name in shortcuts.PURE:
        return shortcuts.pure(name, shortcuts.where(slow) if name == "where" else shortcuts.extreme(name, slow))
    if name in ("cast", "to"):
        return shortcuts.cast(slow)
    if name == "debug_barrier":
        return lambda _semantic=None: builder.pkt.join_threads()
    if name in ("arange", "full", "join", "reshape", "split"):
        return getattr(shortcuts, name)(slow)
    if name in ("program_id", "num_programs"):
        return shortcuts.of_grid(lambda: builder.grid_idx if name == "program_id" else builder.grid_dim)
    if name == "load" and owner in (tl, core):
        return shortcuts.load(slow, builder)
    if name == "store" and owner in (tl, core):
        return shortcuts.store(slow, builder)
    return slow


_MOVING = frozenset({"trans", "permute", "reshape", "view", "join", "split", "gather", "cat"})
"""Functions of `tl` that give elements to other threads, mostly by way of shared memory and a barrier."""


def _joining(function: Callable) -> Callable:
    def call(*args: Any, **named: Any) -> Any:
        builder.pkt.join_threads()
        return function(*args, **named)

    return call


def _install() -> None:
    """Make the patches."""
    from pkt.simulate import reductions  # here, because importing pkt should load little

    patch, cuda = _patches.patch, tl.extra.cuda
    for owner in (
        tl, core, tl.math, tl.tensor, core.tensor_descriptor_base, core.tensor_descriptor, cuda, cuda.libdevice,
    ):  # fmt: skip
        for name, member in vars(owner).items():
            if core.is_builtin(member) or (owner is tl.tensor and _takes_semantic(member)):
                made = _shortcut(owner, name, _bound(member))
                patch(owner, name, _joining(made) if name in _MOVING else made)
            elif owner is tl.tensor and isinstance(member, JITFunction):
                patch(owner, name, _method(member))
    patch(cuda, "num_warps", lambda: builder.pkt.m.current.launch.num_warps)
    patch(cuda, "num_threads", lambda: 32 * builder.pkt.m.current.launch.num_warps)
    for name, stub in vars(libdevice).items():  # each stands for the target's function of its name
        if inspect.isfunction(stub) and hasattr(cuda.libdevice, name):
            patch(libdevice, name, _patches.value(cuda.libdevice, name))
    for owner in (tl, core):
        for name, value in (
            ("range", source.range_of_tensors),
            ("static_range", source.static_range),
            ("static_assert", source.HELPERS["__pkt_assert__"]),
            ("static_print", lambda *args, **named: print(*args, **named)),
            ("multiple_of", _multiple_of),
            ("max_contiguous", _hint()),
            ("max_constancy", _hint()),
            ("reduce", reductions.reduce),
            ("associative_scan", reductions.associative_scan),
            ("map_elementwise", reductions.map_elementwise),
        ):
            patch(owner, name, value)
    for name in _OPERATORS:
        method = vars(core.constexpr)[f"__{name}__"]
        patch(core.constexpr, f"__{name}__", _of_constants(method))
        if f"__r{name}__" not in vars(core.constexpr):  # `3 % x`, where Triton's compiler makes 3 a constexpr
            patch(core.constexpr, f"__r{name}__", _reflected(method))
    patch(core.constexpr, "__format__", lambda self, how: format(self.value, how))
    for function in (len, int, float):
        patch(core.constexpr, f"__{function.__name__}__", _of_value(function))
    patch(tl.tensor, "__init__", constants.tensor_init)
    patch(tl.tensor, "results", None)  # of operations on a constant, see pkt.simulate.constants
    patch(TensorHandle, "__post_init__", lambda self: None)  # Triton's checks sizes at every operation
    patch(tl.tensor, "reduce", reductions.reduce)
    patch(tl.tensor, "associative_scan", reductions.associative_scan)
    patch(tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
    patch(tl.tensor, "__repr__", lambda self: repr(self.handle.data))
    patch(tl.tensor, "__str__", lambda self: str(self.handle.data))
    patch(tl.tensor, "T", property(lambda self: semantic.permute(self, (1, 0))))
    patch(core.dtype, "to_ir", _to_ir)
    patch(core.block_type, "to_ir", lambda self, b: constants.block_like(self, self.element_ty.to_ir(b)))
    patch(core.block_type, "with_element_ty", constants.block_like)
    patch(core.block_type, "__init__", constants.block_init(core.block_type.__init__))
    for owner, name, made in (
        (core, "_type_for_tuple_values", constants.tuple_types),
        (core, "_unwrap_if_constexpr", shortcuts.unwrapped),
        (base, "_get_np_dtype", shortcuts.np_dtype_of),
    ):
        if hasattr(owner, name):  # private names of Triton
            patch(owner, name, made(getattr(owner, name)))
    # Builtins of pkt.language that are called with no `_semantic` use this one.
    patch(base, "interpreter_semantic", semantic)
    patch(base, "interpreter_builder", builder)
    patch(torch.Tensor, "data_ptr", _data_ptr)
    patch(JITFunction, "__call__", _call)
    patch(JITFunction, "__get__", _of_aggregate)
    patch(JITFunction, "run", _launch)
    patch(base.InterpretedFunction, "__call__", _call)
    patch(base.InterpretedFunction, "run", _launch)
    patch(Autotuner, "run", _autotuned)
    patch(ASTSource, "make_ir", _make_ir)


def _data_ptr(self: torch.Tensor) -> int:
    """As torch's. Machine.launch lets kernels use the addresses that the user's host code has read."""
    address = _address(self)
    if builder.pkt is not None and in_user_code() and self.device.type == "cpu" and address:
        builder.pkt.take_address(self, address)
    return address


_address = torch._C.TensorBase.data_ptr
_data_ptr.__name__ = "data_ptr"  # torch gives its function modes the method that it finds under that name


def _call(self: Any, *args: Any, **named: Any) -> Any:
    task = builder.pkt.m.current
    if task is None or task.launch is None:
        name = self.fn.__name__
        raise TypeError(f"{name}(...) in host code: a kernel is launched on a grid, {name}[grid](...)")
    known = interpret.functions.get(id(self))  # as `interpret(self)`, without a call more
    function = known[1] if known is not None and known[2] is getattr(self, "_src", None) else interpret(self)
    return function(*args, **named)


def _make_ir(self: ASTSource, *args: Any, **named: Any) -> Any:
    """As Triton's, for host code that calls triton.compile."""
    with compiling():
        return self.make_ir(*args, **named)


def _of_aggregate(self: JITFunction, owner: Any, _: type | None = None) -> Any:
    """The function as an attribute of a class: of a value of Triton, such as an aggregate, it is a method."""
    return functools.partial(self, owner) if isinstance(owner, core.base_value) else self


def _autotuned(self: Autotuner, *args: Any, **named: Any) -> Any:
    """Run the first configuration that pruning leaves: a simulated time measures nothing, and the choice must be the
    same in every run."""
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
    # Triton's own mapping drops signedness, which the IR does not need but numpy does.
    name = _IR_TYPES.get(self.name, self.name)
    return getattr(b, f"get_{name}_ty")()


_launchers: list[Callable] = []
_freeze = functools.cache(gc.freeze)  # once
atexit.register(gc.unfreeze)  # at exit Triton's bindings report objects that were not collected


def _launch(kernel: Any, *args: Any, **named: Any) -> Any:
    return _launchers[-1](kernel, *args, **named)


@contextmanager
def interpreting(launch: Callable | None = None) -> Iterator[None]:
    """Patch `tl` while the context lasts: its functions compute, calls of jit functions run their source, and
    `kernel[grid](...)` calls `launch(kernel, *args, grid=..., warmup=..., **named)`.

    Contexts may be nested. An inner one only replaces `launch`, so an outer one without `launch` keeps `tl` patched
    over many runs."""
    outermost = not _launchers
    replaced, thresholds = interpret.replaced, gc.get_threshold()
    _launchers.append(launch or _refuse)
    try:
        if outermost:
            # If this module were first imported during a simulation, its tables would hold the patched functions of
            # tl, and kernels compiled later would have no static_assert.
            importlib.import_module("triton.compiler.code_generator")
            _apply()
            # Operations make few objects and no cycles, while torch and triton keep a million objects for ever. Those
            # stay frozen: thawing would move this run's cycles into the oldest generation, which is hardly collected.
            _freeze()
            gc.set_threshold(100_000, *thresholds[1:])
        with np.errstate(all="ignore"):
            yield
    finally:
        _launchers.pop()
        if outermost:
            _patches.remove()
            interpret.functions.clear()
            drop_runners()
            gc.set_threshold(*thresholds)
        interpret.replaced = replaced


def _refuse(kernel: Any, *args: Any, **named: Any) -> None:
    raise Unsupported.thread(f"the launch of {kernel.fn.__name__}", threading.current_thread().name)
