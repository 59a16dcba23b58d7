"""`pkt tune`: searches for the fastest settings of pkt's operators, keeps them, and shows what was found."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from pkt.errors import PktError, ShapeError, Unsupported
from pkt.kernels.operator import Operator, named, operators
from pkt.launcher import launch
from pkt.model.config import NCCL, UNFUSED, Config
from pkt.model.cost import DTYPES, modelled
from pkt.model.gpu import H200, Gpu, gluon_lacks
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World
from pkt.tune import across, cache, tables
from pkt.tune.across import Collective
from pkt.tune.candidates import model_of, operator_space, thinned, tuned_operators
from pkt.tune.distance import agrees_with
from pkt.tune.prediction import Asked, predictable
from pkt.tune.report import report
from pkt.tune.search import MOST, Model, Search, slots
from pkt.tune.tuner import tune
from pkt.wording import columns, count_text

ALIKE = 3
"""Most candidates of one predicted time that are tried."""
SIMULATED_SIZES = (64, 128)
SIMULATED_MOST = 256**3
"""Largest m * n * k: a search then takes some seconds."""
SIMULATED_SMS = 8
HEAP = {"cuda": "60GiB", "cpu": "64MiB"}


@dataclass(frozen=True)
class Layer:
    """A product (m, k) @ (k, n) whose operands the ranks share, for the operator named `what`. node_size, network: over
    several nodes; None: over one."""

    what: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    node_size: int | None = None
    network: str = "400Gb"

    @property
    def operator(self) -> Operator:
        operator = named(self.what)
        assert operator is not None
        return operator

    def key(self, ranks: int) -> dict[str, Any]:
        """The case of the search: the product that each rank computes. Raises ShapeError if the ranks cannot share."""
        tuning = self.operator.tuning
        assert tuning is not None
        for name, length in {"m": self.m, "n": self.n, "k": self.k}.items():
            step = ranks if name in tuning.shared else 1
            if length < 1 or length % step:
                wanted = f"at least 1 and divisible by {step} ranks" if step > 1 else "at least 1"
                raise ShapeError.argument("pkt tune", name, length, wanted)
        N, K = (length // (ranks if name in tuning.shared else 1) for name, length in (("n", self.n), ("k", self.k)))
        key = {"M": self.m, "N": N, "K": K, "dtype": self.dtype, "size": ranks}
        return key if self.node_size is None else key | {"node_size": self.node_size, "network": self.network}

    def asked(self, ranks: int, gpu: Gpu = H200) -> Asked:
        """The case over several nodes. Raises ShapeError, and Unsupported where the operator has no form there."""
        key = self.key(ranks)
        shape, near = [key[axis] for axis in tables.AXES], self.node_size or ranks
        return across.asked_of("pkt tune", self.operator, shape, self.dtype, ranks, near, self.network, gpu)


# ----------------------------------------------------------------------------------------------------------- on a rank
def search_layer(world: World, layer: Layer, exhaustive: bool = False) -> tuple[Search, str]:
    """Search for `layer` on the ranks of `world`, and remember the choice; also the name of the GPU. exhaustive:
    measure the whole space. Collective."""
    operator, key, dtype = layer.operator, layer.key(world.size), DTYPES[layer.dtype]
    configs, model, most = _candidates(world, layer, exhaustive)
    call = operator.describe(key)
    everybody = [_operands(operator, call.tensors, world, rank) for rank in range(world.size)]
    operands = everybody[world.rank]
    together = {name: [theirs[name] for theirs in everybody] for name in operands}
    exact = operator.reference(world.rank, **together).float()
    del everybody, together

    # Symmetric, because some forms can then reduce in place.
    operands["out"] = empty(*call.shape, dtype=dtype, world=world)
    given = [operands[name] for name in operator.names if name in operands]
    search = tune(
        operator.function, *given, world=world, configs=configs, key=key, name=operator.name, model=model,
        check=agrees_with(exact, dtype), most=most,
    )  # fmt: skip
    return search, cache.machine(world)["gpu"]


def _candidates(world: World, layer: Layer, exhaustive: bool) -> tuple[Sequence[Config], Model | None, float]:
    """What is searched, the model that leads the search, and the share that is measured. Collective."""
    key, cuda, gpu = layer.key(world.size), world.torch_device.type == "cuda", _gpu(world)
    configs: Sequence[Config]
    model: Model | None
    if world.nodes > 1:
        case = layer.asked(world.size, gpu)
        configs, model = case.space(), across.model_of(case)
    else:
        configs = operator_space(layer.operator, key, gpu)
        model = model_of(layer.operator) if cuda and modelled(key) else None
    if exhaustive:
        return configs, model, 1.0
    if not cuda:  # the modelled clock knows nothing of warps and stages, of NCCL and of cuBLAS
        configs = [c for c in configs if c not in (NCCL, UNFUSED) and c.get("tiles", (8, 3))[-2:] == (8, 3)]
    elif model is not None:
        shorter, most = shortlist(configs, model, key)
        return shorter, model, most
    return configs, model, MOST


def _gpu(world: World) -> Gpu:
    """A GPU with as much as every rank's has, so that all ranks have one space. Collective."""
    shared, gluon = H200.shared, False
    if world.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.torch_device)
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        gluon = not gluon_lacks((properties.major, properties.minor))
    least, everywhere = (min(of) for of in zip(*world.all_gather_object((shared, gluon))))
    return replace(H200, sms=world.num_sms, shared=least, gluon=everywhere)


def shortlist(configs: Sequence[Config], model: Model, key: Mapping[str, Any]) -> tuple[list[Config], float]:
    """The candidates of a search that the model leads, and the share of them that is measured: as many as `slots` says
    of the whole space."""
    kept = thinned(configs, model, key, ALIKE)
    return kept, min(1.0, slots(len(configs), MOST) / len(kept))


def _operands(operator: Operator, like: Mapping[str, torch.Tensor], world: World, rank: int) -> dict[str, torch.Tensor]:
    """The operands of `rank`, standard normal, the same on whichever rank they are made. like: of their shapes."""
    made, names = {}, [name for name in operator.tensors if like[name] is not None]
    for at, name in enumerate(names):
        source = torch.Generator(world.torch_device).manual_seed(len(names) * rank + at)
        shape, dtype = like[name].shape, like[name].dtype
        made[name] = torch.randn(shape, dtype=dtype, device=world.torch_device, generator=source)
    return made


# ------------------------------------------------------------------------------------------------------------- command
def main(
    operator: Annotated[str, typer.Argument(help="the operator's name, or its short one, as ag_gemm")] = "",
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="GPUs, or simulated ranks")] = 4,
    m: Annotated[int, typer.Option(help="rows of the whole product", show_default=False)] = 0,
    n: Annotated[int, typer.Option(help="columns of the whole product", show_default=False)] = 0,
    k: Annotated[int, typer.Option(help="what is summed over, on all ranks", show_default=False)] = 0,
    shape: Annotated[str | None, typer.Option(help="of a collective's x, over several nodes: 4096 or 64x32")] = None,
    node_size: Annotated[int | None, typer.Option(min=1, help="ranks of a node; all where left out")] = None,
    network: Annotated[str, typer.Option(help="between nodes, for the prediction")] = "400Gb",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    every: Annotated[bool, typer.Option("--all", help="every operator, at its benchmark's sizes")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the simulator, small, on a modelled clock")] = "cuda",
    out: Annotated[Path, typer.Option(help="folder for the table of each operator")] = Path("tuned"),
) -> None:
    """Search for the fastest settings of an operator on this machine, and remember them for pkt.tune.choice.

    Without --m, --n and --k all sizes of the operator's benchmark. With --node-size a collective over several nodes, in
    the simulator. Exit status 1 if a search could not be made, 130 after Ctrl-C, which keeps the best so far.
    """
    layers: Sequence[Layer | Collective]
    if node_size is None or node_size == ranks:
        if shape is not None:
            raise typer.BadParameter("--shape is for a collective over several nodes, with --node-size")
        layers = _layers(operator, every, m, n, k, dtype, device)
    else:
        layers = [_over_nodes(operator, every, (m, n, k), shape, ranks, node_size, network, dtype, device)]
    _check_folder(out)
    console = Console(width=columns(120))
    found: dict[str, list[Search]] = {}
    gpu = ""
    for layer in layers:
        layer.key(ranks)  # raises for sizes that the ranks cannot share: all of them before the first search
    try:
        for layer in layers:
            search, gpu = _searched(layer, ranks, device)
            found.setdefault(layer.what, []).append(search)
            console.print(report(search))
            if device == "cpu":
                console.print("measured: on the simulator's modelled clock")
            if search.interrupted:
                break
    except PktError as error:
        typer.echo(str(error), err=True)
    written = True
    for what, searches in found.items():
        try:
            console.print(f"written: {write(out, what, searches, gpu)}")
        except OSError as error:
            written = False
            typer.echo(f"the table of {what} cannot be written: {error}", err=True)
    if any(search.interrupted for searches in found.values() for search in searches):
        raise typer.Exit(130)
    raise typer.Exit(0 if written and sum(map(len, found.values())) == len(layers) else 1)


def _check_folder(out: Path) -> None:
    """Raise typer.BadParameter, before a search is made for nothing, where no table can be written into `out`."""
    there = next(folder for folder in (out, *out.absolute().parents) if os.path.exists(folder))
    try:
        os.lstat(out)
        fits = True
    except (FileNotFoundError, NotADirectoryError):
        fits = True
    except (OSError, ValueError):  # a name that no folder can have
        fits = False
    if not fits or not there.is_dir() or not os.access(there, os.W_OK):
        raise typer.BadParameter(f"found --out {out}, wanted a folder that can be written")


def _layers(operator: str, every: bool, m: int, n: int, k: int, dtype: str, device: str) -> list[Layer]:
    """The layers to search for. Raises typer.BadParameter for a command line that means nothing."""
    if device not in HEAP:
        raise typer.BadParameter(f"found --device {device!r}, wanted cuda or cpu")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"found --dtype {dtype!r}, wanted {', '.join(DTYPES)}")
    known = tuned_operators()
    shorts = {o.tuning.short: name for name, o in known.items() if o.tuning}
    if bool(operator) == every:
        raise typer.BadParameter(f"wanted an operator, {', '.join(shorts)}, or --all")
    whats = list(known) if every else [shorts.get(operator, operator)]
    if not set(whats) <= set(known):
        wanted = ", ".join(f"{short} ({full})" for short, full in shorts.items())
        raise typer.BadParameter(f"found operator {operator!r}, wanted {wanted}")
    if m or n or k:
        if every or not (m and n and k):
            raise typer.BadParameter("--m, --n and --k go together, with one operator")
        _check_simulated((m, n, k), device)
        return [Layer(whats[0], m, n, k, dtype)]
    layers = [Layer(what, N, N, N, dtype) for what in whats for N in sizes(known[what], device)]
    if not layers:
        raise typer.BadParameter(f"wanted --m, --n and --k: {', '.join(whats)} has no table with sizes")
    return layers


def _check_simulated(sizes: Sequence[int], device: str) -> None:
    """Raise typer.BadParameter for a product that takes a simulator too long."""
    if device == "cpu" and math.prod(sizes) > SIMULATED_MOST:
        found = " ".join(f"--{name} {length}" for name, length in zip("mnk", sizes))
        raise typer.BadParameter(
            f"found {found}, wanted m * n * k up to {SIMULATED_MOST} with --device cpu: "
            "the simulator computes every candidate"
        )


def _over_nodes(
    operator: str, every: bool, sizes: Sequence[int], shape: str | None, ranks: int, node_size: int, network: str,
    dtype: str, device: str,
) -> Layer | Collective:  # fmt: skip
    """What to search for over several nodes. Raises typer.BadParameter for a command line that means nothing, and
    Unsupported for what does not run there."""
    known = named(operator) if operator else None
    product = known is not None and known.tuning is not None
    wrong = every or bool(shape) == product or any(sizes) != product or (product and not all(sizes))
    if not operator or dtype not in DTYPES or wrong:
        raise typer.BadParameter(
            f"wanted with --node-size: a collective and --shape, or a product and --m, --n and --k; --dtype "
            f"{', '.join(DTYPES)}"
        )  # fmt: skip
    if known is None:
        wanted = ", ".join(name for name, each in operators().items() if predictable(each))
        raise typer.BadParameter(f"found operator {operator!r}, wanted one with a form over nodes: {wanted}")
    layer: Layer | Collective
    if product:
        m, n, k = sizes
        layer = Layer(known.name, m, n, k, dtype, node_size, network)
        _check_simulated(sizes, device)
    else:
        layer = Collective(known.name, shape_of("pkt tune", shape), dtype, node_size, network)
    case = layer.asked(ranks)  # raises for what no machine runs, before what this one lacks
    if device != "cpu":
        raise Unsupported.here(
            f"pkt tune {operator} over nodes", "its search runs in the simulator only",
            "--device cpu searches on its modelled clock, and pkt explain predicts",
        )  # fmt: skip
    if not case.space():
        found = f"found no settings to search in its form {case.mode!r}"
        raise Unsupported.here(f"pkt tune {operator} over nodes", found, "pkt explain predicts its time")
    return layer


def shape_of(call: str, text: str | None) -> tuple[int, ...] | None:
    """The lengths of a shape, of "4096x8192". Raises ShapeError."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ShapeError.argument(call, "--shape", repr(text), "lengths, as in 4096x8192")
    return tuple(int(length) for length in text.split("x"))


def sizes(operator: Operator, device: str = "cuda") -> Sequence[int]:
    """The sizes of the operator's table, or those that a simulator computes in seconds."""
    return SIMULATED_SIZES if device == "cpu" else sorted({search.key["M"] for search in tables.measured(operator)})


def _searched(layer: Layer | Collective, ranks: int, device: str) -> tuple[Search, str]:
    """The search for one layer, in a world of its own, whose buffers end with it."""
    if isinstance(layer, Collective):
        return launch(
            across.search, ranks, "cpu", (layer,), node_size=layer.node_size, heap=HEAP["cpu"], sms=SIMULATED_SMS
        )[0]  # fmt: skip
    if device == "cpu":
        near = layer.node_size
        return launch(search_layer, ranks, "cpu", (layer,), node_size=near, heap=HEAP[device], sms=SIMULATED_SMS)[0]
    found = torch.cuda.device_count()
    if found < ranks:
        raise Unsupported.here(
            f"{layer.what} on {count_text(ranks, 'rank')}",
            f"found {count_text(found, 'GPU')}",
            "--device cpu searches on the simulator's clock",
        )
    return launch(search_layer, ranks, "cuda", (layer,), heap=HEAP[device])[0]


def write(out: Path, what: str, searches: Sequence[Search], gpu: str) -> Path:
    """Write the table, in the form of those that ship with pkt; returns its file."""
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
    written = out / f"{what}.json"
    written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return written
