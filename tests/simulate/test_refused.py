"""The simulator refuses statements and expressions that Triton does not compile, where a program comes to them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.code_generator import CodeGenerator

from pkt.errors import RankFailed
from tests.simulate.helpers import run


@triton.jit
def strange(x, n, HOW: tl.constexpr):
    if HOW == "break":
        for i in range(4):
            if i == n:
                break
    elif HOW == "continue":
        for i in range(4):
            if i == n:
                continue
    elif HOW == "dict":
        sizes = {"a": 1}
        tl.store(x, sizes["a"])
    elif HOW == "list comprehension":
        values = [i + 1 for i in range(3)]
        tl.store(x, values[0])
    elif HOW == "try":
        try:
            tl.store(x, 1)
        finally:
            tl.store(x, 2)
    elif HOW == "lambda":
        f = lambda y: y + 1  # noqa: E731
        tl.store(x, f(1))
    elif HOW == "import":
        import math

        tl.store(x, math.floor(1.5))
    elif HOW == "walrus":
        tl.store(x, (y := 3) + y)
    else:
        values = [i + 1 for i in (1, 2)]
        tl.store(x, values[1])


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("break", "Break"),
        ("continue", "Continue"),
        ("dict", "Dict"),
        ("list comprehension", "only comprehensions over a tuple"),
        ("try", "Try"),
        ("lambda", "Lambda"),
        ("import", "Import"),
        ("walrus", "NamedExpr"),
    ],
)
def test_what_triton_does_not_compile_is_refused_where_it_is_reached(how: str, kind: str) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    run(strange, (1,), x, 2, "none of them")  # Triton skips the branches of constants
    assert x.item() == 3
    if hasattr(CodeGenerator, f"visit_{kind}") and kind == "NamedExpr":  # newer Triton compiles it
        run(strange, (1,), x, 2, how)
        assert x.item() == 6
        return
    with pytest.raises(RankFailed, match="Triton does not compile this") as caught:
        run(strange, (1,), x, 2, how)
    assert kind in str(caught.value)
    assert "test_refused.py" in str(caught.value)
