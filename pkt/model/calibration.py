"""What was fitted to measurements, and how far a case is from all of them.

calibrated.json is written by benchmarks/calibrate.py and names its sources. It has

collectives: points (bytes that leave a GPU, seconds) of NCCL's and of pkt's collectives, for each number of ranks.
product: the correction of `pkt.model.cost.library`, the model of cuBLAS: measured = offset + factor * predicted. The
    factor is that of M and of the number of ranks, which have a curve through points (M, factor) each, times a power
    of N and a power of K. sides: each exponent, and the lengths that were measured. rows: the least and the greatest
    M. points: the number of fitted times.
forms: the same correction of `Form.seconds`, for each operator, layout of its operands and form.
near: how far the corrected times are from those that were measured: (ranks, M in whole tiles, N, K, logarithm of
    measured / corrected), for each operator, layout and form.
error: the median error of a form's predicted time, relative to that of cuBLAS and pkt's collective, on products that
    the fit did not see; for each operator and form.
known: for each operator and layout, the products that were measured: (ranks, N, K, least M, greatest M).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from pkt.model.cost import MODELLED, Estimate, library
from pkt.model.gpu import H200, Gpu, interpolated
from pkt.wording import count_text, dtype_text

NEAR, FARTHEST = 1.0, 4.0
"""Doublings from the nearest measured shape, see `distance`. Up to NEAR the model is trusted. From there to FARTHEST it
is trusted less with each doubling, and beyond that not at all."""
SELDOM = 20.0
"""Points of a form that is trusted as if it were one doubling away. Twice as many points count as half a doubling."""
SIDE = 8192
"""The N and the K at which a factor's powers are 1."""
RANKS = 0.5
"""Doublings for twice as many ranks: each rank computes the same, and sends almost as much."""
ROWS = 128
"""Of a tile."""
NEARBY, APART, DOUBLED = 0.3, 0.1, (4.0, 2.0, 1.0, 1.0)
"""Of `near`: the distance at which a measurement has lost 40 % of its weight; the weight of the fit beside them, where
a measurement of the same shape weighs 1; and the distance of twice as many ranks, rows, columns, and twice K. Of some
twenty settings these choose best for products and for shapes that were held out."""
OTHER_GPU = 1.0
"""Doublings for a GPU that the model was not fitted to, though its rates are known. On 4 x H100 the form for few rows
is slower than its prediction. With 0, 0.5, 1 and 1.4 the form that is taken there takes 1.0061, 1.0036, 1.0033 and
1.0035 times as long as the fastest in the mean. Of these only 1 leaves no product that takes more than 1.03 times as
long as the fastest baseline (zoo_h100_4.json of benchmarks/results)."""
LEAST_ERROR, UNMEASURED = 0.02, 0.25
"""LEAST_ERROR: times that differ by less are alike, because a measurement on another day differs by as much.
UNMEASURED: the assumed error of a form that was not measured."""


@functools.cache
def calibrated() -> Mapping[str, Any]:
    """The content of calibrated.json."""
    return json.loads(files("pkt.model").joinpath("calibrated.json").read_text(encoding="utf-8"))


def collective_seconds(
    name: Literal["all_gather", "reduce_scatter", "all_reduce"],
    whose: Literal["pkt", "nccl"],
    sent: float,
    size: int,
    gpu: Gpu = H200,
) -> float:
    """Seconds of a collective in a launch of its own: straight lines between what was measured, because that is a
    latency and a rate. sent: bytes that leave a GPU. size: the number of ranks; of those measured the nearest counts.
    """
    if size < 2 or sent <= 0:
        return 0.0
    curves = calibrated()["collectives"][name][whose]
    points = curves[min(curves, key=lambda ranks: (abs(math.log2(int(ranks) / size)), ranks))]
    sizes, seconds = zip(*points)
    most = sizes[-1]
    found = float(np.interp(sent, sizes, seconds)) if sent <= most else seconds[-1] * sent / most
    return found + sent / gpu.link - sent / H200.link


def product(key: Mapping[str, Any], gpu: Gpu = H200) -> Estimate:
    """The parts of the time of cuBLAS's product."""
    return _corrected(calibrated().get("product"), key, library(key, gpu))


def layout_of(key: Mapping[str, Any]) -> str:
    """How the operands of a case are sharded: "rows" unless the key says otherwise."""
    return str(key.get("shard", "rows"))


def corrected(operator: str, mode: str, key: Mapping[str, Any], found: Estimate, gpu: Gpu = H200) -> Estimate:
    """`found` with what measurements add to it or take from it: those of all shapes, then, on the GPU that they were
    made on, those of shapes that are near."""
    found = _corrected(calibrated()["forms"].get(operator, {}).get(layout_of(key), {}).get(mode), key, found)
    if gpu.name != H200.name:
        return found
    ratio = math.exp(_off_nearby(measured(operator, layout_of(key), mode), key))
    return replace(found, correction=found.correction + (ratio - 1.0) * found.total)


@functools.cache
def measured(operator: str, layout: str, mode: str) -> Any:
    """`near` of a form, an array with a row for each case: the logarithms of ranks, M, N and K to the base 2, and that
    of the ratio."""
    rows = calibrated().get("near", {}).get(operator, {}).get(layout, {}).get(mode, ())
    found = np.array(rows, float).reshape(-1, 5)
    found[:, :4] = np.log2(found[:, :4])
    return found


def _off_nearby(rows: Any, key: Mapping[str, Any]) -> float:
    """The mean of the logarithms that were measured, each with a weight that falls with its distance from the case as
    that of a normal distribution, and of a 0 that weighs APART."""
    case = np.log2([key["size"], whole_tiles(key["M"]), key["N"], key["K"]])
    distances = np.abs(rows[:, :4] - case) @ np.array(DOUBLED)
    weights = np.exp(-0.5 * (distances / NEARBY) ** 2)
    return float(weights @ rows[:, 4] / (weights.sum() + APART))


def whole_tiles(M: int) -> int:
    """The rows that a form multiplies where a case has M: few rows fill a tile of a power of two, many have tiles of
    ROWS."""
    return math.ceil(M / ROWS) * ROWS if M > ROWS else max(16, 1 << (M - 1).bit_length())


def _corrected(curve: Mapping[str, Any] | None, key: Mapping[str, Any], found: Estimate) -> Estimate:
    if curve is None:
        return found
    ranks = sorted((int(size), interpolated(points, key["M"])) for size, points in curve["factor"].items())
    factor = interpolated(ranks, key["size"])
    for side, (exponent, least, most) in curve["sides"].items():
        factor *= (min(max(key[side], least), most) / SIDE) ** exponent
    total = curve["offset"] + factor * found.total
    return replace(found, correction=found.correction + total - found.total)


def error(operator: str, mode: str) -> float:
    """The median error of a form's predicted time, as `error` of calibrated.json has it. UNMEASURED for a form that was
    not measured."""
    return max(LEAST_ERROR, calibrated()["error"].get(operator, {}).get(mode, UNMEASURED))


def handicap(operator: str, mode: str, key: Mapping[str, Any], doublings: float) -> float:
    """The lead, as a share of its time, that a form needs over one without a handicap. It grows with the `doublings` of
    `trust`, and where the form itself was measured with fewer rows, seldom, or not at all."""
    curve = calibrated()["forms"].get(operator, {}).get(layout_of(key), {}).get(mode)
    if curve is None:
        return UNMEASURED * (1.0 + doublings)
    least, most = curve["rows"]
    outside = max(0.0, math.log2(key["M"] / most), math.log2(least / key["M"]))
    return error(operator, mode) * (doublings + outside + SELDOM / curve["points"])


def distance(operator: str, key: Mapping[str, Any]) -> float:
    """The least |log2 N/N'| + |log2 K/K'| + RANKS |log2 size/size'| + the doublings by which M is outside the rows that
    were measured of that product, over all products that were measured."""

    def doublings(n: float, there: float) -> float:
        return abs(math.log2(n / there))

    def to(size: int, N: int, K: int, least: int, most: int) -> float:
        rows = doublings(key["M"], min(max(key["M"], least), most))
        return doublings(key["N"], N) + doublings(key["K"], K) + RANKS * doublings(key["size"], size) + rows

    known = calibrated()["known"].get(operator, {}).get(layout_of(key), [])
    return min((to(*product) for product in known), default=math.inf)


def trust(operator: str, key: Mapping[str, Any], gpu: Gpu) -> tuple[float, str]:
    """(doublings from the nearest case in which the model is trusted, what is not known). (0, "") near a measured
    shape on the GPU that the model was fitted to; infinitely many doublings where no measurement helps."""
    if dtype_text(key["dtype"]) not in MODELLED:
        return math.inf, f"nothing was measured in {dtype_text(key['dtype'])}"
    if not gpu.measured:
        return math.inf, f"nothing was measured on {gpu.name}"
    far, elsewhere = distance(operator, key), 0.0 if gpu.name == H200.name else OTHER_GPU
    if far <= NEAR:
        return elsewhere, f"the model was fitted to {H200.name}, not to {gpu.name}" if elsewhere else ""
    shape = f"M = {key['M']}, N = {key['N']}, K = {key['K']} on {count_text(key['size'], 'rank')}"
    if far > FARTHEST:
        return math.inf, f"{shape} is far from every measured shape"
    return far - NEAR + elsewhere, f"{shape} is {far:.1f} doublings from the nearest measured shape"
