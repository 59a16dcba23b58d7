"""Writes the tables that ship in pkt/tune/tables/ from the committed results: what the tuner knows without measuring.

    python -m benchmarks.tuned

<operator>.json has, for each case of benchmarks/exhaustive.py, the MOST fastest candidates and the fastest of every
other mode, NCCL + cuBLAS among them, with their settings as keywords of the operator and their median, least and
greatest time, the fastest first. Among them are those that benchmarks/played.py has measured. link.json has the curves
of benchmarks/link.py. Each file names its sources. tests/tune/test_tables.py fails where a table differs from what this
program writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import played
from benchmarks._harness import RESULTS, ROOT
from pkt.kernels._gluon import TILES

TABLES = ROOT / "pkt" / "tune" / "tables"
PLAYED = RESULTS / "played_2.json"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
LAST = -1
"""Of the sources: what a row has that is not of the exhaustive search."""
MOST = 24
"""Candidates of a case that ship."""
CURVE = re.compile(r"(one|all) peers?, by programs: (.+), (\d+) programs")
SIZES = re.compile(r"one peer, by message size: (.+), (\d+) ([KM])iB")


def records(operator: str) -> list[dict[str, Any]]:
    """The exhaustive searches for an operator, a record for each number of ranks; of the all-gather on four with what
    was played of the same cases, in the stead of the same settings."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"exhaustive_{operator}*.json"))]
    for case in (case for record in found for case in record["cases"]):
        if operator == "all_gather_matmul" and case["key"]["size"] == played.SIZE:
            newer = pushed(case["key"]["K"])
            tried = [row["settings"] for row in newer]
            older = [row for row in case["measured"] if row["settings"] not in tried]
            case["measured"] = sorted(older + newer, key=lambda row: row["seconds"])
    return found


def pushed(N: int) -> list[dict[str, Any]]:
    """What benchmarks/played.py measured for a size: settings, and seconds of four ranks."""
    found = []
    for row in json.loads(PLAYED.read_text())["measured"]:
        if row["case"] == played.gathered(N) and row["variant"] in played.PUSHED:
            plan = played.plan(N, **played.PUSHED[row["variant"]])
            settings = {"mode": "gluon", **plan._asdict(), "tiles": list(TILES[:6])}
            seconds, low, high = (round(row[name] / 1e3, 9) for name in ("ms", "low", "high"))
            found.append({"settings": settings, "seconds": seconds, "low": low, "high": high, "source": LAST})
    return found


def operator_table(operator: str) -> dict[str, Any]:
    """What pkt/tune/tables/<operator>.json is."""
    found = records(operator)
    entries = [
        {"key": case["key"], "measured": fastest(case["measured"])} for record in found for case in record["cases"]
    ]
    also = [source(json.loads(PLAYED.read_text()), PLAYED.stem)] if operator == "all_gather_matmul" else []
    return {
        "operator": operator,
        "gpu": found[0]["host"]["gpus"][0],
        "sources": [{"ranks": record["ranks"], **source(record)} for record in found]
        + [{"ranks": played.SIZE, **other} for other in also],
        "entries": entries,
    }


def fastest(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of what was measured, which is the fastest first, and the first of each mode: NCCL + cuBLAS, and what a
    case takes that the fastest forms cannot have."""
    first: dict[str, int] = {}
    for at, row in enumerate(measured):
        first.setdefault(row["settings"]["mode"], at)
    shipped = [row for at, row in enumerate(measured) if at < MOST or at in first.values()]
    names = ("settings", "seconds", "low", "high", "source")
    return [{name: row[name] for name in names if name in row} for row in shipped]


def link_table() -> dict[str, Any]:
    """What pkt/tune/tables/link.json is: GB/s out of one GPU, all ranks sending at once."""
    record = json.loads((RESULTS / "link.json").read_text())
    by_programs: dict[str, list] = {}
    by_size: dict[str, list] = {}
    for point in record["points"]:
        value = round(point["value"], 2)
        if found := CURVE.fullmatch(point["case"]):
            if int(found[3]):
                by_programs.setdefault(f"{found[2]}, {found[1]}", []).append([int(found[3]), value])
        elif found := SIZES.fullmatch(point["case"]):
            nbytes = int(found[2]) << {"K": 10, "M": 20}[found[3]]
            by_size.setdefault(found[1], []).append([nbytes, value])
    return {
        "gpu": record["host"]["gpus"][0],
        "source": source(record),
        "by_programs": by_programs,
        "by_size": by_size,
    }


def source(record: dict[str, Any], stem: str = "") -> dict[str, Any]:
    """Where the figures of a table come from. stem: of the file, if it is not the benchmark's name."""
    versions = {name: record["host"]["versions"][name] for name in ("torch", "triton")}
    file = f"benchmarks/results/{stem or record['benchmark']}.json"
    return {"file": file, "commit": record["commit"], "date": record["date"], "versions": versions}


def tables() -> dict[Path, str]:
    """Every table: its file and what stands in it."""
    found = {TABLES / "link.json": link_table()}
    found |= {TABLES / f"{operator}.json": operator_table(operator) for operator in OPERATORS}
    return {path: text(table) + "\n" for path, table in found.items()}


def text(value: Any, indent: str = "") -> str:
    """JSON, on one line what fits there."""
    line = json.dumps(value)
    if len(line) <= 320 or not isinstance(value, (dict, list)):
        return line
    parts = (
        [f"{json.dumps(k)}: {text(v, indent + ' ')}" for k, v in value.items()]
        if isinstance(value, dict)
        else [text(v, indent + " ") for v in value]
    )
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{indent} " + f",\n{indent} ".join(parts) + f"\n{indent}{right}"


def main() -> None:
    TABLES.mkdir(exist_ok=True)
    for path, content in tables().items():
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            print(f"table written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
