"""The allocator: no overlap, coalescing, first fit, the same on every rank, fast with many live blocks."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkt.runtime.backend import ALIGNMENT
from pkt.runtime.memory.ledger import CHUNK, Ledger


class Plain:
    """The same allocator as a plain list of holes, which Ledger must equal."""

    def __init__(self, capacity, gap, alignment=256):
        self.gap, self.alignment, self.gaps, self.live = gap, alignment, [(0, capacity)], {}

    def allocate(self, nbytes):
        need = max(1, -(-(nbytes + self.gap) // self.alignment)) * self.alignment
        for i, (offset, size) in enumerate(self.gaps):
            if size >= need:
                self.gaps[i : i + 1] = [(offset + need, size - need)] if size > need else []
                self.live[offset] = need
                return offset
        return None

    def free(self, offset):
        joined = []
        for start, size in sorted([*self.gaps, (offset, self.live.pop(offset))]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self.gaps = joined


def check(ledger):
    """Live blocks and holes tile the range exactly, and no two holes touch."""
    pieces = sorted([*ledger.live.items(), *ledger.holes()])
    at = 0
    for offset, size in pieces:
        assert offset == at, "overlap or gap"
        assert offset % ALIGNMENT == 0
        assert size > 0
        at += size
    assert at == ledger.capacity
    holes = ledger.holes()
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(holes))
    assert ledger.free_bytes == sum(n for _, n in holes)
    assert ledger.largest == max((n for _, n in holes), default=0)


@pytest.mark.parametrize("gap", [0, 300])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=400), st.integers(0, 1 << 30))
def test_the_ledger_equals_a_simple_allocator(gap, steps, seed):
    pick = random.Random(seed)
    ledger, plain = Ledger(1 << 16, gap), Plain(1 << 16, gap)
    for allocate, nbytes in steps:
        if allocate or not plain.live:
            assert ledger.allocate(nbytes) == plain.allocate(nbytes)
        else:
            offset = pick.choice(sorted(plain.live))
            ledger.free(offset)
            plain.free(offset)
        assert ledger.holes() == plain.gaps
    check(ledger)


def test_100_000_random_steps_without_overlap_and_the_same_on_four_ranks():
    pick = random.Random(7)
    ledgers = [Ledger(4 << 20) for _ in range(4)]
    live, failed = [], 0
    for step in range(100_000):
        if live and pick.random() < 0.45:
            at = pick.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            offset = live.pop()
            for ledger in ledgers:
                ledger.free(offset)
        else:
            nbytes = int(2 ** pick.uniform(0, 15))
            offsets = {ledger.allocate(nbytes) for ledger in ledgers}
            assert len(offsets) == 1
            (offset,) = offsets
            failed += offset is None
            if offset is not None:
                live.append(offset)
        if step % 5000 == 0:
            for ledger in ledgers:
                check(ledger)
    for offset in live:
        for ledger in ledgers:
            ledger.free(offset)
    for ledger in ledgers:
        assert ledger.holes() == [(0, 4 << 20)]
    assert len(live) > 500
    assert failed > 500


def test_a_full_ledger_stays_as_it_was():
    ledger = Ledger(1024)
    a, b = ledger.allocate(512), ledger.allocate(256)
    assert ledger.allocate(512) is None
    assert (ledger.free_bytes, ledger.largest, set(ledger.live)) == (256, 256, {a, b})
    ledger.free(a)
    assert ledger.holes() == [(0, 512), (768, 256)]
    check(ledger)


def test_empty_allocations_have_addresses_of_their_own():
    ledger = Ledger(1024)
    assert [ledger.allocate(0) for _ in range(5)] == [0, 256, 512, 768, None]


def test_freeing_an_unknown_offset_raises():
    ledger = Ledger(1024)
    offset = ledger.allocate(10)
    ledger.free(offset)
    with pytest.raises(KeyError):
        ledger.free(offset)


def test_many_holes_split_and_vanish():
    ledger = Ledger(1 << 20)
    offsets = [ledger.allocate(256) for _ in range(4096)]
    for offset in offsets[::2]:
        ledger.free(offset)
    assert len(ledger.holes()) == 2048 > 8 * CHUNK
    check(ledger)
    for offset in offsets[1::2]:
        ledger.free(offset)
    assert ledger.holes() == [(0, 1 << 20)]


def test_a_chunk_that_begins_later_is_still_found_by_address():
    """The first hole of a chunk gives its beginning away; then blocks before it are freed into the chunk before."""
    ledger, plain = Ledger(1 << 20), Plain(1 << 20, 0)
    offsets = [ledger.allocate(512) for _ in range(2048)]
    assert offsets == [plain.allocate(512) for _ in range(2048)]
    for offset in offsets[::2]:
        ledger.free(offset)
        plain.free(offset)
    assert len(ledger._chunks) > 4
    for _ in range(600):  # the first hole of each chunk loses its first half, chunk after chunk
        assert ledger.allocate(256) == plain.allocate(256)
        assert ledger._starts == [chunk.offsets[0] for chunk in ledger._chunks]
    for offset in [*offsets[1::2], *[o for o in plain.live if o not in offsets[1::2]]]:
        if offset in plain.live:
            ledger.free(offset)
            plain.free(offset)
            assert ledger.holes() == plain.gaps
    check(ledger)
