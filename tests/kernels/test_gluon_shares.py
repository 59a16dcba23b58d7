"""How the Gluon kernels deal out their tiles: each tile once, to which program, and in which order."""

from types import SimpleNamespace

import numpy as np
import pytest
from triton import cdiv
from triton.runtime.jit import JITFunction

from pkt.kernels.all_gather_matmul.rules import CUTS

from .gluon_machine import Machine, as_python
from .gluon_runs import PUSH, push, ring, scatter, two_shot, warps


def test_a_role_takes_at_most_eight_values():
    """And so does each function and method that the roles call."""
    for module in (*PUSH, ring, scatter, two_shot):
        aggregates = [value for value in vars(module).values() if hasattr(value, "__triton_aggregate__")]
        named = [item for where in (module, *aggregates) for item in vars(where).items()]
        counts = {name: len(f.arg_names) for name, f in named if isinstance(f, JITFunction)}
        kernels = {name for name in counts if name.endswith("_kernel")}
        assert len(kernels) == (module in (push, ring, scatter, two_shot))
        assert max(counts[name] for name in counts.keys() - kernels) <= 8, counts


# -------------------------------------------------------------------------------------------------- all_gather_matmul
@pytest.mark.parametrize("size", [2, 3, 5])
def test_copied_tiles_come_in_the_order_of_the_copies(size):
    """Copies go to rank + 1 first, in groups of row blocks: each group to every peer, then the next group."""
    functions = as_python(PUSH, Machine(1, 1, 0))
    num_m, num_n, push_rows = 5, 3, 2
    for rank in range(size):
        order = functions["Order"](rank, 8 * num_m, num_m, num_n, 16, push_rows, size, 2, 8, True, False)
        tiles = [order.tile(t) for t in range(size * num_m * num_n)]
        came = list(dict.fromkeys((source, i // push_rows) for source, i, _, own in tiles if not own))
        assert came == [((rank - d) % size, g) for g in range(3) for d in range(1, size)]
        assert sorted(tiles) == sorted(
            (source, i, j, source == rank) for source in range(size) for i in range(num_m) for j in range(num_n)
        )


@pytest.mark.parametrize("pieces", CUTS)
@pytest.mark.parametrize("programs", [1, 2, 5, 8])
def test_every_tile_and_every_part_once(programs, pieces):
    """For any number of tiles, of pushing programs, and of rounds that these skip: as many as are asked for, or all of
    them."""
    machine = SimpleNamespace(programs=programs, here=lambda: here, random=None)
    here = SimpleNamespace(program=0)
    functions = as_python(PUSH, Machine(1, programs, 0))
    functions["gl"].program_id = lambda axis: here.program
    functions["gl"].num_programs = lambda axis: machine.programs
    for num_m, num_n in ((0, 3), (1, 1), (1, 3), (2, 2), (3, 3), (5, 4), (7, 6)):
        tiles = num_m * num_n
        for num_comm in range(programs + 1):
            for wanted, most in ((0, 99), (1, 99), (2, 99), (5, 99), (99, 99), (0, 0), (2, 0), (1, 1), (4, 1), (1, 2)):
                seen = []
                counts = []
                for here.program in range(programs):
                    order = functions["Order"](0, 8 * num_m, num_m, num_n, 16, 1, 1, 2, 8, False, False)
                    rounds, left = functions["deal"](num_comm, wanted, most, order, pieces)
                    alone, late, cut = rounds.alone, left.alone, tiles - left.offset
                    whole = list(range(rounds.first(), rounds.end(), programs))
                    seen += [
                        (i, j * pieces + part)
                        for _, i, j, _ in (rounds.tile(v) for v in whole)
                        for part in range(pieces)
                    ]
                    places = [left.tile(v) for v in range(left.first(), left.end(), programs)]
                    seen += [(i, j) for _, i, j, _ in places]
                    counts.append(len(whole))
                assert sorted(seen) == [(i, j) for i in range(num_m) for j in range(num_n * pieces)]
                assert alone == min(wanted, most, tiles // max(programs - num_comm, 1))
                assert late <= max(wanted - alone, 0)
                if most == 99:
                    assert cut < programs
                if pieces > 1 and 0 < num_comm < programs:  # whole rounds for all
                    assert set(counts[:num_comm]) == {counts[-1] - alone}
                    assert len(set(counts[num_comm:])) == 1
                    assert counts[-1] <= most


# ------------------------------------------------------------------------ matmul_reduce_scatter and matmul_all_reduce
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("programs", [1, 4, 6, 132])
def test_turns(size, programs):
    """Every tile of every rank comes once, in order. A tile of the own rank comes at least `lag` tiles behind the same
    tile of each other rank."""
    functions = as_python([warps], Machine(1, programs, 0))
    for count in (1, 2, 7, 40):
        for lag in {1, min(5, count), count}:
            order = [functions["turn"](t, count, lag, size) for t in range(size * count)]
            assert sorted(order) == [(d, index) for d in range(size) for index in range(count)]
            for d in range(size):
                assert [index for far, index in order if far == d] == list(range(count))
            at = {what: t for t, what in enumerate(order)}
            for index in range(count):
                ahead = [at[0, index] - at[d, index] for d in range(1, size)]
                assert min(ahead, default=lag) >= lag
            if lag == count:
                assert order == [(d % size, index) for d in range(1, size + 1) for index in range(count)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_turns_of_the_programs(size):
    """Tiles of the own rank take longer, so every program has about as many of them."""
    functions = as_python([warps], Machine(1, 132, 0))
    mine = np.zeros(132, int)
    for t in range(8 * 132 * size):
        mine[t % 132] += functions["turn"](t, 8 * 132, 33, size)[0] == 0
    assert np.ptp(mine) <= 2


# -------------------------------------------------------------------------------------------------- matmul_all_reduce
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 7), (16, 9)], ids=str)
def test_every_tile_has_one_owner_and_a_place(size, shape):
    """Every rank works on every tile once. No two tiles of an owner share a place. Numbers beyond them are skipped."""
    functions = as_python([warps, two_shot], Machine(size, 1, 0))
    tiles = shape[0] * shape[1]
    count = cdiv(tiles, size)
    for lag in {1, count}:
        owners: dict[tuple, set] = {}
        for rank in range(size):
            order = functions["Order"](rank, *shape, lag, size * count, size, 2)
            found = [order.tile(t) for t in range(order.end())]
            real = [((i, j), ((rank + d) % size, place)) for d, place, i, j in found if j >= 0]
            assert len(real) == tiles
            for cell, owner in real:
                owners.setdefault(cell, set()).add(owner)
        assert sorted(owners) == [(i, j) for i in range(shape[0]) for j in range(shape[1])]
        assert all(len(who) == 1 for who in owners.values())
        places = [who.pop() for who in owners.values()]
        assert len(set(places)) == tiles
        assert all(0 <= place < count for _, place in places)
