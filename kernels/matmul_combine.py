"""The second product of the experts and combine: rows are multiplied, and the tokens' sums go home.

unfused: `grouped_matmul` and then `combine`, as two launches. The form of combine is the one that it would take.
push: one launch.
    1. Programs write down how many rows each token has here, and where `tokens` names each row.
    2. Every program computes tiles of the product. The program that stores the last tile of a block of rows counts
       these rows for their tokens. The one that counts the last row of a token adds the token's rows, times their
       weights, stores the sum at the token's rank, and signals.
    3. Every program takes the ranks' sums of some of this rank's tokens, as they arrive, and adds them.

No program waits before it has computed its tiles, so there are no roles. push was slower in a layer of experts, as
kernels/dispatch_matmul.py says, so it is not the default. Sums are added in the order of combine, and rounded as often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.language import ptx
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.world import World

from . import grouped_matmul as grouped
from .combine import plans
from .combine import reference as combined
from .declaration import Call, Case, Form, Launch, Operand, Shape, integer
from .dispatch import Dispatched, rules
from .dispatch.examples import some_rows, some_slots, some_sources, some_weights
from .dispatch.result import check_promise, flat
from .dispatch_matmul import product_of
from .gradients import Backward, Gradients, Recorded
from .grouped_outer import grouped_outer
from .operator import Operator
from .shared import products
from .shared.checks import FLOATS, aligned, check_weights, stored
from .shared.grid import barrier_counters, num_programs
from .shared.replays import with_memory
from .shared.tile_product import Tiles, accumulate, stack, tile_pointers


def reference(rank: int, x: list[torch.Tensor], w: list[torch.Tensor], **handle: Any) -> torch.Tensor:
    """What `rank` gets, in fp64."""
    offsets = handle.pop("dispatched.offsets")
    return combined(rank, [grouped.reference(*one) for one in zip(x, w, offsets)], **handle)


def bound(
    exact: Callable[..., torch.Tensor], handed: str, rank: int, dtype: torch.dtype, roundings: int,
    x: list[torch.Tensor], w: list[torch.Tensor], **handle: Any,
) -> tuple[torch.Tensor | float, ...]:  # fmt: skip
    """How far a right result may be off: each rounding to dtype, and one in fp32 for each product and each sum. exact:
    the reference of an operator that adds up experts' products, whose `handed` has each token's rows and weights."""
    weights = handle[f"{handed}.weights"]
    sizes = handle | {f"{handed}.weights": weights and [one.abs() for one in weights]}
    magnitude = exact(rank, [one.abs() for one in x], [one.abs() for one in w], **sizes)
    facts, ranks, (_, k) = torch.finfo(dtype), len(x), handle[f"{handed}.tokens"][0].shape
    terms = x[0].shape[1] + 2 * k + ranks + 4
    # A product or a sum that is too small for dtype is off by half its least number, times a weight.
    most = 1 + max((float(one.max()) for one in sizes[f"{handed}.weights"] or () if one.numel()), default=1)
    tiny = (k * most + 1) * (ranks + 1) * facts.tiny * facts.eps / 2
    return ((roundings * facts.eps / 2 + terms * 2.0**-24) * magnitude + tiny,)


# ------------------------------------------------------------------------------------------------------------- kernel
class Size(NamedTuple):
    """The numbers of a launch."""

    T: Any  # this rank's tokens
    P: Any  # tokens of a rank at most
    R: Any  # rows
    S: Any  # slots
    H: Any  # elements of a row of x
    N: Any  # of the product
    blocks: Any  # of rows, at most
    OWN: tl.constexpr  # experts of a rank
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    ROWS: tl.constexpr  # counted at a time
    COLS: tl.constexpr  # added at a time
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr  # rows of tiles that run over all columns together, and share their rows in L2


class Handle(NamedTuple):
    """Of Dispatched what is read, this rank's."""

    tokens: Any  # int32 (S, K): the rows of the token in each slot, -1 for none
    places: Any  # int32 (T, size): the slot of each token on each rank, -1 for none
    weights: Any  # fp32 (R,), or None
    source: Any  # int32 (R, 3): the rank and token of each row
    offsets: Any  # int32 (OWN + 1,)


class Buffers(NamedTuple):
    """A launch's memory, on every rank. What peers do not access is there, too, so that the simulator watches it."""

    y: Any  # (R, N): the product
    inbox: Any  # (P, size, N): of each token of this rank the sum of each rank
    ready: Any  # int32 (P, size): of each sum the last launch that has stored it
    grid: Any  # int32 (1,): of the grid barrier
    named: Any  # int32 (R,): where in `tokens` each row is named, if tokens says so, too
    left: Any  # int32 (S,): rows of each slot's token that are not there yet
    done: Any  # int32 (blocks,): tiles of each block that are stored


@triton.jit
def matmul_combine_kernel(
    x_ptr,  # (R, H) this rank's, by expert
    w_ptr,  # (OWN, H, N), or (OWN, N, H) if TRANSPOSED, this rank's
    out_ptr,  # (T, N) this rank's
    bar_ptr,  # int32 (programs,) on every rank
    d,  # Handle
    m,  # Buffers
    p,  # Size
    world,
):
    launch = pl.epoch(m.ready, world)
    pl.barrier(bar_ptr + tl.program_id(0), world)  # before overwrite: every rank has read the last launch's sums
    _write_down(d, m, p)
    pl.grid_barrier(m.grid, world)  # publish: rows and counts of all programs
    _multiply(x_ptr, w_ptr, launch, d, m, p, world)
    _collect(out_ptr, launch, d, m, p, world)


@triton.jit
def _write_down(d, m, p):
    """Where each row is named, how many rows each token has, and that no tile is stored."""
    pid = tl.program_id(0)
    MANY: tl.constexpr = max(1, 1024 // p.K2)
    k = tl.arange(0, p.K2)[None, :]
    for start in range(pid * MANY, p.S, tl.num_programs(0) * MANY):
        slot = start + tl.arange(0, MANY)[:, None]
        at = slot * p.K + k
        row = tl.load(d.tokens + at, mask=(slot < p.S) & (k < p.K), other=-1)
        tl.store(m.named + row, at, mask=(row >= 0) & (row < p.R))
        count = tl.sum((row >= 0).to(tl.int32), 1)
        slot = start + tl.arange(0, MANY)
        tl.store(m.left + slot, count, mask=slot < p.S)
    for start in range(pid * 1024, p.blocks, tl.num_programs(0) * 1024):
        block = start + tl.arange(0, 1024)
        tl.store(m.done + block, tl.zeros((1024,), tl.int32), mask=block < p.blocks)


@triton.jit
def _multiply(x_ptr, w_ptr, launch, d, m, p, world):
    """Compute tiles, expert by expert, and send the sums that they complete."""
    e = tl.arange(0, triton.next_power_of_2(p.OWN))
    start = tl.minimum(tl.maximum(tl.load(d.offsets + e, mask=e < p.OWN, other=0), 0), p.R)
    stop = tl.maximum(tl.minimum(tl.load(d.offsets + e + 1, mask=e < p.OWN, other=0), p.R), start)
    blocks = tl.cdiv(stop - start, p.BLOCK_M)
    first = tl.cumsum(blocks) - blocks
    columns = tl.cdiv(p.N, p.BLOCK_N)
    ends = (first + blocks) * columns
    a = stack(x_ptr, 1, p.R, p.H, p.H, p.BLOCK_M, p.BLOCK_K, p.TMA)
    b = _weights(w_ptr, p)
    for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        expert = tl.sum((ends <= tile).to(tl.int32))
        here = e == expert
        before = tl.sum(tl.where(here, first, 0))
        end = tl.sum(tl.where(here, stop, 0))
        inside = tile - before * columns
        group = inside // (p.GROUP * columns) * p.GROUP
        high = tl.minimum(tl.sum(tl.where(here, blocks, 0)) - group, p.GROUP)
        inside = inside % (p.GROUP * columns)
        block = group + inside % high
        row = tl.sum(tl.where(here, start, 0)) + block * p.BLOCK_M
        col = inside // high * p.BLOCK_N
        acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
        if p.TMA:
            acc = accumulate(acc, a, 0, b, expert, p.OWN, row, col, p.R, p.N, p.H, p.H, True, p.TRANSPOSED, p.BLOCK_K)
        else:
            own = b + tl.cast(expert, tl.int64) * p.H * p.N
            acc = accumulate(acc, a, 0, own, 0, 1, row, col, p.R, p.N, p.H, p.H, False, p.TRANSPOSED, p.BLOCK_K)
        ptrs, mask = tile_pointers(m.y, row, col, end, p.N, p.N, p.BLOCK_M, p.BLOCK_N)
        tl.store(ptrs, acc.to(m.y.dtype.element_ty), mask=mask)
        stored = pl.atomic_add(m.done + before + block, 1, world.rank, world, scope="gpu")
        if stored == columns - 1:
            for top in range(row, tl.minimum(row + p.BLOCK_M, end), p.ROWS):
                _count(top, tl.minimum(row + p.BLOCK_M, end), launch, d, m, p, world)


@triton.jit
def _weights(w_ptr, p):
    if p.TRANSPOSED:
        return stack(w_ptr, p.OWN, p.N, p.H, p.H, p.BLOCK_N, p.BLOCK_K, p.TMA)
    else:
        return stack(w_ptr, p.OWN, p.H, p.N, p.N, p.BLOCK_K, p.BLOCK_N, p.TMA)


@triton.jit
def _count(top, end, launch, d, m, p, world):
    """ROWS rows from `top` on are there: send the sums of the tokens of which they are the last ones."""
    row = top + tl.arange(0, p.ROWS)
    at = tl.load(m.named + row, mask=row < end, other=0)
    known = (row < end) & (at >= 0) & (at < p.S * p.K)
    named = known & (tl.load(d.tokens + at, mask=known, other=-1) == row)
    slot = at // p.K
    # Acquires what the programs released that have counted this token's other rows.
    left = pl.atomic_add(m.left + slot, -1, world.rank, world, mask=named, scope="gpu")
    ptx.cta_barrier()  # what one thread has acquired, all may read
    whole = tl.where(named & (left == 1), slot, -1)
    now = tl.max(whole, 0)
    while now >= 0:
        _send(now, launch, d, m, p, world)
        now = tl.max(tl.where(whole < now, whole, -1), 0)


@triton.jit
def _send(slot, launch, d, m, p, world):
    """Store the sum of a slot's rows at the token's rank."""
    k = tl.arange(0, p.K2)
    rows = tl.load(d.tokens + tl.cast(slot, tl.int64) * p.K + k, mask=k < p.K, other=-1)
    source = d.source + 3 * tl.cast(tl.max(rows, 0), tl.int64)
    home = tl.load(source)
    t = tl.load(source + 1)
    place = tl.cast(t, tl.int64) * world.size + world.rank
    for col in range(0, p.N, p.COLS):
        cols = col + tl.arange(0, p.COLS)
        total = tl.zeros((p.COLS,), tl.float32)
        for number in tl.static_range(p.K):
            row = tl.max(tl.where(k == number, rows, -1), 0)
            at = m.y + tl.cast(row, tl.int64) * p.N + cols
            part = tl.load(at, mask=(row >= 0) & (cols < p.N), other=0).to(tl.float32)
            if d.weights is not None:
                part *= tl.load(d.weights + row, mask=row >= 0, other=0)
            total += part
        there = (cols < p.N) & (t < p.P)
        pl.store(m.inbox + place * p.N + cols, total.to(m.y.dtype.element_ty), home, world, mask=there)
    if t < p.P:
        pl.signal(m.ready + place, home, world, value=launch, op="set")  # publish the sum


@triton.jit
def _collect(out_ptr, launch, d, m, p, world):
    """Add the ranks' sums of my tokens."""
    for t in range(tl.program_id(0), p.T, tl.num_programs(0)):
        for rank in range(world.size):
            if tl.load(d.places + t * world.size + rank) >= 0:
                pl.wait(m.ready + t * world.size + rank, launch, world, cmp="eq")
        for col in range(0, p.N, p.COLS):
            cols = col + tl.arange(0, p.COLS)
            total = tl.zeros((p.COLS,), tl.float32)
            for source in tl.static_range(world.size):
                there = tl.load(d.places + t * world.size + source) >= 0
                at = m.inbox + (tl.cast(t, tl.int64) * world.size + source) * p.N + cols
                total += tl.load(at, mask=there & (cols < p.N), other=0).to(tl.float32)
            out = out_ptr + tl.cast(t, tl.int64) * p.N + cols
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=cols < p.N)


def matmul_combine(
    x: torch.Tensor,
    w: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor | None = None,
    *,
    mode: Literal["unfused", "push"] | None = None,
    tiles: Sequence[int] | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Each expert's rows times its matrix, each token's rows times their weights added, where it came from. Collective.

    x: (R, F), a row for each row that `dispatch` has returned. w: (E, F, N) of x's dtype, this rank's experts, at least
    one, or the transposed view of a contiguous (E, N, F). dispatched: what `dispatch` or `dispatch_matmul` has
    returned; `dispatched._replace(weights=None)` adds without weights. out: (T, N) of x's dtype; a new tensor where
    None. Returns `out`, which is what `combine` makes of `grouped_matmul(x, w, dispatched.offsets)`. Sums are in fp32;
    a row's product, and the sum of a rank's rows, are rounded to x's dtype.

    mode: a form that the top of kernels/matmul_combine.py describes; None takes unfused. tiles: of the product, as for
    `grouped_matmul`. tokens_per_rank: a promise that no rank has more tokens, alike on all ranks. With unfused as for
    `combine`; push keeps a place for each of them and each rank, or for R, 64 at least, where None.

    Symmetric memory kept: as `combine`; push the product, and size * tokens_per_rank tokens. Differentiable in x, w and
    the weights, by `dispatch_again`, `grouped_matmul` and `grouped_outer`. Raises ShapeError, DtypeError,
    CollectiveMismatch.
    """
    tokens, places, weights, source, offsets = OPERATOR.handle("dispatched", dispatched, world)
    handle = tokens, places, weights, flat(source), offsets
    return OPERATOR((x, w, *handle, out), (mode, tiles, tokens_per_rank), world)


# --------------------------------------------------------------------------------------------------------------- host
ROWS, ADDED = 64, 1024
"""Rows that a program counts together, and elements that it adds at a time."""


def _plan_unfused(call: Call) -> Launch:
    if not call.sizes["e"]:  # without experts no row has a product
        return lambda *tensors: tensors[-1].zero_()
    world, R, nbytes = call.world, call.sizes["r"], call["n"] * call.dtype.itemsize
    few = rules.chosen("combine", call["tokens_per_rank"], nbytes, call["k"], world.size) == "low_latency"
    multiply = product_of(call, call["x"], False, call.sizes["t"] * call["k"])
    call.settings["num_comm_sms"] = None
    call.tensors["y"] = torch.empty(R, call["n"], dtype=call.dtype, device="meta")
    collect = (plans.plan_low_latency if few else plans.plan_pull)(call)

    def launch(
        x: torch.Tensor, w: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any,
        source: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, y: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        multiply(x, w, offsets, y)
        return collect(y, tokens, places, weights, source, out)

    return with_memory(world, launch, [((R, call["n"]), call.dtype)])


def _plan_push(call: Call) -> Launch:
    """A grid, inboxes and counters."""
    world, R, (E, H, N), (S, K) = call.world, call.sizes["r"], call["w"].shape, call["dispatched.tokens"].shape
    if not R * E * H * N:
        return _plan_unfused(call)
    rows, transposed = stored(call["w"])
    tma, size, most = aligned(call["x"], rows), world.size, plans.tokens_at_most(call)
    tiles: Tiles = call["tiles"] or grouped.default_tiles(R, E, call.dtype, tma)
    blocks, programs = triton.cdiv(R, tiles.block_m) + E, num_programs(world, world.num_sms)
    cols = min(ADDED, triton.next_power_of_2(max(N, 1)))
    constants = E, K, triton.next_power_of_2(max(K, 1)), min(ROWS, tiles.block_m), cols, tma, transposed, *tiles[:4]
    sized = Size(call.sizes["t"], most, R, S, H, N, blocks, *map(tl.constexpr, constants))

    def int32(name: str, n: int) -> torch.Tensor:
        return zeros(max(n, 1), dtype=torch.int32, name=f"matmul_combine.{name}", world=world)

    buffers = world.keep(
        ("matmul_combine", most, N, call.dtype, R, S, blocks),
        lambda: Buffers(
            empty(R, N, dtype=call.dtype, name="matmul_combine.y", world=world),
            empty(max(most, 1), size, max(N, 1), dtype=call.dtype, name="matmul_combine.inbox", world=world),
            signals(max(most, 1) * size, name="matmul_combine.ready", world=world),
            signals(1, name="matmul_combine.grid", world=world),
            int32("named", R), int32("left", S), int32("done", blocks),
        ),
    )  # fmt: skip
    start = cooperative_launch(world, matmul_combine_kernel, (programs,), **tiles.launch_options())
    bar = barrier_counters(world)

    def launch(
        x: torch.Tensor, w: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any,
        source: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        start(x, w, out, bar, Handle(tokens, places, weights, source, offsets), buffers, sized, world.device)
        return out

    return launch


def _shape(call: Call) -> Shape:
    promised = plans.tokens_at_most(call) if call.asked == "push" else call.given.get("tokens_per_rank")
    check_promise(call, "dispatched.places", promised)
    check_weights(call)
    return call.sizes["t"], call["n"]


def _backward(call: Recorded) -> Gradients:
    offsets, weights, world = call["dispatched.offsets"], call["dispatched.weights"], call.world
    handle = SimpleNamespace(**{name: call[f"dispatched.{name}"] for name in ("tokens", "places", "source")})
    handle.weights = weights
    if weights is None:
        handle.weights = torch.ones(call.shape("x")[0], dtype=torch.float32, device=call.grad.device)
    y = None
    if "dispatched.weights" in call.wanted:
        y = grouped.grouped_matmul(call["x"], call["w"], offsets, clear=True, world=world)
    rows, dots = call.operator("dispatch_again", call.grad.contiguous(), handle, y)
    found: dict[str, Any] = {"dispatched.weights": dots}
    if "x" in call.wanted:
        found["x"] = grouped.grouped_matmul(rows, call["w"].transpose(1, 2), offsets, clear=True, world=world)
    if "w" in call.wanted:
        found["w"] = grouped_outer(call["x"], rows, offsets, world=world)
    return found


def _some_offsets(shape: Shape, generator: torch.Generator, call: Call) -> torch.Tensor:
    """Every row is an expert's."""
    inner = torch.randint(0, call["r"] + 1, (shape[0],), generator=generator).sort().values
    inner[0], inner[-1] = 0, call["r"]
    return inner.int()


_ROUTES = tuple(f"dispatched.{name}" for name in ("tokens", "places", "weights", "source", "offsets"))
INT32 = (torch.int32,)
OPERATOR = Operator(
    matmul_combine,
    tensors={
        "x": Operand("r h", FLOATS),
        "w": Operand("e h n", transposed=True, strided=True),
        "dispatched.tokens": Operand("s k", INT32, make=some_rows),
        "dispatched.places": Operand("W*t", INT32, make=some_slots),
        "dispatched.weights": Operand("r", (torch.float32,), optional=True, make=some_weights),
        "dispatched.source": Operand("3*r", INT32, make=some_sources),
        "dispatched.offsets": Operand(lambda call: (call.sizes.get("e", 0) + 1,), INT32, make=_some_offsets),
    },
    result=_shape,
    settings={"tiles": products.tiles, "tokens_per_rank": integer(least=1)},
    forms={
        "unfused": Form(
            _plan_unfused, "the grouped product, and then combine", "the product's sums that leave, once a token",
            settings={"tiles": None, "tokens_per_rank": None}, roundings=lambda size: 3, small=products.SMALL,
        ),
        "push": Form(
            _plan_push, "a token's sum goes home when its last row is there",
            "the product's sums that leave, once a token",
            settings={"tiles": None, "tokens_per_rank": None}, roundings=lambda size: 3, small=products.SMALL,
        ),
    },
    reference=reference,
    bound=functools.partial(bound, reference, "dispatched"),
    backward=Backward(
        _backward,
        "`dispatch_again` of the gradient, then `grouped_matmul` with w transposed, and `grouped_outer`; of the "
        "weights the product once more",
        saves={"x": (*_ROUTES, "w"), "w": (*_ROUTES, "x"), "dispatched.weights": (*_ROUTES, "x", "w")},
    ),
    private="t",
    most={"k": 16},
    least={"e": 1},
    always=True,
    cases=(
        Case(
            {"r": 7, "h": 4, "e": 2, "n": 4, "s": 7, "k": 1, "t": 2},
            arguments={"mode": "push", "given": ("dispatched.weights",)}, ranks=2, out="given",
            large={"r": 64, "h": 512, "e": 8, "n": 256, "s": 64, "k": 8, "t": 8},
        ),
        Case(
            {"r": 40, "h": 16, "e": 3, "n": 20, "s": 20, "k": 3, "t": 9},
            arguments={"mode": "unfused", "given": ("dispatched.weights",)}, ranks=2, explore=False,
        ),
        Case(
            {"r": 40, "h": 16, "e": 3, "n": 20, "s": 20, "k": 3, "t": 9},
            arguments={"mode": "push", "given": ("dispatched.weights",)}, ranks=2, explore=False,
        ),
    ),
)  # fmt: skip
