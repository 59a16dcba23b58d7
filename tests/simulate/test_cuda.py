"""`tl.extra.cuda` in the simulator, and what it refuses: inline assembly of others, and Gluon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import pkt
import pkt.language as pl
from pkt.errors import Unsupported
from pkt.simulate import cost
from pkt.simulate.findings import Deadlock, MissingBarrier
from tests.simulate.helpers import HEAP, line_of, outcome, run


@triton.jit
def registers(out):
    i = tl.program_id(0)
    begin = tl.extra.cuda.globaltimer()
    tl.store(out + 4 * i, tl.extra.cuda.smid().to(tl.int64))
    tl.store(out + 4 * i + 1, tl.extra.cuda.globaltimer() - begin)
    tl.store(out + 4 * i + 2, tl.extra.cuda.num_warps())
    tl.store(out + 4 * i + 3, tl.extra.cuda.num_threads())
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


def test_registers_have_the_slot_and_the_modelled_clock() -> None:
    out = torch.zeros(6, 4, dtype=torch.int64)
    pkt.launch(lambda world: registers[(6,)](out, num_warps=8), ranks=1, device="cpu", heap=HEAP, sms=3)
    assert set(out[:, 0].tolist()) == {0, 1, 2}
    assert (out[:, 1] >= 1000 * cost.STEP_US).all()
    assert out[0, 2:].tolist() == [8, 256]


@triton.jit
def poll_until(flag, out, BOUNDED: tl.constexpr):
    begin = tl.extra.cuda.globaltimer()
    if BOUNDED:
        while (tl.atomic_add(flag, 0) == 0) & (tl.extra.cuda.globaltimer() - begin < 100_000):
            pass
    else:
        while tl.atomic_add(flag, 0) == 0:
            pass
    tl.store(out, tl.extra.cuda.globaltimer() - begin)


def test_a_poll_that_the_clock_ends_is_no_deadlock() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    run(poll_until, (1,), flag, out, True)
    assert 100_000 <= out.item() < 110_000
    with pytest.raises(Deadlock):
        run(poll_until, (1,), flag, out, False)


@triton.jit
def poll_with_deadline(flags, data, out, ns, world, SENT: tl.constexpr):
    """Rank 0 computes for a while and tells the others, if SENT; they give up after `ns`."""
    if world.rank == 0:
        for i in range(300):
            tl.load(data + i)
        for r in range(SENT, world.size if SENT else 0):
            pl.store_release(flags, 1, r, world)
    else:
        begin = tl.extra.cuda.globaltimer()
        found, passed = 0, tl.full((), 0, tl.int64)
        while (found == 0) & (passed < ns):
            found = pl.load_acquire(flags, world.rank, world)
            passed = tl.extra.cuda.globaltimer() - begin
        tl.store(out, found)
        tl.store(out + 1, passed)


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("sent", [0, 1])
def test_the_clock_moves_far_only_while_all_programs_poll(seed: int, sent: int) -> None:
    def main(world: Any) -> None:
        flags, data = pkt.zeros(1, dtype=torch.int32), pkt.zeros(300)
        out = torch.full((2,), sent, dtype=torch.int64)
        poll_with_deadline[(1,)](flags, data, out, 100_000_000, world.device, sent)
        assert out[0].item() == sent
        assert sent or not world.rank or 100_000_000 <= out[1].item() < 101_000_000

    found = outcome(main, 4, seed)
    assert found.failure is None
    assert found.machine.steps < 20_000


@triton.jit
def sleep(out, ns):
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < ns:
        pass
    tl.store(out, 1)


def test_a_program_may_sleep_by_the_clock() -> None:
    out = torch.zeros(1)
    run(sleep, (1,), out, 1_000_000_000)
    assert out.item() == 1


@triton.jit
def assembly(out):
    tl.store(out, tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], tl.int32, False, 1))


def test_inline_assembly_is_refused_with_its_line() -> None:
    with pytest.raises(Unsupported, match=r"inline assembly 'mov.u32 \$0, %clock;'.*pkt.language or tl") as caught:
        run(assembly, (1,), torch.empty(1, dtype=torch.int32))
    assert line_of(assembly, "inline_asm") in str(caught.value)


@triton.jit
def long_assembly(out):
    text: tl.constexpr = """{
        .reg .b8 first, second, third, fourth;
        cvt.rn.satfinite.e2m1x2.f32 first, $1, $2; cvt.rn.satfinite.e2m1x2.f32 second, $3, $4;
    }"""
    tl.store(out, tl.inline_asm_elementwise(text, "=r", [], tl.int32, False, 1))


def test_long_assembly_is_quoted_in_one_line() -> None:
    with pytest.raises(Unsupported, match=r"'\{ \.reg \.b8 first, second.* \.\.\.' at test_cuda"):
        run(long_assembly, (1,), torch.empty(1, dtype=torch.int32))


@triton.jit
def met_in_assembly(x, out, BARRIER: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(x + i, i)
    if BARRIER:
        tl.inline_asm_elementwise("bar.sync 0;", "=r", [], tl.int32, False, 1)
    tl.store(out + i, tl.load(x + 127 - i))


def test_a_barrier_in_assembly() -> None:
    x, out = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    run(met_in_assembly, (1,), x, out, True)
    assert out.tolist() == list(range(127, -1, -1))
    with pytest.raises(MissingBarrier):
        run(met_in_assembly, (1,), x, out, False)


@gluon.jit
def of_gluon(out):
    gl.store(out, 1)


def test_a_gluon_kernel_is_refused_with_its_line() -> None:
    with pytest.raises(Unsupported, match=r"the Gluon kernel of_gluon.*triton.language.*GPUs") as caught:
        run(of_gluon, (1,), torch.empty(1, dtype=torch.int32))
    assert line_of(of_gluon, "gluon.jit") in str(caught.value)
