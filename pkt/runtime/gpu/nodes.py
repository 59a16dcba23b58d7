"""NodesBackend: one rank's side of a world of several nodes, over memory of NVSHMEM's.

Its window is NVSHMEM's memory itself, at NVSHMEM's address. A second mapping for the window would not do: a GPU may see
old data through one mapping of what its kernel wrote through another (CUDA's virtual aliasing), and NVSHMEM reads what
the kernel wrote. The windows of the node's other ranks are where NVSHMEM maps them: in a ring that begins with this
rank's own (`pkt.language.world.Network`). Those of far ranks are nowhere, and an access there ends the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from pkt.errors import Unsupported
from pkt.language.ptx import nvshmem as tried
from pkt.language.world import ARENA_UNIT, Network
from pkt.runtime.gpu import nvshmem, symmetric
from pkt.runtime.gpu.cuda import CudaBackend
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.memory.heap import LANES
from pkt.runtime.processes.transport import Transport
from pkt.wording import ranks_text

ALONE = 1 << 37  # bytes between two windows where no rank sees another's
COUNTERS = 256  # bytes of a heap for each byte of counters


class NodesBackend(CudaBackend):
    """pkt.runtime.backend.Backend of several nodes."""

    def __init__(
        self, driver: CudaDriver, transport: Transport, device: int, capacity: int, *, hosts: Sequence[str],
        node_size: int, libraries: symmetric.Libraries = nvshmem.Library,
    ) -> None:  # fmt: skip
        """Collective; `hosts` by rank. capacity: bytes for data. Raises Unsupported, DriverError, HeapFull."""
        self._libraries, self.library = libraries, tried.identity()
        super().__init__(driver, transport, device, capacity, hosts=hosts, want_multicast=False, node_size=node_size)

    def _place_windows(self, capacity: int, stride: int, spans: bool, undo: ExitStack) -> None:
        tried.checked("pkt.init, for a world of several nodes")  # the ranks have said that all have the same
        counters = -(-capacity // (COUNTERS * ARENA_UNIT)) * ARENA_UNIT
        self.arena = range(counters)
        self.capacity, self._granularity = (1 + LANES) * counters + capacity, 1
        self._addresses = symmetric.take(
            self._votes, self.driver, self.device_index, self.capacity, not spans, self._libraries, undo
        )
        self.base = self._addresses[self.rank]
        seen = [self._addresses[rank] for rank in self.near]
        distances = [address - self.base if address else None for address in seen]
        self.stride, ring = ring_of(self.transport.exchange(distances, "NVSHMEM: windows"), self.node_size)
        self.network = Network(self.node_size, counters, ring).constant

    def window(self, rank: int) -> int:
        return self._near(rank, f"the window of rank {rank}")

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        base = self._near(rank, f"peer({rank})")
        return self.driver.view(base + offset, nbytes, self.device_index, dtype)

    def reserve(self, nbytes: int) -> None:
        """Nothing to do: the memory is there."""

    def _near(self, rank: int, call: str) -> int:
        if rank not in self.near:
            wanted = "itself" if self.node_size == 1 else f"one of ranks {self.near.start} to {self.near.stop - 1}"
            found = f"found rank {rank} on node {rank // self.node_size}, wanted {wanted}"
            remedy = "only the network reaches another node: let that rank put the data here, with pl.put_signal"
            raise Unsupported.here(f"rank {self.rank}: {call}", found, remedy)
        return self._addresses[rank]


def ring_of(distances: Sequence[Sequence[int | None]], node_size: int) -> tuple[int, int]:
    """Bytes between two windows, and their number in the ring of a node. distances: by rank, the bytes from its window
    to those of its node's ranks, in their order; None where NVSHMEM maps none. Raises Unsupported unless they form one
    ring on every rank."""
    if node_size == 1:
        return ALONE, 1
    stride, back = distances[0][1] or 0, distances[1][0] or 0
    ring = 1 + back // stride if stride else 0
    for rank, found in enumerate(distances):
        mine = rank % node_size
        if not ring or list(found) != [(other - mine) % ring * stride for other in range(node_size)]:
            odd = {r: "/".join("none" if d is None else f"{d:#x}" for d in ds) for r, ds in enumerate(distances)}
            raise Unsupported.here(
                "pkt.init, for a world of several nodes",
                f"found NVSHMEM's windows of each node's ranks at these distances from a rank's own: {ranks_text(odd)}",
                "wanted the same steps on every rank: GPUs of a node must reach each other's memory over NVLink, and "
                "the ranks of a node must follow each other",
            )
    return stride, ring
