"""matmul_all_reduce's Gluon kernel as compiled for sm_90: resources, what it stores and signals, and its keywords."""

import re

import pytest
import torch

from pkt.errors import ShapeError, Unsupported
from pkt.language.inspect import count_markers

from .gluon_compiling import NARROW, SIGNAL, TILES, assert_fits, reduce, reduce_call
from .machine_code import sass


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tiles", [None, NARROW, TILES._replace(num_stages=3)])
def test_two_shot_fits(compiling, tmp_path, tiles, in_place):
    launch = reduce(compiling(2), 4096, 4096, 1024, tiles=tiles, in_place=in_place)
    assert launch.grid == (132,)
    assert launch.options["launch_cooperative_grid"]
    assert_fits(launch, tmp_path)
    code = sass(launch.kernel, tmp_path)
    blocks = (tiles or NARROW).block_n // 64  # a store of 64 columns each, for each half
    assert len(re.findall(r"UTMASTG\.2D", code)) == 2 * (1 + 3 + 3) * blocks
    landed = 1 if in_place else 3  # waits: of the storer, or of both consumers and of the warps that copy
    assert count_markers(launch.kernel.asm["ttgir"])["wait"] == 1 + landed
    assert len(re.findall(SIGNAL, launch.ptx)) == 1 + 3
    runs = 0 if in_place else 4 + 2 * blocks * 4  # of 16 bytes, of a thread that copies and of one of each consumer
    for way in ("STG", "LDG"):
        assert len(re.findall(rf"{way}\.E\.128", code)) == runs


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_two_shot_on_any_number_of_ranks(compiling, tmp_path, size):
    assert_fits(reduce(compiling(size - 1, size), 333, 1032, 1544), tmp_path)


def test_mode_gluon_launches_the_two_shot(h200s, tmp_path):
    world = h200s()
    reduce_call(world, 2048, 2048, 512, mode="gluon", tiles=[128, 128, 64, 4, 8, 5], lag=3)
    reduce_call(world, 1, 8, 5, mode="gluon")
    first, second = world.kernels
    assert first.constants.STAGES == 5
    assert first.args[-4] == 3
    assert second.args[-4] == 1
    for launch in world.kernels:
        assert launch.kernel.metadata.name == "gluon_two_shot_kernel"
        assert_fits(launch, tmp_path)
    for mode, name, value in (
        ("gluon", "lag", 0),
        ("gluon", "num_comm_sms", 4),
        ("lcsc", "lag", 1),
        ("gluon", "tiles", (64, 64, 64)),
    ):
        with pytest.raises(ShapeError, match=f"{name}: found"):
            reduce_call(world, 512, 512, 512, mode=mode, **{name: value})
    with pytest.raises(Unsupported, match="float32, not bfloat16 or float16"):
        reduce_call(world, 512, 512, 512, torch.float32, mode="gluon")
    with pytest.raises(Unsupported, match="not multiples of 16 bytes"):
        reduce_call(world, 512, 509, 512, mode="gluon")
    assert len(world.kernels) == 2
