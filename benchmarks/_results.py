"""The results file of a run, with its table and bars beside it.

It is `NAME.json`, or `NAME_RANKS.json` for other than four ranks. Three ranks are compared with two, where the same
folder has those.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._harness import commit, host
from benchmarks._report import picture

AGAINST = {3: 2}  # ranks -> with how many what they take is compared


def record(name: str, rows: list[dict[str, Any]], ranks: int, targets: dict[str, float]) -> dict[str, Any]:
    """The results file. `targets`: case -> least ratio to the limit that is asked of pkt's fastest variant."""
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
    """Its host, but for the memory, of which some show more the more is in use."""
    return {name: what for name, what in found["host"].items() if name != "memory_gib"}


def against(fewer: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a results file: what pkt's default takes of what it took in `fewer`, of fewer ranks; held to the bytes
    that leave a GPU of what left one there. Nothing where the two are of different hosts or commits."""
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


def write(folder: Path, title: str, made: dict[str, Any], text: str) -> None:
    """`made` of `record`, with how it compares; `text`, its table, and its bars beside it."""
    name, ranks = made["benchmark"], made["ranks"]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (name if ranks == 4 else f"{name}_{ranks}")
    fewer = folder / f"{name}_{AGAINST.get(ranks, 0)}.json"
    if fewer.exists():
        compared = against(json.loads(fewer.read_text()), made)
        made["rows"] += compared
        for row in compared:
            print(f"{row['case']}: {row['value']:.2f}, by the bytes {row['limit']:.2f}")
        if not compared:
            print(f"{fewer.name}: not compared, of another host or commit, or with no case in common")
    stem.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    with contextlib.suppress(ImportError):
        picture(title, made["measured"], stem.with_suffix(".png"))
