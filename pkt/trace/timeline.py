"""What each resident program of each rank did when, and three ways to look at it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

KINDS = ("compute", "communicate", "wait")


class Event(NamedTuple):
    """A stretch of one kind of work on one lane.

    rank: the rank it ran on.
    lane: where on that rank: the slot of the resident program (an SM, or a share of one).
    kind: one of `KINDS`.
    name: what it was, for people: "tile 3", "wait flags[7]".
    start_us, end_us: microseconds from the start of the run.
    """

    rank: int
    lane: int
    kind: str
    name: str
    start_us: float
    end_us: float


class RankSummary(NamedTuple):
    """How one rank spent its time. The shares are of lanes x span; what they leave to 1 was idle.

    overlap: of the time in which any lane communicated, the share in which another lane computed; None if no
    lane communicated.
    """

    rank: int
    lanes: int
    compute: float
    communicate: float
    wait: float
    overlap: float | None


class Timeline:
    """Events of one run, on one clock.

    Where two events of a lane overlap, the one that began later counts: a wait inside a communicate stretch
    is a wait. All ranks are measured over the same span, from the first start to the last end, so that a rank
    that finishes early shows as idle. `clock` says what the microseconds are: "modelled µs" for the
    simulator's machine, whose clock counts work and not wall time.
    """

    def __init__(self, events: Iterable[Event], title: str = "", clock: str = "modelled µs") -> None:
        self.events = sorted(events, key=lambda e: (e.rank, e.lane, e.start_us, -e.end_us))
        self.title = title
        self.clock = clock
        for event in self.events:
            if event.kind not in KINDS:
                raise ValueError(f"{event}: kind is one of {', '.join(KINDS)}")
            if event.end_us < event.start_us:
                raise ValueError(f"{event}: ends before it starts")

    @property
    def ranks(self) -> list[int]:
        """The ranks that have events, in order."""
        return sorted({event.rank for event in self.events})

    @property
    def span_us(self) -> tuple[float, float]:
        """First start and last end, in microseconds; (0, 0) if there are no events."""
        if not self.events:
            return 0.0, 0.0
        return min(e.start_us for e in self.events), max(e.end_us for e in self.events)

    def lanes(self, rank: int) -> dict[int, list[Event]]:
        """Events of each lane of `rank`, cut so that they don't overlap, in order of time."""
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

        start, end = self.span_us
        table = Table(title=self.title or None, caption=f"{end - start:,.1f} {self.clock} from first start to last end")
        for column in ("rank", "lanes", *KINDS, "idle", "overlap"):
            table.add_column(column, justify="right")
        for row in self.summary():
            shares = (row.compute, row.communicate, row.wait)
            cells = [f"{share:.0%}" for share in (*shares, max(0.0, 1 - sum(shares)))]
            overlap = "-" if row.overlap is None else f"{row.overlap:.0%}"
            table.add_row(str(row.rank), str(row.lanes), *cells, overlap)
        return table

    def to_perfetto(self, path: str | Path) -> Path:
        """Write Chrome's trace JSON, which ui.perfetto.dev and chrome://tracing open: a process a rank."""
        records: list[dict[str, object]] = []
        for rank in self.ranks:
            records += [
                {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
                {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            ]
        for rank, lane in sorted({(event.rank, event.lane) for event in self.events}):
            place: dict[str, object] = {"ph": "M", "pid": rank, "tid": lane}
            records += [
                place | {"name": "thread_name", "args": {"name": f"lane {lane}"}},
                place | {"name": "thread_sort_index", "args": {"sort_index": lane}},
            ]
        for event in self.events:
            records.append(
                {
                    "ph": "X",
                    "name": event.name or event.kind,
                    "cat": event.kind,
                    "pid": event.rank,
                    "tid": event.lane,
                    "ts": event.start_us,
                    "dur": event.end_us - event.start_us,
                }
            )
        path = Path(path)
        path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": records}))
        return path

    def to_png(self, path: str | Path, dpi: int = 160) -> Path:
        """Draw a band a rank with a row a lane. Needs matplotlib (`pip install 'pkt-triton[plot]'`)."""
        from pkt.trace.picture import draw

        path = Path(path)
        draw(self, dpi).savefig(path)
        return path


def _without_overlaps(events: list[Event]) -> list[Event]:
    """Cut one lane's events, in order of start, longest first, so that the latest to begin holds the lane."""
    out: list[Event] = []
    open_: list[Event] = []  # begun and not ended, the latest last; `now` is where the lane is drawn up to
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
    """The same time as a list of stretches apart from one another, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Length of the time in both; each a list of stretches apart from one another, in order."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
