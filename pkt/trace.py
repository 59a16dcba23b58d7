"""Timelines of the resident programs of each rank, as a Perfetto trace, a picture or a table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pkt.wording import count_text, html_text, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["KINDS", "Event", "RankSummary", "Signal", "Timeline"]

KINDS = ("compute", "communicate", "wait")

# Okabe and Ito's blue and orange with a grey: distinct in print and for every common kind of colour blindness.
COLOURS = {"compute": "#0072B2", "communicate": "#E69F00", "wait": "#B9BEC6"}
INK, FAINT, IDLE = "#22262B", "#7A828C", "#F3F5F7"

TINY_US = 1e-3

# In inches. The bands fill the space between the margins.
WIDTH, LEFT, RIGHT = 11.0, 0.85, 1.75
GAP, LEGEND, FOOT = 0.16, 0.45, 0.52
LABEL = 7.0  # points


class Signal(NamedTuple):
    """Where and when a signal was sent: the rank, its lane, and the microsecond."""

    rank: int
    lane: int
    us: float


class Event(NamedTuple):
    """A stretch of one kind of work on one lane.

    rank: the rank that it ran on.
    lane: the slot of the resident program on that rank (an SM, or a share of one).
    kind: one of `KINDS`.
    name: a description for people: "tile 3", "wait flags[7] >= 2".
    start_us, end_us: microseconds from the start of the run.
    args: facts that Perfetto shows beside the event: kernel, program, tile, counter.
    signal: the signal that ended a wait, if one is known.
    """

    rank: int
    lane: int
    kind: str
    name: str
    start_us: float
    end_us: float
    args: Mapping[str, Any] = {}
    signal: Signal | None = None


class RankSummary(NamedTuple):
    """The shares of one rank's time, of lanes x span; the rest is idle time.

    overlap: the share of the time with any lane communicating in which another lane computed; None if no lane
    communicated.
    """

    rank: int
    lanes: int
    compute: float
    communicate: float
    wait: float
    overlap: float | None


class Timeline:
    """Events of one run, on one clock. Its time 0 is the start of the first event.

    Where two events of a lane overlap, the one that began later counts: a wait inside a communicate event is a wait.
    All ranks share one span, from the first start to the last end, so that a rank that finishes early shows as idle.
    clock: the unit of the times, "modelled µs" for the simulator, whose clock counts work and not wall time.
    """

    def __init__(self, events: Iterable[Event], title: str = "", clock: str = "modelled µs") -> None:
        events = list(events)
        zero = min((event.start_us for event in events), default=0.0)
        self.events = sorted(
            (_shifted(event, zero) for event in events), key=lambda e: (e.rank, e.lane, e.start_us, -e.end_us)
        )
        self.title = title
        self.clock = clock
        for event in self.events:
            if event.kind not in KINDS:
                raise ValueError(f"{event}: kind is one of {', '.join(KINDS)}")
            if event.end_us < event.start_us:
                raise ValueError(f"{event}: ends before it starts")

    def __repr__(self) -> str:
        title = f"{self.title!r}, " if self.title else ""
        ranks, events = count_text(len(self.ranks), "rank"), count_text(len(self.events), "event")
        return f"Timeline({title}{ranks}, {events}, {self._length()})"

    def _repr_html_(self) -> str:
        """As a notebook shows it: the summary."""
        return html_text(rendered(self.table()))

    def _length(self) -> str:
        start, end = self.span_us
        return f"{end - start:,.1f} {self.clock}"

    @property
    def ranks(self) -> list[int]:
        """The ranks that have events, in order."""
        return sorted({event.rank for event in self.events})

    @property
    def span_us(self) -> tuple[float, float]:
        """First start, which is 0, and last end, in microseconds."""
        return 0.0, max((event.end_us for event in self.events), default=0.0)

    def lanes(self, rank: int) -> dict[int, list[Event]]:
        """The events of each lane of `rank`, cut so that none overlap, in order of time."""
        by_lane: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.rank == rank:
                by_lane[event.lane].append(event)
        return {lane: _without_overlaps(by_lane[lane]) for lane in sorted(by_lane)}

    def summary(self) -> list[RankSummary]:
        """One `RankSummary` a rank, in order of rank."""
        start, end = self.span_us
        rows = []
        for rank in self.ranks:
            lanes = self.lanes(rank)
            total = (end - start) * len(lanes) or 1.0
            stretches: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for events in lanes.values():
                for event in events:
                    stretches[event.kind].append((event.start_us, event.end_us))
            communicating, computing = _union(stretches["communicate"]), _union(stretches["compute"])
            length = sum(b - a for a, b in communicating)
            shares = [sum(b - a for a, b in stretches[kind]) / total for kind in KINDS]
            overlap = _common(communicating, computing) / length if length else None
            rows.append(RankSummary(rank, len(lanes), shares[0], shares[1], shares[2], overlap))
        return rows

    def table(self) -> Table:
        """The summary as a rich table."""
        from rich.table import Table

        table = Table(title=self.title or None, caption=f"{self._length()} from first start to last end")
        for column in ("rank", "lanes", *KINDS, "idle", "overlap"):
            table.add_column(column, justify="right")
        for row in self.summary():
            shares = (row.compute, row.communicate, row.wait)
            cells = [f"{share:.0%}" for share in (*shares, max(0.0, 1 - sum(shares)))]
            overlap = "-" if row.overlap is None else f"{row.overlap:.0%}"
            table.add_row(str(row.rank), str(row.lanes), *cells, overlap)
        return table

    def to_perfetto(self, path: str | Path) -> Path:
        """Write Chrome's trace JSON for ui.perfetto.dev and chrome://tracing.

        A rank is a process, and a lane is a thread. An arrow leads from a signal to the wait that it ended. A counter
        of each rank shows how many of its lanes compute, communicate and wait.
        """
        records: list[dict[str, object]] = []
        for rank in self.ranks:
            process: dict[str, object] = {"ph": "M", "pid": rank}
            records.append(process | {"name": "process_name", "args": {"name": f"rank {rank}"}})
            records.append(process | {"name": "process_sort_index", "args": {"sort_index": rank}})
        for rank, lane in sorted({(event.rank, event.lane) for event in self.events}):
            thread: dict[str, object] = {"ph": "M", "pid": rank, "tid": lane}
            records.append(thread | {"name": "thread_name", "args": {"name": f"lane {lane}"}})
            records.append(thread | {"name": "thread_sort_index", "args": {"sort_index": lane}})
        for event in self.events:
            place = {"ph": "X", "pid": event.rank, "tid": event.lane, "name": event.name or event.kind}
            time = {"ts": event.start_us, "dur": event.end_us - event.start_us}
            records.append({**place, **time, "cat": event.kind, "args": dict(event.args)})
        records += self._arrows() + self._counters()
        path = Path(path)
        path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": records}))
        return path

    def _arrows(self) -> list[dict[str, object]]:
        """Two records for each arrow. Perfetto binds an end of an arrow to the event that is running there, so both are
        a little before the end of theirs."""
        records: list[dict[str, object]] = []
        for event in self.events:
            if event.signal is not None:
                rank, lane, us = event.signal
                arrow: dict[str, object] = {"cat": "signal", "name": event.name, "id": len(records) // 2 + 1}
                records.append({**arrow, "ph": "s", "pid": rank, "tid": lane, "ts": max(0.0, us - TINY_US)})
                end = {"pid": event.rank, "tid": event.lane, "ts": max(event.start_us, event.end_us - TINY_US)}
                records.append({**arrow, "ph": "f", "bp": "e", **end})
        return records

    def _counters(self) -> list[dict[str, object]]:
        records: list[dict[str, object]] = []
        for rank in self.ranks:
            changes: dict[float, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
            for events in self.lanes(rank).values():
                for event in events:
                    changes[event.start_us][event.kind] += 1
                    changes[event.end_us][event.kind] -= 1
            lanes = dict.fromkeys(KINDS, 0)
            for ts in sorted(changes):
                lanes = {kind: lanes[kind] + changes[ts][kind] for kind in KINDS}
                records.append({"ph": "C", "pid": rank, "name": "lanes", "ts": ts, "args": lanes})
        return records

    def to_png(self, path: str | Path, dpi: int = 160) -> Path:
        """Draw a band for each rank with a row for each lane. Needs matplotlib (`pip install matplotlib`)."""
        path = Path(path)
        _draw(self, dpi).savefig(path)
        return path


def _shifted(event: Event, zero: float) -> Event:
    """The event on a clock that begins at `zero`."""
    signal = event.signal and event.signal._replace(us=event.signal.us - zero)
    return event._replace(start_us=event.start_us - zero, end_us=event.end_us - zero, signal=signal)


def _without_overlaps(events: list[Event]) -> list[Event]:
    """Cut one lane's events so that the one that began last holds the lane. In order of start, longest first."""
    out: list[Event] = []
    open_: list[Event] = []  # begun and not ended, the latest last; `now` is the time up to which the lane is cut
    now = 0.0

    def run_until(until: float) -> None:
        nonlocal now
        while open_ and now < until:
            event = open_[-1]
            stop = min(event.end_us, until)
            if stop > now:
                out.append(event._replace(start_us=now, end_us=stop))
                now = stop
            if event.end_us <= now:
                open_.pop()

    for event in events:
        run_until(event.start_us)
        now = event.start_us
        open_.append(event)
    run_until(float("inf"))
    return out


def _union(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as a list of disjoint stretches, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Length of the time in both lists of disjoint stretches, each in order."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


# -- the picture --------------------------------------------------------------------------------------


def _draw(timeline: Timeline, dpi: int = 160) -> Figure:
    """The figure of `timeline`; its height depends on the numbers of ranks and lanes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("the picture needs matplotlib: pip install matplotlib") from e

    bands = {rank: timeline.lanes(rank) for rank in timeline.ranks}
    heights = [_band_inches(len(lanes), dpi) for lanes in bands.values()] or [0.5]
    head = LEGEND + (0.34 if timeline.title else 0.0)
    height = head + FOOT + sum(heights) + GAP * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH, height), dpi=dpi, facecolor="white")
    start, end = timeline.span_us

    top, axes = height - head, None
    for row, inches in zip(timeline.summary(), heights):
        top -= inches
        box = (LEFT / WIDTH, top / height, (WIDTH - LEFT - RIGHT) / WIDTH, inches / height)
        axes = figure.add_axes(box, facecolor=IDLE)
        axes.set_xlim(start, end if end > start else start + 1)
        _band(axes, list(bands[row.rank].values()), inches)
        axes.text(-0.012, 0.5, f"rank {row.rank}", transform=axes.transAxes, ha="right", va="center",
                  fontsize=10, fontweight="bold", color=INK)  # fmt: skip
        _shares(axes, row, inches)
        axes.tick_params(axis="x", length=0, labelbottom=False)
        top -= GAP
    if axes is not None:
        axes.tick_params(axis="x", length=3, labelbottom=True, labelsize=8.5, colors=FAINT)
        axes.set_xlabel(timeline.clock, fontsize=9, color=FAINT, labelpad=2)
    if timeline.title:
        figure.text(LEFT / WIDTH, 1 - 0.16 / height, timeline.title, ha="left", va="top", fontsize=12,
                    fontweight="bold", color=INK)  # fmt: skip
    _legend(figure, 1 - (head - 0.13) / height)
    return figure


def _band_inches(lanes: int, dpi: int) -> float:
    """Height of a rank's band: rows are distinct while there are few, and four ranks fit on a screen.

    Each row has a whole number of pixels, so that all rows look alike.
    """
    inches = min(1.75, max(0.62, 0.16 * lanes))
    return lanes * max(1, round(inches * dpi / lanes)) / dpi


def _band(axes: Any, lanes: list[list[Event]], inches: float) -> None:
    """Draw one rank's rows, the lowest lane at the top."""
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(axis="x", color="#DDE1E6", linewidth=0.6)
    axes.set_axisbelow(True)
    # Gaps between rows and between tasks, only where rows and tasks are large enough.
    row_points = inches * 72 / len(lanes)
    gap = 0.12 if row_points > 4 else 0.0
    left, right = axes.get_xlim()
    seam = (right - left) / ((WIDTH - LEFT - RIGHT) * 72) * 0.7 if gap else 0.0
    for kind, colour in COLOURS.items():
        for place, events in enumerate(lanes):
            lengths = [(e.start_us, e.end_us - e.start_us) for e in events if e.kind == kind]
            bars = [(start, length - seam if length > 6 * seam else length) for start, length in lengths]
            if bars:
                axes.broken_barh(bars, (place + gap / 2, 1 - gap), facecolors=colour, linewidth=0)
    if row_points >= LABEL + 2:
        _labels(axes, lanes, (WIDTH - LEFT - RIGHT) * 72 / (right - left))


def _labels(axes: Any, lanes: list[list[Event]], points: float) -> None:
    """Name the events that are wide enough for their name. points: of a microsecond."""
    for place, events in enumerate(lanes):
        for e in events:
            text = e.name.removeprefix("wait ")
            if (e.kind == "wait" or "tile" in e.args) and 0.62 * LABEL * len(text) < (e.end_us - e.start_us) * points:
                axes.text((e.start_us + e.end_us) / 2, place + 0.53, text, ha="center", va="center", fontsize=LABEL,
                          color="white" if e.kind == "compute" else INK)  # fmt: skip


def _shares(axes: Any, row: RankSummary, inches: float) -> None:
    """Write the rank's shares beside its band, in the colours of the legend."""
    lines = [(f"{row.compute:.0%} compute", COLOURS["compute"]),
             (f"{row.communicate:.0%} communicate", "#9A6A00"),  # a darker orange, for text on white
             (f"{row.wait:.0%} wait", FAINT)]  # fmt: skip
    if row.overlap is not None:
        lines.append((f"{row.overlap:.0%} overlapped", INK))
    step = 0.15 / inches
    for i, (text, colour) in enumerate(lines):
        y = 0.5 + step * ((len(lines) - 1) / 2 - i)
        axes.text(1.012, y, text, transform=axes.transAxes, ha="left", va="center", fontsize=8, color=colour)


def _legend(figure: Any, y: float) -> None:
    """Draw one square for each kind, in a row under the title."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=kind, linewidth=0) for kind, colour in COLOURS.items()]
    handles.append(Patch(facecolor=IDLE, edgecolor="#D5D9DE", label="idle", linewidth=0.6))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(LEFT / WIDTH, y), ncols=4,
                  frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.0, handleheight=1.0,
                  columnspacing=1.6, handletextpad=0.5, borderpad=0, borderaxespad=0)  # fmt: skip
