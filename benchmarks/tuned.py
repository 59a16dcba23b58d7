"""Writes the tables that ship in pkt/tune/tables/ from the committed results: what the tuner knows without measuring.

    python -m benchmarks.tuned

<operator>.json has, for each case of the operator's benchmark, NCCL + cuBLAS and every right variant of pkt with its
settings as keywords of the operator, its median, least and greatest time, the fastest first; link.json the curves of
benchmarks/link.py. Each file names its source. tests/tune/test_tables.py fails where a table differs from what this
program writes.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT
from pkt.kernels._gluon import TILES
from pkt.tune.config import NCCL

TABLES = ROOT / "pkt" / "tune" / "tables"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
BASELINE = "NCCL + cuBLAS"
PLAIN_MODE = {"all_gather_matmul": "push", "matmul_all_reduce": "lcsc"}
"""What a variant has that names none."""
CURVE = re.compile(r"(one|all) peers?, by programs: (.+), (\d+) programs")
SIZES = re.compile(r"one peer, by message size: (.+), (\d+) ([KM])iB")


def settings(operator: str, variant: str) -> dict[str, Any] | None:
    """The keywords of `operator` that give `variant`; None for another baseline, a part, or pkt's own choice."""
    if variant == BASELINE:
        return dict(NCCL)
    module: Any = importlib.import_module(f"benchmarks.{operator}")
    options = (module.PLAIN | module.GLUON).get(variant)
    if not options:
        return None
    found = {"mode": PLAIN_MODE.get(operator), **options}
    return {**found, "tiles": options.get("tiles", TILES)} if found["mode"] == "gluon" else found


def key(operator: str, size: int, N: int, M: int = 0, K: int = 0) -> dict[str, Any]:
    """The product that a rank computes, in the benchmark's case."""
    M, K = M or N, K or N
    shape = {"M": M, "N": N // size, "K": K} if operator == "all_gather_matmul" else {"M": M, "N": N, "K": K // size}
    return {**shape, "dtype": "bf16", "size": size}


def operator_table(operator: str) -> dict[str, Any]:
    """What pkt/tune/tables/<operator>.json is."""
    record = json.loads((RESULTS / f"{operator}.json").read_text())
    entries = []
    for case, arguments in importlib.import_module(f"benchmarks.{operator}").cases(quick=False).items():
        if operator == "all_gather_matmul" and "M" in arguments:  # sharded by columns, of which a key says nothing
            continue
        rows = [row for row in record["measured"] if row["case"] == case and "ms" in row and not row.get("failed")]
        found = [(row, settings(operator, row["variant"])) for row in rows]
        measured = [
            {
                "settings": given,
                "seconds": round(row["ms"] / 1e3, 9),
                "low": round(row["low"] / 1e3, 9),
                "high": round(row["high"] / 1e3, 9),
                "variant": row["variant"],
            }
            for row, given in sorted(found, key=lambda pair: pair[0]["ms"])
            if given is not None
        ]
        if measured:  # some cases are newer than the results
            entries.append({"key": key(operator, record["ranks"], **arguments), "measured": measured})
    return {"operator": operator, "gpu": record["host"]["gpus"][0], "source": source(record), "entries": entries}


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


def source(record: dict[str, Any]) -> dict[str, Any]:
    """Where the figures of a table come from."""
    versions = {name: record["host"]["versions"][name] for name in ("torch", "triton")}
    file = f"benchmarks/results/{record['benchmark']}.json"
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
