"""A layer of experts: tokens go to their experts' ranks, through two products with an activation between, and home.

It is made of `dispatch` and `grouped_matmul`, or `dispatch_matmul`, and `grouped_activation`, `grouped_matmul` and
`combine`, each a call of its own. So its gradients are theirs, and it is no entry of the registry: it has no kernel, no
form and no buffer to declare. Nothing here reads the rows after the last expert's, so nobody writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pkt.errors import Closed, DtypeError, ShapeError, Unsupported
from pkt.runtime.world import World, named_world
from pkt.wording import found_text, value_text

from . import gradients, grouped_gradients
from .agreement import world_of
from .combine import combine
from .declaration import MAX_INT
from .dispatch import dispatch
from .dispatch_matmul import dispatch_matmul
from .grouped_activation import ACTIVATIONS as FUNCTIONS
from .grouped_activation import grouped_activation
from .grouped_matmul import grouped_matmul
from .shared.checks import FLOATS
from .shared.tile_product import GatedEpilogue, finished

ACTIVATIONS = (*FUNCTIONS, "none")
MOST_CHOICES = 16
"""Experts of a token, as for `dispatch`."""


def reference(
    rank: int, x: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor],
    w1: Sequence[torch.Tensor], w2: Sequence[torch.Tensor], activation: GatedEpilogue = "swiglu",
    fits: Sequence[bool] | None = None,
) -> torch.Tensor:  # fmt: skip
    """What `rank` gets, in fp64, from the tensors of all ranks. fits: whether each rank has room for its rows."""
    own, out = len(w1[0]), torch.zeros(x[rank].shape[0], w2[0].shape[2], dtype=torch.float64)
    for t, experts in enumerate(topk_idx[rank].tolist()):
        for k, expert in enumerate(experts):
            at, number = divmod(expert, own)
            if 0 <= at < len(x) and (fits is None or fits[at]):
                hidden = finished(x[rank][t : t + 1].double() @ w1[at][number].double(), None, activation)
                y = (hidden @ w2[at][number].double())[0]
                out = out.index_add(0, torch.tensor([t]), (topk_weights[rank][t, k].double() * y)[None])
    return out


def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: GatedEpilogue = "swiglu",
    *,
    shared: Sequence[torch.Tensor] | None = None,
    max_tokens: int | None = None,
    tokens_per_rank: int | None = None,
    needed: torch.Tensor | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Each token's experts' results, times their weights, added: a layer of experts that the ranks share. Collective.

    For each of its experts e a token x gets topk_weights * (act(x @ w1[e]) @ w2[e]). x: (T, H), this rank's tokens.
    topk_idx: int32 or int64 (T, K), -1 for none; topk_weights: fp32 (T, K), as for `dispatch`. w1: (E, H, N) and
    w2: (E, F, G), of x's dtype, this rank's experts, or transposed views as for `grouped_matmul`; E alike on all ranks,
    rank r has experts r * E to (r + 1) * E - 1. activation: "swiglu", with N = 2 * F, where the columns of w1 are gate
    and up in turn, as `pkt.interleave` lays them; or "silu", "gelu", "relu", "none" with N = F. shared: (w1, w2) of an
    expert for all tokens, (H, N) and (F, G), which every rank has and applies to its own tokens. Returns (T, G) of x's
    dtype. The rows that an expert gets and each product are in x's dtype; sums are in fp32, as `combine` says.

    max_tokens: R, the rows for which every rank has room. None is for size * T * K, with which nothing overflows; then
    all ranks need the same T. If a rank would need more than R, its experts do nothing in this call: their part of each
    result is 0. tokens_per_rank: a promise, alike on all ranks, that no rank has more tokens; few tokens then travel by
    the low-latency forms of `dispatch` and `combine`, and it bounds the memory that these keep; without max_tokens it
    is T. needed: int32 (2,) on the device, or None; the rows that this rank needed, and the rank,
    are copied to it, so that the host can look later. The host waits for nothing, so a CUDA graph replays with other
    routing.

    Memory, in elements of x's dtype: R * (H + N + F + G) for the rows between the calls, each layer's as long as its
    backward pass needs them. Symmetric memory that all layers of these sizes share: about S * (H + G), and for backward
    passes S * G more, and S * H where H is not G; S is R, or size * tokens_per_rank if that is less. Differentiable in
    x, topk_weights, w1, w2 and shared, with the gradients of the sum of all ranks' losses. Raises ShapeError,
    DtypeError, Unsupported, CollectiveMismatch.
    """
    if grouped_gradients.is_traced(x, topk_idx, topk_weights, w1, w2):
        size, rank, device, nodes = _place("" if world is None else world.name)
    else:
        world = world_of("moe", world, x)
        size, rank, device, nodes = world.size, world.rank, world.torch_device.type, world.nodes
        if world.closed:
            raise Closed.used(rank, "moe")
    _check(rank, device, x, topk_idx, topk_weights, w1, w2, activation, shared, needed)
    _check_count(rank, "max_tokens", max_tokens, 1, "")
    _check_count(rank, "tokens_per_rank", tokens_per_rank, max(1, x.shape[0]), ", with as many tokens on this rank")
    if max_tokens is None and tokens_per_rank is None:
        tokens_per_rank = max(1, topk_idx.shape[0])
    if max_tokens is None:
        max_tokens = max(1, size * topk_idx.numel())
    # A rank's experts have as many rows as its tokens have experts, if tokens choose at random.
    expected = topk_idx.numel()
    room: Any = {"max_tokens": max_tokens, "clear": False, "tokens_per_rank": tokens_per_rank, "world": world}
    if nodes > 1 or (torch.is_grad_enabled() and gradients.required((x, topk_weights, w1))):
        # Each for itself: the gradient of both together is a sum with that of the rows, which are used only here.
        there = dispatch(x, topk_idx, topk_weights, size * w1.shape[0], **room)
        hidden = grouped_matmul(there.rows, w1, there.offsets, clear=False, expected=expected, world=world)
    else:
        there, hidden = dispatch_matmul(x, topk_idx, topk_weights, w1, **room)
    if needed is not None:
        needed.copy_(there.needed)
    if activation != "none":
        hidden = grouped_activation(hidden, there.offsets, activation, clear=False, world=world)
    rows = grouped_matmul(hidden, w2, there.offsets, clear=False, expected=expected, world=world)
    out = combine(rows, there, tokens_per_rank=tokens_per_rank, world=world)
    return out if shared is None else out + finished(x @ shared[0], None, activation) @ shared[1]


@torch.compiler.assume_constant_result
def _place(name: str) -> tuple[int, int, str, int]:
    """(size, rank, device, nodes) of the world of that name. The rank is for messages: ranks share compiled code."""
    world = named_world(name)
    return world.size, world.rank, world.torch_device.type, world.nodes


def _check(
    rank: int, device: str, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w1: torch.Tensor,
    w2: torch.Tensor, activation: str, shared: Sequence[torch.Tensor] | None, needed: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise what is wrong, in terms of this call and not of those that it makes."""

    def check(name: str, tensor: Any, dtypes: Sequence[torch.dtype], *shape: int | str) -> None:
        """shape: a letter stands for any size."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            found = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DtypeError.argument("moe", name, found, "a dense tensor", rank)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise DtypeError.argument("moe", name, tensor.dtype, wanted, rank)
        if tensor.device.type != device:
            raise DtypeError.argument("moe", name, f"a tensor on {tensor.device}", f"one on {device}", rank)
        sizes = tuple(tensor.shape)
        if len(sizes) != len(shape) or any(isinstance(n, int) and n != size for n, size in zip(shape, sizes)):
            raise ShapeError.argument("moe", name, sizes, f"({', '.join(map(str, shape))})", rank)

    def check_pair(names: tuple[str, str], first: Any, second: Any, result: int | str, *experts: int | str) -> None:
        check(names[0], first, (x.dtype,), *experts, x.shape[1], "N")
        if experts and not first.shape[0]:
            raise ShapeError.argument("moe", names[0], tuple(first.shape), "at least one expert on each rank", rank)
        if first.shape[-1] % columns:
            wanted = 'an even number of columns for activation "swiglu", gate and up in turn: pkt.interleave(gate, up)'
            raise ShapeError.argument("moe", names[0], tuple(first.shape), wanted, rank)
        own = first.shape[: len(experts)]
        check(names[1], second, (x.dtype,), *own, first.shape[-1] // columns, result)
        for name, w in zip(names, (first, second)):
            if experts and not (w.is_contiguous() or w.mT.is_contiguous()):
                found = f"{tuple(w.shape)} with strides {tuple(w.stride())}"
                wanted = f"a contiguous tensor or a transposed view of one: {name}.contiguous()"
                raise ShapeError.argument("moe", name, found, wanted, rank)

    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        wanted = " or ".join(map(repr, ACTIVATIONS))
        raise Unsupported.here(f"rank {rank}: moe", f"found activation {value_text(activation)}", f"wanted {wanted}")
    columns = 2 if activation == "swiglu" else 1
    check("x", x, FLOATS, "T", "H")
    check("topk_idx", topk_idx, (torch.int64, torch.int32), x.shape[0], "K")
    if topk_idx.shape[1] > MOST_CHOICES:
        wanted = f"at most {MOST_CHOICES} experts of a token"
        raise ShapeError.argument("moe", "topk_idx", tuple(topk_idx.shape), wanted, rank)
    check("topk_weights", topk_weights, (torch.float32,), *topk_idx.shape)
    check_pair(("w1", "w2"), w1, w2, "G", "E")
    if shared is not None:
        if not isinstance(shared, Sequence) or len(shared) != 2:
            raise DtypeError.argument("moe", "shared", type(shared).__name__, "two tensors, (w1, w2)", rank)
        check_pair(("shared[0]", "shared[1]"), *shared, w2.shape[2])
    if needed is not None:
        check("needed", needed, (torch.int32,), 2)


def _check_count(rank: int, name: str, value: Any, least: int, why: str) -> None:
    """Raise what is wrong with a number of tokens; None is right."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise DtypeError.argument("moe", name, found_text(value), "an integer", rank)
    if not least <= value <= MAX_INT:
        wanted = f"at least {least}{why}" if value < least else f"at most {MAX_INT}"
        raise ShapeError.argument("moe", name, value, wanted, rank)
