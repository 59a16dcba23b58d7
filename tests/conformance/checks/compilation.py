"""Kernels compile for a GPU: registers, spills and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.declaration import Case
from pkt.kernels.operator import Operator
from pkt.kernels.shared import copies
from pkt.kernels.shared.checks import FLOATS
from pkt.language.inspect import count_markers, repeated_waits
from tests import device_library
from tests.conformance import inputs
from tests.kernels.launches import all_launched, compile_checked

from .operands import dtypes_of, memory_like

WIDE = {"m": 8192, "k": 256, "n": 2048}
"""Sizes of a product that takes tile_product.WIDE_TILES, the largest."""


REPEATED = {
    "gather_kernel": 2,
    "scatter_kernel": 2,
    "low_latency_kernel": 2,
    "matmul_combine_kernel": 1,
    "reduce_kernel": 4,
}
"""Waits that a compiled kernel has beyond those of its source, at most: `Usage.repeated` of pkt/simulate/front_end.py.
Of some shapes the stores of a gather and a scatter have layouts of their own; low-latency dispatch takes numbers of
tokens in three layouts, in one program; matmul_combine has a loop unrolled; a thread of reduce has four words of one
kind and two of the other."""


def big(case: Case, most: Mapping[str, int], wide: bool) -> Case:
    """The case with dimensions that fill a GPU, none greater than `most` of its letter. wide: of a product, WIDE."""
    shapes = {}
    for name, shape in case.shapes.items():
        words = [str(w) for w in (shape.split() if isinstance(shape, str) else shape)] or ["1"]
        first, _, n = words[0].rpartition("*")
        shapes[name] = " ".join([f"{first}*{int(n) << 12}" if first else f"{int(n) << 12}", *words[1:]])
    sizes = case.large or {n: min(256 << (i > 0), most.get(n, 1 << 30)) for i, n in enumerate(case.sizes)}
    sizes = WIDE if wide and sizes.keys() == WIDE.keys() else sizes
    return Case(sizes=sizes, shapes=shapes, arguments=case.arguments)


def check_compilation(operator: Operator, mode: str, arch: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Every kernel that the form launches compiles: no wait or signal lost, nothing spilled, and memory fits."""
    cases = [case for case in operator.cases if case.arguments.get("mode", mode) == mode]
    own = cases[0]
    check_compiles(operator, mode, own, dtypes_of(operator, mode)[0], arch, patch, folder, wide=True)
    for case in cases[1:]:
        if case.dtype != torch.float32:
            check_compiles(operator, mode, case, case.dtype, arch, patch, folder)


def check_compiles(
    operator: Operator, mode: str, own: Case, dtype: torch.dtype, arch: int, patch: pytest.MonkeyPatch, folder: Path,
    wide: bool = False,
) -> None:  # fmt: skip
    """`check_compilation` of one case, with a first operand of `dtype`."""
    named = {n: v for n, v in own.arguments.items() if n in operator.arguments}
    case = big(own, operator.most, wide)

    def run(world: Any) -> None:
        symmetric = operator.form(mode).symmetric
        tensors: dict[str, Any] = {}
        # The values of the operands that have no maker are not needed, and would take seconds.
        made: Any = inputs.everybody(operator, case, world.size, 0, dtype, make=_no_values)
        for name, shape in inputs.shapes_of(operator, case, world.size).items():
            if operator.tensors[name].optional and name not in own.arguments.get("given", ()):
                tensors[name] = None
            elif name in symmetric:
                tensors[name] = pkt.empty(shape, dtype=dtype)
            elif operator.tensors[name].make is not None:
                tensors[name] = made[name][world.rank]
            else:
                tensors[name] = memory_like(operator, name, shape, dtype)
        if "out" in symmetric:
            empties = {n: None if t is None else [t.to("meta")] * world.size for n, t in tensors.items()}
            like = operator.reference(world.rank, **empties, **inputs.arguments_of(operator, case))
            tensors["out"] = pkt.empty(tuple(like.shape), dtype=dtype)
        operator.function(**operator.parameters(tensors), **named, mode=mode, world=world)

    # Where each rank is a node, the compiler can prove more.
    worlds: list[tuple[int, ...]] = [(4, 2), (2, 1)][: 1 + (arch == 90)] if mode in operator.across else [(2,)]
    device_library.install(patch, folder)
    for shape in worlds:
        launches = all_launched(run, shape[0], own.multicast, patch, *shape[1:])
        assert launches, "nothing was launched"
        kernels = {id(x.kernel): x for x in launches if x.options.get("launch_cooperative_grid")}
        # Beside copy engines one kernel may signal and another wait.
        compiled = [compile_checked(launch, arch, folder, signals=False) for launch in kernels.values()]
        assert compiled, "no kernel waits for a peer"
        for kernel in compiled:
            assert repeated_waits(kernel.asm) <= REPEATED.get(kernel.metadata.name, 0), kernel.metadata.name
        engines = any(x.kernel is copies.tell_kernel for x in launches)
        assert engines or any(count_markers(kernel.asm["ptx"])["signal"] for kernel in compiled), "no kernel signals"


def _no_values(shape: tuple[int, ...], *_: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def floats(operator: Operator, mode: str) -> list[torch.dtype]:
    """The dtypes of a form whose results the reference can check."""
    found = dtypes_of(operator, mode)
    return [t for t in found if t in FLOATS or operator.exact is True] or list(found)
