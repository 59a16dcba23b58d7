"""Combine: what the experts have made of a token's rows goes home, and is added there. The way back of `dispatch`.

pull: one launch. Some programs of a rank add the rows of each token that they have, times their weights, and leave the
sums, one a token, where the other ranks load them; they signal once a chunk of tokens. The other programs load the sums
of this rank's own tokens from all ranks, as they become ready, and add them.

All sums are in fp32, first over a token's experts on a rank in the token's order, then over the ranks in their order:
every run adds alike. Between the two a sum is rounded to y's dtype. Of each token one sum leaves each rank that has its
experts.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from .declaration import Call, Case, Form, Launch, Operand, Shape, integer
from .dispatch import Dispatched
from .dispatch_again import some_rows, some_slots, some_weights
from .experts_gradients import OF_COMBINE
from .operator import Operator
from .shared.checks import FLOATS
from .shared.grid import COPY_OPTIONS, barrier_counters, num_programs


def reference(rank: int, y: list[torch.Tensor], **handle: list[torch.Tensor] | None) -> torch.Tensor:
    """What `rank` gets, in fp64."""
    tokens, places, weights = (handle[f"dispatched.{name}"] for name in ("tokens", "places", "weights"))
    assert tokens is not None and places is not None  # noqa: PT018
    size = len(y)
    mine = places[rank].view(-1, size)
    out = torch.zeros(len(mine), y[0].shape[1], dtype=torch.float64, device=y[0].device)
    for d in range(size):
        scaled = y[d].double() * (weights[d].double()[:, None] if weights else 1)
        for t, slot in enumerate(mine[:, d].tolist()):
            rows = [row for row in tokens[d][slot].tolist() if row >= 0] if slot >= 0 else []
            out[t] += scaled[rows].sum(0)
    return out


def bound(
    rank: int, dtype: torch.dtype, roundings: int, y: list[torch.Tensor], **handle: Any
) -> tuple[torch.Tensor | float, ...]:  # fmt: skip
    """How far a right result may be off: each rounding to dtype, and one in fp32 for each product and each sum."""
    weights = handle["dispatched.weights"]
    sizes = handle | {"dispatched.weights": weights and [w.abs() for w in weights]}
    magnitude = reference(rank, [one.abs() for one in y], **sizes)
    facts, ranks = torch.finfo(dtype), len(y)
    terms = 2 * handle["dispatched.tokens"][0].shape[1] + ranks + 2
    return ((roundings * facts.eps / 2 + terms * 2.0**-24) * magnitude + (ranks + 1) * facts.tiny * facts.eps / 2,)


# ------------------------------------------------------------------------------------------------------------- kernel
class Size(NamedTuple):
    """The numbers of a combine."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    S: Any  # slots
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    CHUNK: tl.constexpr  # slots a signal
    GROUP: tl.constexpr  # chunks a counter
    COLLECTORS: tl.constexpr  # programs that load sums
    ROWS: tl.constexpr  # added at a time, ROWS x COLS
    LOADED: tl.constexpr  # collected at a time, LOADED x COLS
    COLS: tl.constexpr


@triton.jit
def combine_kernel(
    y_ptr,  # (R, H) this rank's
    tokens_ptr,  # int32 (S, K) this rank's: the rows of the token in each slot, -1 for none
    places_ptr,  # int32 (T, size) this rank's: the slot of each token on each rank, -1 for none
    weights_ptr,  # fp32 (R,) this rank's, or None
    out_ptr,  # (T, H) this rank's
    sums_ptr,  # (S, H) on every rank: of each slot; all ranks load them
    ready_ptr,  # int32 (size, groups of chunks) on every rank: chunks that each rank has ever added, or found empty
    bar_ptr,  # int32 (programs,) on every rank
    p,  # Size
    world,
):
    pid = tl.program_id(0)
    launch = pl.epoch(ready_ptr, world)
    pl.barrier(bar_ptr + pid, world)  # before overwrite: every rank has read the last launch's sums
    alone = tl.num_programs(0) == 1
    if (pid >= p.COLLECTORS) | alone:
        first = 0 if alone else pid - p.COLLECTORS
        step = 1 if alone else tl.num_programs(0) - p.COLLECTORS
        _add(y_ptr, tokens_ptr, weights_ptr, sums_ptr, ready_ptr, launch, first, step, p, world)
    if pid < p.COLLECTORS:
        _collect(places_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world)


@triton.jit
def _add(y_ptr, tokens_ptr, weights_ptr, sums_ptr, ready_ptr, launch, first, step, p, world):
    """Add the rows of every slot's token, chunk by chunk."""
    k = tl.arange(0, p.K2)[None, :]
    chunks = tl.cdiv(p.S, p.CHUNK)
    for chunk in range(first, chunks, step):
        for start in range(chunk * p.CHUNK, chunk * p.CHUNK + p.CHUNK, p.ROWS):
            slot = tl.cast(start, tl.int64) + tl.arange(0, p.ROWS)[:, None]
            inside = (slot < p.S) & (k < p.K)
            rows = tl.load(tokens_ptr + slot * p.K + k, mask=inside, other=-1)
            if tl.max(tl.max(rows, 1), 0) >= 0:
                for col in range(0, p.H, p.COLS):
                    cols = col + tl.arange(0, p.COLS)[None, :]
                    total = tl.zeros((p.ROWS, p.COLS), tl.float32)
                    for number in tl.static_range(p.K):
                        row = tl.max(tl.where(k == number, rows, -1), 1)[:, None]
                        at = y_ptr + tl.cast(row, tl.int64) * p.H + cols
                        part = tl.load(at, mask=(row >= 0) & (cols < p.H), other=0).to(tl.float32)
                        if weights_ptr is not None:
                            part *= tl.load(weights_ptr + row, mask=row >= 0, other=0)
                        total += part
                    sums = sums_ptr + slot * p.H + cols
                    tl.store(sums, total.to(sums_ptr.dtype.element_ty), mask=(slot < p.S) & (cols < p.H))
        ready = ready_ptr + tl.cast(world.rank, tl.int32) * tl.cdiv(chunks, p.GROUP) + chunk // p.GROUP
        pl.signal_all(ready, world)  # publish the chunk


@triton.jit
def _collect(places_ptr, out_ptr, sums_ptr, ready_ptr, launch, p, world):
    """Add the ranks' sums of my tokens."""
    groups = tl.cdiv(tl.cdiv(p.S, p.CHUNK), p.GROUP)
    for start in range(tl.program_id(0) * p.LOADED, p.T, p.COLLECTORS * p.LOADED):
        t = tl.cast(start, tl.int64) + tl.arange(0, p.LOADED)[:, None]
        for source in range(world.size):
            slot = tl.load(places_ptr + t * world.size + source, mask=t < p.T, other=-1)
            group = tl.where(slot >= 0, slot // (p.CHUNK * p.GROUP), -1)
            wanted = tl.max(tl.max(group, 1), 0)
            while wanted >= 0:  # neighbours are mostly in one group
                _wait(ready_ptr, source * groups + wanted, groups, launch, p, world)
                wanted = tl.max(tl.max(tl.where(group < wanted, group, -1), 1), 0)
        for col in range(0, p.H, p.COLS):
            cols = col + tl.arange(0, p.COLS)[None, :]
            total = tl.zeros((p.LOADED, p.COLS), tl.float32)
            for d in tl.static_range(world.size):
                slot = tl.load(places_ptr + t * world.size + d, mask=t < p.T, other=-1)
                at = sums_ptr + tl.cast(slot, tl.int64) * p.H + cols
                total += pl.load(at, d, world, mask=(slot >= 0) & (cols < p.H), other=0).to(tl.float32)
            out = out_ptr + t * p.H + cols
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(t < p.T) & (cols < p.H))
    for at in range(tl.program_id(0), groups * world.size, p.COLLECTORS):  # and those that none of my tokens is in
        _wait(ready_ptr, at, groups, launch, p, world)


@triton.jit
def _wait(ready_ptr, at, groups, launch, p, world):
    """Wait until a rank has added a group, at = rank * groups + group."""
    chunks = tl.minimum(tl.cdiv(p.S, p.CHUNK) - at % groups * p.GROUP, p.GROUP)
    pl.wait(ready_ptr + at, launch * chunks, world)


def combine(
    y: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["pull"] | None = None,
    num_comm_sms: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """The sum of each token's rows of the ranks' `y`, times their weights, where the token came from. Collective.

    y: (R, H), a row for each row that `dispatch` has returned, of which H may be another; its rows that are no token's
    are not read. dispatched: what `dispatch` has returned; `dispatched._replace(weights=None)` adds without weights.
    out: (T, H) of y's dtype; a new tensor where None. A token that has no expert, or whose experts' ranks had no room,
    is 0. num_comm_sms: programs that load from the ranks, while the others add this rank's rows. Returns `out`.
    The host waits for nothing, so a CUDA graph replays with other routing.

    Differentiable, also in the weights. Symmetric memory kept: as many tokens as y has rows, rounded up. Raises
    ShapeError, DtypeError, CollectiveMismatch.
    """
    handle = OPERATOR.handle("dispatched", dispatched, world)
    return OPERATOR((y, *handle, out), (mode, num_comm_sms), world)


# -------------------------------------------------------------------------------------------------------------- host
COLLECTORS, TILE_BYTES = 32, 16384
"""Programs that load from the ranks, by default, and what each loads at a time: with a flight of 1.3 us, so much fills
the links."""
MOST_CHUNK, MOST_GROUP = 16, 8
"""Slots between two signals, and chunks that share a counter, at most: small chunks keep all programs busy, and few
counters take less time to look at."""


def _shape(call: Call) -> Shape:
    return call.sizes["t"], call["h"]


def _plan(call: Call) -> Launch:
    world, (_, H), (slots, K) = call.world, call["y"].shape, call["dispatched.tokens"].shape
    programs = num_programs(world, world.num_sms)
    collectors = max(1, min(call["num_comm_sms"] or COLLECTORS, programs - 1))
    cols = min(1024, triton.next_power_of_2(max(H, 1)))
    chunk = max(2, min(MOST_CHUNK, triton.next_power_of_2(slots // 256)))
    chunks = triton.cdiv(slots, chunk)
    group = max(1, min(MOST_GROUP, chunks // 4))
    tile = max(1, TILE_BYTES // (cols * call.dtype.itemsize))
    rows = min(chunk, max(1, tile // 2))  # of K rows each
    K2 = triton.next_power_of_2(max(K, 1))
    sized = Size(
        call.sizes["t"], H, slots, *map(tl.constexpr, (K, K2, chunk, group, collectors, rows, min(chunk, tile), cols))
    )
    sums, ready = world.keep(
        ("combine", slots, H, call.dtype),
        lambda: (
            empty(max(slots, 1), max(H, 1), dtype=call.dtype, name="combine.sums", world=world),
            signals(max(world.size * triton.cdiv(chunks, group), 1), name="combine.ready", world=world),
        ),
    )
    start = cooperative_launch(world, combine_kernel, (programs,), **COPY_OPTIONS)
    bar = barrier_counters(world)

    def launch(
        y: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any, out: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        start(y, tokens, places, weights, out, sums, ready, bar, sized, world.device)
        return out

    return launch


INT32 = (torch.int32,)
FEW = {"r": 14, "h": 4, "s": 7, "k": 2, "t": 4}
OPERATOR = Operator(
    combine,
    tensors={
        "y": Operand("r h", FLOATS),
        "dispatched.tokens": Operand("s k", INT32, make=some_rows),
        "dispatched.places": Operand("W*t", INT32, make=some_slots),
        "dispatched.weights": Operand("r", (torch.float32,), optional=True, make=some_weights),
    },
    result=_shape,
    settings={"num_comm_sms": integer(least=1)},
    forms={
        "pull": Form(
            _plan, "a rank adds its rows, and the tokens' ranks load the sums", "y's sums that leave, once a token",
            settings={"num_comm_sms": None}, roundings=lambda size: 2,
        ),
    },
    reference=reference,
    bound=bound,
    backward=OF_COMBINE,
    private="t",
    most={"k": 16},
    always=True,
    cases=(
        Case(FEW, arguments={"mode": "pull", "given": ("dispatched.weights",)}, ranks=2, out="given"),
    ),
)  # fmt: skip
