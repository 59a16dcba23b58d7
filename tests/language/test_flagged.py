"""Flagged words: their instructions, the execution of the spin, and their behaviour on simulated ranks."""

from __future__ import annotations

import re
from pathlib import Path
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
from tests.kernels.machine_code import sass
from tests.simulate.helpers import outcome

from .compiled import ARCHS, body, compiled, order, reasons
from .ptx_machine import Memory, Thread, blocks, run

SIZE, STRIDE, RANK = 3, 1 << 38, 2
STATUS = (1 << 40) + RANK * STRIDE
WORD = STATUS + (5 << 32) + 80
APART = 1000  # int32 from one rank's words to the next rank's


@triton.jit
def put_kernel(words, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    pl.put_flagged(words + 4 * i, (i, i + 1, i + 2), flag, (world.rank + 1) % world.size, world, mask=mask)


@triton.jit
def put_one_kernel(words, flag, world):
    pl.put_flagged(words, (7, 8, 9), flag, 2, world)


@triton.jit
def take_kernel(words, out, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    a, b, c = pl.take_flagged(words + 4 * i, flag, world, mask=mask)
    tl.store(out + i, a + b + c)


@triton.jit
def take_one_kernel(words, out, flag, world):
    tl.store(out, pl.take_flagged(words, flag, world)[2])


@triton.jit
def take_part_kernel(words, out, flag, world, VALUE: tl.constexpr, RANKS: tl.constexpr):
    found = pl.take_flagged_all(words + 4 * tl.arange(0, 32), 4 * 32, flag, world, parts=RANKS)
    for r in tl.static_range(RANKS):
        tl.store(out + r * 32 + tl.arange(0, 32), found[r][VALUE])


@triton.jit
def take_all_kernel(words, out, stride, flag, n, world, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n if MASKED else None
    found = pl.take_flagged_all(words + 4 * i, stride, flag, world, mask=mask)
    for r in tl.static_range(world.size):
        tl.store(out + r * B + i, found[r][0] + found[r][1] + found[r][2], mask=mask)


@triton.jit
def take_some_kernel(words, out, stride, flag, world, WANTED: tl.constexpr, B: tl.constexpr, VALUES: tl.constexpr):
    i = tl.arange(0, B)
    masks = ()
    for r in tl.static_range(len(WANTED)):
        masks = masks + ((i >= 0) & (WANTED[r] == 1),)
    found = pl.take_flagged_all(words + (VALUES + 1) * i, stride, flag, world, mask=masks, values=VALUES)
    for r in tl.static_range(world.size):
        for value in tl.static_range(VALUES):
            tl.store(out + (r * VALUES + value) * B + i, found[r][value])


# ------------------------------------------------------------------------------------------------- instructions
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_put_compiles_to_one_store_a_word_and_no_fence(masked: bool, rank: int, arch: int) -> None:
    k = compiled(put_kernel, "*int32", 5, 100, device_world(rank, 32), 512, masked, arch=arch)
    assert order(k) == ["st.relaxed.sys.global.b128"] * 4  # 128 threads
    assert count_markers(k.asm["ttir"]) == {"wait": 0, "signal": 1}
    k = compiled(put_one_kernel, "*int32", 5, device_world(rank, 32), arch=arch)
    assert order(k) == ["st.relaxed.sys.global.b128"]
    known = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", body(k)))
    (quarters,) = re.findall(
        r"mov\.b64 low, {(%r\d+), (%r\d+)}; mov\.b64 high, {(%r\d+), (%r\d+)}; mov\.b128 word, {low, high}", body(k)
    )
    assert [known.get(register, "flag") for register in quarters] == ["7", "8", "9", "flag"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_take_spins_on_whole_words_and_no_fence(masked: bool, arch: int) -> None:
    k = compiled(take_kernel, "*int32", "*int32", 5, 100, device_world(1), 128, masked, arch=arch)
    assert order(k) == ["pkt.wait", "st.global.b32"]  # 128 threads
    for text in blocks(body(k), "// pkt.wait"):
        assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128 word", text)) == 1
        assert text.count('.pragma "nounroll"') == 2  # unrolled ends of spins would be most of a kernel
        assert "acquire" not in text
        assert "fence" not in text
    assert count_markers(k.asm["ttir"]) == {"wait": 1, "signal": 0}
    assert order(compiled(take_one_kernel, "*int32", "*int32", 5, device_world(1), arch=arch))[0] == "pkt.wait"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_the_words_of_all_ranks_are_loaded_before_any_is_compared(masked: bool, size: int, arch: int) -> None:
    world = device_world(0, size)
    k = compiled(take_all_kernel, "*int32", "*int32", 100, 5, 100, world, 128, masked, arch=arch)
    (text,) = blocks(body(k), "// pkt.wait")
    poll = text[text.index("PKT_POLL") : text.index("setp.eq.s32 p")]
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128 word", poll)) == size
    assert "nanosleep" not in text, "these waits are short"
    assert order(k) == ["pkt.wait", *["st.global.b32"] * size]
    assert count_markers(k.asm["ttir"]) == {"wait": 1, "signal": 0}


@pytest.mark.parametrize(("kernel", "more"), [(put_one_kernel, ()), (take_one_kernel, ("*int32",))])
def test_pointers_to_other_types_than_int32_are_refused(kernel: Any, more: tuple[str, ...]) -> None:
    with pytest.raises(triton.CompilationError) as caught:
        compiled(kernel, "*int64", *more, 5, device_world())
    assert "takes pointers to int32, four of them a word, not pointer<int64>" in reasons(caught.value)


class Scene:
    """Rank 2's memory, and the assembly of one put or take of a masked block, or of a take of all ranks' blocks."""

    def __init__(self, put: bool, deadline: int = 0, every: bool = False) -> None:
        world = device_world(RANK, SIZE, STRIDE)
        if every:
            kernel = compiled(take_all_kernel, "*int32", "*int32", APART, 5, 100, world, 128, True)
        else:
            args = ("*int32", 5, 100, world) if put else ("*int32", "*int32", 5, 100, world)
            kernel = compiled(put_kernel if put else take_kernel, *args, 128, True)
        (self.text,) = blocks(body(kernel), "// pkt.signal" if put else "// pkt.wait")
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")  # the spin reads the clock at every 4th poll
        self.memory = Memory()
        self.time = 1000
        self.memory.store(STATUS + 4 * STATUS_DEADLINE, deadline, 64)

    def taking(self, flag: int, mask: bool = True, masks: dict[str, int] | None = None) -> Thread:
        """A thread that takes WORD and the words at multiples of APART int32 from it, with results in `found()`.
        masks: the registers of each rank's own mask."""
        low = re.findall(r"mov\.b64 \{(%r\d+), (%r\d+)\}, low\d", self.text)
        high = re.findall(r"mov\.b64 \{(%r\d+), flag\d\}, high\d", self.text)
        registers = {
            re.search(r"mov\.b64 at0, (%rd\d+)", self.text)[1]: WORD,
            re.search(r"shl\.b64 there, (%rd\d+), 2", self.text)[1]: APART,
            re.search(r"mov\.b32 last, (%r\d+)", self.text)[1]: flag & 0xFFFFFFFF,
            re.search(r"b32 a, \[(%rd\d+)", self.text)[1]: STATUS,
            re.search(r"cvt\.s64\.s32 off, (%r\d+)", self.text)[1]: RANK,
        }
        registers |= masks or {re.search(r"setp\.eq\.b32 q, (%r\d+), 0", self.text)[1]: int(mask)}
        for axis in "xyz":
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = 0, 1
        thread = Thread(self.text, registers, self.memory, lambda: self.time)
        thread.found = lambda: [tuple(thread.registers[x] for x in (a, b, c)) for (a, b), c in zip(low, high)]
        return thread

    def put(self, rank: int, data: tuple[int, ...], flag: int) -> None:
        for i, value in enumerate((*data, flag)):
            self.memory.store(WORD + 4 * APART * rank + 4 * i, value, 32)

    def record(self) -> dict[str, int]:
        words = [self.memory.load(STATUS + 4 * (STATUS_FIRST_RECORD + k), 32) for k in range(len(RECORD_FIELDS))]
        return dict(zip(RECORD_FIELDS, words))

    def tick(self) -> None:
        self.time += 10


DATA = (0xDEADBEEF, 5, 0x80000000)


@pytest.mark.parametrize("flag", [1, -1, -(2**31), 2**31 - 1])
def test_a_take_returns_the_data_when_the_flag_is_there(flag: int) -> None:
    scene = Scene(put=True)
    low = re.search(r"mov\.b64 low, \{(%r\d+), (%r\d+)\}", scene.text).groups()
    high = re.search(r"mov\.b64 high, \{(%r\d+), (%r\d+)\}", scene.text).groups()
    registers = dict(zip((*low, *high), (*DATA, flag & 0xFFFFFFFF)))
    registers[re.search(r"b128 \[(%rd\d+)\], word", scene.text)[1]] = WORD
    mask = re.search(r"setp\.ne\.b32 p, (%r\d+), 0", scene.text)[1]
    take = Scene(put=False)
    take.memory = scene.memory
    for stale in (0, flag - 2, flag + 1, 0xDEADBEEF):
        scene.put(0, (77, 78, 79), stale)
        thread = take.taking(flag)
        run([thread], limit=200)
        assert not thread.done, stale
    run([Thread(scene.text, registers | {mask: 0}, scene.memory, lambda: 0)])
    assert scene.memory.load(WORD, 32) == 77  # masked
    run([Thread(scene.text, registers | {mask: 1}, scene.memory, lambda: 0)])
    run([thread])
    assert thread.done
    assert thread.found() == [DATA]


@pytest.mark.parametrize("every", [False, True])
def test_a_masked_word_is_not_waited_for(every: bool) -> None:
    thread = Scene(put=False, every=every).taking(5, mask=False)
    run([thread], limit=50)
    assert thread.done
    assert set(thread.found()) == {(0, 0, 0)}


@pytest.mark.parametrize("late", range(SIZE))
def test_a_take_of_all_ranks_ends_with_the_last_word(late: int) -> None:
    scene = Scene(put=False, every=True)
    thread = scene.taking(5)
    data = [(70 + r, 80 + r, 90 + r) for r in range(SIZE)]
    for rank in range(SIZE):
        scene.put(rank, data[rank], 5 if rank != late else 3)
    run([thread], limit=300)
    assert not thread.done
    scene.put(late, data[late], 5)
    run([thread], limit=300)
    assert thread.done
    assert thread.found() == data


@pytest.mark.parametrize("values", [1, 3])
@pytest.mark.parametrize("wanted", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_each_rank_has_a_mask_of_its_own(wanted: tuple[int, ...], values: int) -> None:
    scene = Scene(put=False, every=True)
    world = device_world(RANK, SIZE, STRIDE)
    kernel = compiled(take_some_kernel, "*int32", "*int32", APART, 5, world, wanted, 128, values)
    (scene.text,) = blocks(body(kernel), "// pkt.wait")
    known = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", body(kernel)))
    masks = re.findall(r"setp\.ne\.b32 wanted\d, (%r\d+), 0", scene.text)
    thread = scene.taking(5, masks={register: int(known[register]) for register in masks})
    if values == 1:
        found = re.findall(r"mov\.b64 \{(%r\d+), flag\d\}, word\d", scene.text)
        thread.found = lambda: [(thread.registers[x],) for x in found]
    data = [(70 + r, 80 + r, 90 + r)[:values] for r in range(SIZE)]
    for late in (r for r in range(SIZE) if wanted[r]):
        for rank in range(SIZE):
            scene.put(rank, data[rank], 5 if rank < late or not wanted[rank] else 3)
        run([thread], limit=300)
        assert not thread.done
        scene.put(late, data[late], 5)
    run([thread], limit=300)
    assert thread.done
    assert thread.found() == [data[r] if wanted[r] else (0,) * values for r in range(SIZE)]


@pytest.mark.parametrize("arch", ARCHS)
def test_fewer_masks_than_ranks_are_refused(arch: int) -> None:
    with pytest.raises(triton.CompilationError) as caught:
        compiled(take_some_kernel, "*int32", "*int32", APART, 5, device_world(0, 4), (1, 1, 1), 128, 3, arch=arch)
    assert "take_flagged_all: 3 masks for the words of 4 ranks, wanted one for each" in reasons(caught.value)


def test_an_expired_take_writes_the_record_of_a_wait() -> None:
    scene = Scene(put=False, deadline=3000)
    scene.put(0, DATA, 3)
    run([scene.taking(5) for _ in range(4)], tick=scene.tick)
    record = scene.record()
    assert (record["rank"], record["wanted"], record["found"], record["cmp"]) == (RANK, 5, 3, CMP_CODES["eq"])
    assert record["offset_low"] | record["offset_high"] << 32 == WORD + 12 - STATUS  # the flag's
    assert [scene.memory.load((1 << 40) + r * STRIDE, 32) for r in range(SIZE)] == [1, 1, 1]


@pytest.mark.parametrize("missing", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}])
def test_the_record_of_a_take_names_the_first_missing_word(missing: set[int]) -> None:
    scene = Scene(put=False, deadline=3000, every=True)
    for rank in range(SIZE):
        scene.put(rank, DATA, 40 + rank if rank in missing else 5)
    run([scene.taking(5)], tick=scene.tick)
    record, first = scene.record(), min(missing)
    assert (record["wanted"], record["found"], record["cmp"]) == (5, 40 + first, CMP_CODES["eq"])
    assert record["offset_low"] | record["offset_high"] << 32 == WORD + 4 * APART * first + 12 - STATUS


# -------------------------------------------------------------------------------------------------- simulated ranks
N = 20


@triton.jit
def exchange_kernel(
    x, out, slots, flags, world, N: tl.constexpr, B: tl.constexpr, HALVES: tl.constexpr, HOW: tl.constexpr
):
    """Gather the ranks' x side by side, N words of three numbers from each."""
    launch = pl.epoch(flags, world)
    half = slots + launch % HALVES * world.size * N * 4
    i = tl.arange(0, B)
    values = (tl.load(x + i, mask=i < N), tl.load(x + N + i, mask=i < N), tl.load(x + 2 * N + i, mask=i < N))
    for r in tl.static_range(world.size):
        pl.put_flagged(half + (world.rank * N + i) * 4, values, launch, r, world, mask=i < N)
    if HOW == "all":
        found = pl.take_flagged_all(half + 4 * i, 4 * N, launch, world, mask=i < N)
    for r in tl.static_range(world.size):
        at = half + (r * N + i) * 4
        if HOW == "each":
            got = pl.take_flagged(at, launch, world, mask=i < N)
        for j in tl.static_range(3):
            if HOW == "all":
                value = found[r][j]
            elif HOW == "each":
                value = got[j]
            else:
                value = tl.load(at + j, mask=i < N)
            tl.store(out + (3 * r + j) * N + i, value, mask=i < N)


def exchange(world: Any, halves: int = 2, how: str = "each", fill: int = 0) -> None:
    slots = pkt.full((2 * world.size * N, 4), fill, dtype=torch.int32)
    launches = pkt.signals(1)
    for launch in range(4):
        x = torch.arange(3 * N, dtype=torch.int32) + 100 * world.rank + 1000 * launch
        out = torch.zeros(world.size * 3 * N, dtype=torch.int32)
        exchange_kernel[(1,)](x, out, slots, launches, world.device, N, 32, halves, how)
        expected = [1000 * launch + 100 * r + i for r in range(world.size) for i in range(3 * N)]
        assert out.tolist() == expected, (launch, out)


@triton.jit
def some_kernel(words, out, flags, world, PUTS: tl.constexpr):
    """The ranks in the bits of PUTS put a word of three threads to each rank, and every rank takes those."""
    launch = pl.epoch(flags, world)
    i = tl.arange(0, 4)
    masks = ()
    for r in tl.static_range(world.size):
        at = words + (world.rank * 4 + i) * 4
        pl.put_flagged(at, (launch + i, i, i), launch, r, world, mask=(i < 3) & ((PUTS >> world.rank) & 1 == 1))
        masks = masks + ((i < 3) & ((PUTS >> r) & 1 == 1),)
    found = pl.take_flagged_all(words + 4 * i, 16, launch, world, mask=masks)
    for r in tl.static_range(world.size):
        tl.store(out + r * 4 + i, found[r][0])
    pl.barrier(flags + 1, world)


def some(world: Any, puts: int) -> None:
    words, flags = pkt.zeros(world.size * 16, dtype=torch.int32), pkt.signals(2)
    out = torch.zeros(world.size, 4, dtype=torch.int32)
    for launch in (1, 2, 3):
        some_kernel[(1,)](words, out, flags, world.device, puts)
        put = [launch, launch + 1, launch + 2, 0]
        assert out.tolist() == [put if puts >> rank & 1 else [0, 0, 0, 0] for rank in range(world.size)]


@pytest.mark.parametrize("puts", [0b111, 0b101, 0b010, 0])
def test_ranks_that_are_masked_need_not_put(puts: int) -> None:
    pkt.simulate(some, 3, args=(puts,), seeds=10).check()


def test_flagged_words_work_on_one_rank() -> None:
    pkt.simulate(exchange, 1, seeds=5, sms=1).check()


@pytest.mark.machine
@pytest.mark.parametrize(("how", "call"), [("each", "take_flagged"), ("all", "take_flagged_all")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_halves_by_parity_are_right(ranks: int, how: str, call: str) -> None:
    report = pkt.simulate(exchange, ranks, seeds=40, args=(2, how), mutants=True, lost_signals=True, sms=1)
    report.check()
    assert {m.site.call for m in report.mutants} == {"put_flagged", call}


@pytest.mark.machine
def test_one_half_alone_deadlocks() -> None:
    """A rank one launch ahead overwrites words that a slow rank still needs, so the slow rank never finds its flag."""
    report = pkt.simulate(exchange, 3, seeds=40, args=(1,), sms=1)
    assert {f.kind for f in report.findings} == {"Deadlock"}
    assert "exchange_kernel program 0 waits on slots[" in str(report.findings[0])
    assert "wanted == " in str(report.findings[0])


@pytest.mark.machine
@pytest.mark.parametrize("how", ["each", "all"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_few_schedules_with_a_slow_rank_find_words_that_are_put_too_early(ranks: int, how: str) -> None:
    report = pkt.simulate(exchange, ranks, seeds=[3, 6, 9, 12], args=(1, how), sms=1)
    assert {f.kind for f in report.findings} == {"Deadlock"}


def test_a_plain_load_of_a_word_is_a_race() -> None:
    report = pkt.simulate(exchange, 2, seeds=20, args=(2, "plainly"), sms=1)
    assert "DataRace" in {f.kind for f in report.findings}


@pytest.mark.machine
def test_a_poisoned_word_is_data_only_with_the_launchs_flag() -> None:
    pkt.simulate(exchange, 2, seeds=20, args=(2, "each", -1), sms=1).check()
    found = outcome(exchange, 2, args=(2, "each", 1))  # 1 is the flag of launch 1; words from zeros() never hold it
    assert isinstance(found.failure, Exception)


@triton.jit
def astray_kernel(slots, world):
    pl.put_flagged(slots + 2, (1, 2, 3), 1, 0, world)


def test_a_word_that_is_not_at_a_multiple_of_16_bytes_is_refused() -> None:
    def run(world: Any) -> None:
        astray_kernel[(1,)](pkt.zeros(8, dtype=torch.int32), world.device)

    report = pkt.simulate(run, 1, seeds=1, sms=1)
    message = str(report.findings[0])
    assert "put_flagged of rank 0's zeros@" in message
    assert "[2] by rank 0 astray_kernel" in message
    assert "an element of 16 bytes, 8 past a multiple of 16" in message


@triton.jit
def constants_kernel(slots, out, world):
    pl.put_flagged(slots, (7, -8, 9), 1, 0, world)
    for j in tl.static_range(3):
        tl.store(out + j, pl.take_flagged(slots, 1, world)[j])


def test_a_put_may_store_constants() -> None:
    def run(world: Any) -> None:
        out = torch.zeros(3, dtype=torch.int32)
        constants_kernel[(1,)](pkt.zeros(4, dtype=torch.int32), out, world.device)
        assert out.tolist() == [7, -8, 9]

    pkt.simulate(run, 1, seeds=3, sms=1).check()


@pytest.mark.machine
def test_a_late_put_is_no_error() -> None:
    for signal in outcome(exchange, 2).machine.census.signals:
        for seed in (0, 1):
            assert outcome(exchange, 2, seed, faults=Faults(delay=signal)).failure is None, signal


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("value", [0, 1, 2])
def test_a_word_is_loaded_whole_where_only_one_value_is_used(value: int, ranks: int, arch: int, tmp_path: Path) -> None:
    """ptxas loads the used parts of a word each by itself: a flag may then come with data from before it."""
    kernel = compiled(take_part_kernel, "*i32", "*i32", 5, device_world(1), value, ranks, arch=arch)
    loads = re.findall(r"LDG\.E\S*STRONG\.SYS", sass(kernel, tmp_path))
    assert sum(".128." in load for load in loads) == ranks, loads
