"""`all_gather_matmul` of fp8 elements with scales: its kernels, and cuBLAS's product of fp8, see shared/scales.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pkt.runtime.world import Workspace, World

from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import Case, integer
from ..operator import Operator
from ..shared import products, scaled_products, unfused
from ..shared.fp8 import FP8
from ..shared.tile_product import GatedEpilogue
from . import host


def all_gather_matmul_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    epilogue: GatedEpilogue = "none",
    fast_accum: bool = False,
    mode: Literal["push", "copy", "gluon", "unfused", "nccl"] | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    push_rows: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The product of the gathered A with this rank's `b`, of fp8 elements and their scales, in bf16. Collective.

    a: this rank's shard (m, k) by rows, the same shape on every rank, contiguous; float8_e4m3fn.
    b: (k, N), float8_e4m3fn, the transposed view of a contiguous tensor, as weight.t() of nn.Linear's weight.
    scale_a: fp32, one for each row of a, (m, 1), or one for all of a, of any shape; each rank has its own.
    scale_b: fp32, one for each column of b, (1, N), or one for all of b, of any shape.
    out: (size * m, N), bf16; N / 2 columns with epilogue "swiglu"; shares no memory with the operands. A new tensor
        where None.
    bias: (N,), bf16. epilogue: as of all_gather_matmul. Scales, bias and epilogue are applied in fp32; the result is
        rounded once.
    fast_accum: True: sums of fp8 products may stay in the tensor cores, which keep some 14 bits of them; up to a sixth
        faster. False: some hundred products are added up there, and then in fp32. As use_fast_accum of torch's product.

    mode: how it is computed. None takes, on GPUs where these run, "gluon" for many rows that take long to move, else
        "unfused"; and "push" elsewhere.
        "push", "copy", "gluon": as of all_gather_matmul.
        "unfused", "nccl": pkt's or NCCL's all-gather of a and of its scales, then torch's product of fp8, which takes N
            that are multiples of 16. They take no settings.
    num_comm_sms, chunk, tiles, push_rows: as of all_gather_matmul. tiles: "gluon": (128, 128, 128, GROUP, 8, STAGES),
        with fast_accum also (128, 256, 128, GROUP, 8, STAGES). Else BLOCK_K is at least 32.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete; `a` and `scale_a` may be overwritten at once. It has no gradient. Raises ShapeError,
    DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    settings = (num_comm_sms, chunk, tiles, push_rows)
    return OPERATOR((a, b, out, bias, scale_a, scale_b), (epilogue, fast_accum, mode, *settings), world, workspace)


SIZES = {"m": 12, "k": 20, "n": 32}
_forms, _settings = host.OPERATOR.forms, ("num_comm_sms", "chunk", "push_rows")
OPERATOR = Operator(
    all_gather_matmul_scaled,
    tensors=scaled_products.operands("m k", host.columns_of),
    result="W*m n",
    dtype=lambda call: scaled_products.RESULT,
    arguments={**scaled_products.ARGUMENTS, "epilogue": host.OPERATOR.arguments["epilogue"]},
    settings={"tiles": scaled_products.tiles, **dict.fromkeys(_settings, integer(0))},
    forms={
        "push": scaled_products.form(_forms["push"]),
        "copy": scaled_products.form(_forms["copy"], fits=lambda call: ""),  # rows are made whole
        "gluon": scaled_products.gluon(_forms["gluon"], *_settings),
        **scaled_products.unfused(unfused.gather_forms(ALL_GATHER.planned, scaled=True)),
    },
    default=scaled_products.default("push", 1024, True, lambda call: (call.world.size - 1) * call["a"].nbytes),
    reference=scaled_products.of_values(host.reference),
    terms=lambda sizes, size: size * sizes["k"],
    cases=(
        Case(SIZES, arguments={"mode": "push"}, launches=3, out="new", dtype=FP8),
        Case(SIZES, arguments={"mode": "copy"}, out="new", dtype=FP8),
        *products.nasty("push", "copy"),
        *scaled_products.nasty("unfused"),
    ),
)
