"""Rates that `pkt doctor` measured on this machine: the model's start on GPUs that it was not fitted to.

rates.json is beside the tuner's choices: {"format": 1, "gpus": {name: rates}}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pkt.model.cost import library
from pkt.model.gpu import H200, Gpu, gpu_named

FORMAT = 1
SIDE = 4096
"""Of the square bf16 product that is timed."""
NAMES = ("sms", "product", "memory", "link")
"""sms: how many. product: seconds of torch's product of two matrices (SIDE, SIDE) in bf16. memory: bytes a second that
a copy reads and writes. link: bytes a second out of a GPU while all GPUs copy to a peer."""
Rates = Mapping[str, float]


def folder() -> Path:
    """The folder of pkt's files about this machine: PKT_TUNE_CACHE, or one in the user's cache directory. Raises
    OSError if the user has no home directory."""
    given = os.environ.get("PKT_TUNE_CACHE")
    if given:
        found = os.path.expanduser(given)
    else:
        import platformdirs

        try:
            found = str(platformdirs.user_cache_path("pkt") / "tune")
        except RuntimeError:  # newer releases raise where older ones leave the ~
            found = "~"
    if found.startswith("~"):  # nothing expands it where the user is unknown
        raise OSError("there is no home directory: set HOME or PKT_TUNE_CACHE")
    return Path(found)


def measured(name: str) -> Rates | None:
    """The rates of the GPU that torch gives this name; None where none were kept, or not by this program."""
    found = _read().get(name)
    return found if isinstance(found, dict) and all(_positive(found.get(rate)) for rate in NAMES) else None


def store(name: str, rates: Rates) -> None:
    """Keep what was measured on a GPU. Raises OSError where the file cannot be written."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"format": FORMAT, "gpus": {**_read(), name: dict(rates)}}, indent=1), encoding="utf-8")
    os.replace(fresh, path)


def gpu_with(name: str, rates: Rates | None) -> Gpu:
    """The GPU of that name: with these rates, and what else is of H200; H200 itself as it was fitted."""
    gpu = gpu_named(name)
    if rates is None or name == H200.name:
        return gpu
    alone = library({"M": SIDE, "N": SIDE, "K": SIDE, "dtype": "bf16", "size": 1}).total
    flops = H200.flops * alone / rates["product"]
    return replace(
        gpu, sms=int(rates["sms"]), flops=flops, memory=rates["memory"], link=rates["link"], measured=True,
    )  # fmt: skip


def gpu_here(name: str) -> Gpu:
    """The GPU of that name, as far as this machine knows it."""
    return gpu_with(name, measured(name))


def _path() -> Path:
    return folder() / "rates.json"


def _read() -> dict[str, Any]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or of another program
        return {}
    gpus = content.get("gpus") if isinstance(content, dict) and content.get("format") == FORMAT else None
    return gpus if isinstance(gpus, dict) else {}


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
