"""All Gluon kernels, compiled for sm_90: weights, bias, keywords, and the order of their operations."""

import re

import pytest
import torch

from pkt.errors import PktError
from pkt.kernels.all_gather_matmul.rules import PushPlan

from .gluon_compiling import (
    NARROW,
    SIGNAL,
    TILES,
    assert_fits,
    chosen,
    gather_call,
    product,
    reduce,
    reduce_call,
    scatter,
    scatter_call,
)
from .machine_code import sass


@pytest.mark.parametrize(("call", "tiles"), [(product, TILES), (scatter, NARROW), (reduce, TILES)])
def test_transposed_weights(compiling, tmp_path, call, tiles):
    launch = call(compiling(2), 1024, 1024, 1024, tiles=tiles, transposed=True)
    assert_fits(launch, tmp_path)
    code = sass(launch.kernel, tmp_path)
    assert len(re.findall(rf"HGMMA\.64x{tiles.block_n}x16\.F32\.BF16", code)) == 2 * 4  # of each consumer
    # the last flag is 0 where the columns of B are contiguous, and 1 where its rows are
    row_major = call(compiling(2), 1024, 1024, 1024, tiles=tiles)
    transposes = [set(re.findall(r"wgmma\.mma_async[^;]*, (\d), (\d);", x.ptx)) for x in (launch, row_major)]
    assert transposes == [{("0", "0")}, {("0", "1")}]


def test_transposed_weights_through_the_operators(h200s, tmp_path):
    """Also where k is padded."""
    for call in (gather_call, scatter_call, reduce_call):
        world = h200s()
        call(world, 333, 1032, 1544, transposed=True, mode="gluon")
        launch = world.kernels[-1]
        assert launch.constants.TRANSPOSED
        assert_fits(launch, tmp_path)
    world = h200s()
    scatter_call(world, 128, 64, 61, transposed=True, mode="gluon")
    assert world.kernels[-1].constants.TRANSPOSED


@pytest.mark.parametrize("call", [product, scatter, reduce])
@pytest.mark.parametrize(("tiles", "epilogue"), [(TILES, "gelu"), (NARROW, "silu")])
def test_bias_and_epilogue(compiling, tmp_path, call, tiles, epilogue):
    launch = call(compiling(2), 1024, 1024, 1024, tiles=tiles, bias=True, epilogue=epilogue)
    assert_fits(launch, tmp_path)
    assert "ex2.approx" in launch.ptx


@pytest.mark.parametrize(("tiles", "cut_last"), [(TILES, 1), (TILES, 4), (NARROW, 2), (NARROW, 4)])
def test_swiglu(compiling, tmp_path, cut_last, tiles):
    """Half as many columns are stored, 16 bytes at a time; gate and up meet in a thread's own registers."""
    plan = PushPlan(cut_last=cut_last)
    launch = product(compiling(2), 1024, 1024, 4096, plan=plan, tiles=tiles, bias=True, epilogue="swiglu")
    assert_fits(launch, tmp_path)
    code = sass(launch.kernel, tmp_path)
    stored = sorted({tiles.block_n // 2, tiles.block_n // 2 // cut_last})
    assert len(re.findall(r"UTMASTG\.3D", code)) == 2 * sum(max(width // 64, 1) for width in stored)
    assert code.count("STSM.16.M88.4") == 2 * sum(max(width // 16, 1) for width in stored)


def test_swiglu_through_the_operator(h200s, tmp_path):
    """Where the rows of the result are whole runs of 16 bytes; else another form runs."""
    for transposed in (False, True):
        world = h200s()
        gather_call(world, 333, 1040, 1544, transposed=transposed, bias=True, epilogue="swiglu", mode="gluon")
        launch = world.kernels[-1]
        assert launch.constants.EPILOGUE == "swiglu"
        assert_fits(launch, tmp_path)
    with pytest.raises(PktError, match="rows of 1544 and 516 elements, not multiples of 16 bytes"):
        gather_call(h200s(), 333, 1032, 1544, mode="gluon", epilogue="swiglu")
    assert chosen("all_gather_matmul", h200s(), 4096, 8200, 8192, epilogue="swiglu")["mode"] != "gluon"
    assert chosen("all_gather_matmul", h200s(), 4096, 8200, 8192)["mode"] == "gluon"


def test_bias_and_epilogue_through_the_operators(h200s, tmp_path):
    for call in (gather_call, scatter_call, reduce_call):
        world = h200s()
        call(world, 333, 1032, 1544, bias=True, epilogue="relu", mode="gluon")
        launch = world.kernels[-1]
        assert launch.constants.EPILOGUE == "relu"
        assert "ex2.approx" not in launch.ptx
        assert any(isinstance(a, torch.Tensor) and a.shape == (1032,) for a in launch.args)
        assert_fits(launch, tmp_path)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tiles", [TILES, NARROW])
def test_a_gathered_input_that_is_kept(compiling, tmp_path, tiles, transposed):
    """16 bytes at a time, also where K is no multiple of 16. Nobody moves it where it is not kept."""
    plan = PushPlan(num_comm_sms=0, cut_last=4)
    codes = []
    for keep in (False, True):
        launch = product(compiling(2), 1024, 1024, 1544, plan=plan, tiles=tiles, transposed=transposed, keep=keep)
        assert_fits(launch, tmp_path)
        code = sass(launch.kernel, tmp_path)
        codes.append([code.count(f"{move}.E.128") for move in ("LDG", "STG")])
    assert codes[0] == [0, 0]
    assert codes[1][0] == codes[1][1] >= 4


@pytest.mark.parametrize("call", [scatter, reduce])
def test_one_peers_sums_are_added_in_a_loop_as_those_of_three(compiling, call):
    """A branch in its place would take LLVM a second to compile."""
    two, four = (call(compiling(1, size), 1024, 1024, 1024, tiles=TILES) for size in (2, 4))
    loops = [launch.kernel.asm["llir"].count("= phi {") for launch in (two, four)]  # of all values of a thread at once
    assert loops[0] == loops[1] == 2  # of each consumer


def test_fp16(compiling, tmp_path):
    for call in (product, scatter, reduce):
        launch = call(compiling(), 512, 512, 512, torch.float16)
        assert_fits(launch, tmp_path)
        assert "f32.f16.f16" in launch.ptx


SIZES = [(2, (1024, 1024, 4096)), (4, (333, 4096, 1544)), (4, (65, 8, 8))]


@pytest.mark.parametrize(("size", "shape"), SIZES, ids=str)
@pytest.mark.parametrize(("call", "name"), [(gather_call, "gluon_push_kernel"), (scatter_call, "gluon_inbox_kernel")])
def test_the_gluon_kernel_fits_any_shape(h200s, tmp_path, call, name, shape, size):
    world = h200s(1, size)
    call(world, *shape, mode="gluon")
    (launch,) = world.kernels
    assert launch.kernel.metadata.name == name
    assert_fits(launch, tmp_path)


def test_keywords_reach_the_kernel(h200s, tmp_path):
    """As a tuner passes them: numbers, and lists of numbers."""
    world = h200s()
    world.num_sms = 100
    gather_call(
        world, 1024, 1024, 4096, mode="gluon", num_comm_sms=32, chunk=512, tiles=[128, 128, 64, 4, 8, 5],
        push_rows=3, rounds_alone=2, cut_last=2, whole_rounds=5,
    )  # fmt: skip
    scatter_call(world, 1024, 1024, 4096, mode="gluon", tiles=[128, 128, 64, 4, 8, 5], lag=7)
    for launch in world.kernels:
        assert_fits(launch, tmp_path)
        assert (*launch.args[1].block_shape[1:], *launch.constants[:2]) == (128, 5, 4)
    gathered, scattered = world.kernels
    assert [gathered.options[n] for n in ("CHUNK", "PIECES")] == [512, 2]
    assert gathered.args[-6:-2] == (32, 2, 5, 3)
    assert scattered.args[-4:-2] == (7, 1)


def test_settings_that_do_not_fit_are_refused_before_a_launch(h200s):
    world = h200s()
    for options in (
        {"num_comm_sms": -1},
        {"num_comm_sms": 0, "chunk": 96},
        {"chunk": 0},
        {"num_comm_sms": 0, "chunk": 0, "rounds_alone": 1},
        {"chunk": 96},
        {"cut_last": 3},
        {"tiles": (64, 256, 64)},
    ):
        with pytest.raises(PktError, match="wanted"):
            gather_call(world, 512, 512, 512, mode="gluon", **options)
    with pytest.raises(PktError, match="shared memory"):
        scatter_call(world, 512, 512, 512, mode="gluon", tiles=TILES._replace(num_stages=5))
    assert not world.kernels


# ------------------------------------------------------------------------------------------------------------ order
@pytest.mark.parametrize("call", [product, scatter, reduce])
def test_the_place_of_the_next_tile_comes_out_of_the_product(call, compiling):
    """The loop computes the place in the first step of this tile and returns it, as one number. If a loop returns two
    such numbers, Triton 3.6's loop-aware CSE may use the first tile's number for all tiles."""
    text = call(compiling(2), 1024, 1024, 1024).kernel.asm["ttgir"]
    products = text.count("warp_group_dot ")
    assert products == (4 if call is product else 2)  # each consumer's
    assert len(re.findall(r"%acc:3 = scf\.for .*-> \(i32, i32, tensor<", text)) == products
    assert len(re.findall(r"scf\.yield %\w+, %\w+, %acc#1 : i32, i32, i32", text)) == products


@pytest.mark.parametrize("call", [product, scatter, reduce])
def test_tma_sees_what_consumers_have_stored_and_loads_after_they_have_loaded(call, compiling):
    """Consumers fence their stores to and loads from shared memory before they arrive at a barrier."""
    ptx = call(compiling(2), 1024, 1024, 1024).ptx
    found = re.findall(r"stmatrix|ldmatrix|fence\.proxy\.async\.shared::cta|mbarrier\.arrive\.", ptx)
    stored = [n for n, what in enumerate(found) if what in ("stmatrix", "ldmatrix")]
    assert ("ldmatrix" in found) == (call is not product)
    assert stored
    for n in stored:
        after = next(what for what in found[n:] if not what.endswith("matrix"))
        assert after == "fence.proxy.async.shared::cta"


def comes_after(lines, i, words):
    """Whether every path to line i has all `words`, in their order, and no store after the first of them."""
    while words:
        i -= 1
        line = lines[i]
        if words[-1] in line:
            words = words[:-1]
        elif "st.global" in line or "cp.async.bulk.tensor" in line:
            return False
        elif line.startswith("$L"):
            label = line.split(":")[0]
            ways = [n for n, other in enumerate(lines) if re.search(rf"bra(\.uni)?\s+{re.escape(label)};", other)]
            ways += [] if re.match(r"(bra\.uni|ret)", lines[i - 1]) else [i]
            return bool(ways) and all(comes_after(lines, n, words) for n in ways)
    return True


@pytest.mark.parametrize(("call", "signals"), [(product, 6), (scatter, 1), (reduce, 4)])
def test_data_land_before_the_signal(compiling, call, signals):
    """wait_group, proxy fence, (barrier of the warp,) system fence, then the relaxed atomic of one thread."""
    lines = [line.strip() for line in call(compiling(2), 1024, 1024, 1024).ptx.splitlines()]
    lines = [line for line in lines if line and not re.match(r"//|\.loc|\$L__tmp", line)]
    relaxed = [n for n, line in enumerate(lines) if re.search(SIGNAL, line)]
    assert len(relaxed) == signals
    order = ["cp.async.bulk.wait_group ", "fence.proxy.async.global", "fence.acq_rel.sys"]
    for n in relaxed:
        assert comes_after(lines, n, order)
        assert not comes_after(lines, n, order[::-1])
