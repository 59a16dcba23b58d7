"""Writes the tables that ship in pkt/tune/tables/ from the committed results: what the tuner knows without measuring.

    python -m benchmarks.tuned

<operator>.json has, for each case of the operator's benchmark, every right variant with its settings as keywords of the
operator, its median, least and greatest time, the fastest first; link.json the curves of benchmarks/link.py. Each file
names its source. tests/tune/test_tables.py fails where a table differs from what this program writes.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT
from pkt.kernels._gluon_all_gather_matmul import PushPlan

TABLES = ROOT / "pkt" / "tune" / "tables"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
GLUON_MODE = {"all_gather_matmul": "gluon", "matmul_reduce_scatter": "chain"}
PLAIN_MODE = {"all_gather_matmul": "push"}
CURVE = re.compile(r"(one|all) peers?, by programs: (.+), (\d+) programs")
SIZES = re.compile(r"one peer, by message size: (.+), (\d+) ([KM])iB")


def settings(operator: str, variant: str) -> dict[str, Any] | None:
    """The keywords of `operator` that give `variant`; None for a baseline, a part, or what pkt chose by itself."""
    module: Any = importlib.import_module(f"benchmarks.{operator}")
    if not variant.startswith("pkt ") or variant == "pkt default":
        return None
    if variant in module.PLAIN:
        options = module.PLAIN[variant]
        mode = {"mode": PLAIN_MODE[operator]} if operator in PLAIN_MODE else {}
        return {**mode, **options, "tiles": list(options["tiles"])}
    options = module.GLUON[variant]
    found: dict[str, Any] = {"mode": GLUON_MODE[operator]}
    if operator == "all_gather_matmul":
        plan = options.get("plan", PushPlan())
        found |= {"num_comm_sms": plan[0], "chunk": plan.chunk, "unit": list(plan[1:6])}
        found |= {"push_rows": plan.push_rows, "nap": plan.nap}
    tiles = options.get("tiles")
    group, stages = (tiles.group, getattr(tiles, "num_stages", 0) or tiles.stages) if tiles else (8, 4)
    return found | {"tiles": [*(tiles[:3] if tiles else (128, 256, 64)), group, 8, stages]}


def key(operator: str, N: int, size: int) -> dict[str, Any]:
    """The product that a rank computes, in the benchmark's case N."""
    shape = {"M": N, "N": N // size, "K": N} if operator == "all_gather_matmul" else {"M": N, "N": N, "K": N // size}
    return {**shape, "dtype": "bf16", "size": size}


def operator_table(operator: str) -> dict[str, Any]:
    """What pkt/tune/tables/<operator>.json is."""
    record = json.loads((RESULTS / f"{operator}.json").read_text())
    entries = []
    for case, arguments in importlib.import_module(f"benchmarks.{operator}").cases(quick=False).items():
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
        entries.append({"key": key(operator, arguments["N"], record["ranks"]), "measured": measured})
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
