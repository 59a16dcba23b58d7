"""Benchmark of every form of every operator in the registry, from its declaration alone.

    python -m benchmarks.forms                      all operators, 4 GPUs
    python -m benchmarks.forms --sizes pkt.all_      some operators, by part of their labels
    python -m pkt.bench NAME                        an operator without a benchmark program of its own

Every letter of the operands' shapes has one size; tensors of any shape are vectors. A form that does not take a case is
left out. NCCL is beside the forms where an operator has a form "nccl", or baselines in benchmarks/NAME.py.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks._case import Case, captured
from benchmarks._collective import collectives
from benchmarks._command import main
from pkt.kernels.declaration import Case as Example
from pkt.kernels.operator import Operator, operators
from tests.conformance import inputs

TITLE = "Every form of every operator"
VECTORS = {"16 KiB": 8400, "1 MiB": 521_640, "16 MiB": 8_388_240}
"""Elements of a vector, a multiple of 840: any number of ranks up to 8 divides it."""
LETTERS = (512, 1024, 4096)


def examples(operator: Operator, quick: bool) -> dict[str, Example]:
    """Label -> the sizes of a case."""
    letters, first = inputs.letters_of(operator), operator.cases[0]
    if inputs.alike(operator, 16, "16") is first:
        large = Example(sizes=first.large, arguments=_operands(first))
        return {"large": large} if first.large and not quick else {"small": first}
    if letters:
        sizes = (16,) if quick else LETTERS
        return {f"{' = '.join(letters)} = {n}": inputs.alike(operator, n, "") for n in sizes}
    vectors = {"840 elements": 840} if quick else VECTORS
    return {label: inputs.alike(operator, 0, (n,)) for label, n in vectors.items()}


def _operands(example: Example) -> dict[str, Any]:
    """Those of its arguments that say which optional operands are given."""
    return {name: value for name, value in example.arguments.items() if name == "given"}


def variants(device: str, quick: bool) -> list[str]:
    every = operators().values()
    forms = dict.fromkeys(mode for o in every for mode, form in o.forms.items() if device == "cuda" or not form.gpu)
    baselines = dict.fromkeys(name for _, own in collectives().values() for name in own.names)
    return [*(baselines if device == "cuda" else ()), *(f"pkt {mode}" for mode in forms), "pkt default"]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    return {
        f"pkt.{name} {label}": {"name": name, "label": label, "quick": quick}
        for name, operator in operators().items()
        for label in examples(operator, quick)
    }


def case(world: Any, name: str, label: str, quick: bool) -> Case:
    """One size of an operator. All operands are symmetric, so that every form can take them."""
    import pkt

    operator, size = operators()[name], world.size
    example = examples(operator, quick)[label]
    dtype = inputs.usual(operator)
    operands = inputs.everybody(operator, example, size, 0, dtype)
    tensors = {n: None if ts is None else inputs.placed(world, ts[world.rank], True) for n, ts in operands.items()}
    exact = inputs.exact(operator, example, world.rank, operands)
    if "out" in operator.names:
        tensors["out"] = pkt.empty(tuple(exact.shape), dtype=inputs.result_dtype(operator, example, dtype), world=world)
    world.barrier()
    limit = 0.0 if operator.bound is None else inputs.bounds(
        operator, next(iter(operator.forms)), example, world.rank, size, operands, dtype
    )[0]  # fmt: skip

    def variant(**keywords: Any) -> Any:
        run = inputs.runnable(operator, example, tensors, world=world, **keywords)
        return (lambda: inputs.defined(run(), exact, limit)) if operator.also else run

    runs: dict[str, Any] = {"pkt default": variant()}
    for mode, form in operator.forms.items():
        if world.torch_device.type == "cuda" or not form.gpu:
            settings = inputs.settings_of(form, example, operator) if quick else {}
            runs[f"pkt {mode}"] = variant(mode=mode, **settings)
    own = collectives().get(name)
    if own and world.torch_device.type == "cuda":
        plain = [x.plain() for x in tensors.values() if isinstance(x, pkt.SymmetricTensor)]
        runs |= own[1].baselines(plain[0], plain[-1], size)
        runs = {n: captured(run) if n.endswith("captured") else run for n, run in runs.items()}
    return Case(
        nbytes=0.0,
        variants=runs,
        exact=lambda: exact.to(world.torch_device).float(),
        scaled=None,
        optional=frozenset(runs) - {"pkt default"},
    )


if __name__ == "__main__":
    sys.exit(main("forms", TITLE))
