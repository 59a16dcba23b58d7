"""What was fitted to measurements, and how far a case is from all of them.

calibrated.json is written by benchmarks/calibrate.py and names its sources. It has

collectives: seconds of a collective that follows or precedes a product, by the bytes that leave a GPU: points of NCCL's
    and of pkt's own, by the number of ranks.
product: how measured times of cuBLAS's products differ from those of `pkt.model.cost.library`:
    measured = offset + factor * predicted. The factor is that of M on a curve through points (M, factor), times a power
    of N and one of K: sides has the exponent of each, and the lengths that were measured. rows: the least M and the
    greatest. points: how many times were fitted.
forms: for each operator, layout of its operands and form, how measured times differ from those of its `seconds`:
    in the same way. For those that consist of a product and a collective that comes on top.
error: for each operator and form, the share by which half of the predictions of its time, against that of cuBLAS and
    pkt's collective, are off at most, on products that a fit did not see.
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
from pkt.wording import dtype_text

NEAR, FARTHEST = 1.0, 4.0
"""Doublings from the nearest measured shape, see `distance`: up to the first the model is trusted; up to the second it
is trusted less with each; beyond it not at all."""
SELDOM = 20.0
"""A form that was measured so many times is trusted as if it were a doubling away; more often, in proportion."""
SIDE = 8192
"""N and K of which the powers in factors are 1."""
RANKS = 0.5
"""Doublings that twice the ranks count as: each computes the same, and sends almost as much."""
LEAST_ERROR, UNMEASURED = 0.02, 0.25
"""Times that differ by less than the first are alike: a measurement, repeated on another day, differs by as much. The
second is taken for the model's error of a form that was not measured."""


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


def corrected(operator: str, mode: str, key: Mapping[str, Any], found: Estimate) -> Estimate:
    """`found` with what measurements add to it or take from it."""
    return _corrected(calibrated()["forms"].get(operator, {}).get(layout_of(key), {}).get(mode), key, found)


def _corrected(curve: Mapping[str, Any] | None, key: Mapping[str, Any], found: Estimate) -> Estimate:
    if curve is None:
        return found
    factor = interpolated(curve["factor"], key["M"])
    for side, (exponent, least, most) in curve["sides"].items():
        factor *= (min(max(key[side], least), most) / SIDE) ** exponent
    total = curve["offset"] + factor * found.total
    return replace(found, correction=found.correction + total - found.total)


def error(operator: str, mode: str) -> float:
    """The share by which the time of a form, against that of cuBLAS and a collective, is not as predicted: half of the
    predictions on products that a fit did not see are better. UNMEASURED for a form that was not measured."""
    return max(LEAST_ERROR, calibrated()["error"].get(operator, {}).get(mode, UNMEASURED))


def handicap(operator: str, mode: str, key: Mapping[str, Any], doublings: float) -> float:
    """The share by which a form has to be expected to be faster than one without a handicap, so many `doublings`, see
    `trust`, from what was measured. More where the form itself was measured with fewer rows, seldom, or not
    at all."""
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
    """How many doublings a case is beyond what the model is trusted in, and what is not known, in words: 0 and "" near
    what was measured; infinitely many where nothing that was measured says how fast it is."""
    if dtype_text(key["dtype"]) not in MODELLED:
        return math.inf, f"nothing was measured in {dtype_text(key['dtype'])}"
    if not gpu.measured:
        return math.inf, f"nothing was measured on {gpu.name}"
    far = distance(operator, key)
    if far <= NEAR:
        return 0.0, ""
    shape = f"M = {key['M']}, N = {key['N']}, K = {key['K']} on {key['size']} ranks"
    if far > FARTHEST:
        return math.inf, f"{shape} is far from every measured shape"
    return far - NEAR, f"{shape} is {far:.1f} doublings from the nearest measured shape"
