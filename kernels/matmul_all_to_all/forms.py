"""Matrix product fused into an all-to-all of heads: rank r ends with all positions of its heads of x @ weight.

Before attention, of sequences that are split among the ranks: rank r holds S positions x (B, S, K), and weights (K, H,
D) that name heads. It gets its H / size heads of the positions of all ranks, (B, size * S, H / size, D), in which
`torch.nn.functional.scaled_dot_product_attention` reads them. `pkt.all_to_all_matmul` goes back. Heads of queries and
keys may be normed and rotated on the way (`shared/rotary.py`).

push: one launch. Tiles are computed in an order that ends with the rank's own heads. Each tile is stored, as it is
    finished, to the rank of its heads, and signalled: into its `out` if that is symmetric, else into an inbox, from
    which that rank copies it. Norm and rotation are done in the tile, in fp32, before it is rounded.
copy: torch's product, of the columns of one rank after the other, the own ones last. Copy engines move each part while
    the next one is computed, see `copied`.
unfused: torch's product, a kernel that norms and rotates in place where that is wanted, and pkt's all-to-all.

(size - 1) / size * B * S * H * D * itemsize bytes out of and into each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World
from pkt.wording import count_text

from ..declaration import Call, Case, Form, Launch, Operand, integer, number
from ..gradients import Backward, Gradients, Recorded
from ..operator import Operator
from ..shared import heads, products, rms_norm, rotary
from ..shared.checks import FLOATS, symmetric_out
from ..shared.grid import COPY_BYTES, num_programs
from ..shared.heads import Matrix
from ..shared.rotary import turned
from ..shared.tile_product import Tiles, accumulate, default_tiles, finish, stack, store_tile, weights
from .copied import copied
from .unfused import unfused

CALL = "matmul_all_to_all"
Tensors = Sequence[torch.Tensor]


def reference(
    rank: int, x: Tensors, weight: Tensors, bias: Tensors | None = None, norm: Tensors | None = None,
    cos: Tensors | None = None, sin: Tensors | None = None, qk_heads: int | None = None, eps: float = 1e-6,
) -> torch.Tensor:  # fmt: skip
    """What `rank` gets from the ranks' operands, in fp64."""
    parts = []
    for at, found in enumerate(_products(rank, x, weight, bias)):
        n = qk_heads or 0
        own = norm and norm[at].tensor_split(len(x), 0)[rank][:n]
        turned = rotary.exact(found[:, :, :n], own, cos and cos[at], sin and sin[at], eps)
        parts.append(torch.cat([turned, found[:, :, n:]], 2))
    return torch.cat(parts, 1)


def _products(rank: int, x: Tensors, weight: Tensors, bias: Tensors | None) -> Iterator[torch.Tensor]:
    """Of each rank's positions the heads of `rank`, in fp64."""
    for at, (rows, matrix) in enumerate(zip(x, weight)):
        found = torch.einsum("bsk,khd->bshd", rows.double(), matrix.double())
        yield (found + bias[at].double() if bias else found).tensor_split(len(x), 2)[rank]


def bound(
    rank: int, dtype: torch.dtype, roundings: int, x: Tensors, weight: Tensors, bias: Tensors | None = None,
    norm: Tensors | None = None, cos: Tensors | None = None, sin: Tensors | None = None, qk_heads: int | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor]:  # fmt: skip
    """How far right elements may be off. A product is a sum of K terms and a bias in fp32. "unfused", of two roundings,
    rounds it, then the bias added to it, then what it norms and rotates."""
    unit, tiny, n, parts = rms_norm.UNIT[dtype], rms_norm.TINY[dtype], qk_heads or 0, []
    sizes = (operand and [t.double().abs() for t in operand] for operand in (x, weight, bias))
    for at, (exact, size) in enumerate(zip(_products(rank, x, weight, bias), _products(rank, *sizes))):
        before = (x[at].shape[-1] + 3) * rotary.FP32 * size
        stored = before + roundings * (unit * (size + before) + tiny)
        off = stored if roundings > 1 else before
        own = norm and norm[at].tensor_split(len(x), 0)[rank][:n]
        angles = cos and cos[at], sin and sin[at]
        off = rotary.bound(exact[:, :, :n], off[:, :, :n], own, *angles, eps)
        off = off + unit * (rotary.exact(exact[:, :, :n], own, *angles, eps).abs() + off) + tiny
        parts.append(torch.cat([off, stored[:, :, n:]], 2))
    return (torch.cat(parts, 1),)


# ------------------------------------------------------------------------------------------------------------- device
class Push(NamedTuple):
    """What the kernel works on. n = H / size * D: the columns of a rank. A row block is BLOCK_M rows of one of the B
    sequences."""

    x_ptr: Any  # (B, S, K) this rank's
    weight_ptr: Any  # (K, size * n), or (size * n, K) if TRANSPOSED, this rank's
    bias_ptr: Any  # (size * n,) this rank's, or None
    norm_ptr: Any  # (size * n,) this rank's, or None
    cos_ptr: Any  # fp32 (S, D / 2) this rank's, or None
    sin_ptr: Any  # the same
    out_ptr: Any  # (B, size * S, n) this rank's; on every rank if DIRECT: rank r stores its positions
    inbox_ptr: Any  # (B, size * S, n) on every rank: rank r stores its positions; None if DIRECT
    ready_ptr: Any  # int32 (size, row blocks) on every rank: tiles of a row block that rank r has ever stored here
    free_ptr: Any  # int32 (size,) on every rank: launches that rank r has begun, so that its inbox and `out` are free
    B: Any
    S: Any
    K: Any
    n: Any
    qk_heads: Any  # of a rank, the first ones: they are normed and rotated
    eps: Any
    D: tl.constexpr  # elements of a head
    TURNED: tl.constexpr  # some heads are normed or rotated
    DIRECT: tl.constexpr
    TMA: tl.constexpr
    TRANSPOSED: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    GROUP: tl.constexpr
    COPY: tl.constexpr  # elements that a program copies at a time


@triton.jit
def _collect(p, world, epoch):
    """Wait for the tiles of the other ranks, in the order in which they come. Without DIRECT copy them to `out`."""
    rank = tl.cast(world.rank, tl.int32)
    num_m = tl.cdiv(p.S, p.BLOCK_M)
    blocks = p.B * num_m
    for t in range(tl.program_id(0), (world.size - 1) * blocks, tl.num_programs(0)):
        source = (rank + world.size - 1 - t // blocks) % world.size
        i = t % blocks
        pl.wait(p.ready_ptr + source * blocks + i, epoch * tl.cdiv(p.n, p.BLOCK_N), world)
        if not p.DIRECT:
            row = i % num_m * p.BLOCK_M
            start = (tl.cast(i // num_m * world.size + source, tl.int64) * p.S + row) * p.n
            count = tl.minimum(p.S - row, p.BLOCK_M) * p.n
            for at in range(0, count, p.COPY):
                offs = at + tl.arange(0, p.COPY)
                moved = tl.load(p.inbox_ptr + start + offs, mask=offs < count)
                tl.store(p.out_ptr + start + offs, moved, mask=offs < count)


@triton.jit
def push_kernel(p, world):
    rank = tl.cast(world.rank, tl.int32)
    epoch = pl.epoch(p.ready_ptr, world)
    if tl.program_id(0) == 0:
        # before overwrite: what read my inbox and `out` has ended
        for d in tl.static_range(1, world.size):
            pl.signal(p.free_ptr + rank, (rank + d) % world.size, world)
    num_m = tl.cdiv(p.S, p.BLOCK_M)
    num_n = tl.cdiv(p.n, p.BLOCK_N)
    blocks = p.B * num_m
    x = stack(p.x_ptr, p.B, p.S, p.K, p.K, p.BLOCK_M, p.BLOCK_K, p.TMA)
    w = weights(p.weight_ptr, 1, p.K, world.size * p.n, p.BLOCK_K, p.BLOCK_N, p.TMA, p.TRANSPOSED)
    free = rank  # the last rank that this program has waited for
    for t in range(tl.program_id(0), world.size * blocks * num_n, tl.num_programs(0)):
        owner = (rank + 1 + t // (blocks * num_n)) % world.size
        i, j = pl.order.supergroup(t % (blocks * num_n), blocks, num_n, p.GROUP)
        b = i // num_m
        row = i % num_m * p.BLOCK_M
        col = owner * p.n + j * p.BLOCK_N
        acc = tl.zeros((p.BLOCK_M, p.BLOCK_N), tl.float32)
        acc = accumulate(acc, x, b, w, 0, 1, row, col, p.S, world.size * p.n, p.K, p.K, p.TMA, p.TRANSPOSED, p.BLOCK_K)
        tile = finish(acc, p.bias_ptr, col, world.size * p.n, "none")
        if p.TURNED:
            head = j * (p.BLOCK_N // p.D)
            if head < p.qk_heads:
                norm_ptr = p.norm_ptr
                if norm_ptr is not None:
                    norm_ptr += owner * p.n
                tile = turned(tile, norm_ptr, p.cos_ptr, p.sin_ptr, head, p.qk_heads, row, p.S, p.eps, p.D)
        target_ptr = p.out_ptr
        if owner != rank:
            if owner != free:
                pl.wait(p.free_ptr + owner, epoch, world)  # before overwrite
                free = owner
            target_ptr = pl.peer(p.out_ptr if p.DIRECT else p.inbox_ptr, owner, world)
        target_ptr += tl.cast(b * world.size + rank, tl.int64) * p.S * p.n
        target = stack(target_ptr, 1, p.S, p.n, p.n, p.BLOCK_M, p.BLOCK_N, p.TMA)
        store_tile(target, 0, tile, row, j * p.BLOCK_N, p.S, p.n, p.n, p.TMA)
        if owner != rank:
            pl.signal(p.ready_ptr + rank * blocks + i, owner, world)  # publish
    _collect(p, world, epoch)


def matmul_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    qk_heads: int | None = None,
    eps: float = 1e-6,
    mode: Literal["push", "copy", "unfused"] | None = None,
    tiles: Sequence[int] | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """All positions of this rank's heads of the product `x @ weight`. Collective.

    The sequence has size * S positions; rank r holds those from r * S on, as of `pkt.shard_sequence`, and gets the
    heads from r * H / size on.

    x: (B, S, K), this rank's positions; bf16, fp16 or fp32. weight: (K, H, D) of x's dtype, for H heads of D elements;
        H is a multiple of the number of ranks. Contiguous, or the view `w.t().unflatten(1, (H, D))` of a Linear's
        weight; one of other strides is copied at each call. The same shapes on every rank; each rank multiplies its
        positions with its own weight. bias: (H, D) of x's dtype, the same on every rank.
    out: (B, size * S, H / size, D) of x's dtype; shares no memory with the operands. A new tensor where None. Into a
        symmetric one "push" and "copy" bring the peers' parts without a further copy.

    For queries, keys and values in one call, the weight has the heads of rank 0 first, those of its queries, keys and
    values, then those of rank 1: see `pkt.join_heads`. A head of keys that several ranks need is in it for each.

    qk_heads: the first so many of each rank's heads, those of its queries and keys, are normed, if `norm` is given, and
        then rotated, if `cos` and `sin` are. None where neither is wanted. D is even; "push" takes powers of two from
        16 to 256. norm: (H, D) of x's dtype, the same on every rank, as `pkt.join_heads` makes one of (heads, D) for
        queries, keys and values; those of values are not used. An element is divided by the root of its head's mean
        square plus eps, and times `norm`. cos, sin: fp32 (S, D / 2), of this rank's positions, for all sequences. The
        halves (y1, y2) of a head become (y1 * cos - y2 * sin, y2 * cos + y1 * sin), as Hugging Face's Llama has it.
        Such calls have no gradient.

    mode: a form that the top of kernels/matmul_all_to_all/forms.py describes; where None "copy"
        where each rank gets 2.6 million elements or more of a rank's product, else "unfused".
    tiles: "push": (BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES, MAXNREG): blocks are powers of two from 16,
        and those left out are as in `Tiles`. The same on every rank.

    Sums are fp32. "push" adds the bias to them, norms, rotates and rounds once; the others round before they add the
    bias, and before they norm. Returns `out`, complete; the operands may be overwritten at once.

    Symmetric memory kept: the bytes of the result; with a symmetric `out` nothing for data in "push" and "copy". "copy"
    keeps as many bytes of this GPU's, for one sequence (size - 1) / size of them. Raises ShapeError, DtypeError,
    CollectiveMismatch, Unsupported.
    """
    return OPERATOR((x, weight, out, bias, norm, cos, sin), (qk_heads, eps, mode, tiles), world)


# --------------------------------------------------------------------------------------------------------------- host
def _direct(call: Call) -> bool:
    return isinstance(call.tensors["out"], SymmetricTensor)


def _shape(call: Call) -> str:
    """Of the result; what letters do not say of heads that are normed and rotated is checked here."""
    given = [name for name in ("norm", "cos", "sin") if call.tensors.get(name) is not None]
    heads, h, d = call["qk_heads"], call.sizes["h"], call.sizes["d"]
    if heads is None and given:
        raise call.refuse("qk_heads", None, f"how many heads of a rank are of queries and keys, with {given[0]}")
    if len({"cos", "sin"} & {*given}) == 1:
        raise call.refuse("cos and sin", f"only {given[-1]}", "both or none")
    if heads is not None and h and heads > h:
        raise call.refuse("qk_heads", heads, f"no more than the {count_text(h, 'head')} of a rank")
    if heads is not None and d % 2:
        raise call.refuse("weight", f"heads of {d} elements", "an even number with qk_heads")
    return "b W*s h d"


def _angles(call: Call) -> str:
    """The shape of cos and sin."""
    return f"s {call.sizes['d'] // 2}" if "d" in call.sizes else "s d"


def _fits_a_tile(call: Call) -> str:
    """Why "push" cannot norm and rotate a call's heads."""
    d = call.sizes["d"]
    fits = call["qk_heads"] is None or not d or (LEAST_HEAD <= d <= MOST_HEAD and not d & (d - 1))
    return "" if fits else f"qk_heads with heads of {d} elements, not a power of two from {LEAST_HEAD} to {MOST_HEAD}"


def _tiles(call: Call) -> Tiles:
    """Of "push": those of any product, as wide as a head where heads are normed or rotated."""
    d, columns = call["d"], (call["k"], call["h"] * call["d"])
    plain = call["qk_heads"] is None
    tiles = default_tiles(call["s"], call.dtype, *columns, wide=plain)  # with wide ones the norm spills
    if plain or tiles.block_n >= d:
        return tiles
    return tiles._replace(block_m=max(tiles.block_m * tiles.block_n // d, 16), block_n=d)


def _whole_heads(call: Call) -> dict[str, Any]:
    """The settings of "push". Raises ShapeError where heads that are normed or rotated lie in several tiles."""
    tiles = call["tiles"]
    if call["qk_heads"] is not None and tiles.block_n % max(call["d"], 1):
        raise call.refuse("tiles", tuple(tiles), f"BLOCK_N a multiple of a head's {call['d']} elements")
    return call.settings


def _default(call: Call) -> str:
    part = call["b"] * call["s"] * call["h"] * call["d"]
    return "copy" if call.world.size > 1 and part >= COPIED else "unfused"


def _turns(call: Call) -> bool:
    """Whether some heads are normed or rotated."""
    return call["norm"] is not None or call["cos"] is not None


def _push(call: Call) -> Launch:
    world, tiles, (b, s, k) = call.world, call["tiles"], call["x"].shape
    size, n, dtype, direct = world.size, call["h"] * call["d"], call.dtype, _direct(call)
    blocks, columns = b * triton.cdiv(s, tiles.block_m), triton.cdiv(n, tiles.block_n)
    programs = num_programs(world, size * blocks * columns)

    def make() -> tuple[Any, ...]:
        inbox = None if direct else empty(b, size * s, n, dtype=dtype, name=f"{CALL}.inbox", world=world)
        return inbox, signals(size * blocks + size, name=f"{CALL}.ready", world=world)

    inbox, counters = world.keep((CALL, "push", b, s, n, dtype, direct, programs, *tiles[:2]), make)
    matrix = Matrix.of(call["weight"], 1)
    tma = k > 0 and heads.reaches(dtype, (k, n), call["x"], call["weight"], call["out"])
    same = Push(
        x_ptr=None, weight_ptr=None, bias_ptr=None, norm_ptr=None, cos_ptr=None, sin_ptr=None, out_ptr=None,
        inbox_ptr=inbox, ready_ptr=counters, free_ptr=counters[size * blocks :], B=b, S=s, K=k, n=n,
        qk_heads=call["qk_heads"] or 0, eps=float(call["eps"]), D=tl.constexpr(call["d"]),
        TURNED=tl.constexpr(_turns(call)),
        DIRECT=tl.constexpr(direct), TMA=tl.constexpr(tma), TRANSPOSED=tl.constexpr(matrix.transposed),
        BLOCK_M=tl.constexpr(tiles.block_m), BLOCK_N=tl.constexpr(tiles.block_n), BLOCK_K=tl.constexpr(tiles.block_k),
        GROUP=tl.constexpr(tiles.group), COPY=tl.constexpr(COPY_BYTES // dtype.itemsize),
    )[7:]  # fmt: skip
    start = cooperative_launch(world, push_kernel, (programs,), **tiles.launch_options())

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        start(Push(x, matrix.rows(weight), *others, out, *same), world.device)
        return out

    return launch


def backward(call: Recorded) -> Gradients:
    """Of x alone `all_to_all_matmul`, which hides the exchange. The other gradients need the rows of the gradient
    itself, so where they are wanted, too, these come home once, and two products follow."""
    weight = call["weight"] if "x" in call.wanted else None
    if weight is not None and len(call.wanted) == 1:
        return {"x": call.operator("all_to_all_matmul", call.grad, weight.permute(1, 2, 0))}
    home = call.operator("all_to_all", call.grad.contiguous(), scatter=1, gather=2)
    rows = home.flatten(2).flatten(0, 1)
    found: dict[str, Any] = {}
    if weight is not None:
        found["x"] = torch.mm(rows, weight.flatten(1).t()).view(call.shape("x"))
    if "weight" in call.wanted:
        x, (k, h, d) = call["x"].flatten(0, 1), call.shape("weight")
        (turned,) = call.turned("weight")
        found["weight"] = (
            torch.mm(rows.t(), x).view(h, d, k).permute(2, 0, 1) if turned else torch.mm(x.t(), rows).view(k, h, d)
        )
    if "bias" in call.wanted:
        found["bias"] = rows.sum(0).view(call.shape("bias"))
    return found


COPIED = 512 * 5120
"""Elements of a part of the product from which "copy" is the default. Parts of 512 x 5120 and of 1024 x 2560 take 6 %
longer than one product of all, those of 512 x 2560 20 % (`matmul_in_parts_1.json`). As measured on two ranks, see
`matmul_all_to_all_tokens_2.json`."""
LEAST_HEAD, MOST_HEAD = 16, 256
"""Elements of a head that "push" norms and rotates: a tile holds whole heads, and has 16 columns at least."""


def _cosines(shape: tuple[int, ...], generator: torch.Generator, call: Call) -> torch.Tensor:
    """Of any angles: a rotation need not keep lengths."""
    return torch.randn(shape, generator=generator).cos()


MOVES = "(W - 1) / W |x @ weight|"
SMALL = {"tiles": (64, 256, 32)}
FEW = {"mode": "push", "tiles": (16, 16, 16)}
WIDE = 16, 32, 16
TURNED = {"given": ("bias", "norm", "cos", "sin"), "qk_heads": 2}
OPERATOR = Operator(
    matmul_all_to_all,
    tensors={
        "x": Operand("b s k", FLOATS), "weight": Operand("k W*h d", strided=True),
        "bias": Operand("W*h d", optional=True, same=True), "norm": Operand("W*h d", optional=True, same=True),
        "cos": Operand(_angles, (torch.float32,), optional=True, make=_cosines),
        "sin": Operand(_angles, (torch.float32,), optional=True, make=_cosines),
    },
    result=_shape,
    arguments={"qk_heads": integer(least=1), "eps": number(above=0)},
    settings={"tiles": products.tiles},
    forms={
        "push": Form(
            _push, "tiles go to the rank of their heads as they are finished", MOVES, agrees=symmetric_out, small=SMALL,
            settings={"tiles": _tiles}, fits=_fits_a_tile, complete=_whole_heads,
            seconds=heads.seconds_pushed_tiles,
        ),
        "copy": Form(
            copied, "torch's product, part by part; copy engines move a part while the next is computed", MOVES,
            agrees=symmetric_out, roundings=lambda size: 2, seconds=heads.seconds_copied_columns,
        ),
        "unfused": Form(
            unfused, "torch's product, then `pkt.all_to_all`", MOVES, agrees=symmetric_out,
            roundings=lambda size: 2, seconds=heads.seconds_unfused(heads.sent_columns),
        ),
    },
    default=_default,
    reference=reference,
    backward=Backward(
        backward, "of x alone `all_to_all_matmul`; else `all_to_all` once, then two products",
        saves={"x": ("weight",), "weight": ("x",)},
        refuses=lambda keywords, dtype: "" if keywords["qk_heads"] is None else f"qk_heads={keywords['qk_heads']}",
    ),
    bound=bound,
    always=lambda call: call["cos"] is not None and call["out"].numel() > 0,  # by which ranks rotate a mere bias
    cases=(
        Case(
            {"b": 2, "s": 3, "k": 8, "h": 2, "d": 4}, out="new", explore=False,
            large={"b": 1, "s": 4096, "k": 1024, "h": 4, "d": 128},
        ),
        Case({"b": 2, "s": 3, "k": 20, "h": 1, "d": 9}, arguments=FEW, ranks=2, out="new"),
        Case({"b": 1, "s": 5, "k": 8, "h": 1, "d": 20}, arguments=FEW | {"given": ("bias",)}),
        Case({"b": 2, "s": 17, "k": 20, "h": 1, "d": 18}, arguments=FEW | {"tiles": (16, 32, 32)}, explore=False),
        Case({"b": 2, "s": 9, "k": 20, "h": 3, "d": 16}, arguments=FEW | TURNED | {"tiles": WIDE}, explore=False),
        Case({"b": 2, "s": 3, "k": 8, "h": 2, "d": 4}, arguments={"mode": "copy"}, launches=3, out="new"),
        Case({"b": 1, "s": 5, "k": 12, "h": 3, "d": 6}, arguments={"mode": "copy"} | TURNED, ranks=2, out="new"),
        Case({"b": 1, "s": 5, "k": 12, "h": 3, "d": 6}, arguments={"mode": "unfused"} | TURNED, explore=False),
        Case({"b": 3, "s": 1, "k": 33, "h": 2, "d": 16}, arguments={"given": ("bias",)}, out="new", explore=False),
    ),
)  # fmt: skip
