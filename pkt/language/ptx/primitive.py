"""Primitives: Python functions that Triton takes for builtins.

In compiled code a primitive emits inline assembly. In the simulator a `simulated` primitive is the method of the same
name of the simulated device, which is the attribute `pkt` of the simulator's builder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

from .. import world as page


def plain(x: Any) -> Any:
    """The value of a constexpr; anything else, tuples too, unchanged."""
    return x.value if isinstance(x, core.constexpr) else x


def primitive(fn: Callable) -> Callable:
    """Mark `fn` as a Triton builtin.

    Triton's code generator supplies `_semantic`. Interpreted code does not, so it gets the running interpreter's.
    """

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None:
            _semantic = interpreter.interpreter_semantic
        values = [x.value if isinstance(x, core.constexpr) else x for x in args]  # `plain`, without a call for each
        if kwargs:
            kwargs = {k: plain(v) for k, v in kwargs.items()}
        return fn(*values, **kwargs, _semantic=_semantic)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


def simulated(fn: Callable) -> Callable:
    """A primitive whose calls go to the simulated device's method of the same name in the simulator."""

    name = fn.__name__

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any, **kwargs: Any) -> Any:
        machine = simulator(_semantic)
        if machine is not None:
            return getattr(machine, name)(*args, **kwargs)
        return fn(*args, **kwargs, _semantic=_semantic)

    return primitive(call)


def simulator(semantic: Any) -> Any:
    """The simulator's side of the primitives, or None in compiled code."""
    machine = getattr(semantic.builder, "pkt", None)
    if machine is None and type(semantic.builder).__module__ == "triton.runtime.interpreter":
        from pkt.errors import Unsupported

        raise Unsupported.here(
            "pkt's device functions",
            "called on the host or in Triton's own interpreter",
            "call them in a kernel, and run that on GPUs or with pkt.launch(fn, ranks=4, device='cpu')",
        )
    return machine


def capability(semantic: Any) -> int:
    """Compute capability of the target, 90 for sm_90."""
    arch = getattr(semantic.builder.options, "arch", None)
    digits = re.search(r"\d+", str(arch))
    return int(digits.group()) if digits else 90


def asm(text: str, constraints: str, args: list, dtype: Any, semantic: Any) -> Any:
    """Emit inline assembly with side effects that handles one element at a time; return its results."""
    return core.inline_asm_elementwise(text, constraints, args, dtype, False, 1, _semantic=semantic)


def element(ptr: Any) -> Any:
    return ptr.dtype.scalar.element_ty


@primitive
def member(rank, world, _semantic=None):
    """The number that a team's rank has in the world of all ranks, int64."""
    rank = core.cast(_semantic.to_tensor(rank), core.int64, _semantic=_semantic)
    team, table = page.Team.of(plain(world.team)), plain(world.table)
    if not table:
        return _semantic.add(_semantic.mul(rank, team.step, False), team.first, False)
    entries = core.cast(_semantic.to_tensor(table), core.int64, _semantic=_semantic)
    entry = _semantic.ashr(entries, _semantic.mul(rank, page.TABLE_BITS, False))
    return _semantic.and_(entry, (1 << page.TABLE_BITS) - 1)


@primitive
def threads_to_agree(_semantic=None):
    """Number of threads that may read different values: 32 * num_warps; 1 in the simulator, where a program is one
    thread, and in Gluon, where a block needs a layout, so that each thread keeps the value it found."""
    if simulator(_semantic) is not None or "gluon" in type(_semantic).__module__:
        return core.constexpr(1)
    return core.constexpr(32 * _semantic.builder.options.num_warps)


@primitive
def unknown(x, _semantic=None):
    """`x`, of 16, 32 or 64 bits, of which the compiler knows nothing. So it drops no code that depends on `x`, and `x`
    is computed in the layout that it has."""
    if simulator(_semantic) is not None:
        return x
    dtype = x.dtype.scalar
    pack, register = (1, "l") if dtype.primitive_bitwidth == 64 else (32 // dtype.primitive_bitwidth, "r")
    text, constraints = f"mov.b{64 if register == 'l' else 32} $0, $1;", f"={register},{register}"
    return core.inline_asm_elementwise(text, constraints, [x], dtype, False, pack, _semantic=_semantic)


@primitive
def retype_tuples(args, _semantic=None):
    """Set the types of nested tuples from their values, in place.

    For a tuple in a tuple, Triton's type of the outer tuple lacks the constants of the inner one. A loop copies the
    values it uses by that type, so that `world.size` would be None in its body.
    """
    if isinstance(args, core.tuple):
        for value in args.values:
            if isinstance(value, core.tuple):
                retype_tuples(value, _semantic=_semantic)
        args.type = core.tuple_type([value.type for value in args.values], args.type.fields)


@simulated
def mark(kind, task=None, _semantic=None):
    """Begin a region of the simulator's timeline: "compute", "communicate" or "wait". task: the index of the tile that
    the region works on. Compiled to nothing."""
    if kind not in ("compute", "communicate", "wait"):
        raise ValueError(f'kind is "compute", "communicate" or "wait", not {kind!r}')
