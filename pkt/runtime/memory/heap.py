"""The symmetric heap: the same offsets on every rank, over a Backend.

An allocation is a collective call that waits for nobody: the ranks' ledgers agree by construction, and `agreement`
decides when that is checked. A freed block is reused only after the next collective point (a barrier), because a peer's
kernel may read it until then. An allocation that finds no room makes such a point itself.

Where the backend has an arena, counters lie there, and data behind the lanes of the whole arena.
"""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any

import torch

from pkt.errors import Closed, HeapFull, PktError, ShapeError, SignalIndexError, UseAfterFree
from pkt.language.world import STATUS_BYTES
from pkt.runtime.backend import GUARD_WORD, SIGNAL_GUARD, SIGNAL_HEADER, Backend, Block, Kind
from pkt.runtime.memory.agreement import Agreement
from pkt.runtime.memory.ledger import Ledger

DEFAULT_HEAP = "1GiB"
FIRST_BYTES = 1 << 30  # physical memory taken at once; beyond it the heap grows by doubling
SHARE = 4096  # bytes: a team's part of the arena is a multiple of it
LANES = 2  # bytes of the network's lane for each byte of a counter, see pkt.language.ptx.far.lane
_GUARDS = GUARD_WORD.to_bytes(4, sys.byteorder, signed=True) * ((SIGNAL_HEADER + SIGNAL_GUARD) // 4 - 2)
"""The bytes of all guard words of a block of signals."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$", re.IGNORECASE)


def heap_bytes(heap: int | str | None) -> int:
    """`heap` in bytes: a number, "8GiB", "512M", or None for PKT_HEAP, then 1 GiB. Raises ShapeError."""
    if type(heap) is int and heap >= 2 * STATUS_BYTES:  # as at each world of a simulation
        return heap
    value = heap if heap is not None else os.environ.get("PKT_HEAP", "").strip() or DEFAULT_HEAP
    match = _SIZE.match(str(value))
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if nbytes < 2 * STATUS_BYTES:
        wanted = f'at least {2 * STATUS_BYTES} bytes, as in "8GiB"'
        raise ShapeError.argument("heap", "heap= or PKT_HEAP", repr(value), wanted)
    return nbytes


class Allocation:
    """One block, and whether it was freed. All views of a symmetric tensor hold the same Allocation."""

    __slots__ = ("block", "freed_at", "heap", "number")

    def __init__(self, heap: SymmetricHeap, block: Block, number: int) -> None:
        self.heap, self.block, self.number = heap, block, number
        self.freed_at = ""

    def use(self, call: str) -> None:
        """Raise UseAfterFree or Closed if the memory was given back. call: named in the message."""
        if self.heap.closed:
            raise Closed.memory(self.heap.backend.rank, call, self.block.name)
        if self.freed_at:
            raise UseAfterFree.host(self.heap.backend.rank, call, self.block.name, self.freed_at)


class SymmetricHeap:
    """Allocates blocks of a backend's memory, frees and checks them."""

    def __init__(self, backend: Backend, capacity: int, owner: object, whole: SymmetricHeap | None = None) -> None:
        """Collective. capacity: bytes. owner: the World that this is the heap of. whole: of a team, the heap of all
        ranks, which has the status page."""
        self.backend, self.owner = backend, owner
        arena = backend.arena
        first = (1 + LANES) * len(arena) if whole is None else 0  # a team's share of the arena lies before its heap
        self.capacity = min(capacity, backend.capacity - first)
        self.end = first + self.capacity
        """Offset behind the last byte."""
        self.closed = False
        self.ledger = Ledger(self.capacity, backend.gap, first)
        self._counters = Ledger(len(arena), backend.gap, arena.start) if arena else self.ledger
        self._whole = whole or self
        self.agreement = Agreement(backend)
        self.live: dict[int, Allocation] = {}
        self.allocations = 0  # made so far
        self.shares: list[SymmetricHeap] = []  # of teams, inside this heap
        self._freed: list[int] = []  # offsets that may be used again after the next collective point
        self._reserved = min(self.end, FIRST_BYTES)
        backend.reserve(self._reserved)
        if whole is not None:
            self.status: Allocation = whole.status
            return
        offset = self._counters.allocate(STATUS_BYTES)
        block = Block(offset or 0, STATUS_BYTES, (STATUS_BYTES // 4,), torch.int32, "status", "status", "")
        self.status = Allocation(self, block, 0)
        self.tensor(self.status).zero_()
        backend.allocated(block)

    # -------------------------------------------------------------------------------------- allocate and free
    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str,
        site: str,
        kind: Kind = "data",
        unwaited: bool = False,
    ) -> Allocation:
        """Collective. The block for a tensor. Its contents are undefined, except guard words and counters of signals.
        unwaited: as in pkt.signals.

        Raises AllocationMismatch before the memory can be used. Raises HeapFull on every rank, and then nothing is
        lost.
        """
        if self.closed:
            raise Closed.used(self.backend.rank, "allocation")
        number = self.allocations + 1
        self.agreement.check("allocate", number, str(shape), str(dtype)[6:], kind, site)
        self.allocations = number
        payload = math.prod(shape) * dtype.itemsize
        nbytes = payload + (SIGNAL_HEADER + SIGNAL_GUARD if kind == "signals" else 0)
        ledger = self._counters if kind == "signals" else self.ledger
        offset = ledger.allocate(nbytes)
        if offset is None and self._freed:
            self.collective_point("reclaiming the heap")
            offset = ledger.allocate(nbytes)
        if offset is None:
            raise self._full(ledger, nbytes, name)
        block = Block(offset, nbytes, shape, dtype, name, kind, site, unwaited)
        if offset + nbytes > self._reserved:
            try:
                self._reserve(offset + nbytes)
            except PktError:  # the same on every rank: all give the block back
                ledger.free(offset)
                raise
        allocation = self.live[offset] = Allocation(self, block, number)
        self.backend.allocated(block)
        if kind == "signals":
            words: Any = self.words_of(allocation)
            if words.device.type == "cpu":
                words = words.numpy()  # whose operations on a few words are quicker than torch's
            words[:] = GUARD_WORD
            words[:2] = 0  # the epoch word
            words[SIGNAL_HEADER // 4 : (nbytes - SIGNAL_GUARD) // 4] = 0
            if self.backend.arena:
                self._lanes(block).zero_()
        return allocation

    def share(self, nbytes: int, name: str) -> tuple[int, range]:
        """Collective, after a collective point. The offset of `nbytes` for a team, and those of as large a part of the
        arena, for as long as this heap lasts. Raises HeapFull on every rank."""
        offset, arena = self.ledger.allocate(nbytes), range(0)
        if offset is None:
            raise self._full(self.ledger, nbytes, name)
        if self.backend.arena:
            part = -(-len(self.backend.arena) * nbytes // (self.capacity * SHARE)) * SHARE
            start = self._counters.allocate(part)
            if start is None:
                self.ledger.free(offset)
                raise self._full(self._counters, part, name)
            arena = range(start, start + part)
        if offset + nbytes > self._reserved:
            try:
                self._reserve(offset + nbytes)
            except PktError:  # as in `allocate`
                self.ledger.free(offset)
                raise
        return offset, arena

    def free(self, allocation: Allocation, site: str) -> None:
        """Collective. Give `allocation` back; any later use of it raises. Raises SignalIndexError, after the block is
        free, if a guard word was overwritten. site: where the user's code frees it."""
        allocation.use("free()")
        block = allocation.block
        self.agreement.check("free", allocation.number, str(block.shape), str(block.dtype)[6:], block.kind, site)
        overwritten = self._overwritten(allocation, "free()")
        allocation.freed_at = site
        del self.live[block.offset]
        self._freed.append(block.offset)
        self.backend.freed(block._replace(site=site))
        if overwritten is not None:
            raise overwritten

    def collective_point(self, what: str) -> None:
        """Collective: return when every rank has called it and its device work is done. Freed blocks may be used again
        afterwards. what: names the call in messages."""
        self.agreement.settle()
        self.backend.synchronize()
        self.backend.barrier(what)
        for offset in self._freed:
            (self._counters if offset in self._counters.live else self.ledger).free(offset)
        self._freed.clear()

    def close(self) -> None:
        """Every later use raises Closed. The world closes the backend."""
        self.closed = True

    # --------------------------------------------------------------------------------------------- the memory
    def words_of(self, allocation: Allocation, rank: int | None = None) -> torch.Tensor:
        """int32 view of a whole block of signals in the window of `rank`, or of this rank: header, counters, guard."""
        block = allocation.block
        window = self.backend.rank if rank is None else rank
        return self.backend.view(window, block.offset, block.nbytes).view(torch.int32)

    def payload(self, allocation: Allocation, rank: int) -> torch.Tensor:
        """uint8 view of the block's elements in the window of `rank`. The storage starts with them. An empty block has
        one byte."""
        block = allocation.block
        nbytes = max(1, math.prod(block.shape) * block.dtype.itemsize)
        return self.backend.view(rank, block.start, nbytes)

    def tensor(self, allocation: Allocation) -> torch.Tensor:
        """The block's elements in this rank's window, as a plain contiguous tensor of the block's shape and dtype."""
        block, backend = allocation.block, self.backend
        count = math.prod(block.shape)
        # One element at least: the storage of an empty tensor has an address too.
        memory = backend.view(backend.rank, block.start, (count or 1) * block.dtype.itemsize, block.dtype)
        elements = memory if count else memory[:0]
        return elements if len(block.shape) == 1 else elements.view(block.shape)

    def find(self, address: int) -> Allocation | None:
        """The live allocation of this rank that holds `address`, a team's too."""
        offset = address - self.backend.base
        if not (0 <= offset < self.end or offset in self.backend.arena):
            return None
        inside = (share.find(address) for share in self.shares)
        if (found := next((a for a in inside if a is not None), None)) is not None:
            return found
        return next((a for a in self.live.values() if a.block.offset <= offset < a.block.end), None)

    def check_guards(self, call: str) -> None:
        """Raise SignalIndexError if a guard word around any signals was overwritten."""
        for allocation in list(self.live.values()):
            overwritten = self._overwritten(allocation, call)
            if overwritten is not None:
                raise overwritten

    def _overwritten(self, allocation: Allocation, call: str) -> SignalIndexError | None:
        block = allocation.block
        if block.kind != "signals":
            return None
        words = self.words_of(allocation).cpu().numpy()
        first, last = SIGNAL_HEADER // 4, (block.nbytes - SIGNAL_GUARD) // 4
        if words[2:first].tobytes() + words[last:].tobytes() == _GUARDS:  # quicker than an array of bools
            return None
        bad = [i for i in (*range(2, first), *range(last, len(words))) if words[i] != GUARD_WORD]
        count, word = block.shape[0], bad[0]
        index = (word - first) * 4 // block.dtype.itemsize
        return SignalIndexError.guard(self.backend.rank, call, block.name, index, count, int(words[word]))

    def _lanes(self, block: Block) -> torch.Tensor:
        """uint8 view of the network's lanes of a block of signals in this rank's window."""
        whole = self._whole.backend
        offset = self.backend.base - whole.base + block.offset
        return whole.view(whole.rank, len(whole.arena) + LANES * offset, LANES * block.nbytes)

    def _full(self, ledger: Ledger, nbytes: int, name: str) -> HeapFull:
        if ledger is not self.ledger:
            name = f"{name}, which lies among the counters"
        return HeapFull.wanted(nbytes, ledger.free_bytes, ledger.largest, name, self.backend.rank)

    def _reserve(self, nbytes: int) -> None:
        """Put physical memory behind [0, nbytes), or twice what there is if that is more. Nothing moves."""
        wanted = min(self.end, max(nbytes, 2 * self._reserved))
        self.agreement.settle()
        self.backend.reserve(wanted)
        self._reserved = wanted
