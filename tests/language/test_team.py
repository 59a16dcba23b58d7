"""Kernels of a team: their addresses, and the ranks that an expired wait records and aborts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import world as page
from pkt.language.inspect import device_world
from pkt.language.ptx import POLLS_PER_CHECK
from pkt.language.world import RECORD_FIELDS, STATUS_DEADLINE, STATUS_FIRST_RECORD

from .compiled import ARCHS, body, compiled, order
from .ptx_machine import Memory, Thread, blocks, run
from .test_sync import barrier_kernel, signal_kernel, wait_kernel

STRIDE, HEAP, WHOLE = 1 << 38, 1 << 40, 6
TEAMS = [[0, 2], [1, 3, 5], [5, 3, 1, 4], [4, 2, 0], [3, 0]]


@triton.jit
def put_kernel(x, y, world):
    i = tl.arange(0, 512)
    pl.put(dst=y + i, src=x + i, peer=(world.rank + 1) % world.size, world=world)


def code(kernel: Any) -> str:
    """The instructions of a kernel, without numbers of labels and lines."""
    return re.sub(r"PKT_[A-Z]+_\d+|^\s*\.loc.*$|//.*|\$L__tmp\d+:", "", body(kernel), flags=re.M)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_team_with_equal_steps_runs_the_code_of_a_world_with_that_stride(rank: int, arch: int) -> None:
    world, team = device_world(rank, 3, 2 * STRIDE), device_world(rank, 6, STRIDE, team=[1, 3, 5])
    for kernel, args in [(put_kernel, ("*bf16", "*bf16")), (signal_kernel, ("*int32", 2))]:
        more = ("add",) if kernel is signal_kernel else ()
        assert code(compiled(kernel, *args, world, *more, arch=arch)) == code(
            compiled(kernel, *args, team, *more, arch=arch)
        )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank", [0, 1, 2, 16])
def test_a_listed_team_has_its_table_in_the_code(rank: int, arch: int) -> None:
    """The same parameters and wide accesses as in a world, and no load of a table."""
    world, team = device_world(rank, 20, STRIDE), device_world(rank, 20, STRIDE, team=[5, 3, 1, 4])
    plain, listed = (compiled(put_kernel, "*bf16", "*bf16", w, arch=arch) for w in (world, team))
    assert order(plain) == order(listed)
    assert [k.asm["ptx"].count(".param .") for k in (plain, listed)] == [plain.asm["ptx"].count(".param .")] * 2
    assert not re.search(r"shr\.[us]64", body(plain))
    assert rank == 1 or str(page.team_constants([5, 3, 1, 4], 20)[1]) in body(listed)


@pytest.mark.parametrize("ranks", TEAMS)
def test_constants_of_a_team_hold_its_ranks(ranks: list[int]) -> None:
    for whole in (6, 64):
        constant, table = page.team_constants(ranks, whole)
        assert 0 < constant < 1 << 60
        assert 0 <= table < 1 << 60
        team = page.Team.of(constant)
        members = [page.listed_rank(table, r) if table else team.first + r * team.step for r in range(len(ranks))]
        assert (members, team.whole) == (ranks, whole)
        assert bool(table) == (page.step_of(ranks) is None)


def test_constants_of_the_greatest_teams_hold_their_ranks() -> None:
    ranks = [63, 0, 62, 1, 61, 2, 60, 3, 59, 58]
    assert len(ranks) == page.LISTED
    constant, table = page.team_constants(ranks, page.LISTED_WORLD)
    assert [page.listed_rank(table, r) for r in range(10)] == ranks
    assert 0 < table < 1 << 60
    team = page.Team.of(page.team_constants(range(1000, -1, -8), 1 << 16)[0])
    assert (team.whole, team.first, team.step, constant) == (1 << 16, 1000, -8, 64)


class Scene:
    """The memory of the ranks of a world, and a wait of rank 1 of a team, which Triton compiles as a constant."""

    def __init__(self, ranks: list[int], kernel: Any = wait_kernel) -> None:
        world = device_world(1, WHOLE, STRIDE, team=ranks)
        args = ("*int32", 7, world, "ge") if kernel is wait_kernel else ("*int32", world)
        found = compiled(kernel, *args)
        (self.text,) = blocks(body(found), "// pkt.wait")
        self.known = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", body(found)))
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")
        self.status = HEAP + ranks[1] * STRIDE
        self.memory, self.time = Memory(), 1000
        self.memory.store(self.status + 4 * STATUS_DEADLINE, 3000, 64)

    def thread(self) -> Thread:
        _, ptr = re.search(r"ld\.acquire\.sys\.global\.b32 (%r\d+), \[(%rd\d+)\]", self.text).groups()
        rank = re.search(r"cvt\.s64\.s32 off, (%r\d+)", self.text)[1]
        registers = {
            ptr: self.status + 4096,
            re.search(r"mov\.b32 last, (%r\d+)", self.text)[1]: 7,
            re.search(r"ld\.relaxed\.sys\.global\.b32 a, \[(%rd\d+)", self.text)[1]: self.status,
            rank: int(self.known[rank]),
        }
        for axis in "xyz":
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = 0, 1
        return Thread(self.text, registers, self.memory, lambda: self.time)

    def tick(self) -> None:
        self.time += 10


@pytest.mark.parametrize("kernel", [wait_kernel, barrier_kernel])
@pytest.mark.parametrize("ranks", TEAMS)
def test_an_expired_wait_names_its_rank_in_the_world_and_aborts_all_of_them(ranks: list[int], kernel: Any) -> None:
    scene = Scene(ranks, kernel)
    run([scene.thread()], tick=scene.tick)
    words = [scene.memory.load(scene.status + 4 * (STATUS_FIRST_RECORD + k), 32) for k in range(len(RECORD_FIELDS))]
    record = dict(zip(RECORD_FIELDS, words))
    assert (record["rank"], record["owner"], record["offset_low"]) == (ranks[1], 1, 4096)
    raised = {a: w for a, w in scene.memory.words.items() if w and (a - HEAP) % STRIDE == 0}
    assert raised == {HEAP + rank * STRIDE: 1 for rank in range(WHOLE)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("ranks", [[1, 3, 5], [5, 3, 1, 4]])
def test_the_rank_in_the_world_comes_from_that_in_the_team(ranks: list[int], arch: int) -> None:
    """Where the rank is a run-time value: by a multiplication or the table, once, and not in the loop."""
    world = device_world(2, WHOLE, STRIDE, team=ranks)
    kernel = compiled(wait_kernel, "*int32", 7, world, "ge", arch=arch)
    (text,) = blocks(body(kernel), "// pkt.wait")
    before = body(kernel)[: body(kernel).index("// pkt.wait")]
    if page.step_of(ranks) is None:
        assert str(page.team_constants(ranks, WHOLE)[1]) in before
        assert re.search(r"shr\.[us]64", before)
    else:
        assert re.search(r"shl\.b32\s+%r\d+, %r\d+, 1|mad\.lo|mul\.lo|shl\.b64", before)
    assert f"setp.lt.u32 q, i, {WHOLE};" in text
    assert f"mul.lo.s64 off, off, {STRIDE};" in text
