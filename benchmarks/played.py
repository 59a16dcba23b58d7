"""Run four ranks' Gluon kernels on two GPUs, in bf16: each GPU plays rank 0, and the other GPU plays its three peers.

    python -m benchmarks.played --ranks 2       benchmarks/results/played_2.json

As many bytes leave and enter a GPU as with four GPUs, and it computes as many tiles. So links and tensor cores slow
each other down as with four, and a part timed alone takes as long. Each result is compared with the product of the data
that arrived. Copy engines and operators of more than one kernel are not played.

The kernels' text is the operators' own. A kernel asks `peer` for the address of a rank's counters. Here `peer` answers
with the place on the other GPU where that rank's signals go. If a kernel waits in vain, the process of its GPU ends.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl

import pkt.language as pl
from benchmarks._case import Case, normal
from benchmarks._command import main
from benchmarks._parts import Apart, changed, copied, leave_out
from pkt.errors import Unsupported
from pkt.kernels.all_gather_matmul import gluon as _gluon_all_gather_matmul
from pkt.kernels.all_gather_matmul.rules import PushPlan, push_plan
from pkt.kernels.matmul_reduce_scatter import gluon as _gluon_matmul_reduce_scatter
from pkt.kernels.matmul_reduce_scatter.rules import settings
from pkt.kernels.shared.gluon_fits import NARROW, TILES
from pkt.runtime.memory import factories
from pkt.runtime.memory.tensor import SymmetricTensor

TITLE = "Four ranks' kernels on two GPUs, bf16"
SIZE = 4
GATHERED, SCATTERED = (4096, 6144), (4096, 6144, 8192)
"""M = N = K of the whole product: sizes at which pushing and storing are among the fastest forms."""

PUSHED: dict[str, dict[str, int]] = {
    "pkt default": {},
    "pkt 8 programs, chunks of 512": {"num_comm_sms": 8, "chunk": 512},
    "pkt 8 programs, chunks of 256": {"num_comm_sms": 8, "chunk": 256},
    "pkt 8 programs, chunks of 128": {"num_comm_sms": 8, "chunk": 128},
    "pkt 12 programs, chunks of 128": {"num_comm_sms": 12, "chunk": 128},
    "pkt 16 programs, chunks of 256": {"num_comm_sms": 16, "chunk": 256},
    "pkt 16 programs, chunks of 64": {"num_comm_sms": 16, "chunk": 64},
    "pkt 24 programs, chunks of 128": {"num_comm_sms": 24, "chunk": 128},
}
ALONE = {
    f"(push alone, {n} programs, chunks of {chunk})": {"num_comm_sms": n, "chunk": chunk}
    for n, chunk in ((8, 512), (8, 128), (8, 64), (16, 128), (16, 64))
}
NO_FENCE = {"(push alone, 8 programs, chunks of 64, no fences)": {"num_comm_sms": 8, "chunk": 64}}
NO_WAITS: dict[str, dict[str, int]] = {"(no waits)": {}}
STORED: dict[str, dict[str, Any]] = {
    "pkt stored, 128x256": {},
    "pkt stored, 128x128": {"tiles": NARROW},
    "pkt stored, 128x128, half the lag": {"tiles": NARROW, "lag": 17},
    "pkt stored, 128x128, twice the lag": {"tiles": NARROW, "lag": 66},
}
KEPT: dict[str, dict[str, Any]] = {"(nothing sent)": {}, "(nothing sent, 128x128)": {"tiles": NARROW}}
BASELINE = "cuBLAS alone"


def variants(device: str, quick: bool) -> list[str]:
    return [BASELINE, *PUSHED, *ALONE, *NO_FENCE, *NO_WAITS, *STORED, *KEPT]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    found = {gathered(N): {"N": N, "scattered": False} for N in GATHERED}
    return found | {f"GEMM + reduce-scatter, N = {N}": {"N": N, "scattered": True} for N in SCATTERED}


def gathered(N: int) -> str:
    return f"all-gather + GEMM, N = {N}"


def case(world: Any, N: int, scattered: bool) -> Case:
    found = f"found {world.size} ranks on {world.torch_device}"
    if world.size != 2 or world.torch_device.type != "cuda":
        raise Unsupported.here("benchmarks.played", found, "wanted 2 GPUs: --ranks 2")
    return (_scattered if scattered else _gathered)(world, N)


# ----------------------------------------------------------------------------------------------------------- a world
@triton.jit
def _peer(ptr, rank, world):
    """Replaces `pl.peer` for the counters: the address on the other GPU of rank `rank`'s counter, `world.code` elements
    a rank after rank 0's."""
    itemsize: tl.constexpr = ptr.dtype.scalar.element_ty.primitive_bitwidth // 8
    return ptr + world.stride // itemsize + tl.cast(rank, tl.int64) * world.code


@triton.jit
def _no_fence():
    pass


class Played:
    """A world in which one of two ranks is rank 0 of four. behind: counters from one rank's to the next rank's."""

    def __init__(self, world: Any, behind: int) -> None:
        self.world, self.rank, self.size, self.other = world, 0, SIZE, 1 - world.rank
        stride = world.device.stride.value * (self.other - world.rank)
        self.device = world.device._replace(
            rank=0, size=tl.constexpr(SIZE), stride=tl.constexpr(stride), code=tl.constexpr(behind)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def keep(self, key: Any, make: Any) -> Any:
        return self.world.keep(("played", key), make)


class Inbox:
    """An operator's inbox. rows: rows of each source; 0 if the kernel itself separates the sources."""

    def __init__(self, tensor: SymmetricTensor, world: Played, rows: int) -> None:
        self.tensor, self.world, self.rows = tensor, world, rows

    def plain(self) -> torch.Tensor:
        return self.tensor.plain()

    def peer(self, rank: int, world: Any = None) -> torch.Tensor:
        """The part of the other GPU's inbox for the data from rank `rank`."""
        return self.tensor.peer(self.world.other)[rank * self.rows :]


@functools.cache
def played(name: str, fences: bool, part: str) -> Any:
    """A second copy of an operator's module in which every peer is the other GPU, without `part`, see `leave_out`."""
    original = {"gathered": _gluon_all_gather_matmul, "scattered": _gluon_matmul_reduce_scatter}[name]
    module = copied(original, f"played{'' if fences else '_without_fences'}_{part}")
    module.pl = changed(pl, peer=_peer)
    if not fences:
        module.ptx = changed(pl.ptx, fence=_no_fence)

    def empty(*shape: int, world: Played, **options: Any) -> Inbox:
        rows = shape[0] // (2 * SIZE) if name == "gathered" else 0  # two halves of SIZE sources
        return Inbox(factories.empty(*shape, world=world.world, **options), world, rows)

    module.empty = empty
    module.signals = lambda n, world, **options: factories.signals(n, world=world.world, **options)
    return leave_out(module, part) if part else module


# ------------------------------------------------------------------------------------------------------------- cases
def plan(N: int, **given: int) -> PushPlan:
    """How a variant of PUSHED divides its work on an H200."""
    return push_plan(N // SIZE, N // SIZE, N, SIZE, TILES, 132, **given)


def _gathered(world: Any, N: int) -> Case:
    m, device = N // SIZE, world.torch_device
    a, b = normal((m, N), world.rank, device), normal((N, m), 100 + world.rank, device)
    out = torch.empty(N, m, dtype=a.dtype, device=device)
    whole = torch.cat([a] + [normal((m, N), 1 - world.rank, device)] * (SIZE - 1))

    def run(given: dict[str, int], part: str = "", fences: bool = True) -> Any:
        @functools.cache
        def made() -> Any:
            chosen = plan(N, **given)
            rows, chunks = triton.cdiv(m, TILES.block_m), triton.cdiv(N, chosen.chunk)
            module, four = played("gathered", fences, part), Played(world, rows * chunks)
            return module.push_launch(Apart(four, module, part) if part else four, a, b, out, chosen, TILES)

        return lambda: made()(a, b, out, None)

    runs = {name: run(given) for name, given in PUSHED.items()}
    runs |= {name: run(given, "product") for name, given in ALONE.items()}
    runs |= {name: run(given, "product", fences=False) for name, given in NO_FENCE.items()}
    runs |= {name: run(given, "wait") for name, given in NO_WAITS.items()}
    runs[BASELINE] = lambda: torch.mm(whole, b, out=out)
    return Case(
        nbytes=(SIZE - 1) * m * N * 2.0,
        flops=2.0 * N * m * N,
        variants=runs,
        exact=lambda: whole.float() @ b.float(),
        scaled=a,
        unchecked=frozenset({BASELINE, *ALONE, *NO_FENCE, *NO_WAITS}),
    )


def _scattered(world: Any, N: int) -> Case:
    m, device = N // SIZE, world.torch_device
    (a, b), (a1, b1) = (
        (normal((N, m), r, device), normal((m, N), 100 + r, device)) for r in (world.rank, 1 - world.rank)
    )
    out = torch.empty(m, N, dtype=a.dtype, device=device)
    product = torch.empty(N, N, dtype=a.dtype, device=device)

    def exact() -> torch.Tensor:
        """My own rows of my product, plus the rows of ranks 1, 2 and 3 of the other GPU's product."""
        return a[:m].float() @ b.float() + a1.view(SIZE, m, m)[1:].float().sum(0) @ b1.float()

    def run(given: dict[str, Any], part: str = "") -> Any:
        @functools.cache
        def made() -> Any:
            module, four = played("scattered", True, part), Played(world, 0)
            tiles, lag, _ = settings(m, N, m, four, given.get("tiles"), given.get("lag"), copies=0)
            return module.inbox_launch(Apart(four, module, part) if part else four, a, b, out, tiles, lag)

        return lambda: made()(a, b, out, None)

    runs = {name: run(given) for name, given in STORED.items()}
    runs |= {name: run(given, "links") for name, given in KEPT.items()}
    runs[BASELINE] = lambda: torch.mm(a, b, out=product)
    return Case(
        nbytes=(SIZE - 1) * m * N * 2.0,
        flops=2.0 * N * N * m,
        variants=runs,
        exact=exact,
        scaled=a,
        unchecked=frozenset({BASELINE, *KEPT}),
    )


if __name__ == "__main__":
    sys.exit(main("played", TITLE))
