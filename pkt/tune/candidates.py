"""The candidates of pkt's operators and their predicted times, read off each operator's declaration."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pkt.errors import Unsupported
from pkt.kernels.operator import Operator, operators
from pkt.model.config import NCCL, UNFUSED, Config
from pkt.model.cost import DTYPES, Estimate, modelled
from pkt.model.gpu import H200, Gpu
from pkt.tune.search import Candidate, Model
from pkt.tune.spread import spread
from pkt.wording import dtype_text


def tuned_operators() -> dict[str, Operator]:
    """The operators that declare how they are tuned, by name."""
    return {name: operator for name, operator in operators().items() if operator.tuning}


def operator_space(operator: Operator, key: Mapping[str, Any], gpu: Gpu = H200) -> list[Config]:
    """Every candidate of an operator for a case; the two forms that fuse nothing come first.

    key: M, N, K of the product that each rank computes, dtype and size, the number of ranks. gpu: its SMs and shared
    memory count. Raises Unsupported for another dtype.
    """
    dtype = dtype_text(key.get("dtype"))
    if dtype not in DTYPES:
        raise Unsupported.here("pkt tune", f"found dtype {dtype!r}", f"wanted {' or '.join(map(repr, DTYPES))}")
    found = [config for form in operator.forms.values() if form.space for config in form.space(key, gpu)]
    return sorted(found, key=lambda config: (config != NCCL, config != UNFUSED))


def estimate(
    operator: Operator, config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu = H200
) -> Estimate | None:  # fmt: skip
    """The parts of a config's predicted time for a key as `operator_space` has it. None where no measurement
    supports a prediction: a dtype other than bf16 and fp16, or a form that declares none."""
    return operator.predicted(config, key, gpu) if modelled(key) else None


def model_of(operator: Operator) -> Model:
    """`estimate`'s total, for a config and a key; without its correction, which was fitted to the default settings of
    each form, and would only put the candidates of one form before those of another."""

    def predicted(config: Mapping[str, Any], key: Mapping[str, Any]) -> float | None:
        found = estimate(operator, config, key)
        return None if found is None else found.total - found.correction

    return predicted


def thinned(configs: Sequence[Config], model: Model, key: Mapping[str, Any], alike: int) -> list[Config]:
    """`configs` with at most `alike` of one predicted time, far from each other in every setting. Without this the
    model's first would be neighbours that differ only in settings which the model does not see."""
    same: dict[float | None, list[Config]] = {}
    for config in configs:
        same.setdefault(model(config, key), []).append(config)
    picked = (range(len(group)) if len(group) <= alike else spread(group, alike)[:alike] for group in same.values())
    return [group[i] for group, places in zip(same.values(), picked) for i in places]


@dataclass(frozen=True)
class Error:
    """How far predictions are off: |predicted / measured - 1| over `count` candidates that have both."""

    median: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"median {self.median:.0%}, worst {self.worst:.0%} of {self.count}"


def error(candidates: Iterable[Candidate]) -> Error | None:
    """The model's error over the candidates that were predicted and measured; None if there is none."""
    pairs = [(c.predicted, c.time) for c in candidates]
    off = [abs(predicted / time - 1) for predicted, time in pairs if predicted is not None and time]
    return Error(statistics.median(off), max(off), len(off)) if off else None
