"""`python -m tests.mutation [WORD ...]`: make each mistake of `mutants`, one at a time, and run the tests for it.

Works in temporary copies of the tree, never in place, with the interpreter that runs it. WORDs choose the mistakes
whose file, reason or tests contain one of them. Prints one word for each, and the sums; exit status 1 unless every
mistake was run, and is killed or excused.

    killed      a test failed
    excused     no test failed, and the list says why none can
    survived    no test failed
    hung        the tests did not end in time
    broken      pytest ran no test
    gone        the fragment does not occur exactly once: the code has changed, and the list must follow
    unsound     with --clean: the tests fail without the mistake as well
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, TextIO

from tests.mutation import child
from tests.mutation.mutants import MUTANTS, QUICK, Mutant

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1  # pytest's exit status for failing tests; others mean that no test was run
NEEDED = (
    "pytest", "hypothesis", "torch", "triton", "numpy", "greenlet", "cloudpickle", "rich", "typer", "platformdirs",
)  # fmt: skip
"""Modules without which most tests fail, whatever the mistake."""
RESULTS = frozenset((".git", ".venv", ".newest", "build", "dist", "out"))
"""Folders of the tree that are not copied where git does not answer."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(list(child.LOADED))


def known_files() -> list[Path]:
    """Every file of the tree, relative to it, that git knows or would know; without git all but results."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        if said:
            return [Path(name) for name in said.split("\0") if name and (ROOT / name).is_file()]
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in RESULTS and not name.endswith(("_cache", "__"))]
        found += [Path(folder, name).relative_to(ROOT) for name in files]
    return found


def copied(files: list[Path], to: Path) -> Path:
    """A copy of `files` of the tree."""
    for name in files:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    return to


def tested(tree: Path, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
    """How the tests end in `tree`: "passed", "failed", "hung" or "broken", and the end of what they print."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = PROCESSES.Process(target=child.test, args=(str(tree), tests, output.name))
        process.start()
        try:
            process.join(seconds)
            hung = process.is_alive()
        finally:
            if process.is_alive():
                os.killpg(process.pid or 0, signal.SIGKILL)
                process.join()
        end = "hung" if hung else {0: "passed", FAILED: "failed"}.get(process.exitcode or 0, "broken")
        return end, output.read()[-3000:]


def culprit(said: str) -> str:
    """The test that failed, by what pytest printed; "" if it names none."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return match[1] if match else ""


def judged(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """Whether the tests notice the mistake, made in `tree` and taken back: a word, and what the tests printed."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return "gone", f"{text.count(mutant.old)} places have {mutant.old!r}"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        end, said = tested(tree, mutant.tests, mutant.seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    survived = "excused" if mutant.excuse else "survived"
    return {"failed": "killed", "passed": survived}.get(end, end), said


class Verdict(NamedTuple):
    """How one mistake ended. end: a word of the module's docstring. seconds: of its tests. said: by pytest."""

    end: str
    seconds: float
    mutant: Mutant
    said: str

    def line(self) -> str:
        """For a file of lines: the word, seconds, file, reason, and the test that failed, with tabs between them."""
        by = culprit(self.said) if self.end in ("killed", "unsound") else ""
        return f"{self.end}\t{self.seconds:.1f}\t{self.mutant.file}\t{self.mutant.reason}\t{by}"

    def text(self) -> str:
        """For a reader: what there is to look into follows on more lines."""
        mutant = self.mutant
        text = f"{self.end:8} {self.seconds:5.1f} s  {mutant.file}: {mutant.reason}"
        if self.end == "killed":
            return f"{text}  ({culprit(self.said)})"
        if self.end == "excused":
            return f"{text}\n    {mutant.excuse}"
        text += f"\n    {mutant.old!r} -> {mutant.new!r}\n    {' '.join(mutant.tests)}"
        return text + (f"\n{self.said[-1500:]}" if self.end in ("broken", "gone", "unsound") else "")


class Run:
    """Makes mistakes in several trees at once. clean: first each mistake's tests without it."""

    def __init__(self, chosen: list[Mutant], clean: bool, seconds: float, out: TextIO | None) -> None:
        """seconds: after these no mistake is begun. out: takes a line for each as it ends."""
        self.waiting, self.clean, self.out = list(chosen), clean, out
        self.last = time.monotonic() + seconds
        self.ends = Counter[str]()
        self._sound: dict[tuple[str, ...], tuple[str, str]] = {}
        self._running: dict[tuple[str, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def work(self, tree: Path) -> None:
        """Make mistakes in `tree` until none is left, or the time is over."""
        while True:
            with self._lock:
                if not self.waiting or time.monotonic() > self.last:
                    return
                mutant = self.waiting.pop(0)
            begun = time.monotonic()
            end, said = self._judged(tree, mutant)
            verdict = Verdict(end, time.monotonic() - begun, mutant, said)
            with self._lock:
                self.ends[end] += 1
                print(verdict.text(), flush=True)
                self.write(verdict.line())

    def write(self, line: str) -> None:
        """A line of the file."""
        if self.out is not None:
            print(line, file=self.out, flush=True)

    def _judged(self, tree: Path, mutant: Mutant) -> tuple[str, str]:
        if self.clean:
            with self._lock:
                running = self._running.setdefault(mutant.tests, threading.Lock())
            with running:  # in one tree, for all that wait for it
                if mutant.tests not in self._sound:
                    self._sound[mutant.tests] = tested(tree, mutant.tests, mutant.seconds)
            end, said = self._sound[mutant.tests]
            if end != "passed":
                return "unsound", said
        return judged(tree, mutant)


def part(text: str) -> tuple[int, int]:
    """ "2/3" as 2 and 3."""
    one, _, of = text.partition("/")
    if not (one.isdigit() and of.isdigit() and 1 <= int(one) <= int(of)):
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted K/N with K from 1 to N, as in 1/2")
    return int(one), int(of)


def parsed() -> tuple[argparse.Namespace, list[Mutant]]:
    """The command line, and the mistakes that it chooses."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only mistakes whose file, reason or tests contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at once")
    parser.add_argument("--sample", type=int, help="only so many of those whose tests are quick")
    parser.add_argument("--seed", default="", help="any text: another one chooses another sample")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="only every Nth of them, from the Kth")
    parser.add_argument("--clean", action="store_true", help="first run each mistake's tests without it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mistake after so many seconds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a line for each mistake to this file, too")
    given = parser.parse_args()
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"{sys.executable} lacks {', '.join(lacking)}")
    chosen = [m for m in MUTANTS if not given.words or any(word in str(m) for word in given.words)]
    if given.sample is not None:
        quick = [m for m in chosen if all(name.partition("::")[0] in QUICK for name in m.tests)]
        chosen = random.Random(given.seed).sample(quick, min(given.sample, len(quick)))
    first, step = given.part
    chosen = chosen[first - 1 :: step]
    if not chosen:
        parser.error(f"none of {len(MUTANTS)} mistakes has a word of {given.words}")
    return given, chosen


def main() -> int:
    given, chosen = parsed()
    start = time.monotonic()
    # The processes share cores, and no test of these needs a GPU.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(given.out.open("w", encoding="utf-8")) if given.out else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pkt-mutants-")))
        files = known_files()
        trees = [copied(files, folder / str(job)) for job in range(min(max(1, given.jobs), len(chosen)))]
        run = Run(chosen, given.clean, given.seconds, out)
        threads = [threading.Thread(target=run.work, args=(tree,)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mutant in run.waiting:
            run.write(Verdict("not run", 0.0, mutant, "").line())
        sums = ", ".join(f"{count} {end}" for end, count in sorted(run.ends.items()))
        more = f"; {len(run.waiting)} were not run" if run.waiting else ""
        text = f"{sum(run.ends.values())} of {len(MUTANTS)} mistakes: {sums}{more}; {time.monotonic() - start:.0f} s"
        print(text)
        run.write(f"# {text}")
    return 0 if set(run.ends) <= {"killed", "excused"} and not run.waiting else 1


if __name__ == "__main__":
    sys.exit(main())
