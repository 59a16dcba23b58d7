"""Flagged words of one value and a flag: their instructions, execution, and their behaviour on simulated ranks."""

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
from pkt.language.world import CMP_CODES, STATUS_DEADLINE

from .compiled import ARCHS, body, compiled, order, reasons
from .ptx_machine import Thread, blocks, run
from .test_flagged import APART, RANK, SIZE, STATUS, STRIDE, WORD, Scene


@triton.jit
def put_kernel(words, x, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    pl.put_flagged(words + 2 * i, (tl.load(x + i),), flag, (world.rank + 1) % world.size, world, mask=mask)


@triton.jit
def take_all_kernel(words, out, stride, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    found = pl.take_flagged_all(words + 2 * i, stride, flag, world, mask=mask, values=1)
    for r in tl.static_range(world.size):
        tl.store(out + r * B + i, found[r][0], mask=mask)


@triton.jit
def put_constant_kernel(words, flag, world):
    pl.put_flagged(words, (7,), flag, 2, world)


@triton.jit
def two_values_kernel(words, world):
    pl.put_flagged(words, (1, 2), 1, 0, world)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_short_word_is_one_access_of_64_bits(masked: bool, arch: int) -> None:
    put = compiled(put_kernel, "*int32", "*int32", 5, 100, device_world(2, 32), 512, masked, arch=arch)
    assert order(put)[-4:] == ["st.relaxed.sys.global.b64"] * 4  # 128 threads
    assert "st.relaxed.sys.global.v2" not in put.asm["ptx"]
    assert count_markers(put.asm["ttir"]) == {"wait": 0, "signal": 1}
    take = compiled(take_all_kernel, "*int32", "*int32", 100, 5, 100, device_world(1), 128, masked, arch=arch)
    assert order(take) == ["pkt.wait", *["st.global.b32"] * 4]
    (text,) = blocks(body(take), "// pkt.wait")
    poll = text[text.index("PKT_POLL") : text.index("setp.eq.s32 p")]
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b64 word", poll)) == 4  # all ranks' words in one flight
    assert not re.search("acquire|fence|nanosleep", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_value_lies_before_the_flag(arch: int) -> None:
    kernel = compiled(put_constant_kernel, "*int32", 5, device_world(2), arch=arch)
    assert order(kernel) == ["st.relaxed.sys.global.b64"]
    known = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", body(kernel)))
    halves = re.search(r"mov\.b64 word, {(%r\d+), (%r\d+)}", body(kernel)).groups()
    assert [known.get(register, "flag") for register in halves] == ["7", "flag"]


def test_a_word_of_two_values_is_refused() -> None:
    with pytest.raises(triton.CompilationError) as caught:
        compiled(two_values_kernel, "*int32", device_world())
    assert "put_flagged: a word has 1 or 3 values, not 2" in reasons(caught.value)


class Short(Scene):
    """Rank 2's memory, and the assembly of a put and of a take of all ranks' short words, both masked."""

    def __init__(self, deadline: int = 0) -> None:
        super().__init__(put=False, deadline=deadline)
        world = device_world(RANK, SIZE, STRIDE)
        kernel = compiled(take_all_kernel, "*int32", "*int32", APART, 5, 100, world, 128, True)
        (text,) = blocks(body(kernel), "// pkt.wait")
        self.text = text.replace(", 1023;", ", 3;")  # the spin reads the clock at every 4th poll

    def short(self, rank: int, value: int, flag: int) -> None:
        self.memory.store(WORD + 4 * APART * rank, value | (flag & 0xFFFFFFFF) << 32, 64)

    def taking(self, flag: int, mask: bool = True) -> Thread:
        thread = super().taking(flag, mask)
        values = re.findall(r"mov\.b64 \{(%r\d+), flag\d\}, word\d", self.text)
        thread.found = lambda: [thread.registers[x] for x in values]
        return thread


@pytest.mark.parametrize("flag", [1, -1, -(2**31)])
def test_the_assembly_takes_what_the_assembly_puts(flag: int) -> None:
    scene = Short()
    kernel = compiled(put_kernel, "*int32", "*int32", 5, 100, device_world(RANK, SIZE, STRIDE), 128, True)
    (text,) = blocks(body(kernel), "// pkt.signal")
    value, flags = re.search(r"mov\.b64 word, \{(%r\d+), (%r\d+)\}", text).groups()
    place, mask = re.search(r"b64 \[(%rd\d+)\], word", text)[1], re.search(r"setp\.ne\.b32 p, (%r\d+), 0", text)[1]
    thread = scene.taking(flag)
    for rank in range(SIZE):
        run([thread], limit=100)
        assert not thread.done
        scene.short(rank, 77, flag + 1)  # of another launch
        registers = {value: 0x80000005 + rank, flags: flag & 0xFFFFFFFF, place: WORD + 4 * APART * rank}
        run([Thread(text, registers | {mask: 0}, scene.memory, lambda: 0)])
        assert scene.memory.load(WORD + 4 * APART * rank, 32) == 77
        run([Thread(text, registers | {mask: 1}, scene.memory, lambda: 0)])
    run([thread], limit=100)
    assert thread.done
    assert thread.found() == [0x80000005 + rank for rank in range(SIZE)]
    masked = scene.taking(flag, mask=False)
    run([masked], limit=50)
    assert masked.found() == [0] * SIZE


@pytest.mark.parametrize("missing", [{0}, {1}, {1, 2}])
def test_the_record_names_the_first_missing_short_word(missing: set[int]) -> None:
    scene = Short(deadline=3000)
    for rank in range(SIZE):
        scene.short(rank, 9, 40 + rank if rank in missing else 5)
    run([scene.taking(5) for _ in range(2)], tick=scene.tick)
    record, first = scene.record(), min(missing)
    assert (record["wanted"], record["found"], record["cmp"]) == (5, 40 + first, CMP_CODES["eq"])
    assert record["offset_low"] | record["offset_high"] << 32 == WORD + 4 * APART * first + 4 - STATUS
    assert scene.memory.load(STATUS + 4 * STATUS_DEADLINE, 64) == 3000


# -------------------------------------------------------------------------------------------------- simulated ranks
N = 20


@triton.jit
def exchange_kernel(x, out, slots, flags, world, N: tl.constexpr, HALVES: tl.constexpr, HOW: tl.constexpr):
    """Gather the ranks' x (N,) side by side, one int32 a word."""
    launch = pl.epoch(flags, world)
    half = slots + launch % HALVES * world.size * N * 2
    i = tl.arange(0, 32)
    for r in tl.static_range(world.size):
        value = tl.load(x + i, mask=i < N)
        pl.put_flagged(half + (world.rank * N + i) * 2, (value,), launch, r, world, mask=i < N)
    if HOW == "all":
        found = pl.take_flagged_all(half + 2 * i, 2 * N, launch, world, mask=i < N, values=1)
    for r in tl.static_range(world.size):
        if HOW == "all":
            value = found[r][0]
        elif HOW == "each":
            value = pl.take_flagged(half + (r * N + i) * 2, launch, world, mask=i < N, values=1)[0]
        else:
            value = tl.load(half + (r * N + i) * 2, mask=i < N)
        tl.store(out + r * N + i, value, mask=i < N)


def exchange(world: Any, halves: int = 2, how: str = "each", launches: int = 3) -> None:
    slots, flags = pkt.zeros((2 * world.size * N, 2), dtype=torch.int32), pkt.signals(1)
    for launch in range(launches):
        x = torch.arange(N, dtype=torch.int32) + 100 * world.rank + 1000 * launch
        out = torch.zeros(world.size * N, dtype=torch.int32)
        exchange_kernel[(1,)](x, out, slots, flags, world.device, N, halves, how)
        assert out.tolist() == [1000 * launch + 100 * r + i for r in range(world.size) for i in range(N)]


@pytest.mark.parametrize(("ranks", "how", "call"), [(2, "each", "take_flagged"), (3, "all", "take_flagged_all")])
def test_short_words_are_right_under_every_schedule(ranks: int, how: str, call: str) -> None:
    report = pkt.simulate(exchange, ranks, seeds=20, args=(2, how), mutants=True, lost_signals=True, sms=1)
    report.check()
    assert {m.site.call for m in report.mutants} == {"put_flagged", call}


@pytest.mark.parametrize("ranks", [1, 8])
def test_short_words_work_on_any_number_of_ranks(ranks: int) -> None:
    pkt.simulate(exchange, ranks, seeds=2, args=(2, "all"), sms=1).check()


@pytest.mark.machine
def test_one_half_alone_deadlocks() -> None:
    report = pkt.simulate(exchange, 3, seeds=40, args=(1,), sms=1)
    assert {f.kind for f in report.findings} == {"Deadlock"}


def test_a_plain_load_of_a_short_word_is_a_race() -> None:
    report = pkt.simulate(exchange, 2, seeds=20, args=(2, "plainly"), sms=1)
    assert "DataRace" in {f.kind for f in report.findings}


@triton.jit
def astray_kernel(slots, world):
    pl.put_flagged(slots + 1, (7,), 1, 0, world)


def test_a_short_word_that_is_not_at_a_multiple_of_8_bytes_is_refused() -> None:
    def run(world: Any) -> None:
        astray_kernel[(1,)](pkt.zeros(8, dtype=torch.int32), world.device)

    report = pkt.simulate(run, 1, seeds=1, sms=1)
    assert "an element of 8 bytes, 4 past a multiple of 8" in str(report.findings[0])
