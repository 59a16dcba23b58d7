"""What `matmul_all_to_all` and `all_to_all_matmul` share: weights that name their heads, plans, predicted times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pkt.model.calibration import collective_seconds, product
from pkt.model.cost import Estimate, overlapped
from pkt.model.gpu import Gpu, link_rate

from . import product_rules
from .checks import stored
from .tile_product import WIDE_TILES, Tiles, whole_rows


class Matrix(NamedTuple):
    """How a weight of three dimensions lies as a matrix, its heads' two dimensions as one."""

    first: int  # of the two
    transposed: bool  # it is the view of a contiguous (columns, rows)
    dense: bool  # it lies in memory as a matrix does, transposed or not

    @classmethod
    def of(cls, weight: torch.Tensor, first: int) -> Matrix:
        flat, transposed = stored(weight.flatten(first, first + 1))
        return cls(first, transposed, flat.is_contiguous() and flat.data_ptr() == weight.data_ptr())

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, for kernels that take its address: (columns, rows) if transposed. A copy of other strides."""
        if self.dense:
            return weight
        flat = weight.flatten(self.first, self.first + 1)
        return flat.t() if self.transposed else flat.contiguous()


def reaches(dtype: torch.dtype, columns: tuple[int, ...], *tensors: torch.Tensor) -> bool:
    """Whether TMA reaches matrices whose rows have so many columns, which begin where `tensors` do."""
    return whole_rows(dtype, *columns) and all(x.data_ptr() % 16 == 0 for x in tensors)


PUSHED_ROWS = 2048
"""Rows of a rank's product from which "push" is the default where it has WIDE_TILES: the fewest for which that was
measured, see benchmarks/results/all_to_all_matmul_2.json."""


def pushed(m: int, tiles: Tiles) -> bool:
    """Whether "push" with these tiles is the default for a product of m rows."""
    return tiles == WIDE_TILES and m >= PUSHED_ROWS


# ------------------------------------------------------------------------------------------------------------- seconds
Key = Mapping[str, Any]
Sent = Callable[[Key], float]


def sent_columns(key: Key) -> float:
    """Bytes that leave a GPU where each rank gets its part of the product's columns."""
    return product_rules.scattered(key)


def sent_rows(key: Key) -> float:
    """Bytes that leave a GPU where each rank gets its part of the left operand's rows. M counts those of one rank."""
    return product_rules.gathered(key)


def seconds_unfused(sent: Sent) -> product_rules.Seconds:
    """The time of torch's product and pkt's all-to-all, one after the other. An all-to-all takes what an all-gather
    takes that sends as many bytes: both are one kernel that moves them once."""

    def seconds(_: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
        alone, moving = product(key, gpu), collective_seconds("all_gather", "pkt", sent(key), key["size"], gpu)
        exposed = alone.exposed + min(max(alone.compute, alone.memory), moving)  # nothing overlaps
        return replace(alone, communication=moving, exposed=exposed)

    return seconds


def seconds_copied_columns(_: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """Torch's product, of one rank's columns after the other, the own ones last. Copies hide behind it but for what the
    last peer's takes longer than the own columns. Then what has come is read and written."""
    size, sent, alone = key["size"], sent_columns(key), product(key, gpu)
    last, own = sent / max(size - 1, 1) / gpu.link, max(alone.compute, alone.memory) / size
    exposed = alone.exposed + max(last - own, 0.0) + 2 * sent / gpu.memory
    return replace(alone, communication=sent / gpu.link, exposed=exposed, sync=gpu.barrier + gpu.launch)


def seconds_pushed_tiles(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """A tile is signalled before the next one begins. After the product what has come is read and written."""
    columns = math.ceil(key["N"] / key["size"])
    case = replace(product_rules.plain_product(config, key, key["M"], key["K"], key["N"]), N=columns)
    one, tasks, sent = case.seconds(gpu, plain=True), key["size"] * case.tiles(key["M"]), sent_columns(key)
    return overlapped(
        tasks=tasks, task_seconds=one, comm_bytes=sent, comm_rate=link_rate("TMA store", gpu.sms), around=one,
        memory_bytes=case.memory_bytes * key["size"], exposed=2 * sent / gpu.memory,
        sync=gpu.signal * (2 + math.ceil(tasks / gpu.sms)), gpu=gpu,
    )  # fmt: skip


def seconds_copied_rows(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
    """Copy engines bring rows while a tile has the own part of K; all programs compute."""
    case = product_rules.plain_product(config, key, key["M"], key["K"] // key["size"], key["N"])
    one = case.seconds(gpu)
    return overlapped(
        tasks=case.tiles(key["M"]), task_seconds=one, comm_bytes=sent_rows(key), comm_rate=gpu.link,
        around=one / key["size"], memory_bytes=case.memory_bytes, sync=gpu.barrier, gpu=gpu,
    )  # fmt: skip


def seconds_pushed_rows(num_comm_sms: int) -> product_rules.Seconds:
    """Some programs push rows; the last tile waits for the last of them."""

    def seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> Estimate:
        case = product_rules.plain_product(config, key, key["M"], key["K"] // key["size"], key["N"])
        one, pushing = case.seconds(gpu, plain=True), config.get("num_comm_sms") or num_comm_sms
        return overlapped(
            tasks=case.tiles(key["M"]), task_seconds=one, comm_bytes=sent_rows(key),
            comm_rate=link_rate("register store", pushing), num_comm_sms=pushing, around=one / key["size"],
            memory_bytes=case.memory_bytes, sync=3 * gpu.signal, gpu=gpu,
        )  # fmt: skip

    return seconds
