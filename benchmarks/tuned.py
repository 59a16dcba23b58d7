"""Write the tables that ship with pkt from the committed results.

    python -m benchmarks.tuned

An operator's table, measured.json in its folder, has, for each case of benchmarks/exhaustive.py, the MOST fastest
candidates and the fastest of every other mode, including NCCL + cuBLAS. Each has its settings, as keywords of the
operator, and its median, least and greatest time. The fastest comes first. The last search of a case counts.
pkt/model/link.json has the curves of benchmarks/link.py. Each file names its sources. tests/tune/test_tables.py fails
if a table differs from the output of this program.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._harness import RESULTS, ROOT, no_options
from pkt.tune import tables as shipped
from pkt.tune.candidates import tuned_operators

MOST = 24
"""Fastest candidates of a case that a table has."""
CURVE = re.compile(r"(one|all) peers?, by programs: (.+), (\d+) programs")
SIZES = re.compile(r"one peer, by message size: (.+), (\d+) ([KM])iB")
NAMES = {"skip": "rounds_alone", "split": "cut_last", "whole": "whole_rounds"}
"""Settings by the name that they had when the committed results were measured, and their name today."""


class Case(NamedTuple):
    """A case that was searched exhaustively."""

    key: dict[str, Any]
    measured: list[dict[str, Any]]  # the fastest first
    path: Path
    record: dict[str, Any]  # the content of that file


def cases(operator: str) -> list[Case]:
    """The cases of an operator, each from its last search."""
    found: dict[tuple, Case] = {}
    for path in sorted(RESULTS.glob(f"exhaustive_{operator}*.json")):
        record = json.loads(path.read_text())
        for case in record["cases"]:
            key = tuple(case["key"].items())
            if key not in found or found[key].record["date"] < record["date"]:
                measured = [{**row, "settings": today(row["settings"])} for row in case["measured"]]
                found[key] = Case(case["key"], measured, path, record)
    return sorted(found.values(), key=lambda case: (-case.key["size"], case.key["M"], case.key["K"]))


def today(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a result under today's names."""
    return {NAMES.get(name, name): value for name, value in settings.items()}


def operator_table(operator: str) -> dict[str, Any]:
    """The content of an operator's table."""
    found = cases(operator)
    records = {case.path: case.record for case in found}
    order = list(records)
    return {
        "operator": operator,
        "gpu": found[0].record["host"]["gpus"][0],
        "sources": [source(record, path) for path, record in records.items()],
        "entries": [
            {"key": case.key, "source": order.index(case.path), "measured": fastest(case.measured)} for case in found
        ],
    }


def fastest(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The MOST fastest rows of `measured`, which is sorted, and the fastest of each mode: a case that cannot use the
    fastest forms needs another mode."""
    first: dict[str, int] = {}
    for at, row in enumerate(measured):
        first.setdefault(row["settings"]["mode"], at)
    shipped = [row for at, row in enumerate(measured) if at < MOST or at in first.values()]
    return [{name: row[name] for name in ("settings", "seconds", "low", "high")} for row in shipped]


def link_table() -> dict[str, Any]:
    """The content of pkt/model/link.json: GB/s out of one GPU while all ranks send."""
    path = RESULTS / "link.json"
    record = json.loads(path.read_text())
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
        "source": source(record, path),
        "by_programs": by_programs,
        "by_size": by_size,
    }


def source(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The results file, commit, date and versions from which a table comes."""
    versions = {name: record["host"]["versions"][name] for name in ("torch", "triton")}
    file = path.relative_to(ROOT).as_posix()
    return {"file": file, "commit": record["commit"], "date": record["date"], "versions": versions}


def tables() -> dict[Path, str]:
    """Every table: its file -> its text."""
    found = {ROOT / "pkt" / "model" / "link.json": link_table()}
    found |= {shipped.path(operator): operator_table(name) for name, operator in tuned_operators().items()}
    return {file: text(table) + "\n" for file, table in found.items()}


def text(value: Any, indent: str = "") -> str:
    """JSON in which a value that fits into 320 characters takes one line."""
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
    for file, content in tables().items():
        if not file.exists() or file.read_text() != content:
            file.write_text(content)
            print(f"table written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    no_options(__doc__)
    main()
