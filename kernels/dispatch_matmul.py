"""Dispatch and the first product of the experts: tokens arrive in the order of experts, and are multiplied.

unfused: `dispatch` and then `grouped_matmul`, as two launches. The form of dispatch is the one that it would take.
push: one launch. Dispatch's push runs in it, and tokens leave in the order of their first experts on the rank that they
    go to. Rows that have been placed are counted by blocks, and a tile of the product begins when its rows are there:
    1. Some programs send this rank's tokens, the others place this rank's own tokens into their rows.
    2. Some of those place the other ranks' tokens as they arrive.
    3. Every program that has nothing to move claims tiles from a queue, expert by expert.

Why in that order: if a token has two of a rank's E experts, chosen at random, then the rank's first e experts have all
their rows when 1 - (1 - e / E)^2 of its tokens have come. In their own order each expert has all its rows at the end.
So a product that takes twice as long as the links waits for its first rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from . import grouped_matmul as grouped
from .declaration import Call, Case, Form, Launch, Operand, Shape, integer, making
from .dispatch import Dispatched, arrivals, push, rules
from .dispatch.examples import some_experts
from .dispatch.host import OPERATOR as DISPATCH
from .dispatch.plans import plan_low_latency, plan_push_with_routes, pushed, routes_of
from .dispatch.reference import reference as dispatched
from .dispatch.reference import undefined
from .dispatch.result import check_alignment, check_promise, slots_of
from .gradients import Backward, Gradients, Recorded
from .grouped_outer import grouped_outer
from .operator import Operator
from .shared import products
from .shared.checks import FLOATS, aligned, check_weights, stored
from .shared.expert_tiles import clear_from, ends_of, find
from .shared.grid import num_programs
from .shared.replays import with_memory
from .shared.tile_product import Tiles, accumulate, stack, tile_pointers

MOVERS = 24
"""Programs of push that send, by default, and as many that place what arrives. With 16, 32 and 48 it takes up to 4 %
longer for 8,192 and 32,768 tokens on 4 H200 (`dispatch_matmul_tried.json`)."""
RESULTS = slice(4, 13)
"""The places of dispatch's results, without scales, and of the product among a call's tensors."""


def reference(
    rank: int, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor], max_tokens: int, alignment: int, clear: bool | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What `rank` gets: what dispatch returns, and the product in fp64."""
    there = dispatched(rank, x, topk_idx, topk_weights, len(x) * len(w[0]), max_tokens, alignment)
    rows, offsets = there[0].double(), there[3].tolist()
    parts = [rows[a:b] @ one.double() for a, b, one in zip(offsets, offsets[1:], w[rank])]
    after = rows.new_zeros(len(rows) - offsets[-1], w[rank].shape[2])
    return *there, torch.cat([*parts, after])


def bound(rank: int, dtype: torch.dtype, roundings: int, **operands: Any) -> tuple[torch.Tensor | float, ...]:
    """How far right results may be off: the product by a rounding in fp32 a term and one to dtype, the rest by nothing;
    by anything in rows after the last expert's that are not cleared."""
    sizes = operands | {name: [one.abs() for one in operands[name]] for name in ("x", "w")}
    product = reference(rank, **sizes)[-1]
    facts, (_, terms) = torch.finfo(dtype), operands["x"][0].shape
    limit = (roundings * facts.eps / 2 + (terms + 2) * 2.0**-24) * product + facts.tiny * facts.eps / 2
    own = {name: value for name, value in operands.items() if name != "w"}
    rows, *others = undefined(rank, dtype, roundings, **own, num_experts=len(own["x"]) * len(operands["w"][0]))
    anything = torch.isinf(rows).all(1, keepdim=True)
    return rows, *others, torch.where(anything, float("inf"), limit)


# ------------------------------------------------------------------------------------------------------------- kernel
class Product(NamedTuple):
    """What the tiles need beside dispatch's arguments."""

    w: Any  # (OWN, H, N), or (OWN, N, H) if TRANSPOSED, this rank's
    out: Any  # (R, N) this rank's
    queue: Any  # int32 (1,): tiles that programs have claimed
    N: Any
    PLACERS: tl.constexpr  # programs that place the other ranks' tokens
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr  # rows of tiles that run over all columns together, and share their rows in L2


@triton.jit
def dispatch_matmul_kernel(
    x_ptr,  # (T, H) this rank's
    idx_ptr,  # int32 or int64 (T, K) this rank's
    w_ptr,  # fp32 (T, K) this rank's: weights of the tokens' experts
    s_ptr,  # None: tokens have no scales
    to,  # dispatch's Result
    routes_ptr,  # int32 (T, K) this rank's
    arrived,  # Arrived, this rank's
    t,  # Product
    m,  # dispatch's Buffers
    p,  # dispatch's Size
    world,
):
    pid = tl.program_id(0)
    arrivals.forget(arrived)
    if pid == 0:
        tl.store(t.queue, 0)
    launch, half, room = push.begin(idx_ptr, to, routes_ptr, m, p, world)  # its barriers publish these zeros
    alone = tl.num_programs(0) == 1
    if pid < p.SENDERS:
        push.send(x_ptr, idx_ptr, w_ptr, s_ptr, half, room, launch, to, routes_ptr, m, p, world)
    if (pid >= p.SENDERS) | alone:
        first = 0 if alone else pid - p.SENDERS
        step = 1 if alone else tl.num_programs(0) - p.SENDERS
        own, last = push.tasks(half, room, p, world)
        push.place(
            x_ptr, idx_ptr, w_ptr, s_ptr, half, launch, first, step, own, t.PLACERS, last, to, routes_ptr, arrived, m,
            p, world,
        )  # fmt: skip
        if first < t.PLACERS:
            push.fill(half, room, first, t.PLACERS, to, arrived, p, world)
    _multiply(to, arrived, t, p, world)
    if p.CLEAR:
        clear_from(tl.load(to.offsets + p.OWN), t.out, p.R, t.N)


@triton.jit
def _multiply(to, arrived, t, p, world):
    """Claim tiles, wait for their rows, and store them."""
    columns = tl.cdiv(t.N, t.BLOCK_N)
    ends = ends_of(to.offsets, p.OWN, p.R, columns, triton.next_power_of_2(p.OWN), t.BLOCK_M)
    rows = tl.load(to.offsets + p.OWN)
    b = _weights(t, p)
    tile = tl.atomic_add(t.queue, 1, sem="relaxed", scope="gpu")
    while tile < tl.max(ends):
        expert, row, col, stop = find(
            tile, ends, to.offsets, p.OWN, p.R, columns, t.BLOCK_M, t.BLOCK_N, t.GROUP
        )  # fmt: skip
        arrivals.wait(row, tl.minimum(row + t.BLOCK_M, stop), rows, arrived, world)
        # Up to the expert's last row: later ones may still be written.
        a = stack(to.rows, 1, stop, p.H, p.H, t.BLOCK_M, t.BLOCK_K, t.TMA)
        acc = tl.zeros((t.BLOCK_M, t.BLOCK_N), tl.float32)
        if t.TMA:
            acc = accumulate(acc, a, 0, b, expert, p.OWN, row, col, stop, t.N, p.H, p.H, True, t.TRANSPOSED, t.BLOCK_K)
        else:
            w = b + tl.cast(expert, tl.int64) * p.H * t.N
            acc = accumulate(acc, a, 0, w, 0, 1, row, col, stop, t.N, p.H, p.H, False, t.TRANSPOSED, t.BLOCK_K)
        ptrs, mask = tile_pointers(t.out, row, col, stop, t.N, t.N, t.BLOCK_M, t.BLOCK_N)
        tl.store(ptrs, acc.to(t.out.dtype.element_ty), mask=mask)
        tile = tl.atomic_add(t.queue, 1, sem="relaxed", scope="gpu")


@triton.jit
def _weights(t, p):
    if t.TRANSPOSED:
        return stack(t.w, p.OWN, t.N, p.H, p.H, t.BLOCK_N, t.BLOCK_K, t.TMA)
    else:
        return stack(t.w, p.OWN, p.H, t.N, t.N, t.BLOCK_K, t.BLOCK_N, t.TMA)


def dispatch_matmul(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    max_tokens: int,
    alignment: int = 1,
    clear: bool | None = None,
    mode: Literal["unfused", "push"] | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    tokens_per_rank: int | None = None,
    world: World | None = None,
) -> tuple[Dispatched, torch.Tensor]:
    """The tokens that have chosen this rank's experts, times these experts' matrices. Collective.

    x: (T, H), topk_idx: (T, K), topk_weights: (T, K), max_tokens: R, alignment, clear and out: as for `dispatch`. w:
    (E, H, N) of x's dtype, this rank's experts, or the transposed view of a contiguous (E, N, H); E at least 1 and
    alike on all ranks, rank r has experts r * E to (r + 1) * E - 1. Returns (dispatched, product): what `dispatch`
    returns, and a new (R, N) of x's dtype, row by row what `grouped_matmul` makes of dispatched.rows; clear applies to
    both. Sums are in fp32.

    mode: a form that the top of kernels/dispatch_matmul.py describes; None takes push where dispatch takes long beside
    the product. num_comm_sms: with push, programs that send, and as many more that place what arrives. tiles: of the
    product, as for `grouped_matmul`. tokens_per_rank: as for `dispatch`.

    Symmetric memory kept: as `dispatch`, and with push an int32 for each block of rows. Differentiable in x,
    topk_weights and w, by `combine`, `grouped_matmul` and `grouped_outer`. Raises ShapeError, DtypeError,
    CollectiveMismatch.
    """
    clear = torch.is_grad_enabled() if clear is None else clear
    keywords = max_tokens, alignment, clear, mode, num_comm_sms, tiles, tokens_per_rank
    *there, product = OPERATOR((x, topk_idx, topk_weights, w, out), keywords, world)
    return Dispatched(*there), product


# --------------------------------------------------------------------------------------------------------------- host
def _plan_unfused(call: Call) -> Launch:
    if not call.sizes["e"]:
        return _nobody(call.world.rank)
    call.settings |= {"num_comm_sms": None, "tokens_per_rank": call.given.get("tokens_per_rank")}
    nbytes = call["h"] * call.dtype.itemsize
    few = rules.chosen("dispatch", call["tokens_per_rank"], nbytes, call["k"], call.world.size) == "low_latency"
    move = (plan_low_latency if few else plan_push_with_routes)(call)
    # A rank's experts have as many rows as its tokens have experts, if tokens choose at random.
    multiply = product_of(call, call["out"], bool(call["clear"]), call.sizes["t"] * call.sizes["k"])

    def launch(*tensors: Any) -> Any:
        (x, idx, weights, w), (*there, product), routes = tensors[:4], tensors[RESULTS], tensors[RESULTS.stop :]
        move(x, idx, weights, there[0], None, *there[1:], there[-1], *routes)  # there[-1] stands for scales
        multiply(there[0], w, there[3], product)
        return tensors[RESULTS]

    return with_memory(call.world, launch, [] if few else routes_of(call))


def _nobody(rank: int) -> Launch:
    """Without experts no token goes anywhere."""

    def launch(*tensors: Any) -> Any:
        for result, value in zip(tensors[4:], (0, 0, 0, 0, -1, -1, -1, 0, 0)):
            result.fill_(value)
        tensors[-2][1] = rank  # of `needed`
        return tensors[4:]

    return launch


def product_of(call: Call, x: torch.Tensor, clear: bool, expected: int) -> Callable[..., Any]:
    """launch(x, w, offsets, out) of the product of rows like x and of w. expected: how many rows experts have."""
    w, (M, K) = call["w"], x.shape
    if not M * w.shape[2]:
        return lambda x, w, offsets, out: out
    if not K:
        return lambda x, w, offsets, out: out.zero_()
    rows, transposed = stored(w)
    tiles = call["tiles"] or grouped.default_tiles(min(M, expected), w.shape[0], call.dtype, aligned(x, rows))
    return grouped.planned(call.world, x, w, transposed, tiles, clear)


def _plan_push(call: Call) -> Launch:
    """A grid, dispatch's buffers, and counters of blocks."""
    world, R, E, N = call.world, call.sizes["r"], call.sizes["e"], call.sizes["n"]
    if not R * E * call["h"] * N:
        return _plan_unfused(call)
    tiles, programs = _tiles(call), num_programs(world, world.num_sms)
    start, sized, buffers = pushed(call, dispatch_matmul_kernel, tiles.launch_options(), MOVERS, sort=True)
    routes = making(routes_of(call), world.torch_device)
    rows, transposed = stored(call["w"])
    blocks = triton.cdiv(R, tiles.block_m)
    counts, queue = world.keep(
        ("dispatch_matmul", blocks),
        lambda: (
            signals(blocks, name="dispatch_matmul.arrived", world=world),
            empty(1, dtype=torch.int32, name="dispatch_matmul.queue", world=world),
        ),
    )
    arrived = arrivals.Arrived(counts, blocks, tl.constexpr(tiles.block_m))
    senders = sized.SENDERS.value
    placers = min(senders, max(1, programs - senders))
    constants = tuple(map(tl.constexpr, (placers, _reaches(call, rows), transposed, *tiles[:4])))

    def launch(*tensors: Any) -> Any:
        x, idx, weights, w, *there, product = tensors
        results = (*there, there[-1])  # which stands for scales
        t = Product(w, product, queue, N, *constants)
        start(x, idx, weights, None, results, *routes(), arrived, t, buffers, sized)
        return tensors[4:]

    return launch


def _reaches(call: Call, w: torch.Tensor) -> bool:
    """Whether TMA reaches the rows, and the weights as they lie in memory."""
    return aligned(call["out"], w)


def _tiles(call: Call) -> Tiles:
    given: Tiles | None = call["tiles"]
    rows = stored(call["w"])[0]
    return given or grouped.default_tiles(call.sizes["r"], call["w"].shape[0], call.dtype, _reaches(call, rows))


MULTIPLIED, LOADED = 6.9e14, 4.2e12
"""FLOP a second of the grouped product, and bytes of its weights."""
SHARES = (0.25, 0.85)
"""Of the product's time: a dispatch that takes less or more is not hidden. Where it takes 0.15 to 0.17, push takes 0.98
to 1.03 times as long as unfused on 2 H200, and 1.05 to 1.11 on 2 H100. Where it takes 0.37 to 0.42, push takes 0.88 to
0.9 on 4 H200 (`dispatch_matmul_tried.json`, `dispatch_matmul_2.json`). Larger shares were not measured. Beside
the product the programs that move need more time than dispatch does alone, so from 0.85 on they would be the limit."""


def default(call: Call) -> str:
    """push, where the time of a dispatch that it hides is not small beside the product's."""
    sizes, world = call.sizes, call.world
    weights = sizes["e"] * sizes["h"] * sizes["n"]
    if world.size == 1 or not weights:
        return "unfused"
    tokens = call.given.get("tokens_per_rank") or call.greatest("t", alone=True)
    nbytes = sizes["h"] * call.dtype.itemsize
    moved = rules.predicted("dispatch", tokens, nbytes, sizes["k"], world.size)["push"].total
    pairs = tokens * sizes["k"]
    multiplied = max(2 * pairs * sizes["h"] * sizes["n"] / MULTIPLIED, weights * call.dtype.itemsize / LOADED)
    hidden = SHARES[0] < moved / multiplied < SHARES[1]
    return "push" if hidden and pairs > grouped.FEW_ROWS * sizes["e"] else "unfused"


def _experts(call: Call) -> int:
    """Of all ranks."""
    return call["e"] * call.world.size


def _bound_result(call: Call) -> Shape:
    """The shape of the rows, and the letters of the further results."""
    R, experts, slots = call["max_tokens"], _experts(call), slots_of(call["max_tokens"], call.world.size)
    check_promise(call, "x", call.given.get("tokens_per_rank"))
    check_weights(call)
    check_alignment(call, experts)
    call.sizes |= {"r": R, "ends": call["e"] + 1, "s": slots, "two": 2, "three": 3, "num_experts": experts}
    return R, call["h"]


def _backward(call: Recorded) -> Gradients:
    of_rows, of_weights, *_, grad = call.grads
    grad, world = grad.contiguous(), call.world
    promised = {"tokens_per_rank": call["tokens_per_rank"]}
    found: dict[str, Any] = {}
    if "w" in call.wanted:
        if any(call.turned("w")):
            found["w"] = grouped_outer(grad, call["out"], call["offsets"], world=world).transpose(1, 2)
        else:
            found["w"] = grouped_outer(call["out"], grad, call["offsets"], world=world)
    if "x" in call.wanted:
        back, expected = call["w"].transpose(1, 2), call.shape("x")[0] * call.shape("topk_idx")[1]
        rows = grouped.grouped_matmul(grad, back, call["offsets"], clear=False, expected=expected, world=world)
        found["x"] = call.operator("combine", rows + of_rows, routes(call), **promised)
    if "topk_weights" in call.wanted:
        number = torch.arange(call["tokens"].shape[1], dtype=torch.int32, device=grad.device)
        spread = torch.where(call["source"][:, 2:] == number, of_weights[:, None], 0)
        found["topk_weights"] = call.operator("combine", spread, routes(call), **promised)
    return found


def routes(call: Recorded) -> Any:
    """As much of a `Dispatched` as combine reads."""
    return SimpleNamespace(weights=None, **{name: call[name] for name in ("tokens", "places", "source")})


_FEW = {"max_tokens": 40, "alignment": 2, "clear": True}
OPERATOR = Operator(
    dispatch_matmul,
    tensors={
        "x": Operand("t h", FLOATS),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=some_experts(lambda call: max(1, _experts(call)))),
        "topk_weights": DISPATCH.tensors["topk_weights"],
        "w": Operand("e h n", transposed=True, strided=True),
    },
    result=_bound_result,
    also={**{n: o for n, o in DISPATCH.also.items() if n != "row_scales"}, "product": Operand("r n")},
    arguments={name: check for name, check in DISPATCH.arguments.items() if name != "num_experts"},
    settings={
        "num_comm_sms": integer(least=1), "tiles": products.tiles, "tokens_per_rank": integer(least=1),
    },
    forms={
        "unfused": Form(
            _plan_unfused, "dispatch, and then the grouped product", "x of tokens that leave, once a rank",
            settings={"tiles": None, "tokens_per_rank": None}, small=products.SMALL,
        ),
        "push": Form(
            _plan_push, "a tile begins when its rows are there", "x of tokens that leave, once a rank",
            settings={"num_comm_sms": None, "tiles": None, "tokens_per_rank": None}, small=products.SMALL,
        ),
    },
    default=default,
    reference=reference,
    bound=bound,
    backward=Backward(
        _backward,
        "`combine` of the product's gradient times w transposed, and `grouped_outer`",
        saves={
            "x": ("tokens", "places", "source", "offsets", "w"), "w": ("out", "offsets"),
            "topk_weights": ("tokens", "places", "source"),
        },
    ),
    private="t",
    most={"k": 16},
    least={"e": 1},
    always=True,
    cases=(
        Case(
            {"t": 2, "h": 3, "k": 2, "e": 2, "n": 4}, arguments=_FEW | {"mode": "push"}, ranks=2,
            large={"t": 8, "h": 512, "k": 8, "e": 8, "n": 256},
        ),
        Case({"t": 5, "h": 16, "k": 2, "e": 2, "n": 20}, arguments=_FEW | {"mode": "unfused"}, ranks=2, explore=False),
    ),
)  # fmt: skip
