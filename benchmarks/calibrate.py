"""Fit the cost model's constants to the committed results, and say how good the choices are that follow.

    python -m benchmarks.calibrate            # write pkt/model/calibrated.json, print the regret
    python -m benchmarks.calibrate --check    # print the regret of the committed file, write nothing

Times: the zoo's (zoo_calibration_*.json and zoo_4.json of benchmarks/results), and those of the operators' own
benchmarks at default settings; of reduce-scatter products whose tiles were stored in the zoo's runs and are copied
now, those of TRIED; of all-reduce products whose tiles were narrow in those runs and are wide now, those of
TRIED_ON_H100; of low_latency with 17 to 32 rows, whose tiles have changed, those of FEWER_ROWS alone.

A product is the matrix of weights that all ranks share, by its two sides. What ships is fitted to all of them. To judge
the fit, every third product is held out: a fit that has seen neither its times nor its shapes chooses there. The regret
of a shape is the time of the form that the operator takes there, by the rule and the tables that ship, divided by that
of the fastest form that was measured there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._harness import RESULTS
from benchmarks.tuned import ROOT, source, text
from pkt.kernels.all_gather_matmul.rules import push_plan
from pkt.kernels.matmul_all_reduce.rules import settled, tiles_of
from pkt.kernels.matmul_reduce_scatter.rules import COPIED_BYTES, copies_of
from pkt.kernels.shared.gluon_fits import NARROW, TILES
from pkt.model import calibration
from pkt.model.cost import library
from pkt.model.gpu import H200
from pkt.tune import tables
from pkt.tune.candidates import tuned_operators

FILE = ROOT / "pkt" / "model" / "calibrated.json"
OPERATORS = tuned_operators()
KNOTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
"""M at which the factor of a form is fitted; in between, logarithms are interpolated."""
OFFSETS = tuple(n * 1e-6 for n in range(-8, 21))
"""Candidates for the seconds that a form takes beside those of the model."""
STIFF, SHRINK, ALIKE, TURN, LATE = 0.3, 0.05, 0.25, 1.0, 0.05 / 1e-6
"""How much a step of a curve of factors costs, a factor other than 1, factors that differ between numbers of ranks, an
exponent other than 0, and a second of offset, against a relative error of 1."""
RIVAL = 1.5
"""Forms that take so many times as long as the fastest say nothing about close choices."""
HELD_OUT, FOLDS = 3, 4
"""Of so many products one is held out; and in so many parts the others are cut to find the error of the fit."""

PRODUCT = "cuBLAS alone"
"""No form: the product without its collective."""
VARIANTS = {
    PRODUCT: PRODUCT,
    "NCCL + cuBLAS": "nccl", "pkt unfused": "unfused", "pkt gluon": "gluon", "pkt lcsc": "lcsc",
    "pkt push, 16 SMs, 128x256": "push", "pkt push, 16 SMs, chunks of 256": "push", "pkt copy, 128x256": "copy",
    "pkt add, 128x256": "add", "pkt inbox, 128x256": "inbox",
}  # fmt: skip
"""Variants of the operators' benchmarks that have the default settings of their form."""
RETILED, FEWER_ROWS = range(17, 33), "zoo_calibration_24_and_32_rows_2.json"
"""M at which low_latency has other tiles than in the zoo's first runs, and the zoo's file that has these tiles."""
TRIED = "matmul_reduce_scatter_tried_2.json"
TRIED_ON_H100 = "matmul_all_reduce_tried_2.json"
COLLECTIVES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}


class Shape(NamedTuple):
    """What was measured: the product (M, K) @ (K, N) of each of `size` ranks; layout: how A is
    sharded, by "rows" or "columns". weights: how they are stored, which no choice depends on."""

    operator: str
    M: int
    N: int
    K: int
    size: int
    layout: str = "rows"
    weights: str = "row-major"

    @property
    def key(self) -> dict[str, Any]:
        """As `Tuning.key` has it."""
        shard = {"shard": self.layout} if self.layout != "rows" else {}
        return {"M": self.M, "N": self.N, "K": self.K, **shard, "dtype": "bf16", "size": self.size}

    @property
    def product(self) -> tuple[int, int]:
        """The two sides of the weights of all ranks, the shorter first."""
        gathers = self.operator == "all_gather_matmul"
        N, K = (self.N * self.size, self.K) if gathers else (self.N, self.K * self.size)
        return min(N, K), max(N, K)


Times = Mapping[Shape, Mapping[str, float]]
"""Shape -> form -> seconds."""


# ------------------------------------------------------------------------------------------------------ measurements
def measured() -> tuple[dict[Shape, dict[str, float]], list[Path]]:
    """Every measured shape, and the files. The zoo's times count before those of an operator's own benchmark."""
    found: dict[Shape, dict[str, float]] = {}
    paths = []
    for operator in OPERATORS:
        for ranks in (4, 3, 2):
            path = RESULTS / (f"{operator}.json" if ranks == 4 else f"{operator}_{ranks}.json")
            if path.exists():
                paths.append(path)
                for row in json.loads(path.read_text())["measured"]:
                    shape = _shape(operator, row["case"], ranks)
                    form = _form(shape, row["variant"])
                    if form and "ms" in row:
                        found.setdefault(shape, {})[form] = row["ms"] / 1e3
    for path in (*sorted(RESULTS.glob("zoo_calibration_*.json")), RESULTS / "zoo_4.json"):
        paths.append(path)
        for shape, forms in of_zoo(path).items():
            found.setdefault(shape, {}).update(forms)
    paths += [RESULTS / TRIED, RESULTS / TRIED_ON_H100]
    products = {shape.product for shape in found}
    for shape, forms in (_tried() | _tried_on_h100()).items():
        if shape.product in products:  # others would change which products are held out
            found.setdefault(shape, {}).update(forms)
    return found, paths


def _were_otherwise(shape: Shape) -> bool:
    """Whether the zoo measured the Gluon form on 2 ranks with other tiles than it takes now, or stored."""
    if shape.operator != "matmul_all_reduce" or shape.size != 2:
        return _were_stored(shape)
    narrow = shape.M * shape.N <= 4096 * 4096
    return narrow and tiles_of(shape.M, shape.N, shape.K, shape.size, H200.sms) != NARROW


def _were_stored(shape: Shape) -> bool:
    """Whether the zoo measured the Gluon form with tiles that it stored, and by default it copies them now."""
    m, N = shape.M // shape.size, shape.N
    copied = shape.operator == "matmul_reduce_scatter" and copies_of(m, N, shape.K, shape.size) > 0
    return copied and 2 * m * N < COPIED_BYTES


def _tried() -> dict[Shape, dict[str, float]]:
    """The forms of TRIED, whose cases are "M x N x K", some with ", transposed"."""
    found: dict[Shape, dict[str, float]] = {}
    record = json.loads((RESULTS / TRIED).read_text())
    for row in record["rows"]:
        case, variant = row["case"].split(": ")
        sizes, _, transposed = case.partition(", ")
        M, N, K = map(int, sizes.split(" x "))
        shape = Shape("matmul_reduce_scatter", M, N, K, record["ranks"], weights=transposed or "row-major")
        copied = copies_of(M // shape.size, N, K, shape.size) > 0
        gluon = "gluon, 2 copies" if copied else "gluon, lag 66"
        form = {"unfused": "unfused", "NCCL + cuBLAS": "nccl", gluon: "gluon"}.get(variant)
        if form:
            found.setdefault(shape, {})[form] = row["value"] / 1e3
    return found


def _tried_on_h100() -> dict[Shape, dict[str, float]]:
    """The unfused form of TRIED_ON_H100, and the Gluon form with the settings that it takes now. H100 is an H200 with
    slower memory, which by the model is not what limits these."""
    found: dict[Shape, dict[str, float]] = {}
    for row in json.loads((RESULTS / TRIED_ON_H100).read_text())["rows"]:
        case, variant = row["case"].split(": ")
        M, N, K = map(int, case.split(" x "))
        tiles, lag = settled(M, N, K, 2, H200.sms)
        count = math.ceil(M / tiles.block_m) * math.ceil(N / tiles.block_n)
        order = "own tiles last" if 2 * lag >= count else f"lag {lag}"
        gluon = f"gluon, tiles 128 x {tiles.block_n}, groups of 16, {order}"
        if variant in ("unfused", gluon):
            form = "gluon" if variant == gluon else variant
            found.setdefault(Shape("matmul_all_reduce", M, N, K, 2), {})[form] = row["value"] / 1e3
    return found


def of_zoo(path: Path) -> dict[Shape, dict[str, float]]:
    """Every shape of one of the zoo's files."""
    from benchmarks.zoo import measured as timed

    found = {}
    for key, variants in timed(path).items():
        forms = {VARIANTS.get(v, v).removeprefix("pkt "): ms / 1e3 for v, ms in variants.items()}
        known, shape = {PRODUCT, *OPERATORS[key[0]].forms}, Shape(*key[:5], "rows", key[5])
        if _were_otherwise(shape):
            known.discard("gluon")
        if shape.M in RETILED and path.name != FEWER_ROWS:
            known.discard("low_latency")
        found[shape] = {f: t for f, t in forms.items() if f in known}
    return found


def _shape(operator: str, case: str, size: int) -> Shape:
    """Of a case "N = 4096" or "M = 16" of an operator's benchmark."""
    axis, length = case.split(" = ")
    n = int(length)
    if axis == "N":
        gathers = operator == "all_gather_matmul"
        return Shape(operator, n, n // size if gathers else n, n if gathers else n // size, size, "rows")
    if operator == "all_gather_matmul":
        return Shape(operator, n, 28672 // size, 8192, size, "columns")
    return Shape(operator, n, 8192, 28672 // size, size, "rows")


def _form(shape: Shape, variant: str) -> str | None:
    """The form whose default settings a variant has."""
    if variant in ("pkt gluon, copied", "pkt gluon, pushed"):
        plan = push_plan(shape.M // shape.size, shape.N, shape.K, shape.size, TILES, H200.sms)
        return "gluon" if variant.endswith("pushed" if plan.num_comm_sms else "copied") else None
    return VARIANTS.get(variant)


def collectives() -> tuple[dict[str, Any], list[Path]]:
    """Points (bytes that leave a GPU, seconds) of each collective, by whose it is and the number of ranks. Two ranks'
    count for fewer bytes than more ranks were measured with."""
    found: dict[str, Any] = {name: {"pkt": {}, "nccl": {}} for name in COLLECTIVES}
    paths = []
    for ranks in (2, 3, 4):
        path = RESULTS / ("collectives.json" if ranks == 4 else f"collectives_{ranks}.json")
        paths.append(path)
        rows = [row for row in json.loads(path.read_text())["measured"] if "ms" in row and "+" not in row["case"]]
        for name, spoken in COLLECTIVES.items():
            for whose, variant in (("pkt", "pkt default"), ("nccl", "NCCL")):
                points = {
                    int(row["bytes"]): row["ms"] / 1e3
                    for row in rows
                    if row["variant"] == variant and row["case"].startswith(spoken) and "columns" not in row["case"]
                }
                if points:
                    fewer = {int(n): t for n, t in found[name][whose].get("2", ()) if n < min(points)}
                    found[name][whose][str(ranks)] = [[n, _round(t)] for n, t in sorted((fewer | points).items())]
    return found, paths


# --------------------------------------------------------------------------------------------------------------- fit
def split(times: Times) -> tuple[dict[Shape, Mapping[str, float]], dict[Shape, Mapping[str, float]]]:
    """The shapes to fit to, and those that are held out."""
    products = sorted({shape.product for shape in times})
    out = set(products[1::HELD_OUT])
    return tuple({s: t for s, t in times.items() if (s.product in out) == held} for held in (False, True))  # type: ignore


@contextlib.contextmanager
def instead(table: Mapping[str, Any]) -> Iterator[None]:
    """The model takes `table` for calibrated.json."""
    before = calibration.calibrated
    calibration.calibrated = lambda: table  # type: ignore[assignment]
    _forget()
    try:
        yield
    finally:
        calibration.calibrated = before
        _forget()


def _forget() -> None:
    """What follows from the table that counted."""
    tables.measured.cache_clear()
    calibration.measured.cache_clear()


def fitted(times: Times, curves: Mapping[str, Any]) -> dict[str, Any]:
    """calibrated.json without its sources. curves: of the collectives. Factors are not fitted to RETILED rows: so many
    shapes of so few rows would set the powers of N and K for all."""
    alone = [
        Point(s._replace(size=1), library(s.key).total, forms[PRODUCT])
        for s, forms in times.items()
        if PRODUCT in forms and s.M not in RETILED
    ]
    table: dict[str, Any] = {
        "collectives": curves, "product": _curve(alone) if alone else None,
        "forms": {}, "near": {}, "error": {}, "known": {},
    }  # fmt: skip
    points: dict[tuple[str, str, str], list[Point]] = {}
    with instead(table):
        for shape, forms in times.items():
            if shape.M in RETILED:
                continue
            forms = without_product(forms)
            best = min(forms.values(), default=0.0)
            for form, seconds in forms.items():
                guess = _predicted(shape, form)
                if guess is not None:
                    point = Point(shape, guess, seconds, best / seconds)
                    points.setdefault((shape.operator, shape.layout, form), []).append(point)
    for (operator, layout, form), some in points.items():
        table["forms"].setdefault(operator, {}).setdefault(layout, {})[form] = _curve(some)
    with instead(table):
        table["near"] = _near(times)
    for operator in OPERATORS:
        for layout in ("rows", "columns"):
            products = _products(s for s in times if (s.operator, s.layout) == (operator, layout))
            if products:
                table["known"].setdefault(operator, {})[layout] = products
    return table


def _near(times: Times) -> dict[str, Any]:
    """`near` of calibrated.json, by the table that counts."""
    found: dict[str, Any] = {}
    for shape, every in sorted(times.items()):
        forms = without_product(every)
        for form in sorted(forms):
            guess = _predicted(shape, form)
            if guess is not None:
                of = found.setdefault(shape.operator, {}).setdefault(shape.layout, {}).setdefault(form, [])
                case = shape.size, calibration.whole_tiles(shape.M), shape.N, shape.K
                of.append([*case, round(math.log(forms[form] / guess), 3)])
    return found


def _predicted(shape: Shape, form: str) -> float | None:
    found = OPERATORS[shape.operator].predicted({"mode": form}, shape.key, H200)
    return None if found is None else found.total


def without_product(forms: Mapping[str, float]) -> dict[str, float]:
    return {form: seconds for form, seconds in forms.items() if form != PRODUCT}


class Point(NamedTuple):
    """A form at a shape: predicted and measured seconds, and how much it counts."""

    shape: Shape
    guess: float
    seconds: float
    weight: float = 1.0


def _curve(points: Sequence[Point]) -> dict[str, Any]:
    """The offset, the factors by M for the fewest and the most ranks, and the exponents of N and K that fit best."""
    guess, seconds, weight = (np.array(column) for column in list(zip(*points))[1:])
    M, N, K = (np.array([getattr(point.shape, side) for point in points], float) for side in "MNK")
    at, knots = np.log(np.clip(M, KNOTS[0], KNOTS[-1])), np.log(KNOTS)
    hats = [np.interp(at, knots, unit) for unit in np.eye(len(KNOTS))]
    sizes = np.array([point.shape.size for point in points])
    ranks = sorted({int(sizes.min()), int(sizes.max())})
    shares = [np.interp(np.log(sizes), np.log(ranks), unit) for unit in np.eye(len(ranks))]
    curves = [share * hat for share in shares for hat in hats]
    terms = np.stack([*curves, np.log(N / calibration.SIDE), np.log(K / calibration.SIDE)], axis=1)
    factors = np.eye(len(curves), terms.shape[1]).reshape(len(ranks), len(KNOTS), -1)
    level, alike = STIFF * np.diff(factors, axis=1), ALIKE * np.diff(factors, axis=0)  # where nothing was measured
    ridge = np.diag([SHRINK] * len(curves) + [TURN] * 2)
    pull = np.concatenate([level.reshape(-1, terms.shape[1]), alike.reshape(-1, terms.shape[1]), ridge])
    best: tuple[float, float, Any] | None = None
    for offset in OFFSETS:
        if offset >= 0.8 * seconds.min():
            continue
        wanted = np.log((seconds - offset) / guess)
        left = np.concatenate([terms * weight[:, None], pull])
        right = np.concatenate([wanted * weight, np.zeros(len(left) - len(wanted))])
        found = np.linalg.lstsq(left, right, rcond=None)[0]
        off = np.log((offset + np.exp(terms @ found) * guess) / seconds) * weight
        loss = float(off @ off + ((left[len(off) :] @ found) ** 2).sum() + (LATE * offset) ** 2)
        if best is None or loss < best[0]:
            best = loss, offset, found
    assert best is not None
    _, offset, found = best
    sides = {
        side: [round(float(power), 4), int(of.min()), int(of.max())]
        for side, power, of in zip("NK", found[-2:], (N, K))
    }
    factor = {
        str(size): [[n, round(float(math.exp(c)), 4)] for n, c in zip(KNOTS, of)]
        for size, of in zip(ranks, found[:-2].reshape(len(ranks), -1))
    }
    rows = [int(M.min()), int(M.max())]
    return {"points": len(points), "offset": _round(offset), "rows": rows, "sides": sides, "factor": factor}


def _products(shapes: Iterator[Shape]) -> list[list[int]]:
    """(ranks, N, K, least M, greatest M) of each product."""
    rows: dict[tuple[int, int, int], list[int]] = {}
    for shape in shapes:
        rows.setdefault((shape.size, shape.N, shape.K), []).append(shape.M)
    return [[*product, min(of), max(of)] for product, of in sorted(rows.items())]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------------------ regret
class Regret(NamedTuple):
    """Of a shape: the form taken, the fastest, and the ratio of their times; known: the model is trusted there."""

    shape: Shape
    taken: str
    fastest: str
    ratio: float
    known: bool


def taken(shape: Shape, forms: Mapping[str, float]) -> str:
    """The form that an operator takes on H200s, of those that were measured."""
    operator, key = OPERATORS[shape.operator], shape.key
    tabled = None if "shard" in key else tables.nearest(operator, key, H200.name, shape.size)
    if tabled is not None and tabled["mode"] in forms:
        return tabled["mode"]
    return next(form for form in operator.forecast(key, H200).order if form in forms)


def regrets(times: Times) -> list[Regret]:
    """Of every shape with two forms or more."""
    found = []
    for shape, forms in ((shape, without_product(forms)) for shape, forms in times.items()):
        if len(forms) > 1:
            mode, best = taken(shape, forms), min(forms, key=lambda form: forms[form])
            known = not calibration.trust(shape.operator, shape.key, H200)[0]
            found.append(Regret(shape, mode, best, forms[mode] / forms[best], known))
    return found


def off(times: Times, curves: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """For each operator and form the share that half of the predictions are off by at most, against that of cuBLAS and
    pkt's own collective, where the form is not far from the fastest: of every FOLDS-th product, by a fit to the others.
    """
    found: dict[str, dict[str, list[float]]] = {operator: {} for operator in OPERATORS}
    products = sorted({shape.product for shape in times})
    for fold in range(FOLDS):
        left_out = set(products[fold::FOLDS])
        with instead(fitted({s: forms for s, forms in times.items() if s.product not in left_out}, curves)):
            for shape, every in times.items():
                forms = without_product(every)
                if shape.product not in left_out or "unfused" not in forms:
                    continue
                ratios = {form: (_predicted(shape, form) or math.nan) / seconds for form, seconds in forms.items()}
                for form, seconds in forms.items():
                    if seconds < RIVAL * min(forms.values()):
                        share = abs(math.log(ratios[form] / ratios["unfused"]))
                        found[shape.operator].setdefault(form, []).append(share)
    return {
        operator: {form: round(statistics.median(some), 3) for form, some in forms.items()}
        for operator, forms in found.items()
    }


def summary(found: list[Regret]) -> str:
    """Count, mean and worst."""
    if not found:
        return "no shapes"
    ratios = [regret.ratio for regret in found]
    exact = sum(regret.taken == regret.fastest for regret in found)
    return (
        f"{len(found)} shapes, regret mean {statistics.fmean(ratios):.4f}, worst {max(ratios):.3f}; "
        f"the fastest form taken in {exact}"
    )


def judged(times: Times) -> dict[str, list[Regret]]:
    """The regrets of what ships, which is fitted to all shapes; and of products that were held out, where the same
    procedure has seen only the others."""
    fit, held = split(times)
    with instead(table_of(fit)):
        held_out = regrets(held)
    return {"held out": held_out, "shipped": regrets(times)}


def lines(times: Times, found: Mapping[str, list[Regret]], worst: int = 12) -> list[str]:
    """The regrets as text, by operator and layout, and the worst shapes that were held out."""
    said = []
    for name, some in found.items():
        said.append(f"{name}: {summary(some)}")
        parts: dict[str, list[Regret]] = {}
        for regret in some:
            parts.setdefault(f"{regret.shape.operator}, {regret.shape.layout}", []).append(regret)
        said += [f"    {part}: {summary(parts[part])}" for part in sorted(parts)]
    for r in sorted((r for r in found["held out"] if r.ratio > 1), key=lambda r: -r.ratio)[:worst]:
        forms = ", ".join(f"{form} {1e6 * seconds:.1f}" for form, seconds in times[r.shape].items())
        far = "" if r.known else ", away from all that was fitted"
        said.append(f"  {r.ratio:.3f} {r.shape}: {r.taken}, not {r.fastest}{far} (us: {forms})")
    return said


def table_of(times: Times) -> dict[str, Any]:
    """The content of calibrated.json without its sources, fitted to these times."""
    curves, _ = collectives()
    return {**fitted(times, curves), "error": off(times, curves)}


def calibrated() -> dict[str, Any]:
    """The content of calibrated.json, from the committed results."""
    times, files = measured()
    records = {path: json.loads(path.read_text()) for path in (*files, *collectives()[1])}
    sources = [source(record, path) for path, record in records.items()]
    return {"gpu": H200.name, "sources": sources, **table_of(times)}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args(arguments).check:
        table = calibrated()
        FILE.write_text(text(table) + "\n")
        calibration.calibrated.cache_clear()
        print(f"written: {FILE.relative_to(ROOT)}")
    times = measured()[0]
    print("\n".join(lines(times, judged(times))))


if __name__ == "__main__":
    main(sys.argv[1:])
