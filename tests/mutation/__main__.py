"""`python -m tests.mutation [WORD ...]`: make each mistake of `mutants`, one at a time, and run the tests for it.

Works in temporary copies of the files that git knows, never in place. WORDs choose the mistakes whose file, reason or
tests contain one of them. Prints killed, excused, survived, hung or gone for each, and the sums. Exit status 1 unless
all are killed or excused: a mistake that survives is excused if the list says why no test can notice it. A mistake is
gone if its fragment does not occur exactly once: the code has changed, and the list must follow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.mutation import child
from tests.mutation.mutants import MUTANTS, QUICK, Mutant

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1  # pytest's exit status for failing tests; others mean that no test was run
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(list(child.LOADED))


def copied(to: Path) -> Path:
    """A copy of every file of the tree that git knows or would know, without results."""
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, known.split("\0")):
        if (ROOT / name).is_file():
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
        return end, output.read()[-1500:]


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only mistakes whose file, reason or tests contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at once")
    parser.add_argument("--sample", type=int, help="only so many of those whose tests are quick")
    parser.add_argument("--seed", default="", help="any text: another one chooses another sample")
    parser.add_argument("--clean", action="store_true", help="first run the tests without a mistake: all must pass")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in str(m) for word in given.words)]
    if given.sample is not None:
        quick = [m for m in chosen if all(name.partition("::")[0] in QUICK for name in m.tests)]
        chosen = random.Random(given.seed).sample(quick, min(given.sample, len(quick)))
    if not chosen:
        parser.error(f"none of {len(MUTANTS)} mistakes has a word of {given.words}")
    waiting, ends, lock, start = list(enumerate(chosen)), Counter[str](), threading.Lock(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pkt-mutants-") as folder:
        trees = [copied(Path(folder) / str(job)) for job in range(max(1, given.jobs))]
        if given.clean:
            tests = tuple(dict.fromkeys(test for m in chosen for test in m.tests))
            end, said = tested(trees[0], tests, 60 * len(tests))
            if end != "passed":
                print(f"without a mistake the tests {end}:\n{said}")
                return 1

        def work(tree: Path) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    number, mutant = waiting.pop(0)
                begun = time.monotonic()
                end, said = judged(tree, mutant)
                with lock:
                    ends[end] += 1
                    print(f"{end:8} {time.monotonic() - begun:5.1f} s  {mutant.file}: {mutant.reason}", flush=True)
                    if end == "gone":
                        print(f"    {said}")
                    elif end == "excused":
                        print(f"    {mutant.excuse}")
                    elif end != "killed":
                        print(f"    {mutant.old!r} -> {mutant.new!r}\n    {' '.join(mutant.tests)}")
                    if end == "broken":
                        print(said)

        threads = [threading.Thread(target=work, args=(tree,)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sums = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{len(chosen)} of {len(MUTANTS)} mistakes: {sums}; {time.monotonic() - start:.0f} s")
    return 0 if set(ends) <= {"killed", "excused"} else 1


if __name__ == "__main__":
    sys.exit(main())
