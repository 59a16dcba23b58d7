"""Flash decode: every rank ends with the attention of a few query tokens of each sequence over the keys of all ranks.

Each rank holds some keys of every sequence, in pages. It attends over those (`attention`). Its result of a row is E
numbers and an lse in fp32; the ranks exchange these, and each merges them in the order of ranks, so that all hold the
same bits. rows = B * SQ * heads.

fused: one launch and no barrier. Results go in words of data and flag to every rank as soon as they are made:
    6 * (W - 1) * rows * E bytes out of each rank, for E a power of two of at least 16.
waits: two launches: a rank's result, and a kernel that puts it to every rank in these words, and merges rows as they
    come: as many bytes, no barrier.
unfused: three launches: a rank's result, pkt's all-gather, and a kernel that merges: the gathered bytes are
    4 * (W - 1) * rows * (E + 1).
nccl: the same with NCCL's all-gather, through torch.distributed.
nodes: the only form in a world of several nodes, of M ranks each: two launches, a rank's result, and a kernel that
    merges, see nodes.py. Each rank merges 1 / M of the rows of its node and puts them to each of the other N - 1 nodes:
    4 * (N - 1) / M * rows * (E + 1) bytes out of each rank over the network, and 8 * (M - 1) / M * rows * (E + 1) in
    the node. On GPUs it has run on two nodes of one host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pkt.errors import DtypeError
from pkt.runtime.groups import process_group
from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.factories import empty, signals, zeros
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World
from pkt.wording import count_text

from ..all_gather import OPERATOR as ALL_GATHER
from ..declaration import MAX_STAGES, Call, Case, Form, Launch, Operand, integer, number
from ..declaration import block as block_size
from ..operator import Operator
from ..shared import flagged, nodes, unfused
from ..shared.checks import FLOATS
from ..shared.grid import num_programs, several
from ..shared.replays import in_one_call
from ..shared.tile_words import words_of_row
from .attention import Decode
from .device import combine_kernel, decode_kernel, exchange_kernel
from .nodes import launch_over_nodes
from .reference import bound, reference

FP8 = torch.float8_e4m3fn, torch.float8_e5m2
"""Of caches, beside q's dtype."""
OUT = 6
"""The place of `out` among a call's tensors; the last one is the lse."""
LEAST_SIDE = 16
"""Of an operand of tl.dot."""
MOST_ROWS, MOST_SUMS = 64, 1 << 14
"""Of a unit: rows, and rows times columns of a value. With more, the kernel spills registers."""
MOST_AN_SM = 32
"""Programs that an SM of sm_90 and sm_100 takes, however small they are."""
STAGE_BYTES = 32 << 10
"""Bytes of a cache that a program loads at a time if every query head has its own keys; twice as many otherwise."""
REGISTERS = 1 << 16
"""Of an SM."""
TAKEN = 128
"""Elements that a warp merges at a time: a thread takes a word of them. With fewer threads share words, and merging
takes ten times as long (`flash_decode_latent_1.json`)."""


def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_dim: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    mode: Literal["fused", "waits", "unfused", "nccl", "nodes"] | None = None,
    block: int | None = None,
    stages: int | None = None,
    warps: int | None = None,
    programs: int | None = None,
    world: World | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): attention of q over a paged cache whose keys the ranks share, whole on every rank. Collective.

    q: (B, SQ, heads, D), bf16, fp16 or fp32, the same on every rank. k_cache: (pages, page, KV heads, D), v_cache:
    (pages, page, KV heads, E), this rank's keys and values, both of q's dtype, or both float8_e4m3fn or float8_e5m2;
    heads is a multiple of KV heads. v_cache may be None: V is then the first `v_dim` elements of K, or all of them, as
    in multi-head latent attention.
    k_scale, v_scale: fp32, of one element, or (KV heads,). The keys are k_cache * k_scale, the values v_cache *
    v_scale, each rank's its own; 1 where None. Without a v_cache V has k_scale, and v_scale must be None. fp8 is
    multiplied in q's dtype, or in fp16 where q is bf16: both hold all its numbers, so the result is that of the
    dequantised cache. For fp16 each row of q is divided by a power of two, which the scores are multiplied with.
    block_table: int32 (B, pages of a sequence), the pages in which this rank's keys of each sequence lie, in the
    order of its keys. Nothing checks that they exist. Ranks may differ in pages, and in pages of a sequence.
    seq_lens: int32 (B, SQ), how many of this rank's keys each query token sees: the first so many, as any causal rule
    makes it if a rank holds its keys in the order of their positions. Where key number i of a sequence of n lies on
    rank i % W, query token s of the last SQ sees (n - SQ + s - rank) // W + 1. Lengths are read on the device, also
    in a replayed CUDA graph; 0 is right. sinks: fp32 (heads,), the same on every rank, a score more for each head, of
    value 0, counted once. scale: of the scores, D ** -0.5 where None. soft_cap: c makes them c * tanh(score / c).

    out: (B, SQ, heads, E), of q's dtype. lse: fp32 (B, SQ, heads), the natural logarithm of the sum of e^score, with
    the sink. Where a query token sees no key on any rank, out is 0, and lse is -inf or the sink. Both are complete when
    the call ends, and the same bits on every rank.

    mode: a form that the top of kernels/flash_decode/host.py describes; fused where None, and nodes over nodes.
    block: keys that a program loads at a time, a power of two of at least 16. stages: so many blocks are loaded or used
    at once. warps: of a program. programs: how many, all of which must be resident. Where None, the best that were
    measured. Caches are used where they are, in any strides of pages, keys and heads, so (pages, KV heads, page, D) as
    a transposed view; TMA loads those of bf16 and fp16 where `block` divides a page, and rows are aligned to 16 bytes.
    Other tensors of any strides are copied.

    Symmetric memory kept: words of 3 / 2 * E fp32 for each row, rounded up to a power of two: fused and waits 2 * W *
    rows of them; and a unit's for each program and each unit, see attention.py. nodes, over N nodes of M ranks, keeps
    2 + 2 * N / M times rows of E + 1 fp32. Raises NotSymmetric, ShapeError,
    DtypeError, Unsupported, CollectiveMismatch.
    """
    tensors = q, k_cache, v_cache, block_table, seq_lens, sinks, out, k_scale, v_scale
    both: Any = OPERATOR(tensors, (v_dim, scale, soft_cap, mode, block, stages, warps, programs), world)
    return both


# -------------------------------------------------------------------------------------------------------------- rules
# The best of the settings in benchmarks/flash_decode.py on an H200 (`flash_decode_1.json`, and for more than 16 rows
# `flash_decode_tried_1.json`): up to 16 rows that share keys two small programs an SM, for more rows one large one.
def _alone(call: Call) -> bool:
    """Whether one row alone attends to a KV head's keys."""
    return call["s"] * (call["h"] // max(call["g"], 1)) == 1


def _small(call: Call) -> bool:
    """Whether the registers and the shared memory of an SM hold two programs."""
    return rows_of(call) == LEAST_SIDE and call["d"] <= 256


def default_block(call: Call) -> int:
    """Keys whose K and V are as many bytes as a program loads at a time, no less than 16 and no more than 128. fp8
    counts as q's dtype, which its numbers have in registers. With 128 keys and more than 16 rows the kernel spills."""
    D, E = call["d"], 0 if call["v_cache"] is None else call["e"]
    twice = call["k_cache"].dtype in FP8 if _small(call) else not _alone(call)
    keys = STAGE_BYTES * (2 if twice else 1) // max((D + E) * call.dtype.itemsize, 1)
    return min(max(1 << keys.bit_length() - 1, LEAST_SIDE), 128 if rows_of(call) <= LEAST_SIDE else 64)


def default_stages(call: Call) -> int:
    """Loads that are on their way at once."""
    return 3 if _alone(call) and call["k_cache"].dtype not in FP8 else 2


def rows_of(call: Call) -> int:
    """Rows of a unit."""
    heads, kv_heads = call["h"], call["g"]
    most = min(MOST_ROWS, max(MOST_SUMS // _padded(call.shape[-1]), LEAST_SIDE))
    return min(max(triton.next_power_of_2(call["s"] * (heads // max(kv_heads, 1))), LEAST_SIDE), most)


def default_warps(call: Call) -> int:
    """More where rows are long or many, so that they fit into the registers."""
    return 4 if _small(call) else 8


def default_programs(call: Call) -> int:
    """One an SM, or two small ones on a GPU."""
    return (2 if call.on_gpu and _small(call) else 1) * num_programs(call.world, call.world.num_sms)


def keys_at_a_time(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `block`."""
    block_size(call, name, value)
    if value is not None and value < LEAST_SIDE:
        raise call.refuse(name, value, f"at least {LEAST_SIDE}")
    return value


def warps_of(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `warps`."""
    integer()(call, name, value)
    if value is not None and value not in (1, 2, 4, 8, 16):
        raise call.refuse(name, value, "1, 2, 4, 8 or 16")
    return value


def resident_programs(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `programs`: no more than may run at once. Of large programs fewer fit, as the launch
    says."""
    return integer(1, several(call, MOST_AN_SM, call.world.num_sms))(call, name, value)


def _shape(call: Call) -> tuple[int, ...]:
    """Of out; what letters do not say is checked here."""
    sizes, v_dim = call.sizes, call["v_dim"]
    _check_dtypes(call)
    if sizes["h"] % max(sizes["g"], 1):
        raise call.refuse("q", count_text(sizes["h"], "head"), f"a multiple of the {count_text(sizes['g'], 'KV head')}")
    for name in ("k_cache", "v_cache"):
        cache = call.tensors.get(name)
        if cache is not None and cache.shape[-1] > 1 and cache.stride(-1) != 1:
            raise call.refuse(name, f"strides {tuple(cache.stride())}", "elements of a key that lie together")
    if v_dim is None:
        return sizes["b"], sizes["s"], sizes["h"], sizes.get("e", sizes["d"])
    if "e" in sizes and call.tensors.get("v_cache") is not None:
        raise call.refuse("v_dim", v_dim, "None where there is a v_cache")
    if sizes["d"] and v_dim > sizes["d"]:
        raise call.refuse("v_dim", v_dim, f"no more than the {count_text(sizes['d'], 'element')} of a key")
    return sizes["b"], sizes["s"], sizes["h"], v_dim


def _check_dtypes(call: Call) -> None:
    """Of the caches; and that v_scale has a v_cache. Raises DtypeError and ShapeError."""
    k, v = call.tensors.get("k_cache"), call.tensors.get("v_cache")
    if k is not None and k.dtype not in (call.dtype, *FP8):
        wanted = f"q's {call.dtype}, or {' or '.join(map(str, FP8))}"
        raise DtypeError.argument(call.name, "k_cache", k.dtype, wanted, call.world.rank)
    if k is not None and v is not None and v.dtype != k.dtype:
        raise DtypeError.argument(call.name, "v_cache", v.dtype, f"k_cache's {k.dtype}", call.world.rank)
    if k is not None and v is None and call.tensors.get("v_scale") is not None:
        raise call.refuse("v_scale", "a tensor", "None where there is no v_cache: V is scaled by k_scale")


def _scale_shape(name: str) -> Callable[[Call], str]:
    """Of the scale `name`: of no dimension, one element or an element for each KV head."""

    def shape(call: Call) -> str:
        scale = call.tensors.get(name)
        if scale is None or scale.numel() != 1 or scale.ndim > 1:
            return "g"
        return "1" if scale.ndim else ""

    return shape


# -------------------------------------------------------------------------------------------------------------- plans
def _padded(n: int) -> int:
    return max(triton.next_power_of_2(n), LEAST_SIDE)


class _Plan(NamedTuple):
    """A launch of decode_kernel."""

    argument: Callable[[Sequence[Any], torch.Tensor], Decode]
    """Of the kernels, from the tensors of a call and the memory of results."""
    memory: SymmetricTensor
    """Where decode_kernel leaves results: the words of all ranks, or this rank's result."""
    launch: Callable[[Sequence[Any]], Any]
    take: int
    """Rows that a program merges at a time."""


def _decode(call: Call, fused: bool) -> _Plan:
    world, (B, SQ, H, E), D, G = call.world, call.shape, call["d"], call["g"]
    k, v, table = call["k_cache"], call["v_cache"], call["block_table"]
    v = k if v is None else v
    columns, rows = _padded(E), rows_of(call)
    d1 = _padded(D) if D <= LEAST_SIDE else 1 << D.bit_length() - 1
    d2 = 0 if d1 >= D else _padded(D - d1)
    programs = call["programs"]
    take = min(max(TAKEN * call["warps"] // columns, 1), rows)
    runs = min(take, 1 << max(programs * take // max(B * SQ * H, 1), 1).bit_length() - 1)
    words, room = words_of_row.fn(columns, 1), 0
    if fused:
        memory, flags, room = flagged.slots_of(world, world.size * B * SQ * H * words)
    else:
        flags = world.keep((call.name, "launches"), lambda: signals(1, name=f"{call.name}.launches", world=world))
        memory = _results(call, 1)
    blocks = triton.cdiv(SQ * (H // G), rows)
    parts = _parts(call, (programs + B * G * blocks) * rows * words, room)
    cap = call["soft_cap"]
    numbers = (
        B, table.shape[1], k.shape[0], table.shape[1] * k.shape[1] if k.shape[0] else 0,
        *k.stride()[:3], *v.stride()[:3], room,
        float(D**-0.5 if call["scale"] is None else call["scale"]), float(cap or 1.0),
    )  # fmt: skip
    tma = _boxed(call)
    constants = (
        triton.next_power_of_2(B), triton.next_power_of_2(SQ), SQ, H, H // G, D, E, k.shape[1],
        call["v_cache"] is None and columns == d1, *_each_head(call), cap is not None, fused, rows, blocks, G * blocks,
        call["block"], d1, d2, columns, words, tma,
    )  # fmt: skip
    same = *numbers, *map(tl.constexpr, constants)

    def argument(tensors: Sequence[Any], memory: torch.Tensor) -> Decode:
        q, k, v, table, lens, sinks, out, k_scale, v_scale, lse = tensors
        if v is None:
            v, v_scale = k, k_scale
        return Decode(q, k, v, table, lens, sinks, out, k_scale, v_scale, lse, parts, flags, memory, *same)

    # Without TMA a tile's pages come a stage before its keys. Registers are not shared: an SM has one program, or two
    # with 4 warps.
    warps, stages = call["warps"], call["stages"] + 1 if tma else 2 * call["stages"] + 1
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": min(255, REGISTERS // (32 * warps))}
    start = cooperative_launch(world, decode_kernel, (programs,), **options)

    def launch(tensors: Sequence[Any]) -> Any:
        start(argument(tensors, memory), world.device, take, runs)

    return _Plan(argument, memory, launch, take)


def _boxed(call: Call) -> bool:
    """Whether TMA can load the tiles: 16-bit elements, each tile in one page, and rows at multiples of 16 bytes."""
    caches = [x for x in (call["k_cache"], call["v_cache"]) if x is not None]
    pages, page = caches[0].shape[:2]
    if pages == 0 or page % call["block"] or not call.dtype.itemsize == caches[0].element_size() == 2:
        return False
    return all(n % 16 == 0 for x in caches for n in (x.data_ptr(), *(2 * stride for stride in x.stride()[:3])))


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


def _results(call: Call, ranks: int) -> SymmetricTensor:
    """Rows of so many ranks, each with its lse."""
    world, (*rows, E), name = call.world, call.shape, f"{call.name}.results"
    shape = ranks * math.prod(rows), E + 1
    return world.keep((name, ranks, *shape), lambda: empty(*shape, dtype=torch.float32, name=name, world=world))


def _fused(call: Call) -> Launch:
    plan = _decode(call, True)

    def launch(*tensors: Any) -> Any:
        plan.launch(tensors)
        return tensors[OUT], tensors[-1]

    return launch


def _waits(call: Call) -> Launch:
    world, decode, (*rows, E) = call.world, _decode(call, False), call.shape
    words = words_of_row.fn(_padded(E), 1)
    slots, flags, room = flagged.slots_of(world, world.size * math.prod(rows) * words)
    programs = num_programs(world, triton.cdiv(math.prod(rows), decode.take))
    start = cooperative_launch(world, exchange_kernel, (programs,))

    def launch(*tensors: Any) -> Any:
        decode.launch(tensors)
        p = decode.argument(tensors, slots)._replace(flags_ptr=flags, room=room)
        start(p, decode.memory, world.device, decode.take)
        return tensors[OUT], tensors[-1]

    return launch


def _gathered(make: Callable[[Call, SymmetricTensor, SymmetricTensor], Callable[[], Any]]) -> Callable[[Call], Launch]:
    """The plan of a form of three launches. make(call, mine, everybodys) returns what gathers the ranks' results."""

    def plan(call: Call) -> Launch:
        decode, everybodys, size = _decode(call, False), _results(call, call.world.size), call.world.size
        gather = make(call, decode.memory, everybodys)
        grid = (triton.cdiv(math.prod(call.shape[:3]), decode.take),)
        merge = beside_launch(call.world, combine_kernel, grid)

        def launch(*tensors: Any) -> Any:
            decode.launch(tensors)
            gather()
            merge(decode.argument(tensors, everybodys), size, decode.take)
            return tensors[OUT], tensors[-1]

        return launch

    return plan


def _by_pkt(call: Call, mine: SymmetricTensor, everybodys: SymmetricTensor) -> Callable[[], Any]:
    gather = ALL_GATHER.planned(call.world, mine, everybodys)
    return lambda: gather(mine, everybodys)


def _by_nccl(call: Call, mine: SymmetricTensor, everybodys: SymmetricTensor) -> Callable[[], Any]:
    group, to, of = process_group(call.world), everybodys.plain(), mine.plain()
    return lambda: dist.all_gather_into_tensor(to, of, group=group)


def _over_nodes(call: Call) -> Launch:
    decode, (*rows, E) = _decode(call, False), call.shape
    merge = launch_over_nodes(call.world, math.prod(rows), E, decode.take, decode.memory)

    def launch(*tensors: Any) -> Any:
        decode.launch(tensors)
        merge(decode.argument(tensors, decode.memory))
        return tensors[OUT], tensors[-1]

    return launch


# -------------------------------------------------------------------------------------------------------- declaration
def _table(shape: tuple[int, ...], generator: torch.Generator, call: Call) -> torch.Tensor:
    """Any pages."""
    return torch.randint(0, max(call.sizes["p"], 1), shape, generator=generator, dtype=torch.int32)


def _lens(shape: tuple[int, ...], generator: torch.Generator, call: Call) -> torch.Tensor:
    """From no key to all that fit, each query token one more than the one before, or as many."""
    most = call.sizes["t"] * call.sizes["n"] if call.sizes["p"] else 0
    first = torch.randint(-(most // 2) - 1, most + 1, (shape[0], 1), generator=generator)
    more = torch.randint(0, 2, shape, generator=generator).cumsum(1)
    return (first + more).clamp(0, most).int()


def _sinks(shape: tuple[int, ...], generator: torch.Generator, call: Call) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _scale(shape: tuple[int, ...], generator: torch.Generator, call: Call) -> torch.Tensor:
    return torch.rand(shape, generator=generator) + 0.5


SIZES = {"b": 2, "s": 2, "h": 6, "d": 8, "p": 5, "n": 6, "g": 2, "e": 8, "t": 3}
"""Of a small case. Each launch has other lengths."""
LARGE = {"b": 16, "s": 1, "h": 64, "d": 128, "p": 64, "n": 16, "g": 8, "e": 128, "t": 512}
ONE_UNIT = {"b": 1, "s": 2, "h": 1, "d": 16, "p": 3, "n": 16, "g": 1, "e": 16, "t": 6}
"""A case of which programs take parts, for many schedules."""
SETTINGS = {
    "block": default_block, "stages": default_stages, "warps": default_warps, "programs": default_programs
}  # fmt: skip
SMALL = {"block": 16, "stages": 1, "warps": 4, "programs": 2}
MERGED = "4 (W - 1) rows (E + 1)"
OPERATOR = Operator(
    flash_decode,
    tensors={
        "q": Operand("b s h d", FLOATS, same=True),
        "k_cache": Operand("p n g d", (*FLOATS, *FP8), strided=True),
        "v_cache": Operand("p n g e", (*FLOATS, *FP8), optional=True, strided=True),
        "block_table": Operand("b t", (torch.int32,), make=_table),
        "seq_lens": Operand("b s", (torch.int32,), make=_lens),
        "sinks": Operand("h", (torch.float32,), optional=True, same=True, make=_sinks),
        "k_scale": Operand(_scale_shape("k_scale"), (torch.float32,), optional=True, make=_scale),
        "v_scale": Operand(_scale_shape("v_scale"), (torch.float32,), optional=True, make=_scale),
    },
    result=_shape,
    also={"lse": Operand("b s h", (torch.float32,))},
    arguments={"v_dim": integer(least=1), "scale": number(), "soft_cap": number(above=0)},
    settings={
        "block": keys_at_a_time,
        "stages": integer(1, MAX_STAGES),
        "warps": warps_of,
        "programs": resident_programs,
    },
    forms={
        "fused": Form(
            _fused, "in one launch, results in words of data and flag to every rank, no barrier",
            "6 (W - 1) rows E", settings=SETTINGS, small=SMALL,
        ),
        "waits": Form(
            in_one_call(_waits),
            "two launches, the second puts results in such words and merges rows as they come, no barrier",
            "6 (W - 1) rows E", settings=SETTINGS, small=SMALL,
        ),
        "unfused": Form(
            in_one_call(_gathered(_by_pkt)), "three launches, with pkt's all-gather of the ranks' results", MERGED,
            settings=SETTINGS, small=SMALL,
        ),
        "nccl": Form(
            _gathered(_by_nccl), "three launches, with NCCL's all-gather, through torch.distributed", MERGED,
            settings=SETTINGS, small=SMALL, gpu=True, fits=unfused.lacks_group,
        ),
    },
    across={
        "nodes": Form(
            _over_nodes, "a node's results are merged, then cross the network once, along the rails",
            "4 (N - 1) / M rows (E + 1) over the network, 8 (M - 1) / M rows (E + 1) in the node", fits=nodes.fits,
            settings=SETTINGS, small=SMALL,
        ),
    },
    reference=reference,
    bound=bound,
    private="pt",
    cases=(
        Case(sizes=SIZES, arguments={"mode": "fused", "given": ("v_cache",)}, explore=False, large=LARGE),
        *(
            Case(
                sizes=SIZES, arguments={"mode": mode, "given": ("v_cache", "k_scale", "v_scale")}, explore=False,
                large=LARGE,
            )
            for mode in ("waits", "unfused")
        ),
        Case(sizes=ONE_UNIT, arguments={"mode": "fused"}, ranks=2),
        Case(  # TMA loads its tiles
            sizes=ONE_UNIT, arguments={"mode": "fused", "given": ("v_cache",)}, ranks=2, dtype=torch.float16,
            large=LARGE | {"n": 64, "t": 128},
        ),
        Case(sizes=ONE_UNIT, arguments={"mode": "waits"}, ranks=2),
        Case(
            sizes=SIZES, arguments={"mode": "nodes", "given": ("v_cache", "sinks")}, ranks=8, node_size=4,
            explore=False, large=LARGE,
        ),
        Case(sizes=SIZES, arguments={"mode": "nodes"}, ranks=8, node_size=2, explore=False),
        Case(sizes=ONE_UNIT | {"t": 1}, arguments={"mode": "nodes"}, ranks=4, node_size=2),
    ),
)  # fmt: skip
