"""Over several nodes: pkt.explain for a collective there, and the search of `pkt tune`.

Nothing over several nodes has been measured. So an explanation has predicted times (`pkt.tune.prediction`), and a
search has those of the simulator's modelled clock, each result compared with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pkt.errors import ShapeError, Unsupported
from pkt.kernels.operator import Operator, named
from pkt.model.config import Config
from pkt.model.cost import DTYPES
from pkt.model.gpu import H200, Gpu
from pkt.model.network import Network, TwoLinks
from pkt.runtime.memory.factories import empty
from pkt.runtime.world import World
from pkt.tune.distance import agrees_with
from pkt.tune.prediction import Asked, asked
from pkt.tune.printed import Printed
from pkt.tune.report import text_of
from pkt.tune.search import Model, Search
from pkt.tune.tuner import tune

MOST_ELEMENTS = 1 << 17
"""Of all ranks' x together: a search in the simulator then takes some seconds."""


@dataclass(frozen=True)
class Row:
    """Settings in the comparison: what they stand for, and the parts of their predicted time; None where unknown."""

    names: tuple[str, ...]
    config: Config
    predicted: TwoLinks | None


@dataclass(frozen=True, repr=False)
class Across(Printed):
    """The answer of `explain` for a call over several nodes; str() gives the text that was printed.

    key: the case. config: what the operator takes where nothing is given; why: the reason. rows: that config first,
    then the one with the least predicted time. All times are predicted, and none was held against a measurement.
    """

    operator: Operator
    key: Mapping[str, Any]
    config: Config
    why: str
    rows: tuple[Row, ...]

    def __rich__(self) -> Group:
        parts = [_parts(row.predicted) for row in self.rows if row.predicted is not None]
        names = [*parts[0]] if parts else []
        table = Table()
        table.add_column("predicted, ms", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for at, row in enumerate(self.rows):
            found = {} if row.predicted is None else _parts(row.predicted)
            cells = [found.get(name, "") for name in names]
            table.add_row("\n".join(row.names), *cells, style="" if at else "bold")
        case = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return Group(Text(f"{self.operator.name}: {case}", style="bold"), table, *map(Text, self._lines()))

    def __repr__(self) -> str:
        return f"Across({self.operator.name}: {self.config})"

    def _lines(self) -> list[str]:
        """The lines below the table."""
        p, form = self.rows[0].predicted, self.operator.across[self.config["mode"]]
        lines = [f"taken: {self.why}", f"bytes that leave a rank: {form.moves}; N nodes, W ranks"]
        lines += [f"{row.names[0]}: {text_of(row.config, [*row.config])}" for row in self.rows[1:]]
        if p is None:
            return [*lines, f"nothing is predicted for this form in {self.key['dtype']}"]
        kinds = _longest(p)
        slowest = max(kinds, key=lambda name: kinds[name])
        return [
            *lines,
            f"in all: the longest of {', '.join(kinds)}, here {slowest}; then exposed, launch, sync",
            f"predicted, not measured: rates of {H200.name}, a network at its line rate, assumed latencies",
        ]


def _longest(p: TwoLinks) -> dict[str, float]:
    """The parts that happen at the same time."""
    kinds = {"network": p.network, "links": p.node, "waits": p.waits, "memory": p.memory}
    return {"compute": p.compute, **kinds} if p.compute else kinds


def _parts(p: TwoLinks) -> dict[str, str]:
    """The columns of a predicted time: seconds in ms, and the limit as a share."""
    times = {**_longest(p), "exposed": p.exposed, "launch, sync": p.launch + p.sync}
    whole = {"in all": f"{1e3 * p.total:.3g}", "of limit": f"{p.limit / p.total:.2f}"}
    return whole | {name: f"{1e3 * time:.3g}" for name, time in times.items()}


def explained(case: Asked) -> Across:
    """Which form and settings are taken over several nodes where nothing is given, and why."""
    taken = Config(mode=case.mode)
    compared: dict[Config, list[str]] = {taken: ["taken"]}
    times = {config: found.total for config in case.space() if (found := case.predicted(config)) is not None}
    if times:
        compared.setdefault(min(times, key=lambda config: times[config]), []).append("fastest predicted")
    near, size = case.case["node_size"], case.case["size"]
    others = ", ".join(mode for mode in case.operator.across if mode != case.mode)
    why = f"{case.mode}, the form for {size // near} nodes of {near}: {case.form.how}"
    why += f"; on request {others}" if others else ""
    rows = tuple(Row(tuple(names), config, case.predicted(config)) for config, names in compared.items())
    return Across(case.operator, {**case.case, "gpu": case.gpu.name}, taken, why, rows)


def asked_of(
    call: str, operator: Operator, shape: Any, dtype: Any, size: int, node_size: int, network: str | Network, gpu: Gpu
) -> Asked:
    """The case, by the number of ranks. shape: as pkt.tune.predict has it. Raises ShapeError, DtypeError; Unsupported
    for an operator that has no form over nodes."""
    check_across(call, operator, size, node_size)
    if shape is None:
        raise ShapeError.argument(call, "shape", "None", f"the shape of x of {operator.name}, as in (4096, 8192)")
    return asked(call, operator, shape, size // node_size, node_size, network, dtype, gpu)


def model_of(case: Asked) -> Model:
    """Predicted seconds of a config in that case."""

    def predicted(config: Config, key: Mapping[str, Any]) -> float | None:
        parts = case.predicted(config)
        return None if parts is None else parts.total

    return predicted


def check_across(call: str, operator: Operator, size: int, node_size: int) -> None:
    """Raise Unsupported for an operator that has no form over nodes, or that is neither a collective nor a product;
    ShapeError unless they are whole nodes."""
    check_nodes(call, size, node_size)
    if not operator.across:
        found = f"found {size // node_size} nodes, and {operator.name} works within one"
        remedy = "give it world=world.on_node; docs/scale-out.md lists the operators that work over nodes"
        raise Unsupported.here(call, found, remedy)
    if operator.tuning is None and [*operator.tensors] != ["x"]:
        remedy = "give a collective or a product; docs/scale-out.md says what the others send"
        raise Unsupported.here(call, f"found {operator.name}, and nothing predicts it over nodes", remedy)


def check_nodes(call: str, size: int, node_size: Any) -> None:
    """Raise ShapeError unless `size` ranks make whole nodes of `node_size`."""
    if type(node_size) is not int or node_size < 1 or size % node_size:
        raise ShapeError.argument(call, "node_size", repr(node_size), f"a divisor of {size}, the number of ranks")


# ------------------------------------------------------------------------------------------------------- the search
@dataclass(frozen=True)
class Collective:
    """A collective of x of a shape over nodes of `node_size` ranks, for `pkt tune`; None: nobody gave a shape."""

    what: str
    shape: tuple[int, ...] | None
    dtype: str
    node_size: int
    network: str

    def asked(self, ranks: int, gpu: Gpu = H200) -> Asked:
        """Raises ShapeError, DtypeError, Unsupported."""
        operator = named(self.what)
        assert operator is not None
        return asked_of("pkt tune", operator, self.shape, self.dtype, ranks, self.node_size, self.network, gpu)

    def key(self, ranks: int) -> dict[str, Any]:
        """The case of the search. Raises as `asked`, and ShapeError where it is too large for a simulator."""
        case = self.asked(ranks)
        if ranks * math.prod(case.shape) > MOST_ELEMENTS:
            wanted = (
                f"at most {MOST_ELEMENTS} elements on all ranks together, because the simulator computes every "
                f"candidate; pkt explain {self.what} --node-size {self.node_size} predicts the time of larger ones"
            )
            raise ShapeError.argument("pkt tune", "--shape", self.shape, wanted)
        return dict(case.case)


def search(world: World, layer: Collective) -> tuple[Search, str]:
    """Search for `layer` on the ranks of `world`, on the simulator's clock; also the name of the GPU. Collective. The
    operator does not take the choice by itself: give the settings in the call."""
    case, operator = layer.asked(world.size, replace(H200, sms=world.num_sms)), named(layer.what)
    assert operator is not None
    dtype = DTYPES[layer.dtype]
    seeds = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    everybody = [torch.randn(case.shape, generator=seed).to(dtype) for seed in seeds]
    exact = operator.reference(world.rank, x=everybody).float()
    x = empty(*case.shape, dtype=dtype, world=world)  # symmetric, because peers read it in some forms
    x.copy_(everybody[world.rank])

    found = tune(
        operator.function, x, world=world, configs=case.space(), key=layer.key(world.size), name=operator.name,
        model=model_of(case), check=agrees_with(exact, dtype), restore=["x"], most=1.0,
    )  # fmt: skip
    return found, world.backend.gpu
