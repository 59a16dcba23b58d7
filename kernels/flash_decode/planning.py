"""The plans of flash decode's forms but "gluon", see host.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pkt.runtime.groups import process_group
from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.memory.tensor import SymmetricTensor

from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import Call, Launch
from ..shared import flagged
from ..shared.grid import num_programs
from ..shared.tile_words import words_of_row
from .attention import Decode
from .device import combine_kernel, decode_kernel, exchange_kernel
from .nodes import launch_merging
from .rules import LEAST_SIDE, boxed, padded, rows_of

OUT = 6
"""The place of `out` among a call's tensors; the last one is the lse."""
REGISTERS = 1 << 16
"""Of an SM."""
LEAST_REGISTERS, MOST_REGISTERS = 64, 255
"""Of a thread. With fewer it would spill what the loop over tiles needs, and more programs are refused."""
TAKEN = 128
"""Elements that a warp merges at a time: a thread takes a word of them. With fewer threads share words, and merging
takes ten times as long (`flash_decode_latent_1.json`)."""
ROWS = 4
"""Rows that a program of `exchanging` merges at a time. Not measured."""


class _Plan(NamedTuple):
    """A launch of decode_kernel."""

    argument: Callable[[Sequence[Any], torch.Tensor], Decode]
    """Of the kernels, from the tensors of a call and the memory of results."""
    memory: SymmetricTensor
    """Where decode_kernel leaves results: the words of all ranks, or this rank's result."""
    launch: Callable[[Sequence[Any]], Any]
    take: int
    """Rows that a program merges at a time."""


Argument = Callable[[Sequence[Any], SymmetricTensor, SymmetricTensor, torch.Tensor], Decode]


def argument_of(call: Call, rows: int, keys: int, tma: bool, fused: bool, room: int = 0) -> Argument:
    """argument(tensors, parts, flags, memory): that of the kernels, for units of so many rows and tiles of so many
    keys. tma: TMA loads whole tiles. fused, room: see `Decode`."""
    (B, SQ, H, E), D, G = call.shape, call["d"], call["g"]
    k, v, table, cap = call["k_cache"], call["v_cache"], call["block_table"], call["soft_cap"]
    shared = v is None
    v = k if shared else v
    columns, blocks = padded(E), triton.cdiv(SQ * (H // G), rows)
    d1 = padded(D) if D <= LEAST_SIDE else 1 << D.bit_length() - 1
    d2 = 0 if d1 >= D else padded(D - d1)
    numbers = (
        B, table.shape[1], k.shape[0], table.shape[1] * k.shape[1] if k.shape[0] else 0,
        *k.stride()[:3], *v.stride()[:3], room,
        float(D**-0.5 if call["scale"] is None else call["scale"]), float(cap or 1.0),
    )  # fmt: skip
    constants = (
        triton.next_power_of_2(B), triton.next_power_of_2(SQ), SQ, H, H // G, D, E, k.shape[1],
        shared and columns == d1, *_each_head(call), cap is not None, fused, rows, blocks, G * blocks, keys, d1, d2,
        columns, words_of_row.fn(columns, 1), tma,
    )  # fmt: skip
    same = *numbers, *map(tl.constexpr, constants)

    def argument(
        tensors: Sequence[Any], parts: SymmetricTensor, flags: SymmetricTensor, memory: torch.Tensor
    ) -> Decode:
        q, k, v, table, lens, sinks, out, k_scale, v_scale, lse = tensors
        if v is None:
            v, v_scale = k, k_scale
        return Decode(q, k, v, table, lens, sinks, out, k_scale, v_scale, lse, parts, flags, memory, *same)

    return argument


def launches(call: Call) -> SymmetricTensor:
    """The counter of launches that put nothing."""
    world, name = call.world, f"{call.name}.launches"
    return world.keep((call.name, "launches"), lambda: signals(1, name=name, world=world))


def words_of_all(call: Call) -> int:
    """Words of the results of all ranks; one rank keeps its own out of them."""
    size, (*rows, E) = call.world.size, call.shape
    return size * math.prod(rows) * words_of_row.fn(padded(E), 1) if size > 1 else 0


def _decode(call: Call, fused: bool) -> _Plan:
    world, (B, SQ, H, E), G, programs = call.world, call.shape, call["g"], call["programs"]
    columns, rows, room = padded(E), rows_of(call), 0
    take = min(max(TAKEN * call["warps"] // columns, 1), rows)
    runs = min(take, 1 << max(programs * take // max(B * SQ * H, 1), 1).bit_length() - 1)
    if fused:
        memory, flags, room = flagged.slots_of(world, words_of_all(call))
    else:
        memory, flags = results(call, 1), launches(call)
    units = B * G * triton.cdiv(SQ * (H // G), rows)
    parts = _parts(call, (programs + units) * rows * words_of_row.fn(columns, 1), room)
    tma = boxed(call, call["block"])
    same = argument_of(call, rows, call["block"], tma, fused, room)

    def argument(tensors: Sequence[Any], memory: torch.Tensor) -> Decode:
        return same(tensors, parts, flags, memory)

    # Without TMA a tile's pages come a stage before its keys.
    warps, stages = call["warps"], call["stages"] + 1 if tma else 2 * call["stages"] + 1
    threads = 32 * warps * triton.cdiv(programs, world.num_sms)  # of an SM, which share its registers
    each = min(max(REGISTERS // threads, LEAST_REGISTERS), MOST_REGISTERS)
    many = 4 if each < 160 else 8 if each < MOST_REGISTERS or columns > 256 else 16  # registers hold no more
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": each}
    start = cooperative_launch(world, decode_kernel, (programs,), **options)

    def launch(tensors: Sequence[Any]) -> Any:
        start(argument(tensors, memory), world.device, take, runs, many)

    return _Plan(argument, memory, launch, take)


def _each_head(call: Call) -> tuple[int, int]:
    """Whether each KV head has a scale of its own: of K and of V."""
    k, v = call["k_scale"], call["k_scale" if call["v_cache"] is None else "v_scale"]
    return int(k is not None and k.numel() > 1), int(v is not None and v.numel() > 1)


def _parts(call: Call, words: int, room: int) -> SymmetricTensor:
    """Words for parts of units. All launches that need as much and count with the same counter share them."""
    size, name, world = triton.next_power_of_2(words), f"{call.name}.parts", call.world

    def make() -> SymmetricTensor:
        return zeros(size, 4, dtype=torch.int32, name=name, world=world)

    return world.keep((name, size, room), make)


def results(call: Call, ranks: int) -> SymmetricTensor:
    """Rows of so many ranks, each with its lse."""
    world, (*rows, E), name = call.world, call.shape, f"{call.name}.results"
    shape = ranks * math.prod(rows), E + 1
    return world.keep((name, ranks, *shape), lambda: empty(*shape, dtype=torch.float32, name=name, world=world))


def planned_fused(call: Call) -> Launch:
    """The plan of "fused"."""
    plan = _decode(call, True)

    def launch(*tensors: Any) -> Any:
        plan.launch(tensors)
        return tensors[OUT], tensors[-1]

    return launch


def planned_waits(call: Call) -> Launch:
    """The plan of "waits"."""
    world, decode, rows = call.world, _decode(call, False), call.shape[:3]
    slots, flags, room = flagged.slots_of(world, words_of_all(call))
    programs = num_programs(world, triton.cdiv(math.prod(rows), decode.take))
    start = cooperative_launch(world, exchange_kernel, (programs,))

    def launch(*tensors: Any) -> Any:
        decode.launch(tensors)
        p = decode.argument(tensors, slots)._replace(flags_ptr=flags, room=room)
        start(p, decode.memory, world.device, decode.take)
        return tensors[OUT], tensors[-1]

    return launch


Gather = Callable[[Call, SymmetricTensor, SymmetricTensor], Callable[[], Any]]
"""gather(call, mine, everybodys) returns what gathers the ranks' results."""


def gathering(call: Call, gather: Gather, mine: SymmetricTensor, take: int) -> Callable[[Callable[..., Decode]], Any]:
    """finish(argument): gather the ranks' results and merge them, `take` rows in a program. argument(memory): that of
    the kernels."""
    everybodys, size = results(call, call.world.size), call.world.size
    collect = gather(call, mine, everybodys)
    merge = beside_launch(call.world, combine_kernel, (triton.cdiv(math.prod(call.shape[:3]), take),))

    def finish(argument: Callable[..., Decode]) -> Any:
        collect()
        merge(argument(everybodys), size, take)

    return finish


def exchanging(call: Call, mine: SymmetricTensor) -> Callable[[Callable[..., Decode]], Any]:
    """finish(argument), as of `gathering`, for many rows. More than two ranks share them out: each merges some and
    stores them at the others, 8 (W - 1) / W bytes an element for 4 (W - 1)."""
    if call.world.size <= 2:
        return gathering(call, by_pkt, mine, 1)
    merge = launch_merging(call.world, math.prod(call.shape[:3]), call.shape[-1], ROWS, mine)
    return lambda argument: merge(argument(mine))


def gathered(gather: Gather) -> Callable[[Call], Launch]:
    """The plans of "unfused" and "nccl"."""

    def plan(call: Call) -> Launch:
        decode = _decode(call, False)
        finish = gathering(call, gather, decode.memory, decode.take)

        def launch(*tensors: Any) -> Any:
            decode.launch(tensors)
            finish(lambda memory: decode.argument(tensors, memory))
            return tensors[OUT], tensors[-1]

        return launch

    return plan


def by_pkt(call: Call, mine: SymmetricTensor, everybodys: SymmetricTensor) -> Callable[[], Any]:
    """Gathering in "unfused"."""
    gather = ALL_GATHER.planned(call.world, mine, everybodys)
    return lambda: gather(mine, everybodys)


def by_nccl(call: Call, mine: SymmetricTensor, everybodys: SymmetricTensor) -> Callable[[], Any]:
    """Gathering in "nccl"."""
    group, to, of = process_group(call.world), everybodys.plain(), mine.plain()
    return lambda: dist.all_gather_into_tensor(to, of, group=group)


def planned_nodes(call: Call) -> Launch:
    """The plan of "nodes"."""
    decode, (*rows, E) = _decode(call, False), call.shape
    merge = launch_merging(call.world, math.prod(rows), E, decode.take, decode.memory)

    def launch(*tensors: Any) -> Any:
        decode.launch(tensors)
        merge(decode.argument(tensors, decode.memory))
        return tensors[OUT], tensors[-1]

    return launch
