"""RMSNorm of rows that ranks have added up: device code, exact results, bounds and gradients.

    new residual = residual + the ranks' sum, added in fp32 and rounded once
    normed = new residual * rsqrt(mean of its squares + eps) * weight, in fp32 from the rounded new residual

So the new residual says all about a row, and every rank can norm it and get the same bits. vLLM's fused_add_rms_norm
also norms the rounded values; it rounds once more, before the weight.

quant: fp8 as in fp8.py, with a scale of its own for each token ("fp8_token") or for each 128 columns of a token
("fp8_group"), and vLLM's least scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.wording import count_text

from ..declaration import Call, Launch, Shape
from ..gradients import Recorded
from . import fp8, row_tiles
from .fp8 import FP8, GROUP, LARGEST, LEAST_SCALE
from .grid import COPY_OPTIONS

Quant = Literal["fp8_token", "fp8_group"]
QUANTS = ("fp8_token", "fp8_group")
_LEAST_SCALE, _GROUP = tl.constexpr(LEAST_SCALE), tl.constexpr(GROUP)


# ------------------------------------------------------------------------------------------------------------- device
@triton.jit
def inverse_root(squares, H, eps):
    """1 / root mean square, from the sum of H squares."""
    return tl.rsqrt(squares / H + eps)


@triton.jit
def greatest(h, weight, QUANT: tl.constexpr):
    """(rows,): what `finished` needs to know of all columns: the greatest |h * weight|; 0 where it needs nothing."""
    if QUANT == "fp8_token":
        return tl.max(tl.abs(h * weight), 1)
    else:
        return tl.zeros((h.shape[0],), tl.float32)


@triton.jit
def finished(h, weight, root, most, dtype: tl.constexpr, QUANT: tl.constexpr):
    """(what is stored of some columns (rows, columns), its scales, fp32 (rows, scales)). h: the new residual, fp32;
    weight: fp32 (1, columns); root, most: (rows,), of whole rows. Without QUANT the scales mean nothing."""
    y = h * weight * root[:, None]
    if QUANT == "fp8_token":
        # Factors that are not negative round monotonically: this is the greatest magnitude of all the y.
        scale = fp8.scale_of(most * root, _LEAST_SCALE)[:, None]
        return (y / scale).to(tl.float8e4nv), scale
    elif QUANT == "fp8_group":
        return fp8.by_group(y, _LEAST_SCALE)
    else:
        return y.to(dtype), root[:, None]


@triton.jit
def places_of_scales(row, begin, inside, H, COLS: tl.constexpr, QUANT: tl.constexpr):
    """(where the scales of columns [begin, begin + COLS) are, which of them exist), with QUANT. row: (rows, 1); inside:
    (rows, 1), the rows that exist."""
    if QUANT == "fp8_token":
        return row, inside
    else:
        group = begin // _GROUP + tl.arange(0, COLS // _GROUP)[None, :]
        return row * (H // _GROUP) + group, inside & (group < H // _GROUP)


# --------------------------------------------------------------------------------------------------------------- host
def dtype_of(call: Call) -> torch.dtype:
    """Of the normed rows."""
    return FP8 if call["quant"] else call.dtype


def scales_of(call: Call) -> Shape:
    """The shape of the scales, which a call without quant has none of."""
    rows, width = call.shape
    quant = call["quant"]
    return rows, 0 if quant is None else 1 if quant == "fp8_token" else width // GROUP


def check_groups(call: Call) -> None:
    """Raise ShapeError where columns do not fall into groups."""
    if call["quant"] == "fp8_group" and call.sizes["h"] % GROUP:
        raise call.refuse("x", count_text(call.sizes["h"], "column"), f'a multiple of {GROUP} for quant="fp8_group"')


def refuses(keywords: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Why a call has no gradient."""
    return f"quant={keywords['quant']!r}" if keywords["quant"] else ""


def columns(h: int, most: int) -> int:
    """Columns that a program works on at a time: all of them where they are no more than `most`."""
    return min(max(triton.next_power_of_2(h), GROUP), most)


def exact(new: torch.Tensor, weight: torch.Tensor, eps: float, quant: str | None) -> tuple[torch.Tensor, ...]:
    """(normed,), or (normed / scales, scales), of exact new residuals (T, H), in their dtype. H may be 0."""
    mean = new.square().sum(-1, keepdim=True) / max(new.shape[-1], 1)
    y = new * torch.rsqrt(mean + eps) * weight
    if quant is None:
        return (y,)
    groups = _grouped(y, quant)
    scale = (_greatest(groups) / LARGEST).clamp(min=LEAST_SCALE)
    return (groups / scale[..., None]).view(y.shape), scale


def _grouped(y: torch.Tensor, quant: str) -> torch.Tensor:
    """(T, scales, columns of a scale)"""
    T, H = y.shape
    return y.view(T, 1, H) if quant == "fp8_token" else y.view(T, H // GROUP, GROUP)


def _greatest(groups: torch.Tensor) -> torch.Tensor:
    return groups.abs().amax(-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])


FP32 = 2.0**-24
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: FP32}
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}


def bound(
    new: torch.Tensor, magnitude: torch.Tensor, terms: int, weight: torch.Tensor, eps: float, quant: str | None,
    dtype: torch.dtype, roundings: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """How far right results may be off: (normed, new residual[, scales]). new: the exact new residual, fp64 (T, H);
    magnitude: the sum of the magnitudes of its `terms` terms; roundings: to the dtype, of partial sums and of the new
    residual. An error of the new residual moves the root, and each operation of the norm rounds in fp32."""
    H = max(new.shape[-1], 1)
    unit = UNIT[dtype]
    off = (terms + 2) * FP32 * magnitude
    off = off + (roundings - 1) * (unit * (magnitude + off) + TINY[dtype])
    off = off + unit * (new.abs() + off) + TINY[dtype]
    mean = new.square().sum(-1, keepdim=True) / H
    moved = (2 * new.abs() * off + off.square()).sum(-1, keepdim=True) / H
    moved = moved + (H + 8) * FP32 * (mean + moved)
    root, high = (mean + eps).rsqrt(), (mean + eps - moved).clamp(min=eps / 2).rsqrt() * (1 + 2.0**-21)
    low = (mean + eps + moved).rsqrt() * (1 - 2.0**-21)
    wrong = torch.maximum(high - root, root - low)
    w = weight.abs()
    off_y = w * ((new.abs() + off) * wrong + off * root) + 8 * FP32 * w * (new.abs() + off) * high
    y = new * root * weight
    if quant is None:
        return off_y + unit * (y.abs() + off_y) + TINY[dtype], off
    groups, off_groups = _grouped(y, quant), _grouped(off_y, quant)
    scale = (_greatest(groups) / LARGEST).clamp(min=LEAST_SCALE)
    off_scale = _greatest(off_groups) / LARGEST + 8 * FP32 * scale
    least = (scale - off_scale).clamp(min=LEAST_SCALE / 2)[..., None]
    q = groups.abs() / scale[..., None]
    off_q = (off_groups + q * off_scale[..., None]) / least + 8 * FP32 * q
    limit = off_q + 2.0**-4 * (q + off_q) + 2.0**-10  # e4m3: 3 bits behind the point, the least number is 2^-9
    return limit.view(y.shape), off, off_scale


SAVES = dict.fromkeys(("x", "residual", "weight"), ("new_residual", "weight"))
"""What the gradient of each operand needs."""


def pulled_back(call: Recorded, grad: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the gradient of the new residual, those of residual and weight that are wanted), from `grad`, that of the normed
    rows of this rank's new residual. Computed in fp32, rounded once."""
    new, of_new = call["new_residual"], call.grads[1]
    h, g = new.float(), grad.float()
    root = torch.rsqrt(h.square().mean(-1, keepdim=True) + call["eps"])
    scaled, unit = g * call["weight"].float(), h * root
    of_sum = root * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    of_sum = (of_sum + of_new.float()).to(of_new.dtype)
    found = {"residual": of_sum, "weight": (g * unit).sum(0).to(of_new.dtype)}
    return of_sum, {name: value for name, value in found.items() if name in call.wanted}


def over_tiles(call: Call, kernel: Any, owned: bool = False) -> Launch:
    """launch(*tensors): `kernel` over tiles of rows. Returns all but the operands. owned: a rank has a residual for its
    rows alone. Collective."""
    world = call.world
    p, programs = row_tiles.rows(world, call.shape, call.dtype, world.size, owned=owned, tile=call["rows"])
    space = row_tiles.space(world, programs, p.room, call.dtype)
    rest = *space, float(call["eps"]), p, world.device, call["quant"] or "none"
    start = cooperative_launch(world, kernel, (programs,), **COPY_OPTIONS)

    def launch(*tensors: torch.Tensor) -> Any:
        start(*tensors, *rest)
        return tensors[3:]

    return launch


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In fp64."""
    return torch.stack([part.double() for part in parts]).sum(0)
