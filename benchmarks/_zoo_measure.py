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

import pkt
from benchmarks import _cublasmp
from benchmarks._case import Case, normal
from benchmarks._check import checked
from benchmarks._process_group import group_name, prepare, torch_symmetric
from benchmarks._timing import Settings, gate
from benchmarks._zoo_cases import ZooCase
from pkt.errors import PktError, Unsupported
from pkt.kernels.operator import operators
from pkt.tune.timers import TICKS

Run = Callable[[torch.Tensor], torch.Tensor]
"""The result for weights."""
ROUNDS, CALLS, LEAST_CALLS = 20, 16, 2
LOOP = 1e-3  # seconds that a loop of eager calls takes at least, if CALLS are enough for it
COLD = 128 << 20  # bytes of weights that a loop goes through, if CALLS copies are enough for it
CHECKED = 512  # rows whose result is compared with fp32: some of every tile
ONE_SHOT = 4 << 20  # bytes of the largest result that torch's one-shot all-reduce sums
BASELINE_SECONDS = 20.0  # that a step of a baseline may take; nothing is compiled
PLAIN_ROWS = 1024  # above so many rows, forms in plain Triton are left out
REASON = 160  # letters kept of a failure
DEFAULT, NCCL, FUSED = "pkt default", "NCCL + cuBLAS", "torch symm_mem fused"


def variants(operator: str, cuda: bool, forms: str = "", M: int = 0) -> dict[str, dict[str, Any]]:
    """Variant of pkt -> keywords of the operator. forms: names of the forms to time besides the default; where empty,
    every form, with those in plain Triton up to PLAIN_ROWS rows."""
    found: dict[str, dict[str, Any]] = {DEFAULT: {}} if cuda else {}
    for mode, form in operators()[operator].forms.items():
        plain = not form.gpu and "tiles" in form.settings
        wanted = mode in forms.split(",") if forms else not (plain and M > PLAIN_ROWS)
        if wanted and (cuda or (not form.gpu and mode != "nccl")):
            found[f"pkt {mode}"] = {"mode": mode} | ({} if cuda else dict(form.small))
    return found


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
    others = {name: ms for name, ms in times.items() if not name.startswith("pkt")}
    if DEFAULT in times and others:
        best = min(others, key=lambda name: others[name])
        ratio = times[DEFAULT] / others[best]
        head += f"{1e3 * times[DEFAULT]:9.1f} us {ratio:5.2f} of {best}, {found['seconds']:.1f} s"
    else:
        head += "right: " + ", ".join(name for name, of in every.items() if not of.get("failed"))
    return "\n".join([head, *(f"    FAILED {each}" for each in wrong)])


class Pool:
    """Buffers of random numbers that all cases share; a tensor is a view of one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        """A tensor in the buffer `name`: normal numbers, until something is written there."""
        count = shape[0] * shape[1]
        if name not in self.buffers or self.buffers[name].numel() < count:
            self.buffers.pop(name, None)
            self.buffers[name] = normal((count,), seed, self.device)
        return self.buffers[name][:count].view(*shape)


class Bench:
    """What the cases share on a rank."""

    def __init__(self, world: Any, forms: str, settings: Settings, journal: str, left_out: Mapping[str, str]) -> None:
        self.world, self.forms, self.settings, self.journal, self.left_out = world, forms, settings, journal, left_out
        self.device = world.torch_device
        self.cuda = self.device.type == "cuda"
        self.pool = Pool(self.device)
        self.symmetric: list[torch.Tensor] = []  # torch's
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
        inputs = Inputs(self, case)
        runs = inputs.pkt_runs(self.forms)
        skipped: dict[str, str] = {}
        if self.cuda:
            runs |= inputs.baselines()
            skipped |= dict.fromkeys(_cublasmp.ALGORITHMS, self.mp_missing) if self.mp_missing else {}
            if not self.mp_missing:
                runs |= inputs.cublasmp(skipped)
        names = [*runs, *skipped]
        for name in names:
            for which in (case.label, case.operator):
                if why := self.left_out.get(f"{which} | {name}"):
                    skipped[name] = why
        b = inputs.copies[0]
        shown: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(inputs.checked, run, b) for name, run in runs.items()
        }
        scaled: Any = inputs  # has mul_, as a tensor
        check = Case(0.0, shown, inputs.exact, scaled, optional=frozenset(shown) - {DEFAULT}, skipped=skipped)
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


class Inputs:
    """The operands of a case and the runs of its variants. a, b: views of the pool."""

    def __init__(self, bench: Bench, case: ZooCase) -> None:
        self.bench, self.case, world = bench, case, bench.world
        self.world, W = world, world.size
        gathers, scatters = case.operator == "all_gather_matmul", case.operator == "matmul_reduce_scatter"
        self.a = bench.pool.take("a", (case.M // W if gathers else case.M, case.K), world.rank)
        self.rows = case.M // W if scatters else case.M
        nbytes = 2 * case.K * case.N
        count = max(1, min(CALLS, -(-COLD // nbytes))) if bench.cuda else 1
        transposed = case.layout == "transposed"
        shape = (case.N, case.K) if transposed else (case.K, case.N)
        every = bench.pool.take("b", (count * shape[0], shape[1]), 100 + world.rank).view(count, *shape)
        self.stored = list(every)
        self.copies = [w.t() if transposed else w for w in self.stored]
        self.out = bench.pool.take("out", (self.rows, case.N))
        each = case.M if case.operator == "matmul_all_reduce" else case.M // W
        step = max(1, each // (CHECKED if case.operator == "matmul_all_reduce" else max(1, CHECKED // W)))
        offset = random.Random(each).randrange(step)
        self.sample = torch.arange(offset, each, step, device=bench.device)  # in every rank's rows, or in all rows
        self.mp: Any = None
        self.factor = 1.0

    def mul_(self, factor: float) -> None:
        """Multiply the input, wherever variants keep it."""
        self.factor *= factor
        self.a.mul_(factor)
        if self.mp is not None:
            self.mp.a.copy_(self.a)

    def restore(self) -> None:
        """Undo a multiplication that a failed check left."""
        if self.factor != 1:
            self.mul_(1 / self.factor)

    def checked(self, run: Run, b: torch.Tensor) -> torch.Tensor:
        """The rows of a run's result that are compared with the exact one."""
        result = run(b)
        plain = result.plain() if isinstance(result, pkt.SymmetricTensor) else result
        if self.case.operator != "all_gather_matmul":
            return plain.index_select(0, self.sample)
        return plain.view(self.world.size, -1, self.case.N).index_select(1, self.sample).flatten(0, 1)

    def exact(self) -> torch.Tensor:
        """Those rows in fp32. Collective."""
        world, b = self.world, self.copies[0].float()
        if self.case.operator == "all_gather_matmul":
            return torch.cat(self._from_all(self.a.index_select(0, self.sample))).float() @ b
        at = self.sample
        if self.case.operator == "matmul_reduce_scatter":
            m = self.case.M // world.size
            at = torch.cat([rank * m + self.sample for rank in range(world.size)])
        total = torch.stack(self._from_all(self.a.index_select(0, at).float() @ b)).sum(0)
        if self.case.operator == "matmul_all_reduce":
            return total
        return total.view(world.size, -1, self.case.N)[world.rank].clone()

    def _from_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        if not self.bench.cuda:
            return [each.clone() for each in self.world.all_gather_object(x)]
        every = [torch.empty_like(x) for _ in range(self.world.size)]
        torch.distributed.all_gather(every, x.contiguous())
        return every

    # ------------------------------------------------------------------------------------------------------ variants
    def pkt_runs(self, forms: str) -> dict[str, Run]:
        """pkt's default and its forms, with ordinary tensors."""
        function = operators()[self.case.operator].function
        a, out, world = self.a, self.out, self.world
        if not self.bench.cuda:
            out = torch.empty(self.rows, self.case.N, dtype=a.dtype)

        def runs_with(given: dict[str, Any]) -> Run:
            return lambda b: function(a, b, out, world=world, **given)

        every = variants(self.case.operator, self.bench.cuda, forms, self.case.M)
        return {name: runs_with(given) for name, given in every.items()}

    def baselines(self) -> dict[str, Run]:
        """NCCL and torch beside cuBLAS."""
        import torch.distributed as dist

        case, a, out, pool = self.case, self.a, self.out, self.bench.pool
        symm = torch.ops.symm_mem
        if case.operator == "all_gather_matmul":
            gathered = pool.take("gathered", (case.M, case.K))

            def gather(b: torch.Tensor) -> torch.Tensor:
                dist.all_gather_into_tensor(gathered, a)
                return torch.mm(gathered, b, out=out)

            return {
                NCCL: gather,
                FUSED: lambda b: symm.fused_all_gather_matmul(a, [b], 0, group_name())[1][0],
            }
        if case.operator == "matmul_reduce_scatter":
            product = pool.take("product", (case.M, case.N))

            def scatter(b: torch.Tensor) -> torch.Tensor:
                torch.mm(a, b, out=product)
                dist.reduce_scatter_tensor(out, product)
                return out

            return {NCCL: scatter, FUSED: lambda b: symm.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name())}

        def reduce(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=out)
            dist.all_reduce(out)
            return out

        summed = self._torch_symmetric(case.M * case.N).view(case.M, case.N)

        def one_shot(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=summed)
            return symm.one_shot_all_reduce(summed, "sum", group_name())

        def two_shot(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=summed)
            return symm.two_shot_all_reduce_(summed, "sum", group_name())

        found: dict[str, Run] = {NCCL: reduce, "cuBLAS + torch two-shot": two_shot}
        if 2 * case.M * case.N <= ONE_SHOT:
            found["cuBLAS + torch one-shot"] = one_shot
        return found

    def _torch_symmetric(self, count: int) -> torch.Tensor:
        held = self.bench.symmetric
        if not held or held[0].numel() < count:
            held[:] = [torch_symmetric(torch.empty(max(count, 1 << 24), dtype=self.a.dtype, device=self.a.device))]
        return held[0][:count]

    def cublasmp(self, skipped: dict[str, str]) -> dict[str, Run]:
        """cuBLASMp's algorithms that take the case; why the others do not is added to `skipped`. Collective."""
        case, found = self.case, dict[str, Run]()
        self.mp = self.bench.mp.product(case.operator, case.M, case.N, case.K, case.layout == "transposed")
        self.mp.a.copy_(self.a)
        for name, number in _cublasmp.ALGORITHMS.items():
            try:
                found[name] = self.mp.algorithm(number, self.stored[0])
            except Unsupported as unfit:
                skipped[name] = str(unfit)
        return found

    def close(self) -> None:
        """Give cuBLASMp's memory back. Collective."""
        if self.mp is not None:
            self.mp.free()
            self.mp = None
