"""Medians, a progress bar, a table and one results file: shared by the benchmarks.

A results file is `benchmarks/results/<name>.json`: the host, the command, the commit, and a list of rows. A row is one
figure with its unit, the number of its runs, and its limit, if it has one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One figure: the median of `runs` measurements, the least and the greatest, and its limit.

    `limit` is an upper bound, or a lower bound if `at_least` is true; None if the figure has no limit.
    """

    case: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    limit: float | None = None
    at_least: bool = False

    @property
    def held(self) -> bool | None:
        """Whether the median keeps the limit; None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def no_options(page: str | None) -> None:
    """For a benchmark without options: --help prints `page`, its docstring, and any other argument is refused."""
    argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def row(case: str, values: Iterable[float], unit: str, limit: float | None = None, at_least: bool = False) -> Row:
    """Make a row from several measurements of one figure."""
    values = list(values)
    return Row(case, statistics.median(values), unit, min(values), max(values), len(values), limit, at_least)


def seconds(run: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def host() -> dict[str, Any]:
    """The machine and the versions, so that somebody else can repeat the measurement."""
    versions = {"python": platform.python_version()}
    for name in ("pkt-triton", "triton", "torch", "numpy", "greenlet", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def write(name: str, rows: list[Row], module: str = "", **more: Any) -> Path:
    """Write the results as `kept` does, print the rows, and return the file."""
    path = kept(name, rows, module, **more)
    show(name, rows)
    return path


def kept(name: str, rows: list[Row], module: str = "", **more: Any) -> Path:
    """Write `benchmarks/results/<name>.json`, and return the file.

    module: the module of benchmarks that measured, if it has another name. more: further facts of the run;
    they replace those of the same name.
    """
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(["python", "-m", f"benchmarks.{module or name}", *sys.argv[1:]]),
        "commit": commit(),
        "host": host(),
        **more,
        "rows": [asdict(r) | {"held": r.held} for r in rows],
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def show(title: str, rows: list[Row]) -> None:
    """Print the rows as a table that marks whether each limit is kept."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("case", "median", "spread", "limit", ""):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for r in rows:
        limit = "" if r.limit is None else f"{'>=' if r.at_least else '<='} {r.limit:g} {r.unit}"
        mark = {None: "", True: "[green]holds", False: "[red]missed"}[r.held]
        table.add_row(r.case, f"{r.value:.3g} {r.unit}", f"{r.low:.3g} to {r.high:.3g}", limit, mark)
    Console().print(table)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def commit() -> str:
    """The commit, with "+" if tracked files differ from it; "" outside a repository. PKT_COMMIT overrides it, for a
    copy of the tree that has no history."""
    if said := os.environ.get("PKT_COMMIT"):
        return said

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "pkt", "kernels", "benchmarks/*.py")
    return head + ("+" if changed else "")
