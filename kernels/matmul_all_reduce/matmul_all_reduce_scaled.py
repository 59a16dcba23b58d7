"""`matmul_all_reduce` of fp8 elements with scales: its kernels, and torch's product of fp8, see shared/scales.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pkt.runtime.world import Workspace, World

from ..all_reduce import OPERATOR as ALL_REDUCE
from ..declaration import Case
from ..operator import Operator
from ..shared import products, scaled_products, unfused
from ..shared.fp8 import FP8
from ..shared.tile_product import Epilogue
from . import plain


def matmul_all_reduce_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    epilogue: Epilogue = "none",
    fast_accum: bool = False,
    mode: Literal["lcsc", "gluon", "unfused", "nccl"] | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    lag: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The sum over ranks of `a @ b`, of fp8 elements and their scales, on every rank in bf16. Collective.

    a: (M, k), float8_e4m3fn, contiguous. Ranks may differ in k, and agree in all else.
        If one rank comes with a new k, all do. Where mode, tiles and lag are given, a rank may do so alone.
    b: (k, N), float8_e4m3fn, the transposed view of a contiguous tensor, as weight.t() of nn.Linear's weight.
    scale_a: fp32, one for each row of a, (M, 1), or one for all of a, of any shape; each rank has its own.
    scale_b: fp32, one for each column of b, (1, N), or one for all of b, of any shape.
    out: (M, N), bf16; shares no memory with the operands. A new tensor where None.
    bias: (N,), bf16, alike on all ranks. epilogue: as of matmul_all_reduce. A rank's product is scaled in fp32, and
        sent in bf16.
    fast_accum: as of all_gather_matmul_scaled.

    mode: how it is computed: "lcsc", "gluon", "unfused", "nccl" as of matmul_all_reduce. The last two take
        torch's product of fp8, and N that are multiples of 16. None takes, on GPUs where these run, "gluon" for many
        rows that take long to move, else "unfused"; and "lcsc" elsewhere.
    num_comm_sms, tiles, lag: as of matmul_all_reduce; tiles as of all_gather_matmul_scaled.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete. It has no gradient. Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    return OPERATOR(
        (a, b, out, bias, scale_a, scale_b), (epilogue, fast_accum, mode, num_comm_sms, tiles, lag), world, workspace
    )  # fmt: skip


_of, SIZES = plain.OPERATOR, {"m": 28, "k": 32, "n": 32}
OPERATOR = Operator(
    matmul_all_reduce_scaled,
    tensors=scaled_products.operands("m k", same_bias=True),
    result="m n",
    dtype=lambda call: scaled_products.RESULT,
    arguments=scaled_products.ARGUMENTS,
    settings={**{name: _of.settings[name] for name in ("num_comm_sms", "lag")}, "tiles": scaled_products.tiles},
    forms={
        "lcsc": scaled_products.form(_of.forms["lcsc"]),
        "gluon": scaled_products.gluon(_of.forms["gluon"], "lag"),
        **scaled_products.unfused(unfused.reduce_forms(ALL_REDUCE.planned)),
    },
    default=scaled_products.default(
        "lcsc", 1024, False, lambda call: 4 * (1 - 1 / call.world.size) * call["m"] * call["n"]
    ),
    reference=scaled_products.of_values(plain.reference),
    private="k",
    terms=_of.terms,
    cases=(
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 1}, out="new", dtype=FP8),
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 1}, multicast=False, dtype=FP8),
        *products.nasty("lcsc"),
        *scaled_products.nasty("unfused"),
    ),
)
