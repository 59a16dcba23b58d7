"""Tables: what was measured on H200, shipped with pkt, and a good config for a shape that was not measured.

An operator's table, measured.json in its folder, is written by benchmarks/tuned.py from the exhaustive searches in
benchmarks/results/, and names file, commit and date of each. It has, for every measured case, the fastest candidates of
the operator's space and the fastest of each mode, with their times.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pkt.kernels.operator import Operator
from pkt.model import calibration
from pkt.model.config import NCCL, Config, nccl_wanted
from pkt.model.gpu import H200
from pkt.tune.candidates import estimate, model_of
from pkt.tune.search import Candidate, Search
from pkt.wording import dtype_text

FARTHEST = 1.5
"""Most doublings and halvings of M, N and K together by which a shape may differ from a measured one, see `nearest`:
half-way between a size and its double."""

AXES = ("M", "N", "K")


def path(operator: Operator) -> Path:
    """The file of an operator's table: in its folder, or beside its file."""
    file = Path(inspect.getfile(operator.function))
    return file.with_name("measured.json") if file.parent.name == operator.name else file.with_suffix(".json")


@functools.cache
def measured(operator: Operator) -> tuple[Search, ...]:
    """An operator's table as searches, one a case. The times of a candidate are its least, its median and its greatest;
    the model predicts each. () where pkt ships no table."""
    table, model = _table(operator), model_of(operator)
    searches = []
    for entry in table.get("entries", ()):
        key = {**entry["key"], "gpu": table["gpu"]}
        candidates = []
        for row in entry["measured"]:
            config = Config(**row["settings"])
            candidates.append(Candidate(config, model(config, key), (row["low"], row["seconds"], row["high"])))
        searches.append(Search(operator.name, key, tuple(candidates), candidates[0].config, 0.0))
    return tuple(searches)


def nearest(operator: Operator, key: Mapping[str, Any], gpu: str, size: int) -> Config | None:
    """The config expected to be the fastest, of those measured for the nearest shape, see `near`, whose forms have
    candidates for this case; or None. NCCL + cuBLAS only where it is wanted.

    A shape that was measured gets its fastest config. Another shape gets the config for which the time measured there,
    times the model's ratio of here to there, is least: as `carried` over, or its mode alone if the form settles its
    settings for every shape; and None if the model expects another form to be faster by more than its error. Also a
    form that is not that of the fastest config there has to be ahead of it by its error.
    tests/tune/test_exhaustive.py says how far that is from the best.
    """
    found = near(operator, key, gpu, size)
    if found is None:
        return None
    (search, distance), case, model = found, {**key, "size": size}, model_of(operator)
    modes = {name for name, form in operator.forms.items() if form.space and form.space(case, H200)}
    taken = [c for c in search.candidates if c.config["mode"] in modes and (nccl_wanted() or c.config != NCCL)]

    def expected(candidate: Candidate) -> float:
        here = model(carried(operator, candidate.config), case)
        mode = candidate.config["mode"]
        lead = 0.0 if mode == taken[0].config["mode"] else calibration.error(operator.name, mode)
        return (1.0 + lead) * (candidate.time or 0.0) * (here or 1.0) / (candidate.predicted or 1.0)

    if not taken:
        return None
    if not distance:
        return taken[0].config
    best = carried(operator, min(taken, key=expected).config)
    here, forms = estimate(operator, best, case), operator.forecast(case, H200).seconds
    fastest = min(seconds for mode, seconds in forms.items() if mode in modes)
    if here is not None and here.total > fastest * (1 + calibration.error(operator.name, best["mode"])):
        return None
    return Config(mode=best["mode"]) if operator.forms[best["mode"]].settles else best


def carried(operator: Operator, config: Config) -> Config:
    """`config` without the settings that are right for one shape only; the form's own rule fills them in."""
    left = operator.forms[config["mode"]].one_shape
    return Config(**{name: value for name, value in config.items() if name not in left})


def near(operator: Operator, key: Mapping[str, Any], gpu: str, size: int) -> tuple[Search, float] | None:
    """The search of the nearest measured shape, its fastest candidate first, and the distance to it; or None.

    key: M, N, K of the product that each rank computes, and dtype. gpu: as torch names it. size: the number of ranks.
    Only cases of the same operator, GPU, dtype and size count. The distance of two shapes is |log2 M/M'| + |log2 N/N'|
    + |log2 K/K'|, the doublings from one to the other. Of several at the least distance the one with the smaller
    product is taken, then that with the smaller M, N, K in this order. None where the least is more than FARTHEST.
    """
    if min(key.get(axis, 0) for axis in AXES) < 1:
        return None
    case = (gpu, dtype_text(key.get("dtype")), size)
    found = []
    for search in measured(operator):
        there = search.key
        if case == (there["gpu"], there["dtype"], there["size"]):
            shape = tuple(there[axis] for axis in AXES)
            distance = round(sum(abs(math.log2(key[axis] / there[axis])) for axis in AXES), 9)
            found.append(((distance, math.prod(shape), shape), search))
    if not found:
        return None
    (distance, *_), search = min(found, key=lambda pair: pair[0])
    return (search, distance) if distance <= FARTHEST else None


def source(operator: Operator, key: Mapping[str, Any]) -> Mapping[str, Any]:
    """Results file, commit, date and versions behind the case `key` in an operator's table; {} where it has none."""
    table = _table(operator)
    for entry in table.get("entries", ()):
        if all(key[name] == value for name, value in entry["key"].items()):
            return table["sources"][entry["source"]]
    return {}


def entry(search: Search) -> dict[str, Any]:
    """A search as a table has it: the case, and each candidate that was measured and right, the fastest first."""
    rows = [
        {"settings": dict(c.config), "seconds": c.time, "low": min(c.times), "high": max(c.times)}
        for c in search.measured
    ]
    return {"key": dict(search.key), "measured": rows}


@functools.cache
def _table(operator: Operator) -> dict[str, Any]:
    file = path(operator)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
