"""What a primitive is: a Python function that Triton takes for a builtin, with two bodies side by side.

Compiled, it emits inline assembly. Run by the simulator, whose builder has an attribute `pkt`, it calls the method of
the same name there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from triton.language import core


def plain(x: Any) -> Any:
    """The value of a constexpr; anything else, tuples too, as it is."""
    return x.value if isinstance(x, core.constexpr) else x


def primitive(fn: Callable) -> Callable:
    """Mark `fn` as a Triton builtin that has a second meaning in the simulator.

    Triton's code generator supplies `_semantic`; interpreted code does not, and gets that of the interpreter that runs.
    """

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None:
            from triton.runtime import interpreter

            _semantic = interpreter.interpreter_semantic
        args = tuple(plain(a) for a in args)
        kwargs = {k: plain(v) for k, v in kwargs.items()}
        return fn(*args, **kwargs, _semantic=_semantic)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


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
    """One inline assembly with side effects, an element at a time."""
    return core.inline_asm_elementwise(text, constraints, args, dtype, False, 1, _semantic=semantic)


def element(ptr: Any) -> Any:
    return ptr.dtype.scalar.element_ty


@primitive
def threads_to_agree(_semantic=None):
    """Threads among which a value read by each may differ: 32 * num_warps; 1 in the simulator, where a program is one
    thread, and in Gluon, where a block needs a layout (there a found value is this thread's own)."""
    if simulator(_semantic) is not None or "gluon" in type(_semantic).__module__:
        return core.constexpr(1)
    return core.constexpr(32 * _semantic.builder.options.num_warps)


@primitive
def settle(args, _semantic=None):
    """Make the types of nested tuples those of their values, in place.

    Triton gives a function that takes a tuple in a tuple a type of the outer one without the constants of the inner
    one; a loop copies what it uses by that type, and `world.size` is None in its body.
    """
    if isinstance(args, core.tuple):
        for value in args.values:
            if isinstance(value, core.tuple):
                settle(value, _semantic=_semantic)
        args.type = core.tuple_type([value.type for value in args.values], args.type.fields)
    return None


@primitive
def mark(kind, _semantic=None):
    """A region of the simulator's timeline begins: "compute", "communicate" or "wait". Compiled to nothing."""
    machine = simulator(_semantic)
    if machine is not None:
        return machine.mark(kind)
    if kind not in ("compute", "communicate", "wait"):
        raise ValueError(f'kind is "compute", "communicate" or "wait", not {kind!r}')
    return None
