"""Calls to other nodes in compiled code: which of NVSHMEM's functions, in which order, and the two lanes of counters.

The device library is made up (tests.device_library), but for the tests at the end, which take NVIDIA's if it is there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon

import pkt
import pkt.language as pl
from pkt.errors import Unsupported
from pkt.language import address
from pkt.language.inspect import ARENA, compile_only, device_world
from pkt.language.ptx import POLLS_PER_CHECK, nvshmem
from pkt.language.world import RECORD_FIELDS, STATUS_DEADLINE, STATUS_FIRST_RECORD, Network
from tests import device_library

from .compiled import ARCHS, body, compiled, order, parse, reasons
from .ptx_machine import Memory, Thread, blocks, run
from .test_nodes import HOW, calls
from .test_sync import barrier_kernel, poll_kernel, wait_kernel
from .test_tile import all_reduce_kernel, layout, reduce_kernel, store_kernel

STRIDE, HEAP = 1 << 38, 1 << 40


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        device_library.install(patch, tmp_path_factory.mktemp("library"))
        yield


def far(how: str, arch: int = 90) -> Any:
    return compiled(calls, "*fp32", "*fp32", "*i32", 4096, 3, device_world(2, node_size=2), how, arch=arch)


def wrapper(kernel: Any, name: str) -> str:
    """The text of a wrapper's function."""
    found = re.search(rf"^\.func {name}\(.*?^\}}", kernel.asm["ptx"], re.M | re.S)
    assert found is not None, f"{name} is not there"
    return found[0]


def library_calls(kernel: Any) -> set[str]:
    return set(re.findall(r"// (nvshmemx?_\w+)", kernel.asm["ptx"]))


# --------------------------------------------------------------------------------------------------- what is called
CALLED = {
    "signal": {"nvshmemx_signal_op"},
    "barrier": {"nvshmemx_signal_op", "nvshmem_quiet"},
    "order": {"nvshmem_fence", "nvshmem_quiet"},
    "put": {"nvshmemx_putmem_nbi_block"},
    "put_signal": {"nvshmemx_putmem_signal_nbi_block"},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", HOW)
def test_each_call_reaches_its_function(how: str, arch: int) -> None:
    kernel = far(how, arch)
    assert library_calls(kernel) == CALLED[how]
    assert device_library.STATE in kernel.asm["ptx"], "the module could not be given NVSHMEM's state"
    assert device_library.STATE.encode() in kernel.asm["cubin"]


def steps(kernel: Any) -> list[str]:
    """Fences, barriers and calls of the kernel's function, in the order of the text. Triton 3.9 may put a barrier of
    its own beside one: two in a row count as one."""
    text = re.sub(r"call\.uni (\w+)[^;]*;", r"\1;", body(kernel))
    text = re.sub(r"^\s*(pkt_far_\w+);", r"far.\1;", text, flags=re.M)
    wanted = ("fence", "bar.sync", "far.", "cp.async.bulk.wait_group")
    found = [x.op.removeprefix("far.pkt_") for x in parse(text) if x.op.startswith(wanted)]
    return [op for at, op in enumerate(found) if op != "bar.sync" or found[at - 1 : at] != [op]]


DRAIN = ["cp.async.bulk.wait_group", "fence.proxy.async.global"]


def test_threads_meet_and_publish_before_a_call() -> None:
    """TMA stores have landed, and no thread is late. A signal releases, as within a node; a put's own fence is in its
    wrapper."""
    assert steps(far("signal"))[-5:] == [*DRAIN, "bar.sync", "fence.acq_rel.sys", "far_signal"]
    assert steps(far("put"))[-4:] == [*DRAIN, "bar.sync", "far_put"]
    assert steps(far("put_signal"))[-4:] == [*DRAIN, "bar.sync", "far_put_signal"]
    fence = "fence.acq_rel.sys"
    assert steps(far("order")) == [fence, "far_fence", *DRAIN, "fence.proxy.alias", fence, "far_quiet", "bar.sync"]


def test_a_barrier_completes_the_far_calls_before_it_arrives() -> None:
    found = steps(far("barrier"))
    assert found.index("far_quiet") < found.index("fence.acq_rel.sys") < found.index("far_signal")
    assert found[found.index("far_quiet") + 1] == "bar.sync"
    assert found.count("far_signal") == 4  # three others, and this rank in a branch that is not taken


@pytest.mark.parametrize(("how", "name"), [("signal", "signal"), ("order", "fence"), ("order", "quiet")])
def test_one_thread_makes_calls_without_data(how: str, name: str) -> None:
    text = wrapper(far(how), f"pkt_far_{name}")
    found = re.search(
        r"mov\.u32\s+(%r\d+), %tid\.x;\s*setp\.ne\.b32\s+(%p\d+), \1, 0;\s*@\2 bra\s+(\S+);(.*?)\3:", text, re.S
    )
    assert found is not None
    assert "// nvshmem" in found[4], "the call is not in the branch"
    assert text.count("// nvshmem") == 1


@pytest.mark.parametrize(("how", "name"), [("put", "put"), ("put_signal", "put_signal")])
def test_all_threads_move_data(how: str, name: str) -> None:
    assert "%tid" not in wrapper(far(how), f"pkt_far_{name}")


def test_a_put_with_a_signal_releases_where_a_host_thread_passes_it_on() -> None:
    """Where NVSHMEM stores to the rank itself, its own fence before the signal is enough."""
    text = wrapper(far("put_signal"), "pkt_far_put_signal")
    fence = text.index("fence.acq_rel.sys")
    (skipped,) = re.findall(r"@!?%p\d+ bra\s+(\S+);", text[:fence])
    assert fence < text.index(f"{skipped}:") < text.index("// nvshmemx_putmem_signal_nbi_block")


class Arguments:
    """The kernel `calls` run by one thread up to its far call: the integers that the wrapper is given."""

    X, Y, FLAG = 0x1000, 0x2000, 0x3008  # offsets in the window

    def __init__(self, how: str, rank: int = 2, peer: int = 1) -> None:
        self.window = HEAP + rank * STRIDE
        addresses = [self.window + offset for offset in (self.X, self.Y, self.FLAG)]
        self.given = (*addresses, 4096, peer, rank, self.window)
        text = re.sub(r"// begin inline asm.*?// end inline asm", "", body(far(how)), flags=re.S)
        self.values: dict[str, int] = {}
        for at, value in enumerate(self.given):
            for register in re.findall(rf"ld\.param\.b\d+\s+(%\w+), \[calls_param_{at}\]", text):
                self.values[register] = value
        call = re.search(r"\{ // callseq(.*?)call\.uni", text, re.S)[1]
        self.stored = {int(i): name for i, name in re.findall(r"\[param(\d+)\], (%?\w+);", call)}
        self.text = text

    def value(self, name: str) -> int:
        if not name.startswith("%"):
            return int(name)
        if name not in self.values:
            op, operands = re.search(rf"^\s*([a-z][\w.]+)\s+{re.escape(name)}, ([^;\[]*);", self.text, re.M).groups()
            x = [self.value(part.strip()) for part in operands.split(",")]
            kind = op.split(".")[0]
            self.values[name] = {
                "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "shl": lambda: x[0] << x[1],
                "mov": lambda: x[0], "cvt": lambda: x[0],
            }[kind]()  # fmt: skip
        return self.values[name] % 2**64

    def all(self) -> list[int]:
        return [self.value(self.stored[i]) for i in sorted(self.stored)]


def test_calls_get_the_networks_addresses() -> None:
    """Data at its own offset, and a counter's lane behind the arena at twice its offset."""
    put, signal = Arguments("put"), Arguments("signal")
    base = HEAP + 2 * STRIDE
    assert put.all() == [base + put.Y, base + put.X, 4096, 1]
    assert signal.all()[:2] == [base + ARENA + 2 * signal.FLAG, 1]
    both = Arguments("put_signal").all()
    assert both[:4] == [base + put.Y, base + put.X, 4096, base + ARENA + 2 * signal.FLAG]
    assert both[-1] == 1


# ------------------------------------------------------------------------------------------------- windows of the node
@triton.jit
def address_kernel(x, out, peer_ptr, world):
    tl.store(out, tl.cast(address.of_rank(x, tl.load(peer_ptr), world), tl.int64) - tl.cast(x, tl.int64))


def strides_to(rank: int, peer: int, ring: int, team: list[int] | None = None) -> float:
    """From the window of rank `rank` of 6, on nodes of 2, to where of_rank leads, as compiled for GPUs. Both are the
    team's ranks, where there is one."""
    world = device_world(rank, 6, STRIDE, node_size=2, team=team, ring=ring)
    if team is not None and len({r // 2 for r in team}) == 1:
        world = world._replace(node_size=tl.constexpr(0))

    def on_a_rank(one: pkt.World) -> float:
        x, out, at = pkt.empty(1), pkt.empty(1, dtype=torch.int64), pkt.full(1, peer, dtype=torch.int64)
        address_kernel[(1,)](x, out, at, world._replace(status=one.device.status))
        return out.item() / STRIDE

    return pkt.launch(on_a_rank, ranks=1, device="cpu")[0]


@pytest.mark.parametrize("ring", [2, 6])
def test_addresses_go_around_the_ring_and_far_ranks_are_nowhere(ring: int) -> None:
    for rank in range(6):
        near = rank ^ 1
        assert strides_to(rank, rank, ring) == 0
        assert strides_to(rank, near, ring) == (near - rank) % ring
        for far in range(6):
            if far // 2 != rank // 2:
                assert strides_to(rank, far, ring) * STRIDE >= 1 << 48


def test_addresses_go_around_the_ring_in_teams() -> None:
    assert strides_to(1, 0, 6, team=[2, 3]) == 5
    assert strides_to(0, 1, 6, team=[2, 3]) == 1
    assert strides_to(0, 1, 6, team=[3, 2]) == 5
    assert strides_to(1, 2, 6, team=[1, 4, 5]) == 1
    assert strides_to(1, 0, 6, team=[1, 4, 5]) * STRIDE >= 1 << 48


# --------------------------------------------------------------------------------------------------- lanes of counters
class Scene:
    """A wait of rank RANK of 6 on 3 nodes, whose counter has two lanes."""

    RANK, SIZE = 3, 6

    def __init__(
        self, kind: str = "*int32", cmp: str = "ge", deadline: int = 0, team: list[int] | None = None, ring: int = 2
    ) -> None:
        rank = self.RANK if team is None else team.index(self.RANK)
        world = device_world(rank, self.SIZE, STRIDE, node_size=2, team=team, ring=ring)
        if team is not None and len({r // 2 for r in team}) == 1:
            world = world._replace(node_size=tl.constexpr(0))
        flip = cmp == "flip"
        kernel = compiled(barrier_kernel, kind, world) if flip else compiled(wait_kernel, kind, 7, world, cmp)
        self.bits, self.where = 64 if "64" in kind else 32, HEAP + self.RANK * STRIDE
        self.counter = self.where + 4096 + 72
        self.lane = self.where + ARENA + 2 * (4096 + 72)
        (self.text,) = blocks(body(kernel), "// pkt.wait")
        self.known = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", body(kernel)))
        self.text = self.text.replace(f", {POLLS_PER_CHECK - 1};", ", 3;")
        self.memory, self.time = Memory(), 1000
        self.memory.store(self.where + 4 * STATUS_DEADLINE, deadline, 64)

    def add(self, near: int, network: int) -> Scene:
        for at, value, bits in ((self.counter, near, self.bits), (self.lane, network, 64)):
            self.memory.store(at, self.memory.load(at, bits) + value, bits)
        return self

    def thread(self, want: int) -> Thread:
        name = "%rd" if self.bits == 64 else "%r"
        found, ptr = re.search(rf"ld\.relaxed\.sys\.global\.b{self.bits} ({name}\d+), \[(%rd\d+)\]", self.text).groups()
        rank = re.search(r"rem\.u32 own, (%?\w+),", self.text)[1]
        registers = {
            ptr: self.counter,
            re.search(rf"mov\.b{self.bits} last, ({name}\d+)", self.text)[1]: want % 2**self.bits,
            re.search(r"ld\.relaxed\.sys\.global\.b32 a, \[(%rd\d+)", self.text)[1]: self.where,
            rank: int(self.known.get(rank, self.RANK)),
        }
        for axis in "xyz":
            registers[f"%ctaid.{axis}"], registers[f"%nctaid.{axis}"] = 0, 1
        thread = Thread(self.text, registers, self.memory, lambda: self.time)
        thread.found = lambda: thread.registers[found]
        return thread

    def done(self, want: int, limit: int = 300) -> int | None:
        """What a wait for `want` finds; None if it still waits."""
        thread = self.thread(want)
        run([thread], tick=self.tick, limit=limit)
        return thread.found() if thread.done else None

    def tick(self) -> None:
        self.time += 10


@pytest.mark.parametrize("kind", ["*int32", "*int64"])
def test_a_wait_sees_the_sum_of_both_lanes(kind: str) -> None:
    assert Scene(kind).add(3, 3).done(7) is None
    assert Scene(kind).add(3, 4).done(7) == 7
    assert Scene(kind).add(0, 9).done(7) == 9
    assert Scene(kind).add(9, 0).done(7) == 9


@pytest.mark.parametrize("kind", ["*int32", "*int64"])
@pytest.mark.parametrize("total", [0, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_a_sum_is_right_across_the_wrap(kind: str, total: int) -> None:
    bits = 64 if "64" in kind else 32
    for near in (0, 1, 2**31 + 5, 2**32 - 3):
        network = (total - near) % 2**64  # the network adds modulo 2^64
        assert Scene(kind).add(near % 2**bits, network).done(total) == total % 2**bits, near
        assert Scene(kind).add(near % 2**bits, network).done(total + 1) is None, near
    scene = Scene(kind)
    for _ in range(5):  # of a counter that was signalled with negative values from both sides
        scene.add(-1 % 2**bits, -1 % 2**64)
    assert scene.done(-10) == -10 % 2**bits


def test_a_barrier_waits_for_the_top_bit_of_the_sum() -> None:
    arrivals = [2**31 - 5, 1, 1, 1, 1, 1]  # of six ranks, in one round
    for far_ones in range(7):
        scene = Scene(cmp="flip")
        for share in arrivals[far_ones:]:
            scene.add(share, 0)
        for share in arrivals[: max(far_ones - 1, 0)]:
            scene.add(0, share)
        if far_ones:
            assert scene.done(0) is None, far_ones
            scene.add(0, arrivals[far_ones - 1])
        assert scene.done(0) == 2**31, far_ones


@pytest.mark.parametrize("ring", [2, 6])
@pytest.mark.parametrize("team", [None, [1, 3, 5], [2, 3], [5, 3, 0]])
def test_an_expired_wait_aborts_its_node_and_writes_nowhere_else(team: list[int] | None, ring: int) -> None:
    """The windows of other nodes are not mapped: an access would end the process. That of the node's other rank, 2, is
    the last of the ring, which begins with rank 3's."""
    scene = Scene(deadline=3000, team=team, ring=ring).add(2, 3)
    thread = scene.thread(7)
    run([thread], tick=scene.tick)
    assert thread.done
    words = [scene.memory.load(scene.where + 4 * (STATUS_FIRST_RECORD + k), 32) for k in range(len(RECORD_FIELDS))]
    record = dict(zip(RECORD_FIELDS, words))
    assert (record["rank"], record["wanted"], record["found"]) == (3, 7, 5)
    aborted = {(address - scene.where) // STRIDE for address in scene.memory.words}
    assert aborted == {0, ring - 1}
    assert [scene.memory.load(scene.where + at * STRIDE, 32) for at in aborted] == [1, 1]


def test_a_poll_adds_the_lane_with_an_acquire() -> None:
    near = compiled(poll_kernel, "*int32", 7, device_world(2), "ge")
    both = compiled(poll_kernel, "*int32", 7, device_world(2, node_size=2), "ge")
    one, two = ([x for x in order(kernel) if "acquire" in x] for kernel in (near, both))
    assert len(one) == 1
    assert two == [one[0], one[0].replace("32", "64")]


@pytest.mark.parametrize("kind", ["*int32", "*int64"])
def test_a_wait_acquires_both_lanes_before_it_ends(kind: str) -> None:
    """The lane in each poll, behind the counter's relaxed load, and the counter behind the last poll."""
    text = Scene(kind).text
    loads = re.findall(r"ld\.(relaxed|acquire)\.sys\.global\.b\d+ %?\w+, \[(%rd\d+|lane)\]", text)
    counter = loads[0][1]
    assert loads == [("relaxed", counter), ("acquire", "lane"), ("acquire", counter)]
    assert text.rindex("$PKT_DONE") < text.rindex("ld.acquire")


def test_the_constant_of_a_network_fits_beside_a_tuple() -> None:
    most = (1 << 20) - 1
    for parts in ((1, 1 << 16, 1), (8, 5 << 16, 72), (72, 1 << 32, 8), (most, most << 16, most)):
        constant = Network(*parts).constant
        assert 0 < constant < 1 << 60
        assert Network.of(constant) == parts
    assert Network.of(0) == (0, 0, 0)


# --------------------------------------------------------------------------------------------------- what is refused
@triton.jit
def wrong(x, flag, peer, world, HOW: tl.constexpr):
    i = tl.arange(0, 64)
    if HOW == "set":
        pl.signal(flag, peer, world, 1, "set")
    elif HOW == "shmem set":
        pl.shmem.putmem_signal(x, x, 64, flag, 1, pl.shmem.SIGNAL_SET, peer, world)
    elif HOW == "load_reduce":
        tl.store(x + i, pl.multimem_load_reduce(x + i, world))
    elif HOW == "store":
        pl.multimem_store(x + i, tl.load(x + i), world)
    else:
        pl.multimem_reduce_add(x + i, tl.load(x + i), world)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("set", "pl.signal(op='set'): found a world of several nodes, and the network only adds to counters: use op="),
        ("shmem set", "pl.put_signal(op='set')"),
        ("load_reduce", "make the call in the team world.on_node"),
        ("store", "make the call in the team world.on_node"),
        ("reduce_add", "make the call in the team world.on_node"),
    ],
)
def test_calls_that_the_network_cannot_carry_do_not_compile(how: str, words: str) -> None:
    compile_only(wrong, "*fp32", "*i32", 1, device_world(2), how)
    with pytest.raises(triton.CompilationError) as raised:
        compile_only(wrong, "*fp32", "*i32", 1, device_world(2, node_size=2), how)
    assert words in reasons(raised.value)
    assert isinstance(cause(raised.value), Unsupported)


@pytest.mark.parametrize("how", ["store", "reduce", "all_reduce"])
@pytest.mark.parametrize("tma", [True, False])
def test_tiles_of_all_ranks_do_not_compile(how: str, tma: bool) -> None:
    kernel, args, options = {
        "store": (store_kernel, (layout(tma=tma), "*bf16"), {"R": 64, "C": 64, "ALL": True, "ADD": False}),
        "reduce": (reduce_kernel, (layout(tma=tma), layout(tma=tma)), {"R": 64, "C": 64, "OP": "add"}),
        "all_reduce": (all_reduce_kernel, (layout(tma=tma),), {"R": 64, "C": 64}),
    }[how]
    peer = (1,) if how == "store" else ()
    compile_only(kernel, *args, device_world(2), *peer, **options)
    with pytest.raises(triton.CompilationError) as raised:
        compile_only(kernel, *args, device_world(2, node_size=2), *peer, **options)
    assert "make the call in the team world.on_node" in reasons(raised.value)


@gluon.jit
def gluon_kernel(flag, world):
    pl.signal(flag, 0, world)


def test_gluon_is_refused() -> None:
    with pytest.raises(Exception, match="^at ") as raised:
        compile_only(gluon_kernel, "*i32", device_world(2, node_size=2))
    assert "call it in a @triton.jit kernel" in reasons(raised.value)


def cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def refused(patch: pytest.MonkeyPatch) -> str:
    with pytest.raises(triton.CompilationError) as raised:
        compile_only(calls, "*fp32", "*fp32", "*i32", 4096, 3, device_world(2, node_size=2), "signal")
    assert isinstance(cause(raised.value), Unsupported)
    return str(cause(raised.value))


def test_without_nvshmem_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "installed", lambda: None)
    found = refused(monkeypatch)
    assert found == (
        "pl.signal to a rank of another node: found no NVSHMEM in this environment: pip install 'pkt-triton[nvshmem]'"
    )
    compile_only(calls, "*fp32", "*fp32", "*i32", 4096, 3, device_world(2), "signal")  # one node needs none


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("3.3.20", "which was never tried"), ("3.4.4", "which was never tried"),
        ("3.5.19", "a kernel takes 2 to 22 s to compile"), ("3.7.0", "a kernel takes 2 to 22 s to compile"),
        ("3.8.0", "newer than the LLVM of Triton 3.6"), ("4.0", "newer than the LLVM of Triton 3.6"),
    ],
)  # fmt: skip
def test_only_versions_that_were_tried(version: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device_library.install(monkeypatch, tmp_path, version)
    found = refused(monkeypatch)
    assert f"found {device_library.PACKAGE} {version}, " in found
    assert why in found
    assert found.endswith(f"pip install '{device_library.PACKAGE}==3.4.5'")


# --------------------------------------------------------------------------------------------------- what is linked
def test_what_nobody_calls_is_stripped() -> None:
    text = nvshmem.library("a call").read_text()
    assert "nvshmem_unused" not in text
    assert len(re.findall(r"^define i32 @pkt_far_\w+\(", text, re.M)) == 5
    assert not re.search(r"^declare .*@nvshmem", text, re.M), "something is missing"


def test_the_library_is_stripped_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = device_library.install(monkeypatch, tmp_path)
    made: list[Path] = []
    strip = nvshmem.strip
    monkeypatch.setattr(nvshmem, "strip", lambda bitcode: made.append(bitcode) or strip(bitcode))
    first = nvshmem.library("a call")
    assert nvshmem.library("a call") == first
    assert len(made) == 1
    assert [path.name for path in kept.iterdir()] == [first.name], "a file that was being written is left"
    for change in ("version", "triton", "text"):  # each has a file of its own
        with pytest.MonkeyPatch.context() as patch:
            if change == "version":
                device_library.install(patch, tmp_path, package="another")
            elif change == "triton":
                patch.setattr(nvshmem.triton, "__version__", "3.6.9")
            else:
                patch.setattr(nvshmem, "WRAPPERS", nvshmem.WRAPPERS + "; more\n")
            assert nvshmem.library("a call") != first
    assert len(made) == 4


def test_a_failure_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = device_library.install(monkeypatch, tmp_path)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Unsupported, match=r"kept cannot be written \(\[Errno 28\].*set XDG_CACHE_HOME"):
        nvshmem.library("a call")
    assert list(kept.iterdir()) == []


def test_a_package_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device_library.install(monkeypatch, tmp_path)
    (tmp_path / "lib" / "libnvshmem_device.bc").unlink()
    with pytest.raises(Unsupported, match=r"found made-up-\w+ 3\.4\.5 without .*libnvshmem_device\.bc"):
        nvshmem.library("a call")


def test_code_for_one_node_is_linked_with_nothing() -> None:
    """And the code of several nodes depends on the library, so that another version is compiled anew."""
    one, several = device_world(2), device_world(2, node_size=2)
    assert one.code == device_world(2).code != several.code
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvshmem, "identity", lambda: "another 3.4.5")
        assert device_world(2).code == one.code
        assert device_world(2, node_size=2).code != several.code
    kernel = compiled(calls, "*fp32", "*fp32", "*i32", 4096, 3, one, "signal")
    assert not library_calls(kernel)
    assert device_library.STATE not in kernel.asm["ptx"]


# --------------------------------------------------------------------------------------------------- NVIDIA's own
def real() -> Path | None:
    """NVSHMEM's bitcode, of a version that was tried, if it is installed."""
    for package in nvshmem.PACKAGES:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.version in nvshmem.TRIED:
            return Path(str(found.locate_file("nvidia/nvshmem/lib/libnvshmem_device.bc")))
    return None


@pytest.mark.skipif(real() is None, reason="no NVSHMEM of a version that was tried")
def test_nvidias_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its 31 MB become 60 kB, from which every call compiles to machine code."""
    device_library.install(monkeypatch, tmp_path, package="nvidias")
    bitcode = tmp_path / "lib" / "libnvshmem_device.bc"
    bitcode.unlink()
    bitcode.symlink_to(real())
    text = nvshmem.library("a call").read_text()
    assert len(text) < 100_000
    assert not re.search(r"^declare .*@(_Z\w*)?nvshmem", text, re.M), "something is missing"
    for arch in ARCHS:
        for how in HOW:
            begun = time.process_time()
            world = device_world(2, node_size=2)
            kernel = compile_only(calls, "*fp32", "*fp32", "*i32", 4096, 3, world, how, arch=arch)
            assert "nvshmemi_device_state_d" in kernel.asm["ptx"]
            assert kernel.asm["cubin"]
            print(f"sm_{arch} {how}: {time.process_time() - begun:.2f} s of this process")
