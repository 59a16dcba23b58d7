"""A run's times beside their limits, as a table.

The limit of a product is the greater of two times: cuBLAS's, and the bytes that leave a GPU divided by 390 GB/s.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks._case import LINK

DEFAULT = "pkt default"


def limits(rows: list[dict[str, Any]], alone: str = "cuBLAS alone") -> None:
    """Add `limit_ms` and `ratio` = limit / time to the rows of each case that has a limit."""
    for case in dict.fromkeys(row["case"] for row in rows):
        of = [row for row in rows if row["case"] == case]
        compute = next((row["ms"] for row in of if row["variant"] == alone and "ms" in row), 0.0)
        for row in of:
            limit = max(compute, 1e3 * row.get("bytes", 0.0) / LINK)
            if "ms" in row and limit:
                row |= {"limit_ms": limit, "ratio": limit / row["ms"]}


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A table with a line for each variant and a column for each case: milliseconds and, in brackets, limit / time. The
    fastest of pkt's variants and of the baselines are bold."""
    cases = list(dict.fromkeys(row["case"] for row in rows if "ms" in row or "error" in row))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    cell = {(row["variant"], row["case"]): row for row in rows}
    best: dict[tuple[str, bool], str] = {}
    for case in cases:
        for ours in (False, True):
            of = [r for r in rows if r["case"] == case and "ms" in r and r["variant"].startswith("pkt") == ours]
            of = [r for r in of if r.get("error") is not None]
            if of:
                best[case, ours] = min(of, key=lambda r: r["ms"])["variant"]
    lines = [f"## {title}", "", "| ms (limit / time) | " + " | ".join(cases) + " |", "|---|" + "--:|" * len(cases)]
    for name in names:
        cells = []
        for case in cases:
            row = cell.get((name, case))
            if row is None or row.get("skipped"):
                text = ""
            elif "ms" in row:
                text = f"{row['ms']:.4g}" + (f" ({row['ratio']:.2f})" if "ratio" in row else "")
                text = f"**{text}**" if best.get((case, name.startswith("pkt"))) == name else text
            else:
                checked = "ran" if row.get("error") is None else f"right, {row['error']:.1e}"
                text = "failed" if row.get("failed") else checked
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    right = [row for row in rows if row.get("error") is not None and not row.get("failed")]
    worst = max((row["error"] for row in right), default=0.0)
    return "\n".join([*lines, "", f"Greatest error against fp32 of the correct variants: {worst:.1e}.", ""])


def operation(name: str) -> str:
    """The parts of a fused operator in words: "matmul_all_reduce" -> "GEMM + all-reduce"."""
    parts = re.split(r"_(?=matmul$)|(?<=^matmul)_", name)
    return " + ".join(part.replace("matmul", "GEMM").replace("_", "-") for part in parts)


def title(record: dict[str, Any]) -> str:
    """The ranks, the machine (its GPUs, or its CPU cores if it has none) and the date."""
    gpus, cores = record["host"]["gpus"], record["host"]["cores"]
    on = f"{len(gpus)} {gpus[0]}" if gpus else f"{cores} CPU cores"
    ranks = f"{'' if gpus else 'simulated '}rank{'s' if record['ranks'] != 1 else ''}"
    return f"{record['ranks']} {ranks} on {on}, {record['date']}"
