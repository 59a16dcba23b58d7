"""The kernels: `decode_kernel` is the whole operator in one launch, or one rank's part. Behind this part comes
`exchange_kernel`, or an all-gather and `combine_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx, sync

from . import attention, merging

FEW = tl.constexpr(2)
"""Parts of a unit that a thread takes at once, in one flight, where there are fewer than MANY."""


@triton.jit
def decode_kernel(p, world, TAKE: tl.constexpr, RUNS: tl.constexpr, MANY: tl.constexpr):
    """1. Each program attends over its share of the tiles. A unit that one program has all of is put to the ranks, a
    part of a unit into this rank's memory. 2. Each program merges the parts of some rows and puts them to the ranks.
    3. Each takes some rows of all ranks, merges them, and stores the result.

    Why it cannot deadlock: nobody waits in 1; 2 waits for 1, and 3 for 1 and 2 of all ranks. Without FUSED there is no
    3, and the results of 1 and 2 are stored for the other kernels. On one rank there is no 3, and they are stored as
    the operator's. TAKE: rows that a program merges at a time in 3.
    RUNS: in 2 it has TAKE // RUNS rows at a time, and merges the parts of each in so many runs side by side. MANY:
    parts that a thread takes at once, in one flight, where a unit has as many."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = sync.peek_epoch(p.flags_ptr)
    lens = attention.lens_of_all(p)
    boxes = attention.boxes(p.PAGE, p)  # while lens are on their way
    tiles = attention.tiles_of_all(lens, p)
    share = attention.share_of(tiles, programs, p)
    units = p.B * p.UNITS
    end = tl.minimum((pid + 1) * share, tl.sum(tiles, 0) * p.UNITS)
    if pid * share < end:
        for unit in range(attention.unit_at(pid * share, tiles, p), attention.unit_at(end - 1, tiles, p) + 1):
            begin, count = attention.tiles_of(unit, tiles, p)
            first = tl.maximum(pid * share - begin, 0)
            last = tl.minimum(end - begin, count)
            part, lse = attention.attend(unit, first, last, boxes, p)
            i = tl.arange(0, p.ROWS)
            _, _, _, number, exists = attention.place_of(unit, i, p)
            if last - first == count:
                _report(part, lse, number, exists, launch, p, world)
            else:
                at = p.parts_ptr + (tl.cast(pid + unit, tl.int64) * p.ROWS + i) * (p.WORDS * 4)
                merging.put(at, part, lse, exists, launch, world.rank, world)
    ROWS: tl.constexpr = min(p.ROWS, p.SQ * p.GROUP)  # of a unit, that exist in some
    AT_ONCE: tl.constexpr = TAKE // RUNS
    MERGES: tl.constexpr = (ROWS + AT_ONCE - 1) // AT_ONCE  # tasks of a unit
    for task in range(pid, units * MERGES, programs):
        unit = task // MERGES
        i = task % MERGES * AT_ONCE + tl.arange(0, AT_ONCE)
        _, _, _, number, exists = attention.place_of(unit, i, p)
        exists = exists & (i < p.ROWS)
        begin, count = attention.tiles_of(unit, tiles, p)
        one = begin // share
        parts = (begin + count - 1) // share - one + 1
        if parts > 1:  # which lie one behind the other, because each next one is of the next program
            at = p.parts_ptr + (tl.cast(one + unit, tl.int64) * p.ROWS + i) * (p.WORDS * 4)
            if parts < MANY:
                part, lse = _all_parts(at, parts, exists, launch, p, world, FEW, RUNS)
            else:
                part, lse = _all_parts(at, parts, exists, launch, p, world, MANY, RUNS)
            _report(part, lse, number, exists, launch, p, world)
    EACH: tl.constexpr = (ROWS + TAKE - 1) // TAKE
    if p.FUSED and world.size > 1:
        for task in range(pid, units * EACH, programs):
            i = task % EACH * TAKE + tl.arange(0, TAKE)
            _, _, _, number, exists = attention.place_of(task // EACH, i, p)
            _take_and_store(number, exists & (i < p.ROWS), launch, p, world, TAKE)
    ptx.cta_barrier()
    pl.epoch(p.flags_ptr, world)


@triton.jit
def exchange_kernel(p, results_ptr, world, TAKE: tl.constexpr):
    """Put this rank's results to the ranks, TAKE rows at a time, then take those of all ranks and merge them. Nobody
    waits before all its rows are put. results_ptr: fp32 (rows, E + 1), of decode_kernel without FUSED."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = sync.peek_epoch(p.flags_ptr)
    rows = p.B * p.SQ * p.HEADS
    for task in range(pid, tl.cdiv(rows, TAKE), programs):
        number = task * TAKE + tl.arange(0, TAKE)
        part, lse = load_rows(results_ptr + tl.cast(number, tl.int64) * (p.E + 1), number < rows, p)
        _send(part, lse, number, number < rows, launch, p, world)
    if world.size > 1:
        for task in range(pid, tl.cdiv(rows, TAKE), programs):
            number = task * TAKE + tl.arange(0, TAKE)
            _take_and_store(number, number < rows, launch, p, world, TAKE)
    ptx.cta_barrier()
    pl.epoch(p.flags_ptr, world)


@triton.jit(do_not_specialize=["shares"])
def merge_kernel(p, parts_ptr, shares, world, TAKE: tl.constexpr, RUNS: tl.constexpr):
    """Merge this rank's parts of all rows and put the results to the ranks. Then take those of all ranks and merge
    them, a row at a time. Nobody waits before all its rows are put. Without FUSED, and on one rank, the results are
    stored instead. There is one KV head.

    parts_ptr: fp32 (shares + units, ROWS, E): [i + u] is the part of unit u that program i of `shares` has stored.
    Behind it (shares + units, ROWS): their lse. A program merges the parts of TAKE // RUNS rows at a time, in RUNS runs
    side by side."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    launch = sync.peek_epoch(p.flags_ptr)
    tiles = attention.tiles_of_all(attention.lens_of_all(p), p)
    share = attention.share_of(tiles, shares, p)
    AT_ONCE: tl.constexpr = TAKE // RUNS  # rows, which are of one unit
    EACH: tl.constexpr = (p.SQ * p.HEADS + AT_ONCE - 1) // AT_ONCE  # tasks of a sequence
    lses_ptr = parts_ptr + tl.cast(shares + p.B * p.UNITS, tl.int64) * (p.ROWS * p.E)
    for task in range(pid, p.B * EACH, programs):
        row = task % EACH * AT_ONCE
        unit = task // EACH * p.UNITS + row // p.ROWS
        begin, count = attention.tiles_of(unit, tiles, p)
        one = begin // share
        parts = (begin + count - 1) // share - one + 1
        i = row + tl.arange(0, AT_ONCE)
        exists = i < p.SQ * p.HEADS
        first = (one + unit) * p.ROWS + i % p.ROWS
        part, lse = _merged_rows(parts_ptr, lses_ptr, first, parts, exists, p, RUNS)
        _report(part, lse, task // EACH * (p.SQ * p.HEADS) + i, exists, launch, p, world)
    if p.FUSED and world.size > 1:
        for row in range(pid, p.B * p.SQ * p.HEADS, programs):
            number = row + tl.arange(0, 1)
            _take_and_store(number, number >= 0, launch, p, world, 1)
    ptx.cta_barrier()
    pl.epoch(p.flags_ptr, world)


@triton.jit
def _merged_rows(parts_ptr, lses_ptr, first, parts, exists, p, RUNS: tl.constexpr):
    """(fp32 (rows, COLUMNS), their lse): the parts of some rows, merged. first: (rows,), where the first part of each
    row is among the rows of all parts; each next one is ROWS further. RUNS: as of `_all_parts`."""
    ROWS: tl.constexpr = first.shape[0]
    TOGETHER: tl.constexpr = 2  # parts of a run, in one flight
    run = tl.arange(0, RUNS)
    begin = _of_runs(run * parts // RUNS, ROWS, RUNS)
    end = _of_runs((run + 1) * parts // RUNS, ROWS, RUNS)
    row = _of_rows(first, RUNS)
    inside = _of_rows(exists, RUNS)
    e = tl.arange(0, p.COLUMNS)
    most, total, acc = no_rows(p, ROWS * RUNS)
    for turn in range(0, tl.cdiv(parts, RUNS), TOGETHER):
        for j in tl.static_range(TOGETHER):
            there = inside & (begin + turn + j < end)
            at = row + (begin + turn + j) * p.ROWS
            lse = tl.load(lses_ptr + at, mask=there, other=float("-inf"))
            place = parts_ptr + tl.cast(at, tl.int64)[:, None] * p.E + e[None, :]
            part = tl.load(place, mask=there[:, None] & (e < p.E)[None, :], other=0)
            most, total, old, new = merging.weights(most, total, lse)
            acc = acc * old[:, None] + part * new[:, None]
    return merging.divided(*merging.joined(acc, most, total, RUNS))


@triton.jit
def combine_kernel(p, ranks: tl.constexpr, TAKE: tl.constexpr):
    """Merge the ranks' results, p.slots_ptr fp32 (ranks, rows, E + 1), TAKE rows in a program."""
    rows = p.B * p.SQ * p.HEADS
    number = tl.program_id(0) * TAKE + tl.arange(0, TAKE)
    merged = no_rows(p, TAKE)
    for rank in tl.static_range(ranks):
        row = p.slots_ptr + (tl.cast(rank * rows, tl.int64) + number) * (p.E + 1)
        merged = with_rows(merged, row, number < rows, p)
    most, total, acc = with_sink(merged[0], merged[1], merged[2], number, number < rows, p)
    part, lse = merging.divided(acc, most, total)
    store_rows(part, lse, number, number < rows, p)


@triton.jit
def load_rows(row, exists, p):
    """Rows of results, fp32 (TAKE, COLUMNS), and their lse, (TAKE,). row: (TAKE,) pointers to E + 1 fp32."""
    e = tl.arange(0, p.COLUMNS)
    part = tl.load(row[:, None] + e[None, :], mask=exists[:, None] & (e < p.E)[None, :], other=0)
    return part, tl.load(row + p.E, mask=exists, other=0)


@triton.jit
def no_rows(p, TAKE: tl.constexpr):
    """No results, to merge others into: (greatest lse, sum of weights, the weighted sums)."""
    zeros = tl.zeros((TAKE, p.COLUMNS), tl.float32)
    return tl.full((TAKE,), float("-inf"), tl.float32), tl.zeros((TAKE,), tl.float32), zeros


@triton.jit
def with_rows(merged, row, exists, p):
    """`merged` with the results at `row`, see `load_rows`."""
    most, total, acc = merged
    part, lse = load_rows(row, exists, p)
    most, total, old, new = merging.weights(most, total, lse)
    return most, total, acc * old[:, None] + part * new[:, None]


@triton.jit
def _half(launch, p):
    return p.slots_ptr + tl.cast(launch & 1, tl.int64) * p.room * 4


@triton.jit
def _slot(p):
    """int32 from a rank's words to the next rank's."""
    return tl.cast(p.B, tl.int64) * (p.SQ * p.HEADS * p.WORDS * 4)


@triton.jit
def _report(part, lse, number, exists, launch, p, world):
    """Send this rank's result of some rows; without FUSED store it."""
    if p.FUSED:
        _send(part, lse, number, exists, launch, p, world)
    else:
        e = tl.arange(0, p.COLUMNS)
        row = p.slots_ptr + tl.cast(number, tl.int64) * (p.E + 1)
        tl.store(row[:, None] + e[None, :], part, mask=exists[:, None] & (e < p.E)[None, :])
        tl.store(row + p.E, lse, mask=exists)


@triton.jit
def _send(part, lse, number, exists, launch, p, world):
    """Put this rank's result of some rows to every rank, itself too. One rank stores it as the operator's."""
    if world.size == 1:
        _finish(part, lse, number, exists, p)
    else:
        rank = tl.cast(world.rank, tl.int32)
        at = _half(launch, p) + rank * _slot(p) + tl.cast(number, tl.int64) * (p.WORDS * 4)
        for d in tl.static_range(1, world.size + 1):
            merging.put(at, part, lse, exists, launch, (rank + d) % world.size, world)


@triton.jit
def _take_and_store(number, exists, launch, p, world, TAKE: tl.constexpr):
    """Merge all ranks' results of some rows as they come, and store them."""
    at = _half(launch, p) + tl.cast(number, tl.int64) * (p.WORDS * 4)
    merged = merging.none(TAKE, p.COLUMNS)
    merged = merging.take(merged, at, _slot(p), 0, world.size, exists, launch, world, p.COLUMNS, world.size)
    _store(merged, number, exists, p)


@triton.jit
def _all_parts(at, parts, exists, launch, p, world, TOGETHER: tl.constexpr, RUNS: tl.constexpr):
    """Merge all parts of some rows: (the rows, fp32 (rows, COLUMNS); their lse). The parts of each row are RUNS of
    about as many, which are merged side by side, TOGETHER parts at a time. Where less is left of a run it begins
    sooner, so that they are as many, and what is not of the run weighs nothing."""
    apart: tl.constexpr = p.ROWS * p.WORDS * 4
    ROWS: tl.constexpr = at.shape[0]
    run = tl.arange(0, RUNS)
    begin = _of_runs(run * parts // RUNS, ROWS, RUNS)
    end = _of_runs((run + 1) * parts // RUNS, ROWS, RUNS)
    there = _of_rows(at, RUNS)
    inside = _of_rows(exists, RUNS)
    merged = merging.none(ROWS * RUNS, p.COLUMNS)
    for turn in range(tl.cdiv(tl.cdiv(parts, RUNS), TOGETHER)):
        wanted = begin + turn * TOGETHER
        first = tl.minimum(wanted, parts - TOGETHER)
        found = there + tl.cast(first, tl.int64) * apart
        merged = merging.take(
            merged, found, apart, wanted - first, end - first, inside, launch, world, p.COLUMNS, TOGETHER
        )
    return merging.divided(*merging.joined(merging.sums(merged), merged[0], merged[1], RUNS))


@triton.jit
def _of_rows(x, RUNS: tl.constexpr):
    """x, (rows,), for all runs of each row: (rows * RUNS,)."""
    return tl.reshape(tl.broadcast_to(x[:, None], (x.shape[0], RUNS)), (x.shape[0] * RUNS,))


@triton.jit
def _of_runs(x, ROWS: tl.constexpr, RUNS: tl.constexpr):
    """x, (RUNS,), for all rows: (ROWS * RUNS,)."""
    return tl.reshape(tl.broadcast_to(x[None, :], (ROWS, RUNS)), (ROWS * RUNS,))


@triton.jit
def with_sink(most, total, acc, number, exists, p):
    """The sink: a key of value 0."""
    if p.sinks_ptr is not None:
        sink = tl.load(p.sinks_ptr + number % p.HEADS, mask=exists, other=0)
        most, total, old, _ = merging.weights(most, total, sink)
        acc = acc * old[:, None]
    return most, total, acc


@triton.jit
def _store(merged, number, exists, p):
    acc = merging.sums(merged)
    most, total, acc = with_sink(merged[0], merged[1], acc, number, exists, p)
    rows, lse = merging.divided(acc, most, total)
    store_rows(rows, lse, number, exists, p)


@triton.jit
def _finish(part, lse, number, exists, p):
    """Store rows that are merged but for the sink."""
    total = tl.where(lse == float("-inf"), 0.0, 1.0)
    most, total, acc = with_sink(lse, total, part, number, exists, p)
    rows, lse = merging.divided(acc, most, total)
    store_rows(rows, lse, number, exists, p)


@triton.jit
def store_rows(rows, lse, number, exists, p):
    """Store finished rows, and their lse."""
    e = tl.arange(0, p.COLUMNS)
    out = p.out_ptr + tl.cast(number, tl.int64)[:, None] * p.E + e[None, :]
    tl.store(out, rows.to(p.out_ptr.dtype.element_ty), mask=exists[:, None] & (e < p.E)[None, :])
    tl.store(p.lse_ptr + number, lse, mask=exists)
