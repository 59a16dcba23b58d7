"""Check and time the variants of cases of benchmarks/zoo.py, on one rank.

Captured: every variant is a CUDA graph. In each of ROUNDS rounds all variants run once, each time in another order,
queued behind a sleep; before each run, L2 is emptied and the ranks meet in a barrier kernel. A variant that cannot be
captured runs eagerly in these rounds, and the sleep hides its launches.

Eager: CALLS or fewer calls in a loop, timed as a whole between two events with nothing to hide the launches, so that
the greater of host time and GPU time counts, as in a model without graphs. The calls take copies of the weights in
turn, as a model's layers do: together they are larger than L2. The variants take turns in these rounds, too. There
are ROUNDS loops, or half as many where LEAST_CALLS take long enough.
"""

from __future__ import annotations

import faulthandler
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import _cublasmp
from benchmarks._case import Case
from benchmarks._check import checked
from benchmarks._process_group import prepare
from benchmarks._timing import Settings, gate
from benchmarks._zoo_cases import ZooCase
from benchmarks._zoo_inputs import ALONE, CALLS, DEFAULT, Inputs, Pool, Run
from pkt.errors import PktError
from pkt.tune.timers import TICKS

ROUNDS, LEAST_CALLS = 20, 2
LOOP = 1e-3  # seconds that a loop of eager calls takes at least, if CALLS are enough for it
BASELINE_SECONDS = 20.0  # that a step of a baseline may take; nothing is compiled
REASON = 160  # letters kept of a failure


def measure(
    world: Any, wanted: list[dict[str, Any]], forms: str, settings: Settings, journal: str, rows: str,
    left_out: Mapping[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure cases until `settings.end`; returns them with their results. Collective. rows: the file to which rank 0
    appends each case as a line. journal: the file to which it writes which variant begins. left_out: why a variant is
    not tried, by "label of the case | variant" or "operator | variant"."""
    bench = Bench(world, forms, settings, journal, left_out)
    done = []
    for facts in wanted:
        if world.broadcast(time.time() > settings.end):
            break
        found = bench.measured(ZooCase(**facts))
        done.append(found)
        if world.rank == 0:
            if rows:
                with open(rows, "a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
            print(line(found), flush=True)
    return done


def line(found: Mapping[str, Any]) -> str:
    """One line for the terminal: the default beside the fastest baseline."""
    every = found["variants"]
    head = f"{ZooCase(**found['case']).label:<76.76} "
    wrong = [
        f"{name}: {of['failed'][:150]}" for name, of in every.items() if of.get("failed") and not of.get("skipped")
    ]
    times = {name: of["ms"] for name, of in every.items() if "ms" in of}
    others = {name: ms for name, ms in times.items() if name != ALONE and not name.startswith("pkt")}
    if DEFAULT in times and others:
        best = min(others, key=lambda name: others[name])
        ratio = times[DEFAULT] / others[best]
        head += f"{1e3 * times[DEFAULT]:9.1f} us {ratio:5.2f} of {best}, {found['seconds']:.1f} s"
    else:
        head += "right: " + ", ".join(name for name, of in every.items() if not of.get("failed"))
    return "\n".join([head, *(f"    FAILED {each}" for each in wrong)])


class Bench:
    """What the cases share on a rank."""

    def __init__(self, world: Any, forms: str, settings: Settings, journal: str, left_out: Mapping[str, str]) -> None:
        self.world, self.forms, self.settings, self.journal, self.left_out = world, forms, settings, journal, left_out
        self.device = world.torch_device
        self.cuda = self.device.type == "cuda"
        self.pool = Pool(self.device)
        self.no_capture: set[tuple[str, str]] = set()  # operator and variant
        self.mp_missing = _cublasmp.missing()
        if self.cuda:
            self.begins(None, "")
            prepare(world)
            self.flush = torch.empty(settings.flush, dtype=torch.uint8, device=self.device)
            gate(world)
            self.mp_missing = next(filter(None, world.all_gather_object(self.mp_missing)), "")
            if not self.mp_missing:
                self.mp = _cublasmp.handle(world)
            world.synchronize()

    def begins(self, case: ZooCase | None, name: str) -> None:
        """Note in the journal what begins; the process ends if nothing else begins in time."""
        if not self.cuda:
            return
        if self.world.rank == 0:
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(json.dumps([case.label if case else "", name]) + "\n")
        ours = not name or name.startswith(("pkt", "in turns"))
        faulthandler.dump_traceback_later(self.settings.seconds if ours else BASELINE_SECONDS, exit=True)

    # ------------------------------------------------------------------------------------------------------- a case
    def measured(self, case: ZooCase) -> dict[str, Any]:
        """A case with its variants: their times and errors, or why there are none."""
        start = time.perf_counter()
        self.begins(case, "")
        with self.world.scratch():
            found = self._measured(case)
        if self.cuda:
            faulthandler.cancel_dump_traceback_later()
        return {"case": case.facts(), "variants": found, "seconds": round(time.perf_counter() - start, 3)}

    def _measured(self, case: ZooCase) -> dict[str, dict[str, Any]]:
        inputs = Inputs(self.world, case, self.pool)
        runs = inputs.pkt_runs(self.forms)
        skipped: dict[str, str] = {}
        if self.cuda:
            runs |= inputs.baselines()
            skipped |= dict.fromkeys(_cublasmp.ALGORITHMS, self.mp_missing) if self.mp_missing else {}
            if not self.mp_missing:
                runs |= inputs.cublasmp(self.mp, skipped)
        names = [*runs, *skipped]
        for name in names:
            for which in (case.label, case.operator):
                if why := self.left_out.get(f"{which} | {name}"):
                    skipped[name] = why
        b = inputs.copies[0]
        shown: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(run, b) if name == ALONE else partial(inputs.checked, run, b) for name, run in runs.items()
        }
        scaled: Any = inputs  # has mul_, as a tensor
        check = Case(
            0.0,
            shown,
            inputs.exact,
            scaled,
            optional=frozenset(shown) - {DEFAULT},
            skipped=skipped,
            unchecked=frozenset({ALONE}),
        )
        found: dict[str, dict[str, Any]] = {}
        exact: list[torch.Tensor] = []
        for name in names:
            self.begins(case, name)
            inputs.restore()
            found[name] = checked(self.world, check, name, exact, self.cuda)
            found[name].pop("first_s", None)
        sound = {name: run for name, run in runs.items() if not found[name].get("failed")}
        if self.cuda and sound:
            for name, times in self._timed(case, sound, inputs.copies).items():
                found[name] |= times
        inputs.close()
        return {name: {key: short(value) for key, value in row.items()} for name, row in found.items()}

    # ------------------------------------------------------------------------------------------------------- times
    def _timed(self, case: ZooCase, runs: dict[str, Run], copies: list[torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Times of all variants, taken in turns. Collective."""
        host = {name: self._host_seconds(case, name, run, copies[0]) for name, run in runs.items()}
        graphs = self._captured(case, runs, copies[0])
        self.begins(case, "in turns, captured")
        captured = self._rounds(runs, graphs, copies[0], host)
        self.begins(case, "in turns, eager")
        enough: dict[str, int] = {}
        for name in runs:
            each = max(host[name], 1e-3 * statistics.median(captured[name]))
            enough[name] = min(CALLS, max(LEAST_CALLS, math.ceil(LOOP / each)))
        calls: dict[str, int] = {name: max(of) for name, of in self._together(enough).items()}
        eager, queue = self._loops(runs, copies, calls)
        every = self._together({"captured": captured, "eager": eager, "queue": queue})
        graphs.clear()
        found = {}
        for name in runs:
            times = [max(at) for at in zip(*(of[name] for of in every["captured"]))]
            loops = [max(at) for at in zip(*(of[name] for of in every["eager"]))]
            found[name] = {
                "ms": statistics.median(times), "low": min(times), "high": max(times),
                "eager_ms": statistics.median(loops),
                "host_us": 1e6 * max(statistics.median(of[name]) for of in every["queue"]),
            } | ({"captured": False} if (case.operator, name) in self.no_capture else {})  # fmt: skip
        return found

    def _together(self, mine: dict[str, Any]) -> dict[str, list[Any]]:
        """Every rank's values by name. Collective."""
        every = self.world.all_gather_object(mine)
        return {name: [of[name] for of in every] for name in mine}

    def _host_seconds(self, case: ZooCase, name: str, run: Run, b: torch.Tensor) -> float:
        """Seconds that the host takes to queue a call, after a call that warms up."""
        self.begins(case, name)
        run(b)
        self.world.synchronize()
        start = time.perf_counter()
        run(b)
        taken = time.perf_counter() - start
        self.world.synchronize()
        return taken

    def _captured(self, case: ZooCase, runs: dict[str, Run], b: torch.Tensor) -> dict[str, Any]:
        """The graphs of all variants that every rank could capture. Collective."""
        graphs: dict[str, Any] = {}
        failed, side = set[str](), torch.cuda.Stream()
        for name, run in runs.items():
            if name in _cublasmp.ALGORITHMS or (case.operator, name) in self.no_capture:
                failed.add(name)
                continue
            self.begins(case, f"{name}, capture")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(side):  # torch.cuda.graph would also give cached memory back, which takes long
                    graph.capture_begin()
                    try:
                        run(b)
                    finally:
                        graph.capture_end()
                graphs[name] = graph
            except (RuntimeError, PktError) as error:
                print(f"{case.label}: {name} is not captured: {str(error)[:200]}", flush=True)
                failed.add(name)
        failed = set[str]().union(*self.world.all_gather_object(sorted(failed)))
        self.no_capture |= {(case.operator, name) for name in failed}
        return {name: graph for name, graph in graphs.items() if name not in failed}

    def _rounds(
        self, runs: dict[str, Run], graphs: dict[str, Any], b: torch.Tensor, host: dict[str, float]
    ) -> dict[str, list[float]]:
        """Milliseconds on this rank of a run of each variant in each round, all queued behind sleeps."""
        events: dict[str, list[Any]] = {name: [] for name in runs}
        for graph in graphs.values():
            graph.replay()
        self.world.synchronize()
        self.world.barrier()
        for i in range(ROUNDS):
            order = random.Random(i).sample(list(runs), len(runs))  # the same on every rank
            eagerly = sum(host[name] for name in order if name not in graphs)
            torch.cuda._sleep(int((3e-4 + 5e-5 * len(order) + 1.5 * eagerly) * TICKS))
            for name in order:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                gate(self.world)
                begin.record()
                if name in graphs:
                    graphs[name].replay()
                else:
                    runs[name](b)
                end.record()
                events[name].append((begin, end))
        self.world.synchronize()
        return {name: [begin.elapsed_time(end) for begin, end in of] for name, of in events.items()}

    def _loops(
        self, runs: dict[str, Run], copies: list[torch.Tensor], calls: dict[str, int]
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Of each loop of each variant on this rank: milliseconds for a call, and seconds of the host to queue it."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        queue: dict[str, list[float]] = {name: [] for name in runs}
        self.world.barrier()
        for i in range(ROUNDS if max(calls.values()) > LEAST_CALLS else ROUNDS // LEAST_CALLS):
            for name in random.Random(i).sample(list(runs), len(runs)):
                run, count = runs[name], calls[name]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                gate(self.world)
                begin.record()
                start = time.perf_counter()
                for call in range(count):
                    run(copies[call % len(copies)])
                queue[name].append((time.perf_counter() - start) / count)
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) / count)
        self.world.synchronize()
        return times, queue


def short(value: Any) -> Any:
    """A figure with four digits, a text with at most REASON letters."""
    if isinstance(value, str):
        return value[:REASON]
    return float(f"{value:.4g}") if isinstance(value, float) else value
