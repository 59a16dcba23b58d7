"""Flagged words: their instructions, the spin executed, and what they mean on simulated ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.language.inspect import count_markers, device_world
from pkt.language.ptx import POLLS_PER_CHECK
from pkt.language.world import CMP_CODES, RECORD_FIELDS, STATUS_DEADLINE, STATUS_FIRST_RECORD
from pkt.simulate.faults import Faults
from tests.simulate.helpers import outcome

from .compiled import ARCHS, body, compiled, order, reasons
from .ptx_machine import Memory, Thread, blocks, run

SIZE, STRIDE, RANK = 3, 1 << 38, 2
STATUS = (1 << 40) + RANK * STRIDE
WORD = STATUS + (5 << 32) + 72


@triton.jit
def put_kernel(words, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    pl.put_flagged(words + i, i, flag, (world.rank + 1) % world.size, world, mask=mask)


@triton.jit
def put_one_kernel(words, flag, world):
    pl.put_flagged(words, 7, flag, 2, world)


@triton.jit
def take_kernel(words, out, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    tl.store(out + i, pl.take_flagged(words + i, flag, world, mask=mask))


@triton.jit
def take_one_kernel(words, out, flag, world):
    tl.store(out, pl.take_flagged(words, flag, world))


# ------------------------------------------------------------------------------------------------- instructions
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_put_is_one_store_a_word_and_no_fence(masked: bool, rank: int, arch: int) -> None:
    k = compiled(put_kernel, "*int64", 5, 100, device_world(rank, 32), 512, masked, arch=arch)
    assert order(k) == ["st.relaxed.sys.global.b64"] * 4  # 128 threads
    assert count_markers(k.asm["ttir"]) == {"wait": 0, "signal": 1}
    k = compiled(put_one_kernel, "*int64", 5, device_world(rank, 32), arch=arch)
    assert order(k) == ["st.relaxed.sys.global.b64"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_take_spins_on_whole_words_and_no_fence(masked: bool, arch: int) -> None:
    k = compiled(take_kernel, "*int64", "*int32", 5, 100, device_world(1), 128, masked, arch=arch)
    assert order(k) == ["pkt.wait", "st.global.b32"]  # 128 threads
    for text in blocks(body(k), "// pkt.wait"):
        assert len(re.findall(r"ld\.relaxed\.sys\.global\.b64 word", text)) == 1
        assert "acquire" not in text
        assert "fence" not in text
    assert count_markers(k.asm["ttir"]) == {"wait": 1, "signal": 0}
    assert order(compiled(take_one_kernel, "*int64", "*int32", 5, device_world(1), arch=arch))[0] == "pkt.wait"


@pytest.mark.parametrize(("kernel", "more"), [(put_one_kernel, ()), (take_one_kernel, ("*int32",))])
def test_words_are_int64(kernel: Any, more: tuple[str, ...]) -> None:
    with pytest.raises(triton.CompilationError) as caught:
        compiled(kernel, "*int32", *more, 5, device_world())
    assert "takes pointers to int64, not pointer<int32>" in reasons(caught.value)


class Scene:
    """Rank 2's memory, and the assembly of one put or take of a masked block."""

    def __init__(self, put: bool, deadline: int = 0) -> None:
        world = device_world(RANK, SIZE, STRIDE)
        args = ("*int64", 5, 100, world) if put else ("*int64", "*int32", 5, 100, world)
        kernel = compiled(put_kernel if put else take_kernel, *args, 128, True)
        (self.text,) = blocks(body(kernel), "// pkt.signal" if put else "// pkt.wait")
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")  # a look at the clock every 4th poll
        self.memory = Memory()
        self.time = 1000
        self.memory.store(STATUS + 4 * STATUS_DEADLINE, deadline, 64)

    def taking(self, flag: int, mask: bool = True) -> Thread:
        """A thread that takes WORD; its result is `thread.found()`."""
        value = re.search(r"mov\.b64 \{(%r\d+), flag\}, word", self.text)[1]
        registers = {
            re.search(r"b64 word, \[(%rd\d+)\]", self.text)[1]: WORD,
            re.search(r"mov\.b32 last, (%r\d+)", self.text)[1]: flag & 0xFFFFFFFF,
            re.search(r"b32 a, \[(%rd\d+)", self.text)[1]: STATUS,
            re.search(r"cvt\.s64\.s32 off, (%r\d+)", self.text)[1]: RANK,
            re.search(r"setp\.eq\.b32 q, (%r\d+), 0", self.text)[1]: int(mask),
        }
        for axis in "xyz":
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = 0, 1
        thread = Thread(self.text, registers, self.memory, lambda: self.time)
        thread.found = lambda: thread.registers[value]
        return thread

    def tick(self) -> None:
        self.time += 10


@pytest.mark.parametrize("flag", [1, -1, -(2**31), 2**31 - 1])
def test_what_is_put_is_taken_when_the_flag_is_there(flag: int) -> None:
    scene = Scene(put=True)
    address, value, mask = (
        re.search(rf"{pattern}", scene.text)[1]
        for pattern in (r"b64 \[(%rd\d+)\], word", r"mov\.b64 word, \{(%r\d+), %r\d+\}", r"setp\.ne\.b32 p, (%r\d+), 0")
    )
    flagged = re.search(r"mov\.b64 word, \{%r\d+, (%r\d+)\}", scene.text)[1]
    registers = {address: WORD, value: 0xDEADBEEF, flagged: flag & 0xFFFFFFFF}
    take = Scene(put=False)
    take.memory = scene.memory
    for stale in (0, flag - 2, flag + 1, 0xDEADBEEF):
        scene.memory.store(WORD, 77 | (stale & 0xFFFFFFFF) << 32, 64)
        thread = take.taking(flag)
        run([thread], limit=200)
        assert not thread.done, stale
    run([Thread(scene.text, registers | {mask: 0}, scene.memory, lambda: 0)])
    assert scene.memory.load(WORD, 32) == 77  # masked
    run([Thread(scene.text, registers | {mask: 1}, scene.memory, lambda: 0)])
    run([thread])
    assert thread.done
    assert thread.found() == 0xDEADBEEF


def test_a_masked_word_is_not_waited_for() -> None:
    thread = Scene(put=False).taking(5, mask=False)
    run([thread], limit=50)
    assert thread.done
    assert thread.found() == 0


def test_a_take_that_stands_still_writes_the_record_of_a_wait() -> None:
    scene = Scene(put=False, deadline=3000)
    scene.memory.store(WORD, 77 | 3 << 32, 64)
    run([scene.taking(5) for _ in range(4)], tick=scene.tick)
    words = [scene.memory.load(STATUS + 4 * (STATUS_FIRST_RECORD + k), 32) for k in range(len(RECORD_FIELDS))]
    record = dict(zip(RECORD_FIELDS, words))
    assert (record["rank"], record["wanted"], record["found"], record["cmp"]) == (RANK, 5, 3, CMP_CODES["eq"])
    assert record["offset_low"] | record["offset_high"] << 32 == WORD - STATUS
    assert [scene.memory.load((1 << 40) + r * STRIDE, 32) for r in range(SIZE)] == [1, 1, 1]


# -------------------------------------------------------------------------------------------------- simulated ranks
N = 20


@triton.jit
def exchange_kernel(
    x, out, slots, flags, world, N: tl.constexpr, B: tl.constexpr, HALVES: tl.constexpr, FLAGS: tl.constexpr
):
    """The ranks' x side by side."""
    launch = pl.epoch(flags, world)
    half = slots + launch % HALVES * world.size * N
    i = tl.arange(0, B)
    for r in tl.static_range(world.size):
        pl.put_flagged(half + world.rank * N + i, tl.load(x + i, mask=i < N), launch, r, world, mask=i < N)
    for r in tl.static_range(world.size):
        if FLAGS:
            got = pl.take_flagged(half + r * N + i, launch, world, mask=i < N)
        else:
            got = tl.load(half + r * N + i, mask=i < N).to(tl.int32)
        tl.store(out + r * N + i, got, mask=i < N)


def exchange(world: Any, halves: int = 2, flags: bool = True, fill: int = 0) -> None:
    slots = pkt.full((2 * world.size * N,), fill, dtype=torch.int64)
    launches = pkt.signals(1)
    for launch in range(4):
        x = torch.arange(N, dtype=torch.int32) + 100 * world.rank + 1000 * launch
        out = torch.zeros(world.size * N, dtype=torch.int32)
        exchange_kernel[(1,)](x, out, slots, launches, world.device, N, 32, halves, flags)
        expected = [1000 * launch + 100 * r + i for r in range(world.size) for i in range(N)]
        assert out.tolist() == expected, (launch, out)


def test_on_one_rank() -> None:
    pkt.simulate(exchange, 1, seeds=5, sms=1).check()


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_halves_by_parity_are_enough(ranks: int) -> None:
    report = pkt.simulate(exchange, ranks, seeds=40, mutants=True, lost_signals=True, sms=1)
    report.check()
    assert {m.site.call for m in report.mutants} == {"put_flagged", "take_flagged"}


def test_one_half_is_not() -> None:
    """A rank that is a launch ahead overwrites what a slow one has not taken, whose flag then never comes."""
    report = pkt.simulate(exchange, 3, seeds=40, args=(1,), sms=1)
    assert {f.kind for f in report.findings} == {"Deadlock"}
    assert "exchange_kernel program 0 waits on slots[" in str(report.findings[0])
    assert "wanted == " in str(report.findings[0])


def test_a_plain_load_of_a_word_is_a_race() -> None:
    report = pkt.simulate(exchange, 2, seeds=20, args=(2, False), sms=1)
    assert "DataRace" in {f.kind for f in report.findings}


def test_a_poisoned_word_is_not_data_unless_its_flag_is_the_launch() -> None:
    pkt.simulate(exchange, 2, seeds=20, args=(2, True, -1), sms=1).check()
    found = outcome(exchange, 2, args=(2, True, 77 | 1 << 32))  # as if launch 1 had been here: what zeros() rules out
    assert isinstance(found.failure, Exception)


def test_a_late_put_is_no_error() -> None:
    for signal in outcome(exchange, 2).machine.census.signals:
        for seed in (0, 1):
            assert outcome(exchange, 2, seed, faults=Faults(delay=signal)).failure is None, signal
