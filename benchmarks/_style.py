"""The style of the pictures of benchmarks/results. Their width suits a column of a paper. Colours are those of the
timeline: Okabe and Ito's, which colour-blind people can tell apart; each series has a marker of its own, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._report import title
from pkt.trace import COLOURS, FAINT, INK

Record = dict[str, Any]
WIDTH, DPI = 5.6, 300  # inches and dots an inch: 1,680 pixels
SMALL, TEXT, HEAD = 7.0, 8.0, 10.5  # points


class Series(NamedTuple):
    """The look of one series: of a variant, or of the fastest of several."""

    colour: str
    marker: str
    size: float


PKT = Series(COLOURS["compute"], "o", 6.0)
BASE = Series(COLOURS["communicate"], "s", 4.5)
TORCH = Series("#009E73", "D", 4.5)
OTHER = Series("#CC79A7", "^", 4.5)
LIGHT = Series("#56B4E9", "v", 4.5)
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A828C")


def canvas(
    head: str, records: Sequence[Record], inches: float, foot: str, key: Mapping[str, Series] = {}, on: str = ""
) -> Any:
    """A figure with its title, what it was measured on, a key of its series, and a line at its foot. on: in place of
    what it was measured on."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(WIDTH, inches), dpi=DPI, facecolor="white")
    on = on or "; ".join(dict.fromkeys(f"{title(r)}, commit {r['commit'][:7]}" for r in records))
    top = (0.47 + 0.24 * bool(key) + 0.16 * on.count(";")) / inches
    figure.set_layout_engine("constrained", rect=(0, 0.2 / inches, 1, 1 - top - 0.2 / inches), h_pad=0.05, w_pad=0.05)
    figure.text(0.012, 1 - 0.06 / inches, head, va="top", fontsize=HEAD, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.27 / inches, on.replace("; ", "\n"), va="top", fontsize=SMALL, color=FAINT)
    figure.text(0.012, 0.06 / inches, foot, va="bottom", fontsize=SMALL, color=FAINT)
    if key:
        look = [
            Line2D([], [], linestyle="", marker=s.marker, markersize=s.size, color=s.colour, label=name)
            for name, s in key.items()
        ]
        figure.legend(
            handles=look, loc="upper left", bbox_to_anchor=(0.0, 1 - (top * inches - 0.24) / inches), ncols=len(look),
            frameon=False, fontsize=TEXT, labelcolor=INK, handletextpad=0.1, columnspacing=1.2, borderpad=0.1,
        )  # fmt: skip
    return figure


def plain(axes: Any, head: str, pad: float = 4) -> None:
    axes.set_title(head, fontsize=TEXT, fontweight="bold", color=INK, loc="left", pad=pad)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, colors=INK, length=0)
    axes.grid(color="#DDE1E6", linewidth=0.5)
    axes.set_axisbelow(True)


def dots(
    axes: Any, head: str, rows: Mapping[str, Mapping[str, float]], key: Mapping[str, Series], line: str, ends: float
) -> None:
    """A row for each case, a dot for each series, the figure of the first series beside its dot, and a named line at 1.
    A dot beyond `ends` is drawn there with its figure. rows: case -> series -> value."""
    plain(axes, head, 13)
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.annotate(line, (1.0, 1.0), (0, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                  ha="center", va="bottom", fontsize=SMALL, color=INK)  # fmt: skip
    first = next(iter(key))
    for at, values in enumerate(rows.values()):
        for name in reversed(list(key)):
            if name in values:
                look, x = key[name], min(values[name], ends)
                axes.plot([x], [at], look.marker, color=look.colour, markersize=look.size, clip_on=False, zorder=3)
        if first in values:
            # Beside the dot, on the side where no other dot is near.
            x = min(values[first], ends)
            near = [v - x for name, v in values.items() if name != first and abs(v - x) < 0.22 * ends]
            left = any(gap > 0 for gap in near) and not any(gap <= 0 for gap in near)
            axes.annotate(
                f"{values[first]:.2f}", (x, at), (-6 if left else 6, 0), textcoords="offset points", va="center",
                ha="right" if left else "left", fontsize=SMALL, color=key[first].colour, annotation_clip=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.set_xlim(0, ends * 1.08)


def named(axes: Any, ends: Iterable[tuple[str, float, str]], gap: float) -> None:
    """Write the names of lines at the right edge, each at the height of its end, at least `gap` apart."""
    at = math.inf
    for name, y, colour in sorted(ends, key=lambda end: -end[1]):
        at = min(y, at - gap)
        axes.annotate(
            name, (1.015, at), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL, color=colour,
            annotation_clip=False,
        )  # fmt: skip
