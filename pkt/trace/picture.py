"""The picture of a timeline: one band a rank, one row a resident program, drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pkt.trace.timeline import Event, RankSummary, Timeline

# Okabe and Ito's blue and orange with a grey: apart for every common kind of colour blindness, and in print.
COLOURS = {"compute": "#0072B2", "communicate": "#E69F00", "wait": "#B9BEC6"}
INK, FAINT, IDLE = "#22262B", "#7A828C", "#F3F5F7"

# Inches. The bands take what the margins leave.
WIDTH, LEFT, RIGHT = 11.0, 0.85, 1.75
GAP, LEGEND, FOOT = 0.16, 0.45, 0.52


def draw(timeline: Timeline, dpi: int = 160) -> Figure:
    """Return the figure of `timeline`; its height follows from the number of ranks and lanes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("the picture needs matplotlib: pip install 'pkt-triton[plot]'") from e

    bands = {rank: timeline.lanes(rank) for rank in timeline.ranks}
    heights = [_band_inches(len(lanes), dpi) for lanes in bands.values()] or [0.5]
    head = LEGEND + (0.34 if timeline.title else 0.0)
    height = head + FOOT + sum(heights) + GAP * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH, height), dpi=dpi, facecolor="white")
    start, end = timeline.span_us
    if 0 < start < 0.05 * end:
        start = 0.0  # so that the axis has its zero

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
    """Tall enough to tell rows apart while there are few, not so tall that four ranks leave the screen.

    A whole number of pixels a row, so that all rows look alike.
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
    # Lines of background between rows, and between one task and the next, only where they don't eat them.
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


def _shares(axes: Any, row: RankSummary, inches: float) -> None:
    """Write the rank's shares beside its band, in the colours of the legend."""
    lines = [(f"{row.compute:.0%} compute", COLOURS["compute"]),
             (f"{row.communicate:.0%} communicate", "#9A6A00"),  # orange text on white needs to be darker
             (f"{row.wait:.0%} wait", FAINT)]  # fmt: skip
    if row.overlap is not None:
        lines.append((f"{row.overlap:.0%} overlapped", INK))
    step = 0.15 / inches
    for i, (text, colour) in enumerate(lines):
        y = 0.5 + step * ((len(lines) - 1) / 2 - i)
        axes.text(1.012, y, text, transform=axes.transAxes, ha="left", va="center", fontsize=8, color=colour)


def _legend(figure: Any, y: float) -> None:
    """One square a kind, in a row under the title."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=kind, linewidth=0) for kind, colour in COLOURS.items()]
    handles.append(Patch(facecolor=IDLE, edgecolor="#D5D9DE", label="idle", linewidth=0.6))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(LEFT / WIDTH, y), ncols=4,
                  frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.0, handleheight=1.0,
                  columnspacing=1.6, handletextpad=0.5, borderpad=0, borderaxespad=0)  # fmt: skip
