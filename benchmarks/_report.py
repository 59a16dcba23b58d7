"""A run's times beside their limits, as a table and as a bar chart.

The limit of a product is the greater of two times: cuBLAS's, and the bytes that leave a GPU divided by 390 GB/s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._case import LINK


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
                text = "failed" if row.get("failed") else f"right, {row['error']:.1e}"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    right = [row for row in rows if row.get("error") is not None and not row.get("failed")]
    worst = max((row["error"] for row in right), default=0.0)
    return "\n".join([*lines, "", f"Greatest error against fp32 of the correct variants: {worst:.1e}.", ""])


def picture(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Draw bars of limit / time: a group for each case, a bar for each baseline and for pkt's fastest variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows if "ratio" in row))
    timed = {(r["case"], r["variant"]): r["ratio"] for r in rows if "ratio" in r and r.get("error") is not None}
    names = [n for n in dict.fromkeys(name for _, name in timed) if not n.startswith("pkt")]
    ours = {c: max((v for (k, n), v in timed.items() if k == c and n.startswith("pkt")), default=0.0) for c in cases}
    bars = {name: [timed.get((c, name), 0.0) for c in cases] for name in names} | {"pkt": [ours[c] for c in cases]}
    figure, axes = plt.subplots(figsize=(1.5 + 1.8 * len(cases), 3.4), layout="constrained")
    width = 0.8 / len(bars)
    for i, (name, values) in enumerate(bars.items()):
        at = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(cases))]
        colour = "tab:red" if name == "pkt" else f"{0.75 - 0.45 * i / max(len(bars) - 1, 1):.2f}"
        drawn = axes.bar(at, values, width * 0.92, label=name, color=colour)
        axes.bar_label(drawn, [f"{v:.2f}" if v else "" for v in values], fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("limit / time")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
