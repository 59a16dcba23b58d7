"""The form "unfused": heads are exchanged before attention and behind it, by `all_to_all`.

And what all forms have in common: shapes, the reference, and the backward pass, which is made of the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pkt.errors import ShapeError
from pkt.runtime.memory.tensor import SymmetricTensor

from ..all_to_all import OPERATOR as ALL_TO_ALL
from ..declaration import Call, Launch, Operand, flag, number
from ..gradients import Gradients, Recorded
from ..ring_attention import exact
from ..shared import attention
from ..shared.checks import FLOATS
from .groups import again, window
from .heads import heads_of
from .local import Local

TENSORS = {
    "q": Operand("...", FLOATS), "k": Operand("..."), "v": Operand("..."),
    "cu_seqlens": Operand("...", (torch.int32,), optional=True, same=True),
}  # fmt: skip
ARGUMENTS = {"causal": flag, "scale": number(above=0), "window": attention.window}


def reference(
    rank: int, q: Sequence[torch.Tensor], k: Sequence[torch.Tensor], v: Sequence[torch.Tensor],
    cu_seqlens: Sequence[torch.Tensor] | None = None, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """What `rank` gets from the ranks' operands, in fp64."""
    return exact.reference(rank, q, k, v, cu_seqlens, causal, "contiguous", scale, window)[0]


def bound(
    rank: int, dtype: torch.dtype, roundings: int, q: Sequence[torch.Tensor], k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor], cu_seqlens: Sequence[torch.Tensor] | None = None, causal: bool = False,
    scale: float | None = None, window: tuple[int, int] | None = None,
) -> tuple[torch.Tensor]:  # fmt: skip
    """How far the result may be from `reference`."""
    return exact.bound(rank, dtype, roundings, q, k, v, cu_seqlens, causal, "contiguous", scale, window)[:1]


def shape(call: Call) -> tuple[int, ...]:
    """The shape of the result; learns its sizes. Raises ShapeError."""
    shape = attention.shape(call)
    if call["h"] % call.world.size:
        wanted = f"a number of heads that {call.world.size} ranks divide"
        raise ShapeError.argument(call.name, "q", tuple(call["q"].shape), wanted, call.world.rank)
    return shape


def local_of(call: Call) -> Local:
    """What this rank's heads attend to."""
    return Local(call.world.size * call["s"], call["causal"], call["window"], call["scale"])


def unfused(call: Call) -> Launch:
    """The plan of the form. Collective."""
    whole, there, home = exchanges(call)
    attend = local_of(call).planned(call.world, *whole, call["cu_seqlens"])

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        there(q, k, v)
        return home(attend(*whole, cu_seqlens), out)

    return again(call, launch)


def exchanges(call: Call) -> tuple[list[torch.Tensor], Callable[..., None], Callable[..., torch.Tensor]]:
    """Inboxes (B, positions of all ranks, heads of this rank, D) of q, k and v; there(q, k, v) fills them; and
    home(found, out) sends the results of this rank's heads to `out` on the ranks of their positions. Collective."""
    world, size, out = call.world, call.world.size, call["out"]
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    held = heads_of(h, g, size)
    whole = {name: (b, size * s, n, d) for name, n in zip("qkv", (held.queries, held.keys, held.keys))}

    # Not those of "copy", whose launches do not begin with a meeting of the ranks.
    inboxes = [window(call, f"unfused.{name}", shape) for name, shape in whole.items()]

    def sent(x: torch.Tensor) -> torch.Tensor:
        return held.repeated((x.plain() if isinstance(x, SymmetricTensor) else x).view(b, s, -1, d), g)

    moves = [
        ALL_TO_ALL.planned(world, sent(call[name]), to, scatter=2, gather=1) for name, to in zip("qkv", inboxes)
    ]  # fmt: skip
    # Peers store into a symmetric `out`, and otherwise load from a symmetric result.
    result = None if isinstance(out, SymmetricTensor) else window(call, "results", whole["q"])
    like = torch.empty(whole["q"], dtype=call.dtype, device=world.torch_device) if result is None else result
    back = ALL_TO_ALL.planned(world, like, out.view(b, s, h, d), scatter=1, gather=2)

    def there(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for move, x, to in zip(moves, (q, k, v), inboxes):
            move(sent(x), to)

    def home(found: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if result is None:
            back(found.contiguous(), out)
        else:
            result.plain().copy_(found)
            back(result, out)
        return out

    return [x.plain() for x in inboxes], there, home


def backward(call: Recorded) -> Gradients:
    """The gradients, by exchanges of heads, gradients of attention on each rank, and exchanges back. Collective."""
    size, (b, s, h, d) = call.world.size, _sizes(call)
    if not b * s * h * d:
        return {name: call.grad.new_zeros(call.shape(name)) for name in call.wanted}
    q, k, v, grad = (there(call, x) for x in (call["q"], call["k"], call["v"], call.grad))
    local = Local(size * s, call["causal"], call["window"], call["scale"])
    return home(call, local.gradients(call, q, k, v, grad))


def _sizes(call: Recorded) -> tuple[int, int, int, int]:
    """B, S, H and D."""
    b, s, h, d = (1,) * (4 - len(call.shape("q"))) + call.shape("q")
    return b, s, h, d


def there(call: Recorded, x: torch.Tensor) -> torch.Tensor:
    """An operand, or the gradient of the result: all positions of this rank's heads. Collective."""
    b, s, h, d = _sizes(call)
    g = call.shape("k")[-2]
    x = heads_of(h, g, call.world.size).repeated(x.reshape(b, s, -1, d), g).contiguous()
    return call.operator("all_to_all", x, scatter=2, gather=1)


def home(call: Recorded, found: Mapping[str, torch.Tensor]) -> Gradients:
    """The gradients of all positions of this rank's heads by operand, on the ranks of the positions. Collective."""
    b, s, h, d = _sizes(call)
    g = call.shape("k")[-2]
    held, home = heads_of(h, g, call.world.size), {}
    for name, x in found.items():
        x = call.operator("all_to_all", x.contiguous(), scatter=1, gather=2)
        if name != "q" and held.repeats > 1:
            x = x.view(b, s, g, held.repeats, d).float().sum(3).to(x.dtype)
        home[name] = x.reshape(call.shape(name))
    return home
