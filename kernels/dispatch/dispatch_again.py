"""Dispatch again: other values of the same tokens go the way of an earlier `dispatch`. The gradient of `combine`.

push: one launch.
    1. Programs write down which token goes to each slot of each rank, and which place in `tokens` names each row.
    2. Some programs store tokens into the inboxes of the ranks, each token once a rank, chunk by chunk of slots. They
       signal once a chunk.
    3. The other programs copy each token into its rows, times their weights, as its chunk arrives. If they are given y,
       they also take the product of each row with its row of y.

Nothing is counted and nothing exchanged, because the slots are known: see `dispatch`, which numbers them. All slots of
a chunk belong to one rank, and if one of them is taken, the first one is.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.world import World

from ..declaration import Call, Case, Form, Launch, Operand, integer
from ..operator import Operator
from ..shared.checks import FLOATS
from ..shared.grid import COPY_OPTIONS, barrier_counters, num_programs
from .examples import some_rows, some_slots, some_weights
from .gradients import OF_DISPATCH_AGAIN
from .result import Dispatched, chunk_of


def reference(
    rank: int, x: list[torch.Tensor], y: list[torch.Tensor] | None = None, **handle: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` gets, in fp64."""
    tokens, places, weights = (handle[f"dispatched.{name}"] for name in ("tokens", "places", "weights"))
    scale = weights[rank].double()
    rows = [torch.zeros(x[0].shape[1], dtype=torch.float64, device=x[0].device)] * len(scale)
    for r, own in enumerate(places):
        for t, slot in enumerate(own.view(-1, len(x))[:, rank].tolist()):
            for row in tokens[rank][slot].tolist() if slot >= 0 else ():
                if row >= 0:
                    rows[row] = x[r][t].double()
    found = torch.stack(rows) if rows else x[0].new_zeros(0, x[0].shape[1], dtype=torch.float64)
    dots = found.new_zeros(len(scale)) if y is None else (found * y[rank].double()).sum(1)
    return found * scale[:, None], dots


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: list[torch.Tensor], y: list[torch.Tensor] | None = None,
    **handle: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How far right results may be off: the rows by a product and a rounding, the sums by a rounding in fp32 a term."""
    sizes = handle | {"dispatched.weights": [w.abs() for w in handle["dispatched.weights"]]}
    rows, dots = reference(rank, [one.abs() for one in x], y and [one.abs() for one in y], **sizes)
    facts = torch.finfo(dtype)
    limit = (roundings * facts.eps / 2 + 2.0**-24) * rows + facts.tiny * facts.eps / 2
    return limit, (x[0].shape[1] + 2) * 2.0**-24 * dots


# ------------------------------------------------------------------------------------------------------------- kernel
class Size(NamedTuple):
    """The numbers of a launch."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    R: Any  # rows of the result
    S: Any  # slots
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    CHUNK: tl.constexpr  # slots a signal
    SENDERS: tl.constexpr  # programs that store into inboxes
    ROWS: tl.constexpr  # copied at a time, ROWS x COLS
    COLS: tl.constexpr
    MANY: tl.constexpr  # numbers written down at a time


class Buffers(NamedTuple):
    """A launch's memory, on every rank. What peers do not access is there, too, so that the simulator watches it."""

    inbox: Any  # (S, H): the slot's token, from its source
    ready: Any  # int32 (S / CHUNK,): of each chunk the last launch that has filled it
    grid: Any  # int32 (1,): of the grid barrier
    order: Any  # int32 (size, S): the token that goes to each slot of each rank, if places[token] says so, too
    named: Any  # int32 (R,): where in `tokens` each row is named, if tokens says so, too


@triton.jit
def dispatch_again_kernel(
    x_ptr,  # (T, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's
    y_ptr,  # (R, H) this rank's, or None
    rows_ptr,  # (R, H) this rank's
    dots_ptr,  # fp32 (R,) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    m,  # Buffers
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(m.ready, world)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read the last launch's inbox
    _write_down(tokens_ptr, places_ptr, m, p, world)
    pl.grid_barrier(m.grid, world)  # publish: the tokens and rows of all programs
    alone = tl.num_programs(0) == 1
    if pid < p.SENDERS:
        _send(x_ptr, places_ptr, launch, m, p, world)
    if (pid >= p.SENDERS) | alone:
        first = 0 if alone else pid - p.SENDERS
        step = 1 if alone else tl.num_programs(0) - p.SENDERS
        _place(x_ptr, tokens_ptr, places_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, launch, first, step, m, p, world)
        _fill(tokens_ptr, rows_ptr, dots_ptr, first, step, m, p)


@triton.jit
def _write_down(tokens_ptr, places_ptr, m, p, world):
    """The inverse of `places` and of `tokens`. Numbers of earlier launches stay, and are told by looking them up."""
    step = tl.num_programs(0) * p.MANY
    for start in range(tl.program_id(0) * p.MANY, p.T * world.size, step):
        at = start + tl.arange(0, p.MANY)
        slot = tl.load(places_ptr + at, mask=at < p.T * world.size, other=-1)
        there = m.order + tl.cast(at % world.size, tl.int64) * p.S + slot
        tl.store(there, at // world.size, mask=(slot >= 0) & (slot < p.S))
    for start in range(tl.program_id(0) * p.MANY, p.S * p.K, step):
        at = start + tl.arange(0, p.MANY)
        row = tl.load(tokens_ptr + at, mask=at < p.S * p.K, other=-1)
        tl.store(m.named + row, at, mask=(row >= 0) & (row < p.R))


@triton.jit
def _tokens_of(places_ptr, peer, chunk, m, p, world):
    """My token in each slot of a chunk of rank `peer`, -1 for none, (CHUNK,)."""
    slot = chunk * p.CHUNK + tl.arange(0, p.CHUNK)
    t = tl.load(m.order + tl.cast(peer, tl.int64) * p.S + slot, mask=slot < p.S, other=-1)
    inside = (t >= 0) & (t < p.T)
    place = tl.load(places_ptr + tl.cast(t, tl.int64) * world.size + peer, mask=inside, other=-1)
    return tl.where(inside & (place == slot), t, -1)


@triton.jit
def _some(tokens, start, p):
    """ROWS of the tokens of a chunk, from `start` on, (ROWS, 1)."""
    wanted = start + tl.arange(0, p.ROWS)
    same = wanted[:, None] == tl.arange(0, p.CHUNK)[None, :]
    return tl.max(tl.where(same, tokens[None, :], -1), 1)[:, None]


@triton.jit
def _send(x_ptr, places_ptr, launch, m, p, world):
    """Store this rank's tokens into the others' inboxes, chunk by chunk: each one where its first token comes."""
    rank = tl.cast(world.rank, tl.int32)
    for start in range(tl.program_id(0) * p.CHUNK, p.T, p.SENDERS * p.CHUNK):
        t = start + tl.arange(0, p.CHUNK)
        for d in range(1, world.size):
            peer = (rank + d) % world.size
            slot = tl.load(places_ptr + tl.cast(t, tl.int64) * world.size + peer, mask=t < p.T, other=-1)
            begun = tl.where((slot >= 0) & (slot % p.CHUNK == 0), slot // p.CHUNK, -1)
            chunk = tl.max(begun, 0)
            while chunk >= 0:
                _send_chunk(x_ptr, _tokens_of(places_ptr, peer, chunk, m, p, world), chunk, peer, m, p, world)
                pl.signal(m.ready + chunk, peer, world, value=launch, op="set")  # publish the chunk
                chunk = tl.max(tl.where(begun < chunk, begun, -1), 0)


@triton.jit
def _send_chunk(x_ptr, tokens, chunk, peer, m, p, world):
    for start in range(0, p.CHUNK, p.ROWS):
        t = tl.cast(_some(tokens, start, p), tl.int64)
        slot = tl.cast(chunk * p.CHUNK + start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            both = (t >= 0) & (cols < p.H)
            values = tl.load(x_ptr + t * p.H + cols, mask=both)
            pl.store(m.inbox + slot * p.H + cols, values, peer, world, mask=both)


@triton.jit
def _place(
    x_ptr, tokens_ptr, places_ptr, weights_ptr, y_ptr, rows_ptr, dots_ptr, launch, first, step, m, p, world
):  # fmt: skip
    """Copy the token of each slot into its rows: my own from x, the others' from the inbox, once a chunk is there."""
    rank = tl.cast(world.rank, tl.int32)
    k = tl.arange(0, p.K2)[None, :]
    for chunk in range(first, tl.cdiv(p.S, p.CHUNK), step):
        slots = chunk * p.CHUNK + tl.arange(0, p.CHUNK)[:, None]
        named = tl.load(tokens_ptr + tl.cast(slots, tl.int64) * p.K + k, mask=(slots < p.S) & (k < p.K), other=-1)
        if tl.max(tl.max(named, 1), 0) >= 0:
            mine = _tokens_of(places_ptr, rank, chunk, m, p, world)
            own = tl.max(mine, 0) >= 0
            if not own:
                pl.wait(m.ready + chunk, launch, world, cmp="eq")
            for start in range(0, p.CHUNK, p.ROWS):
                slot = tl.cast(chunk * p.CHUNK + start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
                rows = tl.load(tokens_ptr + slot * p.K + k, mask=(slot < p.S) & (k < p.K), other=-1)
                source = m.inbox + slot * p.H
                if own:
                    source = x_ptr + tl.maximum(tl.cast(_some(mine, start, p), tl.int64), 0) * p.H
                dots = tl.zeros((p.ROWS, p.K2), tl.float32)
                for col in range(0, p.H, p.COLS):
                    cols = col + tl.arange(0, p.COLS)[None, :]
                    values = tl.load(source + cols, mask=(tl.max(rows, 1)[:, None] >= 0) & (cols < p.H), other=0)
                    for number in tl.static_range(p.K):
                        row = tl.max(tl.where(k == number, rows, -1), 1)[:, None]
                        at = tl.cast(row, tl.int64) * p.H + cols
                        both = (row >= 0) & (cols < p.H)
                        if y_ptr is not None:
                            products = tl.load(y_ptr + at, mask=both, other=0).to(tl.float32) * values.to(tl.float32)
                            dots += tl.where(k == number, tl.sum(products, 1)[:, None], 0)
                        scaled = values.to(tl.float32) * tl.load(weights_ptr + row, mask=row >= 0, other=0)
                        tl.store(rows_ptr + at, scaled.to(rows_ptr.dtype.element_ty), mask=both)
                tl.store(dots_ptr + rows, dots, mask=rows >= 0)


@triton.jit
def _fill(tokens_ptr, rows_ptr, dots_ptr, first, step, m, p):
    """Zeros for the rows that are no token's."""
    for start in range(first * p.ROWS, p.R, step * p.ROWS):
        row = start + tl.arange(0, p.ROWS)
        at = tl.load(m.named + row, mask=row < p.R, other=0)
        inside = (row < p.R) & (at >= 0) & (at < p.S * p.K)
        nobodys = (row < p.R) & (tl.load(tokens_ptr + at, mask=inside, other=-1) != row)
        if tl.max(nobodys.to(tl.int32), 0) > 0:
            tl.store(dots_ptr + row, tl.zeros((p.ROWS,), tl.float32), mask=nobodys)
            zeros = tl.zeros((p.ROWS, p.COLS), rows_ptr.dtype.element_ty)
            for col in range(0, p.H, p.COLS):
                cols = col + tl.arange(0, p.COLS)[None, :]
                there = rows_ptr + tl.cast(row, tl.int64)[:, None] * p.H + cols
                tl.store(there, zeros, mask=nobodys[:, None] & (cols < p.H))


class Again(NamedTuple):
    """What a rank has received."""

    rows: torch.Tensor
    """(R, H) of x's dtype: the token of each row, times the row's weight; 0 where it is no token's."""
    dots: torch.Tensor
    """fp32 (R,): the product of each row of y with its token, without the weight; 0 where there is no y or no token."""


def dispatch_again(
    x: torch.Tensor,
    dispatched: Dispatched,
    y: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["push"] | None = None,
    num_comm_sms: int | None = None,
    world: World | None = None,
) -> Again:
    """Send other values of the tokens the way of `dispatch`; rows are multiplied by their weights. Collective.

    x: (T, H), a row for each of this rank's tokens; H and dtype may differ from those in `dispatch`. dispatched: what
    `dispatch` has returned; with `dispatched._replace(weights=torch.ones_like(dispatched.weights))` rows are copied. y:
    (R, H) of x's dtype, or None. out: (R, H) of x's dtype for the rows; a new tensor where None. num_comm_sms: programs
    that send, while the others place what arrives. Returns `Again`: the rows, and in fp32 the product of each row of y
    with its token. The host waits for nothing, so a CUDA graph replays with other routing.

    This is the gradient of `combine`: of y the rows, of the weights the products. So it recomputes the rows of a
    `dispatch` in a backward pass, too. Differentiable. Symmetric memory kept: R tokens. Raises ShapeError,
    DtypeError, CollectiveMismatch.
    """
    handle = OPERATOR.handle("dispatched", dispatched, world)
    return Again(*OPERATOR((x, *handle, y, out), (mode, num_comm_sms), world))


# -------------------------------------------------------------------------------------------------------------- host
TILE_BYTES, SENDERS = 16384, 24
"""Copied at a time, and programs that send, by default: as in `dispatch`."""


def _plan(call: Call) -> Launch:
    world, (T, H), (slots, K), R = call.world, call["x"].shape, call["dispatched.tokens"].shape, call.sizes["r"]
    programs = num_programs(world, world.num_sms)
    senders = max(1, min(call["num_comm_sms"] or SENDERS, programs - 1))
    cols, chunk = min(1024, triton.next_power_of_2(max(H, 1))), chunk_of(R)
    rows = min(chunk, max(1, TILE_BYTES // (cols * call.dtype.itemsize)))
    K2 = triton.next_power_of_2(max(K, 1))
    sized = Size(T, H, R, slots, *map(tl.constexpr, (K, K2, chunk, senders, rows, cols, 1024)))

    def buffers() -> Buffers:
        shape, count = (max(slots, 1), max(H, 1)), triton.cdiv(max(slots, 1), chunk)
        return Buffers(
            empty(*shape, dtype=call.dtype, name="dispatch_again.inbox", world=world),
            signals(count, name="dispatch_again.ready", world=world),
            signals(1, name="dispatch_again.grid", world=world),
            zeros(world.size, max(slots, 1), dtype=torch.int32, name="dispatch_again.order", world=world),
            zeros(max(R, 1), dtype=torch.int32, name="dispatch_again.named", world=world),
        )

    memory = world.keep(("dispatch_again", slots, chunk, R, H, call.dtype), buffers)
    start = cooperative_launch(world, dispatch_again_kernel, (programs,), **COPY_OPTIONS)
    bar = barrier_counters(world)

    def launch(
        x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any, y: Any, rows: torch.Tensor,
        dots: torch.Tensor,
    ) -> Any:  # fmt: skip
        start(x, tokens, places, weights, y, rows, dots, bar, memory, sized, world.device)
        return rows, dots

    return launch


INT32 = (torch.int32,)
FEW = {"t": 4, "h": 4, "s": 12, "k": 2, "r": 12}
OPERATOR = Operator(
    dispatch_again,
    tensors={
        "x": Operand("t h", FLOATS),
        "dispatched.tokens": Operand("s k", INT32, make=some_rows),
        "dispatched.places": Operand("W*t", INT32, make=some_slots),
        "dispatched.weights": Operand("r", (torch.float32,), make=some_weights),
        "y": Operand("r h", optional=True),
    },
    result="r h",
    also={"dots": Operand("r", (torch.float32,))},
    settings={"num_comm_sms": integer(least=1)},
    forms={
        "push": Form(
            _plan, "tokens into inboxes, once a rank, while others are placed", "x of tokens that leave, once a rank",
            settings={"num_comm_sms": None},
        ),
    },
    reference=reference,
    bound=bound,
    backward=OF_DISPATCH_AGAIN,
    private="t",
    most={"k": 16},
    always=True,
    cases=(
        Case(FEW, arguments={"mode": "push", "given": ("y",)}, ranks=2, out="given"),
        Case(FEW | {"k": 1, "h": 5}, explore=False),
    ),
)  # fmt: skip
