"""Where the form "gluon" runs, and the rule for the form, on GPUs like the H200."""

from __future__ import annotations

import torch

from pkt.model.gpu import H200
from pkt.runtime.world import World

from ..declaration import Call
from ..shared.gluon_fits import missing_anywhere
from .parts import fits

STAGE = 10e-6
"""Seconds from the end of torch's attention to one rank's keys to the start of the next one's."""
FORWARD = 440e12, 640e12
BACKWARD = 260e12, 460e12
"""FLOP a second of pkt's kernels and of torch's with D = 128 in bf16 on one H200, the slower of the rates without and
with a causal mask (`ring_attention_1.json`)."""


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
    """The form of the forward pass with the least predicted time; "gluon" where torch's attention cannot compute it."""
    if not call.given and fits(call) and not fits_gluon(call):
        return "gluon"
    # A part of the result is written and read by the merge.
    return _quicker(call, *FORWARD, products=2, moved=2 * call.dtype.itemsize)


def default_backward(call: Call) -> str:
    """The form of the backward pass, as `default`. Where torch is told to be deterministic, which its kernels are not,
    "gluon" or "fused"."""
    alone = torch.are_deterministic_algorithms_enabled() or fits(call)
    if alone and not call.given and not fits_gluon(call):
        return "gluon"
    if alone:
        return "fused"
    # A part of each gradient is written, read, and added to a sum in fp32.
    return _quicker(call, *BACKWARD, products=5, moved=3 * (2 * call.dtype.itemsize + 8))


def _quicker(call: Call, own: float, torchs: float, products: int, moved: int) -> str:
    """products: of the pairs that queries see, each of D multiplications. moved: bytes for each element of q and for
    the keys of each rank, by the kernels between torch's."""
    if call.given or fits(call):  # the settings are those of "fused"
        return "fused"
    size, elements = call.world.size, call["q"].numel()
    flops = 2 * products * elements * call["s"] * size / (2 if call["causal"] else 1)
    between = size * (STAGE + elements * moved / H200.memory) + H200.launch
    return "parts" if flops / torchs + between < flops / own else "fused"
