"""The pictures of benchmarks/results: one style, drawn from the results files alone.

    python -m benchmarks.figures      draws all of them anew

Each picture has the digest of its data in its metadata, by which tests/test_pictures.py knows that it is not older.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _zoo_report
from benchmarks._bars import BARS
from benchmarks._case import LINK
from benchmarks._report import DEFAULT, operation
from benchmarks._style import BASE, LINES, OTHER, PKT, SMALL, TORCH, Record, Series, canvas, dots, named, plain
from pkt.trace import COLOURS, FAINT, INK

KEY = "pkt-data"  # of the digest in the metadata
PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
OVERVIEW = "overview"
NCCL = "NCCL + cuBLAS"
MOST = 4.0  # times as fast as NCCL: the end of the axis
LIMIT = f"limit: the longer of cuBLAS's product alone and the bytes that leave a GPU at {LINK / 1e9:.0f} GB/s"


# ----------------------------------------------------------------------------------------------------------- the files
def pictures(folder: Path) -> dict[Path, list[Path]]:
    """Each picture of a folder of results, and the data that it is drawn from. A run without a baseline has none, and
    a run on one GPU."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        if name_of(path.stem) in DRAWS:
            record = json.loads(path.read_text())
            alone = len(record.get("host", {}).get("gpus", [])) == 1
            if not alone and any(case_has_baseline(row) for row in record.get("measured", [{}])):
                found[path.with_suffix(".png")] = [path]
    both = [folder / f"{name}{ranks}.json" for ranks in ("_2", "") for name in PRODUCTS]
    if all(path.exists() for path in both):
        found[folder / f"{OVERVIEW}.png"] = both
    return found


def name_of(stem: str) -> str:
    """The benchmark of a results file, which may end in a number of ranks."""
    return re.sub(r"_\d+$", "", stem)


def case_has_baseline(row: Mapping[str, Any]) -> bool:
    """True for a row of a benchmark that has no variants."""
    return "NCCL" in row.get("variant", NCCL)


def digest(data: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in data)).hexdigest()


def drawn_from(picture: Path) -> str:
    """The digest of the data that a picture was drawn from."""
    from PIL import Image

    with Image.open(picture) as image:
        return str(getattr(image, "text", {}).get(KEY, ""))


def draw(picture: Path, data: Sequence[Path]) -> None:
    """Draw one picture of `pictures`. Needs matplotlib."""
    records = [json.loads(path.read_text()) for path in data]
    figure = overview(records) if picture.stem == OVERVIEW else DRAWS[name_of(records[0]["benchmark"])](records[0])
    figure.savefig(picture, metadata={KEY: digest(data), "Software": None})


def draw_if_possible(data: Path) -> None:
    """Draw the picture of one results file, if it has one and matplotlib is there."""
    picture = data.with_suffix(".png")
    if picture in pictures(data.parent) and importlib.util.find_spec("matplotlib"):
        draw(picture, [data])


# -------------------------------------------------------------------------------------------------------- the pictures
def times(record: Record) -> dict[str, dict[str, Record]]:
    """Case -> variant -> its row, of the variants that were timed and right, or that no one has to check."""
    found: dict[str, dict[str, Record]] = defaultdict(dict)
    for row in record["measured"]:
        if "ms" in row and row.get("error") is not None:
            found[row["case"]][row["variant"]] = row
    return found


def product(record: Record) -> Any:
    """How near to the limit a fused product is: a panel for square products, one for few rows."""
    key = {"pkt": PKT, NCCL: BASE, "torch": TORCH, "kraken": OTHER}
    variants = {DEFAULT: "pkt", NCCL: NCCL, "torch symm_mem fused": "torch", "cuBLAS + torch two-shot": "torch",
                "kraken": "kraken"}  # fmt: skip
    rows = {
        case: {variants[v]: row["ratio"] for v, row in of.items() if v in variants and "ratio" in row}
        for case, of in times(record).items()
    }
    panels = [{c: r for c, r in rows.items() if c.startswith(axis) and r} for axis in "NM"]
    panels = [panel for panel in panels if panel]
    used = {name: look for name, look in key.items() if any(name in r for panel in panels for r in panel.values())}
    figure = canvas(
        f"{operation(record['benchmark'])}, bf16: limit / time", [record],
        1.25 + sum(0.45 + 0.2 * len(panel) for panel in panels), LIMIT, used,
    )  # fmt: skip
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(panel) + 1.5 for panel in panels])[:, 0]
    heads = {"N": f"an N x N x N product, shared by {record['ranks']} ranks", "M": "M rows, as in decoding"}
    for axes, panel in zip(grid, panels):
        dots(axes, heads[next(iter(panel))[0]], panel, used, "limit", 1.25)
    return figure


def collectives(record: Record) -> Any:
    """How many times faster than NCCL the collectives are: a panel for each."""
    key = {"pkt": PKT, "torch": TORCH}
    panels: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for case, of in times(record).items():
        kind, size = re.fullmatch(r"([a-z-]+) (.+)", case).groups()  # type: ignore[union-attr]
        torch = [row["ms"] for variant, row in of.items() if variant.startswith("torch")]
        if "NCCL" in of:
            base = of["NCCL"]["ms"]
            size = size.replace("columns", "cols").replace("heads ", "")
            panels[kind][size] = {"pkt": base / of[DEFAULT]["ms"]} | ({"torch": base / min(torch)} if torch else {})
    pairs = [list(panels)[i : i + 2] for i in range(0, len(panels), 2)]
    heights = [max(len(panels[kind]) for kind in pair) + 2 for pair in pairs]
    figure = canvas(
        "Collectives, bf16: times as fast as NCCL", [record], 1.0 + 0.2 * sum(heights),
        "torch: the fastest of its symmetric-memory operators. Sizes are those of the whole tensor.", key,
    )  # fmt: skip
    grid = figure.subplots(len(pairs), 2, squeeze=False, height_ratios=heights)
    for at, pair in enumerate(pairs):
        for side, kind in enumerate([*pair, ""][:2]):
            if kind:
                dots(grid[at][side], kind, panels[kind], key, "NCCL", MOST)
            else:
                grid[at][side].set_axis_off()
    return figure


def overview(records: Sequence[Record]) -> Any:
    """How many times faster than NCCL + cuBLAS the fused products are: a panel for each number of ranks."""
    key = {"pkt": PKT, "torch": TORCH}
    ranks = list(dict.fromkeys(record["ranks"] for record in records))
    figure = canvas(
        "Fused products: times as fast as NCCL + cuBLAS", records, 3.6,
        "An N x N x N product in bf16, shared by the ranks. torch: its fused operator, where it has one.", key,
    )  # fmt: skip
    for axes, count in zip(figure.subplots(1, len(ranks), sharey=True), ranks):
        rows = {}
        for record in (r for r in records if r["ranks"] == count):
            for case, of in times(record).items():
                if case in ("N = 4096", "N = 8192", "N = 16384") and NCCL in of:
                    base = of[NCCL]["ms"]
                    row = {"pkt": base / of[DEFAULT]["ms"]}
                    if "torch symm_mem fused" in of:
                        row["torch"] = base / of["torch symm_mem fused"]["ms"]
                    rows[f"{operation(record['benchmark'])}, {case.removeprefix('N = ')}"] = row
        dots(axes, f"{count} GPUs", rows, key, NCCL, 2.1)
    return figure


def zoo(record: Record) -> Any:
    """How many times faster than the fastest baseline pkt's default is at products of published models."""
    key = {"captured": PKT, "eager": Series(COLOURS["communicate"], "s", 4.5)}
    found = _zoo_report.entries(record["measured"])
    panels = [name for name in _zoo_report.SHORT if any(e["operator"] == name for e in found)]
    close = f"Geometric means. Not slower: within {_zoo_report.CLOSE - 1:.0%}."
    foot = f"{close} Baselines: NCCL + cuBLAS, torch, cuBLASMp. Captured: CUDA graph."
    figure = canvas(
        "Products of models: times as fast as the fastest baseline", [record], 1.1 + 1.65 * len(panels),
        foot, key,
    )  # fmt: skip
    for axes, name in zip(figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0], panels):
        said: list[str] = []
        for (how, figures), look in zip(_zoo_report.FIGURES.items(), key.values()):
            every = [c for c in _zoo_report.compared(found, figures, record["ranks"]) if c.case["operator"] == name]
            points = [(count, 1 / c.ratio) for c in every for count in c.case["tokens"]]
            axes.plot(
                *zip(*points), look.marker, color=look.colour, markersize=look.size - 2, alpha=0.75, markeredgewidth=0,
                zorder=4 - len(said),
            )  # fmt: skip
            held = sum(c.ratio <= _zoo_report.CLOSE for c in every)
            mean = 1 / _zoo_report.mean(c.ratio for c in every)
            said.append(f"{how} {mean:.2f}, {held} of {len(every)} not slower")
        plain(axes, operation(name), 13)
        axes.annotate("; ".join(said), (0, 1), (0, 2), xycoords="axes fraction", textcoords="offset points",
                      va="bottom", fontsize=SMALL, color=INK)  # fmt: skip
        axes.axhline(1.0, color=INK, linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.set_ylim(0.7, 4.2)
        axes.set_xticks([1, 4, 16, 64, 256, 1024, 4096, 16384], ["1", "4", "16", "64", "256", "1k", "4k", "16k"])
        axes.minorticks_off()
        named(axes, [("fastest\nbaseline", 1.0, INK)], 0.1)
    axes.set_xlabel("tokens", fontsize=SMALL, color=FAINT)
    return figure


def link(record: Record) -> Any:
    """Bandwidth by message size and by programs, to one peer and to all, and the latencies."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in record["points"]:
        group, series, number, unit = re.fullmatch(r"(.+): (.+), ([\d.]+) (\w+)", point["case"]).groups()  # type: ignore[union-attr]
        x = float(number) * {"KiB": 2**10, "MiB": 2**20}.get(unit, 1)
        lines[group][series].append((x, point["value"]))
    limits = record["limits_gb_s"]
    latencies = [(r["case"], r["value"]) for r in record["rows"] if r["unit"] == "us" and "host" not in r["case"]]
    heights = [*(1.9 for _ in lines), 0.35 + 0.16 * len(latencies)]
    figure = canvas(
        "Links between GPUs: GB/s out of each GPU, and latencies", [record], 0.9 + sum(heights),
        f"limit: {limits['raw']:g} GB/s that the links carry; greatest measured: {limits['practical']:g} GB/s",
    )  # fmt: skip
    *grid, last = figure.subplots(len(heights), 1, height_ratios=heights)
    for axes, group in zip(grid, sorted(lines, key=lambda name: ("size" not in name, "all" in name))):
        plain(axes, group)
        ends = []
        for colour, (series, found) in zip(LINES, lines[group].items()):
            found = sorted(found)
            if found[0][0] == 0:  # copy engines need no program
                axes.axhline(found[0][1], color=colour, linestyle=":", linewidth=1.2)
            else:
                axes.plot(*zip(*found), color=colour, marker="o", markersize=2.5, linewidth=1.2)
            ends.append((series, found[-1][1], colour))
        for name, value in (("limit of the links", limits["raw"]), ("greatest measured", limits["practical"])):
            axes.axhline(value, color=INK, linewidth=0.7, linestyle="--")
            ends.append((name, value, INK))
        named(axes, ends, 44)
        axes.set_ylim(0, 510)
        axes.set_xscale("log", base=2)
        sizes = group.endswith("size")
        ticks = [(2**e, f"{2 ** (e % 10)} {('B', 'KiB', 'MiB', 'GiB')[e // 10]}") for e in (10, 15, 20, 25, 30)]
        axes.set_xticks(*zip(*ticks)) if sizes else axes.set_xticks([2**e for e in range(8)], [2**e for e in range(8)])
        axes.set_xlabel("bytes of a message" if sizes else "programs", fontsize=SMALL, color=FAINT, labelpad=1)
        axes.minorticks_off()
    plain(last, "latency, µs")
    bars = last.barh(range(len(latencies)), [us for _, us in latencies], color=PKT.colour)
    last.bar_label(bars, [f"{us:.2f}  {name}" for name, us in latencies], fontsize=SMALL, padding=3, color=INK)
    last.set_yticks([])
    last.set_ylim(len(latencies) - 0.4, -0.6)
    last.set_xlim(0, 2 * max(us for _, us in latencies))
    return figure


def scale_out(record: Record) -> Any:
    """Predicted efficiency by the number of GPUs: a panel for each collective, a line for each size."""
    look = dict(zip(map(str, record["mib"]), (OTHER, TORCH, PKT)))
    key = {f"{mib} MiB": series for mib, series in look.items()}
    sizes = {f"{gpus:,}": gpus for gpus in (8, 64, 512, 4096)}
    figure = canvas(
        "Predicted, not measured: efficiency over nodes", [], 4.6,
        "Efficiency: the bytes alone on the slower kind of link / predicted time. MiB: of x; of all_gather's result.",
        key, on=f"by pkt's cost model: nodes of 8 {record['gpu']} (8 GPUs: 2 nodes of 4), "
        f"{record['network'].removesuffix('Gb')} Gb/s a GPU, bf16",
    )  # fmt: skip
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (name, lines) in zip(grid.flat, record["predicted"].items()):
        plain(axes, name)
        for mib, series in look.items():
            xs = [row["gpus"] for row in lines[mib]]
            ys = [100 * row["efficiency"] for row in lines[mib]]
            axes.plot(xs, ys, color=series.colour, marker=series.marker, markersize=series.size - 2, linewidth=1.2)
            axes.annotate(
                f"{ys[-1]:.0f}%", (xs[-1], ys[-1]), (5, 0), textcoords="offset points", va="center", fontsize=SMALL,
                color=series.colour, annotation_clip=False,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sizes.values()), list(sizes))
        axes.minorticks_off()
        axes.set_ylim(0, 104)
        axes.set_yticks(range(0, 101, 25), [f"{at}%" for at in range(0, 101, 25)])
    for axes in grid[1]:
        axes.set_xlabel("GPUs", fontsize=SMALL, color=FAINT, labelpad=1)
    return figure


DRAWS: dict[str, Callable[[Record], Any]] = {
    **dict.fromkeys(PRODUCTS, product), "collectives": collectives, "zoo": zoo, "link": link,
    "scale_out": scale_out, **BARS,
}  # fmt: skip
