"""The heap over a backend: collective, checked, named, and nothing lost when it is full."""

import random
import threading
from functools import partial

import pytest
import torch

import pkt
from pkt.errors import AllocationMismatch, Closed, HeapFull, ShapeError, SignalIndexError, UseAfterFree
from pkt.language.world import STATUS_BYTES
from pkt.runtime.backend import GUARD_WORD, SIGNAL_GUARD, SIGNAL_HEADER
from pkt.runtime.memory.heap import heap_bytes

from .conftest import CAPACITY


def errors_of(results):
    return [r for r in results if isinstance(r, BaseException) and not isinstance(r, threading.BrokenBarrierError)]


def test_offsets_agree_and_the_backend_is_told(ranks):
    def main(world):
        x = pkt.empty((100, 3), dtype=torch.bfloat16)
        y = pkt.zeros(5, name="mine")
        x.free()
        return [(what, block) for what, block in world.backend.told if block], y._allocation.block.name

    told, names = zip(*ranks(3, main))
    assert told[0] == told[1] == told[2]
    kinds = [(what, block.kind, block.offset, block.nbytes, block.name) for what, block in told[0]]
    assert kinds == [
        ("allocated", "status", 0, STATUS_BYTES, "status"),
        ("allocated", "data", STATUS_BYTES, 600, "x"),
        ("allocated", "data", STATUS_BYTES + 768, 20, "mine"),
        ("freed", "data", STATUS_BYTES, 600, "x"),
    ]
    assert names[0] == "mine"


def test_every_rank_reports_a_full_heap_and_loses_nothing(ranks):
    def main(world):
        half = pkt.empty(CAPACITY // 2, dtype=torch.uint8)
        before = (world.heap.ledger.free_bytes, world.heap.ledger.largest)
        with pytest.raises(HeapFull) as caught:
            big = pkt.empty(CAPACITY // 2, dtype=torch.uint8)  # noqa: F841
        assert (world.heap.ledger.free_bytes, world.heap.ledger.largest) == before
        half.free()
        again = pkt.empty(CAPACITY - STATUS_BYTES, dtype=torch.uint8)  # all freed memory comes back
        return str(caught.value), again.numel()

    (message, count), *others = ranks(3, main)
    said = "heap full: wanted 512 KiB for 'big', free 508 KiB, largest block 508 KiB; raise heap= or PKT_HEAP"
    assert message == f"rank 0: {said}"
    assert all(m == message.replace("rank 0", f"rank {r}") for r, (m, _) in enumerate(others, 1))
    assert count == CAPACITY - STATUS_BYTES


def test_freed_memory_is_not_reused_before_a_collective_point(ranks):
    def main(world):
        a = pkt.empty(256, dtype=torch.uint8)
        where = a.data_ptr()
        a.free()
        b = pkt.empty(256, dtype=torch.uint8)
        world.barrier()
        c = pkt.empty(256, dtype=torch.uint8)
        return b.data_ptr() != where, c.data_ptr() == where

    assert ranks(2, main) == [(True, True)] * 2


def test_the_heap_grows_by_reserving_more(ranks, monkeypatch):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", 1 << 16)

    def main(world):
        for _ in range(3):
            pkt.empty(1 << 16, dtype=torch.uint8)
        return world.backend.reserved

    assert ranks(2, main)[0] == [1 << 16, 1 << 17, 1 << 18]


def test_a_failed_growth_loses_nothing(ranks, monkeypatch):
    monkeypatch.setattr("pkt.runtime.memory.heap.FIRST_BYTES", 1 << 16)

    def main(world):
        def refuse(nbytes):
            raise HeapFull.no_memory(nbytes, "cuda:0", {0: "out of memory"})

        reserve, world.backend.reserve = world.backend.reserve, refuse
        free = world.heap.ledger.free_bytes
        with pytest.raises(HeapFull, match="growing it to 128 KiB on cuda:0 failed: rank 0: out of memory"):
            pkt.empty(1 << 16, dtype=torch.uint8)
        assert world.heap.ledger.free_bytes == free
        world.backend.reserve = reserve
        return pkt.empty(1 << 16, dtype=torch.uint8).numel()

    assert ranks(2, main) == [1 << 16] * 2


DIFFERENCES = ("shape", "dtype", "kind", "op")


def diverge(world, odd, difference):
    """Two allocations alike, then one where rank `odd` differs in one respect."""
    pkt.empty(8)
    kept = pkt.empty(16)
    if world.rank == odd and difference == "shape":
        size, dtype = (2048,), torch.bfloat16
    elif world.rank == odd and difference == "dtype":
        size, dtype = (1024,), torch.float16
    else:
        size, dtype = (1024,), torch.bfloat16
    if world.rank == odd and difference == "kind":
        return pkt.signals(1024)
    if world.rank == odd and difference == "op":
        return kept.free()
    return pkt.empty(size, dtype=dtype)


def test_1000_random_divergences_are_named(ranks):
    pick = random.Random(3)
    seen = set()
    for _ in range(1000):
        size = pick.randint(2, 5)
        odd, difference = pick.randrange(size), pick.choice(DIFFERENCES)
        results = ranks(size, partial(diverge, odd=odd, difference=difference), broken_ok=True)
        errors = errors_of(results)
        assert errors, "nobody noticed"
        assert all(isinstance(e, AllocationMismatch) for e in errors), errors
        message = str(errors[0])
        assert message.startswith("heap call differs: " if difference == "op" else "allocation #3 differs: "), message
        alone = [who for who in message.split(": ") if who.endswith(f"rank {odd}") and "ranks" not in who]
        assert alone, f"rank {odd} not named alone: {message}"
        seen.add(difference)
    assert seen == set(DIFFERENCES)


def test_ranks_may_allocate_and_free_on_different_lines(ranks):
    def main(world):
        if world.rank == 0:
            x, longer = pkt.ones(4), pkt.zeros(2, name="a name of rank 0")
        else:
            x = pkt.ones(4)
            longer = pkt.zeros(2)
        world.barrier()
        if world.rank == 0:
            longer.free()
        else:
            longer.free()
        world.barrier()
        return x.sum().item()

    assert ranks(3, main) == [4.0] * 3


def test_a_part_of_a_tensor_is_not_freed(ranks):
    def main(world):
        x = pkt.ones(2, 8)
        for part in (x[0], x[:, 2:], x[:1]):
            with pytest.raises(pkt.ShapeError, match="free: tensor: found a part of 'x', wanted the whole tensor"):
                part.free()
        assert x.sum().item() == 16
        x.view(16).free()
        with pytest.raises(UseAfterFree):
            x.sum()

    ranks(2, main)


def test_the_message_of_a_divergence(ranks):
    error = errors_of(ranks(2, lambda world: diverge(world, 1, "shape"), broken_ok=True))[0]
    file = "test_heap.py"
    assert str(error).startswith(f"allocation #3 differs: rank 0: (1024,) bf16 at {file}:")
    assert f"; rank 1: (2048,) bf16 at {file}:" in str(error)
    error = errors_of(ranks(2, lambda world: diverge(world, 1, "op"), broken_ok=True))[0]
    assert f"rank 0: allocates #3 (1024,) bf16 at {file}:" in str(error)
    assert f"rank 1: frees #2 (16,) fp32 at {file}:" in str(error)


def test_use_after_free_and_after_close_raises(ranks):
    def main(world):
        x = pkt.zeros(4, 4)
        row = x[1]
        x.free()
        for use in (
            lambda: x + 1,
            lambda: row.sum(),
            x.data_ptr,
            lambda: x.peer(1),
            lambda: row.peer(0),
            x.free,
            x.plain,
        ):
            with pytest.raises(UseAfterFree, match=r"uses 'x' after it was freed at test_heap.py:\d+"):
                use()
        assert "no longer allocated" in repr(x)
        assert x.shape == (4, 4)
        y = pkt.zeros(2)
        world.close()
        world.close()
        for use in (
            y.data_ptr,
            lambda: y + 1,
            world.barrier,
            lambda: world.heap,
            lambda: pkt.zeros(3, world=world),
            y.free,
        ):
            with pytest.raises(Closed, match="closed"):
                use()
        return world._backend.closed

    assert ranks(2, main) == [1, 1]


def test_signals_have_an_epoch_word_and_guards(ranks):
    def main(world):
        flags = pkt.signals(7)
        assert flags.shape == (7,)
        assert flags.dtype == torch.int32
        assert flags.count_nonzero() == 0
        words = world.heap.words_of(flags._allocation)
        first = SIGNAL_HEADER // 4
        assert flags.data_ptr() == words.data_ptr() + SIGNAL_HEADER
        assert words.numel() == first + 7 + SIGNAL_GUARD // 4
        assert words[:2].tolist() == [0, 0]
        assert set(words[2:first].tolist()) == set(words[first + 7 :].tolist()) == {GUARD_WORD}
        world.check()
        found = []
        for at in (-1, 7, 7 + SIGNAL_GUARD // 4 - 1, 2 - first):
            saved = words[first + at].item()
            words[first + at] = 3
            with pytest.raises(SignalIndexError) as caught:
                world.check()
            found.append(str(caught.value))
            words[first + at] = saved
        words[0] = 41  # the epoch word and the counters are not guards
        flags[6] = 9
        world.check()
        words[first + 7] = 1
        with pytest.raises(SignalIndexError, match=r"close\(\)"):
            world.close()
        assert world.closed
        return found

    found = ranks(1, main)[0]
    assert found[0].startswith(
        "rank 0: check(): the guard word at flags[-1] was overwritten, found 0x3: some rank signalled"
    )
    assert "flags[7]" in found[1]


def test_freeing_overwritten_signals_frees_and_raises(ranks):
    def main(world):
        flags = pkt.signals(2)
        if world.rank == 1:
            world.heap.words_of(flags._allocation, 0)[SIGNAL_HEADER // 4 + 2] += 1
        world.barrier()
        try:
            flags.free()
        except SignalIndexError as error:
            return str(error), len(world.heap.live)
        return "", len(world.heap.live)

    (said, live), (other, other_live) = ranks(2, main)
    assert "free(): the guard word at flags[2]" in said
    assert other == ""
    assert live == other_live == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8GiB", 8 << 30),
        ("512M", 512 << 20),
        ("1.5 GiB", 3 << 29),
        (65536, 65536),
        ("2tb", 2 << 40),
        ("64KB", 65536),
    ],
)
def test_heap_sizes(text, wanted):
    assert heap_bytes(text) == wanted


def test_heap_sizes_from_the_environment_and_wrong_ones(monkeypatch):
    for text, nbytes in (("3MiB", 3 << 20), ("", 1 << 30)):
        monkeypatch.setenv("PKT_HEAP", text)
        assert heap_bytes(None) == nbytes
    for wrong in ("lots", "-1", "", 0, "1 PiB"):
        with pytest.raises(ShapeError, match="heap= or PKT_HEAP"):
            heap_bytes(wrong)
