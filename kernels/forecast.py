"""Which form of an operator is expected to be the fastest for a case, and whether anything measured supports that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pkt.model import calibration
from pkt.model.cost import Estimate, library, modelled
from pkt.model.gpu import Gpu

from .declaration import Form

SAFE = ("unfused", "nccl")
"""Forms to take far from every measured shape: cuBLAS and a collective. Libraries suit most shapes, but a fused form
with the wrong settings may be several times too slow."""


@dataclass(frozen=True)
class Forecast:
    """The forms of an operator for one case.

    seconds: of every form that declares them, with the settings of its own rule; the fastest first. order: the forms as
    they are to be tried: by the same seconds where the model is trusted; else those that are not safe have handicaps,
    infinite ones far from everything that was measured. doubt: what is not known, in words; "" for nothing.
    """

    seconds: Mapping[str, float]
    order: tuple[str, ...]
    doubt: str


def forecast(operator: str, forms: Mapping[str, Form], key: Mapping[str, Any], gpu: Gpu) -> Forecast:
    """The forecast for a case as `Tuning.key` has it, with dtype and size: the same on all ranks that give the same."""
    if min(key[axis] for axis in ("M", "N", "K", "size")) < 1:  # nothing to compute
        return Forecast({}, tuple(sorted(forms, key=lambda name: name not in SAFE)), "")
    parts = {name: predicted(operator, name, form, {"mode": name}, key, gpu) for name, form in forms.items()}
    seconds = {name: found.total for name, found in parts.items() if found is not None}
    doublings, doubt = calibration.trust(operator, key, gpu)
    handicaps = {name: calibration.handicap(operator, name, key, doublings) for name in seconds}
    if doublings:
        first, second = SAFE  # the first where they are even, because it is not slower in nearly all that was measured
        handicaps |= {first: 0.0, second: calibration.error(operator, second)}
    if key["size"] < 2:
        handicaps[SAFE[1]] = math.inf  # nobody to communicate with
    fastest_first = {name: seconds[name] for name in sorted(seconds, key=lambda name: (seconds[name], name))}
    order = sorted(fastest_first, key=lambda name: (1.0 + handicaps[name]) * seconds[name])
    return Forecast(fastest_first, (*order, *(name for name in forms if name not in seconds)), doubt)


def predicted(
    operator: str, name: str, form: Form, config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu
) -> Estimate | None:
    """The parts of a form's time with the settings in `config`, and with its own rule's for the others; None where the
    form declares no `seconds`."""
    if form.seconds is None:
        return None
    found = form.seconds(config, key, gpu)
    if not found.compute:  # a form for few rows says nothing of its tensor cores: with many they are the limit
        found = replace(found, compute=library(key, gpu).compute)
    return calibration.corrected(operator, name, key, found) if modelled(key) else found
