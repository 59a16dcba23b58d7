"""`matmul_reduce_scatter` of fp8 elements with scales: its kernels and torch's product of fp8, see shared/scales.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pkt.runtime.world import Workspace, World

from ..declaration import Case
from ..operator import Operator
from ..reduce_scatter import OPERATOR as REDUCE_SCATTER
from ..shared import products, scaled_products, unfused
from ..shared.fp8 import FP8
from ..shared.tile_product import Epilogue
from . import plain


def matmul_reduce_scatter_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    epilogue: Epilogue = "none",
    fast_accum: bool = False,
    mode: Literal["add", "inbox", "gluon", "unfused", "nccl"] | None = None,
    tiles: Sequence[int] | None = None,
    lag: int | None = None,
    copies: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Rows [rank * m, (rank + 1) * m) of the sum over ranks of `a @ b`, of fp8 elements and their scales, in bf16.
    Collective.

    a: (size * m, k), float8_e4m3fn, contiguous. Ranks may differ in k, and agree in all else.
        If one rank comes with a new k, all do. Where mode, tiles and lag are given, a rank may do so alone.
    b: (k, N), float8_e4m3fn, the transposed view of a contiguous tensor, as weight.t() of nn.Linear's weight.
    scale_a: fp32, one for each row of a, (size * m, 1), or one for all of a, of any shape; each rank has its own.
    scale_b: fp32, one for each column of b, (1, N), or one for all of b, of any shape.
    out: (m, N), bf16; shares no memory with the operands. A new tensor where None.
    bias: (N,), bf16. epilogue: as of matmul_reduce_scatter. A rank's product is scaled in fp32, and sent in bf16.
    fast_accum: as of all_gather_matmul_scaled.

    mode: how it is computed: "add", "inbox", "gluon", "unfused", "nccl" as of matmul_reduce_scatter. The last two take
        torch's product of fp8, and N that are multiples of 16. None takes, on GPUs where these run, "gluon" for many
        rows that take long to move, else "unfused"; and "add" elsewhere.
    tiles, lag, copies: as of matmul_reduce_scatter; tiles as of all_gather_matmul_scaled.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete. It has no gradient. Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    return OPERATOR(
        (a, b, out, bias, scale_a, scale_b), (epilogue, fast_accum, mode, tiles, lag, copies), world, workspace
    )  # fmt: skip


_of = plain.OPERATOR
OPERATOR = Operator(
    matmul_reduce_scatter_scaled,
    tensors=scaled_products.operands("W*m k"),
    result="m n",
    dtype=lambda call: scaled_products.RESULT,
    arguments=scaled_products.ARGUMENTS,
    settings={**{name: _of.settings[name] for name in ("lag", "copies")}, "tiles": scaled_products.tiles},
    forms={
        **{mode: scaled_products.form(_of.forms[mode]) for mode in ("add", "inbox")},
        "gluon": scaled_products.gluon(_of.forms["gluon"], "lag", "copies"),
        **scaled_products.unfused(unfused.scatter_forms(REDUCE_SCATTER.planned)),
    },
    default=scaled_products.default("add", 512, False, lambda call: (call.world.size - 1) * 2 * call["m"] * call["n"]),
    reference=scaled_products.of_values(plain.reference),
    private="k",
    terms=_of.terms,
    cases=(
        Case({"m": 12, "k": 32, "n": 16}, arguments={"mode": "add"}, launches=3, out="new", dtype=FP8),
        Case({"m": 12, "k": 32, "n": 16}, arguments={"mode": "inbox"}, launches=3, out="new", dtype=FP8),
        Case({"m": 12, "k": 16, "n": 13}, arguments={"mode": "add"}, ranks=2, out="new", dtype=FP8),
        *products.nasty("add", "inbox"),
        *scaled_products.nasty("unfused"),
    ),
)
