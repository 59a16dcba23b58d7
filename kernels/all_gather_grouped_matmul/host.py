"""All-gather and the first product of experts that all ranks share: every rank has some columns of every expert.

Every rank gets all ranks' tokens, and multiplies each with its experts' columns that the rank has. Rows of the product
are by expert, then by source rank and token, in every run and on all ranks. Choices and weights of all ranks are
gathered first, in flagged words where they are few, and sorted by two small kernels, see sorting.py. Counts and offsets
stay on the device.

unfused: all-gather, a copy of each token for each of its experts, and `grouped_matmul`.
push: one launch behind the sort, see push.py. Tiles begin with this rank's own tokens, while those of the others
    arrive, and take tokens from where they lie. A tile has the tokens of one rank, so an expert may have W tiles that
    are not full. On 2 x H100 with 256 experts it took 1.7 to 1.9 times as long as unfused for 256 to 4096 tokens, and
    0.97 times for 16384 (`benchmarks/results/all_gather_grouped_matmul_2.json`), so it is not the default.

(W - 1) * T * (H * itemsize + 8 * K) bytes leave and enter each rank, for T tokens of H elements with K experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.replay import replayed
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.world import World

from .. import grouped_matmul as grouped
from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import MAX_INT, Call, Case, Form, Launch, Operand, Shape, flag, integer
from ..dispatch.examples import some_experts, some_weights
from ..gradients import Backward, Gradients, Recorded
from ..grouped_outer import grouped_outer
from ..operator import Operator
from ..shared import products
from ..shared.checks import FLOATS, aligned, check_weights, stored
from ..shared.grid import COPY_BYTES, barrier_counters, num_programs
from ..shared.replays import with_memory
from ..shared.tile_product import Tiles
from ..shared.unfused import plain
from . import sorting
from .push import Push, push_kernel
from .reference import bound, reference
from .result import Gathered

SENDERS = 24
"""Programs that send, by default: as many as dispatch's."""
MOST_CHUNK = 32
"""Tokens between two signals, at most."""
MOST_ROWS = 1 << 30
"""Of the product, so that an int32 counts them."""


def all_gather_grouped_matmul(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    clear: bool | None = None,
    mode: Literal["unfused", "push"] | None = None,
    num_comm_sms: int | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> Gathered:
    """All ranks' tokens, each times this rank's columns of its experts' matrices. Collective.

    x: (T, H), this rank's tokens; T alike on all ranks. topk_idx: int32 or int64 (T, K), K up to 16, the experts of
    each token; -1, or any number that is no expert's, for none. topk_weights: fp32 (T, K); the product is without them,
    and `grouped_matmul_reduce_scatter` takes them from the result. w: (E, H, N) of x's dtype, this rank's N columns of
    every expert, at least one, or the transposed view of a contiguous (E, N, H). out: (size * T * K, N) of x's dtype
    for the product; a new tensor where None. clear: whether rows of the product behind the last expert's become zeros,
    as functions of torch need that compute with them; they are not written otherwise. None: they do where gradients are
    enabled. It is alike on all ranks. Returns `Gathered`: the product by expert, and what tells which token a row is;
    with the same tiles it is the same in both forms, bit by bit. `pkt.grouped_activation` takes its product and
    offsets. Sums are in fp32. The host waits for nothing, so a CUDA graph replays with other routing.

    mode: a form that the top of kernels/all_gather_grouped_matmul/host.py describes; None takes unfused. num_comm_sms:
    with push, programs that send before they multiply. tiles: of the product, as for `grouped_matmul`.

    Symmetric memory kept: for the sort 12 bytes for each of the size * T * K choices; besides, unfused as `all_gather`
    of x, and push size * T tokens. Differentiable in x, topk_weights and w, by `grouped_matmul_reduce_scatter`,
    `reduce_scatter` and `grouped_outer`. Raises ShapeError, DtypeError, CollectiveMismatch, Unsupported.
    """
    clear = torch.is_grad_enabled() if clear is None else clear
    tensors = x, topk_idx, topk_weights, w, out
    return Gathered(*OPERATOR(tensors, (clear, mode, num_comm_sms, tiles), world))


# --------------------------------------------------------------------------------------------------------------- host
def _plan_unfused(call: Call) -> Launch:
    world, size, x, w = call.world, call.world.size, plain(call["x"]), plain(call["w"])
    (T, H), (E, _, N), R = x.shape, w.shape, call.sizes["r"]
    sort, spread = sorting.planned(call, ALL_GATHER.planned), sorting.spreading(call)

    def new(rows: int) -> torch.Tensor:
        return torch.empty(rows, H, dtype=x.dtype, device=x.device)

    gather = ALL_GATHER.planned(world, x, new(size * T)) if T * H else None
    multiply = None
    if R * E * H * N:
        some, (lies, transposed) = new(R), stored(w)
        tiles = call["tiles"] or grouped.default_tiles(R, E, call.dtype, aligned(some, lies))
        multiply = grouped.planned(world, some, w, transposed, tiles, bool(call["clear"]))

    def launch(
        x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, w: torch.Tensor, product: torch.Tensor, *others: Any
    ) -> Any:
        whole, *to, rows = others
        found = sort(plain(idx), plain(weights), sorting.Routes(*to))
        if gather is not None:
            gather(plain(x), whole)
        if multiply is not None:
            spread(whole, found, to[1], rows)
            multiply(rows, plain(w), to[1], plain(product))
        else:
            plain(product).zero_()
        return product, whole, *to

    return with_memory(world, launch, [((R, H), x.dtype)])


def _plan_push(call: Call) -> Launch:
    """A grid, an inbox and counters."""
    world, size, R, dtype = call.world, call.world.size, call.sizes["r"], call.dtype
    (T, H), (E, _, N) = call["x"].shape, call["w"].shape
    if not R * E * H * N:
        return _plan_unfused(call)
    sort, (w, transposed) = sorting.planned(call, ALL_GATHER.planned), stored(call["w"])
    tma = aligned(w)
    tiles: Tiles = call["tiles"] or grouped.default_tiles(R, E * size, dtype, tma)
    programs = num_programs(world, world.num_sms)
    senders = min(call["num_comm_sms"] or SENDERS, programs)
    chunk = max(1, min(MOST_CHUNK, triton.cdiv(T * (size - 1), senders)))
    cols = min(1024, triton.next_power_of_2(H))
    rows = min(triton.next_power_of_2(chunk), max(1, COPY_BYTES // (cols * dtype.itemsize)))
    inbox, ready = world.keep(
        ("all_gather_grouped_matmul", T, H, dtype, chunk),
        lambda: (
            empty(size * T, H, dtype=dtype, name="all_gather_grouped_matmul.inbox", world=world),
            signals(size, name="all_gather_grouped_matmul.ready", world=world),
        ),
    )
    bar, constants = barrier_counters(world), (E, chunk, senders, bool(call["clear"]), rows, cols, tma, transposed)
    numbers = T, H, N, R, *map(tl.constexpr, (*constants, *tiles[:4]))
    start = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options())

    def launch(
        x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, w: torch.Tensor, product: torch.Tensor, *others: Any
    ) -> Any:
        whole, *to = others
        found = sort(plain(idx), plain(weights), sorting.Routes(*to))
        start(Push(x, w, product, whole, inbox, ready, bar, *found, *numbers), world.device)
        return product, *others

    return replayed(world, launch)


def _fits_push(call: Call) -> str:
    """Offsets inside of a rank's tokens are 32-bit."""
    elements = call["t"] * call["h"]
    return f"{elements} elements of x, and at most {MAX_INT} fit" if elements > MAX_INT else ""


def _bound_result(call: Call) -> Shape:
    """The shape of the product, and the letters of the further results."""
    size, R = call.world.size, call.world.size * call.sizes["t"] * call.sizes["k"]
    if R > MOST_ROWS:
        raise call.refuse("topk_idx", f"{R} pairs of all ranks' tokens and experts", f"at most {MOST_ROWS}")
    check_weights(call)
    call.sizes |= {"r": R, "whole": size * call.sizes["t"], "ends": call.sizes["e"] + 1, "three": 3}
    return R, call["n"]


def _backward(call: Recorded) -> Gradients:
    grad, of_whole, of_weights, *_ = call.grads
    found: dict[str, Any] = {}
    if "w" in call.wanted:
        T = call.shape("x")[0]
        token = (call["source"][:, 0] * T + call["source"][:, 1]).clamp(min=0)
        rows = call["gathered"].index_select(0, token)
        found["w"] = grouped_outer(rows, grad.contiguous(), call["offsets"], world=call.world)
    if "x" in call.wanted:
        routes = {name: call[name] for name in ("tokens", "places", "source", "offsets")}
        handle = SimpleNamespace(**routes, weights=None)
        back = call["w"].transpose(1, 2)
        sums = call.operator("grouped_matmul_reduce_scatter", grad.contiguous(), back, handle)
        found["x"] = sums + call.operator("reduce_scatter", of_whole.contiguous())
    if "topk_weights" in call.wanted:
        tokens = call["tokens"]
        every = torch.where(tokens >= 0, of_weights[tokens.clamp(min=0).long()], 0)
        found["topk_weights"] = call.operator("reduce_scatter", every)
    return found


INT32 = (torch.int32,)
LARGE = {"t": 256, "h": 512, "k": 8, "e": 8, "n": 256}
FEW_TILES = {"tiles": (16, 64, 64)}
MOVES = "(W - 1) (|x| + 8 bytes for each expert of a token)"
OPERATOR = Operator(
    all_gather_grouped_matmul,
    tensors={
        "x": Operand("t h", FLOATS),
        "topk_idx": Operand("t k", (torch.int64, torch.int32), make=some_experts(lambda call: max(1, call["e"]))),
        "topk_weights": Operand("t k", (torch.float32,), make=some_weights),
        "w": Operand("e h n", transposed=True, strided=True),
    },
    result=_bound_result,
    also={
        "gathered": Operand("whole h"), "weights": Operand("r", (torch.float32,)), "offsets": Operand("ends", INT32),
        "source": Operand("r three", INT32), "tokens": Operand("whole k", INT32), "places": Operand("W*t", INT32),
    },
    arguments={"clear": flag},
    settings={"num_comm_sms": integer(least=1), "tiles": products.tiles},
    forms={
        "unfused": Form(
            _plan_unfused, "all-gather, a copy for each expert, and the grouped product", MOVES,
            settings={"tiles": None}, small=products.SMALL,
        ),
        "push": Form(
            _plan_push, "a tile begins when its rank's tokens are there", MOVES, fits=_fits_push,
            settings={"num_comm_sms": None, "tiles": None}, small=FEW_TILES,
        ),
    },
    reference=reference,
    bound=bound,
    backward=Backward(
        _backward,
        "of x `grouped_matmul_reduce_scatter` with w transposed, and `reduce_scatter`; of w `grouped_outer`; of the "
        "weights `reduce_scatter`",
        saves={
            "x": ("tokens", "places", "source", "offsets", "w"), "w": ("gathered", "source", "offsets"),
            "topk_weights": ("tokens",),
        },
    ),
    most={"k": 16},
    least={"e": 1},
    always=True,
    cases=(
        Case(
            {"t": 2, "h": 3, "k": 2, "e": 2, "n": 4}, arguments={"clear": True, "mode": "push"}, ranks=2,
            large=LARGE,
        ),
        Case(
            {"t": 5, "h": 16, "k": 2, "e": 3, "n": 20}, arguments={"clear": False, "mode": "unfused"}, explore=False,
            large=LARGE,
        ),
    ),
)  # fmt: skip
