"""Matrix product fused into an all-reduce: every rank ends with the sum over ranks of A_r @ B_r, (M, N).

Rank r holds A_r (M, k) and B_r (k, N), a slice of K each. On the LCSC template: a compute task stores a tile of
this rank's product into this rank's own symmetric matrix and signals the tile's owner, rank tile % size. A
communicate task waits until all ranks have theirs, then reduces the tile over the ranks' matrices, writes the
sum back into all of them, in the switch where there is one, and tells every rank. Programs 0 .. num_comm_sms -
1 communicate and then join in computing.

Bytes out of each rank: (1 + 1 / size) * M * N * itemsize in the switch, 2 * (size - 1) / size * M * N *
itemsize without. A partial product is rounded to the dtype once, the sum is in fp32 and rounded once more, by
one rank for all: with s = sum over ranks of |A_r| @ |B_r| and u the unit roundoff, off by at most about 2 * u *
s; all ranks hold the same bits. So do they in the Gluon form, gluon.py, which needs no switch.

nodes, the only form in a world of several nodes, is in shared.nodes_products: the sum's parts are made as in
matmul_reduce_scatter, and gathered in a second launch. On GPUs it has run on two nodes of one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World

from ..all_reduce import OPERATOR as ALL_REDUCE
from ..all_reduce import all_reduce
from ..declaration import Call, Case, Form, Launch, Tuning, integer
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import few_rows, gluon_fits, nodes, nodes_product_rules, nodes_products, product_rules, products, unfused
from ..shared.checks import aligned, stored
from ..shared.grid import num_programs
from ..shared.scales import given, passing, scaled
from ..shared.tile_product import (
    Epilogue,
    accumulate,
    default_tiles,
    finish,
    finished,
    padded,
    stack,
    store_tile,
    tile_pointers,
    weights,
)
from . import rules
from .rules import CALL, settings


def reference(
    rank: int,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None = None,
    epilogue: Epilogue = "none",
) -> torch.Tensor:
    """What every rank gets from the ranks' operands, in fp64."""
    total = torch.stack([x.double() @ y.double() for x, y in zip(a, b)]).sum(0)
    return finished(total, bias[rank] if bias else None, epilogue)


class Work(NamedTuple):
    """What the kernel works on."""

    a_ptr: Any  # (M, k) this rank's
    b_ptr: Any  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (M, N) this rank's; the sum itself unless COPY
    scales: Any  # Scales, of operands of fp8, or None
    sum_ptr: Any  # (M, ld) on every rank: first its own product, tile by tile, then the sum, stored by the tile's owner
    ready_ptr: Any  # int32 (tiles,) on every rank: how many ranks have a tile that this one owns
    done_ptr: Any  # int32, on every rank: tiles whose sum is there
    queue_ptr: Any  # int32, this rank's
    M: Any
    N: Any
    k: Any
    ld: Any
    num_comm_sms: Any
    COPY: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    EPILOGUE: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr


@triton.jit
def _place(tile, w):
    """(row, column) of a tile."""
    i, j = pl.order.supergroup(tile, tl.cdiv(w.M, w.BLOCK_M), tl.cdiv(w.N, w.BLOCK_N), w.GROUP)
    return i * w.BLOCK_M, j * w.BLOCK_N


@triton.jit
def _compute(tile, w, world, epoch, a, b, mine):
    row, col = _place(tile, w)
    acc = tl.zeros((w.BLOCK_M, w.BLOCK_N), tl.float32)
    acc = accumulate(acc, a, 0, b, 0, 1, row, col, w.M, w.N, w.k, w.k, w.TMA, w.TRANSPOSED, w.BLOCK_K)
    acc = scaled(acc, w.scales, row, w.M, col, w.N)
    store_tile(mine, 0, acc, row, col, w.M, w.N, w.ld, True)
    pl.signal(w.ready_ptr + tile, tile % world.size, world)


@triton.jit
def _communicate(task, w, world, epoch, a, b, mine):
    tile = task * world.size + tl.cast(world.rank, tl.int32)
    row, col = _place(tile, w)
    pl.wait(w.ready_ptr + tile, epoch * world.size, world)
    ROWS: tl.constexpr = min(w.BLOCK_M, 32)  # at a time: without a switch a whole tile would not fit the registers
    for piece in range(0, w.BLOCK_M, ROWS):
        # Up to ld: a row is whole runs of 16 bytes, and what the padding holds is nobody's business.
        ptrs, inside = tile_pointers(w.sum_ptr, row + piece, col, w.M, w.ld, w.ld, ROWS, w.BLOCK_N)
        total = finish(pl.multimem_load_reduce(ptrs, world, mask=inside), w.bias_ptr, col, w.N, w.EPILOGUE)
        pl.multimem_store(ptrs, total.to(w.sum_ptr.dtype.element_ty), world, mask=inside)
    pl.signal_all(w.done_ptr, world)


@triton.jit
def matmul_all_reduce_kernel(w, world):
    epoch = pl.epoch(w.ready_ptr, world)
    tiles = tl.cdiv(w.M, w.BLOCK_M) * tl.cdiv(w.N, w.BLOCK_N)
    owned = (tiles - tl.cast(world.rank, tl.int32) + world.size - 1) // world.size
    a = stack(w.a_ptr, 1, w.M, w.k, w.k, w.BLOCK_M, w.BLOCK_K, w.TMA)
    b = weights(w.b_ptr, 1, w.k, w.N, w.BLOCK_K, w.BLOCK_N, w.TMA, w.TRANSPOSED)
    mine = stack(w.sum_ptr, 1, w.M, w.N, w.ld, w.BLOCK_M, w.BLOCK_N, True)
    pl.lcsc(
        _compute, _communicate, (w, world, epoch, a, b, mine), tiles, owned, w.queue_ptr, epoch, w.num_comm_sms
    )  # fmt: skip
    # Every sum is here; and every owner has read my products, so the next launch may overwrite them.
    pl.wait(w.done_ptr, epoch * tiles, world)
    if w.COPY:
        out = stack(w.out_ptr, 1, w.M, w.N, w.N, w.BLOCK_M, w.BLOCK_N, w.TMA)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row, col = _place(tile, w)
            ptrs, inside = tile_pointers(w.sum_ptr, row, col, w.M, w.N, w.ld, w.BLOCK_M, w.BLOCK_N)
            store_tile(out, 0, tl.load(ptrs, mask=inside), row, col, w.M, w.N, w.N, w.TMA)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    mode: Literal["lcsc", "gluon", "low_latency", "unfused", "nccl", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    split_k: int | None = None,
    lag: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The sum over ranks of `a @ b`, on every rank. Collective.

    a: (M, k), contiguous; bf16, fp16 or fp32. Ranks may differ in k, and agree in all else.
        If one rank comes with a new k, all do. Where mode, tiles and lag are given, a rank may do so alone.
    b: (k, N) of a's dtype, contiguous or the transposed view of a contiguous tensor, as w.t() of nn.Linear's weight.
    out: (M, N) of a's dtype; shares no memory with the operands. A symmetric one whose rows begin at multiples of 16
        bytes is reduced in place; otherwise, and where None, "lcsc" and "gluon" copy the sum from a workspace.
    bias: (N,) of a's dtype, alike on all ranks. epilogue: "none", "relu", "gelu" (exact, with erf, as torch's by
        default) or "silu". The tile's owner applies both once, in fp32, to the sum; in mode "lcsc" to a sum that is
        rounded already.

    mode: how it is computed. None, with no setting given, takes on GPUs what was tuned here or measured for a shape
        like this one, else the form with the least predicted time, see `pkt.explain`. Else None takes "lcsc".
        "lcsc": some programs reduce finished tiles, in the switch where there is one, the others compute.
        "gluon": in specialised warps, in fp32 in a fixed order, without a switch. bf16 or fp16, rows of out at
            multiples of 16 bytes, 2 to 8 ranks, sm_90, Triton 3.6 to 3.9.
        "low_latency": for few rows: one launch, tiles go from registers into words of data and flag. Up to 8 ranks.
            Rounds each product before it is added, in a fixed order.
        "unfused": cuBLAS, then pkt's all-reduce. "nccl": cuBLAS, then NCCL's, through torch.distributed. Both round
            each product before it is added, and take no settings.
        "nodes": the only form over several nodes. Rounds each product, each node's sum and the result, in a fixed
            order.

    Settings are the same on every rank; None takes a default that follows from mode and shapes:
    num_comm_sms: "lcsc", "nodes": programs that communicate, by default 16 and 32; 0: all of them, after computing.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG): blocks are powers of two from 16, and
        those left out are as in `Tiles`. "gluon": (128, 256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6).
    split_k: "low_latency": programs that share a tile, each a part of K: 1, 2, 4 or 8; by default as few as keep all
        SMs busy.
    lag: "gluon": tiles of every other rank that a rank computes before the first of its own; from 1, up to all of them,
        which is the default where K is long.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete. Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported, Closed.
    """
    return OPERATOR((a, b, out, bias), (epilogue, mode, num_comm_sms, tiles, split_k, lag), world, workspace)


# -------------------------------------------------------------------------------------------------------- host
def _lcsc(call: Call) -> Launch:
    world, a, b, out, tiles, num_comm_sms = (
        call.world, call["a"], call["b"], call["out"], call["tiles"], call["num_comm_sms"],
    )  # fmt: skip
    (M, k), N, dtype, in_place = a.shape, b.shape[1], call.result_dtype, unfused.in_place(call)
    rows, transposed = stored(b)
    ld = N if in_place else padded(N, dtype)
    total = triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, total + num_comm_sms)

    def make() -> tuple[SymmetricTensor | None, SymmetricTensor]:
        sums = None if in_place else empty(M, ld, dtype=dtype, name=f"{CALL}.sum", world=world)
        return sums, signals(total + 2, name=f"{CALL}.ready", world=world)  # ready, then done, then the queue

    sums, counters = world.keep((CALL, M, N, dtype, programs, tiles[:2], in_place), make)
    work = Work(
        a_ptr=None, b_ptr=None, bias_ptr=None, out_ptr=None, scales=None, sum_ptr=None, ready_ptr=counters,
        done_ptr=counters[total:], queue_ptr=counters[total + 1 :], M=M, N=N, k=k, ld=ld,
        num_comm_sms=min(num_comm_sms, programs - 1), COPY=tl.constexpr(not in_place),
        TMA=tl.constexpr(aligned(a, rows, out)), TRANSPOSED=tl.constexpr(transposed),
        EPILOGUE=tl.constexpr(call["epilogue"]), BLOCK_M=tl.constexpr(tiles.block_m),
        BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k), GROUP=tl.constexpr(tiles.group),
    )  # fmt: skip
    start = cooperative_launch(world, matmul_all_reduce_kernel, (programs,), **tiles.launch_options())
    same, passed = work[6:], passing(*given(call))

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, scale_a: Any = None, scale_b: Any = None
    ) -> torch.Tensor:
        these = Work(a, b, bias, out, passed(scale_a, scale_b), out if in_place else sums, *same)
        start(these, world.device)
        return out

    return launch


def _gluon(call: Call) -> Launch:
    from .gluon import two_shot_launch

    world, out, landed, name = call.world, call["out"], call["out"], f"{CALL}.landed"
    if not unfused.in_place(call):  # where peers store the finished tiles of an output that they cannot reach
        (M, N), dtype = call.shape, out.dtype
        landed = world.keep((name, M, N, dtype), lambda: empty(M, N, dtype=dtype, name=name, world=world))
    settings = (call[name] for name in ("tiles", "lag", "epilogue"))
    scales = (call.tensors.get(name) for name in ("scale_a", "scale_b"))
    return two_shot_launch(world, call["a"], call["b"], out, landed, *settings, *scales)


def _fitted(call: Call) -> Launch:
    return products.fitted(_gluon, out=not unfused.in_place(call))(call)


def _settled(call: Call) -> dict[str, Any]:
    """The Gluon form's settings: all ranks take those of the longest k, in which they may differ. Where they are given,
    nobody asks for it."""
    given = call["tiles"], call["lag"]
    k = call.greatest("k") if None in given else call["k"]
    found = settings(call["m"], call["n"], k, call.world, *given, call.dtype)
    return dict(zip(("tiles", "lag"), found))


def backward(call: Recorded) -> Gradients:
    """With dC summed over the ranks: dC @ b^T and a^T @ dC."""
    found: dict[str, Any] = {}
    if "bias" in call.wanted:
        found["bias"] = call.grad.sum(0)
    if call.wanted & {"a", "b"}:
        total = call.grad.clone(memory_format=torch.contiguous_format)
        found |= products.both(call, all_reduce(total, world=call.world))
    return found


MOVES = "2 (W - 1) / W |C|"
GLUON = Form(
    products.whole_runs(_fitted),
    "as lcsc, in specialised warps; a tile's owner stores it on every rank", MOVES,
    settings={"tiles": None, "lag": None}, complete=_settled, fits=gluon_fits.fits("n"), gpu=True,
    space=rules.space_gluon, seconds=rules.seconds_gluon, settles=True, outruns=("lcsc",),
    agrees=unfused.agreed_out, roundings=lambda size: 2,
)  # fmt: skip
SIZES = {"m": 28, "k": 16, "n": 24}
OPERATOR = Operator(
    matmul_all_reduce,
    tensors=products.operands("m k", "k n", same_bias=True),
    result="m n",
    arguments=products.ARGUMENTS,
    settings={"num_comm_sms": integer(0), "tiles": products.tiles, "split_k": few_rows.splits, "lag": integer(1)},
    forms={
        "lcsc": Form(
            products.whole_runs(_lcsc), "some programs reduce finished tiles, the others compute",
            f"(1 + 1 / W) |C| in the switch, {MOVES} without",
            settings={
                "num_comm_sms": rules.NUM_COMM_SMS,
                "tiles": lambda call: default_tiles(call["m"], call.dtype, call["n"]),
            },
            agrees=unfused.agreed_out, roundings=lambda size: 3, small={"num_comm_sms": 1, **products.SMALL},
            space=rules.space_lcsc, seconds=rules.seconds_lcsc,
        ),
        "gluon": GLUON,
        "low_latency": few_rows.all_form(),
        **unfused.reduce_forms(ALL_REDUCE.planned),
    },
    across={
        "nodes": Form(
            products.whole_runs(nodes_products.reduce),
            "some programs add up finished tiles in the node and send the sums, the others compute; on nodes of one "
            "rank each sends its own; then all_gather",
            "2 (N - 1) / W |C| over the network, 2 (W - N) / W |C| in the node",
            settings={
                "num_comm_sms": nodes_products.NUM_COMM_SMS,
                "tiles": lambda call: default_tiles(-(-call["m"] // call.world.size), call.dtype, call["n"], wide=True),
            },
            fits=nodes.fits, roundings=lambda size: 3,
            space=nodes_product_rules.sum_space, seconds=nodes_product_rules.reduce_seconds,
            small={"num_comm_sms": 1, **products.SMALL},
        ),
    },
    reference=reference,
    backward=Backward(
        backward, "`all_reduce` once, then two products",
        saves={"a": ("b",), "b": ("a",)}, split=products.behind(*products.EPILOGUES),
    ),
    private="k",
    terms=lambda sizes, size: size * sizes["k"],
    tuning=Tuning("gemm_ar", product_rules.reduced, ("k",)),
    cases=(
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 1}, out="new"),
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 1}, multicast=False, out="new"),
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 0}, ranks=2, out="new"),
        Case(SIZES, arguments={"mode": "lcsc", "num_comm_sms": 1}),
        Case(SIZES | {"n": 13}, arguments={"mode": "lcsc", "num_comm_sms": 1}, ranks=2, out="new"),
        Case({"m": 3, "k": 20, "n": 13}, arguments={"mode": "low_latency"}, out="new"),
        # Not by TMA, so that no program that has communicated loads by it: see all_gather_matmul.
        Case({"m": 7, "k": 8, "n": 6}, arguments={"mode": "nodes"}, ranks=2, node_size=1, out="new"),
        Case({"m": 13, "k": 8, "n": 24}, arguments={"mode": "nodes"}, ranks=4, node_size=2, explore=False),
        Case(
            {"m": 21, "k": 8, "n": 13}, arguments={"mode": "nodes", "epilogue": "gelu", "given": ("bias",)}, ranks=8,
            node_size=4, explore=False,
        ),
        Case({"m": 3, "k": 8, "n": 24}, arguments={"mode": "nodes"}, ranks=8, node_size=2, explore=False),
        *products.nasty("lcsc", "unfused", "low_latency"),
    ),
)  # fmt: skip
