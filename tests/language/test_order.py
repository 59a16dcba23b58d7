"""Tile orders: each is a permutation of the tasks, with the right tasks first or last. Run by Triton's own
interpreter."""

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

import pkt.language as pl
from pkt.language.inspect import device_world

supergroup = InterpretedFunction(pl.order.supergroup.fn)
own_first = InterpretedFunction(pl.order.own_first.fn)
own_last = InterpretedFunction(pl.order.own_last.fn)
peers_interleaved = InterpretedFunction(pl.order.peers_interleaved.fn)


def orders(out, num_m, num_n, world, N, GROUP):
    t = tl.program_id(0)
    m, n = supergroup(t, num_m, num_n, GROUP)
    r, i = peers_interleaved(t, N // world.size, world)
    tl.store(out + 6 * t, m)
    tl.store(out + 6 * t + 1, n)
    tl.store(out + 6 * t + 2, own_first(t, N, world))
    tl.store(out + 6 * t + 3, own_last(t, N, world))
    tl.store(out + 6 * t + 4, r)
    tl.store(out + 6 * t + 5, i)


def run(rank, size, num_m, num_n, group):
    n = num_m * num_n
    out = torch.full((n, 6), -1, dtype=torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    world = device_world(rank, size)._replace(status=status)
    InterpretedFunction(orders)[(n,)](out, num_m, num_n, world, n, group)
    return out.tolist()


@pytest.mark.parametrize(
    ("size", "num_m", "num_n", "group"), [(1, 3, 4, 2), (2, 6, 5, 4), (3, 7, 3, 2), (4, 8, 2, 3), (5, 5, 5, 8)]
)
def test_each_order_is_a_permutation(size, num_m, num_n, group):
    n = num_m * num_n
    for rank in range(size):
        table = run(rank, size, num_m, num_n, group)
        assert sorted((m, c) for m, c, *_ in table) == [(m, c) for m in range(num_m) for c in range(num_n)]
        assert sorted(row[2] for row in table) == sorted(row[3] for row in table) == list(range(n))
        if n % size == 0:
            per = n // size
            assert sorted((row[4], row[5]) for row in table) == [(r, i) for r in range(size) for i in range(per)]
            assert [row[2] for row in table[:per]] == list(range(rank * per, (rank + 1) * per))
            assert [row[3] for row in table[-per:]] == list(range(rank * per, (rank + 1) * per))
            # my own tasks first, then the first task of each peer, beginning with my neighbour
            assert [(row[4], row[5]) for row in table[:per]] == [(rank, i) for i in range(per)]
            assert [row[4:6] for row in table[per : per + size - 1]] == [
                [(rank + 1 + k) % size, 0] for k in range(size - 1)
            ]
        # a supergroup is walked column by column
        rows = min(group, num_m)
        assert [row[:2] for row in table[:rows]] == [[m, 0] for m in range(rows)]
