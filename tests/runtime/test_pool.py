"""torch's own allocations in the heap: segments, and the tensors torch makes in them."""

import ctypes

import pytest
import torch

import pkt
from pkt.errors import NotSymmetric, Unsupported
from pkt.runtime.memory.pool import _KEY, SegmentAllocator

from .conftest import CAPACITY


def at(address, count):
    """A tensor as torch makes it in a part of a segment: its storage is not the segment's."""
    return torch.frombuffer((ctypes.c_uint8 * (4 * count)).from_address(address), dtype=torch.int32)


def test_tensors_of_a_segment_are_symmetric(ranks):
    def main(world):
        pool = SegmentAllocator(world)
        world.lasting[_KEY] = (None, pool)
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        address = call(ctypes.cast(pool.allocate_pointer, ctypes.c_void_p).value)(1 << 16, 0, None)  # as C calls it
        y = at(address + 512, 12).view(3, 4)
        y.fill_(world.rank)
        world.barrier()
        x = pkt.symmetric(y, "y", world, shape=(3, 4))
        assert x.data_ptr() == y.data_ptr()
        assert x[1:].peer(1 - world.rank).eq(1 - world.rank).all()
        assert pkt.symmetric(y.T, "y", world).peer(1 - world.rank).stride() == (1, 4)
        behind = at(pool.allocate(1 << 16, 0, None), 3)  # begins where the first segment ends
        assert behind.data_ptr() == address + (1 << 16)
        assert pkt.symmetric(behind, "behind", world).symbol == "pool segment 2"
        with pytest.raises(NotSymmetric):
            pkt.symmetric(torch.zeros(3), "z", world)
        assert pool.allocate(2 * CAPACITY, 0, None) is None

    with pytest.warns(RuntimeWarning, match=r"pkt.mem_pool: rank \d: heap full: wanted"):
        ranks(2, main)


def test_without_a_gpu(ranks):
    def main(world):
        with pytest.raises(Unsupported, match="pkt.mem_pool: found no CUDA GPU"):
            pkt.mem_pool()

    ranks(1, main)


@pytest.mark.gpu
def test_an_operators_output_can_be_read_by_peers():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")

    def main(world):
        a = torch.full((512, 512), float(world.rank + 1), device="cuda")
        with torch.cuda.use_mem_pool(pkt.mem_pool()):
            y = a @ torch.eye(512, device="cuda")
        x = pkt.symmetric(y, "y", world)
        world.barrier()
        value = x.peer(1 - world.rank).mean().item()
        world.barrier()
        return value

    assert pkt.launch(main, 2, "cuda", multicast=False) == [2.0, 1.0]
