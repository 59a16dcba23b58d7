"""What was fitted to measurements, how far cases are from them, and the regret of the choices that follow."""

import itertools
import json
import math
import statistics

import pytest

from benchmarks import calibrate, zoo
from pkt.kernels.forecast import SAFE, Forecast, forecast, predicted
from pkt.model import calibration
from pkt.model.cost import Estimate, library
from pkt.model.gpu import H200, gpu_named
from tests.tune.helpers import OPERATORS

# Of the choices at products that the fit has not seen, and of what ships: mean, the least of the worst twentieth, and
# the worst. As found, rounded up. The worst is cuBLAS, 136 us for 128 rows of 5120 x 25600 in one layout, 88 for 64.
HELD = {"held out": (1.005, 1.03, 1.36), "shipped": (1.001, 1.002, 1.06)}
LATER = (1.004, 1.03, 1.15)
# On 4 H100: an operator's time / that of the fastest baseline, geometric mean, as found, rounded up.
LOST = {"all_gather_matmul": 0.861, "matmul_reduce_scatter": 0.787, "matmul_all_reduce": 0.874}
# Of those away from all that was fitted, where a safe form is taken instead of one that may be slow.
AWAY = (1.05, 1.2)

# 2 x H200, 2026-11-22, commit a5d495d, captured, L2 flushed, us; M, N, K of the product of each rank -> form -> time.
# One run on a shared host: the same product took 94 and 113 us.
REVIEWED = {
    ("all_gather_matmul", 2, 14336, 8192): {"push": 139, "unfused": 113, "nccl": 95},
    ("all_gather_matmul", 16, 14336, 8192): {"push": 139, "unfused": 94, "nccl": 82},
    ("all_gather_matmul", 64, 14336, 8192): {"push": 147, "unfused": 94, "nccl": 101},
    ("all_gather_matmul", 128, 14336, 8192): {"push": 139, "unfused": 81, "nccl": 92},
    ("all_gather_matmul", 256, 14336, 8192): {"gluon": 147, "unfused": 120, "nccl": 143},
    ("all_gather_matmul", 512, 14336, 8192): {"gluon": 230, "unfused": 226, "nccl": 244},
    ("all_gather_matmul", 1024, 14336, 8192): {"gluon": 385, "unfused": 414, "nccl": 432},
    ("all_gather_matmul", 2048, 14336, 8192): {"gluon": 715, "unfused": 756, "nccl": 784},
    ("all_gather_matmul", 64, 7168, 4096): {"push": 54, "unfused": 48, "nccl": 46},
    ("matmul_reduce_scatter", 2, 8192, 14336): {"add": 129, "unfused": 81, "nccl": 87},
    ("matmul_reduce_scatter", 16, 8192, 14336): {"add": 147, "unfused": 97, "nccl": 100},
    ("matmul_reduce_scatter", 64, 8192, 14336): {"add": 139, "unfused": 87, "nccl": 99},
    ("matmul_reduce_scatter", 128, 8192, 14336): {"add": 146, "unfused": 90, "nccl": 101},
    ("matmul_reduce_scatter", 256, 8192, 14336): {"gluon": 155, "unfused": 106, "nccl": 128},
    ("matmul_reduce_scatter", 512, 8192, 14336): {"gluon": 189, "unfused": 194, "nccl": 212},
    ("matmul_reduce_scatter", 1024, 8192, 14336): {"gluon": 387, "unfused": 387, "nccl": 411},
    ("matmul_reduce_scatter", 2048, 8192, 14336): {"gluon": 710, "unfused": 758, "nccl": 802},
    ("matmul_all_reduce", 1, 8192, 14336): {"unfused": 124, "nccl": 118},
    ("matmul_all_reduce", 64, 8192, 14336): {"unfused": 81, "nccl": 91},
    ("matmul_all_reduce", 256, 8192, 14336): {"unfused": 119, "nccl": 136},
    ("matmul_all_reduce", 700, 8192, 14336): {"gluon": 325, "unfused": 333, "nccl": 334},
}


@pytest.fixture(scope="module")
def times():
    return calibrate.measured()[0]


# ------------------------------------------------------------------------------------------------------------- regret
def test_the_regret_of_the_choices(times, capsys):
    judged = calibrate.judged(times)
    with capsys.disabled():
        print("\n" + "\n".join(calibrate.lines(times, judged, worst=3)))
    for name, found in judged.items():
        mean, late, worst = HELD[name]
        ratios = sorted(r.ratio for r in found)
        assert len(ratios) >= 150
        assert statistics.fmean(ratios) <= mean, calibrate.summary(found)
        assert ratios[int(0.95 * len(ratios))] <= late, calibrate.summary(found)
        assert ratios[-1] <= worst, calibrate.summary(found)


def test_no_product_is_on_both_sides(times):
    fitted, held_out = calibrate.split(times)
    assert {s.product for s in fitted}.isdisjoint(s.product for s in held_out)
    assert {s.operator for s in fitted} == {s.operator for s in held_out} == {*OPERATORS}
    assert {**fitted, **held_out} == times


def test_the_choices_at_shapes_of_another_day():
    ratios, losses = [], []
    for (operator, M, N, K), us in REVIEWED.items():
        shape = calibrate.Shape(operator, M, N, K, 2)
        taken = us[calibrate.taken(shape, us)]
        ratios.append(taken / min(us.values()))
        losses.append(taken / us["nccl"])
    mean, worst = AWAY
    assert statistics.fmean(ratios) <= mean
    assert max(ratios) <= worst
    assert statistics.fmean(losses) < 0.97, "faster than NCCL on the whole"
    assert sum(loss > 1 for loss in losses) <= 4, "slower where pkt's collective was, in this run"


def test_the_choices_at_shapes_that_were_measured_later(times, capsys):
    """The fit has seen none of these shapes, but other numbers of rows of the same products. As measured with this fit,
    pkt's default was 1.26 times as fast as NCCL + cuBLAS in the geometric mean, and never more than 3 % slower."""
    later = {s: found for s, found in calibrate.of_zoo(calibrate.RESULTS / "zoo_2.json").items() if s not in times}
    forms = {shape: {f: t for f, t in found.items() if f != calibrate.PRODUCT} for shape, found in later.items()}
    ratios = sorted(found[calibrate.taken(s, found)] / min(found.values()) for s, found in forms.items())
    mean, late, worst = statistics.fmean(ratios), ratios[int(0.95 * len(ratios))], ratios[-1]
    with capsys.disabled():
        print(f"\nmeasured later: {len(ratios)} shapes, regret mean {mean:.4f}, worst {worst:.3f}")
    assert len(ratios) > 150
    assert all(found <= most for found, most in zip((mean, late, worst), LATER)), (mean, late, worst)


def test_the_choices_on_another_gpu(capsys):
    """On 4 H100, of which the model knows the rate of memory. It was fitted to 2 and 4 H200, and to 2 H100 where memory
    is no limit."""
    gpu, ratios = gpu_named("NVIDIA H100 80GB HBM3"), []
    losses = {operator: {} for operator in OPERATORS}
    for (operator, M, N, K, size, weights), ms in zoo.measured(calibrate.RESULTS / "zoo_h100_4.json").items():
        forms = {mode: ms[f"pkt {mode}"] for mode in OPERATORS[operator].forms if f"pkt {mode}" in ms}
        order = OPERATORS[operator].forecast(calibrate.Shape(operator, M, N, K, size, "rows").key, gpu).order
        taken = forms[next(mode for mode in order if mode in forms)]
        others = [t for variant, t in ms.items() if not variant.startswith(("pkt ", calibrate.PRODUCT))]
        ratios.append(taken / min(forms.values()))
        losses[operator][M, N, K, weights] = taken / min(others)
    with capsys.disabled():
        print(f"\n4 H100: {len(ratios)} shapes, regret mean {statistics.fmean(ratios):.4f}, worst {max(ratios):.3f}")
    assert len(ratios) > 200
    assert statistics.fmean(ratios) <= 1.004
    assert max(ratios) <= 1.14, "1500 rows of 1536 x 6144, which the Gluon form of GEMM+RS takes 13 us less for"
    means = {operator: statistics.geometric_mean(of.values()) for operator, of in losses.items()}
    assert all(means[operator] <= LOST[operator] for operator in LOST), means
    missed = {(name, *shape) for name, of in losses.items() for shape, loss in of.items() if loss > 1.03}
    assert not missed


def test_a_model_that_says_the_opposite_would_be_noticed(times, monkeypatch):
    forecast = calibrate.OPERATORS["matmul_all_reduce"].forecast

    def backwards(self, key, gpu):
        found = forecast(key, gpu) if self.name == "matmul_all_reduce" else Forecast({}, SAFE, "")
        return Forecast(found.seconds, found.order[::-1], "")

    monkeypatch.setattr(type(OPERATORS["matmul_all_reduce"]), "forecast", backwards)
    monkeypatch.setattr(calibrate.tables, "nearest", lambda *_: None)
    assert statistics.fmean(r.ratio for r in calibrate.regrets(times)) > 1.2


# ----------------------------------------------------------------------------------------------------------- the file
def test_the_file_agrees_with_the_results():
    """Within the last digits, which depend on the library that solves the equations."""

    def assert_alike(found, wanted, where=""):
        assert type(found) is type(wanted), where
        if isinstance(wanted, dict):
            assert found.keys() == wanted.keys(), where
            for name in wanted:
                assert_alike(found[name], wanted[name], f"{where}.{name}")
        elif isinstance(wanted, list):
            assert len(found) == len(wanted), where
            for i, (a, b) in enumerate(zip(found, wanted)):
                assert_alike(a, b, f"{where}[{i}]")
        else:
            alike = pytest.approx(wanted, rel=1e-3, abs=2e-3) if isinstance(wanted, float) else wanted
            assert found == alike, f"{where} is stale: python -m benchmarks.calibrate"

    assert_alike(json.loads(calibrate.FILE.read_text()), json.loads(json.dumps(calibrate.calibrated())))


def test_a_fit_finds_what_was_put_in():
    """Offset, factors and exponents of times that were made of them."""

    def shape(M, N, K, size=2):
        return calibrate.Shape("op", M, N, K, size)

    made = [
        calibrate.Point(shape(M, N, K, size), guess, 3e-6 + factor * (N / K) ** 0.1 * guess)
        for size, factor in ((2, 1.2), (3, 1.2 * 1.5 ** math.log2(1.5)), (4, 1.8))
        for M in (1, 64, 4096)
        for N in (1024, 4096, 8192)
        for K, guess in ((1024, 2e-5), (4096, 1e-4), (16384, 1e-3))
    ]
    found = calibrate._curve(made)
    table = {"collectives": {}, "forms": {"op": {"rows": {"form": found}}}}
    with calibrate.instead(table):
        for point in made:
            parts = Estimate(0.0, point.guess)
            total = calibration.corrected("op", "form", point.shape.key, parts).total
            assert total == pytest.approx(point.seconds, rel=0.05)
    assert found["rows"] == [1, 4096]
    assert found["sides"]["N"][1:] == [1024, 8192]
    alone = calibrate._curve([calibrate.Point(shape(4096, 4096, 4096), 1e-3, 1e-3)])
    assert (alone["offset"], {factor for _, factor in alone["factor"]["2"]}) == (0.0, {1.0})


# ---------------------------------------------------------------------------------------------------------- the model
@pytest.fixture
def table():
    sides = {"N": [0.5, 1024, 32768], "K": [0.0, 1, 1 << 20]}
    curve = {"points": 1 << 30, "offset": 2e-6, "rows": [2, 512], "sides": sides, "factor": {"2": [[1, 2.0], [4, 1.0]]}}
    points = {"2": [[1000, 10e-6], [2000, 12e-6]], "8": [[1000, 30e-6]]}
    content = {
        "collectives": {"all_gather": {"pkt": points}},
        "product": curve,
        "forms": {"op": {"rows": {"fast": curve}}},
        "error": {"op": {"fast": 0.1, "sure": 0.001}},
        "known": {"op": {"rows": [[2, 1024, 1024, 16, 256]]}},
    }
    with calibrate.instead(content):
        yield content


def key(M=64, N=1024, K=1024, size=2, dtype="bf16", **more):
    return {"M": M, "N": N, "K": K, "size": size, "dtype": dtype, **more}


def test_a_correction_is_an_offset_and_a_factor(table):
    curve = table["forms"]["op"]["rows"]["fast"]
    parts = Estimate(launch=1e-6, compute=9e-6)
    for M, factor in ((1, 2.0), (2, 2**0.5), (4, 1.0), (4096, 1.0)):
        found = calibration.corrected("op", "fast", key(M, N=8192), parts)
        assert found.total == pytest.approx(2e-6 + factor * 10e-6)
        assert (found.launch, found.compute) == (1e-6, 9e-6)
    assert calibration.corrected("op", "other", key(), parts) == parts
    assert calibration.corrected("op", "fast", key(shard="columns"), parts) == parts
    for N, factor in ((512, 8**-0.5), (1024, 8**-0.5), (32768, 2.0), (1 << 20, 2.0)):
        assert calibration.corrected("op", "fast", key(4, N), parts).total == pytest.approx(2e-6 + factor * 10e-6)
    curve["factor"]["8"] = [[1, 32.0], [4, 4.0]]
    for size, factor in ((1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0), (16, 4.0)):
        found = calibration.corrected("op", "fast", key(4, N=8192, size=size), parts)
        assert found.total == pytest.approx(2e-6 + factor * 10e-6), "between numbers of ranks by logarithms"
    square = key(4, N=8192)
    assert calibration.product(square).total == pytest.approx(2e-6 + library(square).total)
    twice = calibration.corrected("op", "fast", square, calibration.corrected("op", "fast", square, parts))
    assert twice.total == pytest.approx(14e-6)


def test_what_was_measured_near_a_shape_counts_there(table):
    parts, ranks = Estimate(launch=1e-6, compute=9e-6), 2
    fitted = calibration.corrected("op", "fast", key(), parts).total
    table["near"] = {"op": {"rows": {"fast": [[ranks, 64, 1024, 1024, 0.2]]}}}
    calibration.measured.cache_clear()

    def ratio(case, gpu=H200):
        alone = calibration._corrected(table["forms"]["op"]["rows"]["fast"], case, parts).total
        return calibration.corrected("op", "fast", case, parts, gpu).total / alone

    assert fitted * ratio(key()) == pytest.approx(fitted * math.exp(0.2 / (1 + calibration.APART)))
    assert ratio(key(M=50)) == pytest.approx(ratio(key(M=64))), "as many rows, in whole tiles"
    assert 1.0 < ratio(key(K=1300)) < ratio(key(K=1100)) < ratio(key())
    for far in (key(M=65), key(K=8192), key(N=8192), key(size=4)):
        assert ratio(far) == pytest.approx(1.0, abs=1e-3)
    assert ratio(key(), gpu_named("NVIDIA H100 80GB HBM3")) == 1.0
    assert ratio(key(M=1 << 20)) == 1.0


def test_rows_are_counted_in_whole_tiles():
    rows = {1: 16, 16: 16, 17: 32, 64: 64, 65: 128, 128: 128, 129: 256, 512: 512, 514: 640}
    assert {M: calibration.whole_tiles(M) for M in rows} == rows


def test_a_collective_takes_a_latency_and_a_rate(table):
    of = calibration.collective_seconds
    assert [of("all_gather", "pkt", sent, 2) for sent in (0, 10, 1000, 1500, 2000, 4000)] == [
        pytest.approx(seconds) for seconds in (0.0, 10e-6, 10e-6, 11e-6, 12e-6, 24e-6)
    ]
    assert of("all_gather", "pkt", 1000, 3) == pytest.approx(10e-6)
    assert of("all_gather", "pkt", 1000, 6) == pytest.approx(30e-6)
    assert of("all_gather", "pkt", 1000, 1) == 0.0


def test_distances_in_doublings(table):
    def far(**more):
        return calibration.distance("op", key(**more))

    assert far() == far(M=16) == far(M=256) == 0
    assert far(M=8) == far(M=512) == far(N=2048) == far(K=512) == 1
    assert far(M=1024, N=512, K=4096) == 5
    assert far(size=4) == calibration.RANKS
    assert far(shard="columns") == calibration.distance("other", key()) == math.inf


def test_the_model_is_trusted_less_with_every_doubling(table):
    def trust(gpu=H200, **more):
        return calibration.trust("op", key(**more), gpu)

    assert trust() == trust(N=2048) == (0.0, "")
    assert trust(N=4096)[0] == 1.0
    assert trust(N=4096)[1] == "M = 64, N = 4096, K = 1024 on 2 ranks is 2.0 doublings from the nearest measured shape"
    assert trust(N=1024 << 5)[0] == trust(dtype="fp32")[0] == trust(gpu_named("NVIDIA B200"))[0] == math.inf
    assert "far from every measured shape" in trust(N=1024 << 5)[1]
    h100 = gpu_named("NVIDIA H100 80GB HBM3")
    assert trust(h100) == (calibration.OTHER_GPU, f"the model was fitted to {H200.name}, not to {h100.name}")
    assert trust(h100, N=4096)[0] == 1.0 + calibration.OTHER_GPU

    def handicap(mode, doublings, **more):
        return calibration.handicap("op", mode, key(**more), doublings)

    assert handicap("fast", 0.0) < 1e-6
    assert handicap("fast", 0.0, M=2048) == pytest.approx(handicap("fast", 2.0))
    assert handicap("fast", 0.0, M=1) == pytest.approx(handicap("fast", 1.0))
    assert handicap("fast", 2.0) == pytest.approx(0.2)
    assert handicap("new", 0.0) == calibration.UNMEASURED, "a form that was not measured has to be far ahead"
    assert handicap("fast", math.inf) == math.inf
    table["forms"]["op"]["rows"]["fast"]["points"] = 40
    assert handicap("fast", 0.0) == pytest.approx(0.05), "one that was seldom measured, too"


@pytest.mark.parametrize("what", OPERATORS)
def test_what_is_not_known_is_left_to_the_safe_forms(what):
    operator = OPERATORS[what]
    near = {"M": 8192, "N": 2048, "K": 8192} if what == "all_gather_matmul" else {"M": 8192, "N": 8192, "K": 2048}
    found = operator.forecast({**near, "dtype": "bf16", "size": 4}, H200)
    assert (found.order[0], found.doubt) == ("gluon", "")
    assert [*found.seconds.values()] == sorted(found.seconds.values())
    for case, gpu in (
        ({**near, "dtype": "fp32", "size": 4}, H200),
        ({**near, "dtype": "bf16", "size": 4}, gpu_named("NVIDIA B200")),
        ({"M": 8, "N": 8, "K": 8, "dtype": "bf16", "size": 4}, H200),
    ):
        found = operator.forecast(case, gpu)
        assert {*found.order[:2]} == {*SAFE}
        assert found.doubt
        assert {*found.order} == {*operator.forms}
    assert operator.forecast({**near, "M": 0, "dtype": "bf16", "size": 4}, H200).order[:2] == SAFE


@pytest.mark.parametrize("what", OPERATORS)
def test_what_was_measured_says_which_forms_are_slower(what, times):
    """In one case NCCL took 0.4 % less, where the Gluon form took 15 % less than either."""
    shapes = {shape: found for shape, found in times.items() if shape.operator == what}
    for name, form in OPERATORS[what].forms.items():
        for slower in form.outruns:
            both = {shape: found for shape, found in shapes.items() if {name, slower} <= found.keys()}
            fastest = [
                s for s, found in both.items() if found[slower] == min(calibrate.without_product(found).values())
            ]
            assert not fastest, (name, slower)


@pytest.mark.parametrize("what", OPERATORS)
def test_few_rows_never_take_the_form_of_many(what):
    """Of the products that were measured with many rows."""
    for search in calibrate.tables.measured(OPERATORS[what]):
        for M in (1, 8, 64):
            case = {**search.key, "M": M}
            assert OPERATORS[what].forecast(case, H200).order[0] in (*SAFE, "low_latency")


@pytest.mark.parametrize("what", OPERATORS)
def test_plain_forms_are_behind_the_gluon_form_where_that_runs(what):
    """The model knows few times of plain forms. It would take "lcsc" for 4096 x 5120 with K = 6400 on 4 H100: 0.58 ms
    where "gluon" takes 0.48 (matmul_all_reduce_tried_h100_4.json)."""
    operator = OPERATORS[what]
    slower = operator.forms["gluon"].outruns
    assert slower
    ahead = 0
    for gpu in (gpu_named("NVIDIA H100 80GB HBM3"), gpu_named("NVIDIA B200")):
        for M, N, K in itertools.product((512, 4096), (1024, 5120, 8192), (1024, 6400)):
            key = {"M": M, "N": N, "K": K, "dtype": "bf16", "size": 4}
            found = operator.forecast(key, gpu)
            for form in slower:
                own = predicted(what, form, operator.forms[form], {"mode": form}, key, gpu).total
                if gpu.gluon:
                    assert found.order.index("gluon") < found.order.index(form)
                    assert found.seconds[form] == max(own, 1.02 * found.seconds["gluon"])
                    ahead += own < found.seconds["gluon"]
                else:
                    assert found.seconds[form] == own
    assert ahead or what == "all_gather_matmul", "no case in which this matters"


@pytest.mark.parametrize("what", OPERATORS)
def test_an_operator_with_fewer_forms_has_a_forecast(what):
    """As all_gather_matmul_kept, which has the Gluon form and not all the plain ones that are slower."""
    key = {"M": 4096, "N": 5120, "K": 6400, "dtype": "bf16", "size": 2}
    forms = OPERATORS[what].forms
    for missing in forms.keys() - SAFE:
        found = forecast(what, {name: form for name, form in forms.items() if name != missing}, key, H200)
        assert set(found.order) == forms.keys() - {missing}
