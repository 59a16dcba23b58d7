"""The cost model: its equation, its parts against sums by hand, and its error against measurements."""

import heapq
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkt.kernels.all_gather_matmul.rules import BESIDE
from pkt.kernels.matmul_all_reduce.rules import MISSED, ROUND_BYTES, WIDE_COST, operands
from pkt.kernels.matmul_reduce_scatter.rules import ANNOUNCED, PARCEL_COSTS
from pkt.kernels.shared.product_rules import ARRIVES
from pkt.kernels.shared.tile_product import Tiles
from pkt.model.calibration import collective_seconds
from pkt.model.config import NCCL, UNFUSED, Config
from pkt.model.cost import Estimate, library, overlapped, tile_seconds, waves
from pkt.model.gpu import H200, interpolated, link_curves, link_rate
from pkt.tune import candidates, tables
from pkt.tune.candidates import error
from pkt.tune.search import Candidate
from tests.tune.helpers import MODELS, OPERATORS

WIDE = (128, 256, 64)
COLLECTIVES = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}

# Median and worst of |predicted / measured - 1| over the results that ship, rounded up.
HELD = {
    "all_gather_matmul": (0.05, 0.21),
    "matmul_reduce_scatter": (0.05, 0.19),
    "matmul_all_reduce": (0.06, 0.2),
}


def estimate(what, config, key):
    return candidates.estimate(OPERATORS[what], config, key)


def sent(what, key):
    return OPERATORS[what].tuning.sent(key)


def product(N, size=4, dtype="bfloat16"):
    return {"M": N, "N": N // size, "K": N, "dtype": dtype, "size": size}


# ------------------------------------------------------------------------------------------------------- the equation
def test_the_total_is_the_paper_s_equation():
    parts = Estimate(launch=1.0, compute=2.0, memory=3.0, communication=2.5, exposed=0.5, sync=0.25)
    assert parts.total == 1.0 + 3.0 + 0.5 + 0.25


def played(tasks, task_seconds, sms, late, until):
    """The result of `waves`, found by handing out the tasks one by one."""
    free = [0.0] * (sms - late) + [until] * late
    heapq.heapify(free)
    end = 0.0
    for _ in range(tasks):
        at = heapq.heappop(free) + task_seconds
        end = max(end, at)
        heapq.heappush(free, at)
    return end


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 40))
def test_waves_equal_a_simulated_queue(tasks, seconds, sms, late, until):
    late = min(late, sms)
    found = waves(tasks, float(seconds), sms, late, float(until))
    assert found == pytest.approx(played(tasks, float(seconds), sms, late, float(until)))


def test_one_task_beyond_whole_waves_costs_a_wave():
    assert waves(132, 1.0, 132) == 1.0
    assert waves(133, 1.0, 132) == 2.0
    # 512 tiles take five waves of 124 SMs, and four with the eight SMs that join after the first wave
    assert waves(512, 1.0, 124) == 5.0
    assert waves(512, 1.0, 132, num_comm_sms=8, until=1.0) == 4.0 + (512 > 124 * 4 + 8 * 3)


def test_an_overlapped_kernel_by_hand():
    together = {"tasks": 132, "task_seconds": 1e-3, "comm_bytes": 390e6, "comm_rate": 390e9}
    assert together["comm_bytes"] / together["comm_rate"] == 1e-3
    alone = overlapped(tasks=132, task_seconds=1e-3)
    slow = interpolated(H200.slow, 1e-3)
    assert alone.total == pytest.approx(H200.launch + 1e-3 * slow)
    after = overlapped(**together, num_comm_sms=0)
    assert after.total == pytest.approx(H200.launch + 1e-3 * slow + 1e-3)
    passing = overlapped(**together)
    assert passing.total == pytest.approx(H200.launch + math.hypot(1e-3 * slow, 1e-3))
    # 16 SMs come back after 1 ms, just when the first wave of the others ends
    split = overlapped(**together, num_comm_sms=16)
    assert split.compute == pytest.approx(2e-3 * interpolated(H200.slow, 2e-3))
    assert overlapped(**together, num_comm_sms=16, sync=1.0, exposed=2.0).total == pytest.approx(split.total + 3.0)
    bound = overlapped(tasks=1, task_seconds=1e-9, memory_bytes=4.2e12)
    assert bound.memory == 1.0
    assert bound.total == pytest.approx(1.0 + H200.launch, rel=1e-6)


def test_the_last_tile_after_the_last_byte_shows_only_where_the_links_are_the_limit():
    links = {"tasks": 1, "task_seconds": 1e-4, "comm_bytes": 390e6, "comm_rate": 390e9, "num_comm_sms": 8}
    assert overlapped(**links, around=1e-4).total == pytest.approx(overlapped(**links).total + 1e-4)
    tensor_cores = {**links, "tasks": 132 * 40}
    assert overlapped(**tensor_cores, around=1e-4).total == overlapped(**tensor_cores).total


def test_a_small_tile_is_bound_by_its_loads():
    def rate(m, n):
        return m * n / tile_seconds(m, n, 4096)

    assert rate(128, 256) > rate(128, 128) > rate(64, 128) > rate(64, 64)
    assert rate(128, 256) < H200.flops / H200.sms / (2 * 4096)


# ---------------------------------------------------------------------------------------------------------- the links
def test_link_rate_is_the_measured_curve():
    for programs, gb_s in link_curves()["by_programs"]["register store, 16 warps, 32 KB, all"]:
        assert link_rate("register store", programs, peers="all") == pytest.approx(gb_s * 1e9)
    for nbytes, gb_s in link_curves()["by_size"]["copy engine put"]:
        assert link_rate("copy engine put", 0, nbytes) == pytest.approx(gb_s * 1e9)


def test_a_program_with_half_a_block_in_flight_counts_as_two_thirds():
    measured = dict(link_curves()["by_programs"]["register store, 8 warps, 16 KB, one"])
    for programs in (1, 2, 4, 8):
        assert link_rate("register store", programs, 16384) == pytest.approx(measured[programs] * 1e9, rel=0.06)


@pytest.mark.parametrize("mechanism", ["register store", "register load", "TMA store", "TMA load", "TMA reduce-add"])
def test_links_fill_up(mechanism):
    rates = [link_rate(mechanism, n) for n in (1, 3, 6, 12, 132, 500)]
    assert rates[0] < rates[1] < rates[2] < rates[3]
    assert rates[-1] == rates[-2] < H200.link
    assert link_rate(mechanism, 1, 64) < rates[0] / 10


# ----------------------------------------------------------------------------------------------- against measurements
@pytest.mark.parametrize("what", MODELS)
def test_the_model_s_error(what):
    median, worst = HELD[what]
    searches = tables.measured(OPERATORS[what])
    assert len(searches) >= 3
    found = error(c for search in searches for c in search.candidates)
    assert found.count == sum(len(search.candidates) for search in searches)
    assert found.median <= median, str(found)
    assert found.worst <= worst, str(found)


@pytest.mark.parametrize("what", MODELS)
def test_the_baseline_is_a_product_and_then_a_collective(what):
    for search in tables.measured(OPERATORS[what]):
        case = search.key
        moving = collective_seconds(COLLECTIVES[what], "nccl", sent(what, case), case["size"])
        assert MODELS[what](NCCL, case) == pytest.approx(library(case).total + moving)
        measured = next(c.time for c in search.candidates if c.config == NCCL)
        assert estimate(what, NCCL, case).total == pytest.approx(measured, rel=0.2)
    few = {"M": 1, "N": 28672, "K": 8192, "dtype": "bf16", "size": 1}  # bound by the bytes of the weights
    assert library(few).memory > library(few).compute
    assert sent(what, {**few, "size": 4}) == {"all_gather_matmul": 0.75 * 2 * 8192, "matmul_all_reduce": 3 * 28672}.get(
        what, 0.75 * 2 * 28672
    )


@pytest.mark.parametrize("what", MODELS)
def test_pkt_s_own_collective_beside_a_product(what):
    for M in (128, 4096):
        case = {"M": M, "N": 8192, "K": 7168, "dtype": "bf16", "size": 4}
        moving = collective_seconds(COLLECTIVES[what], "pkt", sent(what, case), 4)
        assert MODELS[what](UNFUSED, case) == pytest.approx(library(case).total + moving)
        assert 7e-6 < moving < 10e-6 + sent(what, case) / 340e9
        assert moving < collective_seconds(COLLECTIVES[what], "nccl", sent(what, case), 4)
        order = OPERATORS[what].forecast(case, H200).order
        assert order.index("unfused") < order.index("nccl")


def test_few_rows_and_their_all_reduce():
    """Measured on 4 x H200, in us, by benchmarks/results/zoo_4.json and collectives.json."""
    case = {"N": 8192, "K": 7168, "dtype": "bf16", "size": 4}
    for M, nccl, ours in ((2, 55.2e-6, 44.9e-6), (8, 56.1e-6, 46.4e-6), (64, 62.8e-6, 52.0e-6)):
        assert estimate("matmul_all_reduce", NCCL, {**case, "M": M}).total == pytest.approx(nccl, rel=0.06)
        assert estimate("matmul_all_reduce", UNFUSED, {**case, "M": M}).total == pytest.approx(ours, rel=0.15)
    for M, seconds in ((1, 7.47e-6), (64, 14.2e-6), (1024, 83.1e-6)):
        assert collective_seconds("all_reduce", "pkt", sent("matmul_all_reduce", {**case, "M": M}), 4) == (
            pytest.approx(seconds, rel=0.01)
        )


def in_turns(what, case, **settings):
    return estimate(what, Config(mode="gluon", tiles=WIDE, **settings), case)


@pytest.mark.parametrize("what", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_taking_turns_by_hand(what):
    """On 4 ranks a round of 132 tiles has 33 own tiles, which come `lag` tiles behind the others'. If computing `lag`
    tiles takes less time than a tile takes to arrive, a program waits for the rest of it before each own tile. Nothing
    is sent while the last `lag` tiles are computed."""
    case = {"M": 8192, "N": 8192, "K": 2048, "dtype": "bf16", "size": 4}
    half, one, own = 3 * 2048 * 8192 * 2, tile_seconds(128, 256, 2048), 16 * 32
    moving = (1 if what == "matmul_reduce_scatter" else 2) * half / link_rate("TMA store", H200.sms)
    for lag, late in ((1, (ARRIVES - one / 33) * own / 132), (33, 0), (99, 0)):
        found = in_turns(what, case, lag=lag)
        assert found.communication == pytest.approx(moving)
        compute = found.compute / (1 if what == "matmul_reduce_scatter" else WIDE_COST)
        longer = max(compute, moving)
        assert found.exposed == pytest.approx(0.6 * (math.hypot(compute, moving) - longer) + max(
            0.0, moving + 2 * one - longer))  # fmt: skip
        assert found.sync == pytest.approx(2 * H200.signal + lag / 132 * one + late)
    short = {**case, "K": 1024}
    assert in_turns(what, short) == in_turns(what, short, lag=33)
    few = {**case, "M": 512, "N": 512}
    assert in_turns(what, few, lag=8) == in_turns(what, few, lag=2), "two tiles of each rank"
    if what == "matmul_all_reduce":  # 5 row blocks in two rounds
        found = in_turns(what, {**case, "M": 514}, lag=1)
        assert found.exposed == min(found.compute, found.communication), "nothing is sent meanwhile"
    alone = in_turns(what, {**case, "size": 1}, lag=8)
    assert (alone.communication, alone.sync) == (0, 2 * H200.signal)


def test_tiles_that_alternate_are_read_again_from_memory():
    """On slower memory that is the limit of the all-reduce's Gluon form, unless own tiles come last, as with long K."""
    slow, tiles = replace(H200, memory=2e12), Tiles(*WIDE)
    assert operands(4096, tiles, 132) < ROUND_BYTES < operands(16384, tiles, 132)
    for K, read in ((4096, MISSED * 128 * 64 * (128 + 256)), (16384, 3 * 16384)):
        case = {"M": 16384, "N": 16384, "K": K, "dtype": "bf16", "size": 4}
        found = OPERATORS["matmul_all_reduce"].predicted({"mode": "gluon"}, case, slow)
        assert found.memory == pytest.approx(read * K * 2 / slow.memory)
        limit = found.launch + max(found.compute, found.memory)
        assert (found.total - found.correction == pytest.approx(limit)) == (K == 4096)


def test_rounds_of_narrow_tiles_and_of_short_ones():
    """The default lag is two rounds of narrow tiles, and one of wide tiles where half a round is too short."""
    case = {"M": 16384, "N": 16384, "K": 512, "dtype": "bf16", "size": 4}
    for tiles, lag in (((128, 128, 64), 66), (WIDE, 33)):
        taken, given = (Config(mode="gluon", tiles=tiles, **of) for of in ({}, {"lag": lag}))
        assert estimate("matmul_all_reduce", taken, case) == estimate("matmul_all_reduce", given, case)


def test_parcels_by_hand():
    """Own tiles come last. With more than one copy to each peer, the rest of a part arrives while they are computed."""
    case = {"M": 8192, "N": 8192, "K": 4096, "dtype": "bf16", "size": 4}  # 16 rounds of tiles, 4 of each part
    part = 2048 * 8192 * 2

    def of(copies, K):
        found = in_turns("matmul_reduce_scatter", {**case, "K": K}, copies=copies)
        copy = PARCEL_COSTS + part / copies / link_rate("copy engine put", 0, part // copies)
        assert found.communication == pytest.approx(3 * copies * copy)
        assert found.sync == pytest.approx(H200.barrier + 2 * H200.signal + ANNOUNCED)
        one = tile_seconds(128, 256, K)
        return found, copy, one * interpolated(H200.slow, 16 * one)

    for copies in (2, 4):
        assert of(copies, 4096)[0].exposed == 0
    found, copy, one = of(1, 4096)  # the last copy, then the own tiles except one round
    assert found.exposed == pytest.approx(12 * one + copy + 3 * one - found.compute)
    assert in_turns("matmul_reduce_scatter", case) == in_turns("matmul_reduce_scatter", case, copies=2)
    for copies, rounds in ((1, 4), (4, 1)):  # the links are the limit, from the first parcel's last tile on
        found, copy, one = of(copies, 512)
        ends = rounds * one + 3 * copies * copy + (rounds - 1) * one
        assert found.compute < found.communication
        assert found.exposed == pytest.approx(ends - found.communication)
    alone = in_turns("matmul_reduce_scatter", {**case, "size": 1}, copies=2)
    assert alone.communication == 0


def test_fewer_peers_mean_fewer_bytes_under_way_in_the_plain_all_reduce():
    rates = {}
    for size in (2, 4):
        case = {"M": 8192, "N": 8192, "K": 2048, "dtype": "bf16", "size": size}
        found = estimate("matmul_all_reduce", Config(mode="lcsc", tiles=WIDE, num_comm_sms=4), case)
        rates[size] = 2 * (size - 1) / size * 8192 * 8192 * 2 / found.communication
    assert rates[4] / rates[2] == pytest.approx(1.5 ** math.log2(3), rel=0.02)  # while the links are far from full


def test_pushing_first_by_hand():
    """Four rounds of 124 programs leave 16 of 512 tiles. Cut in 4, each of their parts has a program."""
    case, one, part = product(8192), tile_seconds(128, 256, 8192), tile_seconds(128, 64, 8192)

    def of(key=case, **settings):
        return estimate("all_gather_matmul", Config(mode="gluon", num_comm_sms=8, **settings), key)

    found = of(rounds_alone=4, cut_last=4)
    assert found.compute == pytest.approx((4 * one + part) * interpolated(H200.slow, 4 * one + part))
    assert found.communication == pytest.approx(3 * 2048 * 8192 * 2 / (BESIDE * link_rate("TMA store", 8, peers="all")))
    # the rows that arrive last belong to the last whole round, whose first rows arrived much earlier
    wave = found.communication * 132 / (512 * 0.75)
    assert found.exposed == pytest.approx(max(
        0.0, found.communication + max(one / 32, one - wave) - max(found.communication, found.compute)))  # fmt: skip
    whole = of(rounds_alone=4, cut_last=1)
    assert whole.compute == pytest.approx(5 * one * interpolated(H200.slow, 5 * one))
    # three whole rounds, then 560 parts: four rounds of 124 programs, and 64 parts for all programs
    cut = of(rounds_alone=7, cut_last=4, whole_rounds=3)
    assert cut.compute == pytest.approx((3 * one + 5 * part) * interpolated(H200.slow, 3 * one + 5 * part))
    assert cut.exposed < found.exposed
    big = product(16384)  # pushing takes 9 rounds; fewer or more are slower
    totals = {n: of(big, rounds_alone=n).total for n in (0, 7, 9, 16)}
    assert min(totals, key=totals.get) == 9
    assert of().total == pytest.approx(min(of(cut_last=n).total for n in (1, 2, 4)), rel=0.05)
    few = estimate("all_gather_matmul", Config(mode="gluon", num_comm_sms=2), case)
    assert few.communication > 3 * found.communication


def test_error_counts_cases_with_both_times():
    config = Config(x=1)
    both = Candidate(config, 2.0, (1.0, 1.0))
    assert error([both, Candidate(config, 1.1, (1.0,)), Candidate(config, None, (1.0,)), Candidate(config, 1.0)]) == (
        error([Candidate(config, 1.1, (1.0,)), both])
    )
    found = error([both, Candidate(config, 1.0, (1.0,)), Candidate(config, 0.9, (1.0,))])
    assert (round(found.median, 9), found.worst, found.count) == (0.1, 1.0, 3)
    assert error([Candidate(config)]) is None


# --------------------------------------------------------------------------------------------- what the paper reports
def splits(N, what="all_gather_matmul", sms=range(2, 66, 2)):
    return {n: MODELS[what](Config(mode="push", num_comm_sms=n, tiles=WIDE), product(N)) for n in sms}


def test_small_products_want_more_sms_to_communicate():
    """Figure 5 of the paper: the best split depends on the size."""
    best = {}
    for N in (2048, 32768):
        times = splits(N)
        best[N] = min(times, key=times.get)
        assert times[best[N]] < times[2 if N == 2048 else 64]
    assert best[32768] < best[2048]


def test_one_rank_sends_nothing():
    for what, mode in (("all_gather_matmul", "push"), ("all_gather_matmul", "gluon"), ("all_gather_matmul", "copy"),
                       ("matmul_reduce_scatter", "add"), ("matmul_reduce_scatter", "gluon"),
                       ("matmul_reduce_scatter", "inbox"), ("matmul_all_reduce", "lcsc"),
                       ("matmul_all_reduce", "gluon"),
                       *((what, mode) for what in MODELS for mode in ("nccl", "unfused"))):  # fmt: skip
        config = Config(tiles=WIDE, mode=mode)
        shape = {"M": 8192, "N": 2048, "K": 8192, "dtype": "torch.float16"}
        one, four = (estimate(what, config, {**shape, "size": size}) for size in (1, 4))
        assert one.communication == 0 < four.communication


@pytest.mark.parametrize("what", MODELS)
def test_unmeasured_cases_have_no_prediction(what):
    config = Config(mode=next(iter(OPERATORS[what].forms)), tiles=WIDE)
    assert MODELS[what](config, product(4096)) > 0
    assert MODELS[what](config, product(4096, dtype="float32")) is None
    assert MODELS[what](config, {**product(4096), "M": 0}) is None
    assert MODELS[what](config, {"N": 1}) is None
    assert estimate("all_gather_matmul", Config(mode="none"), product(4096)) is None


def test_copies_of_more_rows_are_faster_and_leave_more_exposed():
    key = {"M": 4096, "N": 16384, "K": 4096, "dtype": "bf16", "size": 4}
    parts = {
        n: estimate("all_gather_matmul", Config(mode="copy", push_rows=n, tiles=(128, 256, 64)), key) for n in (1, 8)
    }
    pushed = estimate("all_gather_matmul", Config(mode="push", num_comm_sms=1, tiles=(128, 256, 64)), key)
    assert parts[8].communication < parts[1].communication < pushed.communication, "one SM is slower than a copy engine"
    assert parts[1].compute == parts[8].compute <= pushed.compute
    few = {"M": 32768, "N": 1536, "K": 4096, "dtype": "bf16", "size": 4}  # the links are the limit
    exposed = [
        estimate("all_gather_matmul", Config(mode="copy", push_rows=n, tiles=(128, 256, 64)), few).exposed
        for n in (1, 64)
    ]
    assert exposed[1] > exposed[0]
    wide = {"num_comm_sms": 0, "tiles": (128, 256, 64)}
    copied = [estimate("all_gather_matmul", Config(mode=mode, **wide), few) for mode in ("copy", "gluon")]
    assert copied[1].communication < copied[0].communication, "one copy to each peer, not four"
    cut = [
        estimate("all_gather_matmul", Config(mode="gluon", push_rows=8, cut_last=n, **wide), few).exposed
        for n in (1, 2)
    ]
    assert cut[1] < cut[0], "half a tile after the last copy"
    alone = estimate("all_gather_matmul", Config(mode="copy", tiles=(128, 256, 64)), {**few, "size": 1})
    assert alone.communication == 0


def test_two_chunks_shorten_the_wait_if_the_own_shard_is_done_before():
    """On 4 x H200, 8192 takes 0.360 ms in two chunks and 0.374 in one. At 16384 the first copy arrives in time."""
    for side, sooner in ((8192, True), (16384, False)):
        key = {"M": side, "N": side // 4, "K": side, "dtype": "bf16", "size": 4}
        whole, half, rule = (
            estimate("all_gather_matmul", Config(mode="gluon", num_comm_sms=0, tiles=(128, 256, 64), **chunk), key)
            for chunk in ({"chunk": 0}, {"chunk": side // 2}, {})
        )
        assert (half.exposed < whole.exposed) == sooner
        assert whole.compute == half.compute
        assert rule == (half if sooner else whole)


@pytest.mark.parametrize("more", [{"num_comm_sms": 0}, {}])
def test_gluon_forms_read_the_weights_once_for_each_rank_s_rows(more):
    """As zoo_h100_4.json of benchmarks/results shows of 8 rows on 4 ranks."""
    key = {"M": 8, "N": 14336, "K": 8192, "dtype": "bf16", "size": 4, "shard": "rows"}
    found = estimate("all_gather_matmul", {"mode": "gluon", **more}, key)
    assert found.memory == pytest.approx(4 * 2 * 14336 * 8192 / H200.memory, rel=0.01)
