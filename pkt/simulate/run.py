"""One simulated run of `fn(world, *args)` on every rank: the simulator's Backend, `execute` and its Outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pkt.errors import CollectiveMismatch, HeapFull, LostSignal, PktError, Unsupported
from pkt.runtime import world as worlds
from pkt.runtime.backend import HEAP_CALL, SIGNAL_HEADER, Block
from pkt.runtime.memory import tensor as tensors
from pkt.runtime.world import World
from pkt.simulate.findings import DataRace, FarAccess
from pkt.simulate.machine import Machine
from pkt.simulate.memory import Region
from pkt.simulate.sites import in_host_code, of_task, site
from pkt.simulate.standstill import whereabouts
from pkt.simulate.turns import turn
from pkt.trace import Timeline
from pkt.wording import call_text

FREE = "free()"
UNORDERED = (HEAP_CALL, FREE)  # collective calls that on GPUs wait for no device work
POISON = 0xFF  # the bytes of fresh memory: NaN in every float format, -1 in the integers


class SimulatedRank:
    """One rank of a Machine as a pkt.runtime.backend.Backend."""

    gpu, timeout, journal, copies = "simulated", None, None, None
    arena, network, library = range(0), 0, ""  # counters have one lane, and every window its place

    def __init__(self, machine: Machine, rank: int, capacity: int) -> None:
        self.machine = machine
        self.rank, self.size = rank, machine.size
        self.torch_device = torch.device("cpu")
        self.stride, self.capacity = machine.space.stride, min(capacity, machine.space.stride)
        self.multicast, self.num_sms = machine.multicast, machine.sms
        self.node_size = machine.node_size
        self.base, self.gap = machine.space.window(rank), 1
        self._regions: dict[int, Region] = {}

    def window(self, rank: int) -> int:
        return self.machine.space.window(rank)

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        if rank < self.size and rank // self.node_size != self.rank // self.node_size:
            raise FarAccess.host(self.rank, f"peer({rank})", rank, self.node_size)
        if rank != self.rank:  # for `x.peer(rank)`, a plain tensor
            self.machine.stream.watch(self.machine.hosts[self.rank])
        return self.machine.space.tensor(rank, offset, nbytes, dtype)

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.stride:
            raise HeapFull.no_memory(nbytes, "the simulated rank", {self.rank: f"its window has {self.stride} bytes"})

    def allocated(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        """All ranks have agreed on the block. The first of them that comes here maps it for all: its next launch may
        access the memory of a rank whose host code is slow."""
        mapped = self.machine.mapped
        if (self.rank, block.offset) not in mapped:
            mapped.update({(rank, block.offset): self._mapped(block, rank) for rank in among or range(self.size)})
        region = self._regions[block.offset] = mapped.pop((self.rank, block.offset))
        region.name = block.name

    def _mapped(self, block: Block, rank: int) -> Region:
        nbytes, space = max(block.nbytes, 1), self.machine.space
        memory = space.slice(rank, block.offset, nbytes)
        header = block.start - block.offset
        if block.kind == "data":
            memory[:] = POISON
        base, itemsize = space.window(rank) + block.offset, block.dtype.itemsize
        region = Region(base, nbytes, memory, rank, block.name, block.kind, itemsize, block.shape, header)
        region.unwaited = block.unwaited
        space.add(region)
        return region

    def freed(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        # A launch of any rank may still use it: on GPUs its memory is reused after the next collective call only.
        self.machine.finish_launches()
        self.exchange(None, FREE, among)
        region = self._regions.pop(block.offset)
        self.machine.device.check_far(region)
        region.freed_at, self.machine.freed = block.site, True
        region.memory[:] = POISON
        self.machine.stream.watch(self.machine.hosts[self.rank])  # for plain views that outlive the tensor

    def exchange(self, value: Any, what: str, among: tuple[int, ...] | None = None) -> list[Any]:
        among = among or tuple(range(self.size))
        brought = self.machine.meet(value, what, among, queued=not what.startswith(UNORDERED))
        if len({name for _, name in brought}) > 1:
            places = whereabouts(self.machine)
            said = {r: f"{call_text(name, value)} {places[r]}" for r, (value, name) in zip(among, brought)}
            raise CollectiveMismatch.calls(said)
        return [value for value, _ in brought]

    def barrier(self, what: str) -> None:
        self.exchange(None, what)

    def synchronize(self) -> None:
        self.machine.finish_launches()
        self.machine.settle()

    def timed(self, run: Callable[[], Any], among: tuple[int, ...] | None = None) -> tuple[Any, float]:
        result, microseconds = self.machine.timed(run, among or tuple(range(self.size)))
        return result, 1e-6 * microseconds

    def abandon(self, why: str, lost: Mapping[int, str]) -> None:
        """The error itself ends the run: the other ranks need not be told."""

    def close(self) -> None:
        for region in self._regions.values():
            region.freed_at = "world.close()"
        self._regions.clear()
        if self.machine.current is not None:
            self.machine.hosts[self.rank].closed = site()
        else:  # at the end of the run: the world refers to itself, and the machine would stay with it
            del self.machine


@dataclass
class Outcome:
    """The outcome of one run: the results in rank order or the error that ended it, and what the detectors found."""

    machine: Machine
    results: list[Any] | None
    error: Exception | None
    findings: list[PktError]
    worlds: list[World]  # of all ranks; an error leaves them open

    def discard(self) -> None:
        """Drop the heap, as a run without an error has done."""
        for world in self.worlds:
            if not world.closed:
                world._discard()

    @property
    def failure(self) -> Exception | None:
        """The error that a caller should see first, or None. A race comes before the error that ended the run, because
        it often explains that error."""
        races: list[Exception] = [f for f in self.findings if isinstance(f, DataRace)]
        ended = [self.error] if self.error is not None else []
        return next(iter([*races, *ended, *self.findings]), None)

    def timeline(self, title: str = "") -> Timeline:
        """When every program did what, on the modelled clock; empty unless the run was traced."""
        return Timeline(self.machine.events, title)


@contextmanager
def _current_world(machine: Machine, members: dict[int, World]) -> Iterator[None]:
    """Make the current world that of the rank whose host code runs, and follow its accesses of the heap."""

    def current() -> World | None:
        machine.check_thread("a call of pkt")
        task = machine.current
        return members.get(task.rank) if task is not None else None

    def op_begins(name: str) -> None:
        task = machine.current
        if task is not None and task.is_host and task.aside is None:
            found = "found code that was compiled outside of the simulation"
            raise Unsupported.here(
                f"rank {task.rank}: {name}", found, "call torch.compile in the function that pkt.launch runs"
            )

    def given_out() -> None:
        task = machine.current
        if task is not None and task.is_host and in_host_code():
            machine.stream.watch(machine.hosts[task.rank])

    saved = worlds._current, worlds.op_begins, worlds.op_ends, worlds.current_name
    followed = tensors.accessed, tensors.given_out
    worlds._current, worlds.op_begins, worlds.op_ends = current, op_begins, machine.finish_launches
    worlds.current_name = worlds.of_size(machine.size)
    tensors.accessed, tensors.given_out = machine.stream.accessed, given_out
    try:
        yield
    finally:
        worlds._current, worlds.op_begins, worlds.op_ends, worlds.current_name = saved
        tensors.accessed, tensors.given_out = followed


def execute(fn: Callable[..., Any], ranks: int, args: tuple = (), heap: int = 1 << 30, **options: Any) -> Outcome:
    """Return the outcome of one run; never raises for an error of `fn` or a finding of the detectors. options: as
    `Machine` takes them. Waits for the simulations of other threads, see `turn`."""
    with turn("pkt.launch"):
        return _execute(fn, ranks, args, heap, **options)


def _execute(fn: Callable[..., Any], ranks: int, args: tuple, heap: int, **options: Any) -> Outcome:
    machine = Machine(ranks, stride=1 << max(20, (heap - 1).bit_length()), **options)
    members: dict[int, World] = {}

    def body(rank: int) -> Any:
        members[rank] = World(SimulatedRank(machine, rank, heap), heap)
        return fn(members[rank], *args)

    error: Exception | None = None
    results = None
    with _current_world(machine, members):
        try:
            results = machine.run(body)
            # Not before all have returned: the others may still read and signal a rank that is done early.
            for world in members.values():
                world.close()
        except Exception as raised:
            error = raised
    findings = list(machine.findings)
    if error is None:
        findings += [*_closed_on_some(machine), *_signals_without_wait(machine)]
    machine.close()
    return Outcome(machine, results, error, findings, [*members.values()])


OPTIONS = frozenset(p.name for p in inspect.signature(Machine).parameters.values() if p.kind is p.KEYWORD_ONLY)
OPTIONS -= {"stride", "brief"}
"""Names of the options of `execute`."""


def _closed_on_some(machine: Machine) -> Iterator[PktError]:
    """An error if some ranks closed their worlds and others did not."""
    places = {host.rank: str(host.closed) for host in machine.hosts if host.closed is not None}
    if 0 < len(places) < machine.size:
        yield CollectiveMismatch.closed(places, machine.size)


def _signals_without_wait(machine: Machine) -> Iterator[PktError]:
    """An error for each counter that was signalled and that no program ever looked at."""
    for region in machine.space.regions():
        if region.kind == "signals" and not region.unwaited:
            for address, where in region.signalled.items():
                offset = address - region.base
                index = (offset - SIGNAL_HEADER) // region.itemsize
                if address not in region.waited and 0 <= index < region.shape[0]:
                    counter = region.memory[offset : offset + region.itemsize].tobytes()
                    value = int.from_bytes(counter, "little", signed=True)
                    yield LostSignal.unread(region.rank, region.element(address), value, str(where))


def run(fn: Callable[..., Any], ranks: int, args: tuple = (), heap: int = 1 << 30, **options: Any) -> list[Any]:
    """Return the results of one run, for pkt.launch(device="cpu"), or raise its first failure."""
    outcome = execute(fn, ranks, args, heap, **options)
    failure = outcome.failure
    if failure is not None:
        others = [f for f in outcome.findings if f is not failure]
        for other in others[:5]:
            failure.add_note(str(other))
        raise failure.with_traceback(of_task(failure.__traceback__, Machine._switch.__code__))
    assert outcome.results is not None
    return outcome.results
