"""`Backend`: what World, SymmetricHeap and SymmetricTensor need of the machine below them.

There are two implementations: `pkt.simulate.run.SimulatedRank` (N ranks in one process, on the CPU) and
`pkt.runtime.gpu.cuda.CudaBackend` (one process a GPU). One Backend object is one rank's side. Every rank makes the
calls marked collective, in the same order.

The memory consists of W + 1 windows of `stride` bytes. If this rank has a byte at `base + o`, then rank r has its copy
at `base + (r - rank) * stride + o`. The multicast window, where there is one, is window number `size`.

In a world of several nodes windows of other nodes have addresses and no memory. The window of this rank then begins
with `arena`, in which all counters lie. Behind it lie their lanes for the network, which take twice as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch

from pkt.runtime.processes.journal import SharedJournal

ALIGNMENT = 256  # bytes; every allocation starts on it, so that TMA and 16-byte vectors are always possible
SIGNAL_HEADER = 64  # bytes before the counters: an int64 epoch word, then guard words
SIGNAL_GUARD = 64  # bytes: guard words after the counters
GUARD_WORD = 0x5AFE5AFE
HEAP_CALL = "heap call"  # begins the name of an exchange of what ranks ask the heap for

Kind = Literal["data", "signals", "status"]


class Block(NamedTuple):
    """One allocation, the same on every rank: `nbytes` at `offset` of the window hold a `shape` of `dtype`.

    For kind "signals" the counters start SIGNAL_HEADER bytes into the block (see `start`), and `nbytes` counts header,
    counters and guard. `site` is the line of the user's code that allocated the block ("train.py:12"); `name` is the
    name that this code gives it. `unwaited`: signals that no kernel looks at are meant.
    """

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    kind: Kind
    site: str
    unwaited: bool = False

    @property
    def start(self) -> int:
        """Offset of the first element."""
        return self.offset + (SIGNAL_HEADER if self.kind == "signals" else 0)

    @property
    def end(self) -> int:
        """Offset just after the last byte."""
        return self.offset + self.nbytes


class Recorded(Protocol):
    """Work that was recorded and is queued as a whole."""

    def replay(self, stream: int) -> None:
        """Queue it on a stream; one call of the driver."""


class CopyEngines(Protocol):
    """Work that the host queues on a stream of a GPU without a kernel; `stream` is the driver's handle."""

    def copy(
        self, target: int, source: int, shape: tuple[int, int, int], to: tuple[int, int], of: tuple[int, int],
        stream: int | None = None,
    ) -> None:  # fmt: skip
        """Copy between addresses of any windows and of this GPU, on the current stream where `stream` is None. For the
        shape and the pitches see `pkt.runtime.gpu.driver.CudaDriver.copy`."""

    def hold(self, address: int, value: int, stream: int) -> None:
        """The stream goes on when the int32 at `address` is `value` or more, by the sign of the 32-bit difference."""

    def stream(self) -> torch.cuda.Stream:
        """A stream that nobody else has, until it is dropped. torch lends each of its streams to many, so one of those
        may be the stream that a user computes on, and what waits there for a kernel would keep it from running."""

    def uncouple(self) -> None:
        """Make the kernel that the current stream has just recorded in a graph an ordinary node, not a cooperative
        one."""

    def allocation(self, address: int) -> int | None:
        """The number of the allocation that has an address of this GPU: no other one has ever the same. None where the
        driver does not number it."""

    def record(self, run: Callable[[], Any]) -> Recorded:
        """What `run()` queues on the current stream, which must not be the default one, and on streams that it forks
        and joins. Nothing of it runs before it is replayed. Work that was recorded shares memory, so replays must run
        one after the other."""


class Backend(Protocol):
    """One rank's side of the machine."""

    rank: int
    size: int
    torch_device: torch.device
    stride: int  # bytes from one rank's window to the next
    capacity: int  # bytes that a window may come to hold; <= stride
    multicast: bool  # the multicast window exists
    num_sms: int  # programs that can be resident on every rank, one a SM: of the rank with the fewest SMs
    base: int  # address of this rank's window
    gap: int  # bytes between two blocks that belong to neither, so that an access past the end of a block is found
    gpu: str  # model of rank 0's GPU; "simulated" where there is none
    node_size: int  # ranks of a node: those that reach each other's memory by loads and stores
    arena: range  # offsets at which counters lie; empty: anywhere
    network: int  # `pkt.language.world.Network.constant`, what kernels know of other nodes; 0 in a world of one node
    library: str  # what kernels are linked with to reach other nodes, with its version; "" for nothing

    @property
    def timeout(self) -> float | None:
        """Seconds that a host call waits for another rank's process; None where all ranks share a process."""

    @property
    def journal(self) -> SharedJournal | None:
        """The log in which ranks compare heap calls; None: they exchange each call at once."""

    @property
    def copies(self) -> CopyEngines | None:
        """The GPU's copy engines; None in the simulator, where kernels copy instead."""

    @property
    def timed(self) -> Callable[..., tuple[Any, float]] | None:
        """Where the clock is a model: collective, `timed(run)` returns the result of `run()` and its seconds.
        `timed(run, among)` does so among these ranks."""

    def window(self, rank: int) -> int:
        """The address of `rank`'s window."""

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A tensor of one dimension over `nbytes` at `offset` of `rank`'s window; `rank == size` is the multicast
        window. The tensor's storage starts there too (torch.frombuffer with an offset, not a slice), because
        as_strided counts from it."""

    def reserve(self, nbytes: int) -> None:
        """Collective: put physical memory behind [0, nbytes) of every window; raises HeapFull on all ranks."""

    def allocated(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        """Called after every allocation, for checkers. among: as of `exchange`."""

    def freed(self, block: Block, among: tuple[int, ...] | None = None) -> None:
        """Called after every free, for checkers. block: its `site` is where it was freed. among: as of `exchange`."""

    def exchange(self, value: Any, what: str, among: tuple[int, ...] | None = None) -> list[Any]:
        """Collective: every rank's `value` in rank order. Values are made of None, bool, int, float, str, list and dict
        with str keys (JSON). `what` names the call ("allocation #5"). among: only these ranks meet, and give the order.
        Raises CollectiveMismatch if ranks give different names, WaitTimeout or PeerLost if a rank does not come in
        time."""

    def barrier(self, what: str) -> None:
        """Collective: return when every rank's host has called it. Does not wait for device work."""

    def synchronize(self) -> None:
        """Return when this rank's device work is done."""

    def abandon(self, why: str, lost: Mapping[int, str]) -> None:
        """Tell the other ranks that an error ends this rank's world; close() follows."""

    def close(self) -> None:
        """Release everything. Called once; not collective, because other ranks may still use their own copies."""
