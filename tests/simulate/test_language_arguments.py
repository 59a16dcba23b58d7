"""Arguments of a kernel, and its errors when an argument is wrong or an assertion fails."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import pkt
from pkt.errors import CompileError, RankFailed, ShapeError
from tests.simulate.helpers import run

# -- arguments -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    rest: Any


@triton.jit
def nested(out, p, t):
    tl.store(out, p.first + p.rest[0])
    tl.store(out + 1, tl.load(p.rest[1].first) * p.rest[1].rest)
    tl.store(out + 2, t[0][1] - t[1])
    block = tl.zeros((t[2],), tl.float32)
    tl.store(out + 3, tl.sum(block + 1))


def test_nested_tuples_and_named_tuples_are_arguments() -> None:
    x, out = torch.tensor([2.0]), torch.empty(4)
    run(nested, (1,), out, Pair(5, (7, Pair(x, tl.constexpr(4)))), ((1, 9), 4, tl.constexpr(8)))
    assert out.tolist() == [12.0, 8.0, 5.0, 8.0]


@triton.jit
def specialised(out, n):
    tl.store(out, n.to(tl.int64))


@triton.jit(do_not_specialize=["n"])
def not_specialised(out, n):
    tl.store(out, n.to(tl.int64))


def test_the_integer_one_is_a_constant() -> None:
    """Triton compiles an argument of 1 as a constant. Code that fails only on rank 1 must fail here, too."""
    out = torch.empty(1, dtype=torch.int64)
    for n in (0, 2, 16, 2**40):
        run(specialised, (1,), out, n)
        assert out.item() == n
    with pytest.raises(CompileError, match="'int' object has no attribute 'to'"):
        run(specialised, (1,), out, 1)
    run(not_specialised, (1,), out, 1)
    assert out.item() == 1


@triton.jit
def argument_types(i, j, k, f, b, none):
    tl.static_assert(i.dtype == tl.int32)
    tl.static_assert(j.dtype == tl.int64)
    tl.static_assert(k.dtype == tl.uint64)
    tl.static_assert(f.dtype == tl.float32)
    tl.static_assert(b.dtype == tl.int1)
    tl.static_assert(none is None)


def test_numbers_have_the_types_that_a_launch_gives_them() -> None:
    run(argument_types, (1,), 5, 2**31, 2**63, 0.1, True, None)


@triton.jit
def options(x, BLOCK: tl.constexpr, NAME: tl.constexpr = "none", DTYPE: tl.constexpr = tl.float32):
    o = tl.arange(0, BLOCK)
    if NAME == "twice":
        tl.store(x + o, tl.load(x + o).to(DTYPE) * 2)


def test_launch_options_and_meta_parameters_work() -> None:
    x = torch.ones(8)
    seen: list[Any] = []

    def grid(meta: dict) -> tuple:
        seen.append(meta["BLOCK"])
        return (triton.cdiv(8, meta["BLOCK"]),)

    def main(world: Any) -> None:
        options[grid](x, BLOCK=8, NAME="twice", num_warps=8, num_stages=3, num_ctas=1)
        options[1, 1](x, 8, tl.constexpr("twice"), DTYPE=tl.float16)
        options[(1,)](x, tl.constexpr(8))

    pkt.launch(main, ranks=1, device="cpu")
    assert (x == 4).all()
    assert seen == [8]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RankFailed, match="missing a required argument: 'BLOCK'"):
        run(options, (1,), torch.ones(8))
    with pytest.raises(RankFailed, match="wrong_name"):
        run(options, (1,), torch.ones(8), BLOCK=8, wrong_name=3)


@triton.autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + o, BLOCK, mask=o < n)


def _prune(configs: list, named: dict, **_: Any) -> list:
    return [c for c in configs if c.kwargs["BLOCK"] > named["n"] // 2]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8}, pre_hook=lambda named: named["out"].fill_(100))],
    key=["n"],
    prune_configs_by={"early_config_prune": _prune},
)
@triton.heuristics({"TWICE": lambda named: named["BLOCK"] == 8})
@triton.jit
def pruned(out, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.load(out + o) + BLOCK * (2 if TWICE else 1), mask=o < n)


def test_autotuned_kernels_run_their_first_configuration() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    run(tuned, lambda meta: (triton.cdiv(8, meta["BLOCK"]),), out, 8)
    assert (out == 4).all()  # it runs once: nothing is benchmarked
    assert tuned.cache == {}  # no choice is kept for the GPU
    run(pruned, lambda meta: (triton.cdiv(8, meta["BLOCK"]),), out, 8)
    assert (out == 116).all()


@triton.jit
def says(x):
    tl.device_print("value", tl.load(x))
    tl.static_print("static")


def test_device_print_names_the_rank(capsys: pytest.CaptureFixture) -> None:
    pkt.launch(lambda world: says[(1,)](torch.tensor([7 + world.rank])), ranks=2, device="cpu")
    said = capsys.readouterr().out
    assert "rank 0" in said
    assert "rank 1" in said
    assert "[7]" in said
    assert "[8]" in said


@triton.jit
def says_block(x, HEX: tl.constexpr):
    tl.device_print("block", tl.load(x + tl.arange(0, 2)), hex=HEX)
    tl.device_print("no value")


@pytest.mark.parametrize(
    ("dtype", "plain", "bits"),
    [
        (torch.int32, "[-2  3]", "[0xfffffffe 0x00000003]"),
        (torch.int8, "[-2  3]", "[0xfe 0x03]"),
        (torch.float32, "[-2.  3.]", "[0xc0000000 0x40400000]"),
        (torch.bfloat16, "[-2.  3.]", "[0xc000 0x4040]"),
        (torch.float8_e4m3fn, "[-2.  3.]", "[0xc0 0x44]"),
    ],
    ids=str,
)
def test_device_print_shows_values_or_their_bits(
    dtype: torch.dtype, plain: str, bits: str, capsys: pytest.CaptureFixture
) -> None:
    x = torch.tensor([-2.0, 3.0]).to(dtype)
    run(says_block, (1,), x, False)
    run(says_block, (1,), x, True)
    begin = "(0, 0, 0) rank 0"
    assert capsys.readouterr().out.splitlines() == [
        f"{begin} block:  {plain}",
        f"{begin} no value",
        f"{begin} block:  {bits}",
        f"{begin} no value",
    ]


@triton.jit
def asserts(x, n):
    o = tl.arange(0, 4)
    tl.device_assert(tl.load(x + o) < n, "too large", mask=o < 3)


def test_a_device_assert_fails_the_run() -> None:
    x = torch.tensor([1, 2, 3, 99])
    run(asserts, (1,), x, 4)
    with pytest.raises(RankFailed, match="too large"):
        run(asserts, (1,), x, 3)


@triton.jit
def fails_static(N: tl.constexpr):
    tl.static_assert(N % 2 == 0, "N must be even")


def test_a_static_assert_fails_the_run() -> None:
    run(fails_static, (1,), 2)
    with pytest.raises(CompileError, match="N must be even"):
        run(fails_static, (1,), 3)


# -- frequent mistakes -----------------------------------------------------------------------------------------------


@triton.jit
def ramp(x, n, world, N: tl.constexpr):
    if N:
        tl.store(x + tl.arange(0, N), n)
    else:
        tl.store(x + tl.arange(0, n), n)


def test_a_world_in_place_of_its_device_is_refused() -> None:
    def main(world: Any) -> None:
        ramp[(1,)](pkt.zeros(4), 4, world, 4)

    with pytest.raises(ShapeError, match=r"ramp: world: found a pkt.World, wanted world.device"):
        pkt.launch(main, ranks=1, device="cpu")


def test_a_kernel_without_a_grid_is_refused() -> None:
    def main(world: Any) -> None:
        ramp(pkt.zeros(4), 4, world.device, 4)

    with pytest.raises(RankFailed, match=r"a kernel is launched on a grid, ramp\[grid\]\(...\)"):
        pkt.launch(main, ranks=1, device="cpu")


def test_a_block_size_that_is_no_constant_is_refused() -> None:
    def main(world: Any) -> None:
        ramp[(1,)](pkt.zeros(4), 4, world.device, 0)

    with pytest.raises(CompileError, match="constexpr"):
        pkt.launch(main, ranks=1, device="cpu")


@triton.jit
def annotated(out, n: tl.int64, small: tl.int8, wide: tl.float64, half: tl.float16):
    tl.store(out, n * n)
    tl.store(out + 1, n.to(tl.int64))
    tl.store(out + 2, small.to(tl.int64))
    tl.store(out + 3, (wide * 1e10).to(tl.int64))
    tl.store(out + 4, half.to(tl.int64))


@pytest.mark.parametrize("n", [1, 1 << 20])
def test_an_annotated_number_has_the_annotated_type(n: int) -> None:
    out = torch.zeros(5, dtype=torch.int64)
    run(annotated, (1,), out, n, 200, 1.1, 2049.0)
    assert out.tolist() == [n * n, n, 200 - 256, 11000000000, 2048]


@triton.jit
def read_bytes(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


def test_a_tensor_may_be_reinterpreted_as_another_type() -> None:
    x, out = torch.tensor([0x38, 0x40, 0x44, 0x48], dtype=torch.uint8), torch.zeros(4)
    run(read_bytes, (1,), triton.reinterpret(x, tl.float8e4nv), out, 4)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]


@triton.jit
def copy_box(desc, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, desc.load([0, 0]))


def test_a_descriptor_may_be_of_a_reinterpreted_tensor() -> None:
    x, out = torch.randn(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    bits = triton.reinterpret(x, tl.int32)
    run(copy_box, (1,), TensorDescriptor(bits, bits.shape, bits.stride(), [2, 8]), out, 2, 8)
    assert torch.equal(out.view(torch.float32), x)


@triton.jit
def store_twice(out):
    tl.store(out, 3)
    tl.store(out, 4)


def test_a_kernel_runs_the_source_that_it_was_given() -> None:
    kernel, out = triton.JITFunction(store_twice.fn), torch.zeros(4)

    def main(world: pkt.World) -> None:
        kernel[(1,)](out)
        kernel._unsafe_update_src(kernel.src.replace("    tl.store(out, 4)\n", ""))
        kernel[(1,)](out[1:])
        kernel._unsafe_update_src(kernel.src.replace("3", "5"))
        kernel[(1,)](out[2:])
        store_twice[(1,)](out[3:])

    pkt.launch(main, ranks=1, device="cpu")
    assert out.tolist() == [4.0, 3.0, 5.0, 4.0]


@triton.jit
def three():
    return 3


@triton.jit
def store_three(out):
    tl.store(out, three())


def test_a_helper_runs_the_source_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    helper, out = triton.JITFunction(three.fn), torch.zeros(2)
    monkeypatch.setitem(store_three.fn.__globals__, "three", helper)

    def main(world: pkt.World) -> None:
        store_three[(1,)](out)
        helper._unsafe_update_src(helper.src.replace("3", "5"))
        store_three[(1,)](out[1:])

    pkt.launch(main, ranks=1, device="cpu")
    assert out.tolist() == [3.0, 5.0]


@triton.jit
def types_of_constants(out, strides):
    tl.static_assert(isinstance(strides[1].type, tl.constexpr_type))
    tl.static_assert(strides[0].type == tl.int32)
    tl.store(out, strides[0] + strides[1])


def test_a_constant_of_a_tuple_has_a_type() -> None:
    out = torch.zeros(1)
    run(types_of_constants, (1,), out, (4, 1))
    assert out.item() == 5.0
