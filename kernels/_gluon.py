"""What the Gluon forms of the fused matmuls share: a product in specialised warps, with the tiles' way out left open.

A program has a loader warp, eight consumer warps (two warpgroups) and a storer warp, all running at once. Loader and
consumers share a ring of STAGES slots of BLOCK_K columns of A and BLOCK_K rows of B. At the end of a tile the ring
lends two slots more: each takes half of the finished tile, which the storer sends where it belongs and then gives the
slot back. So the tensor cores have all of shared memory for loading, and no buffer is kept for a tile that is ready
only once in a while.

Written for Triton 3.6 (`check`): later versions renamed parts of Gluon.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pkt.errors import ShapeError, Unsupported
from pkt.language import ptx
from pkt.runtime.world import World

from . import _common
from ._matmul import Tiles, activate, stored

MAX_PEERS = 7
"""Peers that a kernel has descriptors for: as many as an NVLink domain of eight GPUs needs."""
CONSUMER_WARPS = 8
REGISTERS = 72
"""A thread of the other warps."""
SHARED = 232448
"""Bytes of shared memory that a program may have on sm_90."""

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """The block in shared memory is added to memory, element by element, in the dtype of both: `cp.reduce.async.bulk`.

    Completes as a TMA store does. Gluon 3.6 has the operation but no name for it.
    """
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# -------------------------------------------------------------------------------------------------------- device
@gluon.jit
def first_tile():
    """Where a program begins to count tiles: the first ids get one tile less, where there are not enough for all."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def grouped(t, num_m, num_n, GROUP: gl.constexpr):
    """`pkt.language.order.supergroup`."""
    tiles = GROUP * num_n
    first = (t // tiles) * GROUP
    rows = gl.minimum(num_m - first, GROUP)
    return first + (t % tiles) % rows, (t % tiles) // rows


@gluon.jit
def open_ring(
    a, b, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The ring of a program, empty: slots for A and for B, a barrier each for their being full and empty, and those of
    `hand_over`. TRANSPOSED, here and below: B lies in memory, and in the slots, as (N, K)."""
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    if TRANSPOSED:
        b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    else:
        b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    full = open_barriers(STAGES)
    empty = open_barriers(STAGES)
    return a_ring, b_ring, full, empty, open_barriers(1), open_barriers(1)


@gluon.jit
def narrowed(
    ring, b, TRANSPOSED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The same ring, for tiles of BLOCK_N / SPLIT columns: each slot of B has the blocks of `b`, of which the first is
    used. So a slot is where it was, and a tile may begin while the last wide one is on its way out."""
    a_ring, b_ring, full, empty, ready, taken = ring
    if TRANSPOSED:
        b_ring = b_ring._reinterpret(b.dtype, [STAGES * SPLIT, BLOCK_N // SPLIT, BLOCK_K], b.layout)
    else:
        b_ring = b_ring._reinterpret(b.dtype, [STAGES * SPLIT, BLOCK_K, BLOCK_N // SPLIT], b.layout)
    return a_ring, b_ring, full, empty, ready, taken


@gluon.jit
def slot_of_b(ring, slot, STAGES: gl.constexpr):
    """A slot's part for B."""
    _, b_ring, _, _, _, _ = ring
    return b_ring.index(slot * (b_ring.shape[0] // STAGES))


@gluon.jit
def open_barriers(COUNT: gl.constexpr):
    """`COUNT` barriers for one arrival each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def close_barriers(barriers, COUNT: gl.constexpr):
    """Their memory may be used for something else."""
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(barriers.index(i))


@gluon.jit
def acquire(it, ring, STAGES: gl.constexpr):
    """The slot that step `it` of the ring fills next, once it is free."""
    _, _, _, empty, _, _ = ring
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    return slot


@gluon.jit
def release_halves(it, ring, STAGES: gl.constexpr):
    """The two slots lent at step `it` are free again."""
    _, _, _, empty, _, _ = ring
    for h in gl.static_range(2):
        mbarrier.arrive(empty.index((it + h) % STAGES), count=1)


@gluon.jit
def load_step(
    it, a, row, b, col, k, ring, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the slot of step `it` with A from (row, k) and B from (k, col)."""
    a_ring, _, full, _, _, _ = ring
    slot = acquire(it, ring, STAGES)
    mbarrier.expect(full.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
    tma.async_copy_global_to_shared(a, [row, k], full.index(slot), a_ring.index(slot))
    if TRANSPOSED:
        tma.async_copy_global_to_shared(b, [col, k], full.index(slot), slot_of_b(ring, slot, STAGES))
    else:
        tma.async_copy_global_to_shared(b, [k, col], full.index(slot), slot_of_b(ring, slot, STAGES))


@gluon.jit
def lend_halves(it, ring, STAGES: gl.constexpr):
    """Lend the slots of steps `it` and `it` + 1, empty, for the halves of a finished tile."""
    _, _, full, _, _, _ = ring
    for h in gl.static_range(2):
        slot = acquire(it + h, ring, STAGES)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def lend_sum(
    it, total, row, col, ring,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `lend_halves`, with the tile of `total` at (row, col) in them."""
    _, _, full, _, _, _ = ring
    for h in gl.static_range(2):
        slot = acquire(it + h, ring, STAGES)
        mbarrier.expect(full.index(slot), BLOCK_M * BLOCK_N)
        where = half(it + h, ring, BLOCK_M, BLOCK_N, STAGES, LAYOUT)
        tma.async_copy_global_to_shared(total, [row, col + h * (BLOCK_N // 2)], full.index(slot), where)


@gluon.jit
def half(it, ring, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """A slot's part for B, seen as the half of a tile that it was lent for at step `it`."""
    _, b_ring, _, _, _, _ = ring
    return slot_of_b(ring, it % STAGES, STAGES)._reinterpret(b_ring.dtype, [BLOCK_M, BLOCK_N // 2], LAYOUT)


@gluon.jit
def store_half(
    part, it, ring, bias, col, N, LAYOUT: gl.constexpr, ADD: gl.constexpr, FINISH: gl.constexpr,
    EPILOGUE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Put half a tile, fp32, whose first column is `col`, into the slot lent at step `it`. With ADD what the loader has
    put there is added; with FINISH bias and epilogue applied."""
    _, b_ring, full, _, _, _ = ring
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
    where = half(it, ring, BLOCK_M, BLOCK_N, STAGES, LAYOUT)
    if ADD:
        part += where.load(part.type.layout).to(gl.float32)
    if FINISH:
        if bias is not None:
            cols = col + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, part.type.layout))
            part += gl.load(bias + cols, mask=cols < N, other=0).to(gl.float32)[None, :]
        part = activate(part, EPILOGUE)
    where.store(part.to(b_ring.dtype))


@gluon.jit
def multiply(
    it, steps, ring, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The product of `steps` slots of the ring from step `it` on: its two halves of columns, fp32. One product is in
    flight while the next begins; a slot is free when the one after it has begun."""
    a_ring, _, full, empty, _, _ = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        y = slot_of_b(ring, slot, STAGES)
        if TRANSPOSED:
            y = y.permute([1, 0])
        acc = warpgroup_mma(a_ring.index(slot), y, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k > 0:
            mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
        it += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
    HALF: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N // 2, 16]
    )
    left, right = acc.reshape([BLOCK_M, 2, BLOCK_N // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def consume(
    ring, tiles, where, bias, N, K, PLACE: gl.constexpr, ADD: gl.constexpr, EPILOGUE: gl.constexpr,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers, for this program's share of `tiles`."""
    it = 0
    n = 0
    consume_share(it, n, first_tile(), tiles, ring, where, bias, N, K, PLACE, ADD, EPILOGUE, HALF, TRANSPOSED,
                  BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS)  # fmt: skip


@gluon.jit
def consume_share(
    it, n, begin, end, ring, where, bias, N, K, PLACE: gl.constexpr, ADD: gl.constexpr, EPILOGUE: gl.constexpr,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers, from step `it` of the ring and hand-over n on, for every tile from `begin` to `end` that is this
    program's; returns the next of both. PLACE(t, *where): whether tile t is mine to finish, and its column of tiles.
    With ADD a tile is mine after the other ranks', and what the loader has put into the slots that it lends is added;
    the others go out as they are. Without, all are mine, and nothing is added."""
    steps = gl.cdiv(K, BLOCK_K)
    for t in range(begin, end, gl.num_programs(0)):
        left, right = multiply(it, steps, ring, TRANSPOSED, BLOCK_M, BLOCK_N, STAGES, WARPS)
        it += steps
        mine, j = PLACE(t, *where)
        col = j * BLOCK_N
        if ADD:
            if mine:
                store_half(left, it, ring, bias, col, N, HALF, True, True, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
                col += BLOCK_N // 2
                store_half(right, it + 1, ring, bias, col, N, HALF, True, True, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
            else:
                store_half(left, it, ring, bias, col, N, HALF, False, False, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
                store_half(right, it + 1, ring, bias, col, N, HALF, False, False, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
        else:
            store_half(left, it, ring, bias, col, N, HALF, False, True, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
            col += BLOCK_N // 2
            store_half(right, it + 1, ring, bias, col, N, HALF, False, True, EPILOGUE, BLOCK_M, BLOCK_N, STAGES)
        hand_over(n, ring)
        it += 2
        n += 1
    return it, n


@gluon.jit
def hand_over(j, ring):
    """Tell the storer that the halves of this program's j-th tile are in their slots."""
    _, _, _, _, ready, taken = ring
    fence_async_shared()
    # Not before it has seen the tile before: a barrier's phase is one bit.
    mbarrier.wait(taken.index(0), (j & 1) ^ 1)
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def take_over(j, ring):
    """The storer's side of `hand_over`."""
    _, _, _, _, ready, taken = ring
    mbarrier.wait(ready.index(0), j & 1)
    mbarrier.arrive(taken.index(0), count=1)


@gluon.jit
def publish(world):
    """Before a relaxed signal: what this warp has stored by TMA has landed, for all ranks."""
    ptx.drain(world)
    ptx.cta_barrier()
    ptx.fence("sys")


@gluon.jit
def to_peers(peers, at, part, SIZE: gl.constexpr):
    """A block to the same place on every other rank."""
    for d in gl.static_range(SIZE - 1):
        tma.async_copy_shared_to_global(peers[d], at, part)


@gluon.jit
def pass_on(peers, phase, at, part, SIZE: gl.constexpr):
    """Half a tile into its owner's sum: the first in the chain stores, the others add."""
    for p in gl.static_range(SIZE - 1):
        if phase == p:
            if p == 0:
                tma.async_copy_shared_to_global(peers[p], at, part)
            else:
                tma_reduce_add(peers[p], at, part)


# -------------------------------------------------------------------------------------------------------- host
TILES = Tiles(128, 256, 64)
"""Where nothing else was found faster: `num_stages` slots of the ring."""

BLOCKS = ((128, 256, 64), (128, 128, 64))


def ring_bytes(tiles: Tiles) -> int:
    """Shared memory of the ring and the barriers."""
    return 2 * tiles.num_stages * tiles.block_k * (tiles.block_m + tiles.block_n) + 512


def check_tiles(call: str, tiles: Tiles, world: World) -> None:
    """ShapeError unless the Gluon forms can take `tiles`."""
    used = ring_bytes(tiles)
    wanted = (
        f"blocks of {' or '.join(map(str, BLOCKS))}" if tiles[:3] not in BLOCKS
        else f"{CONSUMER_WARPS} warps and their registers, as it is by default"
        if (tiles.num_warps, tiles.maxnreg) != (CONSUMER_WARPS, Tiles().maxnreg)
        else "group at least 1" if tiles.group < 1
        else f"at least 3 stages in {SHARED} bytes of shared memory" if tiles.num_stages < 3 or used > SHARED
        else ""
    )  # fmt: skip
    if wanted:
        raise ShapeError.argument(call, "tiles", tuple(tiles), wanted, world.rank)


def check(call: str, world: World, *tensors: torch.Tensor) -> None:
    """This form can run here: Unsupported says why not."""
    if torch.device(world.torch_device).type != "cuda":
        raise Unsupported.here(
            f"{call}(schedule='gluon')", "found the simulator", "wanted a GPU: Gluon is compiled only"
        )
    if world.size - 1 > MAX_PEERS:
        raise Unsupported.here(
            f"{call}(schedule='gluon')", f"found {world.size} ranks", f"wanted at most {MAX_PEERS + 1}"
        )
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise Unsupported.here(f"{call}(schedule='gluon')", f"found {tensor.dtype}", "wanted bfloat16 or float16")
    if not _common.aligned(*tensors):
        wanted = "rows that begin at multiples of 16 bytes, as TMA needs; the plain schedules take any"
        raise ShapeError.argument(call, "operands", [tuple(t.shape) for t in tensors], wanted, world.rank)
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version != (3, 6):
        raise Unsupported.here(f"{call}(schedule='gluon')", f"found Triton {triton.__version__}", "wanted Triton 3.6")


def weights_descriptor(b: torch.Tensor, tiles: Tiles) -> TensorDescriptor:
    """Of `b` (K, N), which is stored so, or (N, K)."""
    rows, transposed = stored(b)
    return descriptor(rows, (tiles.block_n, tiles.block_k) if transposed else (tiles.block_k, tiles.block_n))


def peer_descriptors(tensors: Sequence[torch.Tensor], unused: torch.Tensor, block: tuple[int, ...]) -> list:
    """Descriptors for the MAX_PEERS that a kernel takes: of `tensors`, and of `unused` where there are fewer."""
    described = [descriptor(tensor, block) for tensor in tensors]
    return described + [descriptor(unused, block)] * (MAX_PEERS - len(described))


@functools.cache
def layout(dtype: torch.dtype, *block: int) -> Any:
    """The shared layout of a TMA block."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def descriptor(
    tensor: torch.Tensor, block: tuple[int, ...], shape: tuple[int, ...] | None = None, inner: int = 0
) -> TensorDescriptor:
    """A TMA descriptor of `tensor` (contiguous); `shape`: fewer columns than it has, which are cut; `inner`: columns of
    the swizzled rows in shared memory, the block's own where 0. Its checks take as long as a launch, so a plan makes it
    once and lends it each launch's tensor as `base`, of which only the address is read, at the launch."""
    swizzle = layout(tensor.dtype, *block) if not inner else layout(tensor.dtype, *block[:-1], inner)
    return TensorDescriptor(tensor, list(shape or tensor.shape), list(tensor.stride()), list(block), swizzle)
