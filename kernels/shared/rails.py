"""Tokens over several nodes: what crosses the network, in which order, and how the ranks of a node learn of it.

Program q of every rank has the q-th piece of the rank's tokens. Over the network a piece goes along the rail: to the
rank with this local rank on another node. The ranks of that node load from there what is theirs.

A *note* says what of a piece is for a node: [n, first, slots], int32: the number of tokens in the piece, its first
token, and (n, NEAR) the slot of each token on each rank of the node, -1 for none. A *line* is what is sent for a token.
Lines of a piece lie one after the other, those of tokens that are not for the node stay out, and neighbours go in one
put. Every put has a signal of its own, so no fence is needed. The signals of a piece add the same to its counter in
every launch, whatever tokens there are: so a rank that has waited for all pieces has heard of all ranks.

After DeepEP's and Triton-distributed's dispatch over nodes, which send a token once to a node. On GPUs it has
run on two nodes of one host, and over no network. No size here is measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.memory.tensor import SymmetricTensor

from . import nodes


class Pieces(NamedTuple):
    """Notes and counters, on every rank. `programs` is the number of programs of a launch."""

    leaving: Any  # int32 (nodes, programs, note): [k]: my notes for node k
    notes: Any  # int32 (halves, nodes, programs, note): [:, k]: those of the rail's rank on node k; [:, node]: mine
    arrived: Any  # int32 (nodes, programs): what has come from a node; a note adds 1, the lines of a piece add `each`
    there: Any  # int32 (NEAR, programs): pieces that are at the ranks of this node
    each: Any  # tokens of a piece, at most
    NEAR: tl.constexpr  # ranks of a node
    NEAR2: tl.constexpr  # the next power of two
    MANY: tl.constexpr  # tokens written down at a time


@triton.jit
def place(world, r):
    """(my node, my rank in it)"""
    rank = tl.cast(world.rank, tl.int32)
    return rank // r.NEAR, rank % r.NEAR


@triton.jit
def note(ptr, node, half, world, r):
    """This program's note of `node` in `leaving` or `notes`."""
    NODES: tl.constexpr = world.size // r.NEAR
    number = (half * NODES + node) * tl.num_programs(0) + tl.program_id(0)
    return nodes.slot(ptr, number, 2 + r.each * r.NEAR)


@triton.jit
def line(ptr, node, half, n, world, r):
    """The first of this program's lines of `node`, each of n elements."""
    NODES: tl.constexpr = world.size // r.NEAR
    number = (half * NODES + node) * tl.num_programs(0) + tl.program_id(0)
    return nodes.slot(ptr, number, tl.cast(r.each, tl.int64) * n)


@triton.jit
def write(places_ptr, first, last, half, world, r):
    """Write this program's notes of my tokens [first, last). places_ptr: int32 (T, size): the slot of each token on
    each rank, -1 for none."""
    node, _ = place(world, r)
    m = tl.arange(0, r.NEAR2)[None, :]
    for k in range(world.size // r.NEAR):
        to = note(r.leaving, k, 0, world, r)
        if k == node:
            to = note(r.notes, k, half, world, r)
        tl.store(to, last - first)
        tl.store(to + 1, first)
        for start in range(first, last, r.MANY):
            t = start + tl.arange(0, r.MANY)[:, None]
            inside = (t < last) & (m < r.NEAR)
            slot = tl.load(places_ptr + tl.cast(t, tl.int64) * world.size + k * r.NEAR + m, mask=inside, other=-1)
            tl.store(to + 2 + (t - first) * r.NEAR + m, slot, mask=inside)
    tl.debug_barrier()  # one thread sends what the others have stored


@triton.jit
def note_bytes(to, r):
    """Of a note."""
    return (2 + tl.load(to) * r.NEAR) * 4


@triton.jit
def slots(of, i, r):
    """The slots of tokens i (ROWS, 1) of a note on the ranks of the node, (ROWS, NEAR2)."""
    m = tl.arange(0, r.NEAR2)[None, :]
    return tl.load(of + 2 + i * r.NEAR + m, mask=(i < tl.load(of)) & (m < r.NEAR), other=-1)


@triton.jit
def put_lines(ptr, of, dst, src, n, nbytes, peer, world, r):
    """Put to rank `peer` the lines of a piece whose tokens are somewhere by the note `of`, neighbours together, and add
    r.each to its counter `ptr` in all. dst, src: to the first line, each of n elements and so many bytes."""
    count = tl.load(of)
    begin = 0
    added = 0
    for i in range(count + 1):
        somewhere = tl.max(slots(of, i + tl.zeros((1, 1), tl.int32), r)) >= 0
        if not somewhere:
            if (i > begin) | (i == count):
                at = tl.cast(begin, tl.int64) * n
                run = tl.cast(i - begin, tl.int64) * nbytes
                value = tl.where(i == count, r.each - added, i - begin)
                pl.put_signal(ptr, peer, world, value=value, dst=dst + at, src=src + at, nbytes=run)
                added += value
            begin = i + 1


@triton.jit
def send(lines_ptr, n, nbytes, half, world, r):
    """Put this program's notes, and my lines, to the other nodes. lines_ptr: (halves, nodes, programs, each, n), of
    which [:, node] is mine, complete."""
    NODES: tl.constexpr = world.size // r.NEAR
    node, local = place(world, r)
    target, mine = note(r.notes, node, half, world, r), line(lines_ptr, node, half, n, world, r)
    for i in range(1, NODES):
        to = (node + i) % NODES
        of, peer = note(r.leaving, to, 0, world, r), to * r.NEAR + local
        arrived = r.arrived + node * tl.num_programs(0) + tl.program_id(0)
        pl.put_signal(arrived, peer, world, dst=target, src=of, nbytes=note_bytes(of, r))
        put_lines(arrived, of, mine, mine, n, nbytes, peer, world, r)


@triton.jit
def receive(i, launch, world, r):
    """Wait for this program's piece of the i-th node before mine, of my own node for 0, and tell the ranks of my node.
    Returns that node."""
    NODES: tl.constexpr = world.size // r.NEAR
    node, local = place(world, r)
    origin = (node + NODES - i) % NODES
    if i > 0:
        whole = launch * (r.each + 1)
        pl.wait(r.arrived + origin * tl.num_programs(0) + tl.program_id(0), whole, world)
    nodes.signal_node(r.there + local * tl.num_programs(0) + tl.program_id(0), world, r.NEAR)  # publish
    return origin


@triton.jit
def reach(i, j, launch, world, r):
    """Wait until the j-th rank after me in my node has received what `receive` waits for here. Returns the rank."""
    NODES: tl.constexpr = world.size // r.NEAR
    node, local = place(world, r)
    near = (local + j) % r.NEAR
    if j > 0:
        turn = (launch - 1) * NODES + i + 1
        pl.wait(r.there + near * tl.num_programs(0) + tl.program_id(0), turn, world)
    return node * r.NEAR + near


# ---------------------------------------------------------------------------------------------------------------- host
MANY = 64
"""Tokens written down at a time, at most."""


def pieces(
    name: str, tokens: int, halves: int, programs: int, near: int, count: int, make: Any, counters: Any
) -> Pieces:
    """Notes and counters for at most so many tokens of a rank, on `count` nodes. make(name, *shape), counters(name, n):
    int32, in the heap."""
    each = triton.cdiv(tokens, programs)
    note: int = 2 + each * near
    leaving: SymmetricTensor = make(f"{name}.leaving", count, programs, note)
    return Pieces(
        leaving, make(f"{name}.notes", halves, count, programs, note), counters(f"{name}.arrived", count * programs),
        counters(f"{name}.there", near * programs), each,
        *map(tl.constexpr, (near, triton.next_power_of_2(near), min(MANY, triton.next_power_of_2(each)))),
    )  # fmt: skip
