"""All-to-all of heads fused into a matrix product: rank r ends with its positions of the product of all heads.

Behind attention, of sequences that are split among the ranks: rank r holds all positions of its heads, x (B, size * S,
H / size, D), and weights (H, D, N) of all heads. It gets its S positions, (B, S, N). `pkt.matmul_all_to_all` goes the
other way.

push: one launch. Programs 0 .. num_comm_sms - 1 store each position's heads into an inbox on the rank of that position,
    and signal each chunk of a row block. The others compute, row block by row block, with this rank's own heads first,
    then with those of the other ranks in the order in which they come. A communicator that has finished computes too.
gluon: the same order of computing in specialised warps, by all programs; copy engines move the heads, see `gluon`.
unfused: pkt's all-to-all, and torch's product.

(size - 1) / size * |x| bytes out of and into each rank.
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
from pkt.runtime.world import World

from ..all_to_all import OPERATOR as ALL_TO_ALL
from ..declaration import Call, Case, Form, Launch, Operand, integer
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import gluon_fits, heads, products
from ..shared.checks import FLOATS
from ..shared.grid import num_programs
from ..shared.heads import Matrix
from ..shared.replays import with_product
from ..shared.tile_product import (
    Tiles,
    accumulate,
    default_tiles,
    finish,
    stack,
    store_tile,
    tile_pointers,
    weights,
)
from ..shared.unfused import multiply, plain

CALL = "all_to_all_matmul"
NUM_COMM_SMS = 16
CHUNK = 256
ROWS, FULL = 512, 0.87
"""Rows of a rank's product from which "gluon" is the default, where at least such a share of the SMs has tiles. With
0.97 it takes 1.03 to 1.10 times the product alone, and "unfused" 1.15 to 1.30 (`all_to_all_matmul_tokens_2.json`)."""


def reference(
    rank: int, x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], bias: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """What `rank` gets from the ranks' operands, in fp64."""
    rows = torch.cat([one.double().tensor_split(len(x), 1)[rank] for one in x], 2)
    found = torch.einsum("bshd,hdn->bsn", rows, weight[rank].double())
    return found + bias[rank].double() if bias else found


# ------------------------------------------------------------------------------------------------------------- device
class Push(NamedTuple):
    """What the kernel works on. k = H / size * D: the columns of a rank. A row block is BLOCK_M rows of one of the B
    sequences. The inbox is used in halves, by the parity of the launch: a rank that is a launch ahead has everybody's
    signals of this one, but not everybody need have finished reading."""

    x_ptr: Any  # (B, size * S, k) this rank's; only this rank reads it
    weight_ptr: Any  # (size * k, N), or (N, size * k) if TRANSPOSED, this rank's
    bias_ptr: Any  # (N,) this rank's, or None
    out_ptr: Any  # (B, S, N) this rank's
    inbox_ptr: Any  # (2, size, B, S, k) on every rank: my positions; rank r stores [:, r]
    ready_ptr: Any  # int32 (size, row blocks) on every rank: chunks of a row block that rank r has ever stored here
    queue_ptr: Any  # int32, this rank's
    B: Any
    S: Any
    k: Any
    N: Any
    num_comm_sms: Any
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    CHUNK: tl.constexpr  # columns that one signal stands for, a multiple of BLOCK_K
    GROUP: tl.constexpr


@triton.jit
def _slot(source, p, world, epoch):
    """The first of the B sequences that rank `source` stores into an inbox in this launch."""
    return ((epoch & 1) * world.size + source) * p.B


@triton.jit
def _compute(task, p, world, epoch, w, out):
    """Tile `task` of my positions. The heads of a rank are waited for just before they are multiplied."""
    rank = tl.cast(world.rank, tl.int32)
    num_m = tl.cdiv(p.S, p.BLOCK_M)
    blocks = p.B * num_m
    i, j = pl.order.supergroup(task, blocks, tl.cdiv(p.N, p.BLOCK_N), p.GROUP)
    b = i // num_m
    row = i % num_m * p.BLOCK_M
    acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
    for d in range(world.size):  # my own heads first, then those of rank - 1, rank - 2, ...
        source = (rank + world.size - d) % world.size
        a_ptr = p.x_ptr + tl.cast(b * world.size + rank, tl.int64) * p.S * p.k
        if source != rank:
            pl.wait(p.ready_ptr + source * blocks + i, epoch * tl.cdiv(p.k, p.CHUNK), world)
            a_ptr = p.inbox_ptr + tl.cast(_slot(source, p, world, epoch) + b, tl.int64) * p.S * p.k
        a = stack(a_ptr, 1, p.S, p.k, p.k, p.BLOCK_M, p.BLOCK_K, p.TMA)
        acc = accumulate(
            acc, a, 0, w, source, world.size, row, j * p.BLOCK_N, p.S, p.N, p.k, p.k, p.TMA, p.TRANSPOSED, p.BLOCK_K
        )
    tile = finish(acc, p.bias_ptr, j * p.BLOCK_N, p.N, "none")
    store_tile(out, b, tile, row, j * p.BLOCK_N, p.S, p.N, p.N, p.TMA)


@triton.jit
def _push_chunk(task, p, world, epoch, w, out):
    """One chunk of a row block to the rank of its positions: row block by row block, and in turn for each rank."""
    rank = tl.cast(world.rank, tl.int32)
    chunks = tl.cdiv(p.k, p.CHUNK)
    num_m = tl.cdiv(p.S, p.BLOCK_M)
    peer = (rank + 1 + task % (world.size - 1)) % world.size
    start = task // (world.size - 1) % chunks * p.CHUNK
    i = task // (world.size - 1) // chunks
    b = i // num_m
    row = i % num_m * p.BLOCK_M
    source = p.x_ptr + tl.cast(b * world.size + peer, tl.int64) * p.S * p.k
    target = p.inbox_ptr + tl.cast(_slot(rank, p, world, epoch) + b, tl.int64) * p.S * p.k
    for col in range(start, tl.minimum(start + p.CHUNK, p.k), p.BLOCK_K):
        ptrs, inside = tile_pointers(source, row, col, p.S, p.k, p.k, p.BLOCK_M, p.BLOCK_K)
        there, _ = tile_pointers(target, row, col, p.S, p.k, p.k, p.BLOCK_M, p.BLOCK_K)
        pl.store(there, tl.load(ptrs, mask=inside), peer, world, mask=inside)
    pl.signal(p.ready_ptr + rank * (p.B * num_m) + i, peer, world)  # publish


@triton.jit
def push_kernel(p, world):
    epoch = pl.epoch(p.ready_ptr, world)
    blocks = p.B * tl.cdiv(p.S, p.BLOCK_M)
    tasks = blocks * tl.cdiv(p.N, p.BLOCK_N)
    chunks = blocks * tl.cdiv(p.k, p.CHUNK) * (world.size - 1)
    w = weights(p.weight_ptr, world.size, p.k, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    out = stack(p.out_ptr, p.B, p.S, p.N, p.N, p.BLOCK_M, p.BLOCK_N, p.TMA)
    pl.lcsc(_compute, _push_chunk, (p, world, epoch, w, out), tasks, chunks, p.queue_ptr, epoch, p.num_comm_sms)


def all_to_all_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    mode: Literal["push", "gluon", "unfused"] | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """This rank's positions of the product of all heads with `weight`: sum of x_h @ weight_h over heads h. Collective.

    The sequence has size * S positions; rank r holds all of them for the heads from r * H / size on, and gets the
    positions from r * S on, as of `pkt.shard_sequence`.

    x: (B, size * S, H / size, D), all positions of this rank's heads; bf16, fp16 or fp32. weight: (H, D, N) of x's
        dtype, of all heads. Contiguous, or the view `w.t().unflatten(0, (H, D))` of a Linear's weight; one of other
        strides is copied at each call. The same shapes on every rank; each rank multiplies its positions with its own
        weight. bias: (N,) of x's dtype.
    out: (B, S, N) of x's dtype; shares no memory with the operands. A new tensor where None.

    mode: a form that the top of kernels/all_to_all_matmul/forms.py describes. Where None, for 512 positions of a rank
        and more, of all sequences, "gluon" if it can run the call and its tiles leave few SMs idle; else "push" for
        2,048 positions of a sequence and rank, else "unfused". "gluon" takes bf16 and fp16, H / size * D a multiple of
        64, rows of the result of whole 16 bytes, 2 to 8 ranks, sm_90, Triton 3.6 to 3.9. The rest is the same on every
        rank.
    num_comm_sms, chunk: for "push": programs that push, from 1 to all but one of the grid, by default 16; columns of x
        that one signal stands for, rounded up to BLOCK_K, by default 256.
    tiles: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG): blocks are powers of two from 16, and
        those left out are as in `Tiles`. "gluon": as of `pkt.matmul_reduce_scatter`.

    Sums are fp32. "push" and "gluon" add the bias to them and round once; "unfused" rounds before it adds the bias.
    Returns `out`, complete; the operands may be overwritten at once.

    Symmetric memory kept: twice x's bytes in "push", once in "unfused", (size - 1) / size of them in "gluon". Raises
    ShapeError, DtypeError, CollectiveMismatch, Unsupported.
    """
    return OPERATOR((x, weight, out, bias), (mode, num_comm_sms, chunk, tiles), world)


# --------------------------------------------------------------------------------------------------------------- host
def _tiles(call: Call) -> Tiles:
    return default_tiles(call["s"], call.dtype, call["h"] * call["d"], call["n"], wide=True)


def _push(call: Call) -> Launch:
    world, tiles, dtype = call.world, call["tiles"], call.dtype
    size, b, s, k, N = world.size, call["b"], call["s"], call["h"] * call["d"], call["n"]
    blocks, chunk = b * triton.cdiv(s, tiles.block_m), triton.cdiv(min(call["chunk"], k), tiles.block_k) * tiles.block_k
    tasks = blocks * triton.cdiv(N, tiles.block_n)
    programs = num_programs(world, tasks + call["num_comm_sms"])

    def make() -> tuple[Any, ...]:
        inbox = empty(2, size, b, s, k, dtype=dtype, name=f"{CALL}.inbox", world=world)
        return inbox, signals(size * blocks + 1, name=f"{CALL}.ready", world=world)

    # By what the counters count: settings that differ otherwise share an inbox, and its launches.
    inbox, counters = world.keep((CALL, "push", b, s, k, dtype, tasks, programs, tiles.block_m, chunk), make)
    matrix = Matrix.of(call["weight"], 0)
    tma = heads.reaches(dtype, (k, N), call["x"], call["weight"], call["out"])
    same = Push(
        x_ptr=None, weight_ptr=None, bias_ptr=None, out_ptr=None,
        inbox_ptr=inbox, ready_ptr=counters, queue_ptr=counters[-1:],
        B=b, S=s, k=k, N=N, num_comm_sms=max(1, min(call["num_comm_sms"], programs - 1)),
        TMA=tl.constexpr(tma), TRANSPOSED=tl.constexpr(matrix.transposed),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        CHUNK=tl.constexpr(chunk), GROUP=tl.constexpr(tiles.group),
    )[4:]  # fmt: skip
    start = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options())

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        start(Push(x, matrix.rows(weight), bias, out, *same), world.device)
        return out

    return launch


def _gluon(call: Call) -> Launch:
    from .gluon import planned

    return planned(call)


def _fits_gluon(call: Call) -> str:
    """Why "gluon" cannot run a call; "" where it can."""
    k = call["h"] * call["d"]
    return (
        gluon_fits.missing_anywhere(call.world)
        or gluon_fits.unsuited(call.dtype, call.world.size, k, call["n"])
        or ("" if k and k % gluon_fits.TILES.block_k == 0 else f"{k} elements of a rank's heads, not 64 or a multiple")
    )


def _settled(call: Call) -> dict[str, Any]:
    """The settings of "gluon". Raises ShapeError."""
    tiles = call["tiles"] or gluon_fits.TILES
    gluon_fits.check_tiles(CALL, tiles, call.world, call.dtype)
    return {"tiles": tiles}


def _fills(call: Call) -> bool:
    """Whether most SMs have a tile of "gluon" in all rounds."""
    tiles, programs = gluon_fits.TILES, num_programs(call.world, call.world.num_sms)
    count = call["b"] * triton.cdiv(call["s"], tiles.block_m) * triton.cdiv(call["n"], tiles.block_n)
    return count > FULL * triton.cdiv(count, programs) * programs


def _default(call: Call) -> str:
    if call["b"] * call["s"] >= ROWS and _fills(call) and not _fits_gluon(call):
        return "gluon"
    return "push" if heads.pushed(call["s"], _tiles(call)) else "unfused"


def _unfused(call: Call) -> Launch:
    world, b, s, every, d, N = call.world, call["b"], call["s"], call.world.size * call["h"], call["d"], call["n"]
    whole = world.keep(
        (CALL, "unfused", b, s, every, d, call.dtype),
        lambda: empty(b, s, every, d, dtype=call.dtype, name=f"{CALL}.rows", world=world),
    )
    rows, move = whole.plain().view(b * s, every * d), ALL_TO_ALL.planned(
        world, plain(call["x"]), whole, scatter=1, gather=2
    )  # fmt: skip

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        move(plain(x), whole)
        found = plain(out).view(b * s, N)
        multiply(world, rows, plain(weight).flatten(0, 1), found)
        if bias is not None:
            found.add_(plain(bias))
        return out

    return with_product(call, launch)


def backward(call: Recorded) -> Gradients:
    """Of x `matmul_all_to_all`; of the weight the heads come once more, and are multiplied."""
    found: dict[str, Any] = {}
    if "x" in call.wanted:
        found["x"] = call.operator("matmul_all_to_all", call.grad, call["weight"].permute(2, 0, 1))
    if "weight" in call.wanted:
        home = call.operator("all_to_all", call["x"].contiguous(), scatter=1, gather=2)
        rows, grad = home.flatten(2).flatten(0, 1), call.grad.flatten(0, 1)
        h, d, n = call.shape("weight")
        (turned,) = call.turned("weight")
        found["weight"] = (
            torch.mm(grad.t(), rows).view(n, h, d).permute(1, 2, 0)
            if turned
            else torch.mm(rows.t(), grad).view(h, d, n)
        )
    if "bias" in call.wanted:
        found["bias"] = call.grad.sum((0, 1))
    return found


MOVES = "(W - 1) / W |x|"
SMALL = {"tiles": (64, 64, 64), "num_comm_sms": 1, "chunk": 256}
FEW = {"mode": "push", "tiles": (16, 16, 16), "chunk": 16}
OPERATOR = Operator(
    all_to_all_matmul,
    tensors={
        "x": Operand("b W*s h d", FLOATS), "weight": Operand("W*h d n", strided=True),
        "bias": Operand("n", optional=True),
    },
    result="b s n",
    settings={"tiles": products.tiles, "num_comm_sms": integer(1), "chunk": integer(1)},
    forms={
        "push": Form(
            _push, "communicators store rows into inboxes, tiles wait for them", MOVES, small=SMALL,
            settings={
                "num_comm_sms": NUM_COMM_SMS, "chunk": CHUNK,
                "tiles": _tiles,
            },
            seconds=heads.seconds_pushed_rows(NUM_COMM_SMS),
        ),
        "gluon": Form(
            products.fitted(_gluon, out=True, operands=("x", "weight")),
            "copy engines move rows, tiles in specialised warps wait for them", MOVES,
            settings={"tiles": None}, complete=_settled, fits=_fits_gluon, gpu=True,
            seconds=heads.seconds_copied_rows,
        ),
        "unfused": Form(
            _unfused, "`pkt.all_to_all`, then torch's product", MOVES,
            roundings=lambda size: 2, seconds=heads.seconds_unfused(heads.sent_rows),
        ),
    },
    default=_default,
    reference=reference,
    backward=Backward(
        backward, "of x `matmul_all_to_all`; of weight `all_to_all` of x once more, then a product",
        saves={"x": ("weight",), "weight": ("x",)},
    ),
    terms=lambda sizes, size: size * sizes["h"] * sizes["d"] + 1,
    cases=(
        Case(
            {"b": 2, "s": 3, "h": 2, "d": 4, "n": 8}, out="new", explore=False,
            large={"b": 1, "s": 4096, "h": 4, "d": 128, "n": 1024},
        ),
        Case({"b": 2, "s": 3, "h": 1, "d": 9, "n": 9}, arguments=FEW, ranks=2, out="new"),
        Case({"b": 1, "s": 5, "h": 1, "d": 20, "n": 20}, arguments=FEW | {"given": ("bias",)}),
        Case({"b": 2, "s": 17, "h": 1, "d": 18, "n": 20}, arguments=FEW | {"tiles": (16, 32, 32)}, explore=False),
        Case({"b": 3, "s": 1, "h": 2, "d": 16, "n": 33}, arguments={"given": ("bias",)}, out="new", explore=False),
    ),
)  # fmt: skip
