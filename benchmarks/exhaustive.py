"""Time every candidate of an operator's search space at its benchmark's sizes, and compare the tuner's choice.

    python -m benchmarks.exhaustive --ranks 4      benchmarks/results/exhaustive_<operator>.json
    python -m benchmarks.exhaustive --ranks 2      ... exhaustive_<operator>_2.json

The tuner searches a case first, with nothing compiled. Then an exhaustive search times all candidates. pkt's tables
hold the fastest of these, see benchmarks/tuned.py. Choices are stored in PKT_TUNE_CACHE if it is set, else nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pkt
from benchmarks._harness import RESULTS, commit, host
from benchmarks._process_group import ENVIRONMENT
from benchmarks._run import HEAP
from pkt.errors import PktError
from pkt.tune.candidates import tuned_operators
from pkt.tune.command import Layer, search_layer, sizes
from pkt.tune.search import Candidate, Search


def case(world: pkt.World, what: str, N: int) -> dict[str, Any]:
    """Run both searches of a case on this rank; returns a case of the results file. Collective."""
    layer = Layer(what, N, N, N)
    tuned, _ = search_layer(world, layer)
    swept, _ = search_layer(world, layer, exhaustive=True)
    return {"operator": what, "key": dict(swept.key), "tuner": tuner_row(tuned, swept), **sweep_rows(swept)}


def tuner_row(tuned: Search, swept: Search) -> dict[str, Any]:
    """The tuner's choice, and how much slower it is than the best, with the times of the exhaustive search."""
    times = {c.config: c.time for c in swept.candidates if c.time and not c.dropped}
    chosen = times.get(tuned.best) if tuned.best is not None else None
    return {
        "settings": dict(tuned.best) if tuned.best is not None else None,
        "measured": sum(bool(c.times) for c in tuned.candidates),
        "of": len(swept.candidates),
        "seconds": tuned.seconds,
        "over_best": chosen / min(times.values()) if chosen else None,
    }


def sweep_rows(swept: Search) -> dict[str, Any]:
    """All measured candidates, the fastest first, and the dropped ones with the reason."""
    kept = sorted((c for c in swept.candidates if c.time and not c.dropped), key=lambda c: c.time or 0.0)
    dropped = [{"settings": dict(c.config), "why": c.dropped} for c in swept.candidates if c.dropped]
    return {"seconds": swept.seconds, "measured": [_row(c) for c in kept], "dropped": dropped}


def _row(candidate: Candidate) -> dict[str, Any]:
    times = candidate.times
    return {
        "settings": dict(candidate.config), "seconds": round(candidate.time or 0.0, 9), "low": round(min(times), 9),
        "high": round(max(times), 9), "repeats": len(times),
        "predicted": round(candidate.predicted, 9) if candidate.predicted else None,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after these")
    parser.add_argument(
        "--sizes", default="", help="M = N = K of the whole product, as 4096,8192; else those of the tables"
    )
    parser.add_argument("--operators", default="", help="only these, by name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    end = time.monotonic() + given.seconds
    from benchmarks.exhaustive import case as importable  # workers cannot import it from __main__

    known = tuned_operators()
    wanted = [int(size) for size in given.sizes.split(",") if size]
    operators = [what for what in given.operators.split(",") if what] or list(known)
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("PKT_TUNE_CACHE", cache)
        for what in operators:
            found: list[dict[str, Any]] = []
            for N in wanted or sizes(known[what]):
                if time.monotonic() > end:
                    print(f"{what}, {N}: left out, out of time", flush=True)
                    failed += 1
                    continue
                start = time.perf_counter()
                try:
                    answers = pkt.launch(
                        importable, given.ranks, "cuda", (what, N), heap=HEAP["cuda"], timeout=20, multicast=False
                    )
                except PktError as error:
                    print(f"{what}, {N}: FAILED {str(error)[-2000:]}", flush=True)
                    failed += 1
                    continue
                found.append(answers[0])
                _show(found[-1], time.perf_counter() - start)
                _write(given.out, what, found, given.ranks)
    return 1 if failed else 0


def _write(folder: Path, what: str, found: list[dict[str, Any]], ranks: int) -> None:
    name = f"exhaustive_{what}" + ("" if ranks == 4 else f"_{ranks}")
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),  # the tables take the last search of a case
        "command": os.environ.get("PKT_COMMAND") or " ".join(["python", "-m", "benchmarks.exhaustive", *sys.argv[1:]]),
        "commit": commit(),
        "host": host(),
        "ranks": ranks,
        "cases": found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record) + "\n")


def _show(found: dict[str, Any], seconds: float) -> None:
    key, tuner = found["key"], found["tuner"]
    over = "its choice was not measured" if tuner["over_best"] is None else f"{tuner['over_best']:.3f} of the best"
    print(
        f"{found['operator']}, M={key['M']} N={key['N']} K={key['K']}: the tuner measured {tuner['measured']} of "
        f"{tuner['of']} in {tuner['seconds']:.1f} s, {over}; all {len(found['measured'])} in {found['seconds']:.1f} s, "
        f"{len(found['dropped'])} dropped; {seconds:.0f} s"
    )
    for row in found["measured"][:4]:
        print(f"  {1e3 * row['seconds']:.4f} ms {row['settings']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
