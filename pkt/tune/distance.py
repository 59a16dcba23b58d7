"""How far a result is from the exact one, tile by tile: one wrong tile of any number of tiles is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

TILE = 64
"""Rows and columns of what is compared together, as many as the smallest tile of a large product has. In a norm over
more, the error of one tile would be hidden by the tiles around it."""
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Greatest `distance` of a right result. Roundings stay far below it; a tile that is wrong or late is far above."""
_AT_ONCE = 1 << 26
"""Elements: an fp32 copy of the whole tensor may not fit into memory."""


def distance(found: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> float:
    """The greatest ||found - scale * exact|| of the tiles of TILE x TILE elements, relative to the norm of that tile of
    scale * exact or of an average tile, whichever is greater; infinite if `found` has a NaN. The last dimension has the
    columns."""
    if not exact.numel():
        return 0.0
    cols = exact.shape[-1] if exact.ndim else 1
    found, exact = found.reshape(-1, cols), exact.reshape(-1, cols)
    off, norm = [], []
    rows = max(1, _AT_ONCE // (cols * TILE)) * TILE
    for start in range(0, len(exact), rows):
        part = exact[start : start + rows].float() * scale
        off.append(_squares(found[start : start + rows].float() - part))
        norm.append(_squares(part))
    wrongs, norms = torch.cat(off), torch.cat(norm)
    counts = _squares(torch.ones(1, 1, device=exact.device).expand(exact.shape[0], 1))
    widths = _squares(torch.ones(1, 1, device=exact.device).expand(1, cols))
    average = counts * widths * (norms.sum() / exact.numel())
    value = (wrongs / torch.maximum(norms, average).clamp_min(1e-300)).max().sqrt().item()
    return value if value == value else float("inf")


def agrees_with(exact: torch.Tensor, dtype: torch.dtype) -> Callable[[Mapping[str, Any], torch.Tensor], bool]:
    """check(arguments, result), as pkt.tune.tune takes it: whether a result of `dtype` is as near to `exact` as a right
    one."""
    return lambda arguments, result: distance(result, exact) <= BOUND[dtype]


def _squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of each tile of (rows, cols), in fp64."""
    rows, cols = x.shape
    down = torch.nn.functional.pad(x.square(), (0, -cols % TILE, 0, -rows % TILE))
    return down.view(down.shape[0] // TILE, TILE, -1, TILE).sum((1, 3), dtype=torch.float64)
