"""A call of several kernels or copies that comes again is one call of the driver, see pkt/runtime/launch/replay.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from pkt.runtime.launch.replay import replayed
from pkt.runtime.world import World

from ..declaration import Call, Launch, making
from .fp8 import FP8

_MATMUL = torch.backends.cuda.matmul
PRECISION: dict[torch.dtype, Callable[[], Hashable]] = {
    torch.bfloat16: lambda: _MATMUL.allow_bf16_reduced_precision_reduction,
    torch.float16: lambda: (_MATMUL.allow_fp16_reduced_precision_reduction, _MATMUL.allow_fp16_accumulation),
    FP8: lambda: (),
}
"""torch's settings that a product of such operands depends on."""


def in_one_call(plan: Callable[[Call], Launch]) -> Callable[[Call], Launch]:
    """`plan`, of a form that asks torch for no product, with launches that are replayed. What memory they make, which
    should be little, stays with their graphs."""
    return lambda call: replayed(call.world, plan(call))


def with_memory(world: World, launch: Launch, of: Sequence[tuple[Sequence[int], torch.dtype]]) -> Launch:
    """`launch`, replayed, with more tensors of these shapes and dtypes behind those of the call. They are new in each
    call: memory that a launch makes while it is recorded stays with its graph."""
    return replayed(world, launch, memory=making(of, world.torch_device))


def with_product(call: Call, launch: Launch) -> Launch:
    """`launch`, which asks torch for a product, replayed."""
    # Not fp32: torch has two sets of settings for its products, and asking for those not in use may raise.
    settings = PRECISION.get(call.dtype)
    return replayed(call.world, launch, settings) if settings else launch
