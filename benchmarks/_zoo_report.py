"""The entries of benchmarks/zoo.py's results file, and its table.

The ratio of a case is pkt's default / the fastest baseline: above 1, pkt is slower. Only variants count whose result
was checked and right. The limit of a case is the greater of two times: cuBLAS alone, and the bytes that leave a GPU
divided by 390 GB/s.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._case import LINK
from benchmarks._zoo_cases import SHORT, sent
from benchmarks._zoo_inputs import ALONE, DEFAULT, NCCL

CLOSE = 1.03  # a ratio up to this counts as not slower: the times of two runs differ by as much
WORST = 10
FIGURES = {"captured": "ms", "eager": "eager_ms"}
"""How calls are made -> the figure of an entry."""


def stored(one: Mapping[str, Any], run: int) -> dict[str, Any]:
    """A measured case as the results file has it. run: index in the file's `runs`."""
    case = one["case"]
    products = [name.rpartition(" ") for name in case["products"]]
    return {
        "operator": case["operator"], "product": "/".join(dict.fromkeys(product for *_, product in products)),
        "models": list(dict.fromkeys(model for model, *_ in products)), "tokens": case["tokens"],
        **{name: case[name] for name in ("M", "N", "K", "layout")},
        "run": run, "seconds": one["seconds"], "variants": one["variants"],
    }  # fmt: skip


def entries(every: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each variant of each case of a results file: the case's facts and the variant's figures."""
    found = []
    for case in every:
        facts = {name: value for name, value in case.items() if name != "variants"}
        found += [{**facts, "variant": name, **figures} for name, figures in case["variants"].items()]
    return found


def right(entry: Mapping[str, Any]) -> bool:
    """Whether a variant was timed and its result was right."""
    return "ms" in entry and not entry.get("failed")


def measured(path: Path | str) -> dict[tuple[str, int, int, int, int, str], dict[str, float]]:
    """(operator, M, N, K, ranks, layout) -> milliseconds, captured, of each variant whose result was right. M, N, K: of
    the product that each rank computes, the tuner's key."""
    record = json.loads(Path(path).read_text())
    found: dict[tuple[str, int, int, int, int, str], dict[str, float]] = defaultdict(dict)
    for e in entries(record["measured"]):
        if right(e):
            found[e["operator"], e["M"], e["N"], e["K"], record["ranks"], e["layout"]][e["variant"]] = e["ms"]
    return dict(found)


class Compared(NamedTuple):
    """A case: the default's time, the fastest baseline and the fastest form of pkt with their times, in ms; NCCL's
    time and the limit, if they were measured."""

    case: Mapping[str, Any]  # one of its entries
    default: float
    baseline: tuple[str, float]
    form: tuple[str, float]
    nccl: float | None
    limit: float | None

    @property
    def ratio(self) -> float:
        return self.default / self.baseline[1]

    @property
    def regret(self) -> float:
        return self.default / min(self.default, self.form[1])

    @property
    def label(self) -> str:
        c = self.case
        shape = f"{c['M']} x {c['K']} x {c['N']}"
        return f"{SHORT[c['operator']]} {shape}, {c['layout']}: {', '.join(c['models'])} {c['product']}"


def compared(found: Iterable[Mapping[str, Any]], figure: str, ranks: int) -> list[Compared]:
    """The cases of which the default and a baseline were measured."""
    of: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for e in found:
        if right(e):
            of[e["operator"], e["M"], e["N"], e["K"], e["layout"]].append(e)
    made = []
    for every in of.values():
        times = {e["variant"]: e[figure] for e in every}
        others = {name: ms for name, ms in times.items() if name != ALONE and not name.startswith("pkt")}
        ours = {name: ms for name, ms in times.items() if name.startswith("pkt")}
        if DEFAULT in times and others:
            fastest = [min(group.items(), key=lambda item: item[1]) for group in (others, ours)]
            case = every[0]
            bytes_ms = 1e3 * sent(case["operator"], case["M"], case["N"], case["K"], ranks) / LINK
            limit = max(times[ALONE], bytes_ms) if ALONE in times else None
            made.append(Compared(case, times[DEFAULT], fastest[0], fastest[1], times.get(NCCL), limit))
    return made


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def summary(found: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Rows of a results file: for captured and eager calls of each operator, the ratio's geometric mean, the share of
    cases in which the default is not slower, and the geometric means of default / fastest form, NCCL + cuBLAS / default
    and, for captured calls, limit / default."""
    rows = []

    def add(case: str, value: float, of: list[float]) -> None:
        rows.append(
            {"case": case, "value": value, "unit": "", "low": min(of), "high": max(of), "runs": len(of),
             "limit": None, "at_least": False, "held": None}
        )  # fmt: skip

    for how, figure in FIGURES.items():
        every = compared(found, figure, ranks)
        for operator in (*SHORT, ""):
            of = [c for c in every if operator in ("", c.case["operator"])]
            if not of:
                continue
            name = f"{SHORT.get(operator, 'all')}, {how}"
            ratios, regrets = [c.ratio for c in of], [c.regret for c in of]
            add(f"{name}: {DEFAULT} / fastest baseline, geometric mean", mean(ratios), ratios)
            add(
                f"{name}: share within {CLOSE} of the fastest baseline",
                sum(r <= CLOSE for r in ratios) / len(of),
                ratios,
            )
            add(f"{name}: {DEFAULT} / fastest form of pkt, geometric mean", mean(regrets), regrets)
            speeds = {NCCL: [c.nccl / c.default for c in of if c.nccl]}
            if figure == FIGURES["captured"]:
                speeds["limit"] = [c.limit / c.default for c in of if c.limit]
            for what, values in speeds.items():
                if values:
                    add(f"{name}: {what} / {DEFAULT}, geometric mean", mean(values), values)
    return rows


def markdown(record: Mapping[str, Any], found: list[dict[str, Any]]) -> str:
    """The summary, the worst cases, the cases in which pkt's choice is worst, and the variants that failed."""
    lines = [f"## {title(record)}", "", "| | value | least | greatest | cases |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['case']} | {row['value']:.3f} | {row['low']:.2f} | {row['high']:.2f} | {row['runs']} |"
        for row in summary(found, record["ranks"])
    ]
    for how, figure in FIGURES.items():
        every = compared(found, figure, record["ranks"])
        worst = sorted(every, key=lambda c: -c.ratio)[:WORST]
        lines += ["", f"### Slowest against the fastest baseline, {how}", ""]
        lines += ["| product, M x K x N on a rank | ratio | pkt default, ms | fastest baseline | fastest form of pkt |"]
        lines += ["|---|--:|--:|---|---|"]
        lines += [
            f"| {c.label} | {c.ratio:.2f} | {c.default:.4g} | {said(c.baseline)} | {said(c.form)} |" for c in worst
        ]
        worst = sorted(every, key=lambda c: -c.regret)[:WORST]
        lines += ["", f"### Slowest against the fastest form of pkt, {how}", ""]
        lines += [
            "| product, M x K x N on a rank | ratio | pkt default, ms | fastest form of pkt |",
            "|---|--:|--:|---|",
        ]
        lines += [f"| {c.label} | {c.regret:.2f} | {c.default:.4g} | {said(c.form)} |" for c in worst]
    wins: dict[str, int] = defaultdict(int)
    for c in compared(found, "ms", record["ranks"]):
        wins[c.baseline[0]] += 1
    lines += ["", "Fastest baseline, captured: " + ", ".join(f"{name} {n}" for name, n in sorted(wins.items())) + "."]
    failed: dict[tuple[str, str, str], int] = defaultdict(int)
    for e in found:
        if e.get("failed"):
            kind = "left out" if e.get("skipped") else "FAILED"
            failed[kind, e["variant"], e["failed"][:160].replace("|", "/").replace("\n", " ")] += 1
    lines += ["", *(f"- {kind} in {n} cases: {name}: {why}" for (kind, name, why), n in sorted(failed.items()))]
    errors = [e["error"] for e in found if right(e) and e.get("error") is not None]
    if errors:
        lines += ["", f"Greatest error against fp32 of the correct variants: {max(errors):.1e}."]
    return "\n".join(lines) + "\n"


def said(of: tuple[str, float]) -> str:
    return f"{of[0]}, {of[1]:.4g}"


def title(record: Mapping[str, Any]) -> str:
    gpus = record.get("host", {}).get("gpus", [])
    machine = f"{record['ranks']} x {gpus[0]}" if gpus else f"{record['ranks']} ranks"
    return f"Products of published models, pkt default / fastest baseline, {machine}, {record.get('date', '')}"
