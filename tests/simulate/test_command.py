"""The command line of the simulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from pkt.simulate.command import main

pytestmark = pytest.mark.machine


@pytest.mark.parametrize("option", ["--seeds", "--ranks", "--sms"])
def test_the_command_line_refuses_to_run_nothing(option: str, tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(file), option, "0"])
    assert result.exit_code == 2
    assert option in result.output


FILE = """
import torch, triton, triton.language as tl, pkt, pkt.language as pl

@triton.jit
def push(x, out, flags, world, WAIT: tl.constexpr):
    other = (world.rank + 1) % world.size
    pl.store(x, 1, other, world)
    pl.signal(flags, other, world)
    if WAIT:
        pl.wait(flags, 1, world)
    tl.store(out, tl.load(x))
    pl.wait(flags, 1, world)

def main(world):
    run(world, True)

def broken(world):
    run(world, False)

def run(world, wait):
    x, out, flags = pkt.zeros(1), torch.zeros(1), pkt.signals(1)
    push[(1,)](x, out, flags, world.device, wait)
"""


def command(*arguments: str) -> Any:
    """Run the command in this process; a fresh process takes three seconds to import torch."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner(env={"PKT_HEAP": "1MiB"}).invoke(app, [*arguments, "--ranks", "2"])


def test_the_command_line_takes_the_heap_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    file.write_text("import pkt\n\ndef main(world):\n    pkt.empty(1 << 20)\n")
    for heap, found in (((), "HeapFull"), (("--heap", "1GiB"), "no finding")):
        assert found in command(str(file), "--seeds", "1", *heap).output


def test_the_command_line_explores_and_replays(tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    good = command(str(file), "--seeds", "5")
    assert good.exit_code == 0, good.output
    assert "schedules on 2 ranks" in good.output
    assert "no finding" in good.output
    bad = command(f"{file}:broken", "--seeds", "5")
    assert bad.exit_code == 1, bad.output
    assert "DataRace in seed " in bad.output
    assert "push.py:" in bad.output
    seed = bad.output.split("DataRace in seed ")[1].split(":")[0]
    again = command(f"{file}:broken", "--seed", seed)
    assert again.exit_code == 1
    assert f"DataRace in seed {seed}:" in again.output
    missing = command(f"{file}:nothing")
    assert missing.exit_code == 2
    assert "it has" in missing.output
    assert "broken" in missing.output


def test_the_command_loads_a_file_as_python_loads_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lies_beside.py").write_text("def main(world): world.barrier()\n")
    file = tmp_path / "torch.py"
    file.write_text("from lies_beside import main\n")
    assert command(str(file), "--seeds", "2").exit_code == 0
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def main(world:", "SyntaxError: '(' was never closed"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("\n\nraise ValueError('no data')", "line 3, in <module>"),
        ("\0", "SyntaxError"),
        ("import sys\n\ndef main(world): world.barrier()\n\nsys.exit(0)", "line 5, in <module>"),
    ],
)
def test_the_command_shows_where_a_file_fails_and_no_line_of_its_own(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    done = command(str(file))
    assert done.exit_code == 2
    assert "wrong.py cannot be loaded" in done.output
    assert said in done.output
    assert not [frame for frame in ("command.py", "importlib") if frame in done.output]


def test_the_command_runs_as_a_process(tmp_path: Path) -> None:
    file = tmp_path / "push.py"
    file.write_text(FILE)
    main = "from pkt.cli import app; app()"
    asked = [f"{file}:broken", "--ranks", "2", "--seeds", "3", "--heap", "1MiB"]
    command = [sys.executable, "-c", main, "simulate", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "DataRace in seed " in done.stdout
