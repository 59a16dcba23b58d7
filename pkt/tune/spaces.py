"""The settings worth trying for each operator: spaces of keywords that it accepts for a case.

Left out are settings that cannot run or cannot win: what does not fit shared memory or registers, blocks larger than
the operand, steps of K below what one TMA row holds; of all_gather_matmul the form "pull", which wants a symmetric
operand and moves it once for every column of tiles. Where a Gluon form runs, plain tiles only of the two kinds that
were ever near it (PLAIN_TILES). First come the two that are not fused: NCCL + cuBLAS, or with PKT_NCCL=0 not, and
cuBLAS with pkt's own collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pkt.errors import Unsupported
from pkt.tune.config import NCCL, UNFUSED, Config, nccl_wanted, space
from pkt.tune.gpu import H200, Gpu
from pkt.tune.model import CUTS, pushing_rounds
from pkt.tune.search import Model
from pkt.tune.spread import spread
from pkt.wording import dtype_text

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
PUSHERS = ((8, 256), (12, 128), (16, 128), (16, 256))
"""Programs that push in the Gluon form, of which eight fill the links, and columns of a chunk. Others were nowhere
faster by more than half a percent: not 24 programs, nor tiles of 128 columns, in the searches of commit 82b752bffbc4,
and of these programs no other chunks in those of 92389eccaa51."""
SHARD_COPIES = (2, 3, 4)
"""That a shard goes to each peer in, in the Gluon form, if not in one."""
COMM_SMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PLAIN_TILES = ((128, 256, 64, 3), (128, 128, 64, 4))
"""Blocks and stages, with 8 warps. Measured on 4 x H200 at M from 4096 to 32768."""
ACCUMULATORS = 128
"""fp32 accumulators of a thread; with more of them the operands spill."""
LAGS = (0.25, 0.5, 1, 2, 4)
"""Rounds of all programs that a rank's own tiles are behind the others' in the Gluon forms that reduce."""
PART_COPIES = (1, 2, 4)
"""Copies that a part goes in, in the Gluon form of the reduce-scatter."""
BARRIERS = 512
"""Bytes of shared memory beside a ring of operands, at most."""
GLUON_RANKS = range(2, 9)
TMA_ROWS = {"all_gather_matmul": ("N", "K"), "matmul_reduce_scatter": ("N",), "matmul_all_reduce": ("N",)}
"""Lengths of the rows that the Gluon forms move by TMA."""


def operator_space(what: str, key: Mapping[str, Any], gpu: Gpu = H200, gluon: bool = True) -> list[Config]:
    """The candidates of operator `what` for a case, 100 to 2,000 of them where M, N and K are at least 512.

    key: M, N, K of the product that each rank computes, dtype and size, the number of ranks, as `model.estimate` has
    them. gpu: whose SMs and shared memory count. gluon: whether the Gluon forms run there; they are left out where the
    case does not suit them. Raises Unsupported for an operator or dtype that has no space.
    """
    dtype = dtype_text(key.get("dtype"))
    for name, found, known in (("operator", what, _SPACES), ("dtype", dtype, ITEMSIZE)):
        if found not in known:
            raise Unsupported.here("pkt tune", f"found {name} {found!r}", f"wanted {' or '.join(map(repr, known))}")
    gluon = gluon and gluon_fits(what, key)
    unfused = [NCCL, UNFUSED] if nccl_wanted() else [UNFUSED]
    return unfused + _SPACES[what](key, ITEMSIZE[dtype], gpu, gluon)


def gluon_fits(what: str, key: Mapping[str, Any]) -> bool:
    """Whether the Gluon form of operator `what` takes a case, on GPUs that have one."""
    itemsize = ITEMSIZE.get(dtype_text(key["dtype"]))
    return itemsize == 2 and key["size"] in GLUON_RANKS and all(_whole_rows(key[n], itemsize) for n in TMA_ROWS[what])


def _all_gather_matmul(key: Mapping[str, Any], itemsize: int, gpu: Gpu, gluon: bool) -> list[Config]:
    m, N, K = math.ceil(key["M"] / key["size"]), key["N"], key["K"]
    found = space(  # its tiles come in the order of arrival: no groups
        mode="push",
        num_comm_sms=_below(gpu.sms),
        chunk=sorted({_up(min(chunk, K), 64) for chunk in (512, 2048)}),
        tiles=(tiles := _tiles(m, N, K, itemsize, gpu, groups=(8,), few=gluon)),
    )
    if _whole_rows(K, itemsize) and gpu.sms > 1:
        found += space(mode="copy", push_rows=[0, 1, 2], tiles=tiles)
    if gluon:
        for tile in (t for t in _gluon_tiles(gpu, groups=(8,), most=True) if t[1] == 256):
            rows = math.ceil(m / tile[0])
            tasks = key["size"] * rows * math.ceil(N / tile[1])
            copies = sorted({0, *(math.ceil(rows / n) for n in SHARD_COPIES)})
            for cut in CUTS:
                wholes = _rounds(tasks // gpu.sms, cut)
                for chunk, push_rows in ((0, copies), (_up(math.ceil(K / 2), tile[2]), 0)):
                    found += space(
                        mode="gluon", num_comm_sms=0, chunk=chunk, push_rows=push_rows, rounds_alone=0, cut_last=cut,
                        whole_rounds=wholes, tiles=[tile],
                    )  # fmt: skip
            for num_comm_sms, chunk in (p for p in PUSHERS if p[0] < gpu.sms):
                pushing = pushing_rounds({"mode": "gluon", "num_comm_sms": num_comm_sms, "tiles": tile}, key, gpu)
                for alone, cut, whole in _dealt(pushing, tasks, gpu.sms, num_comm_sms):
                    found += space(
                        mode="gluon", num_comm_sms=num_comm_sms, chunk=chunk, push_rows=[0, 1], rounds_alone=alone,
                        cut_last=cut, whole_rounds=whole, tiles=[tile],
                    )  # fmt: skip
    return found


def _dealt(pushing: float, tasks: int, sms: int, num_comm_sms: int) -> Iterator[tuple[int, int, int]]:
    """(rounds_alone, cut_last, whole_rounds): ways to deal out `tasks` tiles where pushing takes as long as `pushing`
    of them. The last whole round is cut or not, and those that push are left out of a round more or less."""
    computing = sms - num_comm_sms
    first = min(math.ceil(pushing), tasks // computing)
    rounds = first + (tasks - first * computing) // sms
    for cut in CUTS:
        for whole in _rounds(rounds, cut):
            alone = math.ceil(min(pushing, whole) + max(pushing - whole, 0) * cut)
            for more in (-1, 0, 1):
                if alone + more >= 0:
                    yield alone + more, cut, whole


def _rounds(rounds: int, cut: int) -> list[int]:
    return sorted({rounds, max(rounds - 1, 0)}) if cut > 1 else [rounds]


def _matmul_reduce_scatter(key: Mapping[str, Any], itemsize: int, gpu: Gpu, gluon: bool) -> list[Config]:
    m, N, K = math.ceil(key["M"] / key["size"]), key["N"], key["K"]
    tiles = _tiles(m, N, K, itemsize, gpu, groups=(4, 8, 16), staged=True, few=gluon)
    found = space(mode=["add", "inbox"], tiles=tiles)
    if gluon:
        tiles = _gluon_tiles(gpu, groups=(4, 8, 16))
        found += space(mode="gluon", lag=_lags(key, gpu), tiles=tiles)
        found += space(mode="gluon", copies=PART_COPIES, tiles=[t for t in tiles if t[1] == 256])
    return found


def _matmul_all_reduce(key: Mapping[str, Any], itemsize: int, gpu: Gpu, gluon: bool) -> list[Config]:
    tiles = _tiles(key["M"], key["N"], key["K"], itemsize, gpu, groups=(8, 16), few=gluon)
    found = space(mode="lcsc", num_comm_sms=[0, *_below(gpu.sms)], tiles=tiles)  # 0: after computing
    if gluon:
        found += space(mode="gluon", lag=_lags(key, gpu), tiles=_gluon_tiles(gpu, groups=(4, 8, 16)))
    return found


def _lags(key: Mapping[str, Any], gpu: Gpu) -> list[int]:
    return [math.ceil(rounds * gpu.sms / key["size"]) for rounds in LAGS]


_SPACES: Mapping[str, Callable[[Mapping[str, Any], int, Gpu, bool], list[Config]]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}


def thinned(configs: Sequence[Config], model: Model, key: Mapping[str, Any], alike: int) -> list[Config]:
    """At most `alike` of the configs of which the model predicts the same time, far from each other in every setting.

    A model cannot tell apart what it does not know of; the first by it would be neighbours that differ in nothing else.
    """
    same: dict[float | None, list[Config]] = {}
    for config in configs:
        same.setdefault(model(config, key), []).append(config)
    picked = (range(len(group)) if len(group) <= alike else spread(group, alike)[:alike] for group in same.values())
    return [group[i] for group, places in zip(same.values(), picked) for i in places]


# --------------------------------------------------------------------------------------------------------------- tiles
def _tiles(
    M: int, N: int, K: int, itemsize: int, gpu: Gpu, groups: tuple[int, ...], staged: bool = False, few: bool = False
) -> list[tuple[Any, ...]]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, GROUP, NUM_WARPS, NUM_STAGES) of the plain kernels. staged: the result waits in
    shared memory of its own, because it is still on its way when the next tile begins; else in that of the ring. few:
    of PLAIN_TILES, if any."""
    # fp32 has no tensor cores here, and rows that TMA cannot take have an address for each element: operands or
    # addresses sit in registers.
    registers = itemsize == 4 or not _whole_rows(N, itemsize) or not _whole_rows(K, itemsize)
    most, step = (64, 32 if itemsize == 2 else 16) if registers else (256, 64)

    def fits(c: Config) -> bool:
        ring = c["num_stages"] * c["block_k"] * (c["block_m"] + c["block_n"]) * itemsize
        result = c["block_m"] * c["block_n"] * itemsize if staged else 0
        return ring + result + BARRIERS <= gpu.shared

    def in_registers(c: Config) -> bool:
        return c["block_m"] * c["block_n"] <= ACCUMULATORS * 32 * c["num_warps"]

    found = space(
        where=[fits, in_registers],
        block_m=_blocks(M, min(most, 128)),
        block_n=_blocks(N, most),
        block_k=_blocks(K, step)[-1],
        group=groups,
        num_warps=[4, 8],
        num_stages=[3, 4, 5],
    )
    tiles = [tuple(c.values()) for c in found]
    return [t for t in tiles if few and (*t[:3], t[5]) in PLAIN_TILES and t[4] == 8] or tiles


def _gluon_tiles(gpu: Gpu, groups: tuple[int, ...], most: bool = False) -> list[tuple[Any, ...]]:
    """Those that the warp-specialised forms have, with every number of slots that fits; most: only the greatest."""
    found = space(
        where=lambda c: _shared(c.values()) <= gpu.shared,
        block_m=128,
        block_n=[128, 256],
        block_k=64,
        group=groups,
        num_warps=8,
        num_stages=[3, 4, 5, 6],
    )
    fitting = [tuple(c.values()) for c in found]
    return list({t[:5]: t for t in fitting}.values()) if most else fitting


def _shared(tiles: Any) -> int:
    """Bytes of the Gluon forms' ring, of their outbox, which has half a tile, and of the barriers."""
    block_m, block_n, block_k, _, _, stages = tiles
    return 2 * stages * block_k * (block_m + block_n) + block_m * block_n + BARRIERS


def _blocks(length: int, most: int) -> list[int]:
    """The three largest powers of two, from 16 to `most`, of which `length` is worth one."""
    largest = max(16, min(most, 1 << (max(length, 1) - 1).bit_length()))
    return [block for block in (largest // 4, largest // 2, largest) if block >= 16]


def _below(sms: int) -> list[int]:
    """Programs that may communicate where at least one must be left to compute."""
    return [n for n in COMM_SMS if n < sms]


def _whole_rows(length: int, itemsize: int) -> bool:
    """Whether rows of so many elements begin at multiples of 16 bytes, as TMA needs."""
    return length * itemsize % 16 == 0


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
