"""The host side of the Gluon kernels of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.launch.passing import lasts

from ..declaration import Call
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.grid import num_programs
from ..shared.products import fitting
from .backward import Backward
from .exchange import Exchange
from .gluon import costs_of_queries
from .gluon_dkv import gluon_dkv_kernel
from .gluon_dq import gluon_dq_kernel
from .planning import GLUON_ROWS, Plan, num_places
from .rules import delay
from .sequence import parts as parts_of
from .sequence import pieces
from .turns import NEAR, heads_together, task_costs

STAGES = 4
"""Slots for blocks of keys and as many for values, or of queries and of dout."""


def costs_of_keys(call: Call, plan: Plan) -> list[float]:
    """What the tasks of dk and dv of a head cost, in their order."""
    s, layout, size = call["s"], call["layout"], call.world.size
    keys = pieces(s, layout, call.world.rank, size, 2 * GLUON_ROWS)
    queries = [part for rank in range(size) for part in parts_of(s, layout, rank, size)]
    return task_costs(call, keys, queries, plan.view.turned, GLUON_ROWS, call["h"] // call["g"])


def planned_gradients(call: Call, plan: Plan, exchange: Exchange | None) -> Callable[..., None]:
    """launch(q, k, v, dout, p): dq, dk and dv. exchange: None on one rank. p: `Backward` with the tensors of the call
    but those of its descriptors."""
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
    places = num_places(call, GLUON_ROWS)
    numbers = descriptor(torch.empty(2 * b * h * places, dtype=torch.float32, device="meta"), (GLUON_ROWS,))
    their_queries, their_keys = [*lent[:2], numbers], lent[2:]
    if exchange is not None:
        others = (world.size - 1) * b
        their_keys = [lasts(rows(x.plain(), others, g)) for x in exchange.keys]
        their_queries = [lasts(rows(x.plain(), others, h)) for x in exchange.queries]
        their_queries.append(lasts(descriptor(exchange.rows.plain().view(-1), (GLUON_ROWS,))))
    group, near = h // g, NEAR // (2 * s * world.size * d * call.dtype.itemsize)  # near: heads
    options = {"STAGES": STAGES, "num_warps": CONSUMER_WARPS}
    programs = num_programs(world, b * h * plan.blocks)
    of_queries = cooperative_launch(world, gluon_dq_kernel, (programs,), **options)
    of_dq = heads_together(costs_of_queries(call, plan), b * h, max(near, 1) * group, programs, group, delay(call, 3))
    costs = costs_of_keys(call, plan)
    programs = num_programs(world, b * g * len(costs))
    of_keys = beside_launch(world, gluon_dkv_kernel, (programs,), **options)
    of_dkv = heads_together(costs, b * g, max(near // group, 1), programs)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, p: Backward) -> None:
        for one, x in zip((*lent, numbers), (*fitted(q, dout, k, v), p.rows_ptr)):
            one.base = x
        try:
            of_queries(*lent, *their_keys, p, of_dq, world.device)
            keys_of = p._replace(BLOCK_M=p.BLOCK_N)
            of_keys(*lent[:2], numbers, *lent[2:], *their_queries, keys_of, of_dkv, world.device)
        finally:
            for one in (*lent, numbers):
                one.base = None

    return launch
