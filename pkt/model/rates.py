"""Rates that `pkt doctor` measured on this machine: the model's start on GPUs that it was not fitted to.

rates.json is beside the tuner's choices: {"format": 1, "gpus": {name: rates}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pkt.model.cost import library
from pkt.model.gpu import H200, Gpu, gpu_named

FILE = "rates.json"
FORMAT = 1
SIDE = 4096
"""Of the square bf16 product that is timed."""
NAMES = ("sms", "product", "memory", "link")
"""sms: how many. product: seconds of torch's product of two matrices (SIDE, SIDE) in bf16. memory: bytes a second that
a copy reads and writes. link: bytes a second out of a GPU while all GPUs copy to a peer."""
Rates = Mapping[str, float]


def measured(name: str) -> Rates | None:
    """The rates of the GPU that torch gives this name; None where none were kept, or not by this program."""
    found = _read().get(name)
    if not isinstance(found, dict) or not all(_is_rate(found.get(rate)) for rate in NAMES):
        return None
    return found if found["sms"] >= 1 else None


def store(name: str, rates: Rates) -> None:
    """Keep what was measured on a GPU. Raises OSError where the file cannot be written."""
    from pkt.model import files  # here, because importing pkt should load little

    path = files.folder() / FILE
    with files.locked(path):
        files.replace(path, {"format": FORMAT, "gpus": {**_read(), name: dict(rates)}})


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


def _read() -> dict[str, Any]:
    from pkt.model import files  # as above

    try:
        content = json.loads(files.text_of(files.folder() / FILE))
    except (OSError, ValueError, RecursionError):  # none yet, or of another program
        return {}
    gpus = content.get("gpus") if isinstance(content, dict) and content.get("format") == FORMAT else None
    return gpus if isinstance(gpus, dict) else {}


def _is_rate(value: Any) -> bool:
    """Whether some GPU may have it, in the unit of any of NAMES."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-9 <= value <= 1e18
