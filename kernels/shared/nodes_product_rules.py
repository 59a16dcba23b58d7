"""Candidates and predicted seconds of the products over several nodes. No figure is measured, see pkt.model.network.

A case (`key`) has M, N and K of the product that each rank computes, dtype and size; and nodes, node_size and network
as in nodes_rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pkt.model.config import Config, space
from pkt.model.cost import Product, overlapped
from pkt.model.gpu import Gpu
from pkt.model.network import TwoLinks

from . import product_rules as rules
from .nodes_products import NUM_COMM_SMS, gathering_sms
from .nodes_rules import Key, Sizes, gather, scatter


def gather_space(key: Key, gpu: Gpu) -> list[Config]:
    """The candidates of all_gather_matmul."""
    return _space(key, gpu, rules.comm_sms(gpu))


def sum_space(key: Key, gpu: Gpu) -> list[Config]:
    """The candidates of matmul_reduce_scatter and matmul_all_reduce. With num_comm_sms=0 all programs communicate after
    they have computed."""
    return _space(key, gpu, [0, *rules.comm_sms(gpu)])


def _space(key: Key, gpu: Gpu, num_comm_sms: list[int]) -> list[Config]:
    tiles = rules.plain_tiles(_rows(key), key, gpu, (8,), gluon=False, staged=True)
    return space(mode="nodes", num_comm_sms=num_comm_sms, tiles=tiles)


def _rows(key: Key) -> int:
    """Of a rank's part of the product."""
    return math.ceil(key["M"] / key["size"])


def gather_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_gather_matmul: some programs gather, the others compute. The tiles of the last pieces remain when those
    have come."""
    case = rules.plain_product(config, key, _rows(key), key["K"], key["N"])
    num_comm = _num_comm(config, gathering_sms(key["node_size"]))
    moved = gather(Sizes(key, gpu, case.m * case.K * case.itemsize, num_comm))
    return _beside(case, moved, num_comm, case.seconds(gpu, plain=True) + moved.exposed, gpu)


def scatter_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of matmul_reduce_scatter: some programs add up and send the tiles that the others compute."""
    case = rules.plain_product(config, key, _rows(key), key["N"])
    return _scattered(case, config, key, gpu, answered=False)


def reduce_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of matmul_all_reduce: the same, and then a gather that nothing hides."""
    case = rules.plain_product(config, key, _rows(key), key["N"])
    first = _scattered(case, config, key, gpu, answered=True)
    then = gather(Sizes(key, gpu, case.m * case.N * case.itemsize), answered=True)
    both = first.then(then)
    return replace(
        both, compute=first.compute, memory=first.memory, communication=first.communication,
        exposed=both.exposed + max(then.memory, then.communication), limit=max(first.limit, 2 * then.limit),
    )  # fmt: skip


def _num_comm(config: Mapping[str, Any], default: int) -> int:
    return int(config.get("num_comm_sms", default))


def _scattered(case: Product, config: Mapping[str, Any], key: Key, gpu: Gpu, *, answered: bool) -> TwoLinks:
    """A tile must be there before anything leaves. The last tile is added up when it has come. Where each rank is a
    node, the programs that compute send."""
    num_comm = _num_comm(config, NUM_COMM_SMS) if key["node_size"] > 1 else None
    tile = case.block_m * case.block_n * case.itemsize
    moved = scatter(Sizes(key, gpu, case.m * case.N * case.itemsize, num_comm, tile), answered)
    return _beside(case, moved, num_comm, case.seconds(gpu, plain=True) + moved.exposed, gpu)


def _beside(case: Product, moved: TwoLinks, num_comm: int | None, around: float, gpu: Gpu) -> TwoLinks:
    """A product beside what moves, in programs of its own. around: seconds of computing and moving that have nothing
    beside them, where moving takes longer."""
    found = overlapped(
        tasks=case.size * case.tiles(case.m), task_seconds=case.seconds(gpu, plain=True),
        comm_bytes=moved.communication, comm_rate=1.0, num_comm_sms=num_comm, around=around,
        memory_bytes=moved.memory * gpu.memory + case.memory_bytes_by_parts, sync=moved.sync, gpu=gpu,
    )  # fmt: skip
    cores = 2 * case.M * case.N * case.K / gpu.flops
    return replace(moved, **vars(found), limit=max(moved.limit, cores))
