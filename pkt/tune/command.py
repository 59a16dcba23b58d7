"""`pkt tune`: searches for the fastest settings of pkt's operators, keeps them, and shows what was found.

The operators are loaded by name when a search runs.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from pkt.errors import PktError, ShapeError, Unsupported
from pkt.launcher import launch
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World
from pkt.tune import cache, tables
from pkt.tune.config import NCCL, UNFUSED, Config
from pkt.tune.explanation import DTYPES, NAMES
from pkt.tune.gpu import H200
from pkt.tune.model import MODELS
from pkt.tune.picture import draw
from pkt.tune.report import report
from pkt.tune.search import MOST, Model, Search, slots
from pkt.tune.spaces import operator_space, thinned
from pkt.tune.tuner import tune

ALIKE = 3
"""Candidates of one predicted time that are tried."""
SIMULATED_SIZES = (64, 128)
SIMULATED_MOST = 256**3
"""m * n * k: some seconds a search."""
SIMULATED_SMS = 8
HEAP = {"cuda": "60GiB", "cpu": "64MiB"}
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Greatest ||result - exact|| / ||exact||: roundings stay far below, a tile that is wrong or late is far above."""


@dataclass(frozen=True)
class Layer:
    """A product (m, k) @ (k, n) whose operands the ranks share."""

    what: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"

    def key(self, ranks: int) -> dict[str, Any]:
        """The case of the search: the product that each rank computes. Raises ShapeError if the ranks cannot share."""
        gathered = self.what == "all_gather_matmul"
        shared = {"n": self.n} if gathered else {"k": self.k}
        if self.what != "matmul_all_reduce":
            shared["m"] = self.m
        for name, length in {"m": self.m, "n": self.n, "k": self.k}.items():
            step = ranks if name in shared else 1
            if length < 1 or length % step:
                wanted = f"at least 1 and divisible by {step} ranks" if step > 1 else "at least 1"
                raise ShapeError.argument("pkt tune", name, length, wanted)
        N, K = (self.n // ranks, self.k) if gathered else (self.n, self.k // ranks)
        return {"M": self.m, "N": N, "K": K, "dtype": self.dtype, "size": ranks}


# ----------------------------------------------------------------------------------------------------------- on a rank
def search_layer(world: World, layer: Layer, exhaustive: bool = False) -> tuple[Search, str]:
    """Search for `layer` on the ranks of `world`, and remember the choice; also the name of the GPU. exhaustive:
    measure the whole space. Collective."""
    key, dtype = layer.key(world.size), DTYPES[layer.dtype]
    cuda = world.torch_device.type == "cuda"
    shared = H200.shared
    if cuda:
        properties = torch.cuda.get_device_properties(world.torch_device)
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    everybody = world.all_gather_object((world.num_sms, shared))  # what fits on every rank: all have one space
    gpu = replace(H200, sms=min(sms for sms, _ in everybody), shared=min(nbytes for _, nbytes in everybody))
    unfit = importlib.import_module("pkt.kernels.shared.gluon_fits").missing_anywhere(world)
    configs, most = operator_space(layer.what, key, gpu, gluon=not unfit), MOST
    model = MODELS[layer.what] if cuda and dtype != torch.float32 else None
    if exhaustive:
        most = 1.0
    elif model is not None:
        configs, most = shortlist(configs, model, key)
    elif not cuda:  # whose clock is another, and knows nothing of warps and stages, of NCCL and of cuBLAS
        configs = [c for c in configs if c not in (NCCL, UNFUSED) and c["tiles"][4:] == (8, 3)]
    a, b = _operands(layer, key, world, world.rank, dtype)
    exact = _exact(layer, key, world, b, dtype)
    norm = exact.norm()

    def right(arguments: Mapping[str, Any], result: torch.Tensor) -> bool:
        return bool((result.float() - exact).norm() <= BOUND[dtype] * norm)

    operator = getattr(importlib.import_module(f"pkt.kernels.{layer.what}"), layer.what)
    out = None
    if layer.what == "matmul_all_reduce":  # which is reduced in place where that is symmetric
        out = empty(key["M"], key["N"], dtype=dtype, world=world)
    search = tune(
        operator, a, b, out, world=world, configs=configs, key=key, name=layer.what, model=model, check=right, most=most
    )
    return search, cache.machine(world)["gpu"]


def shortlist(configs: Sequence[Config], model: Model, key: Mapping[str, Any]) -> tuple[list[Config], float]:
    """The candidates of a search that the model leads, and the share of them that is measured: of the whole space as
    much as `slots` says."""
    kept = thinned(configs, model, key, ALIKE)
    return kept, min(1.0, slots(len(configs), MOST) / len(kept))


def _operands(
    layer: Layer, key: Mapping[str, Any], world: World, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of `rank`, standard normal, the same on whichever rank they are made."""
    rows = key["M"] // world.size if layer.what == "all_gather_matmul" else key["M"]
    made = []
    for seed, shape in ((2 * rank, (rows, key["K"])), (2 * rank + 1, (key["K"], key["N"]))):
        source = torch.Generator(world.torch_device).manual_seed(seed)
        made.append(torch.randn(shape, dtype=dtype, device=world.torch_device, generator=source))
    return made[0], made[1]


def _exact(layer: Layer, key: Mapping[str, Any], world: World, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """This rank's result, in fp32, from the operands of all ranks."""
    if layer.what == "all_gather_matmul":
        shards = (_operands(layer, key, world, rank, dtype)[0] for rank in range(world.size))
        return torch.cat([shard.float() @ b.float() for shard in shards])
    total: Any = 0
    for rank in range(world.size):
        x, y = _operands(layer, key, world, rank, dtype)
        x = x.chunk(world.size)[world.rank] if layer.what == "matmul_reduce_scatter" else x
        total = total + x.float() @ y.float()
    return total


# ------------------------------------------------------------------------------------------------------------- command
def main(
    operator: Annotated[str, typer.Argument(help="ag_gemm, gemm_rs or gemm_ar, or the operator's full name")] = "",
    ranks: Annotated[int, typer.Option(help="GPUs, or simulated ranks")] = 4,
    m: Annotated[int, typer.Option(help="rows of the whole product", show_default=False)] = 0,
    n: Annotated[int, typer.Option(help="columns of the whole product", show_default=False)] = 0,
    k: Annotated[int, typer.Option(help="what is summed over, on all ranks", show_default=False)] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    every: Annotated[bool, typer.Option("--all", help="every operator, at its benchmark's sizes")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the simulator, small, on a modelled clock")] = "cuda",
    out: Annotated[Path, typer.Option(help="folder for the table and the picture of each operator")] = Path("tuned"),
) -> None:
    """Search for the fastest settings of an operator on this machine, and remember them for pkt.tune.choice.

    Without --m, --n and --k all sizes of the operator's benchmark. Exit status 1 if a search could not be made, 130
    after Ctrl-C, which keeps the best so far.
    """
    layers = _layers(operator, every, m, n, k, dtype, device)
    console = Console(width=None if sys.stdout.isatty() else 120)
    found: dict[str, list[Search]] = {}
    gpu = ""
    try:
        for layer in layers:
            layer.key(ranks)  # all of them before the first search
        for layer in layers:
            search, gpu = _searched(layer, ranks, device)
            found.setdefault(layer.what, []).append(search)
            console.print(report(search))
            if search.interrupted:
                break
    except PktError as error:
        typer.echo(str(error), err=True)
    for what, searches in found.items():
        for path in write(out, what, searches, gpu):
            console.print(f"written: {path}")
    if any(search.interrupted for searches in found.values() for search in searches):
        raise typer.Exit(130)
    raise typer.Exit(0 if sum(map(len, found.values())) == len(layers) else 1)


def _layers(operator: str, every: bool, m: int, n: int, k: int, dtype: str, device: str) -> list[Layer]:
    """What to search for; raises typer.BadParameter for what the command line cannot mean."""
    if device not in HEAP:
        raise typer.BadParameter(f"found --device {device!r}, wanted cuda or cpu")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"found --dtype {dtype!r}, wanted {', '.join(DTYPES)}")
    if bool(operator) == every:
        raise typer.BadParameter(f"wanted an operator, {', '.join(NAMES)}, or --all")
    whats = list(MODELS) if every else [NAMES.get(operator, operator)]
    if not set(whats) <= set(MODELS):
        known = ", ".join(f"{short} ({full})" for short, full in NAMES.items())
        raise typer.BadParameter(f"found operator {operator!r}, wanted {known}")
    if m or n or k:
        if every or not (m and n and k):
            raise typer.BadParameter("--m, --n and --k go together, with one operator")
        if device == "cpu" and m * n * k > SIMULATED_MOST:
            raise typer.BadParameter(
                f"found --m {m} --n {n} --k {k}, wanted m * n * k up to {SIMULATED_MOST} with --device cpu: "
                "the simulator computes every candidate"
            )
        return [Layer(whats[0], m, n, k, dtype)]
    return [Layer(what, N, N, N, dtype) for what in whats for N in _sizes(what, device)]


def _sizes(what: str, device: str) -> Sequence[int]:
    """Those of the operator's benchmark, or what a simulator computes in seconds."""
    return SIMULATED_SIZES if device == "cpu" else sorted({search.key["M"] for search in tables.measured(what)})


def _searched(layer: Layer, ranks: int, device: str) -> tuple[Search, str]:
    """The search for one layer, in a world of its own, whose buffers end with it."""
    if device == "cpu":
        return launch(search_layer, ranks, "cpu", (layer,), heap=HEAP[device], sms=SIMULATED_SMS)[0]
    found = torch.cuda.device_count()
    if found < ranks:
        raise Unsupported.here(
            f"{layer.what} on {ranks} ranks", f"found {found} GPUs", "--device cpu searches on the simulator's clock"
        )
    return launch(search_layer, ranks, "cuda", (layer,), heap=HEAP[device])[0]


def write(out: Path, what: str, searches: Sequence[Search], gpu: str) -> list[Path]:
    """The table, as those that ship with pkt, and where matplotlib is there the picture; what was written."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "operator": what,
        "gpu": gpu,
        "sources": [
            {
                "ranks": searches[0].key["size"],
                "file": "pkt tune",
                "date": datetime.date.today().isoformat(),
                "versions": {"torch": torch.__version__},
            }
        ],
        "entries": [tables.entry(search) for search in searches],
    }
    written = [out / f"{what}.json"]
    written[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if any("num_comm_sms" in c.config and c.time for search in searches for c in search.candidates):
        try:
            figure = draw(searches, title=f"{what} on {searches[0].key['size']} x {gpu}")
        except ImportError as error:
            typer.echo(f"no picture: {error}", err=True)
        else:
            written.append(out / f"{what}.png")
            figure.savefig(written[-1])
    return written
