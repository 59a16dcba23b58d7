"""The launches of the forms, with their memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals

from ..declaration import Call, Launch
from ..dispatch import rules
from ..dispatch.arguments import Words
from ..dispatch.plans import parts_of, words_of
from ..dispatch.result import chunk_of, slots_filled
from ..shared import flagged, rails
from ..shared.grid import COPY_OPTIONS, SMALL, SMALL_OPTIONS, barrier_counters, num_programs, several
from . import nodes
from .low_latency import Few, low_latency_kernel
from .pull import Size, combine_kernel

MOST_COLS, TOGETHER = 8192, 2
"""Columns of tokens that a program of `pull` adds at a time, at most, and rows of each that it loads together: as many
as registers hold."""
MOST_PIECE = 16
"""Slots between two signals at most."""
PIECES = 2048
"""Pieces of the tokens of each rank, if they are small enough: so many keep all programs busy up to the end."""
LEAST_ROOM = 64
"""Tokens of a rank for which `low_latency` has room at least, where the caller promises nothing."""
LOOK = 64
"""Slots that a program of `low_latency` looks at together: most are free, and each look takes a flight to memory."""
LOADED = 8
"""Rows of a token that a program of `low_latency` loads together. With 4, 512 tokens of a rank take 56 us and not 49
(`dispatch_taken_once_tried_2.json`)."""


def plan_pull(call: Call) -> Launch:
    """A grid, buffers and signals of pull."""
    world, (_, H) = call.world, call["y"].shape
    slots = slots_filled(call.sizes["s"], call.sizes["r"], world.size, call.given.get("tokens_per_rank"))
    programs = several(call, SMALL, num_programs(world, world.num_sms))
    collectors = rules.collectors(call["k"], world.size, programs)
    if call["num_comm_sms"] is not None:
        collectors = several(call, SMALL, call["num_comm_sms"])
    piece = max(1, triton.next_power_of_2(slots // (world.size * PIECES)))
    sized = _sized(call, slots, piece, max(1, min(collectors, programs - 1)), SMALL)
    pieces = triton.cdiv(slots, sized.PIECE.value)
    sums, ready = world.keep(
        ("combine", slots, pieces, H, call.dtype),
        lambda: (
            empty(max(slots, 1), max(H, 1), dtype=call.dtype, name="combine.sums", world=world),
            signals(max(world.size * pieces, 1), name="combine.ready", world=world),
        ),
    )
    start = cooperative_launch(world, combine_kernel, (programs,), **SMALL_OPTIONS)
    bar = barrier_counters(world)

    def launch(
        y: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any, source: Any, out: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        start(y, tokens, places, weights, source, out, sums, ready, bar, sized, world.device)
        return out

    return launch


def _sized(call: Call, slots: int, piece: int, collectors: int, per_sm: int) -> Size:
    """per_sm: programs of an SM, which share what it has on its way."""
    (R, H), K, size = call["y"].shape, call["k"], call.world.size
    of_rank = 2 * rules.IN_FLIGHT // per_sm // triton.next_power_of_2(max(size, 2))
    tile = of_rank // call.dtype.itemsize
    chunk, cols = chunk_of(R), min(MOST_COLS, tile, triton.next_power_of_2(max(H, 1)))
    piece = min(chunk, MOST_PIECE, piece)
    rows = max(1, min(piece, tile // cols))
    constants = K, triton.next_power_of_2(max(K, 1)), chunk, piece, collectors, rows, cols, max(1, min(TOGETHER, K))
    return Size(call.sizes["t"], H, slots, *map(tl.constexpr, constants))


def plan_nodes(call: Call) -> Launch:
    """A grid, buffers and counters of nodes."""
    world, (_, H), slots = call.world, call["y"].shape, call.sizes["s"]
    programs, most, count = num_programs(world, world.num_sms), tokens_at_most(call), world.nodes

    def in_heap(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return empty(*shape, dtype=dtype, name=name, world=world)

    def counters(name: str, n: int) -> torch.Tensor:
        return signals(n, name=name, world=world)

    def make() -> tuple[nodes.Buffers, rails.Pieces]:
        r = rails.pieces("combine", most, 1, programs, world.node_size, count, in_heap, counters)
        lines = count, programs, r.each, max(H, 1)
        return nodes.Buffers(
            in_heap("combine.sums", max(slots, 1), max(H, 1), dtype=call.dtype),
            in_heap("combine.leaving", *lines, dtype=call.dtype), in_heap("combine.home", *lines, dtype=call.dtype),
            counters("combine.ready", 1), counters("combine.came", count * programs),
            counters("combine.read", programs),
        ), r  # fmt: skip

    memory = world.keep(("combine", "nodes", slots, H, most, call.dtype), make)
    start = cooperative_launch(world, nodes.nodes_kernel, (programs,), **COPY_OPTIONS)
    sized = _sized(call, slots, MOST_PIECE, 1, 1)

    def launch(
        y: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, weights: Any, source: Any, out: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        start(y, tokens, places, weights, out, *memory, sized, world.device)
        return out

    return launch


def tokens_at_most(call: Call) -> int:
    """Tokens of a rank for which `low_latency` and `nodes` have room: as promised, or as many as there are rows, and
    LEAST_ROOM."""
    promised = call.given.get("tokens_per_rank")
    return max(call.sizes["r"], LEAST_ROOM) if promised is None else int(promised)


def plan_low_latency(call: Call) -> Launch:
    """A grid and words of low_latency."""
    world, T, (_, H), (slots, K) = call.world, call.sizes["t"], call["y"].shape, call["dispatched.tokens"].shape
    programs = several(call, SMALL, num_programs(world, world.num_sms))
    third, most, threads = words_of(H * call.dtype.itemsize), tokens_at_most(call), 32 * SMALL_OPTIONS["num_warps"]
    block, parts = parts_of(third, T, programs, threads)
    constants = K, triton.next_power_of_2(max(K, 1)), block, threads, LOOK, LOADED
    sized = Few(T, H, slots, most, third, parts, *map(tl.constexpr, constants))
    memory = Words(*flagged.slots_of(world, world.size * (1 + most * third)))
    start = cooperative_launch(world, low_latency_kernel, (programs,), **SMALL_OPTIONS)

    def launch(*tensors: Any) -> torch.Tensor:
        start(*tensors, memory, sized, world.device)
        out: torch.Tensor = tensors[-1]
        return out

    return launch
