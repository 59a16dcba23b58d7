"""The backward pass of `pkt.ring_attention`: gradients of queries, and of keys and values by their owners.

fused: three kernels, one behind the other.

    1. Each row's delta, from `dout` and the result.
    2. dq: some programs push keys and values as in the forward pass, and then queries, dout and what kernel 1 found.
       The others take BLOCK_M queries of a head at a time, over the keys of all ranks as they arrive, own ones first.
    3. dk and dv: a program for BLOCK_N keys of a head of this rank, over the queries of all ranks, own ones first.

    Each sum has one order, so the result is the same in every run, to the last bit. Scores are computed twice, in 2 and
    in 3: with atomics, which need this once, the order would not be fixed. A mask, a window or the end of a document
    also hides rows: chunks that nobody on a rank sees are not sent there.

gluon: the same with kernels 2 and 3 in specialised warps, see gluon_dq.py and gluon_dkv.py. All that travels is moved
    by the copy engines.

parts: keys and values travel by the copy engines. torch computes the gradients of own keys, then of each rank's as they
    arrive; those of keys and values go home by the copy engines, in the operands' dtype. Sums over ranks are fp32 and
    in a fixed order. See parts.py.

Beside the keys and values as in the forward pass, (size - 1) times the bytes of q and dout leave each rank, and 8 bytes
for each row and head of q, less what nobody sees; in "parts" (size - 1) times the bytes of k and v.

With D of 64 and 128 in bf16 no kernel spills with the default tiles, compiled for sm_90 and sm_100. With D = 256 and in
fp32 some do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.errors import ShapeError
from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Launch, Operand, Shape, integer
from ..operator import Operator
from ..shared import attention, copies
from ..shared.attention import Tiles
from ..shared.checks import FLOATS
from ..shared.grid import barrier_counters, num_programs
from ..shared.replays import with_memory
from . import rules
from .backward import Backward, alone_kernel, keys_kernel, queries_kernel, rows_kernel
from .exact_backward import bound, reference
from .exchange import Exchange
from .exchange import pushing as pushed
from .parts import fits, planned_backward
from .planning import (
    ARGUMENTS,
    CHUNK,
    GLUON_CHUNK,
    GLUON_ROWS,
    GLUON_TILES,
    NUM_COMM_SMS,
    documents,
    joining,
    num_places,
    of_heads,
    planned,
    shape_of,
    sizes,
)  # fmt: skip
from .sequence import Layout
from .sequence import pieces as parts_of

CALL = "ring_attention_backward"
ROWS = 16
"""Rows of queries that a program of the first kernel reads."""


def ring_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dlse: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    layout: Layout = "contiguous",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    length: int | None = None,
    mode: Literal["fused", "gluon", "parts"] | None = None,
    num_comm_sms: int | None = None,
    chunk: int | None = None,
    tiles: Sequence[int] | None = None,
    key_tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> Any:
    """(dq, dk, dv): the gradients of `pkt.ring_attention`, of the sum of all ranks' losses. Collective.

    autograd calls this; call it yourself in a backward pass of your own.

    dout: the gradient of the forward call's result, of its shape and dtype. result, lse: what that call returned. dlse:
        the gradient of lse, fp32; None for zeros. q, k, v, cu_seqlens and the keywords up to `length`: as of the
        forward call.
    out: dq's shape and dtype, where it goes; a new tensor where None. dk and dv are new tensors of k's shape and dtype.

    mode: a form that the top of kernels/ring_attention/ring_attention_backward.py describes. Where None, the one of
        "fused", "gluon" and "parts" with the least predicted time, and without "parts" under
        torch.use_deterministic_algorithms. "parts" takes what the form "parts" of `pkt.ring_attention` takes, and no
        dlse. "gluon" takes bf16 and fp16, and D of 64 and 128; on sm_90, with Triton 3.6 to 3.9.
    chunk: rows of keys and values that one signal stands for. In "fused" rounded up to BLOCK_N, by default 512; in
        "gluon" rounded up to 128, by default 2048. For "fused" alone:
    num_comm_sms: programs that push keys and values, at least 1, by default 16. tiles: (BLOCK_M, BLOCK_N, NUM_WARPS,
    NUM_STAGES) of the first kernel: queries of a task and keys of a step, powers of two from 16. key_tiles: those of
    the second: queries of a step and keys of a program. The same on every rank.

    Sums are fp32, also over ranks and over heads that share keys, and are rounded once; weights and slopes are rounded
    to q's dtype before they are multiplied. The result is the same in every run, to the last bit. In "parts" torch
    rounds the gradients of each rank's part to q's dtype before they are added, and its kernels on GPUs may add in
    another order in each run. The gradients of rows that see no key, or that nobody sees, are 0. Tensors may have any
    strides.

    Symmetric memory kept: (size - 1) times the bytes of q, k, v and dout, and 8 for each row and head of q; in "parts"
    twice (size - 1) times the bytes of k and v; none on one rank. Raises ShapeError, DtypeError, CollectiveMismatch,
    Unsupported.
    """
    values = (causal, layout, scale, window, length, mode, num_comm_sms, chunk, tiles, key_tiles)
    return OPERATOR((dout, q, k, v, result, lse, out, dlse, cu_seqlens), values, world)


# ------------------------------------------------------------------------------------------------------------- host
def tiles_for(d: int, itemsize: int, blackwell: bool) -> tuple[Tiles, Tiles]:
    """`tiles` and `key_tiles` that were compiled without spills for D up to 128 and elements of two bytes."""
    if itemsize == 4:
        return Tiles(32, 16, 8, 1), Tiles(16, 32, 8, 1)
    if d <= 64:
        return Tiles(128, 64, 8, 2), Tiles(64 if blackwell else 128, 64, 8, 2)
    if d <= 128:
        return (Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)) if blackwell else (Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2))
    return Tiles(64, 32, 8, 1), Tiles(32, 64, 8, 1)


def _default(which: int) -> Any:
    def tiles(call: Call) -> Tiles:
        blackwell = call.on_gpu and torch.cuda.get_device_capability(call.world.torch_device)[0] >= 10
        return tiles_for(call["d"], call.dtype.itemsize, blackwell)[which]

    return tiles


def _shape(call: Call) -> Shape:
    """dq's, which is q's. Raises ShapeError."""
    shape = shape_of(call)
    heads = call.bound(of_heads(call))
    for name, wanted in (("dout", shape), ("result", shape), ("lse", heads), ("dlse", heads)):
        if call[name] is not None and call[name].shape != wanted:
            raise ShapeError.argument(call.name, name, tuple(call[name].shape), str(wanted), call.world.rank)
    return shape


def _fused(call: Call) -> Launch:
    world, tiles, key_tiles = call.world, call["tiles"], call["key_tiles"]
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    plan = planned(call)
    tasks, pushes = b * h * plan.blocks, 2 * b * plan.pushes
    pieces = g * len(parts_of(s, call["layout"], world.rank, world.size, key_tiles.block_n))
    programs = num_programs(world, tasks + min(call["num_comm_sms"], pushes))
    places = num_places(call, 1)
    constants = {"STAGES": tl.constexpr(tiles.num_stages), "PIECE": tl.constexpr(1)}
    of_all: dict[str, Any] = {**dict.fromkeys(Backward._fields), **sizes(call, plan), **constants, "num_comm_sms": 0}
    if world.size > 1:
        exchange = Exchange(call, plan, places, 2, tasks, programs)  # launches with one queue have as many tasks
        needs = outside_pools(
            lambda: torch.tensor(exchange.needs, dtype=torch.int32, device=world.torch_device), world.torch_device
        )
        counters, pushing = exchange.counters, max(1, min(call["num_comm_sms"], programs - 1, pushes))
        of_all |= exchange.inboxes | {"ready_ptr": counters, "needs_ptr": needs, "number_ptr": counters[-2:]}
        of_all |= {"bar_ptr": barrier_counters(world), "queue_ptr": counters[-1:], "num_comm_sms": pushing}
    both = Backward(**of_all)
    block_m, block_n, _, stages = map(tl.constexpr, key_tiles)
    same, behind = both[9:], both._replace(BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages)[9:]
    kernel = queries_kernel if world.size > 1 else alone_kernel
    of_queries = cooperative_launch(world, kernel, (programs,), **tiles.options)
    spans_of = documents(call)
    n, block_d = b * places * h, triton.next_power_of_2(max(d, 16))
    of_rows = beside_launch(world, rows_kernel, (triton.cdiv(n, ROWS),))
    of_keys = beside_launch(world, keys_kernel, (b * pieces,), **key_tiles.options)

    def launch(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor, lse: torch.Tensor,
        out: torch.Tensor, dlse: torch.Tensor | None, cu_seqlens: torch.Tensor | None, dk: torch.Tensor,
        dv: torch.Tensor, rows: torch.Tensor,
    ) -> Any:  # fmt: skip
        of_rows(result, dout, lse, dlse, rows, n, s, places, h, d, block_d, ROWS, plan.zigzag, 1)
        tensors = q, k, v, dout, spans_of(cu_seqlens), rows, out, dk, dv
        of_queries(Backward(*tensors, *same), world.device)
        of_keys(Backward(*tensors, *behind), world.device)
        return out, dk, dv

    return with_memory(world, launch, [((2, b, h, places), torch.float32)])


def _gluon(call: Call) -> Launch:
    from .gluon_backward import planned_gradients

    world, plan = call.world, joining(call, planned(call, GLUON_TILES))
    b, s, h, d = (call[letter] for letter in "bshd")
    places = num_places(call, GLUON_ROWS)
    n, block_d = b * places * h, triton.next_power_of_2(d)
    of_rows = beside_launch(world, rows_kernel, (triton.cdiv(n, ROWS),))
    spans_of = documents(call)
    constants = {"BLOCK_N": GLUON_ROWS, "STAGES": 1, "PIECE": GLUON_ROWS}
    same: dict[str, Any] = {**dict.fromkeys(Backward._fields), **sizes(call, plan), "num_comm_sms": 0}
    same |= {name: tl.constexpr(value) for name, value in constants.items()}
    exchange = None
    if world.size > 1:
        exchange = Exchange(call, plan, places, 1)
        counters, side = exchange.counters, copies.Side(world)
        same |= {"ready_ptr": counters, "number_ptr": counters[-1:]}
        begin = copies.counting(world, counters[-1:])
        of_keys, of_queries = exchange.needs
        push_keys = pushed(call, plan, of_keys, exchange.keys, counters, side)
        push_queries = pushed(
            call, plan, of_queries, exchange.queries, counters, side, exchange.first, ahead=exchange.numbers_to,
        )  # fmt: skip
    both = Backward(**same)
    gradients = planned_gradients(call, plan, exchange)

    def launch(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor, lse: torch.Tensor,
        out: torch.Tensor, dlse: torch.Tensor | None, cu_seqlens: torch.Tensor | None, dk: torch.Tensor,
        dv: torch.Tensor, rows: torch.Tensor,
    ) -> Any:  # fmt: skip
        p = both._replace(spans_ptr=spans_of(cu_seqlens), rows_ptr=rows, dq_ptr=out, dk_ptr=dk, dv_ptr=dv)
        if world.size > 1:
            begin()  # before overwrite: every rank's launch before has ended
            push_keys(k, v)
        of_rows(result, dout, lse, dlse, rows, n, s, places, h, d, block_d, ROWS, plan.zigzag, GLUON_ROWS)
        sent = push_queries(q, dout, rows) if world.size > 1 else None
        gradients(q, k, v, dout, p)
        if world.size > 1:
            side.reach(sent)
        return out, dk, dv

    return with_memory(world, launch, [((2, b, h, places), torch.float32)])


# ------------------------------------------------------------------------------------------------------ declaration
def _logarithms(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Some for tests, with which no weight overflows."""
    return 4 + torch.rand(shape, generator=generator)


def of_keys(call: Call) -> str:
    """The shape of k, in letters."""
    return "b s g d" if call["cu_seqlens"] is None else "s g d"


SHAPES = dict.fromkeys(("dout", "q", "k", "v", "result"), (1, 3, 1, 4))
EIGHT = dict.fromkeys(SHAPES, (1, 3, 1, 8))  # the least D that torch's kernels for GPUs take
TILED = dict.fromkeys(SHAPES, (2, 150, 2, 64))  # more than a tile of the Gluon kernels
OPERATOR = Operator(
    ring_attention_backward,
    tensors={
        "dout": Operand("...", FLOATS), "q": Operand("..."), "k": Operand("..."), "v": Operand("..."),
        "result": Operand("..."),
        "lse": Operand(of_heads, (torch.float32,), make=_logarithms),
        "dlse": Operand(of_heads, (torch.float32,), optional=True, make=_logarithms),
        "cu_seqlens": Operand("...", (torch.int32,), optional=True, same=True),
    },
    result=_shape,
    also={"dk": Operand(of_keys), "dv": Operand(of_keys)},
    arguments=ARGUMENTS,
    settings={"num_comm_sms": integer(1), "chunk": integer(1), "tiles": attention.tiles, "key_tiles": attention.tiles},
    forms={
        "fused": Form(
            _fused, "some programs push keys, values, queries and `dout`, the others compute with what has arrived",
            "2 (W - 1) (|q| + |k|)",
            settings={"num_comm_sms": NUM_COMM_SMS, "chunk": CHUNK, "tiles": _default(0), "key_tiles": _default(1)},
            small={"num_comm_sms": 1, "chunk": 16, "tiles": (16, 16), "key_tiles": (16, 16)},
        ),
        "gluon": Form(
            _gluon, "`fused`, with kernels in specialised warps; push by the copy engines",
            "2 (W - 1) (|q| + |k|)", fits=rules.fits_gluon,
            settings={"chunk": GLUON_CHUNK}, gpu=True,
        ),
        "parts": Form(
            planned_backward, "copies by the copy engines, torch's gradients of each rank's keys, then sums",
            "4 (W - 1) |k|", fits=fits, roundings=lambda size: 3,
        ),
    },
    default=rules.default_backward,
    reference=reference,
    bound=bound,
    cases=(
        # Scores of whole numbers are small enough for exp. The first case is one that every form takes.
        Case(
            shapes=EIGHT, arguments={"mode": "parts", "causal": True, "layout": "zigzag", "scale": 0.02}, ranks=2,
            out="new", dtype=torch.bfloat16,
        ),
        Case(shapes=SHAPES, arguments={"mode": "fused", "scale": 0.02, "given": ("dlse",)}, ranks=2, out="new"),
        Case(shapes=SHAPES, arguments={"mode": "fused", "causal": True, "scale": 0.02}, explore=False),
        Case(
            shapes=TILED, arguments={"mode": "gluon", "causal": True, "scale": 0.02, "given": ("dlse",)}, out="new",
            dtype=torch.bfloat16, explore=False,
        ),
    ),
)  # fmt: skip
