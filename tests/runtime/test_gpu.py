"""The runtime on real GPUs: pytest -m gpu tests/runtime. No test here asks for multicast."""

import time

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.runtime.workers.workers import warm

pytestmark = pytest.mark.gpu


def ranks():
    return [n for n in (2, 3, 4) if n <= torch.cuda.device_count()] or [2]


def gpus(fn, count, *args, **options):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return pkt.launch(fn, count, "cuda", args, multicast=False, timeout=20, **options)


@triton.jit
def to_the_next(x_ptr, world, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peer = (world.rank + 1) % world.size
    value = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(x_ptr + n + tl.cast(peer - world.rank, tl.int64) * (world.stride // 4) + offs, value, mask=offs < n)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_peers_find_memory_by_arithmetic(count):
    def main(world):
        n = 1 << 20
        x = pkt.full((2, n), float(world.rank + 1))
        to_the_next[(n // 1024,)](x, world.device, n, BLOCK=1024)
        world.barrier()
        before = (world.rank - 1) % world.size
        assert x[1].eq(before + 1).all()
        assert x[0].peer(before).eq(before + 1).all(), "host copies reach peers too"
        assert world.num_sms == torch.cuda.get_device_properties(world.rank).multi_processor_count
        return world.rank, world.multicast

    assert gpus(main, count) == [(r, False) for r in range(count)]


def test_the_heap_grows_beyond_a_gigabyte_and_views_cross_its_chunks():
    def main(world):
        x = pkt.empty(3 << 28, dtype=torch.int32)  # 3 GiB
        x.fill_(world.rank)
        world.barrier()
        return x.peer((world.rank + 1) % world.size)[:: 1 << 26].unique().tolist()

    assert gpus(main, 2, heap="4GiB") == [[1], [0]]


def test_allocations_do_not_wait_for_the_gpu():
    def main(world):
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep = torch.cuda.Event()
        asleep.record()
        for x in [pkt.empty(1000) for _ in range(1000)]:
            x.free()
        return asleep.query()

    assert gpus(main, 2) == [False, False]


def test_a_world_opens_in_time_and_leaves_no_memory():
    def main(world):
        return time.time(), torch.cuda.mem_get_info()[0]

    count = ranks()[-1]
    gpus(main, count, heap="1GiB")
    starts = time.time()
    found = [gpus(main, count, heap="1GiB") for _ in range(5)]
    print(f"a warm call with a 1 GiB heap on {count} ranks: {(time.time() - starts) / 5:.3f} s")
    assert found[0][0][1] == found[-1][0][1], "free device memory inside the call stays the same"
    assert time.time() - starts < 5 * 1.5
    assert warm(count).alive


def test_the_times_of_a_warm_call():
    """Prints the cost of a world for three heap sizes. The cost decides whether to keep worlds between calls."""
    count, seconds = ranks()[-1], {}
    for heap in ("16MiB", "256MiB", "1GiB"):  # a heap takes at most 1 GiB at once
        gpus(lambda world: None, count, heap=heap)
        calls = []
        for _ in range(10):
            start = time.time()
            began = gpus(lambda world: time.time(), count, heap=heap)
            calls.append((max(began) - start, time.time() - max(began)))
        seconds[heap] = min(sum(call) for call in calls)
        opens, closes = (1e3 * min(call[i] for call in calls) for i in (0, 1))
        print(f"{count} ranks, {heap}: {opens:.1f} ms until the function runs, {closes:.1f} ms after it")
    assert seconds["1GiB"] < 0.5


@triton.jit
def spin(flag_ptr, world, BLOCK: tl.constexpr):
    while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0) & (
        tl.atomic_add(world.status, 0, sem="acquire", scope="sys") == 0
    ):
        pass


def test_the_abort_word_can_be_written_while_a_kernel_spins():
    def main(world):
        flags = pkt.signals(1)
        if world.rank == 0:
            spin[(1,)](flags, world.device, BLOCK=1)
            start = time.perf_counter()
            world.backend.driver.write_words(world.backend.base, [1], world.rank)
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            world.backend.driver.write_words(world.backend.base, [0], world.rank)
        else:
            took = 0.0
        return took

    assert max(gpus(main, 2)) < 0.5
