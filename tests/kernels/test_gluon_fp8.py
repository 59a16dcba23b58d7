"""The Gluon kernels of fp8 operands, compiled for sm_90: resources, products, and the scales that they take."""

import re

import pytest
import torch

from pkt.errors import ShapeError
from pkt.kernels.all_gather_matmul import rules as gather_rules
from pkt.kernels.all_gather_matmul.rules import PushPlan
from pkt.kernels.matmul_all_reduce import rules as reduce_rules
from pkt.kernels.matmul_reduce_scatter import rules as scatter_rules
from pkt.kernels.shared.fp8 import FP8
from pkt.kernels.shared.gluon_fits import unsuited
from pkt.language.inspect import count_markers

from .gluon_compiling import BF16, NARROW, NARROW8, assert_fits, product, reduce, scatter
from .machine_code import sass

FORMS = {
    "pushed": (product, {"plan": PushPlan(cut_last=2)}),
    "copied": (product, {"plan": PushPlan(0, 0)}),
    "stored": (scatter, {}),
    "scattered by copies": (scatter, {"lag": 64, "copies": 2}),
    "reduced": (reduce, {}),
}


@pytest.mark.parametrize("each", ["both", "rows", None])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_fp8_fits(compiling, tmp_path, form, size, each):
    """The first product of SUMMED steps begins a new sum, by a predicate of the step."""
    call, options = FORMS[form]
    launch = call(compiling(size - 1, size), 1000, 1024, 2064, FP8, each=each, **options)
    assert_fits(launch, tmp_path)
    code = sass(launch.kernel, tmp_path)
    widths = [128, 64] if form == "pushed" else [128]
    found = re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, gdesc\[UR\d+\], R\d+(, UP\d)?", code)
    assert sorted(width for width, _ in found) == sorted(str(width) for width in widths for _ in range(2 * 4))
    assert sum(bool(begins) for _, begins in found) == 2 * len(widths)
    assert "f32.e4m3.e4m3" in launch.ptx


@pytest.mark.parametrize("form", FORMS)
def test_bias_and_epilogue_of_fp8(compiling, tmp_path, form):
    call, options = FORMS[form]
    launch = call(compiling(2), 1024, 1024, 1024, FP8, each="both", bias=True, epilogue="gelu", **options)
    assert_fits(launch, tmp_path)


@pytest.mark.parametrize("cut_last", [1, 2, 4])
def test_swiglu_of_fp8(compiling, tmp_path, cut_last):
    options = {"plan": PushPlan(cut_last=cut_last), "bias": True, "epilogue": "swiglu"}
    assert_fits(product(compiling(2), 1024, 1024, 4096, FP8, each="both", **options), tmp_path)


@pytest.mark.parametrize(("each", "count"), [("both", 1000), (None, 1)])
@pytest.mark.parametrize("form", ["pushed", "copied"])
def test_scales_of_all_shards_travel_in_words(compiling, form, each, count):
    """Put by every program before the roles begin, to each rank; taken by both consumers in each loop over tiles."""
    call, options = FORMS[form]
    world = compiling(1, 4)
    ours = [call(world, 1000, 1024, 2048, dtype, each=each, **options) for dtype in (FP8, BF16)]
    (words,) = (space for key, space in world.spaces.items() if key[0] == "all_gather_matmul.gluon.scales")
    assert (*words.tensor.shape, words.dtype) == (2, 4, count, 2, torch.int32)
    put, none = (len(re.findall(r"st\.relaxed\.sys\.global\.b64", launch.ptx)) for launch in ours)
    assert (put, none) == (4, 0)
    waits, fewer = (count_markers(launch.kernel.asm["ttgir"])["wait"] for launch in ours)
    assert waits - fewer == 2 * options["plan"].cut_last


def test_settings_of_fp8(compiling):
    """Bytes and products count as of half as many columns of 16 bits."""
    world = compiling()
    plan, _ = gather_rules.settings(2048, 8192, 16384, world, NARROW8, FP8)
    assert plan == gather_rules.settings(2048, 8192, 8192, world, NARROW)[0]._replace(chunk=plan.chunk)
    assert plan.chunk % 128 == 0
    for rules, rest in ((scatter_rules, (None, None)), (reduce_rules, (None,))):
        _, *found = rules.settings(2048, 8192, 4096, world, NARROW8, *rest, FP8)
        assert found == list(rules.settings(2048, 8192, 2048, world, NARROW, *rest)[1:])


def test_tiles_of_another_width_are_refused(compiling):
    for tiles, dtype, blocks in ((NARROW, FP8, r"\(128, 128, 128\)"), (NARROW8, BF16, r"\(128, 128, 64\)")):
        with pytest.raises(ShapeError, match=f"tiles: found.*{blocks}"):
            scatter_rules.settings(512, 512, 512, compiling(), tiles, None, None, dtype)
    assert not unsuited(FP8, 4, 48)
    assert "not multiples of 16 bytes" in unsuited(FP8, 4, 40)
