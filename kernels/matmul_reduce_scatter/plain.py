"""Matrix product fused into a reduce-scatter: rank r ends with rows [r * m, (r + 1) * m) of the sum over ranks
of A_r @ B_r.

Rank r holds A_r (size * m, k) and B_r (k, N), a slice of K each. Tiles are computed in an order that ends with
the rank's own rows. (size - 1) / size * M * N * itemsize bytes out of and into each rank, in two forms:

add: each tile is added into its owner's accumulator by TMA, in the output's dtype: no inbox, but size roundings
    in an order that differs from run to run. With s = sum over ranks of |A_r| @ |B_r| and u the unit roundoff
    of the dtype, an element is off by at most about size * u * s (and the fp32 products' own error, k * 2^-24 *
    s).
inbox: each tile is stored into its owner's inbox, at this rank's place, and signalled; the owner adds the
    places 0, 1, ... in fp32 and rounds once: the same bits every time, off by at most about 2 * u * s. size
    times the memory.

nodes, the only form in a world of several nodes, is in shared.nodes_products: each tile is added in the node, and its
sum crosses the network once. On GPUs it has run on two nodes of one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World

from ..all_gather import all_gather
from ..all_gather_matmul.kept import all_gather_matmul_kept
from ..declaration import Call, Case, Form, Launch, Tuning, integer
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..reduce_scatter import OPERATOR as REDUCE_SCATTER
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
    """What `rank` gets from the ranks' operands, in fp64."""
    total = torch.stack([x.double() @ y.double() for x, y in zip(a, b)]).sum(0)
    return finished(total.tensor_split(len(a))[rank], bias[rank] if bias else None, epilogue)


@triton.jit
def _partial(
    t, a, b, scales, m, N, k, world, TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tile t of this rank's product, in fp32: (tile, owner, row in the owner's part, column). My own part comes
    last."""
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    owner = (tl.cast(world.rank, tl.int32) + 1 + t // (num_m * num_n)) % world.size
    i, j = pl.order.supergroup(t % (num_m * num_n), num_m, num_n, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = accumulate(acc, a, owner, b, 0, 1, i * BLOCK_M, j * BLOCK_N, m, N, k, k, TMA, TRANSPOSED, BLOCK_K)
    # Rows behind the owner's part get scales of the next, and are not stored.
    acc = scaled(acc, scales, owner * m + i * BLOCK_M, world.size * m, j * BLOCK_N, N)
    return acc, owner, i * BLOCK_M, j * BLOCK_N


@triton.jit
def add_kernel(
    a_ptr,  # (size * m, k) this rank's
    b_ptr,  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr,  # (N,) this rank's, or None
    scales,  # Scales, of operands of fp8, or None
    out_ptr,  # (m, N) this rank's
    sum_ptr,  # (2, m, ld) on every rank, zero between launches; all ranks add into one half, by the launch's parity
    done_ptr,  # int32 (1,) on every rank: programs of all ranks whose additions have landed everywhere
    m,
    N,
    k,
    ld,
    world,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = pl.epoch(done_ptr, world)
    a = stack(a_ptr, world.size, m, k, k, BLOCK_M, BLOCK_K, TMA)
    b = weights(b_ptr, 1, k, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    out = stack(out_ptr, 1, m, N, N, BLOCK_M, BLOCK_N, TMA)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    half = sum_ptr + tl.cast(epoch & 1, tl.int64) * m * ld
    for t in range(pid, world.size * tiles, programs):
        acc, owner, row, col = _partial(
            t, a, b, scales, m, N, k, world, TMA, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
        )  # fmt: skip
        target = tl.make_tensor_descriptor(
            pl.peer(half, owner, world), [m, N], [tl.cast(ld, tl.int64), 1], [BLOCK_M, BLOCK_N]
        )
        target.atomic_add([row, col], acc.to(sum_ptr.dtype.element_ty))
    # publish: my additions have landed, and the other half of my sum is zero since the launch before
    pl.signal_all(done_ptr, world)
    pl.wait(done_ptr, epoch * programs * world.size, world)
    for t in range(pid, tiles, programs):
        i, j = pl.order.supergroup(t, tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
        ptrs, inside = tile_pointers(half, i * BLOCK_M, j * BLOCK_N, m, N, ld, BLOCK_M, BLOCK_N)
        total = finish(tl.load(ptrs, mask=inside), bias_ptr, j * BLOCK_N, N, EPILOGUE)
        store_tile(out, 0, total, i * BLOCK_M, j * BLOCK_N, m, N, N, TMA)
        tl.store(ptrs, tl.zeros((BLOCK_M, BLOCK_N), sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def inbox_kernel(
    a_ptr,  # (size * m, k) this rank's
    b_ptr,  # (k, N), or (N, k) if TRANSPOSED, this rank's
    bias_ptr,  # (N,) this rank's, or None
    scales,  # Scales, of operands of fp8, or None
    out_ptr,  # (m, N) this rank's
    inbox_ptr,  # (2, size, m, ld) on every rank; rank r stores [:, r] of all; halves by the launch's parity
    ready_ptr,  # int32 (size, tiles) on every rank; [r, t] is signalled by rank r when its tile t is in the inbox
    m,
    N,
    k,
    ld,
    world,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    rank = tl.cast(world.rank, tl.int32)
    epoch = pl.epoch(ready_ptr, world)
    a = stack(a_ptr, world.size, m, k, k, BLOCK_M, BLOCK_K, TMA)
    b = weights(b_ptr, 1, k, N, BLOCK_K, BLOCK_N, TMA, TRANSPOSED)
    out = stack(out_ptr, 1, m, N, N, BLOCK_M, BLOCK_N, TMA)
    num_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * num_n
    half = inbox_ptr + tl.cast(epoch & 1, tl.int64) * world.size * m * ld
    mine = half + tl.cast(rank, tl.int64) * m * ld
    for t in range(pid, world.size * tiles, programs):
        acc, owner, row, col = _partial(
            t, a, b, scales, m, N, k, world, TMA, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
        )  # fmt: skip
        target = stack(pl.peer(mine, owner, world), 1, m, N, ld, BLOCK_M, BLOCK_N, True)
        store_tile(target, 0, acc, row, col, m, N, ld, True)
        # A counter for each source: one for all would take a fast rank's next launch for a slow rank's this one.
        pl.signal(ready_ptr + rank * tiles + row // BLOCK_M * num_n + col // BLOCK_N, owner, world)
    for t in range(pid, tiles, programs):
        i, j = pl.order.supergroup(t, tl.cdiv(m, BLOCK_M), num_n, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(world.size):
            pl.wait(ready_ptr + r * tiles + i * num_n + j, epoch, world)
            part = half + tl.cast(r, tl.int64) * m * ld
            ptrs, inside = tile_pointers(part, i * BLOCK_M, j * BLOCK_N, m, N, ld, BLOCK_M, BLOCK_N)
            total += tl.load(ptrs, mask=inside, other=0).to(tl.float32)
        total = finish(total, bias_ptr, j * BLOCK_N, N, EPILOGUE)
        store_tile(out, 0, total, i * BLOCK_M, j * BLOCK_N, m, N, N, TMA)


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = "none",
    mode: Literal["add", "inbox", "gluon", "low_latency", "unfused", "nccl", "nodes"] | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    split_k: int | None = None,
    lag: int | None = None,
    copies: int | None = None,
    workspace: Workspace | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Rows [rank * m, (rank + 1) * m) of the sum over ranks of `a @ b`. Collective.

    a: (size * m, k), contiguous; bf16, fp16 or fp32. Ranks may differ in k, and agree in all else.
        If one rank comes with a new k, all do. A rank may do so alone where mode, tiles and lag are given, and a or b
        requires no grad.
    b: (k, N) of a's dtype, contiguous or the transposed view of a contiguous tensor, as w.t() of nn.Linear's weight.
    out: (m, N) of a's dtype; shares no memory with the operands. A new tensor where None.
    bias: (N,) of a's dtype. epilogue: "none", "relu", "gelu" (exact, with erf, as torch's by default) or "silu". The
        owner of a row applies both once, in fp32, to the sum; in mode "add" to a sum that is rounded already.

    mode: how it is computed. None, with no setting given, takes on GPUs what was tuned here or measured for a shape
        like this one, else the form with the least predicted time, see `pkt.explain`. Else None takes "add".
        "add": adds tiles into their owner's rows: fast, and rounds at every addition.
        "inbox": stores tiles with their owner, which adds them in fp32 in a fixed order.
        "gluon": as "inbox", in specialised warps. bf16 or fp16, N whole runs of 16 bytes, 2 to 8 ranks, sm_90, Triton
            3.6 to 3.9.
        "low_latency": for few rows: one launch, tiles go from registers into words of data and flag. Up to 8 ranks.
            Rounds each product before it is added, in a fixed order.
        "unfused": cuBLAS, then pkt's reduce-scatter. "nccl": cuBLAS, then NCCL's, through torch.distributed. Both round
            each product before it is added, and take no settings.
        "nodes": the only form over several nodes. Rounds each product, each node's sum and the result, in a fixed
            order.

    Settings are the same on every rank; None takes a default that follows from mode and shapes:
    num_comm_sms: "nodes": programs that add up and send, by default 32; 0: all of them, after computing. On nodes of
        one rank every program sends what it has computed, whatever is given.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG): blocks are powers of two from 16, and
        those left out are as in `Tiles`. "gluon": (128, 256, 64, GROUP, 8, 3 or 4) or (128, 128, 64, GROUP, 8, 3 to 6).
    split_k: "low_latency": programs that share a tile, each a part of K: 1, 2, 4 or 8; by default as few as keep all
        SMs busy.
    lag: "gluon" without copies: tiles that a rank computes of every other rank's part before the first of its own; from
        1. From the number of tiles in a part on, it computes one rank's part after another, its own last.
    copies: "gluon": copies by the copy engines that each other rank's part goes in, own tiles last; 0: the kernel
        stores them there, as by default where a lag is given.

    workspace: keeps buffers, counters and the plan until it is closed; the world where None.

    Returns `out`, complete; after the call no peer reads anything of it. Raises ShapeError, DtypeError,
    CollectiveMismatch, Unsupported, Closed.
    """
    return OPERATOR((a, b, out, bias), (epilogue, mode, num_comm_sms, tiles, split_k, lag, copies), world, workspace)


# -------------------------------------------------------------------------------------------------------- host
def _plain(call: Call) -> Launch:
    world, a, b, mode, tiles = call.world, call["a"], call["b"], call.mode, call["tiles"]
    k, (m, N), size, dtype = a.shape[1], call.shape, world.size, call.result_dtype
    rows, transposed = stored(b)
    ld = padded(N, dtype)
    owned = triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, size * owned)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        if mode == "add":
            buffer = zeros(2, m, ld, dtype=dtype, name=f"{CALL}.sum", world=world)
            return buffer, signals(1, name=f"{CALL}.done", world=world)
        buffer = empty(2, size, m, ld, dtype=dtype, name=f"{CALL}.inbox", world=world)
        return buffer, signals(size * owned, name=f"{CALL}.ready", world=world)

    buffers = world.keep((CALL, m, N, dtype, programs, tiles[:2], mode), make)
    passed = passing(*given(call))
    kernel = add_kernel if mode == "add" else inbox_kernel
    constants = (aligned(a, rows, call["out"]), transposed, call["epilogue"], *tiles[:4])
    start = cooperative_launch(world, kernel, (programs,), **tiles.launch_options())

    def launch(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, scale_a: Any = None, scale_b: Any = None
    ) -> torch.Tensor:
        start(a, b, bias, passed(scale_a, scale_b), out, *buffers, m, N, k, ld, world.device, *constants)
        return out

    return launch


def _gluon(call: Call) -> Launch:
    from .gluon import inbox_launch

    tensors = (call[name] for name in ("a", "b", "out"))
    scales = (call.tensors.get(name) for name in ("scale_a", "scale_b"))
    return inbox_launch(call.world, *tensors, call["tiles"], call["lag"], call["copies"], call["epilogue"], *scales)


def _settled(call: Call) -> dict[str, Any]:
    """The Gluon form's settings: all ranks take those of the longest k, in which they may differ. With a lag or copies
    nobody asks for it."""
    tiles, lag, copies = (call[name] for name in ("tiles", "lag", "copies"))
    k = call.greatest("k") if lag is None and copies is None else call["k"]
    found = settings(call["m"], call["n"], k, call.world, tiles, lag, copies, call.dtype)
    return dict(zip(("tiles", "lag", "copies"), found))


def backward(call: Recorded) -> Gradients:
    """With dC of all rows, gathered once: dC @ b^T, which hides the gather, and a^T @ dC. A backward pass that is
    recorded gathers first: what all_gather_matmul_kept gathers has no gradient."""
    found: dict[str, Any] = {}
    if "bias" in call.wanted:
        found["bias"] = call.grad.sum(0)
    if call.wanted >= {"a", "b"} and not torch.is_grad_enabled():
        found["a"], whole = all_gather_matmul_kept(call.grad.contiguous(), call["b"].t(), world=call.world)
        found |= products.of_weights(call, call["a"], [whole])
    elif call.wanted & {"a", "b"}:
        found |= products.both(call, all_gather(call.grad, world=call.world))
    return found


TILES = {"tiles": lambda call: default_tiles(call["m"], call.dtype, call["n"])}
MOVES = "(W - 1) / W |C|"
GLUON = Form(
    products.whole_runs(products.fitted(_gluon, out=True)),
    "as inbox, tile by tile, in specialised warps; large parts by the copy engines", MOVES,
    settings={"tiles": None, "lag": None, "copies": None}, complete=_settled, fits=gluon_fits.fits("n"), gpu=True,
    space=rules.space_gluon, seconds=rules.seconds_gluon, settles=True, outruns=("add", "inbox"),
    roundings=lambda size: 2,
)  # fmt: skip
OPERATOR = Operator(
    matmul_reduce_scatter,
    tensors=products.operands("W*m k", "k n"),
    result="m n",
    arguments=products.ARGUMENTS,
    settings={
        "num_comm_sms": integer(0), "tiles": products.tiles, "split_k": few_rows.splits, "lag": integer(1),
        "copies": integer(0),
    },
    forms={
        "add": Form(
            products.whole_runs(_plain), "TMA adds each tile into its owner", MOVES,
            settings=TILES, roundings=lambda size: size + 1, small=products.SMALL,
            space=rules.space_plain("add"), seconds=rules.seconds_add,
        ),
        "inbox": Form(
            products.whole_runs(_plain), "stored to its owner, added in a fixed order", MOVES,
            settings=TILES, roundings=lambda size: 2, small=products.SMALL,
            space=rules.space_plain("inbox"), seconds=rules.seconds_inbox,
        ),
        "gluon": GLUON,
        "low_latency": few_rows.scatter_form(),
        **unfused.scatter_forms(REDUCE_SCATTER.planned),
    },
    across={
        "nodes": Form(
            products.whole_runs(nodes_products.scatter),
            "some programs add up finished tiles in the node and send the sums, the others compute; on nodes of one "
            "rank each sends its own",
            "(N - 1) / W |C| over the network, (W - N) / W |C| in the node",
            settings={
                "num_comm_sms": nodes_products.NUM_COMM_SMS,
                "tiles": lambda call: default_tiles(call["m"], call.dtype, call["n"], wide=True),
            },
            fits=nodes.fits,
            roundings=lambda size: 3,
            space=nodes_product_rules.sum_space, seconds=nodes_product_rules.scatter_seconds,
            small={"num_comm_sms": 1, **products.SMALL},
        ),
    },
    reference=reference,
    backward=Backward(
        backward, "`all_gather` once, then two products, the first of which hides it",
        saves={"a": ("b",), "b": ("a",)}, split=products.behind(*products.EPILOGUES),
    ),
    private="k",
    terms=lambda sizes, size: size * sizes["k"],
    tuning=Tuning("gemm_rs", product_rules.scattered, ("m", "k")),
    cases=(
        Case({"m": 12, "k": 16, "n": 16}, arguments={"mode": "add"}, launches=3, out="new"),
        Case({"m": 12, "k": 16, "n": 16}, arguments={"mode": "inbox"}, launches=3, out="new"),
        Case({"m": 12, "k": 16, "n": 13}, arguments={"mode": "add"}, ranks=2, launches=3, out="new"),
        Case({"m": 3, "k": 20, "n": 24}, arguments={"mode": "low_latency"}, ranks=2, launches=3, out="new"),
        # Not by TMA, so that no program that has communicated loads by it: see all_gather_matmul.
        Case({"m": 3, "k": 8, "n": 6}, arguments={"mode": "nodes"}, ranks=4, node_size=2, out="new"),
        Case({"m": 3, "k": 8, "n": 6}, arguments={"mode": "nodes"}, ranks=3, node_size=1, out="new"),
        Case({"m": 17, "k": 8, "n": 13}, arguments={"mode": "nodes"}, ranks=8, node_size=4, explore=False),
        Case(
            {"m": 33, "k": 20, "n": 24}, arguments={"mode": "nodes", "epilogue": "silu", "given": ("bias",)}, ranks=8,
            node_size=2, explore=False,
        ),
        *products.nasty("add", "inbox", "unfused", "low_latency"),
    ),
)  # fmt: skip
