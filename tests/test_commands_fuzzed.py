"""Command lines made at random: each ends with a text and an exit status, never with a raw exception.

PKT_FUZZ_COMMANDS=5000 tries as many.
"""

import os
import random
import threading
from collections import Counter

import pytest
from typer.testing import CliRunner

from benchmarks import _command
from pkt import bench
from pkt.cli import app
from pkt.errors import Unsupported
from pkt.simulate.engine import end_idle
from pkt.tune import command, tables
from tests.tune.helpers import OPERATORS

COMMANDS = int(os.environ.get("PKT_FUZZ_COMMANDS", 150))
PROGRAM = (
    "def main(world):\n    world.barrier()\n\n\ndef fails(world):\n    raise ValueError(world.rank)\n\n\nnumber = 3\n"
)
NUMBERS = ("1", "2", "0", "-1", "8", "64", "1e3", "2.5", "x", "", "nan", "9" * 30)
TEXTS = (
    "",
    "a",
    "\N{SNOWMAN}",
    "--",
    "-",
    "[red]",
    "%s",
    "\n",
    "a\0b",
    "A" * 500,
    "../..",
    "/dev/null",
    "/dev/null/x",
)
SWITCHES = ("--help", "--races", "--no-races", "--mutants", "--lost-signals", "--no-multicast", "--bandwidth", "--all")
OPTIONS = {
    "simulate": ["--ranks", "--seeds", "--seed", "--sms", "--heap", "--lost-ranks"],
    "tune": ["--ranks", "--m", "--n", "--k", "--dtype", "--device", "--out"],
    "bench": ["--ranks", "--sizes", "--device", "--repeats", "--seconds", "--only", "--out"],
}
BENCHMARKS = ("ag_gemm", "gemm_ar", "all_gather", "all_to_all", "forms", "broadcast")


def command_line(pick, files):
    """One of the commands, with its arguments right and wrong, in any order."""
    name = pick.choice(["simulate", "simulate", "tune", "tune", "doctor", "bench", pick.choice(TEXTS)])
    of = {"simulate": files, "tune": [*OPERATORS, "ag_gemm", "gemm_rs"], "bench": BENCHMARKS}.get(name, ())
    words = [pick.choice([*of, *of, *of, *TEXTS])] if pick.random() < 0.9 else []
    for _ in range(pick.choice([0, 0, 1, 1, 2, 4])):
        option = pick.choice(OPTIONS.get(name, ["--ranks"]) if pick.random() < 0.9 else ["--ranks", "--x"])
        value = {"--dtype": ("bf16", "fp32"), "--device": ("cpu", "cuda"), "--heap": ("1MiB", "9999999TiB", "7")}
        words += [option, pick.choice([*value.get(option, NUMBERS), *value.get(option, NUMBERS), *TEXTS])]
    if pick.random() < 0.2:
        words.append(pick.choice(SWITCHES))
    return name, words


def fast(name, words):
    """The command line with few schedules, which is all that makes it long."""
    return [*words, "--seeds", "1"] if name == "simulate" else words


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Targets of `pkt simulate`. Searches and measurements are replaced by the tables that ship and by no rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_searched", lambda layer, *_: (tables.measured(OPERATORS[layer.what])[0], "GPU"))
    monkeypatch.setattr(_command, "run", lambda *_: [])
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    (tmp_path / "text.txt").write_text("no program")
    return [str(file), *(f"{file}:{name}" for name in ("main", "fails", "number", "none", ""))] + ["text.txt", "."]


def test_command_lines_end_with_a_text_and_a_status(places, capsys):
    pick, ends = random.Random(2), Counter()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(COMMANDS):
        name, words = command_line(pick, places)
        if name == "bench":
            status = 0
            try:
                bench.main(words)
            except SystemExit as end:
                status = end.code or 0
            except Unsupported as refused:
                status = str(refused)
                assert status.endswith("found no GPU: pkt explain predicts times without one")
        else:
            done = CliRunner().invoke(app, [name, *fast(name, words)])
            assert done.exception is None or isinstance(done.exception, SystemExit), (name, words, done.exception)
            assert done.output, (name, words)
            status = done.exit_code
        ends[name if name in ("simulate", "tune", "doctor", "bench") else "no command", status] += 1
    capsys.readouterr()
    print(f"{COMMANDS} command lines:", {f"{name} {status}": n for (name, status), n in ends.items()})
    assert min(ends["simulate", 0], ends["simulate", 2], ends["tune", 0], ends["tune", 2]) >= COMMANDS // 100
    end_idle()
    assert threading.active_count() <= threads + 1
    assert len(os.listdir("/proc/self/fd")) <= files + 5
