"""What the operators' benchmarks share: one process a GPU, every variant beside its baselines in one run.

A benchmark module has `variants(device, quick)`, the names in the order of the table, `cases(quick)`, label -> keyword
arguments, and `case(world, **arguments)`, which makes a case on a rank. Here is the rest: each case is a job
of `pkt.launch`; a variant that fails is recorded with its message, and those after it run in a new job; a variant that
takes too long ends its process, so that nothing hangs.

How a time is taken: everything is queued behind a sleep, so the host's launches do not count. Each repeat empties L2,
meets all ranks in a barrier kernel, and is timed by two events; of the ranks' times the greatest counts. A GPU that
has worked for a tenth of a second lowers its clock, by as much as a fifth: so the variants of a case take turns, a
repeat or two each and PASSES times, every time in another order, and all find the clock that the mixture of them
leaves. Inputs are standard normal. The limit of a product is the greater of cuBLAS's time and the bytes that leave a
GPU over 390 GB/s.

Before a time is taken the result is compared with an fp32 reference after each of five launches, between which the
inputs are multiplied by powers of two: what a kernel reads of an earlier launch is then wrong, not a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.metadata
import json
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

import pkt
from benchmarks._harness import RESULTS, _commit
from pkt.errors import PktError, Unsupported, WaitTimeout
from pkt.runtime import workers

LINK = 390e9  # bytes a second out of one GPU: what the copy engines reach on an H200 with 18 links
BOUND = 1e-2  # greatest ||out - exact|| / ||exact|| in bf16; a tile that is wrong or late is far above
SCALES = (1.0, -2.0, -2.0, 1.0, 4.0)  # of the inputs, launch by launch; both halves of a double buffer are met
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
ENVIRONMENT = OFF | {"PKT_DISABLE_MULTICAST": "1"}
GIVE_UP = 4  # Gluon variants of a benchmark that end their jobs before the rest of them is left out
PASSES = 10  # in which the repeats of a variant are taken
WAIT_SECONDS = 20  # that a counter may stand still; the ranks compile a variant's first launch each for itself
AGAINST = {3: 2}  # ranks -> with how many what they take is compared
Device = Literal["cuda", "cpu"]
HEAP = {"cuda": "60GiB", "cpu": "256MiB"}


@dataclass
class Case:
    """One size on one rank. `variants`: name -> what computes the result once; `exact()`: the result in fp32, made
    when it is first needed; `inputs`: tensors that the result is linear in one by one, the first is scaled."""

    nbytes: float  # that leave a GPU at least
    variants: dict[str, Callable[[], torch.Tensor]]
    exact: Callable[[], torch.Tensor]
    scaled: torch.Tensor
    flops: float = 0.0  # on a GPU
    unchecked: frozenset[str] = frozenset()  # variants that compute something else: a part, with no communication
    skipped: dict[str, str] = field(default_factory=dict)  # variant -> why there is none of it at this size


@dataclass
class Settings:
    """How long and how often."""

    repeats: int = 20
    seconds: float = 45.0  # that a variant may take, compilation included
    flush: int = 256 << 20  # bytes written to empty L2
    end: float = float("inf")  # time.time() after which no variant is begun


# ----------------------------------------------------------------------------------------------------------- on a rank
def job(
    world: pkt.World, module: str, label: str, arguments: dict, names: list[str], settings: Settings, journal: str
) -> list[dict[str, Any]]:
    """The variants `names` of a case, on one rank; a row each. `journal`: file where rank 0 says what it begins."""
    cuda = world.torch_device.type == "cuda"
    if cuda:
        prepare(world)
    case: Case = importlib.import_module(module).case(world, **arguments)
    exact: list[torch.Tensor] = []
    rows = []
    for name in names:
        row: dict[str, Any] = {"case": label, "variant": name, "bytes": case.nbytes, "flops": case.flops}
        if world.broadcast(time.time() > settings.end):
            row |= {"failed": "out of time", "skipped": True}
        else:
            with _watched(world, name, settings, journal):
                row |= _checked(world, case, name, exact, cuda)
        rows.append(row)
    if cuda:
        sound = [row for row in rows if not row.get("failed")]
        times: dict[str, list[dict[str, Any]]] = {row["variant"]: [] for row in sound}
        for i in range(PASSES):
            for row in random.Random(i).sample(sound, len(sound)):  # in the same order on every rank
                name = row["variant"]
                with _watched(world, name, settings, journal):
                    times[name].append(_timed(world, case.variants[name], settings))
        for row in sound:
            row |= _summary(times[row["variant"]])
    return rows


@contextlib.contextmanager
def _watched(world: Any, name: str, settings: Settings, journal: str) -> Iterator[None]:
    """What takes too long ends its process; the journal's last line is then its variant."""
    if not journal:
        yield
        return
    if world.rank == 0:
        with open(journal, "a", encoding="utf-8") as file:
            file.write(name + "\n")
    faulthandler.dump_traceback_later(settings.seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _checked(world: Any, case: Case, name: str, exact: list, cuda: bool) -> dict[str, Any]:
    """Whether a variant runs, and is right, on every rank."""
    if name in case.skipped:
        return {"failed": case.skipped[name], "skipped": True}
    run, problem, error = case.variants.get(name), "", 0.0
    start = time.perf_counter()
    if run is None:
        return {"failed": "no such variant", "skipped": True}
    try:
        if name in case.unchecked:
            run()
        else:
            error = _error(case, run, exact)
        world.synchronize()
    except (WaitTimeout, torch.AcceleratorError):
        raise  # the device is not fit for another launch: end the job
    except (PktError, RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as failure:
        problem = f"{type(failure).__name__}: {failure}"
        if cuda:
            torch.cuda.synchronize()  # raises where the context is lost
    problems = world.all_gather_object(problem)
    if any(problems):
        return {"failed": next(p for p in problems if p)[:600]}
    errors = world.all_gather_object(error)
    row: dict[str, Any] = {
        "error": None if name in case.unchecked else max(errors),
        "first_s": time.perf_counter() - start,
    }
    if row["error"] is not None and not row["error"] <= BOUND:
        row["failed"] = f"wrong: error {row['error']:.2g}, wanted at most {BOUND:g}"
    return row


def _error(case: Case, run: Callable[[], torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The greatest relative error over launches whose inputs differ."""
    if not exact:
        exact.append(case.exact())
    before, worst = 1.0, 0.0
    for scale in SCALES:
        case.scaled.mul_(scale / before)
        before = scale
        worst = max(worst, distance(run(), exact[0], scale))
    case.scaled.mul_(1.0 / before)
    return worst


def distance(found: torch.Tensor, exact: torch.Tensor, scale: float) -> float:
    """||found - scale * exact|| / ||scale * exact||; infinite where `found` holds what is no number. In slices of 64 Mi
    elements, because an fp32 copy of the whole may not be wanted beside everything else."""
    found, exact = found.reshape(-1), exact.reshape(-1)
    off = norm = 0.0
    for start in range(0, exact.numel(), 1 << 26):
        part = exact[start : start + (1 << 26)] * scale
        off += (found[start : start + (1 << 26)].float() - part).square().sum(dtype=torch.float64).item()
        norm += part.square().sum(dtype=torch.float64).item()
    value = (off / max(norm, 1e-300)) ** 0.5
    return value if value == value else float("inf")


def _timed(world: Any, run: Callable[[], Any], settings: Settings) -> dict[str, Any]:
    """One pass: milliseconds of each repeat, the greatest of the ranks', and of the host."""
    flush = world.workspace("benchmarks.flush", lambda: torch.empty(settings.flush, dtype=torch.uint8, device="cuda"))
    repeats = -(-settings.repeats // PASSES)
    run()
    world.synchronize()
    start = time.perf_counter()
    run()
    enqueue = time.perf_counter() - start
    world.synchronize()
    whole = time.perf_counter() - start
    enqueue, whole = (max(column) for column in zip(*world.all_gather_object([enqueue, whole])))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    world.barrier()
    torch.cuda._sleep(int(min(0.6, 0.001 + 1.5 * enqueue * repeats) * 2e9))
    for begin, end in events:
        flush.zero_()
        gate(world)
        begin.record()
        run()
        end.record()
    world.synchronize()
    mine = [begin.elapsed_time(end) for begin, end in events]
    slowest = [max(times) for times in zip(*world.all_gather_object(mine))]
    return {"ms": slowest, "host_us": 1e6 * enqueue, "eager_ms": 1e3 * whole}


def _summary(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row says of its passes."""
    every = [ms for found in passes for ms in found["ms"]]
    return {
        "ms": statistics.median(every), "low": min(every), "high": max(every), "runs": len(every),
        **{name: min(found[name] for found in passes) for name in ("host_us", "eager_ms")},
    }  # fmt: skip


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`run` as a CUDA graph: called once to compile and allocate, then captured, then replayed, with the same result
    tensor each time. Without a GPU `run` itself."""
    if not torch.cuda.is_available():
        return run
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def replay() -> torch.Tensor:
        if not made:
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = run()
            made.append((graph, result))
        made[0][0].replay()
        return made[0][1]

    return replay


def gate(world: Any) -> None:
    """All ranks' streams meet here."""
    from pkt.tune._gate import gate_kernel

    counters = world.workspace("benchmarks.gate", lambda: pkt.signals(2, name="benchmarks.gate", world=world))
    gate_kernel[(1,)](counters, world.device, num_warps=1)


def prepare(world: Any) -> None:
    """Allocator for descriptors that kernels make; a process group for the baselines, kept between jobs."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem  # its import registers the fused operators
    import triton

    for name, value in ENVIRONMENT.items():
        if os.environ.get(name) != value:
            raise Unsupported.here(
                "benchmarks", f"found {name}={os.environ.get(name)!r}", f"wanted {value!r}: no multicast"
            )
    torch.cuda.set_device(world.torch_device)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = world.broadcast(probe.getsockname()[1])
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size,
            device_id=world.torch_device,
        )  # fmt: skip
        with contextlib.suppress(AttributeError), warnings.catch_warnings():  # newer versions need no such call
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(group_name())


def group_name() -> Any:
    """The process group's name, as torch.ops.symm_mem wants it."""
    import torch.distributed as dist

    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def torch_symmetric(like: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's symmetric memory, with peers' addresses exchanged. Collective."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    tensor = symm_mem.empty(*like.shape, dtype=like.dtype, device=like.device)
    symm_mem.rendezvous(tensor, dist.group.WORLD)  # type: ignore[arg-type]
    return tensor


def normal(shape: tuple[int, ...], seed: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Standard normal bf16, the same on every rank for a seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).mul_(scale).bfloat16()


# ------------------------------------------------------------------------------------------------------------- the run
def run(
    module: str, device: Device, ranks: int, quick: bool, settings: Settings, only: str = "", sizes: str = ""
) -> list[dict[str, Any]]:
    """All cases of a benchmark whose N and K the ranks share alike; rows as of `job`. A variant that ended its job is
    not tried again at other sizes."""
    benchmark = importlib.import_module(module)
    rows: list[dict[str, Any]] = []
    given_up: dict[str, str] = {}
    chosen = {}
    for label, arguments in benchmark.cases(quick).items():
        ragged = [axis for axis in ("N", "K") if arguments.get(axis, 0) % ranks]
        if sizes and not any(word in label for word in sizes.split(",")):
            continue
        if ragged:
            print(f"{label}: left out, {ragged[0]} = {arguments[ragged[0]]} is no multiple of {ranks}", flush=True)
        else:
            chosen[label] = arguments
    names = [n for n in benchmark.variants(device, quick) if not only or any(w in n for w in only.split(","))]
    with progress(module.rpartition(".")[2], len(chosen) * len(names)) as advance:
        for label, arguments in chosen.items():
            for row in _case(module, device, ranks, label, arguments, names, given_up, settings):
                rows.append(row)
                advance(f"{label}, {row['variant']}")
    return rows


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere; call what it gives with each step's name when the step is done."""
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, advance=1, description=f"{title}: {done}")


def _case(
    module: str, device: Device, ranks: int, label: str, arguments: dict, names: list[str], given_up: dict[str, str],
    settings: Settings,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The rows of one case. `given_up`: variant -> why it is not tried again; added to."""
    yield from ({"case": label, "variant": n, "failed": given_up[n], "skipped": True} for n in names if n in given_up)
    names = _hopeful([n for n in names if n not in given_up], given_up)
    while names:
        rows, begun, failure = _one_job(module, device, ranks, label, arguments, names, settings)
        if failure:  # and the others again without it
            culprit = begun if begun in names else names[0]
            given_up[culprit] = f"ended its job at {label}"
            rows = [{"case": label, "variant": culprit, "failed": failure}]
        for row in rows:
            if not row.get("skipped"):
                print(_line(row), flush=True)
            yield row
        names = _hopeful([n for n in names if n != culprit], given_up) if failure else []


def _hopeful(names: list[str], given_up: dict[str, str]) -> list[str]:
    """No time to find out one by one that no Gluon form runs here."""
    enough = sum("gluon" in name for name in given_up) >= GIVE_UP
    return [name for name in names if "gluon" not in name] if enough else names


def _one_job(
    module: str, device: Device, ranks: int, label: str, arguments: dict, names: list[str], settings: Settings
) -> tuple[list[dict[str, Any]], str, str]:
    """The rows; or none, the variant that was begun last, and why it ended."""
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
        workers.warm(ranks).kill()  # a CUDA error stays with its process
    return [], begun, f"{lines[0]} ... {lines[-1]}"[:600]


def _line(row: dict[str, Any]) -> str:
    head = f"{row['case']:>28}  {row['variant']:<44}"
    if row.get("failed"):
        return f"{head} {'-' if row.get('skipped') else 'FAILED'} {row['failed'][:300]}"
    error = "" if row.get("error") is None else f"error {row['error']:.1e}"
    if "ms" not in row:
        return f"{head} right  {error}"
    return f"{head} {row['ms']:9.4f} ms  ({row['low']:.4f} to {row['high']:.4f}, eager {row['eager_ms']:.3f})  {error}"


# -------------------------------------------------------------------------------------------------------- the report
def limits(rows: list[dict[str, Any]], alone: str = "cuBLAS alone") -> None:
    """Adds `limit_ms` and `ratio` = limit / time to the rows of each case."""
    for case in dict.fromkeys(row["case"] for row in rows):
        of = [row for row in rows if row["case"] == case]
        compute = next((row["ms"] for row in of if row["variant"] == alone and "ms" in row), 0.0)
        for row in of:
            if "ms" in row:
                row["limit_ms"] = max(compute, 1e3 * row["bytes"] / LINK)
                row["ratio"] = row["limit_ms"] / row["ms"]


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    """A line for each variant, a column for each case: milliseconds, and the ratio to the limit; the fastest of pkt and
    of the baselines are set in bold."""
    cases = list(dict.fromkeys(row["case"] for row in rows if "ms" in row or "error" in row))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    cell = {(row["variant"], row["case"]): row for row in rows}
    best: dict[tuple[str, bool], str] = {}
    for case in cases:
        for ours in (False, True):
            of = [r for r in rows if r["case"] == case and "ms" in r and r["variant"].startswith("pkt") == ours]
            of = [r for r in of if r.get("error") is not None]
            if of:
                best[case, ours] = min(of, key=lambda r: r["ms"])["variant"]
    lines = [f"## {title}", "", "| ms (limit / time) | " + " | ".join(cases) + " |", "|---|" + "--:|" * len(cases)]
    for name in names:
        cells = []
        for case in cases:
            row = cell.get((name, case))
            if row is None or row.get("skipped"):
                text = ""
            elif "ms" in row:
                text = f"{row['ms']:.4g} ({row['ratio']:.2f})"
                text = f"**{text}**" if best.get((case, name.startswith("pkt"))) == name else text
            else:
                text = "failed" if row.get("failed") else f"right, {row['error']:.1e}"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    right = [row for row in rows if row.get("error") is not None and not row.get("failed")]
    worst = max((row["error"] for row in right), default=0.0)
    return "\n".join([*lines, "", f"Greatest error against fp32, of those timed or checked: {worst:.1e}.", ""])


def record(name: str, rows: list[dict[str, Any]], ranks: int, targets: dict[str, float]) -> dict[str, Any]:
    """The results file. `targets`: case -> least ratio to the limit that is asked of pkt's fastest variant."""
    report = [
        {"case": f"{row['case']}, {row['variant']}", "value": row["ms"], "unit": "ms", "low": row["low"],
         "high": row["high"], "runs": row["runs"], "limit": None, "at_least": False, "held": None}
        for row in rows
        if "ms" in row
    ]  # fmt: skip
    for case, target in targets.items():
        ours = [r for r in rows if r["case"] == case and "ratio" in r and r["variant"].startswith("pkt")]
        ours = [r for r in ours if r.get("error") is not None]
        if ours:
            fastest = max(ours, key=lambda r: r["ratio"])
            ratio = fastest["ratio"]
            report.append(
                {"case": f"{case}, limit / time of {fastest['variant']}", "value": ratio, "unit": "", "low": ratio,
                 "high": ratio, "runs": fastest["runs"], "limit": target, "at_least": True, "held": ratio >= target}
            )  # fmt: skip
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": os.environ.get("PKT_COMMAND") or " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": os.environ.get("PKT_COMMIT") or _commit(),  # a measured copy may lack its history
        "host": _host(),
        "ranks": ranks,
        "rows": report,
        "measured": rows,
    }


def against(fewer: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a results file: what pkt's default takes of what it took in `fewer`, of fewer ranks; held to the bytes
    that leave a GPU of what left one there. Nothing where the two are of different hosts or commits."""
    if any(fewer[name] != now[name] for name in ("host", "commit")):
        return []
    right = [
        {(r["case"], r["variant"]): r for r in record["measured"] if r.get("error") is not None and "ms" in r}
        for record in (fewer, now)
    ]
    report = []
    for (case, variant), row in right[1].items():
        other = right[0].get((case, variant))
        if other and variant.startswith("pkt default"):
            ratio, limit = row["ms"] / other["ms"], row["bytes"] / other["bytes"]
            report.append(
                {"case": f"{case}, time of {variant} / on {fewer['ranks']} ranks", "value": ratio, "unit": "",
                 "low": row["low"] / other["high"], "high": row["high"] / other["low"], "runs": row["runs"],
                 "limit": limit, "at_least": False, "held": ratio <= limit}
            )  # fmt: skip
    return report


def _host() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "system": platform.machine(), "versions": versions}


def picture(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of limit / time: a group for each case, a bar for each baseline and for pkt's fastest variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows if "ratio" in row))
    timed = {(r["case"], r["variant"]): r["ratio"] for r in rows if "ratio" in r and r.get("error") is not None}
    names = [n for n in dict.fromkeys(name for _, name in timed) if not n.startswith("pkt")]
    ours = {c: max((v for (k, n), v in timed.items() if k == c and n.startswith("pkt")), default=0.0) for c in cases}
    bars = {name: [timed.get((c, name), 0.0) for c in cases] for name in names} | {"pkt": [ours[c] for c in cases]}
    figure, axes = plt.subplots(figsize=(1.5 + 1.8 * len(cases), 3.4), layout="constrained")
    width = 0.8 / len(bars)
    for i, (name, values) in enumerate(bars.items()):
        at = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(cases))]
        colour = "tab:red" if name == "pkt" else f"{0.75 - 0.45 * i / max(len(bars) - 1, 1):.2f}"
        drawn = axes.bar(at, values, width * 0.92, label=name, color=colour)
        axes.bar_label(drawn, [f"{v:.2f}" if v else "" for v in values], fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("limit / time")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(name: str, title: str, targets: dict[str, float] | None = None, argv: Iterable[str] | None = None) -> int:
    """The command line of a benchmark module `benchmarks.<name>`. Returns 1 if something of pkt failed or was wrong."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--sizes", default="", help="words; a case whose label has none of them is left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the simulator, results only")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="small sizes, few variants")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="no variant is begun after these")
    parser.add_argument("--only", default="", help="words; a variant whose name has none of them is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for NAME.json, .md and .png")
    options = parser.parse_args(None if argv is None else list(argv))
    os.environ.update(ENVIRONMENT)
    start = time.perf_counter()
    settings = Settings(repeats=options.repeats, end=time.time() + options.seconds)
    rows = run(
        f"benchmarks.{name}", options.device, options.ranks, options.quick, settings, options.only, options.sizes
    )
    limits(rows)
    text = markdown(f"{title}, {options.ranks} ranks", rows)
    print(text)
    if options.device == "cuda" and not any("ms" in row for row in rows):
        print(f"{name}: nothing was measured, so no results are written")
    elif options.device == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / (name if options.ranks == 4 else f"{name}_{options.ranks}")
        asked = targets or {} if options.ranks == 4 else {}
        made = record(name, rows, options.ranks, asked)
        fewer = options.out / f"{name}_{AGAINST.get(options.ranks, 0)}.json"
        if fewer.exists():
            compared = against(json.loads(fewer.read_text()), made)
            made["rows"] += compared
            for row in compared:
                print(f"{row['case']}: {row['value']:.2f}, by the bytes {row['limit']:.2f}")
            if not compared:
                print(f"{fewer.name}: not compared, of another host or commit, or with no case in common")
        stem.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text)
        with contextlib.suppress(ImportError):
            picture(title, rows, stem.with_suffix(".png"))
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    failed = [row for row in rows if row.get("failed") and not row.get("skipped") and row["variant"].startswith("pkt")]
    return 1 if failed else 0
