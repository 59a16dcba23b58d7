"""pkt.mem_pool(): torch's own allocations in the symmetric heap, so that peers can read the output of any operator.

    with torch.cuda.use_mem_pool(pkt.mem_pool()):
        y = a @ b                                  # lies in the heap: pkt.symmetric(y, "y", world).peer(2)

torch asks for segments of a few megabytes and divides them itself, so it calls back into Python for segments only. A
segment is an allocation like any other: compared between the ranks, named, and freed with the world. So every rank must
make the same allocations in the same order inside the pool, as with the factories.
`outside_pools` makes tensors in no pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pkt.errors import PktError, Unsupported
from pkt.runtime.memory.tensor import SymmetricTensor, symmetric_over
from pkt.runtime.world import World, current_world

T = TypeVar("T")
_KEY = "pkt.mem_pool"
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class SegmentAllocator:
    """The functions that torch calls. An error cannot pass through C: it becomes a warning, and torch gets no
    memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.segments: dict[int, Any] = {}
        self.allocate_pointer = _ALLOCATE(self.allocate)  # must live as long as torch may call them
        self.free_pointer = _FREE(self.free)

    def allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Address of a segment in this rank's window, or None (a null pointer)."""
        heap = self.world._heap
        try:
            number = len(self.segments) + 1
            allocation = heap.allocate((nbytes,), torch.uint8, f"pool segment {number}", "mem_pool")
        except PktError as error:
            warnings.warn(f"pkt.mem_pool: {error}", RuntimeWarning, stacklevel=2)
            return None
        address = heap.backend.base + allocation.block.offset
        self.segments[address] = allocation
        return address

    def free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        """Nothing: torch frees at another time on each rank, so the pool keeps a segment until the world ends."""


def adopt(tensor: torch.Tensor, world: World) -> SymmetricTensor | None:
    """`tensor` as a symmetric tensor over the same memory, if that lies in the world's pool, or in that of a world that
    it is a team of; else None.

    The result does not keep `tensor` alive: once `tensor` is gone, torch may use the memory for another.
    """
    address, itemsize = tensor.data_ptr(), tensor.dtype.itemsize
    pools = [(w.heap, w.lasting[_KEY][1]) for w in world.lineage if _KEY in w.lasting]
    for heap, start, allocation in ((h, *segment) for h, pool in pools for segment in pool.segments.items()):
        if start <= address < start + allocation.block.nbytes:
            segment = heap.tensor(allocation)
            elements = segment[: segment.numel() // itemsize * itemsize].view(tensor.dtype)
            view = elements.as_strided(tensor.size(), tensor.stride(), (address - start) // itemsize)
            return symmetric_over(view, allocation)
    return None


def mem_pool(world: World | None = None) -> torch.cuda.MemPool:
    """The world's pool for torch.cuda.use_mem_pool: torch allocates from this rank's part of the symmetric heap.

    Every rank must make the same allocations in it. Raises Unsupported where there is no GPU.
    """
    world = world or current_world("pkt.mem_pool")
    if world.torch_device.type != "cuda" or not torch.cuda.is_available():
        raise Unsupported.no_gpu("pkt.mem_pool", "found no CUDA GPU for torch's allocator to serve")

    if _KEY not in world.lasting:
        segments = SegmentAllocator(world)
        allocate = ctypes.cast(segments.allocate_pointer, ctypes.c_void_p).value or 0
        free = ctypes.cast(segments.free_pointer, ctypes.c_void_p).value or 0
        allocator = torch._C._cuda_customAllocator(allocate, free)
        world.lasting[_KEY] = torch.cuda.MemPool(allocator), segments
    return world.lasting[_KEY][0]


def outside_pools(make: Callable[[], T], device: torch.device) -> T:
    """What `make()` returns: ordinary tensors on `device` that live on after the call of an operator.

    torch.compile(mode="reduce-overhead") runs a function with all memory of its thread from the pool of a CUDA graph,
    and refuses to record the graph if anything but results lives on there. So `make` runs in another thread."""
    from concurrent.futures import ThreadPoolExecutor

    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if on_gpu else None

    def made() -> T:
        with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()
