"""Measure the links between this host's GPUs, by mechanism: figures 2 and 3, tables 1 and 2 of ParallelKittens.

    python -m benchmarks.link --ranks 4                     everything, about two minutes on 4 GPUs
    python -m benchmarks.link --ranks 2 --parts signals     one part
    python -m benchmarks.link --ranks 4 --quick             each kernel once or twice, to check it
    python -m benchmarks.link --device cpu --quick          check the same kernels in the simulator; time nothing

Every transfer carries random numbers. The receiver compares them with the sender's, before the transfer is timed and
after. A figure is the median over repeats of the slowest rank's time. Results go to benchmarks/results/link.json and
link.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

import pkt
from benchmarks import _harness, _pictures
from benchmarks.link_measure import MIB, PARTS, Plan, Record, measure

RAW, PRACTICAL = 478.0, 390.0
"""GB/s out of an H200: the rate of 18 NVLinks of 26.56 GB/s, and the greatest measured rate (copy engine)."""

BEST = {
    "register store": 362.0,
    "register load": 333.0,
    "TMA store": 362.0,
    "TMA load": 332.0,
    "TMA reduce-add": 325.0,
    "copy engine put": 392.0,
    "copy engine get": 342.0,
    "register store, all peers": 327.0,
    "TMA store in Gluon, all peers": 331.0,
}
"""GB/s out of an H200 to one peer, or to the other three, with all ranks sending, measured before pkt existed."""
SHARE = 0.95
"""The part of BEST that a mechanism must reach."""

LIMITS = {
    "signal to rank 1": 1.1 * 1.47,
    "world_barrier in a kernel, 1 program": 2.2,
    "world_barrier as a graph's node": 6.0,
}
"""Microseconds that a latency may take on an H200."""
OVERHEADS = {"pkt launch": "bare launch", "all_reduce": "bare launch of all_reduce's kernel"}
OVERHEAD = 10.0
"""Microseconds of the host that pkt may add to a bare launch."""


def merged(ranks: list[list[Record]]) -> list[Record]:
    """Merge the ranks' records of the same figures. A repeat takes as long as on the slowest rank."""
    together = []
    for records in zip(*ranks, strict=True):
        first = records[0]
        assert all((r.group, r.series, r.x) == (first.group, first.series, first.x) for r in records)
        slowest = [max(us) for us in zip(*(r.us for r in records), strict=True)]
        together.append(Record(first.group, first.series, first.x, slowest, first.nbytes, first.count))
    return together


def figures(record: Record) -> list[float]:
    """GB/s of each repeat, or its microseconds for one access if the record is of a latency."""
    if record.nbytes:
        return [record.nbytes / us / 1e3 for us in record.us]
    return [us / record.count for us in record.us]


def rows(records: list[Record], held: bool, ranks: int = 4) -> tuple[list[_harness.Row], list[_harness.Row]]:
    """Two lists of rows: the best of each mechanism and the latencies, with limits if `held`; every point of the
    curves."""
    best: dict[str, tuple[str, list[float]]] = {}
    points, latencies, host = [], [], {}
    for record in records:
        values = figures(record)
        if not values:
            continue
        if record.nbytes:
            what = f"{_size(record.x)}" if record.group.endswith("size") else f"{record.x:g} programs"
            points.append(_harness.row(f"{record.group}: {record.series}, {what}", values, "GB/s"))
            peers = "all peers" if record.group.startswith("all") else "one peer"
            name = f"{record.series.partition(',')[0]}, {peers}"
            if name not in best or statistics.median(values) > statistics.median(best[name][1]):
                best[name] = (f"{record.series}, {what}", values)
        elif record.group == "host":
            host[record.series] = values
            latencies.append(_harness.row(f"host: {record.series}", values, "us"))
        else:
            latencies.append(_harness.row(record.series, values, "us", LIMITS.get(record.series) if held else None))
    top = []
    for name, (where, values) in best.items():
        comparable = held and (ranks == 4 or name.endswith("one peer"))
        known = BEST.get(name.removesuffix(", one peer")) if comparable else None
        top.append(_harness.row(f"{name} ({where})", values, "GB/s", known and round(SHARE * known, 1), at_least=True))
    for ours, bare in OVERHEADS.items():
        if ours in host and bare in host:
            added = [a - b for a, b in zip(host[ours], host[bare], strict=True)]
            latencies.append(_harness.row(f"host: {ours} over {bare}", added, "us", OVERHEAD if held else None))
    return [*top, *latencies], points


def _size(nbytes: float) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats, to check the kernels")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    if given.device == "cpu":
        ranks = pkt.launch(
            measure, given.ranks, "cpu", args=(Plan.simulated(), given.parts), heap="8MiB", multicast=False
        )
        print(
            f"{len(ranks[0])} transfers and latencies of {given.ranks} simulated ranks are correct; nothing was timed"
        )
        return 0
    plan = Plan.quick() if given.quick else Plan()
    # No mechanism here uses the multicast window.
    records = merged(pkt.launch(measure, given.ranks, "cuda", args=(plan, given.parts), heap="4GiB", multicast=False))
    gpus = _harness.host()["gpus"]
    held = not given.quick and all("H200" in name for name in gpus)
    table, points = rows(records, held, given.ranks)
    if given.quick:
        _harness.show("link, quick: not for quoting", table)
        return 0
    facts: dict[str, Any] = {
        "ranks": given.ranks,
        "plan": vars(plan),
        "limits_gb_s": {"raw": RAW, "practical": PRACTICAL},
        "points": [asdict(point) for point in points],
    }
    path = _harness.write("link", table, **facts)
    _pictures.draw_if_possible(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
