"""Progress bars are shown on a terminal, with the time left, and nowhere else."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pkt
from benchmarks import _run, zoo
from pkt import doctor, progress
from pkt.runtime.workers import workers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


KINDS = pytest.mark.parametrize("kind", [Terminal, io.StringIO], ids=["terminal", "pipe"])


def standard_error(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """In its place, something that can be read. Not a fixture: pytest puts its own there before each test."""
    made = kind()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("COLUMNS", "120")
    return made


def shows(screen: io.StringIO, *words: str) -> bool:
    """Whether the words were shown; a pipe must stay empty."""
    if not screen.isatty():
        assert screen.getvalue() == ""
        return True
    missing = [word for word in words if word not in screen.getvalue()]
    assert not missing, screen.getvalue()
    return True


def test_a_process_may_have_closed_its_streams() -> None:
    """As daemons do: Python then has None in their places."""
    code = (
        "import os, sys\n"
        "sys.stdout = sys.stderr = None\n"
        "import pkt\n"
        "report = pkt.simulate(lambda world: world.barrier(), ranks=2, seeds=2)\n"
        "found = pkt.explain('all_reduce', shape=8)\n"
        "with pkt.progress.bar('work', 2, shown=True):\n"
        "    os.write(1, f'{report}{found}'.encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "no finding" in done.stdout, done.stderr
    assert "all_reduce" in done.stdout


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", "┃"), ("ascii", "|"), ("latin-1", "|")])
def test_a_report_can_be_printed_in_the_encoding_of_standard_output(encoding: str, line: str) -> None:
    code = "import pkt; print(pkt.simulate(lambda world: world.barrier(), ranks=2, seeds=2))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding=encoding, timeout=120,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{line} what " in done.stdout


@KINDS
def test_a_bar_has_the_work_the_steps_and_the_time_left(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = standard_error(kind, monkeypatch)
    assert list(progress.steps([1, 2, 3], "cases")) == [1, 2, 3]
    with progress.bar("more", 2) as advance:
        advance("first")
        advance("second")
    assert shows(screen, "cases", "3/3", "more", "second", "0:00:00")


@KINDS
def test_what_is_printed_meanwhile_goes_to_the_file_of_the_command(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = standard_error(kind, monkeypatch)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    for case in progress.steps([1, 2], "cases"):
        print("case", case)
    assert file.getvalue() == "case 1\ncase 2\n"
    assert "case 1" not in screen.getvalue()


@KINDS
def test_a_caller_may_ask_for_no_bar(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = standard_error(kind, monkeypatch)
    pkt.simulate(lambda world: None, 1, 3, progress=False)
    assert screen.getvalue() == ""
    pkt.simulate(lambda world: None, 1, 3)
    assert shows(screen, "schedules", "3/3")


@KINDS
def test_doctor_shows_how_far_its_measuring_is(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = standard_error(kind, monkeypatch)
    report: Any = SimpleNamespace(ranks=1, problems=[], seconds=0.0)
    doctor.measure(report, lambda *args, **named: [{}])
    assert shows(screen, "measuring", "2/2")
    assert report.seconds > 0


@KINDS
def test_benchmarks_show_how_far_they_are(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = standard_error(kind, monkeypatch)
    cases = {f"N = {n}": {} for n in (1, 2)}
    found = SimpleNamespace(cases=lambda quick: cases, variants=lambda device, quick: ["a"])
    monkeypatch.setattr(_run.importlib, "import_module", lambda name: found)
    monkeypatch.setattr(_run, "_case", lambda *args: [{"variant": "a"}])
    assert len(_run.run("benchmarks.some", "cpu", 2, True, None)) == 2  # type: ignore[arg-type]
    assert shows(screen, "some", "2/2", "N = 2, a")


OTHERS = {
    "calibrate": "a fit has no steps",
    "demo": "pkt.simulate shows its schedules",
    "exhaustive": "the tuner shows its candidates",
    "operators": "the benchmarks that it calls show theirs",
} | dict.fromkeys(("figures", "reference", "scale_out", "tuned"), "some seconds at most")
"""Benchmarks without a bar of their own, and the reason."""


def test_every_benchmark_shows_how_far_it_is() -> None:
    files = Path(_run.__file__).parent.glob("[a-z]*.py")
    programs = {file.stem: file.read_text() for file in files}
    programs = {name: text for name, text in programs.items() if '__name__ == "__main__"' in text}
    shows = ("pkt.progress", "benchmarks._command", "benchmarks._run", "import link_measure", "benchmarks.link_measure")
    silent = {name for name, text in programs.items() if not any(f"from {word} " in text for word in shows)}
    assert silent <= OTHERS.keys() | {"collectives", "played"}, "these take longer than two seconds in silence"


def test_a_worker_says_how_far_it_is_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = standard_error(io.StringIO, monkeypatch), [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for told, said in ("0", ""), ("1", "tuning 2/9    7 s left\ntuning 7/9    2 s left\n"):
        monkeypatch.setenv(progress.OF_WORKERS, told)
        for _ in progress.steps(range(9), "tuning"):
            now[0] += 1.0
        assert screen.getvalue() == said, "a line from two seconds on, then every five seconds"


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_workers_know_whether_somebody_sees_them(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    standard_error(kind, monkeypatch)
    given: list[dict[str, str]] = []
    monkeypatch.setattr(workers.subprocess, "Popen", lambda *args, env, **options: given.append(env))
    mine, _ = workers._start_process({"A": "b"})
    mine.close()
    assert given == [{"A": "b", progress.OF_WORKERS: "1" if kind is Terminal else "0"}]


@KINDS
def test_the_zoo_follows_the_file_of_its_workers(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    screen = standard_error(kind, monkeypatch)
    rows = tmp_path / "zoo.jsonl"
    rows.write_text("{}\n")

    def launch(*args: Any, **named: Any) -> None:
        with open(rows, "a") as file:
            file.write(json.dumps({}) + "\n")
        time.sleep(1.5 if screen.isatty() else 0)

    monkeypatch.setattr(pkt, "launch", launch)
    wanted: Any = [SimpleNamespace(facts=dict, key=n, label=str(n)) for n in range(2)]
    options = argparse.Namespace(device="cuda", seconds=1.0, ranks=2, forms="")
    assert len(zoo.run(options, wanted, rows)) == 1
    assert shows(screen, "zoo", "1/2")
