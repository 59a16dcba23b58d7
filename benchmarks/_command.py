"""The command line of an operator's benchmark: run it, show its table, write its results."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS
from benchmarks._process_group import ENVIRONMENT
from benchmarks._report import limits, markdown
from benchmarks._results import keep, record, write
from benchmarks._run import run
from benchmarks._timing import Settings
from pkt.wording import count_text


def main(
    name: str, title: str, targets: dict[str, float] | None = None, argv: Iterable[str] | None = None,
    alone: str = "cuBLAS alone",
) -> int:  # fmt: skip
    """Run the benchmark module `benchmarks.<name>`. Returns 1 if a variant of pkt failed or was wrong, else 0.

    alone: the variant that is the product alone, whose time is a limit for the others.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--sizes", default="", help="words, as 4096,8192: only cases whose label has one of them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check only, simulated")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="small sizes, few variants")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="no variant starts after these")
    parser.add_argument("--only", default="", help="words: only variants whose name has one of them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for NAME.json, .md and .png")
    options = parser.parse_args(None if argv is None else list(argv))
    os.environ.update(ENVIRONMENT)
    start = time.perf_counter()
    settings = Settings(repeats=options.repeats, end=time.time() + options.seconds)
    asked = targets or {} if options.ranks == 4 else {}

    def made(rows: list[dict[str, Any]]) -> dict[str, Any]:
        limits(rows, alone)
        return record(name, rows, options.ranks, asked)

    def timed(rows: list[dict[str, Any]]) -> bool:
        return options.device == "cuda" and any("ms" in row for row in rows)

    rows = run(
        f"benchmarks.{name}", options.device, options.ranks, options.quick, settings, options.only, options.sizes,
        lambda rows: keep(options.out, made(rows)) if timed(rows) else None,
    )  # fmt: skip
    found = made(rows)
    text = markdown(f"{title}, {count_text(options.ranks, 'rank')}", rows)
    print(text)
    if timed(rows):
        write(options.out, found, text)
    elif options.device == "cuda":
        print(f"{name}: nothing was measured, so no results file is written")
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    failed = [row for row in rows if row.get("failed") and not row.get("skipped") and row["variant"].startswith("pkt")]
    return 1 if failed else 0
