"""All-gather fused into a matrix product: C = A @ B, where rank r holds shard r of A and its own B.

Sharded by rows, A is the shards below each other: C (size * m, N) = A (size * m, K) @ B (K, N). Sharded by
columns, A is the shards beside each other: C (m, N) = A (m, size * k) @ B (size * k, N). Algorithms 1 to 3 of
Trifan et al., "Eliminating Multi-GPU Performance Taxes".

push: programs 0 .. num_comm_sms - 1 store this rank's shard into an inbox on every peer and signal each chunk
    of a row block (Algorithm 2); the others compute, waiting row block by row block (Algorithm 3), their own
    shard first, then the peers' in the order in which they arrive; a communicator that has finished computes
    too. (size - 1) * m * k * itemsize bytes into and out of each rank.
copy: push by the copy engines, rows only; no SM moves data. On a stream of its own this rank copies its shard, some row
    blocks at a time, into the inbox of every peer, and after each copy the number of the launch. The inbox is not
    halved by the parity of the launch, which the host does not know in a replay: all ranks meet in a kernel before the
    copies begin.
gluon: push or copy in specialised warps, see gluon.py. plain.py has the kernel and the plans of the other two.
nodes: the only form in a world of several nodes, see over_nodes.py: A goes over the network along the rails, and the
    ranks of a node load it from each other, while tiles are computed. On GPUs it has run on two nodes of one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from pkt.errors import Unsupported
from pkt.runtime.world import Workspace, World

from ..agreement import world_of
from ..all_gather import OPERATOR as ALL_GATHER
from ..all_gather import all_gather
from ..declaration import Call, Case, Form, Launch, Tuning, choice, integer
from ..gradients import Backward, Gradients, Recorded, required
from ..operator import Operator
from ..reduce_scatter import reduce_scatter
from ..several import is_several, run_several
from ..shared import few_rows, gluon_fits, nodes, nodes_product_rules, product_rules, products, unfused
from ..shared.nodes_products import gathering_sms
from ..shared.replays import in_one_call
from ..shared.tile_product import (
    GatedEpilogue,
    default_tiles,
    finished,
    whole_rows,
)
from . import over_nodes, plain, rules
from .rules import CALL, PushPlan, gathered_plan, settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


def reference(
    rank: int,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None = None,
    epilogue: GatedEpilogue = "none",
    shard: Literal["rows", "columns"] = "rows",
    keep: Literal["shard", "whole"] = "shard",
) -> torch.Tensor:
    """What `rank` gets from the ranks' operands, in fp64."""
    product = torch.cat(tuple(a), dim=0 if shard == "rows" else 1).double() @ b[rank].double()
    return finished(product, bias[rank] if bias else None, epilogue)


# -------------------------------------------------------------------------------------------------------- host
class Keywords(TypedDict, total=False):
    """The other keywords of `all_gather_matmul`."""

    epilogue: GatedEpilogue
    shard: Literal["rows", "columns"]
    keep: Literal["shard", "whole"]
    mode: Literal["push", "copy", "gluon", "low_latency", "unfused", "nccl", "nodes"] | None
    num_comm_sms: int | None
    chunk: int | None
    tiles: Sequence[int] | None
    split_k: int | None
    push_rows: int | None
    rounds_alone: int | None
    cut_last: int | None
    whole_rounds: int | None
    workspace: Workspace | None
    world: World | None


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    **keywords: Unpack[Keywords],
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None = None,
    *,
    bias: Sequence[torch.Tensor] | None = None,
    **keywords: Unpack[Keywords],
) -> list[torch.Tensor]: ...
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    epilogue: GatedEpilogue = "none",
    shard: Literal["rows", "columns"] = "rows",
    keep: Literal["shard", "whole"] = "shard",
    mode: Literal["push", "copy", "gluon", "low_latency", "unfused", "nccl", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    split_k: int | None = None,
    push_rows: int | None = None,
    rounds_alone: int | None = None,
    cut_last: int | None = None,
    whole_rounds: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The product of the gathered A with this rank's `b`; with several, a list of the products, A gathered once.
    Collective.

    a: this rank's shard (m, k), the same shape on every rank, contiguous; bf16, fp16 or fp32.
    b: (k, N) of a's dtype, contiguous or the transposed view of a contiguous tensor, as w.t() of nn.Linear's weight;
        (size * k, N) with shard "columns". Or a list or tuple of such, of any N each; `out` and bias are then None or
        as many. Where these are views of one tensor, columns next to columns, they need not be contiguous: the product
        of the whole is taken in one launch, and the results are views of one tensor. Otherwise, and where `out` are no
        such views, each is contiguous and has a launch, and A travels during the first, that of most columns.
    out: (size * m, N) of a's dtype, (m, N) with shard "columns", N / 2 columns with epilogue "swiglu"; shares no memory
        with the operands. A new tensor where None.
    bias: (N,) of a's dtype, this rank's. epilogue: "none", "relu", "gelu" (exact, with erf, as torch's by default),
        "silu" or "swiglu", of the sum and the bias. Both are computed in fp32; the result is rounded once.
        "swiglu": silu(gate) * up, where the columns of b and bias are gate and up in turn, as `pkt.interleave` lays
        them. Of the M x N product, M rows of the result, M * N / 2 * itemsize bytes are written. A kernel of its own
        after the product would cost 2 * M * N * itemsize more: the product, written and read again. "unfused" and
        "nccl" have such a kernel.
    shard: the shards are A's "rows", below each other, or its "columns", beside each other.
    keep: what is kept for b's gradient, where b requires it. "shard": a, which the backward pass gathers again: (W - 1)
        |a| bytes more leave each rank. "whole": the gathered A in new memory, W |a| bytes until the backward pass,
        which gathers nothing; the call writes and reads W |a| bytes more in each rank's memory. It takes one b, modes
        None, "copy", "gluon" (by the copy engines), "unfused" and "nodes", and no settings.

    mode: how it is computed. None, with no setting given, takes on GPUs what was tuned here or measured for a shape
        like this one, else the form with the least predicted time, see `pkt.explain`. Else None takes "push".
        "push": some programs store the shard into every peer's inbox, the others compute.
        "copy": the copy engines push. Shard "rows", rows of whole runs of 16 bytes.
        "gluon": "push" or "copy" in specialised warps. bf16 or fp16, shard "rows", rows at multiples of 16 bytes, 2 to
            8 ranks, sm_90, Triton 3.6 to 3.9.
        "low_latency": for few rows: one launch, which asks for weights while A travels. Up to 8 ranks.
        "unfused": pkt's all-gather, then cuBLAS. "nccl": NCCL's, through torch.distributed, then cuBLAS. Both take no
            settings.
        "nodes": the only form over several nodes: some programs gather A, the others compute.

    Settings are the same on every rank; None takes a default that follows from mode and shapes, see rules.push_plan:
    num_comm_sms: programs that push, or in "nodes" gather. "push", "nodes": from 1 to all but one of the grid, by
        default 16, and in "nodes" 32, or 48 where nodes have several ranks. "gluon": they push before they compute; 0:
        the copy engines copy instead, the default where copying takes no longer than the product and neither chunk nor
        rounds_alone is given, else 16.
    chunk: columns of a that one signal stands for. "push": rounded up to BLOCK_K; by default 1024, with shard "columns"
        256. "gluon": a multiple of BLOCK_K; by default 128, 256 where fewer than 16 programs push. "gluon" where
        copied: columns of one copy; 0: all; by default half of them where the own shard is multiplied sooner than a
        whole one comes, else 0.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG): blocks are powers of two from 16, and
        those left out are as in `Tiles`. "gluon": (128, 256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6),
        with NUM_STAGES slots of its ring.
    split_k: "low_latency": programs that share a tile, each a part of K: 1, 2, 4 or 8; by default as few as keep all
        SMs busy.
    push_rows: "gluon": row blocks pushed, and computed, together; 0, the default: as many as the programs compute at a
        time. "copy", and "gluon" where copied: row blocks that one copy moves and one signal stands for; 0, the
        default: a quarter of them, in "gluon" all. "nodes": row blocks that one put moves, rounded up to a power of two
        elements; 0, the default: so many that each program has some puts.
    rounds_alone: "gluon": rounds of tiles, one a program, that the other programs compute while num_comm_sms programs
        push, if there are so many; 0 where copied.
    cut_last: "gluon": 1, 2 or 4 pieces, by columns, that each tile after the whole rounds is cut into.
    whole_rounds: "gluon": the most rounds of whole tiles, one a program, up to 2^20.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete; `a` may be overwritten at once. Raises NotSymmetric, ShapeError, DtypeError,
    CollectiveMismatch, Unsupported, Closed.
    """
    settings = (num_comm_sms, chunk, tiles, split_k, push_rows, rounds_alone, cut_last, whole_rounds)
    values = (epilogue, shard, keep, mode, *settings)
    if type(keep) is str and keep == "whole" and torch.is_grad_enabled() and required((b,)):
        return _kept(a, b, out, bias, values, world, workspace)
    if type(b) is not torch.Tensor and is_several(b):
        return run_several(OPERATOR, (a, b, out, bias), values, world, workspace)  # type: ignore
    return OPERATOR((a, b, out, bias), values, world, workspace)


_keeps: list[Callable[..., torch.Tensor]] = []


def take_kept(product: Callable[..., torch.Tensor]) -> None:
    """From now on `product` computes calls with keep="whole" whose b requires grad: `kept` hands its function in."""
    _keeps[:] = [product]


def _kept(
    a: Any, b: Any, out: Any, bias: Any, values: tuple[Any, ...], world: World | None, workspace: Workspace | None
) -> torch.Tensor:
    """A call whose backward pass finds A gathered. Raises Unsupported."""
    epilogue, shard, _, mode, *settings = values
    if not torch.compiler.is_dynamo_compiling():
        call = Call(CALL, world_of(CALL, world, a, b), {"b": b}, {}, {}, mode)
        named = zip(("out", "several b", *OPERATOR.keywords[4:]), (out, b if is_several(b) else None, *settings))
        if wrong := [name for name, value in named if value is not None]:
            found, remedy = f'found {wrong[0]}, and keep="whole"', f'leave {wrong[0]} away, or use keep="shard"'
            raise Unsupported.here(f"rank {call.world.rank}: {CALL}", found, remedy)
        if mode is not None:
            choice("copy", "gluon", "unfused", "nodes")(call, "mode", mode)
        _epilogue(call, "epilogue", epilogue)
    (product,) = _keeps
    return product(a, b, bias, epilogue, shard, mode, world, workspace)


# ------------------------------------------------------------------------------------------------- the Gluon form
def _gluon(call: Call) -> Launch:
    from .gluon import push_launch

    plan = PushPlan(*(call[name] for name in PushPlan._fields))
    scales = {name: call.tensors.get(name) for name in ("scale_a", "scale_b")}
    return push_launch(call.world, call["a"], call["b"], call["out"], plan, call["tiles"], call["epilogue"], **scales)


def _gluon_several(calls: Sequence[Call]) -> Callable[..., None]:
    from .gluon import push_launch

    def again(call: Call) -> Launch:
        first = PushPlan(*(call[name] for name in PushPlan._fields))
        plan = gathered_plan(first, call["m"], call["b"].shape[1], call.world, call["tiles"])
        tensors = call["a"], call["b"], call["out"]
        return push_launch(call.world, *tensors, plan, call["tiles"], call["epilogue"], gathered=True)

    lead, *others = calls
    return products.in_turn(FITTED(lead), *(products.fitted(again, out=True)(call) for call in others))


def _settled(call: Call) -> dict[str, Any]:
    """The Gluon form's settings: some follow from whether others are given."""
    N = call["b"].shape[1]
    plan, tiles = settings(
        call["m"], N, call["k"], call.world, **{"dtype": call.dtype, **call.given, "tiles": call["tiles"]}
    )
    return {**plan._asdict(), "tiles": tiles}


def _from_one(call: Call) -> dict[str, Any]:
    """The settings of a form in which some programs always communicate: 0 has no meaning there."""
    for name in ("num_comm_sms", "chunk"):
        if name in call.settings and call[name] < 1:
            raise call.refuse(name, call[name], "at least 1")
    return call.settings


def fits_copies(call: Call) -> str:
    """Why the copy engines cannot push A, in words; "" where they can."""
    whole = whole_rows(call.dtype, call["k"])
    return not_rows(call) or ("" if whole else f"rows of {call['k']} elements, not whole runs of 16 bytes")


def columns_of(call: Call) -> str:
    """Those of b and bias, where the result has n."""
    return "2*n" if call["epilogue"] == "swiglu" else "n"


def _epilogue(call: Call, name: str, value: Any) -> Any:
    """The check of `epilogue`."""
    choice(*products.EPILOGUES, "swiglu")(call, name, value)
    shape = tuple(call["b"].shape)
    if value == "swiglu" and len(shape) == 2 and shape[1] % 2:
        wanted = 'an even number of columns for epilogue "swiglu", gate and up in turn: pkt.interleave(gate, up)'
        raise call.refuse("b", shape, wanted)
    return value


def not_rows(call: Call) -> str:
    """Why A is not sharded by rows, in words; "" where it is."""
    return f'shard {call["shard"]!r}, not "rows"' if products.by_columns(call) else ""


def fits_gluon(call: Call) -> str:
    """Why mode gluon cannot run a call, in words; "" where it can."""
    return not_rows(call) or gluon_fits.fits("k", "n")(call)


def backward(call: Recorded) -> Gradients:
    """With C = A @ b: the shard's gradient is its part of the sum over ranks of dC @ b^T, b's is A^T @ dC. Several
    weights are one of their columns side by side."""
    found: dict[str, Any] = {}
    rows, world, grads = call["shard"] == "rows", call.world, [grad.contiguous() for grad in call.grads]
    if "bias" in call.wanted:
        found["bias"] = [grad.sum(0) for grad in grads]
    if "a" in call.wanted:
        b = call["b"]
        weights = products.beside(b) if isinstance(b, list) else b
        grad = torch.cat(grads, dim=1) if len(grads) > 1 else grads[0]
        found["a"] = (
            call.operator("matmul_reduce_scatter", grad, weights.t(), workspace=call.workspace) if rows
            else reduce_scatter(torch.mm(grad, weights.t()), dim=1, world=world)
        )  # fmt: skip
    if "b" in call.wanted:
        whole = all_gather(call["a"], dim=0 if rows else 1, world=world)
        found |= products.of_weights(call, whole, grads)
    return found


def _gathering(call: Call) -> int:
    return gathering_sms(call.world.node_size)


def _chunk(call: Call) -> int:
    return CHUNKS["columns" if products.by_columns(call) else "rows"]


CHUNKS = {"rows": 1024, "columns": 256}
"""By columns a shard's rows are short: 2 chunks of 1024 are fewer than the programs that push."""
TILES = {
    "tiles": lambda call: default_tiles(call["m"], call.dtype, call["k"], call["n"], wide=not products.by_columns(call))
}
FITTED = products.fitted(_gluon, out=True)
GLUON = Form(
    FITTED,
    "push in specialised warps, by programs that then compute; by the copy engines where that is no slower",
    "(W - 1) |a|",
    settings=dict.fromkeys(("tiles", *PushPlan._fields)), several=_gluon_several, complete=_settled, fits=fits_gluon,
    gpu=True,
    space=rules.space_gluon, seconds=rules.seconds_gluon, settles=True, outruns=("push", "copy"),
    one_shape=("rounds_alone", "cut_last", "whole_rounds"),
)  # fmt: skip
SIZES = {"m": 12, "k": 20, "n": 24}
SWIGLU = (
    (SIZES, ("bias",), "rows", "new"),
    ({"m": 33, "k": 31, "n": 5}, (), "rows", "given"),
    ({"m": 17, "k": 8, "n": 9}, ("bias",), "columns", "new"),
)
"""Cases in every form: (sizes, optional operands, shard, out)."""
OPERATOR = Operator(
    all_gather_matmul,
    tensors=products.operands(
        "m k", lambda call: f"{'k' if call['shard'] == 'rows' else 'W*k'} {columns_of(call)}", columns_of
    ),
    result=lambda call: "W*m n" if call["shard"] == "rows" else "m n",
    arguments={"epilogue": _epilogue, "shard": choice("rows", "columns"), "keep": choice("shard", "whole")},
    settings={"tiles": products.tiles, "split_k": few_rows.splits, **dict.fromkeys(PushPlan._fields, integer(0))},
    forms={
        "push": Form(
            plain.push, "communicators fill inboxes, tiles wait for them", "(W - 1) |a|",
            settings={"num_comm_sms": rules.NUM_COMM_SMS, "chunk": _chunk, **TILES},
            several=plain.push_several, complete=_from_one, space=rules.space_push, seconds=rules.seconds_push,
            small={"num_comm_sms": 1, "chunk": 16, **products.SMALL},
        ),
        "copy": Form(
            in_one_call(plain.copy), "push by the copy engines, on a stream of its own", "(W - 1) |a|",
            settings={"push_rows": 0, **TILES}, fits=fits_copies, small=products.SMALL, several=plain.copy_several,
            space=rules.space_copy, seconds=rules.seconds_copy, one_shape=("push_rows",),
        ),
        "gluon": GLUON,
        "low_latency": few_rows.gather_form(),
        **unfused.gather_forms(ALL_GATHER.planned),
    },
    across={
        "nodes": Form(
            over_nodes.gather_and_multiply,
            "some programs gather as all_gather does, the others compute: tiles of this rank's rows first, then of its "
            "node's, then of far nodes'",
            "(N - 1) |a| over the network, (W - N) |a| in the node",
            settings={"num_comm_sms": _gathering, "push_rows": 0, **TILES}, several=over_nodes.several,
            complete=_from_one, fits=nodes.fits,
            space=nodes_product_rules.gather_space, seconds=nodes_product_rules.gather_seconds,
            small={"num_comm_sms": 1, "push_rows": 1, **products.SMALL},
        ),
    },
    reference=reference,
    backward=Backward(
        backward,
        "of a `matmul_reduce_scatter`; of b `all_gather` of a once more, then a product",
        saves={"a": ("b",), "b": ("a",)}, split=products.behind(*products.EPILOGUES, "swiglu"),
    ),
    terms=lambda sizes, size: size * sizes["k"],
    tuning=Tuning("ag_gemm", product_rules.gathered, ("m", "n"), columns=True),
    cases=(
        Case(SIZES, arguments={"mode": "push"}, launches=3, out="new"),
        Case(SIZES, arguments={"mode": "push", "shard": "columns"}, launches=3, out="new"),
        Case(SIZES, arguments={"mode": "copy"}, out="new"),
        Case(SIZES | {"k": 24}, arguments={"mode": "copy"}, explore=False),  # whole runs of 16 bytes in every dtype
        Case(SIZES | {"n": 13}, arguments={"mode": "push"}, ranks=2, launches=3, out="new"),  # rows TMA cannot take
        Case(SIZES | {"n": 13}, arguments={"mode": "push", "shard": "columns"}, ranks=2, out="new"),
        Case({"m": 3, "k": 20, "n": 24}, arguments={"mode": "low_latency"}, launches=3, out="new"),
        Case({"m": 3, "k": 20, "n": 13}, arguments={"mode": "low_latency", "shard": "columns"}, ranks=2, out="new"),
        *products.nasty("push", "unfused", "low_latency"),
        *products.nasty("push", "unfused", "low_latency", shard="columns"),
        Case(SIZES, arguments={"mode": "push", "epilogue": "swiglu"}, launches=3, out="new"),
        # One piece, so that one program packs it and another sends it. Not by TMA, so that no program that has gathered
        # loads by it: such loads need no fence behind the waits of the gather.
        Case(
            {"m": 3, "k": 6, "n": 8}, arguments={"mode": "nodes", "num_comm_sms": 2}, ranks=4, sms=3, node_size=2,
            out="new",
        ),
        Case(
            {"m": 3, "k": 6, "n": 8}, arguments={"mode": "nodes", "num_comm_sms": 2}, ranks=3, sms=3, node_size=1,
            out="new",
        ),
        Case(
            {"m": 17, "k": 12, "n": 9}, arguments={"mode": "nodes", "shard": "columns"}, ranks=8, node_size=4,
            explore=False,
        ),
        Case(
            {"m": 33, "k": 20, "n": 8}, arguments={"mode": "nodes", "epilogue": "silu", "given": ("bias",)}, ranks=8,
            node_size=2, explore=False,
        ),
        *(
            Case(sizes, arguments={"epilogue": "swiglu", "given": given, "shard": shard}, out=out, explore=False)
            for sizes, given, shard, out in SWIGLU
        ),
    ),
)  # fmt: skip
