"""Triton's front end without what it would do again: only its verdict counts here, not the code that it makes.

- It makes code for every function that a kernel calls, again for each kernel and specialisation. Here a function that
  it accepted before, for the same types and constants, gets an empty body.
- It visits the body of a loop twice, first to find the variables that change in it: a loop in a loop in a loop eight
  times. Here it visits each twice.

Both leave the verdict as it is. They rely on Triton's internals, so they are enabled only for checked releases.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITCallable

from pkt.simulate import accepted

CHECKED = ("3.6",)
"""Releases of Triton whose code generator this module knows."""

_results: dict[Hashable, Any] = {}  # (text, name with types and constants, facts) -> the type of the result
_trees: dict[str, ast.Module] = {}  # text of a function -> its tree, which the code generator only reads


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

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.trials = 0  # loops around this statement whose variables are being found
            self.carried: dict[Hashable, list[str]] = {}  # loop, types and constants before it -> names that change
            self.tried: Any = None  # the body of a loop that the next visit skips

        def visit(self, node: Any) -> Any:
            """As Triton's, but without locations and without entering warnings.catch_warnings at every node."""
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
            if self.is_kernel:
                return super().visit_FunctionDef(node)
            constants = [getattr(c, "value", c) for c in self.prototype.constants.values()]
            called = tuple(texts[c] for c in constants if isinstance(c, JITCallable))
            key = texts[self.jit_fn], called, self.function_name, self.noinline, facts
            if key in _results:
                self.ret_type = _results[key]
                node = ast.copy_location(ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": []}), node)
            super().visit_FunctionDef(node)
            _results[key] = self.ret_type
            return None

        def _find_carries(self, node: Any, liveins: dict[str, Any], ignore: Any = frozenset()) -> Any:
            before = tuple((name, str(getattr(value, "type", value))) for name, value in liveins.items())
            names = self.carried.get((id(node), before))
            if names is None:
                self.trials += 1
                found = super()._find_carries(node, liveins, ignore)
                self.trials -= 1
                self.carried[id(node), before] = found[0]
            else:
                self.lscope: dict[str, Any] = liveins.copy()
                self.local_defs: dict[str, Any] = {}
                values = [liveins[name] for name in names]
                found = list(names), code_generator.flatten_values_to_ir(values), [value.type for value in values]
            if self.trials:
                self.tried = node.body
            return found

        def visit_compound_statement(self, stmts: Any) -> None:
            if stmts is self.tried and stmts is not None:
                self.tried = None
            else:
                super().visit_compound_statement(stmts)

    def parse(function: Any) -> ast.Module:
        tree = _trees.get(function.src)
        if tree is None:
            tree = _trees[function.src] = parse_anew(function)
        return tree

    texts, whole, parse_anew = accepted.Texts(), code_generator.CodeGenerator, JITCallable.parse
    code_generator.CodeGenerator, JITCallable.parse = Skipping, parse
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the module ast
            yield
    finally:
        code_generator.CodeGenerator, JITCallable.parse = whole, parse_anew
