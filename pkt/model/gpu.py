"""A GPU as the cost model sees it: its rates and latencies, and the measured rate of each mechanism over the links."""

from __future__ import annotations

import functools
import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

import triton

Mechanism = Literal[
    "register store", "register load", "TMA store", "TMA load", "TMA reduce-add", "copy engine put", "copy engine get"
]


@dataclass(frozen=True)
class Gpu:
    """Rates are a second, latencies in seconds, sizes in bytes; measured (docs/facts.md) where nothing else is said.

    flops: dense bf16 or fp16, of all SMs, while the clock is high. slow: points (seconds, factor): a product of that
    length takes so many times as long, because power limits the clock. l2: loaded from L2 by one SM. memory: read and
    written. link: out of one GPU. signal: one way, to a peer. barrier: of all ranks, inside a kernel. launch: a kernel
    starts, makes descriptors and fills pipelines; without host time. shared: memory of a program. gluon: the Gluon
    forms run there. measured: the rates are this GPU's own.
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
    gluon: bool
    measured: bool = False


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
    gluon=True,
    measured=True,
)
"""flops: from the data sheet. slow, l2 and launch: fitted to benchmarks/results/*.json, as are those of cost.py."""

H100 = replace(H200, name="NVIDIA H100 80GB HBM3", memory=2.9e12)
"""The same chip with slower memory. memory: fitted to cuBLAS's products of 4 to 68 rows in zoo_h100_4.json of
benchmarks/results."""
KNOWN = {gpu.name: gpu for gpu in (H200, H100)}
"""Name -> GPU, of those that were measured."""

_SM_90 = re.compile(r"\bG?H(20|100|200|800)\b")


def gluon_lacks(capability: tuple[int, int]) -> str:
    """Why the Gluon forms cannot run on GPUs of this compute capability with this Triton, in words; "" if they can."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not (3, 6) <= version <= (3, 9):
        return f"Triton {triton.__version__}, not 3.6 to 3.9"
    return "" if capability == (9, 0) else "sm_{}{}, not sm_90".format(*capability)


def gpu_named(name: str) -> Gpu:
    """The GPU that torch gives this name, with H200's rates unless it is one of KNOWN; its name says whether the Gluon
    forms run there."""
    gluon = _SM_90.search(name) is not None and not gluon_lacks((9, 0))
    return replace(KNOWN.get(name, H200), name=name, measured=name in KNOWN, gluon=gluon)


# (mechanism, peers) -> the measured curve by number of programs, and the bytes that a program had in flight.
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
    """Bytes a second out of one H200 while all ranks send, as benchmarks/link.py measured it.

    programs: how many move data; ignored for a copy engine. in_flight: bytes that one of them has under way, as in the
    measurement where None; for a copy engine the size of a message. peers: "one", or "all" where a block goes to each
    of them. Between measured points logarithms are interpolated; beyond them the nearest point counts. A program with
    half as many bytes under way counts as two thirds of a program: registers with 16 KB against 32 KB show that.
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
    """pkt/model/link.json, which names its source: mechanism -> points (programs or bytes, GB/s)."""
    return json.loads(files("pkt.model").joinpath("link.json").read_text(encoding="utf-8"))


def interpolated(points: Sequence[Sequence[float]], x: float) -> float:
    """The curve through `points`, sorted by x, at x: a straight line between logarithms, level beyond the ends."""
    xs = [point[0] for point in points]
    at = bisect_left(xs, x)
    if at == 0 or at == len(xs) or xs[at] == x:
        return points[min(at, len(xs) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))
