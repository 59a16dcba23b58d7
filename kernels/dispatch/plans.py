"""The launches of the forms, with their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals

from ..declaration import Call, Launch, making
from ..shared import flagged
from ..shared.grid import COPY_OPTIONS, num_programs, several
from . import nodes
from .arguments import Buffers, Few, Result, Size, Words
from .low_latency import low_latency_kernel
from .push import dispatch_kernel
from .result import chunk_of, slots_filled
from .rules import COPIED, SENDERS, STAGES
from .sorting import Sorting

PER_SM, PER_SM_OPTIONS = 2, {"num_warps": 8, "maxnreg": 128}
"""Programs an SM of the low-latency form, and how they are launched: while one waits for words, the other moves some
(`dispatch_2.json`; with one: `dispatch_one_an_sm_2.json`)."""
SENDING = 16
"""SMs of the low-latency form that only put tokens: as few as fill the links; what an SM loads may wait behind its
stores to other ranks (`dispatch_senders_apart_2.json`)."""
SENT = 2
"""Words that a thread of a sender puts at a time, at most."""
MOST_COUNTED, COUNTED_AT_A_TIME = 128, 8192
"""Tokens that a program counts at a time, at most, and elements of the blocks in which it does."""
COUNTERS = 64
"""Programs that count the tokens of a rank, at least. All add up the counts of those before them, so few take less
time."""
LEAST_PIECE = 4
"""Tokens that push sends together, at least, but never more than half a chunk: describing a piece takes as long as
copying some tokens (dispatch_pieces_2.json of benchmarks/results)."""


def _buffers(call: Call, p: Size, programs: int, sort: bool) -> Buffers:
    world, size, n, meta = call.world, call.world.size, p.EXPERTS.value, 2 * p.K.value + 2 + p.G
    slots = slots_filled(p.S, p.R, size, call.given.get("tokens_per_rank"))

    def int32(name: str, *shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32, name=f"dispatch.{name}", world=world)

    def make() -> Buffers:
        return Buffers(
            int32("counts", 2, size, n + size),
            empty(slots, max(p.H, 1), dtype=moved_as(call.dtype), name="dispatch.inbox", world=world),
            int32("meta", slots, meta),
            signals(1 + slots // p.LEAST.value, name="dispatch.ready", world=world),
            signals(1, name="dispatch.grid", world=world),
            int32("hist", programs, n), int32("sent", programs, size), int32("base", programs, n),
            int32("order", size, p.S),
            Sorting(int32("firsts", programs, n), int32("nexts", programs, n)) if sort else None,
        )  # fmt: skip

    return world.keep(("dispatch", n, meta, p.S, slots, p.CHUNK.value, p.H, call.dtype, sort), make)


def plan_push(call: Call) -> Launch:
    """A grid, buffers and counters of push."""
    launch, routes = plan_push_with_routes(call), making(routes_of(call), call.world.torch_device)
    return lambda *tensors: launch(*tensors, *routes())


def plan_push_with_routes(call: Call) -> Launch:
    """The same, where a launch is given the tensor of `routes_of`, behind the results."""
    start, sized, buffers = pushed(call, dispatch_kernel, COPY_OPTIONS)

    def launch(x: Any, idx: Any, weights: Any, out: Any, scales: Any, *others: Any) -> Any:
        *others, routes = others
        start(x, idx, weights, scales, (out, *others), routes, buffers, sized)
        return out, *others

    return launch


def pushed(
    call: Call, kernel: Any, options: Mapping[str, Any], senders: int = SENDERS, sort: bool = False
) -> tuple[Callable[..., None], Size, Buffers]:
    """(start, Size, Buffers) of push. start(x, idx, weights, scales, results, routes, *more): `kernel`. routes:
    the tensor of `routes_of`. senders: where the call does not say; sort: tokens leave in the order of their first
    experts."""
    world = call.world
    programs = num_programs(world, world.num_sms)
    sized = _sized(call, _counters(call, programs), max(1, min(call["num_comm_sms"] or senders, programs - 1)))
    buffers = _buffers(call, sized, programs, sort)
    start = cooperative_launch(world, kernel, (programs,), **options)

    def launch(x: Any, idx: torch.Tensor, weights: Any, scales: Any, results: Any, *more: Any) -> None:
        x, scales, to = bits(x, scales, results)
        start(x, idx, weights, scales, to, *more, world.device)

    return launch, sized, buffers


def _sized(call: Call, counters: int, senders: int) -> Size:
    (T, H), K, size, own = call["x"].shape, call["topk_idx"].shape[1], call.world.size, call.sizes["e"]
    cols = min(1024, triton.next_power_of_2(max(H, 1)))
    chunk, K2 = chunk_of(call["max_tokens"]), triton.next_power_of_2(max(K, 1))
    return Size(
        T, H, call["max_tokens"], call.sizes["s"], scales_of(call), counters,
        *map(tl.constexpr, (
            size * own, call["num_experts"], own, K, K2, call["alignment"], bool(call["clear"]), chunk, least_of(chunk),
            senders, _numbered(K2), min(chunk, max(1, COPIED // (cols * call.dtype.itemsize))), cols,
            STAGES, scales_of(call) > 0,
        )),
    )  # fmt: skip


def _counters(call: Call, programs: int) -> int:
    """Programs that count tokens and number them: one for as many as are numbered at a time, but no fewer than
    COUNTERS."""
    T, K = call["topk_idx"].shape
    return min(programs, max(COUNTERS, triton.cdiv(T, _numbered(triton.next_power_of_2(max(K, 1))))))


def _numbered(K2: int) -> int:
    """Tokens that a program numbers at a time."""
    return max(1, 64 // K2)


def least_of(chunk: int) -> int:
    """Tokens of a piece, at least."""
    return max(1, min(LEAST_PIECE, chunk // 2))


def plan_nodes(call: Call) -> Launch:
    """A grid, buffers and counters of nodes."""
    world, (_, H), K = call.world, call["x"].shape, call["topk_idx"].shape[1]
    programs, near, G = num_programs(world, world.num_sms), world.node_size, scales_of(call)
    sized, (line, head) = _sized(call, programs, 1), nodes.line_of(K, G, H * call.dtype.itemsize)
    experts, tokens = sized.EXPERTS.value, tokens_over_nodes(call)

    def int32(name: str, *shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32, name=name, world=world)

    def counters(name: str, n: int) -> torch.Tensor:
        return signals(n, name=name, world=world)

    memory = world.keep(
        ("dispatch", "nodes", experts, tokens, line, head),
        lambda: nodes.buffers(world.size, experts, programs, near, tokens, line, head, int32, counters),
    )
    start = cooperative_launch(world, nodes.nodes_kernel, (programs,), **COPY_OPTIONS)
    routes = making(routes_of(call), world.torch_device)

    def launch(x: Any, idx: Any, weights: Any, out: Any, scales: Any, *others: Any) -> Any:
        x, scales, to = bits(x, scales, (out, *others))
        start(x, idx, weights, scales, to, *routes(), *memory, sized, world.device)
        return out, *others

    return launch


def routes_of(call: Call) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of a launch's memory for the rows of its tokens."""
    return [(call["topk_idx"].shape, torch.int32)]


def scales_of(call: Call) -> int:
    """Scales of a token."""
    return 0 if call.tensors.get("scales") is None else call.sizes["g"]


def moved_as(dtype: torch.dtype) -> torch.dtype:
    """As which a kernel moves elements: of fp8 the bits, because not all of Triton takes fp8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def bits(x: torch.Tensor, scales: torch.Tensor | None, results: Sequence[torch.Tensor]) -> tuple[Any, Any, Result]:
    """x, scales and results as kernels take them."""
    rows, *others, of_rows = results
    if rows.dtype.itemsize == 1:
        x, rows = x.view(torch.uint8), rows.view(torch.uint8)
    if scales is not None:
        scales = scales.view(torch.int32)
    return x, scales, Result(rows, *others, of_rows.view(torch.int32))


def tokens_at_most(call: Call) -> int:
    """Tokens of a rank for which others have room."""
    promised: int | None = call["tokens_per_rank"]
    return call["max_tokens"] if promised is None else min(promised, call["max_tokens"])


def tokens_over_nodes(call: Call) -> int:
    """Tokens of a rank for which the ranks of its rail have room: as promised, or as many as there are rows."""
    promised: int | None = call.given.get("tokens_per_rank")
    return call["max_tokens"] if promised is None else promised


def words_of(nbytes: int) -> int:
    """Flagged words of a token of so many bytes."""
    return triton.cdiv(triton.cdiv(nbytes, 4), 3)


def parts_of(third: int, tokens: int, programs: int, threads: int) -> tuple[int, int]:
    """How many words of a token, which has `third`, a program moves at a time, one a thread, and how many programs
    share a token."""
    block = max(1, min(threads, triton.next_power_of_2(third) // 2))
    return block, max(1, min(triton.cdiv(third, block), programs // max(tokens, 1)))


def plan_low_latency(call: Call) -> Launch:
    """A grid and words of low_latency."""
    world, (T, H), K = call.world, call["x"].shape, call["topk_idx"].shape[1]
    size, own, most, G = world.size, call.sizes["e"], tokens_at_most(call), scales_of(call)
    each, threads = several(call, PER_SM, 1), 32 * PER_SM_OPTIONS["num_warps"]
    sms = num_programs(world, world.num_sms)
    third, K2, W2 = words_of(H * call.dtype.itemsize), triton.next_power_of_2(max(K, 1)), triton.next_power_of_2(size)
    expert_words = triton.cdiv(size * own, 3)
    counted = expert_words + size
    sending = max(1, min(SENDING, sms // 2)) if size > 1 else 0
    block, parts = parts_of(third, T, each * max(sms - sending, 1), threads)
    sent = min(SENT * block, triton.next_power_of_2(max(third, 1)))
    tokens = max(1, min(MOST_COUNTED, COUNTED_AT_A_TIME // max(K2 * K2, K2 * W2, W2 * W2)))
    sized = Few(
        T, H, call["max_tokens"], call.sizes["s"], G, most, third, words_of(4 * G), parts,
        *map(tl.constexpr, (
            call["num_experts"], own, triton.next_power_of_2(own), K, K2, call["alignment"], bool(call["clear"]),
            chunk_of(call["max_tokens"]), expert_words, counted, each, sending, tokens, block, sent, threads,
            T <= most, G > 0,
        )),
    )  # fmt: skip
    memory = Words(*flagged.slots_of(world, size * (counted + most * (K + 1 + third + words_of(4 * G)))))
    start = cooperative_launch(world, low_latency_kernel, (each * sms,), **PER_SM_OPTIONS)

    def launch(x: Any, idx: Any, weights: Any, out: Any, scales: Any, *others: Any) -> Any:
        x, scales, to = bits(x, scales, (out, *others))
        start(x, idx, weights, scales, to, memory, sized, world.device)
        return out, *others

    return launch
