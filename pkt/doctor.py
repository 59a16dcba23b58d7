"""`pkt doctor`: whether pkt runs on this machine's GPUs, and what is missing.

examine() reads versions and the driver's attributes. It makes no context, no memory and no multicast object. measure()
then opens a world on all GPUs, without multicast, and moves data between them. On GPUs that pkt's cost model was not
fitted to it also times a product and a copy, and keeps these rates for the model.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import pkt.language as pl
from pkt.errors import PktError, Unsupported
from pkt.launcher import launch
from pkt.model import files, rates
from pkt.model.gpu import H200, gluon_lacks
from pkt.networks import Fabric
from pkt.networks import examine as examine_networks
from pkt.progress import Advance, bar
from pkt.runtime.gpu import nvml
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.gpu.topology import Topology, assemble, multicast_off, probe
from pkt.runtime.memory.factories import empty
from pkt.runtime.memory.heap import heap_bytes
from pkt.runtime.processes.transport import timeout_seconds
from pkt.runtime.world import World
from pkt.wording import count_text, size_text

OLDEST_TRITON = (3, 6)
PACKAGES = {  # distribution -> its purpose, or "" if pkt needs it
    "pkt-triton": "",
    "torch": "",
    "triton": "",
    "cuda-bindings": "",
    "matplotlib": "pictures of timelines: pip install matplotlib",
}
IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels/channel*"  # memory crosses hosts through one of these
NBYTES = 128 << 20  # that each rank sends to the next
COPIED = 512 << 20  # bytes that a GPU copies in its own memory


@dataclass(frozen=True)
class Problem:
    """Something that is missing or wrong. `fatal`: pkt does not run on GPUs until it is mended."""

    what: str
    remedy: str
    fatal: bool = True


@dataclass
class Report:
    """The findings. Lists are by GPU, in the order in which pkt.launch gives GPUs to ranks."""

    software: list[tuple[str, str]] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    topology: Topology | None = None
    memory: list[int] = field(default_factory=list)
    nvlinks: list[int | None] = field(default_factory=list)
    multicast: list[bool] = field(default_factory=list)  # supported, from the attribute
    imex: bool = False  # this host or container has an IMEX channel
    problems: list[Problem] = field(default_factory=list)
    ranks: int = 0  # GPUs 0 .. ranks - 1 can work together
    speeds: dict[str, list[float]] = field(default_factory=dict)  # mechanism -> GB/s out of each rank
    rates: dict[str, float] = field(default_factory=dict)  # of a GPU that the model was not fitted to, as it takes them
    fabric: Fabric | None = None  # what the host has for several nodes
    seconds: float | None = None  # from start to end of a world on all `ranks` GPUs

    @property
    def ok(self) -> bool:
        """Whether pkt runs on GPUs here."""
        return self.ranks > 0 and not any(problem.fatal for problem in self.problems)

    @property
    def status(self) -> int:
        """The exit status of `pkt doctor`."""
        return 0 if self.ok else 1


# ----------------------------------------------------------------------------------------------- without a world
def examine() -> Report:
    """The report without the measurement."""
    report = Report()
    _software(report)
    _settings(report)
    report.fabric = examine_networks()
    try:
        driver = CudaDriver(0)
        version = driver.version()
        release = nvml.ask("system_get_driver_version") or "NVIDIA driver"
        report.software.append(("driver", f"{release}, CUDA {version // 1000}.{version % 1000 // 10}"))
        count = driver.device_count()
    except (PktError, ImportError, RuntimeError, OSError) as error:  # no driver, no GPU or no bindings
        remedy = "on a machine with NVIDIA GPUs: install the driver, or start the container with --gpus all"
        report.problems.append(Problem(f"no GPU can be asked: {str(error).strip().splitlines()[0]}", remedy))
        return report
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else "start the container with --gpus all?"
        report.problems.append(Problem("the driver shows no GPU", hint))
        return report
    _gpus(report, driver, count)
    seen, built = torch.cuda.device_count(), torch.version.cuda
    if built is not None and seen < count:
        found = f"torch sees {seen} of {count_text(count, 'GPU')}"
        remedy = f"torch is built for CUDA {built}: update the driver, or install a torch for an older CUDA"
        report.problems.append(Problem(found, remedy, fatal=seen == 0))
        report.ranks = min(report.ranks, seen)
    return report


def _software(report: Report) -> None:
    missing = report.problems.append
    for name, use in PACKAGES.items():
        found = _version(name)
        report.software.append((name, found or (f"not installed ({use})" if use else "not installed")))
        if not found and name == "cuda-bindings":
            missing(Problem("cuda-bindings is not installed", "pip install cuda-python"))
    report.software.append(("CUDA of torch", torch.version.cuda or "none"))
    if torch.version.cuda is None:
        remedy = 'install one built for CUDA: see "Get started" on pytorch.org'
        missing(Problem(f"torch {torch.__version__} was built without CUDA", remedy))
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < OLDEST_TRITON:
        wanted = ".".join(map(str, OLDEST_TRITON))
        missing(Problem(f"triton {triton.__version__} is too old", f"pip install 'triton>={wanted}'"))
    elif lacks := gluon_lacks((9, 0)):
        found = f"the forms in Gluon, the fastest of the fused products on H100 and H200, do not run: {lacks}"
        missing(Problem(found, "pip install 'triton>=3.6,<3.10'; all other forms run", fatal=False))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    report.software.append(("C compiler", compiler or "none"))
    if not compiler:
        missing(Problem("no C compiler, which Triton needs to launch a kernel", "apt install gcc, or set CC"))


def _settings(report: Report) -> None:
    for name, meaning, unit, read in (
        ("PKT_HEAP", "most memory of a rank's heap", "", lambda: size_text(heap_bytes(None))),
        ("PKT_TIMEOUT", "longest wait for a peer", " s", lambda: f"{timeout_seconds():g}"),
    ):
        try:
            text = read() + unit
        except (PktError, ValueError):
            text = f"{os.environ.get(name)!r} is not understood"
            report.problems.append(Problem(f"{name}: {text}", f"unset {name}"))
        report.settings.append((f"{meaning} ({name})", text))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        report.settings.append(("GPUs let through (CUDA_VISIBLE_DEVICES)", visible or "none"))


def _gpus(report: Report, driver: CudaDriver, count: int) -> None:
    host = socket.gethostname()
    topology = assemble([probe(driver, device, host, spans=True) for device in range(count)])
    report.topology = topology
    report.memory = [driver.memory(device) for device in range(count)]
    report.nvlinks = [nvml.nvlinks(gpu.uuid) for gpu in topology.gpus]
    report.imex = bool(glob.glob(IMEX_CHANNELS))
    report.multicast = [bool(driver.attribute(device, "MULTICAST_SUPPORTED")) for device in range(count)]
    for ranks in range(count, 0, -1):
        part = Topology(topology.gpus[:ranks], tuple(row[:ranks] for row in topology.links[:ranks]))
        try:
            part.check()
        except Unsupported as error:
            why = str(error).splitlines()[0].removeprefix("pkt.init: ")
            continue
        report.ranks = ranks
        break
    if report.ranks < count:
        what = f"not all {count} GPUs can work together" if report.ranks else "no GPU here can run pkt"
        report.problems.append(Problem(what, why, fatal=not report.ranks))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its source" if distribution == "pkt-triton" else ""


# ----------------------------------------------------------------------------------------------------- a real world
@triton.jit
def push_registers_kernel(dst, src, n, world, BLOCK: tl.constexpr):
    """Store this rank's src into the next rank's dst; n elements, a multiple of BLOCK."""
    for block in range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        pl.put(dst=dst + offs, src=src + offs, peer=(world.rank + 1) % world.size, world=world)


@triton.jit
def push_tma_kernel(dst, src, n, world, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same by TMA; n is a multiple of ROWS * COLS."""
    there = pl.peer(dst, (world.rank + 1) % world.size, world)
    source = tl.make_tensor_descriptor(src, [n // COLS, COLS], [COLS, 1], [ROWS, COLS])
    target = tl.make_tensor_descriptor(there, [n // COLS, COLS], [COLS, 1], [ROWS, COLS])
    for tile in tl.range(tl.program_id(0), n // (ROWS * COLS), tl.num_programs(0), num_stages=3):
        target.store([tile * ROWS, 0], source.load([tile * ROWS, 0]))
    pl.quiet()


def trial(world: World, nbytes: int, repeats: int = 10) -> dict[str, float]:
    """Send `nbytes`, a multiple of 32 KiB, from every rank to the next at once, by each mechanism, and check the data.

    Returns {mechanism: GB/s out of this rank}, the median of `repeats`; 0 in the simulator, which has no time. Raises
    RuntimeError if other data arrived than was sent.
    """
    n, on_gpu, rank, size = nbytes // 2, world.torch_device.type == "cuda", world.rank, world.size
    src, dst = (empty(n, dtype=torch.bfloat16, name=name, world=world) for name in ("src", "dst"))
    index = torch.arange(n, dtype=torch.int32, device=world.torch_device)
    src.copy_((index + 131 * rank) % 251)  # whole numbers below 256: exact in bf16
    came = ((index + 131 * ((rank - 1) % size)) % 251).bfloat16()
    there = dst.peer((rank + 1) % size)
    mechanisms: dict[str, Callable[[], Any]] = {
        "copy engine": lambda: there.copy_(src.plain()),
        "registers": lambda: push_registers_kernel[(world.num_sms,)](dst, src, n, world.device, 4096, num_warps=8),
        "TMA": lambda: push_tma_kernel[(world.num_sms,)](dst, src, n, world.device, 128, 128, num_warps=4),
    }
    speeds = {}
    for name, send in mechanisms.items():
        dst.fill_(-1)
        world.barrier()
        send()
        world.barrier()
        if not torch.equal(dst.plain(), came):
            wrong = int(dst.plain().ne(came).sum())
            raise RuntimeError(f"rank {rank}: {name}: {wrong} of {n} elements differ from what rank {rank - 1} sent")
        speeds[name] = nbytes / _seconds(send, repeats) / 1e9 if on_gpu else 0.0
        world.barrier()
    return speeds


def _seconds(send: Callable[[], Any], repeats: int) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        send()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def times(world: World, side: int, nbytes: int) -> dict[str, float]:
    """Seconds of a bf16 product (side, side) @ (side, side), and of a copy of `nbytes` in this GPU's memory."""
    device = world.torch_device
    a, b, c = (torch.ones(side, side, dtype=torch.bfloat16, device=device) for _ in range(3))
    src, dst = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    sends: dict[str, Callable[[], Any]] = {"product": lambda: torch.mm(a, b, out=c), "copy": lambda: dst.copy_(src)}
    for send in sends.values():
        _seconds(send, 3)  # warm up
    return {name: _seconds(send, 20) for name, send in sends.items()}


def measure(report: Report, run: Callable[..., list[Any]] = launch) -> None:
    """Open a world on the GPUs that can work together and try it. A failure becomes a fatal problem of `report`. Rates
    of a GPU that the cost model does not know are kept for it."""
    with bar("measuring", 2) as advance:
        _measure(report, run, advance)


def _measure(report: Report, run: Callable[..., list[Any]], advance: Advance) -> None:
    start = time.perf_counter()
    try:
        # Without multicast: it is not needed here, and a failed attempt may disturb other users of shared GPUs.
        found = run(trial, report.ranks, "cuda", (NBYTES,), heap=2 * NBYTES + (16 << 20), multicast=False)
    except Exception as error:  # of any kind: the report shows it
        failed = f"a world on {count_text(report.ranks, 'GPU')} failed"
        report.problems.append(Problem(failed, f"{type(error).__name__}: {error}"))
        return
    advance("transfers between the GPUs")
    if report.ranks > 1:
        report.speeds = {name: [speeds[name] for speeds in found] for name in found[0]}
        _keep_rates(report, run)
    advance("rates of a GPU")
    report.seconds = time.perf_counter() - start


def _keep_rates(report: Report, run: Callable[..., list[Any]]) -> None:
    """Measure what the cost model starts from, unless it was fitted to this GPU. A failure is no fatal problem."""
    assert report.topology is not None
    gpu = report.topology.gpus[0]
    if gpu.name == H200.name:
        return
    try:
        (found,) = run(times, 1, "cuda", (rates.SIDE, COPIED), multicast=False)
        report.rates = {
            "sms": gpu.num_sms,
            "product": found["product"],
            "memory": 2 * COPIED / found["copy"],
            "link": 1e9 * min(report.speeds["copy engine"]),
        }
        rates.store(gpu.name, report.rates)
    except Exception as error:  # of any kind: the report shows it
        remedy = "pkt takes cuBLAS and a collective until an operator is tuned: pkt tune --all"
        what = f"the cost model has no rates of {gpu.name}: {type(error).__name__}: {error}"
        report.problems.append(Problem(what, remedy, fatal=False))


# ------------------------------------------------------------------------------------------------------ as tables
def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(_table("Software", ("", "found"), report.software))
    if report.topology is not None:
        console.print(_gpu_table(report, report.topology))
        if len(report.topology.gpus) > 1:
            console.print(_link_table(report.topology))
        console.print(_table("Memory of other ranks", ("", ""), _sharing(report, report.topology)))
        console.print(_table("Multicast", ("", ""), _multicast(report)))
    if report.fabric is not None:
        _show_fabric(report.fabric, console)
    console.print(_table("Settings", ("", ""), report.settings))
    if report.speeds:
        console.print(_speed_table(report))
    if report.rates:
        console.print(_rates_table(report))
    for problem in report.problems:
        colour = "red" if problem.fatal else "yellow"
        console.print(Text(f"{'missing' if problem.fatal else 'note'}: {problem.what}", style=colour))
        console.print(Padding(Text(problem.remedy), (0, 0, 0, 4), expand=False))
    console.print(Text(verdict(report), style="bold"))


def _show_fabric(fabric: Fabric, console: Console) -> None:
    """What the host has for several nodes, and that none of it was ever used."""
    never = "Worlds of several nodes have never run over a network (docs/scale-out.md)."
    if fabric.bare:
        console.print(Text("Several nodes: no network card, NVSHMEM, IBGDA or GDRCopy here."))
    else:
        console.print(_table("Several nodes", ("", ""), fabric.rows))
        for one in fabric.lacks:
            console.print(Text(f"for several nodes: {one}"))
    console.print(Text(never))


def verdict(report: Report) -> str:
    """The last line of the report: whether pkt runs on GPUs here, and on how many."""
    if not report.ok:
        return (
            "pkt does not run on GPUs here. These run on this machine:\n"
            '    pkt.launch(fn, ranks=4, device="cpu")    kernels and operators, simulated\n'
            "    pkt simulate file.py                     races, deadlocks, lost signals\n"
            "    pkt explain ag_gemm --m 8192 --n 2048 --k 8192    predicted times on H200\n"
            "A machine with GPUs needs NVIDIA GPUs that access each other (NVLink), their\n"
            "driver, a torch built for CUDA and a C compiler. The forms in Gluon need an\n"
            "H100 or H200 and Triton 3.6 to 3.9."
        )
    tried = f" (tried, in {report.seconds:.1f} s)" if report.seconds is not None else ""
    if report.ranks == 1:
        return f"pkt runs on GPU 0 here{tried}, where one rank has nobody to communicate with."
    return f"pkt runs on {report.ranks} GPUs here{tried}: pkt.launch(fn, ranks={report.ranks})"


def _sharing(report: Report, topology: Topology) -> list[tuple[str, str]]:
    domains = {gpu.domain: gpu.device for gpu in topology.gpus}
    without = next((gpu.device for gpu in topology.gpus if not gpu.fabric_handles), None)
    if without is not None:
        across = f"no: GPU {without} has no fabric handles"
    elif "" in domains:
        across = f"no: GPU {domains['']} is in no NVLink domain that spans hosts"
    elif not report.imex:
        across = f"no: there is no IMEX channel here ({IMEX_CHANNELS})"
    else:
        across = f"by fabric handles, with ranks on other GPUs of NVLink domain {' or '.join(domains)}"
    return [("on this host", "by file descriptors"), ("on other hosts", across)]


def _multicast(report: Report) -> list[tuple[str, str]]:
    without = [str(gpu) for gpu, has in enumerate(report.multicast) if not has]
    supported = "yes" if not without else "no" if len(without) == len(report.multicast) else f"not by GPU {without[0]}"
    off = multicast_off()
    if off:
        used = f"no: switched off by {off}; kernels loop over the peers instead"
    elif without:
        used = "no: not supported; kernels loop over the peers instead"
    elif report.ranks < 2:
        used = "no: it takes two GPUs"
    else:
        used = "if all ranks can make the object, which pkt.init finds out; it is not tried here"
    return [("supported", supported), ("used", used)]


def _gpu_table(report: Report, topology: Topology) -> Table:
    rows = []
    for index, gpu in enumerate(topology.gpus):
        needs = {"virtual memory": gpu.virtual_memory, "POSIX handles": gpu.posix_fds}
        needs["cooperative launch"] = gpu.cooperative_launch
        lacks = [name for name, has in needs.items() if not has]
        up = report.nvlinks[index]
        rows.append(
            (
                str(gpu.device), gpu.name, "{}.{}".format(*gpu.capability), str(gpu.num_sms),
                size_text(report.memory[index]), "?" if up is None else str(up),
                "yes" if gpu.fabric_handles else "no", ", ".join(lacks) or "nothing",
            )
        )  # fmt: skip
    head = ("GPU", "model", "capability", "SMs", "memory", "NVLinks up", "fabric handles", "lacks")
    return _table("GPUs", head, rows)


def _link_table(topology: Topology) -> Table:
    count = len(topology.gpus)
    rows = [(f"GPU {a}", *(topology.access(a, b) for b in range(count))) for a in range(count)]
    return _table("Peer access, with native atomics", ("", *(f"-> {b}" for b in range(count))), rows)


def _speed_table(report: Report) -> Table:
    rows = [(name, *(f"{speed:.0f}" for speed in speeds)) for name, speeds in report.speeds.items()]
    head = ("GB/s", *(f"{r} -> {(r + 1) % report.ranks}" for r in range(report.ranks)))
    return _table(f"Each rank sending {size_text(NBYTES)}", head, rows)


def _rates_table(report: Report) -> Table:
    teraflops = 2 * rates.SIDE**3 / report.rates["product"] / 1e12
    rows = [
        (f"bf16 product, {rates.SIDE} x {rates.SIDE}", f"{teraflops:.0f} TFLOP/s"),
        ("copy, read and written", f"{report.rates['memory'] / 1e9:.0f} GB/s"),
        ("out of a GPU", f"{report.rates['link'] / 1e9:.0f} GB/s"),
    ]
    return _table(f"Rates kept for the cost model, in {files.folder()}", ("", ""), rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(head))
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
