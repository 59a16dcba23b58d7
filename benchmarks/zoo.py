"""Products of published models beside their baselines, so that pkt's choices are seen away from its tables.

    python -m pkt.bench zoo --ranks 2 --piece 1/4 --seconds 420   benchmarks/results/zoo_2.json, .md, .png
    python -m pkt.bench zoo --device cpu --quick                  check in the simulator; time nothing

The models and products are in benchmarks/_zoo_cases.py, how they are timed in benchmarks/_zoo_measure.py. The cases are
in random order, the same in every run, so a run that ends early has a fair sample. Each case is written to a file as
soon as it is measured, and cases that the results file or this file has are left out. Delete them to measure again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pkt
from benchmarks import _cublasmp, _pictures
from benchmarks._harness import RESULTS, commit, host
from benchmarks._process_group import ENVIRONMENT
from benchmarks._run import HEAP, WAIT_SECONDS
from benchmarks._timing import Settings
from benchmarks._zoo_cases import LAYOUTS, SHORT, TINY, TOKENS, ZooCase, cases, piece
from benchmarks._zoo_inputs import PLAIN_ROWS
from benchmarks._zoo_report import entries, markdown, measured, stored, summary
from pkt.errors import PktError
from pkt.progress import following
from pkt.runtime.workers import workers

__all__ = ["main", "measured"]
QUICK_TOKENS = (1, 3, 8)
GIVE_UP = 2  # after a form of pkt has ended so many jobs of an operator, it is left out of all its cases
JOBS = 8  # that may end before the run does
LONGEST = 60.0  # seconds that a variant may take, compilation included


def chosen(options: argparse.Namespace) -> list[ZooCase]:
    """The cases that the command line asks for, in their order."""
    tokens = [int(word) for word in options.tokens.split(",") if word]
    default = QUICK_TOKENS if options.quick else TOKENS
    found = cases(options.ranks, TINY if options.quick else None, tokens or default)
    wanted = [name for name in options.operators.split(",") if name]
    words = [word for word in options.products.split(",") if word]
    layouts = [layout for layout in LAYOUTS if getattr(options, layout.replace("-", "_"))] or list(LAYOUTS)
    every = [
        case
        for case in found
        if case.layout in layouts
        and (not wanted or any(word in (case.operator, SHORT[case.operator]) for word in wanted))
        and (not words or any(word in product for word in words for product in case.products))
    ]
    which, _, of = options.piece.partition("/")
    return piece(every, int(which), int(of))


def run(options: argparse.Namespace, wanted: list[ZooCase], rows: Path) -> list[dict[str, Any]]:
    """Measure the cases in one job, or in several if variants end jobs; returns what was measured. rows: the file to
    which each case is written."""
    cuda = options.device == "cuda"
    from benchmarks._zoo_measure import measure as importable

    settings = Settings(seconds=LONGEST, end=time.time() + options.seconds)
    if not cuda:
        facts = [case.facts() for case in wanted]
        return pkt.launch(importable, options.ranks, "cpu", (facts, options.forms, settings, "", "", {}), sms=4)[0]
    done: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    culprits: Counter[str] = Counter()
    for _ in range(JOBS):
        before = len(read(rows))
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder, "journal")
            facts = [case.facts() for case in wanted]
            called = (facts, options.forms, settings, str(journal), str(rows.resolve()), left_out)
            failure = ""
            try:
                more: dict[str, Any] = {"heap": HEAP["cuda"], "multicast": False, "timeout": WAIT_SECONDS}
                measured = functools.partial(lambda before: len(read(rows)) - before, before)
                with following("zoo", len(wanted), measured):
                    pkt.launch(importable, options.ranks, "cuda", called, **more)
            except (PktError, OSError, EOFError) as error:
                failure = str(error).strip() or type(error).__name__
            found = read(rows)[before:]
            done += found
            if not failure:
                return done
            print("\n".join(failure.splitlines()[-25:]), file=sys.stderr, flush=True)
            begun = read(journal)
        known = {ZooCase(**one["case"]).key for one in found}
        wanted = [case for case in wanted if case.key not in known]
        label, name = begun[-1] if begun else ("", "")
        at = next((case for case in wanted if case.label == label), None)
        if at is None:  # not in a case
            return done
        name = name.partition(", capture")[0]
        why = f"ended its job: {failure.splitlines()[-1]}"[:300]
        print(f"{at.label}: {name or 'inputs'} {why}", flush=True)
        if not name or name.startswith("in turns"):
            wanted.remove(at)
        else:
            which = f"{at.operator} | {name}"
            culprits[which] += 1
            everywhere = culprits[which] >= GIVE_UP or not name.startswith("pkt")
            left_out[which if everywhere else f"{at.label} | {name}"] = why
        if options.ranks in workers._warm:
            workers.warm(options.ranks).kill()  # after a CUDA error a process is unusable
        if time.time() > settings.end:
            break
    return done


def read(path: Path) -> list[Any]:
    """The values of a file of JSON lines; a line that was cut off is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path.name}: a line was cut off: {text[:60]}", file=sys.stderr)
    return found


def write(folder: Path, ranks: int) -> dict[str, Any]:
    """Write zoo_RANKS.json, .md and .png from the cases that were measured; returns the record."""
    stem = folder / f"zoo_{ranks}"
    lines = stem.with_suffix(".jsonl")
    old = json.loads(stem.with_suffix(".json").read_text()) if stem.with_suffix(".json").exists() else {}
    runs, found = old.get("runs", []), old.get("measured", [])
    for one in read(lines):
        if "commit" in one:
            runs.append(one)
        else:
            found.append(stored(one, len(runs) - 1))
    every = entries(found)
    record = {"benchmark": "zoo", **(runs[-1] if runs else {}), "ranks": ranks, "rows": summary(every, ranks)}
    stem.with_suffix(".md").write_text(markdown(record, every))
    text = json.dumps(record, indent=1)[:-2]
    for name, values in {"runs": runs, "measured": found}.items():  # a line each
        text += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(value) for value in values) + "\n ]"
    stem.with_suffix(".json").write_text(text + "\n}\n")
    _pictures.draw_if_possible(stem.with_suffix(".json"))
    lines.unlink(missing_ok=True)
    return record


def known(folder: Path, ranks: int) -> set[tuple]:
    """The keys of the cases that were measured before."""
    path = folder / f"zoo_{ranks}.json"
    found = [] if not path.exists() else json.loads(path.read_text())["measured"]
    keys = {(e["operator"], e["M"], e["N"], e["K"], ranks, e["layout"]) for e in found}
    lines = read(path.with_suffix(".jsonl"))
    return keys | {ZooCase(**one["case"]).key for one in lines if "case" in one}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check only, simulated")
    made.add_argument("--quick", action="store_true", help="tiny models")
    made.add_argument("--piece", default="1/1", help="I/N: the I-th of N samples of the cases")
    made.add_argument("--seconds", type=float, default=420.0, help="no case begins after these")
    made.add_argument("--tokens", default="", help="numbers, as 1,16,1500; else all")
    made.add_argument("--products", default="", help="words, as 70B,down: only products of which a name has one")
    made.add_argument("--operators", default="", help=f"names, or {', '.join(SHORT.values())}")
    made.add_argument("--row-major", action="store_true", help="only weights stored as (K, N)")
    made.add_argument("--transposed", action="store_true", help="only weights stored as (N, K)")
    made.add_argument(
        "--forms", default="",
        help=f"forms of pkt to time besides its default; else all, those in plain Triton up to "
        f"{PLAIN_ROWS} rows",
    )  # fmt: skip
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for zoo_RANKS.json, .md and .png")
    return made


def main(argv: Iterable[str] | None = None) -> int:
    """Returns 1 if a variant of pkt failed or was wrong, else 0."""
    options = parser().parse_args(None if argv is None else list(argv))
    start, cuda = time.perf_counter(), options.device == "cuda"
    asked = chosen(options)
    before = known(options.out, options.ranks) if cuda else set()
    wanted = [case for case in asked if case.key not in before]
    print(f"zoo: {len(wanted)} cases, {len(asked) - len(wanted)} are known", flush=True)
    if not wanted:
        return 0
    rows = options.out / f"zoo_{options.ranks}.jsonl"
    if cuda:
        os.environ.update(ENVIRONMENT | _cublasmp.ENVIRONMENT)
        if why := _cublasmp.missing():
            print(f"cuBLASMp is left out: {why}", flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": os.environ.get("PKT_COMMAND") or " ".join(["python", "-m", "benchmarks.zoo", *sys.argv[1:]]),
            "commit": commit(),
            "host": host(),
        }
        with open(rows, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
    done = run(options, wanted, rows)
    if cuda and done:
        record = write(options.out, options.ranks)
        print((options.out / f"zoo_{options.ranks}.md").read_text())
        print(f"zoo: {len(record['rows'])} figures")
    seconds = time.perf_counter() - start
    print(f"zoo: {len(done)} of {len(wanted)} cases in {seconds:.0f} s, {len(wanted) - len(done)} are left", flush=True)
    every = [(name, found) for one in done for name, found in one["variants"].items()]
    return int(any(name.startswith("pkt") and f.get("failed") and not f.get("skipped") for name, f in every))


if __name__ == "__main__":
    sys.exit(main())
