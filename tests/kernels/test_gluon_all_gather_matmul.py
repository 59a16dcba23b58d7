"""all_gather_matmul's Gluon kernel as compiled for sm_90: resources, what it sends and signals, settings refused."""

import re

import pytest
import torch

from pkt.errors import ShapeError
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_gather_matmul.rules import PushPlan, push_plan
from pkt.language.inspect import count_markers

from .gluon_compiling import NARROW, SIGNAL, TILES, assert_fits, gather_call, product
from .machine_code import sass


@pytest.mark.parametrize("cut_last", [1, 2, 4])
@pytest.mark.parametrize("tiles", [TILES, NARROW])
def test_push_fits(compiling, tmp_path, cut_last, tiles):
    launch = product(compiling(2), 1024, 1024, 4096, plan=PushPlan(cut_last=cut_last), tiles=tiles)
    assert launch.grid == (132,)
    assert launch.options["launch_cooperative_grid"]
    assert_fits(launch, tmp_path)
    code = sass(launch.kernel, tmp_path)
    widths = sorted({tiles.block_n, tiles.block_n // cut_last})
    found = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", code)
    assert sorted(map(int, found)) == [width for width in widths for _ in range(2 * 4)]
    assert len(re.findall(r"UTMASTG\.2D", code)) == 2 * 3  # a unit of each lane, to each peer
    assert len(re.findall(r"UTMASTG\.3D", code)) == 2 * sum(max(width // 64, 1) for width in widths)
    assert count_markers(launch.ptx)["wait"] == len(widths)


@pytest.mark.parametrize(("cut_last", "chunk", "columns"), [(1, 0, 4096), (2, 4096, 4096), (2, 2048, 2048)])
def test_copied_fits(compiling, tmp_path, cut_last, chunk, columns):
    """Copies begin before the kernel, and the stream waits for them after it. The kernel sends and signals nothing."""
    world = compiling()
    plan = push_plan(1000, 1024, 4096, 4, TILES, 132, num_comm_sms=0, cut_last=cut_last, chunk=chunk)
    launch = product(world, 1000, 1024, 4096, plan=plan)
    assert_fits(launch, tmp_path)
    assert world.begun == [(8 * 128, columns, 0), 1]
    assert count_markers(launch.ptx) == {"wait": cut_last, "signal": 0}
    assert not re.search(r"(?:atom|red)\.global", launch.ptx)
    assert not re.search(r"UTMASTG\.2D", sass(launch.kernel, tmp_path))


def several(world, weights, **options):
    """A call with weights (1544, N), as Linears hold them, through the operator."""
    bs = [torch.empty(N, 1544, dtype=torch.bfloat16).t() for N in weights]
    outs = [torch.empty(4 * 333, N // (2 if options else 1), dtype=torch.bfloat16) for N in weights]
    found = all_gather_matmul(torch.empty(333, 1544, dtype=torch.bfloat16), bs, outs, world=world, **options)
    assert all(x is y for x, y in zip(found, outs, strict=True))
    return world.kernels


@pytest.mark.parametrize("options", [{}, {"epilogue": "swiglu"}])
@pytest.mark.parametrize("num_comm_sms", [8, 0])
def test_further_weights_are_only_multiplied(h200s, tmp_path, num_comm_sms, options):
    """The greatest goes first, and A with it; the launches behind it signal nothing and wait for nothing."""
    world = h200s(all_gather_matmul={"mode": "gluon", "num_comm_sms": num_comm_sms})
    first, *others = several(world, (1040, 2080, 16), **options)
    assert [launch.args[-6 - 1].N for launch in (first, *others)] == [2080, 1040, 16]
    assert all(launch.args[-6] == 0 for launch in others)
    assert count_markers(first.ptx)["wait"] >= 1
    for launch in others:
        assert_fits(launch, tmp_path)
        assert count_markers(launch.ptx) == {"wait": 0, "signal": 0}
        assert not re.search(r"(?:atom|red)\.global", launch.ptx)
        assert launch.options["CHUNK"] == first.options["CHUNK"]
    if num_comm_sms == 0:
        assert world.begun[0][-1] == 0
        assert world.begun[1:] == [1]  # joined behind the first launch, and begun once


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (0, 3), (1, 8)])
def test_push_on_any_number_of_ranks(compiling, tmp_path, rank, size):
    """Rank 1 is a constant of the kernel, rank 0 is not."""
    launch = product(compiling(rank, size), 333, 1032, 1544)
    assert_fits(launch, tmp_path)
    assert len(re.findall(SIGNAL, launch.ptx)) == 2 * (size - 1)  # each lane's, to each peer


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tiles": (64, 256, 64)}, "tiles"),
        ({"tiles": (128, 256, 64, 8, 4, 4)}, "tiles"),
        ({"tiles": (128, 256, 64, 8, 8, 5)}, "tiles"),
        ({"num_comm_sms": -1}, "num_comm_sms"),
        ({"num_comm_sms": 0, "chunk": 96}, "chunk"),
        ({"num_comm_sms": 0, "rounds_alone": 1}, "rounds_alone"),
        ({"chunk": 288}, "chunk"),
        ({"push_rows": -1}, "push_rows"),
        ({"rounds_alone": -1}, "rounds_alone"),
        ({"cut_last": 3}, "cut_last"),
        ({"whole_rounds": -1}, "whole_rounds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(h200s, options, name):
    world = h200s()
    with pytest.raises(ShapeError, match=f"{name}: found"):
        gather_call(world, 512, 512, 512, mode="gluon", **options)
    assert not world.kernels
    assert not any(key[0] == "all_gather_matmul" for key in world.spaces)
