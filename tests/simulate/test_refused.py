"""What does not compile does not run: the simulator shows each specialisation to Triton's front end first."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.errors import CompileTimeAssertionFailure

import pkt
import pkt.language as pl
from pkt.errors import CompileError, ShapeError, Unsupported
from tests.simulate.helpers import HEAP, line_of, outcome, run

front_end = importlib.import_module("pkt.simulate.front_end")


@triton.jit
def opens(x):
    tl.store(x, len(open("/dev/null").read()))


@triton.jit
def strange(x, n, HOW: tl.constexpr):
    if HOW == "break":
        for i in range(4):
            if i == n:
                break
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
    elif HOW == "walrus":
        tl.store(x, (y := 3) + y)
    elif HOW == "one branch":
        if n > 1:
            late = 3
        tl.store(x, late)
    elif HOW == "type changes":
        total = 0
        for i in range(n):
            total += tl.load(x) * 0.5
        tl.store(x, total)
    elif HOW == "helper":
        opens(x)
    else:
        values = [i + 1 for i in (1, 2)]
        tl.store(x, values[1])


@pytest.mark.parametrize(
    ("how", "said", "line"),
    [
        ("break", "unsupported AST node type: Break", "break"),
        ("dict", "Dict", 'sizes = {"a": 1}'),
        ("list comprehension", "comprehensions", "values = [i + 1 for i in range(3)]"),
        ("try", "Try", "try:"),
        ("lambda", "Lambda", "f = lambda"),
        ("walrus", "NamedExpr", "(y := 3)"),
        ("one branch", "late is not defined", "tl.store(x, late)"),
        ("type changes", "Loop-carried variable total", "for i in range(n)"),
        ("helper", "open", "opens(x)"),
    ],
)
def test_what_triton_does_not_compile_is_refused_with_its_message(how: str, said: str, line: str) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    run(strange, (1,), x, 2, "none of them")  # Triton skips the branches of constants
    assert x.item() == 3
    if how == "walrus" and hasattr(CodeGenerator, "visit_NamedExpr"):  # newer Triton compiles it
        run(strange, (1,), x, 2, how)
        assert x.item() == 6
        return
    with pytest.raises(CompileError, match=said) as caught:
        run(strange, (1,), x, 2, how)
    if how not in ("break", "type changes", "one branch"):
        assert caught.value.place == line_of(strange, line)
    assert x.item() == 3  # nothing ran
    assert caught.value.arch == 90


@triton.jit
def counts_down(x, n):
    while n:
        n -= 1
    tl.store(x, n)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="newer releases take such a condition")
def test_a_number_as_the_condition_of_a_while_is_refused_with_a_remedy() -> None:
    with pytest.raises(CompileError, match="a while loop needs a comparison") as caught:
        run(counts_down, (1,), torch.ones(1, dtype=torch.int32), 3)
    assert caught.value.place == line_of(counts_down, "def counts_down")


@triton.jit
def adds_a_block_to_a_number(x, N: tl.constexpr):
    tl.atomic_add(x, tl.arange(0, N))


def test_other_errors_of_the_parser_are_not_called_errors_of_a_while() -> None:
    with pytest.raises(CompileError) as caught:
        run(adds_a_block_to_a_number, (1,), torch.zeros(1, dtype=torch.int32), 16)
    text = str(caught.value)  # Triton 3.9 says what is wrong itself
    assert "if that is the operand of scf.condition" in text or "Value argument cannot be block type" in text


@triton.jit
def rotate(x, flags, world, N: tl.constexpr):
    i, right = tl.arange(0, N), (world.rank + 1) % world.size
    pl.store(x + N + i, tl.load(x + i), right, world)
    pl.signal(flags, right, world)
    pl.wait(flags, 1, world)


def test_a_specialisation_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks 0, 2 and 3 are one specialisation; the rank 1 is a constant. Further schedules compile nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # nothing is known
    compiled: list[Any] = []
    compile = front_end._compile
    monkeypatch.setattr(front_end, "_compile", lambda *args, **named: compiled.append(args) or compile(*args, **named))

    def main(world: Any, n: int) -> None:
        x, flags = pkt.zeros(2 * n), pkt.signals(1)
        rotate[(1,)](x, flags, world.device, n)

    assert pkt.simulate(main, ranks=4, seeds=5, args=(16,), heap=HEAP).ok
    assert len(compiled) == 2
    assert outcome(main, 4, args=(32,)).failure is None
    assert len(compiled) == 4


def test_the_language_is_patched_again_after_a_compilation() -> None:
    before = tl.load, tl.tensor.__add__, torch.Tensor.data_ptr
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(CompileError):
        run(strange, (1,), x, 2, "dict")
    assert (tl.load, tl.tensor.__add__, torch.Tensor.data_ptr) == before
    run(strange, (1,), x, 2, "something else")
    assert x.item() == 3


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compile_reports_what_a_kernel_takes(target: str) -> None:
    def main(world: Any) -> None:
        x, flags = pkt.zeros(64), pkt.signals(1)
        rotate[(1,)](x, flags, world.device, 32, num_warps=1)

    report = pkt.simulate(main, ranks=2, seeds=2, heap=HEAP, compile=target)
    assert report.ok
    assert {(u.kernel, f"sm_{u.arch}", u.spilled) for u in report.kernels} == {("rotate", target, 0)}
    assert all(8 <= u.registers <= 255 and u.shared <= 1024 for u in report.kernels)
    assert f"rotate, {target}" in str(report)
    assert f"{report.kernels[0].registers} registers, 0 bytes spilled" in str(report)


@triton.jit
def scale_rows(x, words, flags, world, KEPT: tl.constexpr):
    launch = pl.epoch(flags, world)
    i = tl.arange(0, 64)
    pl.put_flagged(words + 2 * i, (i,), launch, world.rank, world)
    found = pl.take_flagged(words + 2 * i, launch, world, values=1)[0]
    if KEPT:
        found = tl.gather(found, i, 0)
    at = x + 64 * i[:, None] + i[None, :]
    tl.store(at, tl.load(at) * found[:, None])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compile_reports_waits_that_triton_repeats(target: str, kept: bool) -> None:
    waits = []

    def main(world: Any) -> None:
        x, words = pkt.ones(64, 64, dtype=torch.int32), pkt.zeros(64, 2, dtype=torch.int32)
        launched = scale_rows[(1,)](x, words, pkt.signals(1), world.device, kept)
        waits.append(launched.asm["ptx"].count("// pkt.wait"))
        assert x[:, 5].tolist() == list(range(64))

    (usage,) = pkt.simulate(main, ranks=1, seeds=1, heap=HEAP, compile=target).check().kernels
    assert usage.repeated == waits[0] - 1
    assert (usage.repeated == 0) == (kept or not triton.__version__.startswith("3.6")), "newer ones repeat none"
    assert ("repeated wait" in str(usage)) == (usage.repeated > 0)


def test_a_dtype_that_triton_does_not_know() -> None:
    def main(world: Any) -> None:
        rotate[(1,)](torch.zeros(64, dtype=torch.complex64), pkt.signals(1), world.device, 32)

    with pytest.raises(pkt.DtypeError, match=r"rotate: x: found complex64, wanted .* torch\.view_as_real"):
        pkt.launch(main, ranks=1, device="cpu", heap=HEAP)


def test_a_launch_returns_what_triton_says_of_the_kernel(capsys: pytest.CaptureFixture) -> None:
    def main(world: Any) -> list[Any]:
        x, flags = pkt.zeros(64), pkt.signals(1)
        return [
            rotate[(1,)](x, flags, world.device, 32, num_warps=2),
            rotate[(0,)](x, flags, world.device, 32, num_warps=2),
            rotate.warmup(x, flags, world.device, 32, num_warps=2, grid=None),
        ]

    (one, none, warm), _ = pkt.launch(main, ranks=2, device="cpu", heap=HEAP, compile="sm_90")
    assert one is none is warm
    warm._init_handles()
    assert (one.metadata.num_warps, one.metadata.shared, one.n_spills) == (2, one.usage.shared, 0)
    assert one.n_regs == one.usage.registers
    assert "st.release.sys" in one.asm["ptx"] or "red.release.sys" in one.asm["ptx"]
    with pytest.raises(Unsupported, match=r"^rotate\[grid\].*\.function: found .* loads no machine code: take n_regs"):
        one.function
    (one, none, warm), _ = pkt.launch(main, ranks=2, device="cpu", heap=HEAP)
    assert one is none is warm
    with pytest.raises(Unsupported, match='n_regs: found .* makes no machine code: give compile="sm_90" to pkt.launch'):
        one.n_regs
    assert not hasattr(one, "__array__")


@triton.jit
def add_rows(x, out, stride, BY: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, tl.load(x + row * stride) + BY)


def test_a_compiled_kernel_is_launched_again_as_it_was_compiled() -> None:
    x, found = torch.arange(4), [torch.zeros(4, dtype=torch.int64) for _ in range(3)]

    def main(world: Any) -> None:
        compiled = add_rows.warmup(x, found[0], 1, 5, grid=(1,))
        compiled[(4, 1, 1)](x, found[0], 1, 5)
        add_rows[(1,)](x, found[1], 1, 5)[(4, 1, 1)](x, found[1], 3, 7)  # 1 and 5 are in the machine code
        with pytest.raises(TypeError, match=r"add_rows.*found 3 arguments, wanted one for each.*: x, out, stride, BY"):
            compiled[(4, 1, 1)](x, found[2], 1)
        with pytest.raises(IndexError):
            compiled[(4,)](x, found[2], 1, 5)

    pkt.launch(main, ranks=1, device="cpu", heap=HEAP)
    assert [one.tolist() for one in found] == [[5, 6, 7, 8], [5, 6, 7, 8], [0] * 4]


@triton.jit
def even_only(out, N: tl.constexpr):
    tl.static_assert(N % 2 == 0, "N is odd")
    tl.store(out, N)


@pytest.mark.parametrize("kind", [CompileError, triton.CompilationError, CompileTimeAssertionFailure])
def test_host_code_may_catch_what_triton_raises(kind: type[Exception]) -> None:
    out = torch.zeros(1, dtype=torch.int32)

    def main(world: Any) -> None:
        with pytest.raises(
            kind, match=r"^even_only at test_refused.py:\d+: Triton does not compile it.*(?s:.)*N is odd"
        ):
            even_only[(1,)](out, 3)
        even_only[(1,)](out, 4)

    pkt.launch(main, ranks=1, device="cpu", heap=HEAP)
    assert out.item() == 4
    with pytest.raises(CompileError) as refused:
        pkt.launch(lambda world: even_only[(1,)](out, 5), ranks=1, device="cpu", heap=HEAP)
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (str(copy), copy.kernel, copy.arch) == (str(refused.value), "even_only", 90)


def test_host_code_may_call_triton_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    types = {"x": "*i64", "out": "*i64", "stride": "i32", "BY": "constexpr"}

    def main(world: Any) -> str:
        x = torch.arange(4)
        source = ASTSource(add_rows, types, {"BY": 5})
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
        add_rows[(4,)](x, x, 1, 5)
        assert x.tolist() == [5, 6, 7, 8]
        return text

    (text,) = pkt.launch(main, ranks=1, device="cpu", heap=HEAP)
    assert "tt.func public @add_rows" in text


def test_a_warm_up_compiles_and_runs_nothing() -> None:
    x = torch.zeros(1, dtype=torch.int32)

    def main(world: Any, how: str) -> None:
        strange.warmup(x, 2, how, grid=(1,))
        strange.warmup(torch.int32, 2, how, grid=(1,))

    pkt.launch(main, ranks=1, device="cpu", heap=HEAP, args=("something else",))
    assert x.item() == 0
    with pytest.raises(CompileError, match="unsupported AST node type: Dict"):
        pkt.launch(main, ranks=1, device="cpu", heap=HEAP, args=("dict",))


def test_compile_names_its_targets() -> None:
    with pytest.raises(ShapeError, match="found sm_70"):
        pkt.simulate(lambda world: None, ranks=1, seeds=1, compile="sm_70")
    with pytest.raises(ShapeError, match="found sm_70"):
        pkt.launch(lambda world: None, ranks=1, device="cpu", compile="sm_70")


@triton.jit
def gathers_rows(x, out, N: tl.constexpr):
    rows, columns = tl.arange(0, 8), tl.arange(0, N)
    block = tl.make_tensor_descriptor(x, [N, N], [N, 1], [1, N]).gather(7 - rows, 0)
    tl.store(out + rows[:, None] * N + columns[None, :], block)


def test_a_gather_of_a_descriptor_names_the_gpu_that_it_needs(capsys: pytest.CaptureFixture) -> None:
    def main(world: Any) -> None:
        x, out = pkt.rand(16, 16), torch.zeros(8, 16)
        gathers_rows[(1,)](x, out, 16)
        assert torch.equal(out, x.plain()[:8].flip(0))

    pkt.launch(main, ranks=1, device="cpu", heap=HEAP)
    with pytest.raises(CompileError, match="need an sm_100 GPU: on older ones load and store by pointers"):
        pkt.launch(main, ranks=1, device="cpu", heap=HEAP, compile="sm_90")
    assert capsys.readouterr().out == ""
