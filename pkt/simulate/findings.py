"""What the simulator finds wrong in a kernel: exceptions, each with the lines, ranks and programs that it is about."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pkt.errors import PktError
from pkt.wording import Access, Waiting, program_text, ranks_text, waiting_table


class Deadlock(PktError):
    """No program can continue. `.waits` has one `Waiting` a program."""

    waits: list[Waiting]

    @classmethod
    def among(
        cls, waits: Sequence[Waiting], hosts: Mapping[int, str] | None = None, calls_differ: bool = True
    ) -> Deadlock:
        """`hosts`: by rank, the call that its host code is in, where some wait in collective ones. `calls_differ`: the
        ranks may have made different calls."""
        programs = f"{len(waits)} programs wait" if len(waits) != 1 else "1 program waits"
        programs = programs if waits or not hosts else "host code waits"
        text = f"deadlock: {programs} and nothing can move"
        if waits:
            text += f"\n{waits[0].text()}\n{waiting_table(waits)}"
        if hosts:
            text += f"\nhost code: {ranks_text(hosts)}"
        if hosts and calls_differ:
            text += "\nevery rank must make the same collective calls in the same order"
        return cls.of(text, waits=list(waits))

    @classmethod
    def alone(cls, task: Any, at: str, iterations: int) -> Deadlock:
        """task: a program whose `while`, at a line, runs on and on by itself."""
        program = f"rank {task.rank}: {task.name} program {program_text(task.program)} at {at}"
        found = f"{iterations:,} iterations of a while without a load, a store or an atomic"
        return cls.of(f"endless loop: {program}: found {found}, so nothing else can end it: shorten it", waits=[])

    @classmethod
    def endless(cls, steps: int, schedule: str, waits: Sequence[Waiting]) -> Deadlock:
        text = f"not finished after {steps} steps ({schedule}); raise max_steps= for a longer run"
        return cls.of(text + (f"\n{waiting_table(waits)}" if waits else ""), waits=list(waits))


class TooFewResident(Deadlock):
    """A deadlock: the programs that others wait for cannot start, because all slots of the GPU are taken."""

    @classmethod
    def waiting(cls, rank: int, kernel: str, grid: int, slots: int, waits: Sequence[Waiting] = ()) -> TooFewResident:
        resident = f"{slots} are resident, and they wait" if slots != 1 else "1 is resident, and it waits"
        text = (
            f"deadlock: rank {rank}: {kernel} has {grid} programs but only {resident} for the others: lower the grid "
            f"to {slots} or make it persistent"
        )
        if waits:
            text += f"\n{waiting_table(waits)}"
        return cls.of(text, waits=list(waits), rank=rank, grid=grid, slots=slots)


class DataRace(PktError):
    """Two accesses that nothing orders, at least one of them a write. `.first`, `.second`. `.pair`: the tensor's name
    and the two lines with their kinds of access, the same whichever comes first and on whatever ranks."""

    pair: Hashable
    said = "data race", "is not ordered after", "put a signal after the first and a wait before the second"

    @classmethod
    def between(cls, first: Access, second: Access, pair: Hashable, remedy: str = "") -> DataRace:
        """`remedy`: one for this race, in place of that for all of this class."""
        what, why, usual = cls.said
        text = f"{what}: {second.text()}\n  {why}: {first.text()}\n  {remedy or usual}"
        return cls.of(text, first=first, second=second, pair=pair)


class MissingBarrier(DataRace):
    """Two threads of one program access an element, one of them to store it, with no barrier between."""

    said = (
        "missing barrier",
        "another thread of the program may not have done this yet",
        "call tl.debug_barrier() between the two",
    )


class OverlappingStore(DataRace):
    """Two elements of one block are stored at one address with different values: either may stay."""

    @classmethod
    def of_one(cls, access: Access, pair: Hashable) -> OverlappingStore:
        text = (
            f"overlapping store: {access.text()}\n"
            "  two elements of the block have this address and different values, and either may stay\n"
            "  make their addresses differ, or add with tl.atomic_add"
        )
        return cls.of(text, first=access, second=access, pair=pair)


class MissingQuiet(DataRace):
    """The source of a put to a rank of another node is written again while the network may still read it."""

    said = (
        "missing quiet",
        "while the network may still read it",
        "call pl.quiet(world) after the put, or wait for an answer of the rank that saw its signal",
    )


class OvertakenPut(DataRace):
    """What follows a put to a rank of another node may overtake its data."""

    said = (
        "overtaken put",
        "may come before the data arrives",
        "send the signal with the data (pl.put_signal), or call pl.fence(world=world) before the next call to the same "
        "rank, pl.quiet(world) before any other",
    )


class FarAccess(PktError):
    """A load, a store, an atomic or TMA in the memory of a rank of another node, which only the network reaches."""

    @classmethod
    def device(cls, access: Access, owner: int, node_size: int, remedy: str) -> FarAccess:
        found = cls._found(access.rank, owner, node_size)
        return cls.of(f"far access: {access.text()}: {found}: {remedy}", access=access)

    @classmethod
    def host(cls, rank: int, call: str, owner: int, node_size: int) -> FarAccess:
        remedy = "let a kernel there put the data into this rank's heap (pl.put with nbytes=)"
        return cls.of(f"rank {rank}: {call}: {cls._found(rank, owner, node_size)}: {remedy}", rank=rank, owner=owner)

    @staticmethod
    def _found(rank: int, owner: int, node_size: int) -> str:
        node, first = owner // node_size, rank // node_size * node_size
        wanted = f"one of ranks {first} to {first + node_size - 1}, on its own" if node_size > 1 else "itself"
        return f"found rank {owner} on node {node}, wanted {wanted}"


class StaleFlag(PktError):
    """A counter value that an earlier launch left satisfied a wait."""

    @classmethod
    def found(cls, waiting: Waiting, written: int) -> StaleFlag:
        text = (
            f"stale flag: {waiting.text()}, but that value was written in launch {written}: "
            "wait for epoch(flags, world) * arrivals, not for a constant"
        )
        return cls.of(text, waiting=waiting, written=written)


class OutOfBounds(PktError):
    """An access outside every allocation of the rank it addresses."""

    @classmethod
    def outside(cls, access: Access, hint: str = "") -> OutOfBounds:
        return cls.of(f"out of bounds: {access.text()}" + (f"; {hint}" if hint else ""), access=access)


class MisalignedAccess(PktError):
    """An access to an element that does not begin at a multiple of its bytes."""

    @classmethod
    def element(cls, access: Access, nbytes: int, past: int) -> MisalignedAccess:
        return cls.of(
            f"misaligned: {access.text()}, an element of {nbytes} bytes, {past} past a multiple of {nbytes}; a GPU "
            f"refuses it: begin at a multiple of {nbytes} bytes, or use a type of fewer bytes",
            access=access,
        )


class MulticastAccess(PktError):
    """A plain load or store in the multicast window, where only multimem instructions may go."""

    @classmethod
    def plain(cls, access: Access) -> MulticastAccess:
        return cls.of(
            f"plain access to the multicast window: {access.text()}: use multimem_load_reduce, "
            "multimem_store or multimem_reduce_add",
            access=access,
        )


class FalseAssumption(PktError):
    """A `tl.assume` whose condition is false, or a `tl.multiple_of` of another number."""

    @classmethod
    def at(cls, rank: int, kernel: str, program: int | Sequence[int], site: str, what: str) -> FalseAssumption:
        text = (
            f"rank {rank}: {kernel} program {program_text(program)} at {site}: {what} is false, and the compiler "
            "may rely on it: correct the condition, or remove the call"
        )
        return cls.of(text, rank=rank, program=program, site=site)
