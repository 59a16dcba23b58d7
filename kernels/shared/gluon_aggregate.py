"""`aggregate`: values of a Gluon kernel that belong together, as one value with methods."""

from __future__ import annotations

import hashlib
from typing import Any

from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate, base_value
from triton.runtime.jit import ConstexprFunction


class _Constructor(ConstexprFunction):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)  # with the constants of a tuple as they are, not their values


def aggregate(cls: Any) -> Any:
    """The Gluon aggregate of a class: its annotations are the fields, its methods gluon.jit functions.

    The constructor takes a value for each field, in the order of the fields. A value that the compiler knows is a
    constant, and stays one in the roles of specialised warps. Fields in capitals are always constants.
    """
    fields = tuple(cls.__annotations__)

    def fill(self: Any, *values: Any) -> None:
        for field, value in zip(fields, values, strict=True):
            setattr(self, field, value if isinstance(value, base_value) else gl.constexpr(value))

    cls.__init__ = _Constructor(fill)
    cls.__init__.hash = hashlib.sha256(repr((cls.__qualname__, fields)).encode()).hexdigest()  # for the cache key
    cls.__annotations__ = dict.fromkeys(fields, base_value)  # Triton holds the values to them
    made = _aggregate(cls)
    made.fields = fields
    return made
