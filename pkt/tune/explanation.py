"""pkt.explain: which settings an operator takes for a case, why, and what they are predicted and measured to take."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.runtime.world import World, current_world
from pkt.tune import cache, tables
from pkt.tune.config import NCCL, Config, nccl_wanted
from pkt.tune.gpu import H200
from pkt.tune.model import ITEMSIZE, MODELS, Estimate, estimate, product_alone, sent
from pkt.tune.report import milliseconds, text_of
from pkt.tune.spaces import gluon_fits, operator_space
from pkt.wording import dtype_text

CALL = "pkt.explain"
NAMES = {"ag_gemm": "all_gather_matmul", "gemm_rs": "matmul_reduce_scatter", "gemm_ar": "matmul_all_reduce"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SM_90 = re.compile(r"\bG?H(20|100|200|800)\b")
SIMULATED = "simulated"


@dataclass(frozen=True)
class Row:
    """Settings, what they are in the comparison, their predicted parts and measured seconds; None where unknown."""

    names: tuple[str, ...]
    config: Config
    predicted: Estimate | None
    measured: float | None


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found. str() is what it printed.

    key: the case, with the GPU. config: the settings that the operator takes, and why. rows: these first, then the
    fastest of pkt's own forms, as measured and by the model, and NCCL + cuBLAS. limit: seconds that the product alone
    or the bytes on the links take, whichever is more; None without a model.
    """

    what: str
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
        table.add_column("settings", overflow="fold")
        for at, row in enumerate(self.rows):
            seconds = (row.predicted.total if row.predicted else None, row.measured)
            cells = [cell for time in seconds for cell in self._cells(time)]
            table.add_row("\n".join(row.names), *cells, text_of(row.config, [*row.config]), style="" if at else "bold")
        case = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return Group(Text(f"{self.what}: {case}", style="bold"), table, *map(Text, self._lines()))

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(self)
        return console.export_text().rstrip()

    def __repr__(self) -> str:
        return f"Explanation({self.what}: {self.config})"

    def _cells(self, seconds: float | None) -> tuple[str, str]:
        if seconds is None:
            return "", ""
        return milliseconds(seconds), f"{self.limit / seconds:.2f}" if self.limit else ""

    def _lines(self) -> list[str]:
        """What stands below the table."""
        lines = [f"taken: {self.why}"]
        taken = self.rows[0]
        baseline = next(row for row in self.rows if row.config == NCCL)
        for how, mine, theirs in (
            ("measured", taken.measured, baseline.measured),
            ("predicted", _total(taken), _total(baseline)),
        ):
            if mine and theirs and taken is not baseline:
                lines.append(f"NCCL + cuBLAS takes {theirs / mine:.2f} times as long, as {how}")
                break
        if not nccl_wanted():
            lines.append("NCCL + cuBLAS is not taken in any case: PKT_NCCL=0")
        if taken.predicted is None or self.limit is None:
            return [*lines, f"nothing predicted: the model is of {H200.name}, in bf16 and fp16"]
        parts = {name: milliseconds(seconds) for name, seconds in vars(taken.predicted).items()}
        most = ", ".join(f"{name} {parts.pop(name)}" for name in ("compute", "memory", "communication"))
        alone = product_alone(self.key)
        assert alone is not None
        nbytes = sent(self.what, self.key)
        return [
            *lines,
            f"predicted, ms: launch {parts['launch']} + max({most}) + "
            f"exposed {parts['exposed']} + sync {parts['sync']}",
            f"limit: {milliseconds(self.limit)} ms, of the product alone {milliseconds(alone.total)}, "
            f"{nbytes / 1e6:.4g} MB over {H200.link / 1e9:.0f} GB/s {milliseconds(nbytes / H200.link)}",
        ]


def explain(
    op: str | Callable[..., Any],
    *,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype | str = torch.bfloat16,
    size: int | None = None,
    gpu: str | None = None,
) -> Explanation:
    """Print which settings an operator takes where none are given, and why; what the model predicts of them and what
    was measured; and beside them pkt's fastest form and NCCL + cuBLAS. Needs no GPU and no world; not collective: one
    rank is enough.

    op: all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce: the function, its name, or ag_gemm, gemm_rs,
        gemm_ar.
    M, N, K: of the product (M, K) @ (K, N) that each rank computes; for all_gather_matmul M counts the gathered rows.
    dtype: of the operands, bf16, fp16 or fp32.
    size: the number of ranks; that of the current world, 4 where there is none.
    gpu: as torch names it; that of the current world, "NVIDIA H200" where there is none. In the simulator "simulated":
        there an operator looks nothing up, and nothing is predicted.

    Returns what it printed. Raises ShapeError, DtypeError.
    """
    what, key = _asked(op, M, N, K, dtype)
    world = _world()
    machine = {"gpu": gpu or H200.name} if world is None else cache.machine(world)
    if gpu is not None and gpu != machine["gpu"]:
        machine = {"gpu": gpu}
    if size is None:
        size = 4 if world is None else world.size
    key["size"] = _size(what, key, size)
    found = _found(what, key, machine)
    Console(width=None if sys.stdout.isatty() else 120).print(found)
    return found


# ------------------------------------------------------------------------------------------------------------ the case
def _asked(op: Any, M: int, N: int, K: int, dtype: Any) -> tuple[str, dict[str, Any]]:
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    what = NAMES.get(name, name)
    if what not in MODELS:
        known = ", ".join(f"{full} ({short})" for short, full in NAMES.items())
        raise ShapeError.argument(CALL, "op", repr(name), known)
    for axis, length in {"M": M, "N": N, "K": K}.items():
        if length < 1:
            raise ShapeError.argument(CALL, axis, length, "at least 1")
    if dtype_text(dtype) not in DTYPES:
        raise DtypeError.argument(CALL, "dtype", dtype, ", ".join(DTYPES))
    return what, {"M": M, "N": N, "K": K, "dtype": dtype_text(dtype)}


def _size(what: str, key: Mapping[str, Any], size: int) -> int:
    if size < 1:
        raise ShapeError.argument(CALL, "size", size, "at least 1")
    if what != "matmul_all_reduce" and key["M"] % size:
        raise ShapeError.argument(CALL, "M", key["M"], f"rows that {size} ranks can share")
    return size


def _world() -> World | None:
    try:
        return current_world(CALL)
    except Unsupported:  # which says that there is none
        return None


# ---------------------------------------------------------------------------------------------------------- the answer
def _found(what: str, key: dict[str, Any], machine: Mapping[str, Any]) -> Explanation:
    gpu, size = machine["gpu"], key["size"]
    times: dict[Config, float] = {}
    near = tables.near(what, key, gpu, size)
    if near and near[1] == 0:
        times |= {c.config: c.time for c in near[0].candidates if c.time is not None}
    kept = None if gpu == SIMULATED else cache.kept(what, key, size, machine)
    if kept is not None:
        times[Config.of(kept["config"])] = kept["seconds"]
    config, why = _taken(what, key, gpu, kept)
    modelled = gpu == H200.name and key["dtype"] in ITEMSIZE
    compared: dict[Config, list[str]] = {config: ["taken"]}
    own = [c for c in times if c != NCCL]
    if own:
        compared.setdefault(min(own, key=lambda c: times[c]), []).append("pkt's fastest measured")
    if modelled:
        space = [c for c in operator_space(what, key) if c != NCCL]
        first = min(space, key=lambda c: MODELS[what](c, key) or 0.0)
        compared.setdefault(first, []).append("pkt's fastest by the model")
    compared.setdefault(NCCL, []).append("NCCL + cuBLAS")
    rows = tuple(
        Row(tuple(names), c, estimate(what, c, key) if modelled else None, times.get(c))
        for c, names in compared.items()
    )
    alone = product_alone(key) if modelled else None
    limit = None if alone is None else max(alone.total, sent(what, key) / H200.link)
    return Explanation(what, {**key, "gpu": gpu}, config, why, rows, limit)


def _taken(what: str, key: dict[str, Any], gpu: str, kept: Mapping[str, Any] | None) -> tuple[Config, str]:
    """The settings that the operator takes, by the rule of pkt.tune.choice, and why."""
    if gpu == SIMULATED:
        return own_rule(what, key, gpu), "the operator's own rule, because the simulator's clock is no measurement"
    passed = ""
    if kept is not None:
        config = Config.of(kept["config"])
        if config != NCCL or nccl_wanted():
            return config, f"tuned on this machine{_on(kept)}: {milliseconds(kept['seconds'])} ms"
        passed = "NCCL + cuBLAS was tuned here and is off; "
    tabled, near = tables.nearest(what, key, gpu, key["size"]), tables.near(what, key, gpu, key["size"])
    if tabled is not None and near is not None:
        search, distance = near
        shape = ", ".join(f"{axis}={search.key[axis]}" for axis in tables.AXES)
        there = f"the nearest shape, {shape}, {distance:.2g} doublings away" if distance else "this shape"
        source = tables.source(what, search.key)
        if distance:
            first = "the fastest to expect from what was"
        else:
            first = "the fastest" if tabled == search.best else "the fastest that this case can take,"
        where = f"{source['file']} of commit {source['commit']}, {source['date']}"
        return tabled, f"{passed}{first} measured for {there}, {where}"
    missing = f"no table for {key['size']} x {gpu} in {key['dtype']} has a shape within {tables.FARTHEST} doublings"
    return own_rule(what, key, gpu), f"{passed or 'nothing tuned here, '}{missing}: the operator's own rule"


def _on(kept: Mapping[str, Any]) -> str:
    return f" on {kept['date']}" if "date" in kept else ""


def _total(row: Row) -> float | None:
    return row.predicted.total if row.predicted else None


def own_rule(what: str, key: Mapping[str, Any], gpu: str) -> Config:
    """What the operator takes where nothing is given and nothing was found, as its docstring says of None."""
    matmul, fits = (importlib.import_module(f"pkt.kernels.shared.{name}") for name in ("tile_product", "gluon_fits"))
    rules = importlib.import_module(f"pkt.kernels.{what}.rules")
    M, N, K, size, dtype = key["M"], key["N"], key["K"], key["size"], DTYPES[key["dtype"]]
    m = M if what == "matmul_all_reduce" else M // size
    hopper = SM_90.search(gpu) is not None and triton.__version__.startswith("3.6.")
    gluon = hopper and gluon_fits(what, key) and m > matmul.FEW_ROWS
    if what == "matmul_all_reduce":
        if gpu != SIMULATED and M <= rules.unfused_rows(size):
            return Config(mode="unfused")
        if gluon:
            return Config(mode="gluon", tiles=rules.tiles_of(M, N, size))
        return Config(mode="lcsc", num_comm_sms=16, tiles=matmul.default_tiles(m, dtype, N))
    if what == "matmul_reduce_scatter":
        if not gluon:
            return Config(mode="add", tiles=matmul.default_tiles(m, dtype, N))
        copies = rules.copies_of(m, N, K, size)
        return Config(mode="gluon", **({"copies": copies} if copies else {}), tiles=fits.TILES)
    if not gluon:
        return Config(mode="push", num_comm_sms=16, chunk=1024, tiles=matmul.default_tiles(m, dtype, K, N))
    plan = rules.push_plan(m, N, K, size, fits.TILES, H200.sms)
    return Config(mode="gluon", **plan._asdict(), tiles=fits.TILES)
