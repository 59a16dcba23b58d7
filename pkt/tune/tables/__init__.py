"""Tables: what was measured on H200, shipped with pkt, and a good config for a shape that was not.

pkt/tune/tables/<operator>.json is written by benchmarks/tuned.py from the exhaustive searches in benchmarks/results/,
which each file names with commit and date: for every measured case the fastest candidates of the operator's space and
the fastest of each mode, NCCL + cuBLAS among them, as its keywords, with their times.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pkt.tune.config import NCCL, Config, nccl_wanted
from pkt.tune.model import MODELS
from pkt.tune.search import Candidate, Search
from pkt.tune.spaces import gluon_fits
from pkt.wording import dtype_text

FARTHEST = 1.5
"""Doublings and halvings of M, N and K together by which a shape may differ from a measured one, see `nearest`: as far
as half-way between two sizes of which one is twice the other."""

AXES = ("M", "N", "K")
OF_A_SHAPE = {"gluon": ("rounds_alone", "cut_last", "whole_rounds"), "copy": ("push_rows",)}
"""By mode, settings that are right for one shape only. An operator derives them from its own where they are not given.
"""


@functools.cache
def measured(what: str) -> tuple[Search, ...]:
    """The table of operator `what` as searches, a case each: every candidate with its least, median and greatest time
    for its times, and predicted by the model. () where pkt ships no table."""
    table, model = _table(what), MODELS.get(what)
    searches = []
    for entry in table.get("entries", ()):
        key = {**entry["key"], "gpu": table["gpu"]}
        candidates = []
        for row in entry["measured"]:
            config = Config(**row["settings"])
            predicted = model(config, key) if model else None
            candidates.append(Candidate(config, predicted, (row["low"], row["seconds"], row["high"])))
        searches.append(Search(what, key, tuple(candidates), candidates[0].config, 0.0))
    return tuple(searches)


def nearest(what: str, key: Mapping[str, Any], gpu: str, size: int) -> Config | None:
    """The fastest config to expect from what was measured for the nearest shape, see `near`, of those that this one can
    take; or None. NCCL + cuBLAS only where it is wanted.

    A shape that was measured itself gets its fastest. Another one those of least time measured there times what the
    model predicts here over there, `carried` over; of a Gluon form its mode alone, which settles the rest by its own
    rule: tests/tune/test_exhaustive.py has how far that is from the best.
    """
    found = near(what, key, gpu, size)
    if found is None:
        return None
    search, distance = found
    case = {**key, "size": size}
    baseline, gluon = nccl_wanted(), gluon_fits(what, case)
    taken = [
        c for c in search.candidates if (baseline or c.config != NCCL) and (gluon or c.config.get("mode") != "gluon")
    ]

    def expected(candidate: Candidate) -> float:
        here = MODELS[what](carried(candidate.config), case)
        return (candidate.time or 0.0) * (here or 1.0) / (candidate.predicted or 1.0)

    if not taken:
        return None
    if not distance:
        return taken[0].config
    best = carried(min(taken, key=expected).config)
    return Config(mode="gluon") if best["mode"] == "gluon" else best


def carried(config: Config) -> Config:
    """What of a config is taken to another shape."""
    left = OF_A_SHAPE.get(config.get("mode", ""), ())
    return Config(**{name: value for name, value in config.items() if name not in left})


def near(what: str, key: Mapping[str, Any], gpu: str, size: int) -> tuple[Search, float] | None:
    """What was measured for the nearest shape, the fastest first, and the distance to it; or None.

    key: M, N, K of the product that each rank computes, and dtype, as `model.estimate` has them. gpu: as torch names
    it. size: the number of ranks. Only cases of the same operator, GPU, dtype and size count. The distance of two
    shapes is |log2 M/M'| + |log2 N/N'| + |log2 K/K'|: the doublings from one to the other. The least counts; of
    several that of the smaller product, then of the smaller M, N, K in this order. None where it is more than FARTHEST.
    """
    if min(key.get(axis, 0) for axis in AXES) < 1:
        return None
    case = (gpu, dtype_text(key.get("dtype")), size)
    found = []
    for search in measured(what):
        there = search.key
        if case == (there["gpu"], there["dtype"], there["size"]):
            shape = tuple(there[axis] for axis in AXES)
            distance = round(sum(abs(math.log2(key[axis] / there[axis])) for axis in AXES), 9)
            found.append(((distance, math.prod(shape), shape), search))
    if not found:
        return None
    (distance, *_), search = min(found, key=lambda pair: pair[0])
    return (search, distance) if distance <= FARTHEST else None


def source(what: str, key: Mapping[str, Any]) -> Mapping[str, Any]:
    """Results file, commit, date and versions behind the case `key` in the table of operator `what`; empty where there
    is none."""
    table = _table(what)
    for entry in table.get("entries", ()):
        if all(key[name] == value for name, value in entry["key"].items()):
            return table["sources"][entry["source"]]
    return {}


def entry(search: Search) -> dict[str, Any]:
    """A search as it stands in a table: the case, and each candidate that was measured and right, the fastest first."""
    measured = sorted((c for c in search.candidates if c.time and not c.dropped), key=lambda c: c.time or 0.0)
    rows = [
        {"settings": dict(c.config), "seconds": c.time, "low": min(c.times), "high": max(c.times)} for c in measured
    ]
    return {"key": dict(search.key), "measured": rows}


@functools.cache
def _table(what: str) -> dict[str, Any]:
    path = files(__name__).joinpath(f"{what}.json")
    return json.loads(path.read_text(encoding="utf-8")) if what in MODELS and path.is_file() else {}
