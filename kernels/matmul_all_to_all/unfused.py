"""The form "unfused": torch's product, what is done to its heads, and pkt's all-to-all, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.memory.factories import empty

from ..all_to_all import OPERATOR as ALL_TO_ALL
from ..declaration import Call, Launch
from ..shared.replays import with_product
from ..shared.rotary import turn_kernel
from ..shared.unfused import multiply, plain

TURNED_HEADS = 4
"""That a program of `turn_kernel` works on."""


def finishing(call: Call, ranks: int) -> Callable[..., None]:
    """finish(product, first, bias, norm, cos, sin): add the bias, norm and rotate in place. product: (b, s, heads, d),
    of the heads of so many ranks from rank `first` on. The other tensors are those of the call."""
    (b, s, _), h, d, heads = call["x"].shape, call["h"], call["d"], call["qk_heads"] or 0
    together = min(TURNED_HEADS, triton.next_power_of_2(max(ranks * heads, 1)))
    turn = beside_launch(call.world, turn_kernel, (b * s, triton.cdiv(ranks * heads, together)))
    numbers, constants = (s, ranks * h, h, heads, float(call["eps"])), (d, triton.next_power_of_2(max(d // 2, 1)))

    def finish(
        product: torch.Tensor, first: int, bias: torch.Tensor | None, norm: torch.Tensor | None = None,
        cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        of = slice(first * h, (first + ranks) * h)
        if bias is not None:
            plain(product).view(b * s, -1).add_(plain(bias)[of].reshape(-1))
        if norm is not None or cos is not None:
            turn(product, None if norm is None else norm[of], cos, sin, *numbers, *constants, together)

    return finish


def unfused(call: Call) -> Launch:
    """The plan of the form. Collective."""
    world, (b, s, k), every, d = call.world, call["x"].shape, call.world.size * call["h"], call["d"]
    whole = world.keep(
        (call.name, "unfused", b, s, every, d, call.dtype),
        lambda: empty(b, s, every, d, dtype=call.dtype, name=f"{call.name}.product", world=world),
    )
    flat, move = (
        whole.plain().view(b * s, every * d),
        ALL_TO_ALL.planned(world, whole, call["out"], scatter=2, gather=1),
    )
    finish = finishing(call, world.size)

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        multiply(world, plain(x).view(b * s, k), plain(weight).flatten(1), flat)
        finish(whole, 0, *others)
        move(whole, out)
        return out

    return with_product(call, launch)
