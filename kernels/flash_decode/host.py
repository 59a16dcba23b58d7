"""Flash decode: every rank ends with the attention of a few query tokens of each sequence over the keys of all ranks.

Each rank holds some keys of every sequence, in pages. It attends over those (`attention`). Its result of a row is E
numbers and an lse in fp32; the ranks exchange these, and each merges them in the order of ranks, so that all hold the
same bits. rows = B * SQ * heads.

fused: one launch and no barrier. Results go in words of data and flag to every rank as soon as they are made:
    6 * (W - 1) * rows * E bytes out of each rank, for E a power of two of at least 16.
gluon: of latent caches on GPUs of sm_90: attention in specialised warps, see gluon.py, then a kernel that merges
    its parts and, of few rows, puts the results in these words and merges rows as they come. Behind many rows of two
    ranks come an all-gather and a third kernel, as in unfused. More ranks share them out in a third kernel, that of
    nodes: each merges 1 / W of the rows and stores them at the others, 8 * (W - 1) / W * rows * (E + 1) bytes. That
    kernel has not run on more than two GPUs.
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

from collections.abc import Callable
from typing import Any, Literal

import torch

from pkt.errors import DtypeError
from pkt.runtime.world import World
from pkt.wording import count_text

from ..declaration import MAX_STAGES, Call, Case, Form, Launch, Operand, integer, number
from ..operator import Operator
from ..shared import nodes, unfused
from ..shared.checks import FLOATS
from ..shared.replays import in_one_call
from .planning import by_nccl, by_pkt, gathered, planned_fused, planned_nodes, planned_waits
from .reference import bound, reference
from .rules import (
    FP8,
    default_block,
    default_form,
    default_programs,
    default_stages,
    default_warps,
    fits_gluon,
    keys_at_a_time,
    resident_programs,
    warps_of,
)


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
    mode: Literal["fused", "gluon", "waits", "unfused", "nccl", "nodes"] | None = None,
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

    mode: a form that the top of kernels/flash_decode/host.py describes. Where None, nodes over nodes, else gluon where
    it can run and no setting is given, else fused. gluon takes q in bf16 and fp16, no v_cache, one KV head, keys of
    513 to 576 elements and values of 512. A cache of q's dtype needs pages of 8, 16, 32 or a multiple of 64 keys, and
    keys at multiples of 16 bytes, on all ranks or on none.
    block: keys that a program loads at a time, a power of two of at least 16. stages: so many blocks are loaded or used
    at once. warps: of a program. programs: how many, all of which must be resident. Where None, the best that were
    measured. Caches are used where they are, in any strides of pages, keys and heads, so (pages, KV heads, page, D) as
    a transposed view; TMA loads those of bf16 and fp16 where `block` divides a page, and rows are aligned to 16 bytes.
    Other tensors of any strides are copied.

    Symmetric memory kept: words of 3 / 2 * E fp32 for each row, rounded up to a power of two: fused and waits 2 * W *
    rows of them where there are several ranks; and a unit's for each program and each unit, see attention.py. gluon
    keeps 64 rows of E + 1 fp32 for each SM and each 64 rows of a sequence, and the words or, of many rows, rows of
    E + 1 fp32: 3 times on two ranks and twice on more. nodes, over N nodes of M ranks, keeps
    2 + 2 * N / M times rows of E + 1 fp32. Raises NotSymmetric, ShapeError,
    DtypeError, Unsupported, CollectiveMismatch.
    """
    tensors = q, k_cache, v_cache, block_table, seq_lens, sinks, out, k_scale, v_scale
    both: Any = OPERATOR(tensors, (v_dim, scale, soft_cap, mode, block, stages, warps, programs), world)
    return both


# ------------------------------------------------------------------------------------------------------------- checks
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


# -------------------------------------------------------------------------------------------------------- declaration
def _gluon(call: Call) -> Launch:
    from .gluon import planned_latent

    return planned_latent(call)


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
LATENT_CACHE = {"b": 2, "s": 2, "h": 8, "d": 576, "p": 24, "n": 64, "g": 1, "e": 512, "t": 300}
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
            planned_fused, "in one launch, results in words of data and flag to every rank, no barrier",
            "6 (W - 1) rows E", settings=SETTINGS, small=SMALL,
        ),
        "gluon": Form(
            in_one_call(_gluon),
            "of latent caches: attention in specialised warps, then a kernel that merges its parts and puts results in "
            "such words", "6 (W - 1) rows E", fits=fits_gluon, gpu=True,
        ),
        "waits": Form(
            in_one_call(planned_waits),
            "two launches, the second puts results in such words and merges rows as they come, no barrier",
            "6 (W - 1) rows E", settings=SETTINGS, small=SMALL,
        ),
        "unfused": Form(
            in_one_call(gathered(by_pkt)), "three launches, with pkt's all-gather of the ranks' results", MERGED,
            settings=SETTINGS, small=SMALL,
        ),
        "nccl": Form(
            gathered(by_nccl), "three launches, with NCCL's all-gather, through torch.distributed", MERGED,
            settings=SETTINGS, small=SMALL, gpu=True, fits=unfused.lacks_group,
        ),
    },
    across={
        "nodes": Form(
            planned_nodes, "a node's results are merged, then cross the network once, along the rails",
            "4 (N - 1) / M rows (E + 1) over the network, 8 (M - 1) / M rows (E + 1) in the node", fits=nodes.fits,
            settings=SETTINGS, small=SMALL,
        ),
    },
    default=default_form,
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
        Case(sizes=LATENT_CACHE, arguments={"mode": "gluon", "v_dim": LATENT_CACHE["e"]}, explore=False),
        Case(
            sizes=SIZES, arguments={"mode": "nodes", "given": ("v_cache", "sinks")}, ranks=8, node_size=4,
            explore=False, large=LARGE,
        ),
        Case(sizes=SIZES, arguments={"mode": "nodes"}, ranks=8, node_size=2, explore=False),
        Case(sizes=ONE_UNIT | {"t": 1}, arguments={"mode": "nodes"}, ranks=4, node_size=2),
    ),
)  # fmt: skip
