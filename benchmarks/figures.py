"""Write measured figures into README.md and docs/, and draw the pictures of benchmarks/results. Every figure of a page
and every picture comes from a committed results file.

    python -m benchmarks.figures

Two comments mark a place in a page: the first names the results file, the second ends the place. A comment that names
the files of several operators gives one table:

    <!-- benchmarks/results/simulator.json -->
    <!-- end -->
    <!-- benchmarks/results/all_gather_matmul.json benchmarks/results/matmul_reduce_scatter.json -->
    <!-- end -->

This program writes the text between the comments. tests/test_readme_figures.py fails if a page has another text, and
tests/test_pictures.py if a picture was drawn from other data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import _pictures
from benchmarks._harness import RESULTS, ROOT, no_options
from benchmarks._report import DEFAULT, operation, title

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACE = re.compile(
    r"(<!-- (benchmarks/results/\w+\.json(?: benchmarks/results/\w+\.json)*) -->\n).*?(<!-- end -->)", re.DOTALL
)
BETWEEN = ("N = 6144", "N = 12288")
"""Cases that a table of several operators leaves out."""
SHOWN = (8, 16, 64, 256, 1024, 4096)
"""GPUs that the table of predictions has."""
BASELINES = {"NCCL + cuBLAS": "NCCL + cuBLAS", "torch symm_mem fused": "torch fused"}


def filled(page: str) -> str:
    """`page` with the current figures of the results files that it names; no table for a file that does not exist."""

    def table_for(match: re.Match[str]) -> str:
        files = [ROOT / name for name in match[2].split()]
        records = [json.loads(file.read_text()) for file in files if file.exists()]
        one = TABLES.get(records[0]["benchmark"], table) if records else None
        text = "" if one is None else one(records[0]) if len(files) == 1 else operators_table(records)
        return match[1] + text + match[3]

    return PLACE.sub(table_for, page)


def table(record: dict[str, Any]) -> str:
    """A Markdown table of the medians and limits of the rows that have a limit."""
    lines = [f"| {title(record)} | measured | limit |", "|---|--:|--:|"]
    for row in record["rows"]:
        if row["limit"] is not None:
            sign, unit, missed = "≥" if row["at_least"] else "≤", row["unit"], "" if row["held"] else ", missed"
            value, limit = (number(x) + f" {unit}" if unit else ratio(x) for x in (row["value"], row["limit"]))
            lines.append(f"| {row['case']} | {value}{missed} | {sign} {limit} |")
    return "\n".join(lines) + "\n"


def operators_table(records: list[dict[str, Any]]) -> str:
    """A Markdown table of milliseconds, one row an operator: pkt's default (its fastest variant if the default was not
    measured), then the baselines in brackets."""
    (on,) = {title(record) for record in records}
    measured = [row["case"] for record in records for row in record["measured"] if "ms" in row]
    cases = [case for case in dict.fromkeys(measured) if case.startswith("N") and case not in BETWEEN]
    head = f"| pkt ({'; '.join(BASELINES.values())}) in ms, {on} | "
    lines = [head + " | ".join(cases) + " |", "|---|" + "--:|" * len(cases)]
    for record in records:
        cells = []
        for case in cases:
            rows = [r for r in record["measured"] if r["case"] == case and r.get("error") is not None and "ms" in r]
            times = {r["variant"]: r["ms"] for r in rows}
            ours = times.get(DEFAULT) or min((t for v, t in times.items() if v.startswith("pkt")), default=None)
            base = [f"{times[v]:.3g}" for v in BASELINES if v in times]
            cells.append(f"{ours:.3g} ({'; '.join(base)})" if ours and base else "")
        lines.append(f"| {operation(record['benchmark'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def predicted_table(record: dict[str, Any]) -> str:
    """A Markdown table of the predicted milliseconds of the greatest size and, in brackets, the efficiency."""
    mib = str(max(record["mib"]))
    lines = [f"| GPUs | nodes | {' | '.join(record['predicted'])} |", "|--:" * (2 + len(record["predicted"])) + "|"]
    for rows in zip(*(sizes[mib] for sizes in record["predicted"].values())):
        if rows[0]["gpus"] in SHOWN:
            cells = [f"{row['ms']:.3g} ({row['efficiency']:.0%})" for row in rows]
            lines.append(
                f"| {rows[0]['gpus']:,} | {rows[0]['nodes']} of {rows[0]['node_size']} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def published_table(record: dict[str, Any]) -> str:
    """A Markdown table of published microseconds, the predicted ones and their ratio, and the sources."""
    whats = list(dict.fromkeys(row["what"] for row in record["compared"]))
    head = [f"{what}, us: published | predicted | ratio" for what in whats]
    lines = [f"| source | GPUs | {' | '.join(head)} |", "|---|--:|" + "--:|" * 3 * len(whats)]
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for row in record["compared"]:
        published, predicted = row["published_us"], row["predicted_us"]
        text = f"{published:g} | {predicted:.0f} | {published / predicted:.2f}"
        cells.setdefault((row["source"], row["gpus"]), {})[row["what"]] = text
    for (source, gpus), found in cells.items():
        text = " | ".join(found.get(what, " | | ") for what in whats)
        lines.append(f"| {record['sources'][source]['name']} | {gpus} | {text} |")
    sources = [f"[{s['name']}]({s['url']}), {s['what']}, on {s['on']}" for s in record["sources"]]
    return "\n".join([*lines, "", *(f"- {source}" for source in sources)]) + "\n"


TABLES = {"scale_out": predicted_table, "scale_out_published": published_table}


def number(value: float) -> str:
    """`value` with two significant digits below 10, three up to 1,000, and commas between thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.3g}"


def ratio(value: float) -> str:
    """`value` with two decimals, which tell 1.05 from 1.1; below 0.1 with two significant digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"figures written: {Path(page).relative_to(ROOT)}")
    for picture, data in _pictures.pictures(RESULTS).items():
        _pictures.draw(picture, data)
        print(f"drawn: {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    no_options(__doc__)
    main()
