"""Triton's front end without what it would do again.

Where only its verdict counts, not the code that it makes:

- It makes code for every function that a kernel calls, again for each kernel and specialisation. Here a function that
  it accepted before, for the same types and constants, is only declared.
- It visits the body of a loop twice, first to find the variables that change in it: a loop in a loop in a loop eight
  times. Here it visits each once, and the loop gets the code of that visit.

Where the code counts, too:

- It spells the type of a tuple out whenever one of its values is set, makes the shape of a block anew for each tensor,
  and reads the signature of a function at each call. Here each is done once.
- It makes a constant of each index on the way to a value in a tuple, and functions that refer to themselves, which
  leave their arguments to the garbage collector. Here it does neither.
- It copies the target of `a += b` with all that it refers to. Once IPython has shown a traceback, that is the tree of a
  whole file. Here it copies the target alone.

All leave the verdict as it is. They rely on Triton's internals, so they are enabled only for checked releases.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.language import core
from triton.runtime.jit import JITCallable

from pkt.simulate import accepted
from pkt.simulate.constants import block_init

CHECKED = ("3.6",)
"""Releases of Triton whose code generator this module knows."""

_results: dict[Hashable, Any] = {}  # (text, name with types and constants, facts) -> the type of the result
_trees: dict[str, ast.Module] = {}  # text of a function -> its tree, which the code generator only reads
_shapes: dict[tuple, tuple[Any, Any]] = {}  # shape of a block -> that of its tensors, and the number of its elements
_signatures: dict[Any, inspect.Signature] = {}  # of the functions of `tl`
_TUPLES = list, tuple, core.tuple, core.tuple_type


@contextmanager
def skipping(*facts: Hashable) -> Iterator[None]:
    """While the context lasts, Triton's code generator skips what it has accepted with the same facts: the target and
    the options of the compilation. It makes no code that can run."""
    if not triton.__version__.startswith(CHECKED):
        yield
        return
    from triton.compiler import code_generator  # imported here: it imports half of Triton

    class Skipping(code_generator.CodeGenerator):
        """Visits the body of each accepted function, and of each loop, no more often than it must."""

        def __new__(cls, context: Any, prototype: Any, *args: Any, **named: Any) -> Any:
            if named.get("is_kernel"):
                return super().__new__(cls)
            key = key_of(prototype, named["jit_fn"], named["function_name"], named["noinline"])
            if key in _results:
                return _Declared(context, prototype, named["module"], named["function_name"], _results[key])
            return super().__new__(cls)

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.visited: tuple[Any, Any, dict[str, Any]] = None, None, {}  # the body of a loop, its code and values

        def visit(self, node: Any) -> Any:
            """As Triton's, but without locations."""
            if node is None:
                return None
            last: Any = self.cur_node
            self.cur_node: Any = node
            try:
                found = ast.NodeVisitor.visit(self, node)
            except code_generator.CompilationError:
                raise
            except Exception as error:
                raise code_generator.CompilationError(self.jit_fn.src, self.cur_node, repr(error)) from None
            self.cur_node = last
            return found

        def _maybe_set_loc_to_name(self, val: Any, name: str) -> None:
            """Nothing: nobody reads the code."""

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            super().visit_FunctionDef(node)
            if not self.is_kernel:
                _results[key_of(self.prototype, self.jit_fn, self.function_name, self.noinline)] = self.ret_type

        def _find_carries(self, node: Any, liveins: dict[str, Any], ignore: Any = frozenset()) -> Any:
            """As Triton's, but it keeps the code of the body. That reads the values from before the loop where the
            loop's would stand, which have the same types."""
            block = self.builder.create_block()
            self.builder.set_insertion_point_to_start(block)
            self.scf_stack.append(node)
            self.visit_compound_statement(node.body)
            self.scf_stack.pop()
            names: list[str] = []
            handles: list[Any] = []
            for name, before in liveins.items():
                if name in ignore:
                    continue
                if not code_generator._is_triton_value(before):
                    assert name not in self.local_defs, f"Loop carried variable {name} is not a triton value"
                    continue
                self._verify_loop_carried_variable(name, self.lscope[name], before)
                flat = code_generator.flatten_values_to_ir([before])
                if flat != code_generator.flatten_values_to_ir([self.lscope[name]]):
                    names.append(name)
                    handles += flat
            self.visited = node.body, block, {name: self.lscope[name] for name in names}
            self.lscope: dict[str, Any] = liveins.copy()
            self.local_defs: dict[str, Any] = {}
            return names, handles, [liveins[name].type for name in names]

        def visit_compound_statement(self, stmts: Any) -> None:
            body, block, values = self.visited
            if stmts is not body or body is None:
                super().visit_compound_statement(stmts)
                return
            self.visited = None, None, {}
            block.merge_block_before(self.builder.get_insertion_block())
            self.lscope.update(values)

    def key_of(prototype: Any, function: Any, name: str, noinline: bool) -> Hashable:
        values = [getattr(c, "value", c) for c in prototype.constants.values()]
        return texts[function], tuple(texts[c] for c in values if isinstance(c, JITCallable)), name, noinline, facts

    texts = accepted.Texts()
    with quicker((code_generator, "CodeGenerator", Skipping)):
        yield


@contextmanager
def quicker(*more: tuple[Any, str, Any]) -> Iterator[None]:
    """While the context lasts, Triton's code generator makes the same code in less time. more: (owner, name, value),
    what else is changed."""
    if not triton.__version__.startswith(CHECKED):
        yield
        return
    from triton.compiler import code_generator  # imported here: it imports half of Triton

    def parse(function: Any) -> ast.Module:
        tree = _trees.get(function.src)
        if tree is None:
            tree = _trees[function.src] = parse_anew(function)
        return tree

    def scope(function: Any) -> dict[str, Any]:
        if id(function) not in scopes:
            scopes[id(function)] = scope_anew(function)
        return scopes[id(function)]

    parse_anew, scope_anew = JITCallable.parse, JITCallable.get_capture_scope
    scopes: dict[int, dict[str, Any]] = {}
    changed = [
        (code_generator, "copy", _Copy),
        (code_generator, "inspect", _Inspect),
        (code_generator, "warnings", _Warnings),
        (code_generator, "find_paths_if", _find_paths_if),
        (code_generator, "get_iterable_path", _get_iterable_path),
        (code_generator, "set_iterable_path", _set_iterable_path),
        (JITCallable, "parse", parse),
        (JITCallable, "get_capture_scope", scope),
        (core.block_type, "__init__", _init_block),
        (core.tensor, "__init__", _init_tensor),
        (core.tuple, "_setitem", _set_item),
        (core.tuple_type, "__init__", _init_tuple_type),
        *more,
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    named = vars(core.tuple_type).get("name")
    core.tuple_type.name = property(_spelled)
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the module ast
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        if named is None:
            del core.tuple_type.name
        else:
            core.tuple_type.name = named


class _Declared:
    """Stands for the code generator of a function that was accepted before: declares it, with the result it had."""

    def __init__(self, context: Any, prototype: Any, module: Any, name: str, result: Any) -> None:
        self.context, self.prototype, self.module, self.name, self.ret_type = context, prototype, module, name, result

    def visit(self, tree: ast.Module) -> None:
        result, builder = self.ret_type, ir.builder(self.context)
        if result != core.void:
            self.prototype.ret_types = result.types if isinstance(result, core.tuple_type) else [result]
        function = self.prototype.serialize(builder)
        self.module.push_back(builder.get_or_insert_function(self.module, self.name, function, "private", False))


class _Copy:
    """The function of `copy` that the code generator uses, to change the context of a node."""

    deepcopy = staticmethod(copy.copy)


class _Warnings:
    """The functions of `warnings` that the code generator uses. It enters a context at every node; one serves all."""

    warn, warn_explicit = staticmethod(warnings.warn), staticmethod(warnings.warn_explicit)
    catch_warnings = nullcontext

    @staticmethod
    def simplefilter(*_: Any) -> None:
        """Nothing."""


class _Inspect:
    """The functions of `inspect` that the code generator uses."""

    @staticmethod
    def getcallargs(function: Any, *args: Any, **named: Any) -> dict[str, Any]:
        code, defaults = function.__code__, function.__defaults__ or ()  # device functions have no *args
        names = code.co_varnames[: code.co_argcount]
        found = dict(zip(names, args))
        if not found.keys() & named.keys():
            found = {**dict(zip(names[len(names) - len(defaults) :], defaults)), **found, **named}
            if len(args) <= len(names) == len(found) and found.keys() == {*names}:
                return found
        return inspect.getcallargs(function, *args, **named)  # which has the error

    @staticmethod
    def signature(function: Any) -> inspect.Signature:
        of_all = getattr(function, "__func__", function)  # of a method, whatever object has it
        known = _signatures.get(of_all)
        if known is None:
            known = _signatures[of_all] = inspect.signature(function)
        return known


def _find_paths_if(values: Any, wanted: Callable[[tuple[int, ...], Any], bool]) -> list[tuple[int, ...]]:
    """As Triton's: the paths to those values, in tuples of tuples, that are wanted."""
    paths: list[tuple[int, ...]] = []
    _add_paths(paths, (), values, wanted)
    return paths


def _add_paths(paths: list[tuple[int, ...]], to: tuple[int, ...], values: Any, wanted: Callable) -> None:
    """Not a function in `_find_paths_if`, which would refer to itself and be garbage after each call."""
    for at, value in enumerate(values):
        path = (*to, at)
        if isinstance(value, _TUPLES):
            _add_paths(paths, path, value, wanted)
        elif wanted(path, value):
            paths.append(path)


def _get_iterable_path(values: Any, path: tuple[int, ...]) -> Any:
    """As Triton's: the value at a path."""
    for at in path:
        values = values.values[at] if isinstance(values, core.tuple) else values[at]
    return values


def _set_iterable_path(values: Any, path: tuple[int, ...], value: Any) -> None:
    """As Triton's: set the value at a path."""
    _get_iterable_path(values, path[:-1])._setitem(path[-1], value)


_init_block = block_init(core.block_type.__init__)


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """As Triton's, except that all tensors of one shape share the shape's objects."""
    shape = (*type.shape,) if type.is_block() else ()
    known = _shapes.get(shape)
    if known is None:
        known = _shapes[shape] = core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known


def _init_tuple_type(self: core.tuple_type, types: Any, fields: Any = None) -> None:
    """As Triton's, without the name."""
    self.types, self.fields = types, fields or [""] * len(types)


def _spelled(self: core.tuple_type) -> str:
    return "[" + ",".join(f"{field}:{of}" for field, of in zip(self.fields, self.types)) + "]"


def _set_item(self: core.tuple, idx: Any, value: Any) -> None:
    """As Triton's, which makes the types of all values anew."""
    at = getattr(idx, "value", idx)
    self.values[at] = value
    types = [*self.type.types]
    types[at] = value.type
    self.type = core.tuple_type(types, self.type.fields)
