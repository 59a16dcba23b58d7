"""All-reduce, residual and RMSNorm in one launch: every rank ends with the normed rows and the new residual.

What is computed stands at the top of shared/rms_norm.py. The new residual says all about a row, so only it comes back
from who has added it, and every rank norms all rows: that costs memory, which is ten times as fast as the links.

low_latency: each rank puts its x to every other, as words of 12 bytes of data and 4 of flag (shared.flagged), and every
    rank adds and norms everything: one flight, 4 / 3 * (W - 1) * |x| bytes out of each rank. A program has a token, or
    `parts` programs share one: each adds the squares of its columns, and they tell each other the sums.
two_shot: each rank stores tiles of rows into their owners' inboxes; the owner adds, and stores the new residual into
    every rank's inbox; each rank norms what arrives (shared.row_tiles): 2 * (W - 1) / W * |x| bytes.
unfused: pkt's all-reduce, then a kernel that adds the residual and norms: the sum is rounded once more, written and
    read again.

low_latency adds in the order 0, 1, ..., two_shot in the order owner, owner + 1, ..., in fp32, the residual last. All
ranks hold the same bits. No form has a barrier, and none needs symmetric operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from pkt.model.gpu import H200
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Operand, choice, integer, number
from ..declaration import block as power_of_two
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import flagged, rms_norm
from ..shared.checks import FLOATS
from ..shared.replays import in_one_call
from . import low_latency, tiles

Tensors = Sequence[torch.Tensor]


def reference(
    rank: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6, quant: str | None = None
) -> tuple[torch.Tensor, ...]:
    """What `rank` gets, in fp64: (normed, new residual), or (normed / scales, new residual, scales)."""
    new = rms_norm.summed(x) + residual[rank].double()
    normed, *scales = rms_norm.exact(new, weight[rank].double(), eps, quant)
    return normed, new, *scales


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: Tensors, residual: Tensors, weight: Tensors, eps: float = 1e-6,
    quant: str | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """How far right results may be off."""
    parts = [*x, residual[rank]]
    magnitude = rms_norm.summed([part.abs() for part in parts])
    weights = weight[rank].double()
    return rms_norm.bound(rms_norm.summed(parts), magnitude, len(parts), weights, eps, quant, dtype, roundings)


# ---------------------------------------------------------------------------------------------------------- prediction
BEGIN = 5.7e-6
"""Seconds of a launch in flagged words but for its flight: 16 KiB are all-reduced in 7.1 us on 2 x H200."""
FENCED = 2.85e-6
"""Seconds of a flight whose stores a fence and a signal follow: 1 MiB is all-reduced in 14.1 us without flags on 2 x
H200, in two of them (benchmarks/results/collectives_2.json)."""
NORM = 1.9e-6
"""Seconds from the last word of a token to its last normed element, which nothing hides: in low_latency a token of
8192 takes 9.1 us on 2 x H100. In two_shot it takes 15.1: my own rows are normed before the others' answers come
(benchmarks/results/all_reduce_rms_norm_tried_2.json)."""
SECOND = 1.4e-6
"""Seconds that the second kernel of unfused adds in a graph: there that token takes 10.5 us."""


def seconds(mode: str, nbytes: int, size: int) -> float:
    """The predicted time of a form with x of so many bytes, where a graph replays the call, on GPUs like the H200. On
    2 x H100 that of 1, 16 and 128 tokens of 8192 in bf16 is within 6 % of the measured: 9.1, 10.0 and 17.4 us in
    low_latency, 15.1, 16.2 and 21.6 in two_shot, 10.5, 11.6 and 20.6 in unfused. 1024 and 8192 tokens take longer than
    predicted, in like measure: 67.5 and 407 us in two_shot, not 58 and 359, 85.5 and 572 in unfused, not 74 and 487.
    With more ranks nothing was measured."""
    once, link = nbytes / H200.memory, nbytes / H200.link  # through memory, and out of a rank
    if mode == "low_latency":
        moved = (8 / 3 * (size - 1) + 2) * once  # words come and are read; x and the residual are read
        return BEGIN + H200.signal + max(4 / 3 * (size - 1) * link, moved) + NORM + 2 * once
    sent = 2 * (size - 1) / size * link
    if mode == "two_shot":
        answers = 2 * FENCED + NORM if size > 1 else 0.0
        return BEGIN + answers + max(sent, (7 - 3 / size) * once) + NORM
    shots = flagged.shots(nbytes, size, flagged.FLAG_BYTES)
    if shots == 0:
        reduced = 2 * FENCED + max(sent, 4 * once)
    else:
        reduced = shots * H200.signal + 4 / 3 * ((size - 1) * link if shots == 1 else sent)
    return BEGIN + reduced + SECOND + NORM + 4 * once


# ---------------------------------------------------------------------------------------------------------------- host
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    quant: rms_norm.Quant | None = None,
    mode: Literal["low_latency", "two_shot", "unfused"] | None = None,
    parts: int | None = None,
    rows: int | None = None,
    world: World | None = None,
) -> tuple[torch.Tensor, ...]:
    """(normed, new residual) of the sum of all ranks' x: all-reduce, residual and RMSNorm in one launch. Collective.

    x: (T, H), bf16, fp16 or fp32, this rank's part of a sum, as a product with rows of the weights leaves it. residual:
    (T, H) and weight: (H,), of x's dtype and the same on every rank; nothing checks that. The new residual, (T, H) of
    x's dtype, is residual + the sum of x, added in fp32 and rounded once; unfused rounds the sum, too. normed = new
    residual * rsqrt(mean of its squares + eps) * weight, computed in fp32 from the rounded new residual, as vLLM's
    fused kernel does, and rounded once to x's dtype.

    quant: normed is float8_e4m3fn, and a third result has its scales, fp32: "fp8_token" one for each token, (T, 1);
    "fp8_group" one for each 128 columns, (T, H / 128); 128 divides H. A scale is the greatest magnitude
    / 448, or 1 / (448 * 512) where that is more; normed * scale is the value.

    out: where normed goes, apart from all operands; a new tensor where None. The other results are new. All are
    complete when the call ends, and the same bits on every rank; x may be overwritten at once. H and T are any numbers;
    accesses are widest where 16 bytes divide a row. Operands may have any strides, and need not be symmetric.

    mode: a form that the top of kernels/all_reduce_rms_norm/host.py describes. None takes the one with the least
    predicted time, see `seconds`. parts: programs that share a token in low_latency, a power of two, fewer where tokens
    are many; None: one, and for long tokens as many as they need. rows: for each signal in two_shot.

    Symmetric memory kept: low_latency 8 / 3 * (size - 1) times x's bytes and two words for each part of a token,
    rounded up to a power of two, shared with the collectives' flagged words; two_shot 4 * (size - 1) tiles a program
    for each size of tile and grid; unfused x's bytes, and what all_reduce keeps. Raises ShapeError, DtypeError,
    Unsupported, CollectiveMismatch.
    """
    found: Any = OPERATOR((x, residual, weight, out), (eps, quant, mode, parts, rows), world)
    return tuple(found) if quant else tuple(found[:2])


def default(call: Call) -> str:
    """The form with the least predicted time; one rank has nobody to send words to."""
    size, forms = call.world.size, list(OPERATOR.forms)
    if size == 1 or size > flagged.MOST_RANKS:
        forms.remove("low_latency")
    return min(forms, key=lambda mode: seconds(mode, call["x"].nbytes, size))


def _shape(call: Call) -> tuple[int, ...]:
    rms_norm.check_groups(call)
    return call.sizes["t"], call.sizes["h"]


def backward(call: Recorded) -> Gradients:
    """The gradients of x, residual and weight. Collective. Every rank's x is in every rank's results, but a rank's
    residual and weight count as its own."""
    of_sum, found = rms_norm.pulled_back(call, call.grads[0])
    if "x" in call.wanted:
        found["x"] = call.operator("all_reduce", of_sum.clone(memory_format=torch.contiguous_format))
    return found


GIVEN: dict[str, Any] = {"out": "given", "large": {"t": 512, "h": 8192}}
MOVES = "2 (W - 1) / W |x|"
OPERATOR = Operator(
    all_reduce_rms_norm,
    tensors={
        "x": Operand("t h", FLOATS),
        "residual": Operand("t h", same=True),
        "weight": Operand("h", same=True),
    },
    result=_shape,
    dtype=rms_norm.dtype_of,
    also={"new_residual": Operand("t h"), "scales": Operand(rms_norm.scales_of, (torch.float32,))},
    arguments={"eps": number(above=0), "quant": choice(None, *rms_norm.QUANTS)},
    settings={"parts": power_of_two, "rows": integer(1)},
    forms={
        "low_latency": Form(
            low_latency.plan, "words of data and flag to every other rank; all add and norm everything, no barrier",
            "4 / 3 (W - 1) |x|", settings={"parts": None}, small={"parts": 2},
        ),
        "two_shot": Form(
            tiles.two_shot, "rows to their owner, which adds; all norm what comes back", MOVES,
            settings={"rows": None}, small={"rows": 4},
        ),
        "unfused": Form(
            in_one_call(tiles.unfused), "pkt's all-reduce, then a kernel that norms", "as all_reduce's",
            roundings=lambda size: 2,
        ),
    },
    default=default,
    reference=reference,
    bound=bound,
    backward=Backward(
        backward, "torch's of the norm; of x its `all_reduce`",
        saves=rms_norm.SAVES, refuses=rms_norm.refuses,
    ),
    cases=(
        # One program with two turns, so that both halves of its inbox have answers.
        Case({"t": 16, "h": 3}, arguments={"mode": "two_shot"}, ranks=2, sms=1, **GIVEN),
        Case({"t": 1, "h": 3}, arguments={"mode": "two_shot"}, **GIVEN),
        # The third launch meets what the first left in its half of the slots. On one SM one program has a token.
        Case({"t": 1, "h": 3}, arguments={"mode": "low_latency"}, sms=1, launches=3, **GIVEN),
        Case({"t": 1, "h": 4}, arguments={"mode": "low_latency"}, ranks=2, launches=3, **GIVEN),
        Case({"t": 1, "h": 256}, arguments={"quant": "fp8_group"}, explore=False),
    ),
)  # fmt: skip
