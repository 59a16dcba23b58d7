"""What a shell and a notebook show of reports, timelines, worlds, tensors and searches: short, named and escaped."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pkt
from pkt import progress
from pkt.model.config import Config
from pkt.trace import Event, Timeline
from pkt.tune.search import Candidate, Search


class Text(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert "font-family: monospace" in dict(attrs)["style"], "a notebook would show another font"

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(value: Any) -> str:
    """The text of a value in a notebook."""
    page = Text(value._repr_html_())
    assert page.tags == ["pre"], "everything else is escaped"
    assert len(page.text.splitlines()) <= 40
    assert all(len(line) <= 120 for line in page.text.splitlines())
    return page.text


def test_worlds_and_tensors() -> None:
    def main(world: Any) -> tuple[Any, ...]:
        x = pkt.full((3, 4), 1.5, name="<b>x</b>")
        many = [pkt.zeros(1000) for _ in range(20)]
        found = repr(world), shown(world), repr(x), shown(x), shown(x[1:]), shown(many[0])
        many[0].free()
        return *found, shown(many[0]), world, x

    found = pkt.launch(main, 2, "cpu", heap="1MiB")[1]
    plain_world, world, plain_x, x, part, zeros, freed, closed_world, closed_x = found
    assert plain_world == "World(rank 1 of 2 on cpu)"
    assert world.startswith("World(rank 1 of 2 on cpu)\nsymmetric heap: 21 allocations, ")
    assert ["<b>x</b>", "data", "(3,", "4)", "fp32", "48", "B"] in [line.split() for line in world.splitlines()]
    assert "... and 5 more" in world
    assert plain_x.startswith("symmetric '<b>x</b>' of rank 1: tensor([[1.5000, ")
    assert x.startswith("symmetric '<b>x</b>' of rank 1: (3, 4) fp32, 48 B at heap offset ")
    assert "tensor([[1.5000, 1.5000" in x
    assert ": (2, 4) fp32, 32 B at heap offset " in part
    assert int(part.partition("offset ")[2].split()[0]) == int(x.partition("offset ")[2].split()[0]) + 16
    assert "3.9 KiB" in zeros
    assert freed.endswith("no longer allocated")
    assert shown(closed_world) == "World(rank 1 of 2 on cpu, closed)"
    assert shown(closed_x).endswith("no longer allocated")


def test_timelines_and_reports() -> None:
    timeline = Timeline([Event(0, 0, "compute", "tile 3", 5.0, 9.0), Event(1, 0, "wait", "w", 7.0, 9.0)], "<i>run</i>")
    assert repr(timeline) == "Timeline('<i>run</i>', 2 ranks, 2 events, 4.0 modelled µs)"
    assert repr(Timeline([])) == "Timeline(0 ranks, 0 events, 0.0 modelled µs)"
    assert "<i>run</i>" in shown(timeline)
    assert "communicate" in shown(timeline)

    def main(world: Any) -> None:
        raise ValueError("<script>" * (world.rank == 0))

    report = pkt.simulate(main, 1, 2)
    assert repr(report) == "Report(2 schedules on 1 rank: 1 finding, 0 faults not caught)"
    assert "schedules on 1 rank " in str(report)
    assert "<script>" in shown(report)


def test_searches() -> None:
    found = tuple(Candidate(Config(n=n), times=(1e-3 * (n + 1),)) for n in range(40))
    search = Search("<u>op</u>", {"M": 4}, (*found, Candidate(Config(n=40))), Config(n=0), 1.5)
    assert repr(search) == "Search(<u>op</u>: 40 of 41 measured, best Config(n=0))"
    text = shown(search)
    assert text.startswith(f"{search!r}\nM=4\n")
    assert len(text.splitlines()) == 3 + 8
    assert text.splitlines()[3].split() == ["1", "Config(n=0)"]


class Notebook:
    """IPython's display, and what stands in the cell's output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[str] = []
        self.history: list[str] = []
        module: Any = ModuleType("IPython.display")
        module.display = self.display
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))

    def display(self, data: Any, raw: bool = False, display_id: bool = False) -> Any:
        if not raw:  # of rich
            data = {"text/plain": str(data)}
        at = len(self.outputs)
        self.outputs.append("")

        def update(data: Any, raw: bool) -> None:
            self.outputs[at] = data["text/plain"]
            self.history.append(self.outputs[at])

        update(data, raw)
        return SimpleNamespace(update=update)


def test_a_notebook_shows_one_line_of_progress_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    notebook, now = Notebook(monkeypatch), [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in progress.steps(range(3), "short"):
        now[0] += 0.5
    assert notebook.outputs == [], "what takes two seconds needs none"
    for _ in progress.steps(range(10), "schedules"):
        now[0] += 1.0
    assert notebook.outputs == [""], "the line is gone in the end"
    assert notebook.history[:2] == ["schedules 2/10    8 s left", "schedules 3/10    7 s left"]
    assert not recwarn.list


def test_an_explanation_is_displayed_once_and_its_text_not_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich displays in a notebook whatever file it is given."""
    import rich.console

    notebook = Notebook(monkeypatch)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    shell: Any = SimpleNamespace(execution_count=1)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    explained = (
        pkt.explain("gemm_ar", M=64, N=64, K=64), pkt.explain("all_reduce", shape=64),
        pkt.explain("all_reduce", shape=64, size=8, node_size=4),
    )  # fmt: skip
    for value in explained:
        assert len(notebook.outputs) == 3
        value._ipython_display_()  # the value of the cell that printed it
        assert len(notebook.outputs) == 3
        shell.execution_count = 2
        value._ipython_display_()
        assert len(notebook.outputs) == 4
        shell.execution_count = 1
        notebook.outputs[:] = ["", "", ""]
    for value in explained:
        notebook.outputs.clear()
        assert "all_reduce: " in str(value)
        assert notebook.outputs == []
        assert len(repr(value)) < 120
