"""A run: each case of a benchmark is a job in the same warm processes, one process a GPU.

A job has all variants of a case and their baselines. If a variant ends the job, the others run in a new job.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pkt
from benchmarks._job import job
from benchmarks._timing import Settings
from pkt.errors import PktError
from pkt.progress import bar
from pkt.runtime.workers import workers

GIVE_UP = 4  # after so many Gluon variants have ended their jobs, the other Gluon variants are left out
WAIT_SECONDS = 20  # that a counter may stand still; each rank compiles a variant's first launch for itself
Device = Literal["cuda", "cpu"]
HEAP = {"cuda": "60GiB", "cpu": "256MiB"}


def run(
    module: str, device: Device, ranks: int, quick: bool, settings: Settings, only: str = "", sizes: str = "",
    keep: Callable[[list[dict[str, Any]]], object] = lambda rows: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run all cases of a benchmark whose N and K are multiples of `ranks`; returns the rows of `job`. A variant that
    ended its job is not tried at other sizes. keep: gets all rows so far behind each case, because a run may be
    stopped."""
    benchmark = importlib.import_module(module)
    rows: list[dict[str, Any]] = []
    given_up: dict[str, str] = {}
    chosen = {}
    for label, arguments in benchmark.cases(quick).items():
        ragged = [axis for axis in ("N", "K") if arguments.get(axis, 0) % ranks]
        if sizes and not any(word in label for word in sizes.split(",")):
            continue
        if ragged:
            print(f"{label}: left out, {ragged[0]} = {arguments[ragged[0]]} is not a multiple of {ranks}", flush=True)
        else:
            chosen[label] = arguments
    names = [n for n in benchmark.variants(device, quick) if not only or any(w in n for w in only.split(","))]
    with bar(module.rpartition(".")[2], len(chosen) * len(names)) as advance:
        for label, arguments in chosen.items():
            for row in _case(module, device, ranks, label, arguments, names, given_up, settings):
                rows.append(row)
                advance(f"{label}, {row['variant']}")
            keep(rows)
    return rows


def _case(
    module: str, device: Device, ranks: int, label: str, arguments: dict, names: list[str], given_up: dict[str, str],
    settings: Settings,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the rows of one case. given_up: variant -> why it is not tried again; this function adds to it."""
    yield from ({"case": label, "variant": n, "failed": given_up[n], "skipped": True} for n in names if n in given_up)
    names = _worth_trying([n for n in names if n not in given_up], given_up)
    while names:
        rows, begun, failure = _one_job(module, device, ranks, label, arguments, names, settings)
        if failure:  # run the others again without the culprit
            culprit = begun if begun in names else names[0]
            given_up[culprit] = f"ended its job at {label}"
            rows = [{"case": label, "variant": culprit, "failed": failure}]
        for row in rows:
            if not row.get("skipped"):
                print(_line(row), flush=True)
            yield row
        names = _worth_trying([n for n in names if n != culprit], given_up) if failure else []


def _worth_trying(names: list[str], given_up: dict[str, str]) -> list[str]:
    """The names to try: without Gluon variants if GIVE_UP of them have failed, because each failure takes long."""
    enough = sum("gluon" in name for name in given_up) >= GIVE_UP
    return [name for name in names if "gluon" not in name] if enough else names


def _one_job(
    module: str, device: Device, ranks: int, label: str, arguments: dict, names: list[str], settings: Settings
) -> tuple[list[dict[str, Any]], str, str]:
    """The rows, "" and ""; or, if the job failed, no rows, the variant that began last, and the failure."""
    cuda = device == "cuda"
    options: dict[str, Any] = {"timeout": WAIT_SECONDS} if cuda else {"sms": 4}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        called = (module, label, arguments, names, settings, str(journal) if cuda else "")
        try:
            rows = pkt.launch(job, ranks, device, called, heap=HEAP[device], multicast=not cuda, **options)[0]
            return rows, "", ""
        except (PktError, OSError, EOFError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
        print("\n".join(lines[-25:]), file=sys.stderr, flush=True)
        begun = journal.read_text().splitlines()[-1] if journal.exists() else ""
    if cuda and "WaitTimeout" not in lines[-1] and ranks in workers._warm:
        workers.warm(ranks).kill()  # after a CUDA error a process is unusable
    return [], begun, f"{lines[0]} ... {lines[-1]}"[:600]


def _line(row: dict[str, Any]) -> str:
    head = f"{row['case']:>28}  {row['variant']:<44}"
    if row.get("failed"):
        return f"{head} {'-' if row.get('skipped') else 'FAILED'} {row['failed'][:300]}"
    error = "" if row.get("error") is None else f"error {row['error']:.1e}"
    if "ms" not in row:
        return f"{head} right  {error}"
    return f"{head} {row['ms']:9.4f} ms  ({row['low']:.4f} to {row['high']:.4f}, eager {row['eager_ms']:.3f})  {error}"
