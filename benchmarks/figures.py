"""Puts measured figures into README.md and docs/: every figure a page quotes comes from a committed results file.

    python -m benchmarks.figures

A page marks the place with a comment that names the file, and one that ends it:

    <!-- benchmarks/results/simulator.json -->
    <!-- end -->

What stands between them is written by this program, and tests/test_readme_figures.py fails where it differs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- (benchmarks/results/\w+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """`page` with the figures of the results files that it names, as they are now."""

    def table_for(match: re.Match[str]) -> str:
        return match[1] + table(json.loads((ROOT / match[2]).read_text())) + match[3]

    return PLACE.sub(table_for, page)


def table(record: dict[str, Any]) -> str:
    """The rows that are held to a limit, with the medians."""
    lines = [f"| {title(record)} | measured | limit |", "|---|--:|--:|"]
    for row in record["rows"]:
        if row["limit"] is not None:
            limit = f"{'≥' if row['at_least'] else '≤'} {number(row['limit'])} {row['unit']}"
            missed = "" if row["held"] else ", missed"
            lines.append(f"| {row['case']} | {number(row['value'])} {row['unit']}{missed} | {limit} |")
    return "\n".join(lines) + "\n"


def title(record: dict[str, Any]) -> str:
    """What was measured on: GPUs where there are any, else CPU cores."""
    gpus, cores = record["host"]["gpus"], record["host"]["cores"]
    on = f"{len(gpus)} {gpus[0]}" if gpus else f"{cores} CPU cores"
    return f"{record['ranks']} {'ranks' if gpus else 'simulated ranks'} on {on}, {record['date']}"


def number(value: float) -> str:
    """Two significant digits below 10, three up to 1,000, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.3g}"


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"figures written: {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
