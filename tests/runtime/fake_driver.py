"""A GPU driver made of memfds and mmap. It has the same calls, serves one process or many, and fails where a test asks.

Peers really read each other's memory:
- Physical memory is a memfd.
- A window address is a fixed mapping.
- An exported handle is a duplicate descriptor; a fabric handle is the text of the memfd's place in /proc.

`FakeDriver.fail = {"map": 3}` makes the third map fail. `leaks()` names the resources that were not released.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pkt.errors import DriverError

PAGE = 1 << 16  # granularity
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int, nbytes: int, prot: int, flags: int, fd: int, offset: int = 0) -> int:
    found = _libc.mmap(address or None, nbytes, prot, flags, fd, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return found


@dataclass
class FakeGpu:
    """The properties of a fake GPU."""

    uuid: str
    name: str = "FakeGPU"
    peers: dict[int, tuple[bool, bool]] = field(default_factory=dict)  # device -> (access, atomics); absent: both
    attributes: dict[str, int] = field(default_factory=dict)
    domain: str = ""  # the NVLink domain that spans hosts


DEFAULTS = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 0,
    "COOPERATIVE_LAUNCH": 1,
    "MULTICAST_SUPPORTED": 0,
}


class FakeDriver:
    """One process's driver; `fail` maps a call's name to the occurrence (from 1) that fails."""

    def __init__(
        self, rank: int, gpus: list[FakeGpu] | None = None, fail: dict[str, int] | None = None, code: int = 999
    ) -> None:
        self.rank, self.code, self.fabric = rank, code, False
        self.gpus = gpus or [FakeGpu(f"uuid-{i}") for i in range(16)]
        self.fail = fail or {}
        self.calls: Counter[str] = Counter()
        self.handles: dict[int, int] = {}  # handle -> memfd
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.bound: dict[tuple[int, int], int] = {}
        self.added: list[int] = []
        self.modules: dict[int, set[str]] = {}  # module -> its variables
        self.graphs: dict[int, list[Callable[[], object]]] = {}  # handle -> what it queues, in order
        self.recording: list[Callable[[], object]] | None = None
        self.allocations: dict[int, int | None] = {}  # address -> number of its allocation, where it is not 1
        self._next = 1000

    def _count(self, call: str) -> None:
        self.calls[call] += 1
        if self.fail.get(call) == self.calls[call]:
            raise DriverError.failed(
                self.rank, call, self.code, "CUDA_ERROR_OUT_OF_MEMORY" if self.code == 2 else "CUDA_ERROR_FAKE"
            )

    def leaks(self) -> str:
        """The resources that were not released, as text; "" if none."""
        held = {
            "handles": self.handles, "addresses": self.reserved, "maps": self.mapped, "bindings": self.bound,
            "graphs": self.graphs,
        }  # fmt: skip
        return ", ".join(f"{len(what)} {name}" for name, what in held.items() if what)

    # -- devices
    def holds(self, module: int, name: str) -> bool:
        return name in self.modules[module]

    def version(self) -> int:
        return 13010

    def memory(self, device: int) -> int:
        return 140 << 30

    def device_count(self) -> int:
        return len(self.gpus)

    def name(self, device: int) -> str:
        return self.gpus[device].name

    def uuid(self, device: int) -> str:
        return self.gpus[device].uuid

    def attribute(self, device: int, name: str) -> int:
        self._count("attribute")
        return self.gpus[device].attributes.get(name, DEFAULTS[name])

    def p2p(self, device: int, peer: int, name: str) -> int:
        access, atomics = self.gpus[device].peers.get(peer, (True, True))
        return int({"ACCESS_SUPPORTED": access, "NATIVE_ATOMIC_SUPPORTED": atomics}[name])

    def domain(self, device: int) -> str:
        self._count("domain")
        return self.gpus[device].domain

    # -- physical memory
    def granularity(self, device: int) -> int:
        self._count("granularity")
        return PAGE

    def _handle(self, fd: int) -> int:
        self._next += 1
        self.handles[self._next] = fd
        return self._next

    def create(self, device: int, nbytes: int) -> int:
        self._count("create")
        assert nbytes % PAGE == 0
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._handle(fd)

    def release(self, handle: int) -> None:
        self._count("release")
        os.close(self.handles.pop(handle))

    def export(self, handle: int) -> int | bytes:
        self._count("export")
        fd = self.handles[handle]
        return f"{os.getpid()} {fd}".encode().ljust(64, b"\0") if self.fabric else os.dup(fd)

    def import_memory(self, shared: int | bytes) -> int:
        self._count("import_memory")
        assert isinstance(shared, bytes) == self.fabric
        if isinstance(shared, int):
            return self._handle(os.dup(shared))
        assert len(shared) == 64
        pid, fd = shared.rstrip(b"\0").decode().split()
        try:
            return self._handle(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:  # the rank that exported it is gone
            raise DriverError.failed(self.rank, "import_memory", 1, "CUDA_ERROR_INVALID_VALUE") from error

    # -- addresses
    def reserve(self, nbytes: int, alignment: int) -> int:
        self._count("reserve")
        address = _mmap(0, nbytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._count("free")
        if any(address <= a < address + nbytes for a in self.mapped):
            raise DriverError.failed(self.rank, "free", 1, "CUDA_ERROR_INVALID_VALUE: maps are left in it")
        assert self.reserved.pop(address) == nbytes
        _libc.munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._count("map")
        assert any(a <= address and address + nbytes <= a + n for a, n in self.reserved.items())
        assert not any(a < address + nbytes and address < a + n for a, n in self.mapped.items()), "mapped twice"
        _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, self.handles[handle])
        self.mapped[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        self._count("unmap")
        assert self.mapped.pop(address) == nbytes
        _mmap(address, nbytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        self._count("allow")
        assert self.mapped[address] == nbytes

    # -- use
    def view(self, address: int, nbytes: int, device: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        at = address
        while at < address + nbytes:  # the view may cross from one map to the next
            at = next((a + n for a, n in self.mapped.items() if a <= at < a + n), 0)
            assert at, "a view of unmapped memory"
        storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
        return torch.empty(0, dtype=dtype).set_(storage)

    def copy(
        self, target: int, source: int, shape: tuple[int, int, int], to: tuple[int, int], of: tuple[int, int],
        stream: int,
    ) -> None:  # fmt: skip
        planes, runs, nbytes = shape
        if planes * runs > 1:
            assert min(to[0], of[0]) >= nbytes
        if planes > 1:
            assert to[1] % to[0] == of[1] % of[0] == 0
            assert min(to[1] // to[0], of[1] // of[0]) >= runs

        def move() -> None:
            for plane in range(planes):
                for run in range(runs):
                    begin = target + plane * to[1] + run * to[0]
                    ctypes.memmove(begin, source + plane * of[1] + run * of[0], nbytes)

        self.queue("copy", move)

    def hold(self, address: int, value: int, stream: int) -> None:
        """Queued work is done at once, so the condition must hold already."""

        def check() -> None:
            found = ctypes.c_int32.from_address(address).value
            assert ctypes.c_int32(found - value).value >= 0, (found, value)

        self.queue("hold", check)

    def queue(self, call: str, do: Callable[[], object]) -> None:
        """A call that queues `do`: done at once, unless a graph is recorded."""
        self._count(call)
        if self.recording is None:
            do()
        else:
            self.recording.append(do)

    def record(self, run: Callable[[], object]) -> int:
        self._count("record")
        assert self.recording is None, "one graph at a time"
        self.recording = []
        try:
            run()
            self._next += 1
            self.graphs[self._next] = self.recording
        finally:
            self.recording = None
        return self._next

    def allocation(self, address: int) -> int | None:
        return self.allocations.get(address, 1)

    def replay(self, graph: int, stream: int) -> None:
        self._count("replay")
        for do in self.graphs[graph]:
            do()

    def forget(self, graph: int) -> None:
        self._count("forget")
        del self.graphs[graph]

    def uncouple(self, stream: int) -> None:
        self._count("uncouple")

    def synchronize(self, device: int) -> None:
        self._count("synchronize")

    def write_words(self, address: int, words: list[int], device: int) -> None:
        self.view(address, 4 * len(words), device).view(torch.int32).copy_(torch.tensor(words, dtype=torch.int32))

    # -- multicast
    def multicast_granularity(self, devices: int, nbytes: int) -> int:
        self._count("multicast_granularity")
        return 2 * PAGE

    def multicast_create(self, devices: int, nbytes: int) -> int:
        self._count("multicast_create")
        fd = os.memfd_create("fake-multicast", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._handle(fd)

    def multicast_add(self, handle: int, device: int) -> None:
        self._count("multicast_add")
        self.added.append(device)

    def multicast_bind(self, handle: int, offset: int, memory: int, nbytes: int) -> None:
        self._count("multicast_bind")
        assert self.added, "bound before the GPU was added"
        assert memory in self.handles
        self.bound[handle, offset] = nbytes

    def multicast_unbind(self, handle: int, device: int, offset: int, nbytes: int) -> None:
        self._count("multicast_unbind")
        assert self.bound.pop((handle, offset)) == nbytes
