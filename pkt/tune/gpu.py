"""What a model has to know of a GPU: rates and latencies, and what a mechanism moves out of it over the links."""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

Mechanism = Literal[
    "register store", "register load", "TMA store", "TMA load", "TMA reduce-add", "copy engine put", "copy engine get"
]


@dataclass(frozen=True)
class Gpu:
    """Rates are a second, latencies seconds, sizes bytes. Figures are measured ones, of docs/facts.md, unless said.

    flops: dense bf16 or fp16, of all SMs, while the clock is high; slow: (seconds, times) that a product takes longer
    by then, because power limits the clock. l2: what an SM loads from L2. memory: read and written. link: out of one
    GPU. signal: one way, to a peer. barrier: all ranks, inside a kernel. launch: a kernel's start, descriptors made and
    pipelines filled; the host's own time is not in it. shared: memory that a program may have.
    """

    name: str
    sms: int
    flops: float
    slow: tuple[tuple[float, float], ...]
    l2: float
    memory: float
    link: float
    signal: float
    barrier: float
    launch: float
    shared: int


H200 = Gpu(
    name="NVIDIA H200",
    sms=132,
    flops=989e12,
    slow=((0.3e-3, 1.0), (25e-3, 1.38)),
    l2=107e9,
    memory=4.2e12,
    link=390e9,
    signal=1.4e-6,
    barrier=3.5e-6,
    launch=9e-6,
    shared=232_448,
)
"""flops is the data sheet's; slow, l2 and launch were fitted to benchmarks/results/*.json, as those of model.py."""


# (mechanism, peers) -> the curve by number of programs that was measured, and the bytes a program had in flight.
_PROGRAMS: Mapping[tuple[str, str], tuple[str, int]] = {
    ("register store", "one"): ("register store, 16 warps, 32 KB, one", 32768),
    ("register store", "all"): ("register store, 16 warps, 32 KB, all", 32768),
    ("register load", "one"): ("register load, 16 warps, 32 KB, one", 32768),
    ("TMA store", "one"): ("TMA store, 128x128, 3 stages, one", 98304),
    ("TMA store", "all"): ("TMA store in Gluon, 128x128, 4 stages, all", 131072),
    ("TMA load", "one"): ("TMA load, 128x128, 3 stages, one", 98304),
    ("TMA reduce-add", "one"): ("TMA reduce-add, 128x128, 3 stages, one", 98304),
}


def link_rate(mechanism: Mechanism, programs: int, in_flight: int | None = None, peers: str = "one") -> float:
    """Bytes a second out of one H200, all ranks sending at once, as benchmarks/link.py measured it.

    programs: that move data; none for a copy engine. in_flight: bytes that one of them has under way, as measured where
    None; for a copy engine the size of a message. peers: "one", or "all" where a block goes to each of them. Between
    the measured points the logarithms are interpolated; beyond them the nearest counts. A program with half as many
    bytes under way counts as two thirds of one: so registers with 16 KB against 32 KB.
    """
    curves = link_curves()
    if mechanism.startswith("copy engine"):
        return 1e9 * interpolated(curves["by_size"][mechanism], in_flight or 1 << 30)
    name, measured = _PROGRAMS.get((mechanism, peers)) or _PROGRAMS[mechanism, "one"]
    curve = curves["by_programs"][name]
    equal = programs * ((in_flight or measured) / measured) ** _DEPTH
    rate = interpolated(curve, equal)
    return 1e9 * (rate * equal if equal < 1 else rate)


_DEPTH = math.log2(1.5)


@functools.cache
def link_curves() -> Mapping[str, Any]:
    """pkt/tune/tables/link.json, which names its source: mechanism -> points (programs or bytes, GB/s)."""
    return json.loads(files("pkt.tune.tables").joinpath("link.json").read_text(encoding="utf-8"))


def interpolated(points: Sequence[Sequence[float]], x: float) -> float:
    """The curve through `points`, rising in x, at x: straight between logarithms, level beyond the ends."""
    xs = [point[0] for point in points]
    at = bisect_left(xs, x)
    if at == 0 or at == len(xs) or xs[at] == x:
        return points[min(at, len(xs) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))
