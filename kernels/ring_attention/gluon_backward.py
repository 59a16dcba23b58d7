"""The host side of the Gluon kernels of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.launch.passing import lasts
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.grid import num_programs
from ..shared.products import fitting
from .backward import Backward
from .gluon import NEAR, costs_of_queries
from .gluon_dkv import gluon_dkv_kernel
from .gluon_dq import gluon_dq_kernel
from .planning import GLUON_ROWS, Plan
from .sequence import parts as parts_of
from .sequence import pieces
from .turns import heads_together, task_costs

STAGES = 4
"""Slots for blocks of keys and as many for values, or of queries and of dout."""


def num_places(call: Call) -> int:
    """Of the numbers of a head's rows, see `Backward.rows_ptr`."""
    return len(pieces(call["s"], call["layout"], 0, 1, GLUON_ROWS)) * GLUON_ROWS


def costs_of_keys(call: Call, plan: Plan) -> list[float]:
    """What the tasks of dk and dv of a head cost, in their order: the ranks' keys take turns, own ones last."""
    s, layout, rank, size = call["s"], call["layout"], call.world.rank, call.world.size
    keys = [pieces(s, layout, (rank - distance) % size, size, 2 * GLUON_ROWS) for distance in (*range(1, size), 0)]
    order, mine = [piece for turn in zip(*keys) for piece in turn], parts_of(s, layout, rank, size)
    return task_costs(call, order, mine, plan.view.turned, GLUON_ROWS, call["h"] // call["g"])


def planned_gradients(call: Call, plan: Plan, inboxes: Sequence[SymmetricTensor], parts: int) -> Callable[..., None]:
    """launch(q, k, v, dout, p): dq, and the parts of dk and dv. inboxes: of keys and values, as `planning.windows` has
    them; none on one rank. parts: pieces of GLUON_ROWS keys of a rank, of all heads. p: `Backward` with the tensors of
    the call but those of its descriptors."""
    world = call.world
    b, s, h, g, d = (call[letter] for letter in "bshgd")

    def rows(x: torch.Tensor, batches: int, heads: int) -> Any:
        return descriptor(x.view(batches, s, heads * d), (1, GLUON_ROWS, d))

    fits = [fitting(call[name]) for name in ("q", "dout", "k", "v")]

    def fitted(*tensors: torch.Tensor) -> list[torch.Tensor]:
        """The operands, which TMA can address."""
        return [fit(x) if fit else x for fit, x in zip(fits, tensors)]

    some = fitted(*(call[name] for name in ("q", "dout", "k", "v")))
    lent = [rows(x, b, heads) for x, heads in zip(some, (h, h, g, g))]
    theirs = [lasts(rows(x.plain(), (world.size - 1) * b, g)) for x in inboxes] or lent[2:]
    places = num_places(call)
    numbers = descriptor(torch.empty(2 * b * h * places, dtype=torch.float32, device="meta"), (GLUON_ROWS,))
    group, near = h // g, NEAR // (2 * s * d * call.dtype.itemsize)  # near: heads
    options = {"STAGES": STAGES, "num_warps": CONSUMER_WARPS}
    programs = num_programs(world, b * h * plan.blocks)
    of_queries = cooperative_launch(world, gluon_dq_kernel, (programs,), **options)
    of_dq = heads_together(costs_of_queries(call, plan), b * h, max(near // world.size, 1) * group, programs, group)
    programs = num_programs(world, world.size * b * -(-parts // 2))
    of_keys = beside_launch(world, gluon_dkv_kernel, (programs,), **options)
    of_dkv = heads_together(costs_of_keys(call, plan), b * g, max(near // group, 1), programs)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, p: Backward) -> None:
        for one, x in zip((*lent, numbers), (*fitted(q, dout, k, v), p.rows_ptr)):
            one.base = x
        try:
            of_queries(*lent, *theirs, p, of_dq, world.device)
            of_keys(*lent[:2], numbers, *lent[2:], *theirs, p._replace(BLOCK_M=p.BLOCK_N), of_dkv, world.device)
        finally:
            for one in (*lent, numbers):
                one.base = None

    return launch
