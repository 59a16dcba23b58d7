"""Counters of 64 bits: their instructions, the execution of a wait, its record, and behaviour on simulated ranks."""

from __future__ import annotations

import operator
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.language.inspect import device_world
from pkt.language.ptx import POLLS_PER_CHECK
from pkt.language.world import CMP_ABORTED, CMP_CODES, CMP_WIDE, RECORD_FIELDS, STATUS_DEADLINE, STATUS_FIRST_RECORD
from pkt.runtime.gpu import watch
from tests.simulate.helpers import outcome

from .compiled import ARCHS, body, compiled, order, reasons
from .ptx_machine import Memory, Thread, blocks, run
from .test_sync import (
    barrier_kernel,
    epoch_kernel,
    poll_kernel,
    signal_all_kernel,
    signal_kernel,
    wait_kernel,
    wait_result_kernel,
)

SIZE, STRIDE, RANK = 3, 1 << 38, 2
HEAP = 1 << 40
STATUS = HEAP + RANK * STRIDE
COUNTER = STATUS + (5 << 32) + 72
COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")


# ------------------------------------------------------------------------------------------------- instructions
@pytest.mark.parametrize("arch", ARCHS)
def test_signals_and_waits_access_64_bits(arch: int) -> None:
    world = device_world(2)
    assert order(compiled(signal_kernel, "*int64", 1, world, "add", arch=arch))[-1] == "one:atomic.release.sys.add.u64"
    assert order(compiled(signal_kernel, "*int64", 1, world, "set", arch=arch))[-1] == "one:atomic.release.sys.exch.b64"
    assert order(compiled(signal_all_kernel, "*int64", world, arch=arch))[-4:] == ["one:atomic.relaxed.sys.add.u64"] * 4
    wait = compiled(wait_result_kernel, "*int64", 7, world, arch=arch)
    (text,) = blocks(body(wait), "// pkt.wait")
    assert len(re.findall(r"ld\.acquire\.sys\.global\.b64", text)) == 1
    assert "sub.s64 ahead" in text
    assert "setp.ge.s64 p, ahead, 0" in text
    assert order(wait)[:2] == ["pkt.wait", "bar.sync"]
    assert "st.global.b64" in wait.asm["ptx"]  # the value found
    poll = compiled(poll_kernel, "*int64", 7, world, "gt", arch=arch)
    assert order(poll)[0] in ("one:ld.global.sys.acquire.b64", "one:atomic.acquire.sys.add.u64")  # by Triton's version
    epoch = compiled(epoch_kernel, "*int64", world, arch=arch)
    assert "-64" in re.findall(r"add\.s64\s+%rd\d+, %rd\d+, (-\d+);", epoch.asm["ptx"])  # as of 32 bits


def test_a_barrier_of_64_bits_is_refused() -> None:
    with pytest.raises(triton.CompilationError) as caught:
        compiled(barrier_kernel, "*int64", device_world())
    assert "a barrier's counter is a scalar pointer to int32, not pointer<int64>" in reasons(caught.value)


class Scene:
    """The ranks' memory, and a thread that waits on rank 2."""

    def __init__(self, cmp: str = "ge", deadline: int = 0) -> None:
        kernel = compiled(wait_kernel, "*int64", 7, device_world(RANK, SIZE, STRIDE), cmp)
        (self.text,) = blocks(body(kernel), "// pkt.wait")
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")
        self.memory, self.time = Memory(), 1000
        self.memory.store(STATUS + 4 * STATUS_DEADLINE, deadline, 64)

    def thread(self, want: int) -> Thread:
        found, ptr = re.search(r"ld\.acquire\.sys\.global\.b64 (%rd\d+), \[(%rd\d+)\]", self.text).groups()
        registers = {
            ptr: COUNTER,
            re.search(r"mov\.b64 last, (%rd\d+)", self.text)[1]: want % 2**64,
            re.search(r"ld\.relaxed\.sys\.global\.b32 a, \[(%rd\d+)", self.text)[1]: STATUS,
            re.search(r"cvt\.s64\.s32 off, (%r\d+)", self.text)[1]: RANK,
        }
        for axis in "xyz":
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = 0, 1
        thread = Thread(self.text, registers, self.memory, lambda: self.time)
        thread.found = lambda: thread.registers[found]
        return thread

    def tick(self) -> None:
        self.time += 10


@pytest.mark.parametrize("cmp", COMPARISONS)
def test_comparisons_hold_above_32_bits_and_across_the_wrap(cmp: str) -> None:
    for want in (0, 2**31, 2**32 + 5, 2**63 - 1, 2**64 - 1):
        for difference in (-(2**40), -1, 0, 1, 2**32, 2**63 - 1):
            scene = Scene(cmp)
            scene.memory.store(COUNTER, (want + difference) % 2**64, 64)
            thread = scene.thread(want)
            run([thread], limit=60)
            assert thread.done == getattr(operator, cmp)(difference, 0), (want, difference)
            if thread.done:
                assert thread.found() == (want + difference) % 2**64


@pytest.mark.parametrize(
    ("want", "found"), [(2**40 + 3, 2**40 - 7), (5, -(2**33) + 1), (-1, -(2**63)), (2**40 + 2**31, 2**31)]
)
def test_the_record_has_both_halves_and_the_error_the_values(want: int, found: int) -> None:
    scene = Scene(deadline=3000)
    scene.memory.store(COUNTER, found % 2**64, 64)
    run([scene.thread(want)], tick=scene.tick)
    words = [scene.memory.load(STATUS + 4 * (STATUS_FIRST_RECORD + k), 32) for k in range(len(RECORD_FIELDS))]
    signed = torch.tensor(words, dtype=torch.int64).to(torch.int32).tolist()  # as the host reads the page
    record = dict(zip(RECORD_FIELDS, signed))
    assert record["cmp"] == CMP_CODES["ge"] | CMP_WIDE
    assert record["owner"] == 1
    heap = SimpleNamespace(backend=SimpleNamespace(base=1 << 40), find=lambda address: None)
    waiting = watch.waiting(record, heap)
    assert (waiting.wanted, waiting.found, waiting.compare) == (want, found, "ge")
    assert waiting.counter == f"heap offset {COUNTER - STATUS:#x}"
    assert [scene.memory.load(HEAP + r * STRIDE, 32) for r in range(SIZE)] == [1] * SIZE
    aborted = watch.waiting(record | {"cmp": record["cmp"] | CMP_ABORTED}, heap)
    assert (aborted.wanted, aborted.compare) == (want, "ge")


def test_the_deadline_begins_anew_when_only_the_high_half_moves() -> None:
    scene = Scene(deadline=3000)
    thread = scene.thread(2**60)
    for i in range(10):
        run([thread], tick=scene.tick, limit=200)  # 2000 ns, less than the deadline
        assert not thread.done, i
        scene.memory.store(COUNTER, (i + 1) << 32, 64)
    run([thread], tick=scene.tick)
    assert thread.done


# -------------------------------------------------------------------------------------------------- simulated ranks
STEP = 1 << 33


@triton.jit
def ring_kernel(x, inbox, flags, ready, world, WAIT: tl.constexpr, STEP: tl.constexpr):
    """x moves one rank on; a position of 64 bits counts what has arrived."""
    launch = pl.epoch(flags, world).to(tl.int64)
    right = (world.rank + 1) % world.size
    pl.barrier(ready, world)  # everyone has read the last launch's inbox
    pl.put(dst=inbox, src=x, peer=right, world=world)
    pl.signal(flags, right, world, STEP)
    if WAIT == "wait":
        tl.store(x + 1, pl.wait(flags, launch * STEP, world))
    elif WAIT == "low":  # as if the counter had 32 bits
        pl.wait(flags.to(tl.pointer_type(tl.int32)), (launch * STEP).to(tl.int32), world)  # it is 0
    else:
        while not pl.test(flags, launch * STEP, world):
            pass
    tl.store(x, tl.load(inbox))


def ring(world: Any, how: str = "wait") -> None:
    x, inbox = pkt.full(2, world.rank, dtype=torch.int64), pkt.empty(1, dtype=torch.int64)
    flags, ready = pkt.signals(1, dtype=torch.int64), pkt.signals(1)
    for launch in range(1, 4):
        ring_kernel[(1,)](x, inbox, flags, ready, world.device, how, STEP)
        assert x[0].item() == (world.rank - launch) % world.size
        assert how != "wait" or x[1].item() == launch * STEP
    assert flags.dtype == torch.int64
    assert flags[0].item() == 3 * STEP


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("how", ["wait", "test"])
def test_counters_of_64_bits_order_a_ring(ranks: int, how: str) -> None:
    pkt.simulate(ring, ranks, seeds=3, args=(how,), sms=1).check()


def test_every_mutant_and_lost_signal_of_the_ring_is_found() -> None:
    report = pkt.simulate(ring, 3, seeds=20, mutants=True, lost_signals=True, sms=1)
    report.check()
    assert {m.site.call for m in report.mutants} >= {"signal", "wait", "barrier"}


def test_a_comparison_of_the_low_half_alone_is_a_race() -> None:
    report = pkt.simulate(ring, 2, seeds=20, args=("low",), sms=1)
    assert "DataRace" in {f.kind for f in report.findings}


@triton.jit
def lonely_kernel(flags, world):
    if tl.cast(world.rank, tl.int32) == 0:
        pl.signal(flags, 1, world, 1 << 40)
    else:
        pl.wait(flags, (1 << 40) + 1, world)


@triton.jit
def unread_kernel(flags, world):
    pl.signal(flags + 1, 0, world, 1 << 40)


def test_errors_print_the_whole_value() -> None:
    def main(world: Any, kernel: Any) -> None:
        flags = pkt.signals(2, dtype=torch.int64)
        kernel[(1,)](flags, world.device)

    found = str(outcome(main, 2, args=(lonely_kernel,)).failure)
    assert "waits on flags[0]" in found
    assert f"wanted >= {2**40 + 1}, found {2**40}" in found
    found = str(outcome(main, 1, args=(unread_kernel,)).failure)
    assert "flags[1]" in found
    assert str(2**40) in found


def test_a_guard_word_names_the_counter_in_units_of_64_bits() -> None:
    def main(world: Any) -> str:
        flags = pkt.signals(2, dtype=torch.int64)
        world.heap.words_of(flags._allocation)[16 + 2 * 3] = 7  # flags[3]
        with pytest.raises(pkt.SignalIndexError) as caught:
            flags.free()
        return str(caught.value)

    assert "the guard word at flags[3] was overwritten" in pkt.launch(main, ranks=1, device="cpu")[0]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.uint8, None])
def test_counters_of_other_types_are_refused(dtype: Any) -> None:
    def main(world: Any) -> str:
        with pytest.raises(pkt.DtypeError) as caught:
            pkt.signals(1, dtype=dtype)
        return str(caught.value)

    assert "torch.int32 or torch.int64" in pkt.launch(main, ranks=1, device="cpu")[0]
