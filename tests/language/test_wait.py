"""Execution of a wait's assembly: comparisons across the wrap, deadline, abort, the record."""

import operator
import re

import pytest

from pkt.language.inspect import device_world
from pkt.language.ptx import POLLS_PER_CHECK
from pkt.language.ptx.spin import LONGEST_NAP, NAP
from pkt.language.world import (
    CMP_ABORTED,
    CMP_CODES,
    MAX_RECORDS,
    RECORD_FIELDS,
    RECORD_WORDS,
    STATUS_BYTES,
    STATUS_DEADLINE,
    STATUS_FIRST_RECORD,
    site_hash,
)

from .compiled import body, compiled
from .ptx_machine import Memory, Thread, blocks, run
from .test_sync import barrier_kernel, wait_kernel

SIZE, STRIDE, RANK = 3, 1 << 38, 2
HEAP = 1 << 40  # rank 0's window
STATUS = HEAP + RANK * STRIDE
COUNTER = STATUS + (5 << 32) + 68  # an offset of more than 32 bits
GRID = (4, 3, 2)


class Scene:
    """The ranks' memory, and some threads that wait on rank 2."""

    def __init__(self, cmp="ge", deadline=0):
        world = device_world(RANK, SIZE, STRIDE)
        kernel = (
            compiled(barrier_kernel, "*int32", world)
            if cmp == "flip"
            else compiled(wait_kernel, "*int32", 7, world, cmp)
        )
        (self.text,) = blocks(body(kernel), "// pkt.wait")
        # reads the clock at every 4th poll, so that the machine need not make a million steps
        assert f", {POLLS_PER_CHECK - 1};" in self.text
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")
        self.name = kernel.metadata.name
        self.memory = Memory()
        self.time = 1000
        self.memory.store(STATUS + 4 * STATUS_DEADLINE, deadline, 64)

    def thread(self, want, program=(0, 0, 0)):
        found, ptr = re.search(r"ld\.acquire\.sys\.global\.b32 (%r\d+), \[(%rd\d+)\]", self.text).groups()
        registers = {
            ptr: COUNTER,
            re.search(r"mov\.b32 last, (%r\d+)", self.text)[1]: want & 0xFFFFFFFF,
            re.search(r"ld\.relaxed\.sys\.global\.b32 a, \[(%rd\d+)", self.text)[1]: STATUS,
            re.search(r"cvt\.s64\.s32 off, (%r\d+)", self.text)[1]: RANK,
        }
        for axis, index, n in zip("xyz", program, GRID):
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = index, n
        thread = Thread(self.text, registers, self.memory, lambda: self.time)
        thread.found = lambda: thread.registers[found]
        return thread

    def tick(self):
        self.time += 10

    def status(self, rank, word):
        return self.memory.load(HEAP + rank * STRIDE + 4 * word, 32)

    def records(self):
        found = []
        for i in range(MAX_RECORDS):
            words = [self.status(RANK, STATUS_FIRST_RECORD + RECORD_WORDS * i + k) for k in range(RECORD_WORDS)]
            if any(words):
                found.append(dict(zip(RECORD_FIELDS, words)))
        return found


@pytest.mark.parametrize("cmp", ["ge", "gt", "le", "lt", "eq", "ne"])
@pytest.mark.parametrize("want", [0, 5, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("difference", [-2, -1, 0, 1, 2, 2**31 - 1])
def test_comparisons_hold_across_the_wrap(cmp, want, difference):
    scene = Scene(cmp)
    scene.memory.store(COUNTER, want + difference, 32)
    thread = scene.thread(want)
    run([thread], limit=200)
    assert thread.done == getattr(operator, cmp)(difference, 0)
    assert scene.records() == []
    if thread.done:
        assert thread.found() == (want + difference) & 0xFFFFFFFF


def test_polls_are_further_apart_the_longer_a_wait_lasts():
    scene = Scene()
    thread = scene.thread(1)
    run([thread], limit=2000)
    assert not thread.done
    assert thread.naps[:3] == [NAP, 2 * NAP, 3 * NAP]
    assert thread.naps == sorted(thread.naps)
    assert thread.naps[-1] == LONGEST_NAP
    scene.memory.store(COUNTER, 1, 32)
    at_once = scene.thread(1)
    run([at_once], limit=200)
    assert at_once.done
    assert not at_once.naps


@pytest.mark.parametrize(
    ("before", "now", "flipped"), [(0, 3, False), (0, 2**31, True), (2**31 + 5, 2**31, False), (2**31, 0, True)]
)
def test_a_barrier_waits_for_the_top_bit_to_change(before, now, flipped):
    scene = Scene("flip")
    scene.memory.store(COUNTER, now, 32)
    thread = scene.thread(before)
    run([thread], limit=200)
    assert thread.done == flipped


def test_a_wait_sees_a_counter_that_changes_meanwhile():
    scene = Scene()
    threads = [scene.thread(3) for _ in range(4)]
    run(threads, tick=scene.tick, limit=500)
    assert not any(t.done for t in threads)
    scene.memory.store(COUNTER, 4, 32)
    run(threads, tick=scene.tick)
    assert [t.found() for t in threads] == [4] * 4
    assert scene.records() == []


def test_without_a_deadline_a_wait_does_not_expire():
    scene = Scene(deadline=0)
    thread = scene.thread(3)
    run([thread], tick=scene.tick, limit=20_000)
    assert not thread.done
    assert [scene.status(r, 0) for r in range(SIZE)] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(10))
def test_an_expired_wait_writes_one_record_a_program_and_aborts_every_rank(seed):
    scene = Scene("gt", deadline=3000)
    scene.memory.store(COUNTER, 3, 32)  # equal to the wanted value, which is not greater
    programs = [(3, 2, 1), (0, 0, 0), (1, 2, 0)]
    run([scene.thread(3, p) for p in programs for _ in range(5)], seed, scene.tick)
    records = scene.records()
    assert len(records) == scene.status(RANK, 1) == len(programs)
    assert sorted(r["program"] for r in records) == sorted(x + 4 * (y + 3 * z) for x, y, z in programs)
    for r in records:
        assert r["rank"] == RANK
        assert r["cmp"] & 255 == CMP_CODES["gt"]
        assert (r["wanted"], r["found"]) == (3, 3)
        assert r["offset_low"] | r["offset_high"] << 32 == COUNTER - STATUS
        assert r["owner"] == r["program"] + 1
        assert r["site"] == site_hash(scene.name) != 0
        assert r["epoch"] == 0
    assert any(r["cmp"] < CMP_ABORTED for r in records)
    assert [scene.status(r, 0) for r in range(SIZE)] == [1, 1, 1]


def test_a_wait_that_another_rank_aborts_leaves_and_records_it():
    scene = Scene(deadline=0)
    scene.memory.store(STATUS, 1, 32)
    thread = scene.thread(3, (1, 0, 0))
    run([thread], tick=scene.tick)
    assert thread.done
    (record,) = scene.records()
    assert record["cmp"] == CMP_CODES["ge"] + CMP_ABORTED
    # a rank that another one aborts does not abort others
    assert [scene.status(r, 0) for r in range(SIZE)] == [0, 0, 1]


def test_a_satisfied_wait_does_not_read_the_abort_word():
    scene = Scene()
    scene.memory.store(STATUS, 1, 32)
    scene.memory.store(COUNTER, 3, 32)
    thread = scene.thread(3)
    run([thread])
    assert thread.done
    assert scene.records() == []


def test_the_deadline_begins_anew_when_the_counter_moves():
    scene = Scene(deadline=3000)
    thread = scene.thread(1000)
    for i in range(20):
        run([thread], tick=scene.tick, limit=200)  # 2000 ns, less than the deadline
        assert not thread.done, i
        scene.memory.store(COUNTER, i + 1, 32)
    run([thread], tick=scene.tick)
    assert thread.done
    (record,) = scene.records()
    assert record["found"] == 20


def test_a_full_page_of_records_still_aborts():
    scene = Scene(deadline=100)
    for i in range(MAX_RECORDS):
        scene.memory.store(STATUS + 4 * (STATUS_FIRST_RECORD + RECORD_WORDS * i + 9), 10_000 + i, 32)
    thread = scene.thread(3)
    run([thread], tick=scene.tick)
    assert thread.done
    assert scene.status(RANK, 1) == 0
    assert [scene.status(r, 0) for r in range(SIZE)] == [1, 1, 1]
    # nothing was written past the page
    assert all(a < STATUS + STATUS_BYTES or a >= COUNTER for a in scene.memory.words if a >= STATUS)


def test_a_program_writes_at_most_one_record():
    scene = Scene(deadline=100)
    for _ in range(3):
        thread = scene.thread(3, (2, 1, 1))
        run([thread], tick=scene.tick)
        assert thread.done
    assert len(scene.records()) == scene.status(RANK, 1) == 1


def test_a_record_is_released_after_its_words():
    """The host counts records with an acquire, and reads their words: only the addition that counts it publishes."""
    text = Scene().text
    (count,) = re.findall(r"red\.(\S+) \[", text)
    assert count == "release.sys.global.add.u32"
    last = max(
        match.start()
        for match in re.finditer(r"st\.relaxed\.sys\.global\.b32 \[at \+ \d+\]", text[: text.index("red.")])
    )
    assert last < text.index("red.")
    assert f"setp.lt.u32 q, i, {SIZE};" in text, "the abort word is raised on every rank and nowhere else"
    assert text.index("atom.relaxed.sys.global.cas") < text.index("st.relaxed.sys.global.b32 [at]")
