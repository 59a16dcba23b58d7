"""How all_gather_matmul's Gluon form deals out its work: who pushes or copies what, and which tiles are cut."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton

from pkt.errors import ShapeError
from pkt.runtime.world import World

from ..shared.gluon_fits import TILES, check_tiles
from ..shared.grid import num_programs
from ..shared.tile_product import Tiles

CALL = "all_gather_matmul"
UNFUSED_ROWS = 1024
"""Rows of a shard up to which shard "columns", left to choose, is not fused. By benchmarks/results/*.json of 4 x H200:
unfused takes 51, 52, 56 and 222 us for 1, 16, 128 and 1024 rows, the fastest fused form 52, 53, 60 and 246."""
CUTS = (1, 2, 4)
PUSHED = 41e9
"""Bytes a second that leave by one program that pushes; eight of them fill the links but for a sixteenth. On 4 x H200,
by benchmarks/results/all_gather_matmul.json."""
FILLS = 8
PUSHERS, CHUNK = 16, 128
"""Programs that push, and columns of a chunk; of fewer programs, twice as many. Each signal has a fence, for which all
that a program has sent must have arrived, so more programs push than would fill the links. And what arrives last, a
chunk from each warp that pushes, is still to be multiplied: so chunks are short. Four ranks' kernels, played on 2 x
H200, take 0.0936 ms at 4096 where 8 and 256 take 0.0981, and 0.206 at 6144 where those take 0.212
(benchmarks/results/played_2.json)."""
MULTIPLIED = 6.3e12
"""FLOP a second of one SM, there."""
COPIED, COPY = 392e9, 5e-6
"""Bytes a second that leave by the copy engines, and seconds that each copy takes more: so there is one to each peer,
or two: at 8192 on 4 x H200 all-gather and product take 0.374 ms in one and 0.367 in two, on 2 at 4096 0.108 and 0.103
(benchmarks/results/exhaustive_all_gather_matmul_chunked*.json)."""
BEGIN = 20e-6
"""Seconds before the first copy begins."""


class PushPlan(NamedTuple):
    """How A is pushed and the tiles are dealt out, as the keywords of all_gather_matmul say it."""

    num_comm_sms: int = PUSHERS  # 0: copied
    chunk: int = CHUNK  # 0: all of K, where copied
    push_rows: int = 0
    rounds_alone: int = 0
    cut_last: int = 1
    whole_rounds: int = 1 << 20


class _Dealt(NamedTuple):
    """How tiles come out even where num_comm programs push first."""

    pushing: float  # rounds of tiles for as long as they push
    rounds: int  # whole ones
    left: int  # tiles after those

    @property
    def late(self) -> bool:
        """Whether they push for longer, so the links are the limit."""
        return self.pushing > self.rounds


def _dealt(m: int, N: int, size: int, tiles: Tiles, programs: int, num_comm: int) -> _Dealt:
    num_comm = max(1, min(num_comm, programs))  # of what is refused later, something
    count, computing = _count(m, N, size, tiles), max(programs - num_comm, 1)
    # both times in seconds for each column of A
    pushing = 2 * (size - 1) * m / (PUSHED * min(num_comm, FILLS)) / tile_seconds(1, tiles)
    alone = min(math.ceil(pushing), count // computing)
    joined, left = divmod(count - alone * computing, programs)
    return _Dealt(pushing, alone + joined, left)


def _count(m: int, N: int, size: int, tiles: Tiles) -> int:
    return size * triton.cdiv(m, tiles.block_m) * triton.cdiv(N, tiles.block_n)


def tile_seconds(K: int, tiles: Tiles) -> float:
    """Of a tile of a Gluon form, K columns of A long."""
    return 2 * tiles.block_m * tiles.block_n * K / MULTIPLIED


def push_plan(m: int, N: int, K: int, size: int, tiles: Tiles, programs: int, **given: int) -> PushPlan:
    """What is given, else what follows from a shard (m, K) and `b` of N columns. Within 3 % of the fastest on 4 and
    2 H200, by benchmarks/results/exhaustive_all_gather_matmul*.json and played_2.json.

    What is left after the last whole round is cut in two where it is done sooner then. Copied, where that takes no
    longer than the product; each shard in two chunks, where the own one is multiplied sooner than the first one comes.
    Else pushed: the programs that push are left out of as many rounds as fit into the time that they push for, and what
    is left is not cut where they push for longer."""
    tile, count = tile_seconds(K, tiles), _count(m, N, size, tiles)
    copying = BEGIN + (size - 1) * (COPY + 2 * m * K / COPIED)
    pushes = size == 1 or given.keys() & {"chunk", "rounds_alone"} or copying > count / programs * tile
    num_comm = given.get("num_comm_sms", PUSHERS if pushes else 0)
    if num_comm == 0:
        rounds, left = divmod(count, programs)
        halved = 0 < left <= programs // 2
        late = BEGIN + COPY + 2 * m * K / COPIED > count / size / programs * tile
        chunk = triton.cdiv(triton.cdiv(K, 2), tiles.block_k) * tiles.block_k
        chunked = late and size > 1 and not given.get("push_rows")
        return PushPlan(0, chunk if chunked else 0, whole_rounds=rounds, cut_last=2 if halved else 1)._replace(**given)
    dealt = _dealt(m, N, size, tiles, programs, num_comm)
    halved = not dealt.late and 0 < dealt.left <= programs // 2
    chunk = CHUNK if num_comm >= PUSHERS else 2 * CHUNK
    rule = PushPlan(num_comm, chunk, whole_rounds=dealt.rounds, cut_last=2 if halved else 1)._replace(**given)
    if "rounds_alone" in given:
        return rule
    cut = max(dealt.pushing - rule.whole_rounds, 0) * rule.cut_last
    return rule._replace(rounds_alone=math.ceil(min(dealt.pushing, rule.whole_rounds) + cut))


def check_plan(plan: PushPlan, tiles: Tiles, world: World) -> None:
    """ShapeError where the parts do not fit together."""

    def need(holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ShapeError.argument(CALL, name, getattr(plan, name), wanted, world.rank)

    need(plan.num_comm_sms >= 0, "num_comm_sms", "at least 0")
    need(plan.push_rows >= 0, "push_rows", "at least 0")
    least, wanted = (1, "a positive multiple") if plan.num_comm_sms else (0, "a multiple")
    need(plan.chunk >= least and plan.chunk % tiles.block_k == 0, "chunk", f"{wanted} of BLOCK_K, {tiles.block_k}")
    need(plan.rounds_alone >= 0, "rounds_alone", "at least 0")
    need(plan.num_comm_sms > 0 or plan.rounds_alone == 0, "rounds_alone", "none with num_comm_sms=0")
    need(0 <= plan.whole_rounds <= 1 << 20, "whole_rounds", f"from 0 to {1 << 20}")
    need(plan.cut_last in CUTS, "cut_last", " or ".join(map(str, CUTS)))


def settings(m: int, N: int, K: int, world: World, tiles: Tiles | None, **given: int) -> tuple[PushPlan, Tiles]:
    """The plan and the tiles for a shard (m, K) and `b` of N columns: what is given, in the words of
    all_gather_matmul, else what follows from the shapes. Raises ShapeError where that does not fit together."""
    programs = num_programs(world, world.num_sms)
    tiles = tiles or TILES
    check_tiles(CALL, tiles, world)
    plan = push_plan(m, N, K, world.size, tiles, programs, **given)
    check_plan(plan, tiles, world)
    return plan, tiles
