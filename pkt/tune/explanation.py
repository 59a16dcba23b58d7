"""pkt.explain: which settings an operator takes for a case, why, and what they are predicted and measured to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pkt.errors import DtypeError, PktError, ShapeError, Unsupported
from pkt.kernels.operator import Operator, operators
from pkt.model.config import NCCL, Config, nccl_wanted
from pkt.model.cost import DTYPES, Estimate, library, modelled
from pkt.model.gpu import H200, KNOWN, Gpu, gluon_lacks, gpu_named
from pkt.model.network import Network
from pkt.model.rates import gpu_here
from pkt.runtime.world import World, check_counts, current_world
from pkt.tune import cache, tables
from pkt.tune.across import Across, asked_of, check_across, check_nodes, explained
from pkt.tune.candidates import estimate, operator_space, tuned_operators
from pkt.tune.collectives import Copies, copies
from pkt.tune.prediction import check_held
from pkt.tune.printed import Printed
from pkt.tune.report import milliseconds, text_of
from pkt.tune.search import Search
from pkt.wording import count_text, dtype_text

CALL = "pkt.explain"
SIMULATED = "simulated"
OTHERS = 3
"""Forms that a reason names beside the one that is taken."""


@dataclass(frozen=True)
class Row:
    """A config in the comparison: what it stands for, the parts of its predicted time, its measured seconds; None where
    unknown."""

    names: tuple[str, ...]
    config: Config
    predicted: Estimate | None
    measured: float | None

    @property
    def total(self) -> float | None:
        return self.predicted.total if self.predicted else None


@dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """The answer of `explain`; str() gives the text that was printed.

    key: the case, with the GPU. config: the settings that the operator takes; why: the reason. rows: that config first,
    then the fastest of pkt's own forms, as measured and by the model, and NCCL + cuBLAS. limit: seconds of the product
    alone or of the bytes on the links, whichever takes longer; None without a model.
    """

    operator: Operator
    key: Mapping[str, Any]
    config: Config
    why: str
    rows: tuple[Row, ...]
    limit: float | None

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("")
        for name in ("predicted, ms", "of limit", "measured, ms", "of limit"):
            table.add_column(name, justify="right")
        for at, row in enumerate(self.rows):
            cells = [cell for time in (row.total, row.measured) for cell in self._cells(time)]
            table.add_row("\n".join(row.names), *cells, style="" if at else "bold")
        case = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return Group(Text(f"{self.operator.name}: {case}", style="bold"), table, *map(Text, self._lines()))

    def __repr__(self) -> str:
        return f"Explanation({self.operator.name}: {self.config})"

    def _cells(self, seconds: float | None) -> tuple[str, str]:
        if seconds is None:
            return "", ""
        return milliseconds(seconds), f"{self.limit / seconds:.2f}" if self.limit else ""

    def _lines(self) -> list[str]:
        """The lines below the table."""
        lines = [f"taken: {self.why}"]
        lines.append(f"settings: {text_of(self.config, [*self.config])}")
        others = [row for row in self.rows[1:] if row.config != NCCL]
        lines += [f"{row.names[0]}: {text_of(row.config, [*row.config])}" for row in others]
        lacks = gluon_lacks((9, 0))
        if lacks and "gluon" in self.operator.forms and self.key["gpu"] != SIMULATED:
            lines.append(f"the form gluon does not run here: {lacks}")
        taken = self.rows[0]
        baseline = next((row for row in self.rows if row.config == NCCL), taken)
        for how, mine, theirs in (
            ("measured", taken.measured, baseline.measured),
            ("predicted", taken.total, baseline.total),
        ):
            if mine and theirs and taken is not baseline:
                lines.append(f"NCCL + cuBLAS takes {theirs / mine:.2f} times as long, as {how}")
                break
        if not nccl_wanted():
            lines.append("NCCL + cuBLAS is not taken in any case: PKT_NCCL=0")
        if taken.predicted is None or self.limit is None:
            known = ", ".join([*KNOWN, "and GPUs that pkt doctor measured"])
            return [*lines, f"nothing predicted: the model is of {known}, in bf16 and fp16"]
        parts = {name: milliseconds(seconds) for name, seconds in vars(taken.predicted).items()}
        most = ", ".join(f"{name} {parts.pop(name)}" for name in ("compute", "memory", "communication"))
        here, nbytes = gpu_here(self.key["gpu"]), _sent(self.operator, self.key)
        alone = library(self.key, here)
        return [
            *lines,
            f"predicted, ms: launch {parts['launch']} + max({most}) + "
            f"exposed {parts['exposed']} + sync {parts['sync']} + correction {parts['correction']}",
            f"limit: {milliseconds(self.limit)} ms, of the product alone {milliseconds(alone.total)}, "
            f"{nbytes / 1e6:.4g} MB over {here.link / 1e9:.0f} GB/s {milliseconds(nbytes / here.link)}",
        ]


def explain(
    op: str | Callable[..., Any],
    *,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
    shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    size: int | None = None,
    node_size: int | None = None,
    network: str | Network = "400Gb",
    gpu: str | None = None,
) -> Explanation | Copies | Across:
    """Print which settings an operator takes where none are given, and why; their predicted and measured times; and for
    comparison pkt's fastest form and NCCL + cuBLAS. Of a collective, print which form it takes, and what symmetric
    tensors save over plain ones; over several nodes its form, and what it should take on memory, links and network.
    Needs no GPU and no world; not collective: one rank is enough.

    op: a fused product or a collective: the function, its name, or its short name, as "ag_gemm".
    M, N, K: of the product (M, K) @ (K, N) that each rank computes; for all_gather_matmul M counts the gathered rows.
    shape: of a collective's x, in place of M, N and K.
    dtype: of the operands, bf16, fp16 or fp32.
    size: the number of ranks; that of the current world, 4 where there is none.
    node_size: the ranks of a node, a divisor of `size`; those of the current world where it has that size, else all.
    network: between nodes, as pkt.tune.predict takes it.
    gpu: as torch names it; that of the current world, "NVIDIA H200" where there is none. In the simulator "simulated":
        there an operator looks nothing up, and nothing is predicted but times over nodes, of an H200.

    Returns the explanation. Raises ShapeError, DtypeError; Unsupported for an operator without a form over nodes.
    """
    world = _world()
    if size is None:
        size = 4 if world is None else world.size
    check_counts(CALL, size=size)
    if node_size is None:
        node_size = world.node_size if world is not None and world.size == size else size
    check_nodes(CALL, size, node_size)
    machine = {"gpu": H200.name} if world is None else cache.machine(world)
    found: Explanation | Copies | Across
    collective = _collective(op)
    if collective is not None and (M, N, K) != (None, None, None):
        raise ShapeError.argument(CALL, "M, N, K", (M, N, K), f"none with {collective.name}, but shape=")
    if node_size < size:
        over = H200.name if machine["gpu"] == SIMULATED else machine["gpu"]
        operator = collective or _product(op)
        check_across(CALL, operator, size, node_size)
        if collective is None:
            shape = [_asked(op, M, N, K, shape, dtype, size)[1][axis] for axis in tables.AXES]
        found = explained(asked_of(CALL, operator, shape, dtype, size, node_size, network, gpu_named(gpu or over)))
    elif collective is not None:
        multicast = world is not None and world.multicast
        found = copies(collective, shape, dtype, size, gpu_here(gpu or machine["gpu"]), multicast)
    else:
        operator, key = _asked(op, M, N, K, shape, dtype, size)
        found = _found(operator, key, machine if gpu in (None, machine["gpu"]) else {"gpu": gpu})
    found.show()
    return found


# ------------------------------------------------------------------------------------------------------------ the case
def _collective(op: Any) -> Operator | None:
    """The collective of that name, or of that function."""
    operator = operators().get(op if isinstance(op, str) else getattr(op, "__name__", ""))
    return operator if operator is not None and [*operator.tensors] == ["x"] else None


def _asked(op: Any, M: Any, N: Any, K: Any, shape: Any, dtype: Any, size: Any) -> tuple[Operator, dict[str, Any]]:
    """The operator, and the case as tables and models have it."""
    operator = _product(op)
    assert operator.tuning is not None
    if shape is not None:
        raise ShapeError.argument(CALL, "shape", repr(shape), "none with a product, but M=, N= and K=")
    check_counts(CALL, M=M, N=N, K=K)
    check_held(CALL, "M, N, K", *combinations((M, N, K), 2))
    if dtype_text(dtype) not in DTYPES:
        raise DtypeError.argument(CALL, "dtype", dtype, ", ".join(DTYPES))
    if "m" in operator.tuning.shared and M % size:
        raise ShapeError.argument(CALL, "M", M, f"rows that {size} ranks can share")
    return operator, {"M": M, "N": N, "K": K, "dtype": dtype_text(dtype), "size": size}


def _product(op: Any) -> Operator:
    """The tuned operator of that name, short name or function. Raises ShapeError."""
    name, known = op if isinstance(op, str) else getattr(op, "__name__", repr(op)), tuned_operators().values()
    operator = next((o for o in known if o.tuning and name in (o.name, o.tuning.short)), None)
    if operator is None:
        wanted = ", ".join(f"{o.name} ({o.tuning.short})" for o in known if o.tuning)
        collectives = ", ".join(name for name in operators() if _collective(name) is not None)
        raise ShapeError.argument(CALL, "op", repr(name), f"{wanted}, {collectives}")
    return operator


def _world() -> World | None:
    try:
        return current_world(CALL)
    except Unsupported:  # which says that there is none
        return None


# ---------------------------------------------------------------------------------------------------------- the answer
def _found(operator: Operator, key: dict[str, Any], machine: Mapping[str, Any]) -> Explanation:
    gpu, size = machine["gpu"], key["size"]
    times: dict[Config, float] = {}
    near = tables.near(operator, key, gpu, size)
    if near and near[1] == 0:
        times |= {
            c.config: c.time for c in near[0].candidates if c.time is not None and _runs(operator, key, gpu, c.config)
        }
    kept = None if gpu == SIMULATED else _kept(operator, key, machine)
    if kept is not None:
        times[Config.of(kept["config"])] = kept["seconds"]
    config, why = _taken(operator, key, gpu, kept)
    compared: dict[Config, list[str]] = {config: ["taken"]}
    own = [c for c in times if c != NCCL]
    if own:
        compared.setdefault(min(own, key=lambda c: times[c]), []).append("pkt's fastest measured")
    here = gpu_here(gpu)
    has_model = here.measured and modelled(key)
    if has_model:
        own_forms = [c for c in operator_space(operator, key, here) if c != NCCL]
        if own_forms:
            totals = {c: found.total for c in own_forms if (found := estimate(operator, c, key, here))}
            first = min(own_forms, key=lambda c: totals.get(c, math.inf))
            compared.setdefault(first, []).append("pkt's fastest by the model")
    if "nccl" in operator.forms:
        compared.setdefault(NCCL, []).append("NCCL + cuBLAS")
    rows = tuple(
        Row(tuple(names), c, estimate(operator, c, key, here) if has_model else None, times.get(c))
        for c, names in compared.items()
    )
    limit = max(library(key, here).total, _sent(operator, key) / here.link) if has_model else None
    return Explanation(operator, {**key, "gpu": gpu}, config, why, rows, limit)


def _kept(operator: Operator, key: dict[str, Any], machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The choice that was tuned here, unless a call would refuse it."""
    kept = cache.kept(operator.name, key, key["size"], machine)
    if kept is not None:
        call = operator.describe(key, gpu_here(machine["gpu"]))
        try:
            operator.settled(call, Config.of(kept["config"]))
        except PktError:  # the call warns
            return None
        if not _runs(operator, key, machine["gpu"], kept["config"]):
            return None
    return kept


def _runs(operator: Operator, key: Mapping[str, Any], gpu: str, config: Mapping[str, Any]) -> bool:
    """Whether the form of `config` can run a case on that GPU, with this Triton. NCCL + cuBLAS always counts."""
    form = operator.forms.get(config.get("mode", ""))
    return form is None or config["mode"] == NCCL["mode"] or not form.fits(operator.describe(key, gpu_here(gpu)))


def _taken(operator: Operator, key: dict[str, Any], gpu: str, kept: Mapping[str, Any] | None) -> tuple[Config, str]:
    """The settings that the operator takes, by the rule of pkt.tune.choice, and why."""
    if gpu == SIMULATED:
        own = Config(**operator.choose(key))
        return own, "the operator's own rule, because the simulator's clock is no measurement"
    passed = ""
    if kept is not None:
        config = Config.of(kept["config"])
        if config != NCCL or nccl_wanted():
            day = f" on {kept['date']}" if "date" in kept else ""
            return config, f"tuned on this machine{day}: {milliseconds(kept['seconds'])} ms"
        passed = "NCCL + cuBLAS was tuned here and is off; "
    tabled, near = tables.nearest(operator, key, gpu, key["size"]), tables.near(operator, key, gpu, key["size"])
    if tabled is not None and near is not None and _runs(operator, key, gpu, tabled):
        search, distance = near
        shape = ", ".join(f"{axis}={search.key[axis]}" for axis in tables.AXES)
        doublings = count_text(f"{distance:.2g}", "doubling")
        there = f"the nearest shape, {shape}, {doublings} away" if distance else "this shape"
        source = tables.source(operator, search.key)
        if distance:
            first = "the fastest to expect from what was"
        else:
            first = "the fastest" if tabled == search.best else "the fastest that this case can take,"
        where = f"{source['file']} of commit {source['commit']}, {source['date']}"
        return tabled, f"{passed}{first} measured for {there}, {where}{_measured(search, tabled, distance)}"
    here = gpu_here(gpu)
    own = Config(**operator.choose(key, here))
    return own, passed + reason(operator, key, here, own["mode"])


def reason(operator: Operator, key: Mapping[str, Any], gpu: Gpu, mode: str) -> str:
    """Why an operator takes the form `mode` by its own rule, in a sentence."""
    found, call = operator.forecast(key, gpu), operator.describe(key, gpu)
    others = [name for name in found.seconds if name != mode and not operator.forms[name].fits(call)][:OTHERS]
    if mode not in found.seconds:
        return f"{mode}: nothing is predicted for its forms"
    if not modelled(key) or not gpu.measured:
        return f"{mode}, the safe form: {found.doubt}"
    times = ", ".join(f"{name} {spoken(found.seconds[name])}" for name in others)
    said = f"{mode}: predicted {spoken(found.seconds[mode])}" + (f"; {times}" if times else "")
    return f"{said}; {found.doubt}" if found.doubt else said


def _measured(search: Search, config: Config, distance: float) -> str:
    """The measured times behind a choice for a shape that was measured: of the form, and of the fastest others."""
    times: dict[str, float] = {}
    for candidate in search.candidates:
        if not distance and candidate.time is not None:
            times.setdefault(candidate.config["mode"], candidate.time)
    if config["mode"] not in times:
        return ""
    others = [f"{mode} {spoken(seconds)}" for mode, seconds in times.items() if mode != config["mode"]]
    return f": {config['mode']} {spoken(times[config['mode']])}; " + ", ".join(others[:OTHERS])


def spoken(seconds: float) -> str:
    """Such as "94 us" or "2.31 ms"."""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def _sent(operator: Operator, key: Mapping[str, Any]) -> float:
    assert operator.tuning is not None
    return operator.tuning.sent(key)
