"""Async tensor parallelism of torchtitan on pkt's fused products.

torchtitan's tp_gemm_backend="dist_gemm" has modules that call three functions of torchtitan.distributed.linear, which
run torch.ops.symm_mem. `replace(group)` puts pkt's operators in their place:

| function | here |
|---|---|
| AllGatherLinear: a column-parallel linear of a sequence shard | all_gather_matmul |
| AllGatherLinearMulti: two of them, one gather | all_gather_matmul of both weights |
| LinearReduceScatter: a row-parallel linear to a sequence shard | matmul_reduce_scatter |

Call it in every process, once the tensor-parallel group exists and before a model is compiled:

    pkt_engines_torchtitan.replace(parallel_dims.get_mesh("tp").get_group())

Looked at: torchtitan 0.2.2, commit b5bcd76c66d0. Its functions keep a part of the gathered input for the backward
pass and gather along the features; pkt keeps the shard and gathers it again, or with KEEP = "whole" keeps all of it
where one weight takes it. The types of spmd_types are not checked. The tests run this on simulated ranks under a fake
of torchtitan. It has not run on GPUs, nor in torchtitan.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch

import pkt
from pkt.nn.exchange import sum_gradient

HEAP = "4GiB"
KEEP: Literal["shard", "whole"] = "shard"
MODULES = ("torchtitan.distributed.linear", "torchtitan.models.common.dist_gemm")
_worlds: dict[str, pkt.World] = {}


class AllGatherLinear:
    """(tokens / ranks, K) and weight (N / ranks, K) to (tokens, N / ranks)."""

    @staticmethod
    def apply(
        x_shard_m: torch.Tensor, w_shard_n: torch.Tensor, bias_shard_n: torch.Tensor | None, group: Any,
        group_name: str,
    ) -> torch.Tensor:  # fmt: skip
        x, weight = x_shard_m.contiguous(), w_shard_n.t()
        return pkt.all_gather_matmul(x, weight, bias=bias_shard_n, keep=KEEP, world=_worlds[group_name])


class AllGatherLinearMulti:
    """(tokens / ranks, K) and two weights (N / ranks, K) to two (tokens, N / ranks), with one gather."""

    @staticmethod
    def apply(
        x_shard_m: torch.Tensor, wa_shard_n: torch.Tensor, wb_shard_n: torch.Tensor, group: Any, group_name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = [wa_shard_n.t(), wb_shard_n.t()]
        first, second = pkt.all_gather_matmul(x_shard_m.contiguous(), weights, world=_worlds[group_name])
        return first, second


class LinearReduceScatter:
    """(tokens, K / ranks) and weight (N, K / ranks) to (tokens / ranks, N); bias (N,), the same on every rank."""

    @staticmethod
    def apply(
        x_shard_k: torch.Tensor, w_shard_k: torch.Tensor, bias: torch.Tensor | None, group: Any, group_name: str
    ) -> torch.Tensor:
        world = _worlds[group_name]
        bias = None if bias is None else sum_gradient(bias, world)  # each rank sees its part of the tokens
        return pkt.matmul_reduce_scatter(x_shard_k.contiguous(), w_shard_k.t(), bias=bias, world=world)


def open_world(group: Any) -> pkt.World:
    """A world of the ranks of a process group. Collective."""
    return pkt.init(heap=HEAP, group=group)


def replace(group: Any) -> pkt.World:
    """Make torchtitan's fused projections run on pkt, for this group and those of further calls. Collective. Returns
    the group's world, which lasts until it is closed."""
    ours = (AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter)
    for name in MODULES:
        module = importlib.import_module(name)
        for one in ours:
            if not hasattr(module, one.__name__):
                raise ImportError(f"{name} has no {one.__name__}: this file was written for another torchtitan")
            setattr(module, one.__name__, one)
    _worlds[group.group_name] = open_world(group)
    return _worlds[group.group_name]
