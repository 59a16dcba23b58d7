"""The second product of experts that all ranks share, and reduce-scatter: each token's sum, where the token came from.

Every rank has some of the rows of every expert's matrix, and so a part of each row of the product. A rank adds each
token's rows, times their weights, in fp32, in the order in which the token names them. Rank r gets its tokens' sums of
all ranks.

unfused: `grouped_matmul`, a kernel that adds each token's rows into symmetric memory, and pkt's reduce-scatter.

One launch, that of `matmul_combine`'s push, took 1.5 to 9 times as long for 256 to 16384 tokens on 2 x H100
(`benchmarks/results/grouped_matmul_reduce_scatter_2.json`), so it is gone.

(W - 1) * T * N * itemsize bytes leave and enter each rank, for T tokens of N elements. A row's product and the sum of a
rank's rows are rounded to the dtype, and so is the sum of all ranks, which is added in fp32 in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World

from . import grouped_matmul as grouped
from . import matmul_combine as joined
from .all_gather_grouped_matmul.result import Gathered
from .declaration import Call, Case, Form, Launch, Operand, Shape
from .dispatch_matmul import product_of
from .gradients import Backward, Gradients, Recorded
from .grouped_outer import grouped_outer
from .operator import Operator
from .reduce_scatter import OPERATOR as REDUCE_SCATTER
from .shared import products
from .shared.checks import FLOATS, check_weights
from .shared.grid import COPY_OPTIONS
from .shared.replays import with_memory
from .shared.unfused import plain

ADDED = 8192
"""Elements of sums that a program adds at a time."""


def reference(rank: int, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor], **handle: Any) -> torch.Tensor:
    """What `rank` gets, in fp64."""
    T = len(handle["gathered.places"][rank]) // len(x)
    total = x[rank].new_zeros(T, w[rank].shape[2], dtype=torch.float64)
    for at in range(len(x)):
        rows = grouped.reference(x[at], w[at], handle["gathered.offsets"][at])
        if handle["gathered.weights"]:
            rows = rows * handle["gathered.weights"][at].double()[:, None]
        tokens = handle["gathered.tokens"][at][rank * T : (rank + 1) * T]
        found = rows.new_zeros(T, rows.shape[1])
        for k in range(tokens.shape[1] if len(rows) else 0):
            found = found + torch.where((tokens[:, k] >= 0)[:, None], rows[tokens[:, k].clamp(min=0).long()], 0)
        total = total + found
    return total


@triton.jit
def token_sums_kernel(
    y_ptr,  # (R, N) this rank's rows
    tokens_ptr,  # int32 (S, K): the rows of each token, -1 for none
    weights_ptr,  # fp32 (R,), or None
    out_ptr,  # (S, N) this rank's
    S,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The sum of each token's rows, times their weights, in the order in which the token names them."""
    for start in range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS):
        t = start + tl.arange(0, ROWS)
        for col in range(0, N, COLS):
            cols = col + tl.arange(0, COLS)[None, :]
            total = tl.zeros((ROWS, COLS), tl.float32)
            for number in tl.static_range(K):
                row = tl.load(tokens_ptr + tl.cast(t, tl.int64) * K + number, mask=t < S, other=-1)
                there = (row >= 0)[:, None] & (cols < N)
                part = tl.load(y_ptr + tl.cast(row, tl.int64)[:, None] * N + cols, mask=there, other=0).to(tl.float32)
                if weights_ptr is not None:
                    part *= tl.load(weights_ptr + row, mask=row >= 0, other=0)[:, None]
                total += part
            to = out_ptr + tl.cast(t, tl.int64)[:, None] * N + cols
            tl.store(to, total.to(out_ptr.dtype.element_ty), mask=(t < S)[:, None] & (cols < N))


def grouped_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    gathered: Gathered,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["unfused"] | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Each expert's rows times its matrix, each token's rows times their weights added, over all ranks. Collective.

    x: (R, F), a row for each row of `all_gather_grouped_matmul`'s product, of this rank's F hidden columns. w: (E, F,
    N) of x's dtype, this rank's F rows of every expert, at least one, or the transposed view of a contiguous (E, N, F).
    gathered: what `all_gather_grouped_matmul` has returned; `gathered._replace(weights=None)` adds without weights.
    out: (T, N) of x's dtype, this rank's tokens; a new tensor where None. Returns `out`. Sums are in fp32; a row's
    product and the sum of a rank's rows are rounded to x's dtype. The order of the sums is fixed. A token without an
    expert gets 0.

    mode: the form, unfused. tiles: of the product, as for `grouped_matmul`.

    Symmetric memory kept: size * T tokens of N elements, and what `reduce_scatter` keeps. Differentiable in x, w and
    the weights, by `all_gather`, `grouped_matmul` and `grouped_outer`. Raises ShapeError, DtypeError,
    CollectiveMismatch.
    """
    tokens, places, weights, source, offsets = OPERATOR.handle("gathered", gathered, world)
    if isinstance(source, torch.Tensor) and source.ndim == 2 and source.layout is torch.strided:
        source = source.flatten()
    handle = tokens, places, weights, source, offsets
    return OPERATOR((x, w, *handle, out), (mode, tiles), world)


# --------------------------------------------------------------------------------------------------------------- host
def _plan_unfused(call: Call) -> Launch:
    world, (S, K), N = call.world, call["gathered.tokens"].shape, call["n"]
    multiply = product_of(call, call["x"], False, call["x"].shape[0])
    sums = world.keep(
        ("grouped_matmul_reduce_scatter", S, N, call.dtype),
        lambda: empty(S, N, dtype=call.dtype, name="grouped_matmul_reduce_scatter.sums", world=world),
    )
    scatter = REDUCE_SCATTER.planned(world, sums, plain(call["out"]))
    cols = min(1024, triton.next_power_of_2(N))
    rows = min(triton.next_power_of_2(S), ADDED // cols)
    grid = (max(1, min(world.num_sms, triton.cdiv(S, rows))),)
    add = beside_launch(world, token_sums_kernel, grid, **COPY_OPTIONS)

    def launch(
        x: torch.Tensor, w: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any,
        source: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, y: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        multiply(x, w, offsets, y)
        if world.streams is not None:
            world.streams.follow()  # the last call may have another stream, and still read the sums
        add(y, tokens, weights, sums, S, N, K, rows, cols)
        scatter(sums, plain(out))
        return out

    return with_memory(world, launch, [((call["x"].shape[0], N), call.dtype)])


def _shape(call: Call) -> Shape:
    check_weights(call)
    return call.sizes["t"], call["n"]


def _backward(call: Recorded) -> Gradients:
    source, offsets, world = call["gathered.source"].view(-1, 3), call["gathered.offsets"], call.world
    weights, T = call["gathered.weights"], call.shape("gathered.places")[0] // world.size
    every = call.operator("all_gather", call.grad.contiguous())
    token = (source[:, 0] * T + source[:, 1]).clamp(min=0)
    rows = torch.where(source[:, :1] >= 0, every.index_select(0, token), 0)
    scaled = rows if weights is None else (rows.float() * weights[:, None]).to(rows.dtype)
    found: dict[str, Any] = {}
    if "x" in call.wanted:
        found["x"] = grouped.grouped_matmul(scaled, call["w"].transpose(1, 2), offsets, clear=True, world=world)
    if "w" in call.wanted:
        found["w"] = grouped_outer(call["x"], scaled, offsets, world=world)
    if "gathered.weights" in call.wanted:
        y = grouped.grouped_matmul(call["x"], call["w"], offsets, clear=True, world=world)
        found["gathered.weights"] = (rows.float() * y.float()).sum(1)
    return found


def _row_of(call: Call, pair: int) -> int:
    """For tests: the row of a pair, slot * k + number, the same on all ranks and another in each launch; -1 for
    none."""
    pairs = call.world.size * call["t"] * call["k"]
    row = (pair + 5 * call.world.launch) % pairs
    return row if row < call["r"] and (pair + call.world.launch) % 4 else -1


def _some_tokens(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    rows = [_row_of(call, pair) for pair in range(shape[0] * shape[1])]
    return torch.tensor(rows, dtype=torch.int32).view(shape)


def _some_places(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    T, K, own = call["t"], call["k"], call.world.rank * call["t"]
    used = [any(_row_of(call, place * K + k) >= 0 for k in range(K)) for place in range(own, own + T)]
    every = [own + t if used[t] else -1 for t in range(T) for _ in range(call.world.size)]
    return torch.tensor(every, dtype=torch.int32).view(shape)


def _some_sources(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    found, T, K = torch.full((call["r"], 3), -1), call["t"], call["k"]
    for pair in range(call.world.size * T * K):
        if (row := _row_of(call, pair)) >= 0:
            found[row] = torch.tensor((pair // K // T, pair // K % T, pair % K))
    return found.view(shape).int()


_ROWS = ("gathered.places", "gathered.weights", "gathered.source", "gathered.offsets")
INT32 = (torch.int32,)
MOVES = "(W - 1) / W of a token's sum for each token of all ranks"
LARGE = {"r": 1024, "h": 512, "e": 8, "n": 256, "t": 128, "k": 4}
OPERATOR = Operator(
    grouped_matmul_reduce_scatter,
    tensors={
        "x": Operand("r h", FLOATS),
        "w": Operand("e h n", transposed=True, strided=True),
        "gathered.tokens": Operand("W*t k", INT32, make=_some_tokens),
        "gathered.places": Operand("W*t", INT32, make=_some_places),
        "gathered.weights": joined.OPERATOR.tensors["dispatched.weights"],
        "gathered.source": Operand("3*r", INT32, make=_some_sources),
        "gathered.offsets": joined.OPERATOR.tensors["dispatched.offsets"],
    },
    result=_shape,
    settings={"tiles": products.tiles},
    forms={
        "unfused": Form(
            _plan_unfused, "the grouped product, each token's sum, and reduce-scatter", MOVES,
            settings={"tiles": None}, roundings=lambda size: 3, small=products.SMALL,
        ),
    },
    reference=reference,
    bound=functools.partial(joined.bound, reference, "gathered"),
    backward=Backward(
        _backward,
        "`all_gather` of the gradient, then `grouped_matmul` with w transposed, and `grouped_outer`; of the weights "
        "the product once more",
        saves={"x": (*_ROWS, "w"), "w": (*_ROWS, "x"), "gathered.weights": (*_ROWS, "x", "w")},
    ),
    most={"k": 16},
    least={"e": 1},
    cases=(
        Case(
            {"r": 7, "h": 4, "e": 2, "n": 4, "t": 2, "k": 2},
            arguments={"mode": "unfused", "given": ("gathered.weights",)}, ranks=2, out="given",
            large=LARGE,
        ),
        Case(
            {"r": 20, "h": 16, "e": 3, "n": 20, "t": 3, "k": 3},
            arguments={"mode": "unfused", "given": ("gathered.weights",)}, explore=False, large=LARGE,
        ),
    ),
)  # fmt: skip
