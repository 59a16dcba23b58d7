"""The table of a search: predicted and measured times, candidates that were dropped and why, the model's error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pkt.model.config import Config
from pkt.tune.candidates import error
from pkt.tune.search import Candidate, Search

SHOWN = 24
"""Rows of the table at most."""


def report(search: Search) -> Group:
    """A search as a table for rich.print: the fastest candidates, then why others were dropped.

    Columns: place by time, place by the model, predicted and median time in ms, predicted / median - 1, spread of the
    repeats, (greatest - least) / median, and the settings in which candidates differ. Below the table: settings that
    all candidates share, how many were not measured, and the model's error over those measured.
    """
    varied, common = _settings(search.candidates)
    by_model = sorted((c for c in search.candidates if c.predicted is not None), key=lambda c: c.predicted or 0.0)
    place = {c.config: at for at, c in enumerate(by_model, 1)}
    measured = search.measured
    case = ", ".join(f"{name}={value}" for name, value in search.key.items())
    table = Table()
    # Without a model there are no predictions to show.
    names = ["#", "by model", "predicted, ms", "measured, ms", "off", "spread"]
    shown = [name for name in names if by_model or name not in ("by model", "predicted, ms", "off")]
    for name in shown:
        table.add_column(name, justify="right")
    table.add_column("settings", overflow="fold")
    for at, c in enumerate(measured[:SHOWN], 1):
        assert c.time is not None  # 0 on the modelled clock, of a function that launches nothing
        cells = {
            "#": str(at),
            "by model": str(place.get(c.config, "")),
            "predicted, ms": "" if c.predicted is None else milliseconds(c.predicted),
            "measured, ms": milliseconds(c.time),
            "off": "" if c.predicted is None or not c.time else _percent(c.predicted / c.time - 1),
            "spread": f"{(max(c.times) - min(c.times)) / c.time:.0%}" if len(c.times) > 1 and c.time else "",
        }
        style = "bold" if c.config == search.best else None
        table.add_row(*(cells[name] for name in shown), Text(text_of(c.config, varied)), style=style)
    return Group(
        Text(f"{search.what}: {case}", style="bold"),
        table,
        *(Text(line) for line in _lines(search, measured, by_model, varied, common)),
    )


def _lines(
    search: Search, measured: Sequence[Candidate], by_model: Sequence[Candidate], varied: Sequence[str], common: str
) -> list[str]:
    """The lines below the table."""
    count = f"{len(measured)} of {len(search.candidates)} measured"
    lines = [f"{count} in {search.seconds:.1f} s" if search.seconds else count]
    if len(measured) > SHOWN:
        lines.append(f"shown: the first {SHOWN}; the slowest took {milliseconds(measured[-1].time or 0.0)} ms")
    if search.interrupted:
        lines[0] += ", then interrupted: the best so far"
    if common:
        lines.append(f"all: {common}")
    if off := error(measured):
        lines.append(f"model off by: {off}")
    left = [c for c in search.candidates if not c.times and not c.dropped]
    rivals = [c for c in by_model if c in left]
    if rivals and rivals[0].predicted is not None:
        ahead = f"{milliseconds(rivals[0].predicted)} ms, {text_of(rivals[0].config, varied)}"
        lines.append(f"{len(left)} not measured; of these the model's first: {ahead}")
    elif left:
        lines.append(f"{len(left)} not measured")
    reasons = Counter(c.dropped for c in search.candidates if c.dropped)
    first = {c.dropped: c.config for c in reversed(search.candidates) if c.dropped}
    for why, times in reasons.most_common():
        others = f" and {times - 1} more" if times > 1 else ""
        lines.append(f"dropped: {text_of(first[why], varied) or first[why]}{others}: {why}")
    return lines


def text_of(config: Config, names: Sequence[str]) -> str:
    """`num_comm_sms=16 tiles=128x256x64,8,8,3`: the settings of `names` that the config has."""
    return " ".join(f"{name}={_value(name, config[name])}" for name in names if name in config)


def milliseconds(seconds: float) -> str:
    """`seconds` in milliseconds, with four significant digits."""
    return f"{seconds * 1e3:.4g}"


def _percent(off: float) -> str:
    return f"{off:+.0%}" if abs(off) >= 0.005 else "0%"


def _value(name: str, value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    parts = [str(part) for part in value]
    return "x".join(parts[:3]) + "".join(f",{part}" for part in parts[3:]) if name == "tiles" else ",".join(parts)


def _settings(candidates: Sequence[Candidate]) -> tuple[list[str], str]:
    """The names of the settings in which candidates differ; the others as text."""
    names = list(dict.fromkeys(name for c in candidates for name in c.config))
    missing = object()
    varied = [name for name in names if len({repr(c.config.settings.get(name, missing)) for c in candidates}) > 1]
    common = [name for name in names if name not in varied]
    return varied, text_of(candidates[0].config, common) if candidates else ""
