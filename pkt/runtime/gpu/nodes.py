"""NodesBackend: one rank's side of a world of several nodes, over memory of NVSHMEM's. A node has one rank so far.

Its window is NVSHMEM's memory itself, at NVSHMEM's address. A second mapping for the window would not do: a GPU may see
old data through one mapping of what its kernel wrote through another (CUDA's virtual aliasing), and NVSHMEM reads what
the kernel wrote. Windows of other ranks have addresses that no memory can have. An access there ends the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from pkt.errors import Unsupported
from pkt.language.ptx import nvshmem as tried
from pkt.runtime.gpu import nvshmem, symmetric
from pkt.runtime.gpu.cuda import CudaBackend
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.gpu.sharing import may_share
from pkt.runtime.memory.heap import LANES
from pkt.runtime.processes.transport import Transport

FAR = 1 << 48  # bytes between two windows: addresses of memory have 47 bits, so a multiple away there is none
COUNTERS = 256  # bytes of a heap for each byte of counters
UNIT = 1 << 16  # bytes: the arena is a multiple of it


class NodesBackend(CudaBackend):
    """pkt.runtime.backend.Backend of nodes of one rank."""

    def __init__(
        self, driver: CudaDriver, transport: Transport, device: int, capacity: int, *, hosts: Sequence[str],
        libraries: symmetric.Libraries = nvshmem.Library,
    ) -> None:  # fmt: skip
        """Collective; `hosts` by rank. capacity: bytes for data. Raises Unsupported, DriverError, HeapFull."""
        self._libraries, self.library = libraries, tried.identity()
        super().__init__(driver, transport, device, capacity, hosts=hosts, want_multicast=False, node_size=1)

    def _place_windows(self, capacity: int, stride: int, spans: bool, undo: ExitStack) -> None:
        if may_share():
            found = "found PKT_SHARE_GPU=1, and several ranks on one GPU were never tried with NVSHMEM"
            raise Unsupported.here("pkt.init, for a world of several nodes", found, "give every rank a GPU of its own")
        tried.checked("pkt.init, for a world of several nodes")  # the ranks have said that all have the same
        counters = -(-capacity // (COUNTERS * UNIT)) * UNIT
        self.arena = range(counters)
        self.capacity, self.stride, self._granularity = (1 + LANES) * counters + capacity, FAR, 1
        self.base = symmetric.take(
            self._votes, self.driver, self.device_index, self.capacity, not spans, self._libraries, undo
        )

    def window(self, rank: int) -> int:
        return self._mine(rank, f"the window of rank {rank}")

    def view(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        base = self._mine(rank, f"peer({rank})")
        return self.driver.view(base + offset, nbytes, self.device_index, dtype)

    def reserve(self, nbytes: int) -> None:
        """Nothing to do: the memory is there."""

    def _mine(self, rank: int, call: str) -> int:
        if rank != self.rank:
            found = f"found rank {rank} on node {rank}, wanted itself"
            remedy = "only the network reaches another node: let that rank put the data here, with pl.put_signal"
            raise Unsupported.here(f"rank {self.rank}: {call}", found, remedy)
        return self.base
