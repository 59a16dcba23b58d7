"""Where the form "gluon" runs, and the rule for the form, on GPUs like the H200."""

from __future__ import annotations

import torch

from pkt.model.gpu import H200
from pkt.runtime.world import World

from ..declaration import Call
from ..shared.gluon_fits import missing_anywhere
from .parts import fits

STAGE = 10e-6
"""Seconds from the end of torch's attention to one rank's keys to the start of the next one's, and from a call to the
first copy of keys."""
FORWARD = {"fused": 440e12, "gluon": 640e12, "parts": 620e12}
BACKWARD = {"fused": 260e12, "gluon": 490e12, "parts": 540e12}
"""FLOP a second with D = 128 in bf16 on H200s, of long sequences (`ring_attention_owners_2.json`,
`ring_attention_alone_1.json`)."""
NARROW, NARROW_BACKWARD = 0.97, 0.9
"""The speed of the Gluon kernels relative to torch's with D = 64, divided by that with 128."""
FILL = {"fused": 190, "gluon": 190, "parts": 400}
"""If a query sees so many keys in one kernel, in the mean, a backward pass reaches half of its rate."""


def lacks_gluon(world: World, q: torch.Tensor) -> str:
    """Why the Gluon kernels of either pass cannot compute attention of q; "" where they can."""
    if lacks := missing_anywhere(world):
        return lacks
    if not q.numel():
        return "no queries"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype}, not bfloat16 or float16"
    if q.shape[-1] not in (64, 128):
        return f"D {q.shape[-1]}, not 64 or 128"
    return ""


def fits_gluon(call: Call) -> str:
    """`lacks_gluon` of a call."""
    return lacks_gluon(call.world, call["q"])


def default(call: Call) -> str:
    """The form of the forward pass with the least predicted time."""
    return min(_forms(call), key=lambda form: seconds(call, form))


def default_backward(call: Call) -> str:
    """As `default`. torch's kernels are out where it is told to be deterministic, which they are not."""
    forms = _forms(call)
    if torch.are_deterministic_algorithms_enabled():
        forms = [form for form in forms if form != "parts"]
    return min(forms, key=lambda form: seconds_backward(call, form))


def _forms(call: Call) -> list[str]:
    """Those that can be the default. The settings are those of "fused"."""
    lacks = {"gluon": fits_gluon, "parts": fits}
    return ["fused", *(form for form, why in lacks.items() if not call.given and not why(call))]


def seconds(call: Call, form: str) -> float:
    """Predicted time of a form of the forward pass."""
    # A part of the result is written and read by the merge.
    computed = _flops(call, 2) / (FORWARD[form] * _narrow(call, form, NARROW))
    return computed + _between(call, form, 2 * call.dtype.itemsize)


def seconds_backward(call: Call, form: str) -> float:
    """Predicted time of a form of the backward pass."""
    computed, others = _flops(call, 5) / (BACKWARD[form] * _narrow(call, form, NARROW_BACKWARD)), call.world.size - 1
    keys = call["s"] * (1 if form == "parts" else call.world.size) / (2 if call["causal"] else 1)
    computed *= 1 + FILL[form] / max(keys, 1)  # of one rank in a kernel of torch's
    if others and form != "parts":  # keys, values, queries and dout travel meanwhile
        sent = 2 * others * (call["q"].numel() + call["k"].numel()) * call.dtype.itemsize
        computed = max(computed, sent / H200.link)
    # A part of each gradient is written, read, and added to a sum in fp32.
    return computed + _between(call, form, 3 * (2 * call.dtype.itemsize + 8))


def delay(call: Call, products: int) -> float:
    """How long the keys of one more head of queries take to come, as a share of the time in which a Gluon kernel has so
    many products of all heads."""
    sent = 2 * (call.world.size - 1) * call["k"].numel() * call.dtype.itemsize
    heads = call["b"] * call["h"]
    return sent / H200.link / heads / (_flops(call, products) / FORWARD["gluon"])


def _flops(call: Call, products: int) -> float:
    """products: of the pairs that queries see, each of D multiplications."""
    pairs = call["q"].numel() * call["s"] * call.world.size
    return 2 * products * pairs / (2 if call["causal"] else 1)


def _narrow(call: Call, form: str, speed: float) -> float:
    return speed if form == "gluon" and call["d"] < 128 else 1.0


def _between(call: Call, form: str, moved: int) -> float:
    """Seconds of what comes between the products. moved: bytes for each element of q and for the keys of each rank, by
    the kernels between torch's."""
    size = call.world.size
    if size == 1 or form == "fused":
        return 0.0
    stages = size * (STAGE + call["q"].numel() * moved / H200.memory) if form == "parts" else STAGE
    return stages + H200.launch
