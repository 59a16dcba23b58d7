"""benchmarks.link without a GPU: its kernels in the simulator, its arithmetic, and its check of transfers."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

import pkt
from benchmarks import link, link_gluon
from benchmarks.link_measure import PARTS, Bench, Plan, Record, measure
from pkt.errors import RankFailed
from pkt.language.inspect import compile_only, device_world


def simulated(fn: Any, ranks: int, *args: Any) -> list[Any]:
    return pkt.launch(fn, ranks=ranks, device="cpu", args=args, heap="8MiB", multicast=False)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_passes_its_check(part: str, ranks: int) -> None:
    for records in simulated(measure, ranks, Plan.simulated(), [part]):
        assert records
        assert all(r.us == [] for r in records), "a simulation gives no times"


@pytest.mark.skipif(not link_gluon.AVAILABLE, reason="this Triton has other Gluon names")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gluon_kernel_stores_each_tile_to_every_peer(ranks: int) -> None:
    world = device_world(1, ranks)
    compiled = compile_only(link_gluon.push_all_kernel, "*bf16", "*bf16", 1 << 27, world, 128, 128, 4, num_warps=1)
    stores = compiled.asm["ptx"].count("cp.async.bulk.tensor.2d.global.shared::cta")
    assert stores == 2 * (ranks - 1)  # TMA stores rows of 256 bytes as two halves


@pytest.mark.parametrize("arrives", ["before", "next", "all"])
def test_verify_finds_a_wrong_element(arrives: str) -> None:
    def main(world: Any) -> None:
        bench, n = Bench(world, Plan.simulated()), 64
        rows = [bench.values(r)[:n] for r in range(world.size)]
        sent = {"before": rows[world.rank - 1], "next": rows[(world.rank + 1) % world.size], "all": None}[arrives]
        whole = [r for row in rows for r in row.tolist()] if sent is None else sent.tolist()
        bench.dst[: len(whole)] = bench.dst.plain().new_tensor(whole)
        bench.verify(n, arrives, "right")
        at = n * ((world.rank + 1) % world.size) if sent is None else 3
        bench.dst[at] += 1
        bench.verify(n, arrives, "wrong")

    with pytest.raises(RankFailed, match="wrong: 1 of 64 elements differ from what was sent"):
        simulated(main, 3)


def test_merged_takes_the_slowest_rank() -> None:
    mine = [Record("g", "s", 4, [10.0, 20.0, 30.0], nbytes=10**6)]
    theirs = [Record("g", "s", 4, [15.0, 5.0, 30.0], nbytes=10**6)]
    (record,) = link.merged([mine, theirs])
    assert record.us == [15.0, 20.0, 30.0]
    assert statistics.median(link.figures(record)) == pytest.approx(50.0)  # 1 MB in 20 us
    assert link.figures(Record("latency", "s", 0, [20.0], count=10)) == [2.0]
    with pytest.raises(AssertionError):
        link.merged([mine, [dataclasses.replace(theirs[0], x=8)]])


def test_rows_compare_figures_with_limits() -> None:
    def one(group: str, series: str, us: float, **of: Any) -> Record:
        return Record(group, series, 8, [us, us], **of)

    size = 10**9
    records = [
        one("one peer, by programs", "TMA store, 64x128, 1 stage", size / 340e3, nbytes=size),
        one("one peer, by programs", "TMA store, 128x128, 3 stages", size / 350e3, nbytes=size),
        one("one peer, by message size", "copy engine put", size / 370e3, nbytes=size),
        one("latency", "signal to rank 1", 1.5 * 100, count=100),
        one("latency", "world_barrier as a graph's node", 7.0 * 100, count=100),
        one("host", "bare launch", 20.0 * 10, count=10),
        one("host", "pkt launch", 29.0 * 10, count=10),
    ]
    table, points = link.rows(records, held=True)
    assert [p.value for p in points] == [pytest.approx(v) for v in (340, 350, 370)]
    held = {r.case: r.held for r in table if r.held is not None}
    assert held == {
        "TMA store, one peer (TMA store, 128x128, 3 stages, 8 programs)": True,
        "copy engine put, one peer (copy engine put, 0.0078125 KiB)": False,
        "signal to rank 1": True,
        "world_barrier as a graph's node": False,
        "host: pkt launch over bare launch": True,
    }
    assert all(r.held is None for r in link.rows(records, held=False)[0])
