"""all_gather_matmul with the gathered A as a second result: `keep="whole"`, for b's gradient.

copy, gluon: the product as in all_gather_matmul, where the copy engines bring A. The inbox and this rank's shard are
    copied to the result: W |a| bytes read and W |a| written in this rank's memory, none between ranks; in gluon while
    the product is computed, in copy behind it. The inbox cannot be kept itself: the next call fills it, when all ranks'
    streams have come there.
unfused: an all-gather, then cuBLAS.
nodes: as copy, in a world of several nodes, from where all_gather_matmul gathers A.

Ranks may differ in the columns of b, because matmul_reduce_scatter's may differ in k, and this is its backward pass.
Then all ranks gather A before the product: the settings of the other forms follow from the columns.

The registry does not know this operator: `all_gather_matmul` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from pkt.model.cost import Estimate
from pkt.model.gpu import Gpu
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World

from ..all_gather import all_gather
from ..declaration import Call, Case, Launch, Operand, Tuning, choice
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import product_rules, products
from ..shared.tile_product import finished
from . import host, over_nodes, plain
from .rules import settings

CALL = "all_gather_matmul_kept"
SHOWN = 0.2
"""Of the time that A's copy takes, what a Gluon kernel that makes it takes longer (all_gather_matmul_keeper.json)."""


def reference(
    rank: int, a: Any, b: Any, bias: Any = None, shard: Literal["rows", "columns"] = "rows"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` gets from the ranks' operands, in fp64."""
    whole = torch.cat(tuple(a), dim=0 if shard == "rows" else 1).double()
    return host.reference(rank, a, b, bias, "none", shard), whole


def all_gather_matmul_kept(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, bias: torch.Tensor | None = None,
    shard: Literal["rows", "columns"] = "rows", mode: Literal["copy", "gluon", "unfused", "nodes"] | None = None,
    workspace: Workspace | None = None, world: World | None = None,
) -> Any:  # fmt: skip
    """(product, A): as `all_gather_matmul`, and A gathered in new memory, W |a| bytes. Where the call is recorded, A is
    what b's gradient needs; it has no gradient itself. Ranks may differ in b's columns, and then A is
    gathered before the product; if one comes with a new number of them, all do. Collective."""
    return OPERATOR((a, b, out, bias), (shard, mode), world, workspace)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: Any, shard: Any, mode: Any,
    world: World | None, workspace: Workspace | None,
) -> torch.Tensor:  # fmt: skip
    """What all_gather_matmul returns with keep="whole"."""
    total, _ = all_gather_matmul_kept(a, b, bias=bias, shard=shard, mode=mode, world=world, workspace=workspace)
    return total if epilogue == "none" else finished(total, None, epilogue)


def _keeping(plan: Callable[[Call], Launch], inbox_of: Callable[[Call], SymmetricTensor]) -> Callable[[Call], Launch]:
    """`plan`, and after each launch A from the inbox (size, m, k), which has no shard of this rank's."""

    def keeping(call: Call) -> Launch:
        (m, k), rank, size, columns = call["a"].shape, call.world.rank, call.world.size, call["shard"] == "columns"
        call.arguments["epilogue"] = "none"
        launch, inbox = plan(call), inbox_of(call).plain().view(size, m, k)

        def launch_and_keep(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, whole: torch.Tensor
        ) -> Any:
            launch(a, b, out, bias)
            shards = whole.view(m, size, k).transpose(0, 1) if columns else whole.view(size, m, k)
            shards[:rank].copy_(inbox[:rank])
            shards[rank].copy_(a.detach())
            shards[rank + 1 :].copy_(inbox[rank + 1 :])
            return out, whole

        return launch_and_keep

    return keeping


def _copy_inbox(call: Call) -> SymmetricTensor:
    return plain.copied(call)[0].inbox


def _gluon(call: Call) -> Launch:
    call.arguments["epilogue"] = "none"
    launch = _forms["gluon"].plan(call)

    def launch_and_keep(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, whole: torch.Tensor
    ) -> Any:
        return launch(a, b, out, bias, None, None, whole), whole

    return launch_and_keep


def _settled(call: Call) -> dict[str, Any]:
    """The Gluon form's settings where the copy engines bring A."""
    N = call["b"].shape[1]
    settled, tiles = settings(call["m"], N, call["k"], call.world, tiles=None, num_comm_sms=0)
    return {**settled._asdict(), "tiles": tiles}


def _fits_copies(call: Call) -> str:
    """Why the copy engines cannot bring A for a product with the same settings on all ranks, in words; "" where they
    can. Collective as `Call.alike`."""
    return host.fits_copies(call) if call.alike("n") else "ranks with different numbers of columns, or none"


def _fits_gluon(call: Call) -> str:
    """Why the Gluon form cannot run a call, in words; "" where it can. Collective: every rank takes part
    in `Call.alike`, so it comes before what a rank's own columns decide."""
    call.arguments["epilogue"] = "none"
    return _fits_copies(call) or host.fits_gluon(call) or ("" if call.world.size > 1 else "a world of one rank")


def _unfused(call: Call) -> Launch:
    """The gather's plan is its own."""
    world, dim = call.world, 0 if call["shard"] == "rows" else 1

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, whole: torch.Tensor
    ) -> Any:
        with torch.no_grad():
            all_gather(a, whole, dim=dim, world=world)
            torch.mm(whole, b, out=out) if bias is None else torch.addmm(bias, whole, b, out=out)
        return out, whole

    return launch


def backward(call: Recorded) -> Gradients:
    """As all_gather_matmul's, but for A, which is here."""
    found: dict[str, Any] = {}
    rows, grad = call["shard"] == "rows", call.grad.contiguous()
    if "bias" in call.wanted:
        found["bias"] = grad.sum(0)
    if "a" in call.wanted:
        found["a"] = (
            call.operator("matmul_reduce_scatter", grad, call["b"].t(), workspace=call.workspace) if rows
            else call.operator("reduce_scatter", torch.mm(grad, call["b"].t()), dim=1)
        )  # fmt: skip
    if "b" in call.wanted:
        found |= products.of_weights(call, call["whole"], [grad])
    return found


def _over_nodes(call: Call) -> Launch:
    return (_keeping(over_nodes.gather_whole, over_nodes.whole) if call.alike("n") else _unfused)(call)


def _seconds(form: str, shown: float, **settings: Any) -> Callable[..., Estimate]:
    """The predicted time of a form of all_gather_matmul with these settings, and of what shows of copying A."""
    seconds = host.OPERATOR.forms[form].seconds
    assert seconds is not None

    def predicted(config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu) -> Estimate:
        found = seconds({**config, **settings}, key, gpu)
        nbytes = key["M"] * key["K"] * product_rules.dtype_of(key).itemsize
        return replace(found, exposed=found.exposed + shown * 2 * nbytes / gpu.memory)

    return predicted


_forms, _nodes = host.OPERATOR.forms, host.OPERATOR.across["nodes"]
OPERATOR = Operator(
    all_gather_matmul_kept,
    tensors=products.operands("m k", lambda call: f"{'k' if call['shard'] == 'rows' else 'W*k'} n"),
    result=lambda call: "W*m n" if call["shard"] == "rows" else "m n",
    also={"whole": Operand(lambda call: "W*m k" if call["shard"] == "rows" else "m W*k")},
    arguments={"shard": choice("rows", "columns")},
    forms={
        "copy": replace(
            _forms["copy"], plan=_keeping(_forms["copy"].plan, _copy_inbox), several=None, fits=_fits_copies,
            seconds=_seconds("copy", 1),
        ),
        "gluon": replace(
            _forms["gluon"], plan=_gluon, several=None, complete=_settled, fits=_fits_gluon,
            seconds=_seconds("gluon", SHOWN, num_comm_sms=0),
        ),
        "unfused": replace(_forms["unfused"], plan=_unfused, several=None, seconds=_seconds("unfused", 1)),
    },
    across={"nodes": replace(_nodes, plan=_over_nodes, several=None)},
    default=lambda call: "unfused" if _fits_copies(call) else "copy",
    reference=reference,
    backward=Backward(
        backward,
        "of a `matmul_reduce_scatter`; of b a product",
        saves={"a": ("b",), "b": ("whole",)}, inner=("whole",),
    ),
    private="n",
    terms=lambda sizes, size: size * sizes["k"],
    tuning=Tuning("ag_gemm", product_rules.gathered, ("m", "n"), columns=True, like=host.CALL),
    cases=(Case(host.SIZES),),
)  # fmt: skip
host.take_kept(product)
