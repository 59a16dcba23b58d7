"""matmul_reduce_scatter's Gluon kernel as compiled for sm_90: resources, what it stores and signals, when it copies."""

import re

import pytest
import torch
import triton

from pkt.errors import ShapeError
from pkt.kernels.matmul_all_reduce import rules as reduce_rules
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.matmul_reduce_scatter import rules as scatter_rules
from pkt.language.inspect import count_markers
from pkt.model.gpu import H100

from .gluon_compiling import NARROW, SIGNAL, TILES, assert_fits, scatter, scatter_call, with_another_rank
from .machine_code import sass


@pytest.mark.parametrize("tiles", [None, NARROW, TILES._replace(num_stages=3)])
def test_inbox_fits(compiling, tmp_path, tiles):
    launch = scatter(compiling(2), 1024, 4096, 1024, tiles=tiles)
    assert_fits(launch, tmp_path)
    blocks = (tiles or TILES).block_n // 64  # a store of 64 columns each, for each half
    assert len(re.findall(r"UTMASTG\.2D", sass(launch.kernel, tmp_path))) == 2 * (1 + 3) * blocks
    assert count_markers(launch.kernel.asm["ttgir"]) == {"wait": 1, "signal": 1}  # in a loop over the other ranks


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copied_tiles_are_stored_on_their_own_rank(compiling, tmp_path, copies):
    """The copies are queued behind the kernel. The kernel stores the peers' tiles on its own rank, and counts them for
    that rank's copy engine."""
    world = compiling()
    launch = scatter(world, 1024, 4096, 1024, lag=128, copies=copies)
    assert_fits(launch, tmp_path)
    assert world.begun == [triton.cdiv(128, copies), len(world.kernels)]
    stores = re.findall(r"UTMASTG\.2D", sass(launch.kernel, tmp_path))
    assert len(stores) == 2 * (1 + 1) * 4  # halves of 256 columns: mine, and a peer's
    assert count_markers(launch.kernel.asm["ttgir"]) == {"wait": 1, "signal": 1}
    assert len(re.findall(SIGNAL, launch.ptx)) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_inbox_on_any_number_of_ranks(compiling, tmp_path, size):
    assert_fits(scatter(compiling(size - 1, size), 333, 1032, 1544), tmp_path)


@pytest.mark.parametrize(
    ("size", "M", "N", "K", "narrow"),
    [
        *((size, side, side, side // size, True) for size, side in ((2, 4096), (4, 8192), (8, 16384))),
        *((size, side, side + 8, side // size, False) for size, side in ((2, 4096), (4, 8192), (8, 16384))),
        (4, 8192, 7168, 3198, True),
        (4, 8192, 7168, 3200, False),
        (4, 1024, 5120, 6400, True),  # wide ones take 1.2 rounds
        (4, 1024, 8192, 7168, False),  # 1.9
        (4, 128, 7168, 4096, True),
        (2, 700, 8192, 14336, False),
    ],
)
def test_tiles_of_the_all_reduce_follow_the_output(size, M, N, K, narrow):
    """Narrow ones where the links are the limit, or where wide ones would leave programs without one and K is not long;
    else wide ones, in groups of 16 row blocks."""
    wanted = NARROW if narrow else TILES._replace(group=16)
    assert reduce_rules.tiles_of(M, N, K, size, 132) == wanted


@pytest.mark.parametrize(
    ("size", "M", "N", "K", "lag"),
    [
        (4, 16384, 16384, 13312, 2048),
        (4, 16384, 16384, 7168, 9),
        (2, 1024, 8192, 14336, 128),
        (2, 512, 8192, 14336, 16),  # one round, in which nothing is read again
        (2, 16384, 16384, 9216, 4096),
        (2, 16384, 16384, 8192, 17),
    ],
)
def test_own_tiles_come_last_where_a_round_does_not_fit_in_l2(size, M, N, K, lag):
    tiles, found = reduce_rules.settled(M, N, K, size, 132)
    assert found == lag
    assert reduce_rules.settled(M, N, K, size, 132, tiles, 5)[1] == 5, "a lag that is given counts"


@pytest.mark.parametrize(
    ("size", "M", "N", "K", "last"),
    [(4, 16384, 16384, 7168, True), (4, 16384, 5120, 6400, True), (4, 16384, 16384, 4096, False),
     (2, 8192, 8192, 7168, True), (2, 2048, 8192, 7168, False)],
)  # fmt: skip
def test_own_tiles_come_last_where_memory_is_slow_and_programs_drift_apart(size, M, N, K, last):
    """On H100, where a round does not fit in L2 and rounds are many. On H200 they alternate."""
    tiles, found = reduce_rules.settled(M, N, K, size, 132, memory=H100.memory)
    own = M * N // (tiles.block_m * tiles.block_n) // size
    assert (found == own) == last
    assert reduce_rules.settled(M, N, K, size, 132)[1] < own


@pytest.mark.parametrize(
    ("count", "lag", "size", "early"), [(1024, 66, 4, 240), (8192, 2048, 4, 5220), (256, 66, 4, 0), (64, 64, 1, 0)]
)
def test_tiles_that_land_in_the_last_rounds_are_not_copied_early(count, lag, size, early):
    """All but twice those that land in the last round of own tiles, and one a program."""
    assert reduce_rules.early_tiles(count, lag, 132, size) == early


def test_own_tiles_are_rounds_behind(compiling):
    """One round. In the all-reduce two rounds of narrow tiles, and a part of a round of wide tiles where that is long
    enough. Never less than one tile, nor more than all that a rank owns."""
    world = compiling()
    sides = (1024, 4096, 8192, 12288, 16384, 32768)

    def lags(tiles):
        return [reduce_rules.settings(side, side, side // 4, world, tiles, None)[1] for side in sides]

    assert lags(TILES) == [8, 33, 33, 17, 9, 9]
    assert lags(NARROW) == [16, 66, 66, 66, 66, 66]
    assert reduce_rules.settings(16384, 16384, 512, world, TILES, None)[1] == 33
    sides = (1024, 4096, 8192, 16384, 32768)
    parts = [(side // 4, side, side // 4) for side in sides]
    found = [scatter_rules.settings(*part, world, TILES, None, copies=0)[1:] for part in parts]
    assert found == [(8, 0), (33, 0), (33, 0), (33, 0), (33, 0)]
    found = [scatter_rules.settings(*part, world, TILES, None)[1:] for part in parts]
    assert found == [(8, 0), (33, 0), (512, 2), (2048, 2), (8192, 2)]
    assert scatter_rules.settings(*parts[-1], world, TILES, 5)[1:] == (5, 0)
    assert (
        scatter_rules.settings(1, 8, 8, world, TILES, 5)[1] == reduce_rules.settings(1, 8, 8, world, TILES, 5)[1] == 1
    )  # one tile


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "gluon", "copies": -1}, "copies"),
        ({"mode": "gluon", "copies": 2, "lag": 3}, "lag"),
        ({"mode": "gluon", "lag": 0}, "lag"),
        ({"mode": "add", "copies": 2}, "copies"),
        ({"copies": 2}, "copies"),
    ],
)
def test_copies_that_do_not_fit_are_refused(h200s, options, name):
    world = h200s()
    with pytest.raises(ShapeError, match=f"{name}: found"):
        scatter_call(world, 512, 512, 512, **options)
    assert not world.kernels


@pytest.mark.parametrize("longest", [1024, 2048])
def test_all_ranks_copy_where_one_s_k_is_long_enough(h200s, monkeypatch, longest):
    """A rank that stores while the others copy would wait forever."""
    world = h200s()
    with_another_rank(monkeypatch, world, longest)
    scatter_call(world, 2048, 4096, 1024)
    assert world.kernels[-1].options["COPIED"] == (longest == 2048)


def test_ranks_may_differ_in_where_operands_begin_and_in_k(h200s, tmp_path):
    """An address or a K of one rank must not change that rank's form: the operand is copied or padded instead."""
    for k, begin in ((64, 1), (61, 0), (0, 0)):
        world = h200s()
        a = torch.empty(4 * 128 * k + 1, dtype=torch.bfloat16)[begin:][: 4 * 128 * k].view(512, k)
        out = torch.zeros(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64)
        b = torch.empty(k, 64, dtype=torch.bfloat16)
        assert matmul_reduce_scatter(a, b, out, mode="gluon", world=world) is out
        launch = world.kernels[-1]
        assert launch.kernel.metadata.name == "gluon_inbox_kernel"
        assert_fits(launch, tmp_path)
