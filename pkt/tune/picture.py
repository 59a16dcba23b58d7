"""A picture of several searches: time against the split of SMs, one line a size (Figure 5 of ParallelKittens)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pkt.errors import Unsupported
from pkt.tune.report import milliseconds
from pkt.tune.search import Candidate, Search

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any common kind of colour blindness can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
INK, FAINT, GRID = "#22262B", "#7A828C", "#E4E7EB"
FARTHEST = 2.5  # greatest time over the best that is shown


def draw(searches: Sequence[Search], setting: str = "num_comm_sms", title: str = "") -> Figure:
    """The figure of `searches`: for each search a line over the values of `setting`, through the fastest candidates.

    A solid line is measured, a dashed one predicted. So that sizes can be compared, both are divided by the fastest
    time of their search, measured if anything was; a dot marks it, and the legend has its time. Raises Unsupported if
    no candidate with `setting` has a time, ImportError without matplotlib.
    """
    figure = _figure()
    axes = figure.add_subplot()
    ticks: set[float] = set()
    for at, search in enumerate(searches):
        measured = _line(search, setting, lambda c: None if c.dropped else c.time)
        predicted = _line(search, setting, lambda c: c.predicted)
        line = measured or predicted
        if not line:
            continue
        ticks |= set(line)
        least, colour = min(line.values()), COLOURS[at % len(COLOURS)]
        best = min(line, key=lambda value: line[value])
        label = f"{_size(search)}: {milliseconds(least)} ms at {best}{'' if measured else ', predicted'}"
        if predicted:
            axes.plot(*_points(predicted, least), color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
        if measured:
            axes.plot(*_points(measured, least), color=colour, linewidth=1.8, marker=".", markersize=5)
        axes.plot([], [], color=colour, linewidth=1.8, linestyle="-" if measured else (0, (4, 3)), label=label)
        axes.plot([best], [1.0], color=colour, marker="o", markersize=8, markeredgecolor="white")
    if not ticks:
        found = f"no candidate with a time that has the setting {setting}"
        raise Unsupported.here("pkt.tune.picture.draw", f"found {found}", "give searches over it")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.set_xticks([], minor=True)
    _style(axes, setting, title)
    return figure


def _figure() -> Figure:
    """An empty figure, which a notebook shows as the value of a cell."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("the picture needs matplotlib: pip install 'pkt-triton[plot]'") from e

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture(figsize=(8.0, 4.5), dpi=120, facecolor="white", layout="constrained")


def _line(search: Search, setting: str, seconds: Callable[[Candidate], float | None]) -> dict[Any, float]:
    """Value of `setting` -> the least seconds of its candidates, sorted by value."""
    least: dict[Any, float] = {}
    for c in search.candidates:
        value, time = c.config.settings.get(setting), seconds(c)
        if value is not None and time is not None:
            least[value] = min(time, least.get(value, time))
    return dict(sorted(least.items()))


def _points(line: dict[Any, float], least: float) -> tuple[list[Any], list[float]]:
    return list(line), [time / least for time in line.values()]


def _size(search: Search) -> str:
    """`8192 x 2048 x 8192`, or those of M, N and K that the key has, or the whole key."""
    shape = {name: search.key[name] for name in ("M", "N", "K") if name in search.key}
    if len(shape) == 3:
        return " x ".join(map(str, shape.values()))
    return ", ".join(f"{name}={value}" for name, value in (shape or search.key).items()) or search.what


def _style(axes: Any, setting: str, title: str) -> None:
    axes.set_xlabel(setting, color=FAINT, fontsize=9)
    axes.set_ylabel("time / the best of its size", color=FAINT, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    times = [time for line in axes.lines for time in line.get_ydata()]
    axes.set_ylim(min(times) - 0.05, min(max(times) + 0.05, FARTHEST))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(labelsize=8.5, colors=FAINT, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
