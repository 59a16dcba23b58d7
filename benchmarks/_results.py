"""The results file of a run, its table and its picture.

The file is `NAME.json` for four ranks, else `NAME_RANKS.json`. A run on three ranks is compared with one on two, if the
same folder has that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import _pictures
from benchmarks._harness import commit, host

AGAINST = {3: 2}  # ranks -> the smaller number of ranks whose times they are compared with


def record(name: str, rows: list[dict[str, Any]], ranks: int, targets: dict[str, float]) -> dict[str, Any]:
    """The content of a results file. targets: case -> least limit / time wanted of pkt's fastest variant."""
    report = [
        {"case": f"{row['case']}, {row['variant']}", "value": row["ms"], "unit": "ms", "low": row["low"],
         "high": row["high"], "runs": row["runs"], "limit": None, "at_least": False, "held": None}
        for row in rows
        if "ms" in row
    ]  # fmt: skip
    for case, target in targets.items():
        ours = [r for r in rows if r["case"] == case and "ratio" in r and r["variant"].startswith("pkt")]
        ours = [r for r in ours if r.get("error") is not None]
        if ours:
            fastest = max(ours, key=lambda r: r["ratio"])
            ratio = fastest["ratio"]
            report.append(
                {"case": f"{case}, limit / time of {fastest['variant']}", "value": ratio, "unit": "", "low": ratio,
                 "high": ratio, "runs": fastest["runs"], "limit": target, "at_least": True, "held": ratio >= target}
            )  # fmt: skip
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": os.environ.get("PKT_COMMAND") or " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit(),
        "host": host(),
        "ranks": ranks,
        "rows": report,
        "measured": rows,
    }


def _machine(found: dict[str, Any]) -> dict[str, Any]:
    """The host of a results file without its memory: on some hosts that figure depends on how much is in use."""
    return {name: what for name, what in found["host"].items() if name != "memory_gib"}


def against(fewer: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that compare pkt's default with `fewer`, a results file of fewer ranks: the ratio of the times, with the
    ratio of the bytes that leave a GPU as its limit. [] if the two files are of different hosts or commits."""
    if fewer["commit"] != now["commit"] or _machine(fewer) != _machine(now):
        return []
    right = [
        {(r["case"], r["variant"]): r for r in record["measured"] if r.get("error") is not None and "ms" in r}
        for record in (fewer, now)
    ]
    report = []
    for (case, variant), row in right[1].items():
        other = right[0].get((case, variant))
        if other and variant.startswith("pkt default"):
            ratio, limit = row["ms"] / other["ms"], row["bytes"] / other["bytes"]
            report.append(
                {"case": f"{case}, time of {variant} / on {fewer['ranks']} ranks", "value": ratio, "unit": "",
                 "low": row["low"] / other["high"], "high": row["high"] / other["low"], "runs": row["runs"],
                 "limit": limit, "at_least": False, "held": ratio <= limit}
            )  # fmt: skip
    return report


def keep(folder: Path, made: dict[str, Any]) -> Path:
    """Write `made` (from `record`), and return the file."""
    name, ranks = made["benchmark"], made["ranks"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name if ranks == 4 else f'{name}_{ranks}'}.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    return path


def write(folder: Path, made: dict[str, Any], text: str) -> None:
    """Write three files: `made` (from `record`) with its comparison, its table `text`, and its picture."""
    name, ranks = made["benchmark"], made["ranks"]
    fewer = folder / f"{name}_{AGAINST.get(ranks, 0)}.json"
    if fewer.exists():
        compared = against(json.loads(fewer.read_text()), made)
        made["rows"] += compared
        for row in compared:
            print(f"{row['case']}: {row['value']:.2f}, the bytes alone {row['limit']:.2f}")
        if not compared:
            print(f"{fewer.name}: not compared: its host or commit differs, or it has no case of this run")
    path = keep(folder, made)
    path.with_suffix(".md").write_text(text)
    _pictures.draw_if_possible(path)
