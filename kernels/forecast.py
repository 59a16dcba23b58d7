"""Which form of an operator is expected to be the fastest for a case, and whether anything measured supports that; and
the GPU that it is chosen for: that of a world's ranks, or of a world that nobody joined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from pkt.errors import Unsupported
from pkt.model import calibration, rates
from pkt.model.cost import Estimate, library, modelled
from pkt.model.gpu import H200, Gpu
from pkt.runtime.world import World

from .declaration import Form

SAFE = ("unfused", "nccl")
"""Forms to take far from every measured shape: cuBLAS and a collective. Libraries suit most shapes, but a fused form
with the wrong settings may be several times too slow."""
EVEN = 0.01
"""Predictions that differ by so small a share are even, and then a safe form is taken. With 0, 0.01 and 0.02 the form
that is taken takes 1.0040, 1.0036 and 1.0043 times as long as the fastest, in the mean of 179 shapes that the model was
not fitted to (zoo_2.json of benchmarks/results)."""


@dataclass(frozen=True)
class Forecast:
    """The forms of an operator for one case.

    seconds: of every form that declares them, with the settings of its own rule; the fastest first. order: the forms as
    they are to be tried: by the same seconds where the model is trusted, a safe form first where they are even; else
    those that are not safe have handicaps, infinite ones far from everything that was measured. doubt: what is not
    known, in words; "" for nothing.
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
    for name, form in forms.items() if gpu.gluon else ():
        for slower in seconds.keys() & set(form.outruns):
            seconds[slower] = max(seconds[slower], (1.0 + calibration.LEAST_ERROR) * seconds[name])
    doublings, doubt = calibration.trust(operator, key, gpu)
    handicaps = {
        name: EVEN * (name not in SAFE) + calibration.handicap(operator, name, key, doublings) for name in seconds
    }
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
    return calibration.corrected(operator, name, key, found, gpu) if modelled(key) else found


def gpu_of(world: World, case: tuple[Any, ...]) -> Gpu:
    """The GPU of every rank. One that the model was not fitted to has the rates that rank 0's machine measured, so it
    is collective the first time, which may not be in a capture."""
    name, known = world.backend.gpu, world.lasting
    if name == H200.name:
        return H200
    if "pkt.kernels.gpu" not in known:
        if world.capturing:
            raise Unsupported.captured(world.rank, case)
        known["pkt.kernels.gpu"] = rates.gpu_with(name, world.all_gather_object(rates.measured(name))[0])
    return known["pkt.kernels.gpu"]


class Described(SimpleNamespace):
    """As much of a world as the rules of operators ask for: all ranks are alike."""

    rank, capturing, lineage, nodes = 0, False, (), 1

    def __init__(self, size: int, gpu: Gpu | None, multicast: bool = False) -> None:
        asked = {}  # what ranks ask each other once
        if gpu is not None:
            lacks = "" if gpu.gluon else f"{gpu.name}, without Gluon forms"
            asked = {"pkt.kernels.gluon": lacks, "pkt.kernels.nccl": ""}
        device = torch.device("cpu" if gpu is None else "cuda")
        sms = gpu.sms if gpu else 1
        name = gpu.name if gpu else "simulated"
        backend = SimpleNamespace(gpu=name, exchange=lambda value, what: [value] * size)
        super().__init__(
            size=size, num_sms=sms, torch_device=device, lasting=asked, multicast=multicast, backend=backend,
        )  # fmt: skip
