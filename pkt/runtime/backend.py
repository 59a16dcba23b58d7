"""The seam between the host side and what lies below it.

Everything above (World, SymmetricHeap, SymmetricTensor) is written once against `Backend`. There are two
implementations: `pkt.simulate.run.SimulatedRank` (N ranks in one process, on the CPU) and
`pkt.runtime.gpu.cuda.CudaBackend` (one process a GPU). One Backend object is one rank's side; calls marked
collective are made by every rank, in the same order.

The memory below is W + 1 windows of `stride` bytes: rank r's copy of what I have at `base + o` is at
`base + (r - rank) * stride + o`, and the multicast window, where there is one, is window number `size`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch

ALIGNMENT = 256  # bytes; every allocation starts on it, so that TMA and 16-byte vectors are always possible
SIGNAL_HEADER = 64  # bytes before the counters: an int64 epoch word, then guard words
SIGNAL_GUARD = 64  # bytes of guard words after the counters
GUARD_WORD = 0x5AFE5AFE

Kind = Literal["data", "signals", "status"]


class Block(NamedTuple):
    """One allocation, the same on every rank: `nbytes` at `offset` of the window hold a `shape` of `dtype`.

    For kind "signals" the counters start SIGNAL_HEADER bytes into the block (see `start`) and `nbytes` counts
    header, counters and guard. `site` is where the user's code made it ("train.py:12"), `name` what that code
    calls it.
    """

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    kind: Kind
    site: str

    @property
    def start(self) -> int:
        """Offset of the first element."""
        return self.offset + (SIGNAL_HEADER if self.kind == "signals" else 0)

    @property
    def end(self) -> int:
        """Offset just behind the last byte."""
        return self.offset + self.nbytes


class Journal(Protocol):
    """A log of collective calls that peers can read without waiting (see `agreement`); optional in a
    backend."""

    period: int  # a rank settles at least every so many calls, for the log is a ring

    def append(self, record: bytes) -> None:
        """Write down this rank's next call."""

    def written(self, rank: int) -> int:
        """How many calls `rank` has written down."""

    def read(self, rank: int, ordinal: int) -> bytes:
        """What `rank` wrote down as its call number `ordinal`, which it has."""

    def settle(self, ordinal: int) -> None:
        """Return once every rank has written its call number `ordinal`; raises WaitTimeout or PeerLost."""


class Backend(Protocol):
    """One rank's side of the machine.

    Some members are optional: `journal`, a Journal; `abandon(why)`, called before close() when an error ends the
    world; `timed(run)`, collective, of a backend whose clock is a model: what `run()` returns, and its seconds; and of
    GPUs alone `topology`, `transport`, and `copy(...)`, `hold(...)` and `uncouple()`, see
    `pkt.runtime.gpu.driver.Driver`.
    """

    rank: int
    size: int
    torch_device: torch.device
    stride: int  # bytes from one rank's window to the next
    capacity: int  # bytes that a window may come to hold; <= stride
    multicast: bool  # the multicast window exists
    num_sms: int  # programs that can be resident, one a SM
    base: int  # address of my window
    gap: int  # bytes that are nobody's between two blocks, where what runs past the end of one is to be found

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A tensor of one dimension over `nbytes` at `offset` of `rank`'s window; `rank == size` is the multicast
        window. The tensor's storage starts there too (torch.frombuffer with an offset, not a slice):
        as_strided counts from it."""

    def reserve(self, nbytes: int) -> None:
        """Collective: put physical memory behind [0, nbytes) of every window; raises HeapFull on every rank
        alike."""

    def allocated(self, block: Block) -> None:
        """Told of every allocation, for checkers."""

    def freed(self, block: Block) -> None:
        """Told of every free, for checkers."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Collective: every rank's `value` in rank order. Values are made of None, bool, int, float, str,
        list and dict with str keys (JSON). `what` names the call ("allocation #5") and is the same on every
        rank: a different one is a CollectiveMismatch; a rank that does not come in time is a WaitTimeout or
        PeerLost."""

    def barrier(self, what: str) -> None:
        """Collective: return when every rank's host has come here. Says nothing of device work."""

    def synchronize(self) -> None:
        """Return when this rank's device work is done."""

    def close(self) -> None:
        """Give everything back. Called once; not collective: peers may be in use of their own copies."""
