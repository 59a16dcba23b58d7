"""The order in which candidates are tried: by the model, or evenly spread over the space where there is no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pkt.model.config import Config

SEED = 0  # other seeds cover some axes badly: seed 1 leaves out half of the second axis


def by_model(
    configs: Sequence[Config], predict: Callable[[Config, Mapping[str, Any]], float | None], key: Mapping[str, Any]
) -> list[tuple[int, float | None]]:
    """(index, predicted seconds), the fastest first; configs without a prediction last, in their order."""
    predicted = [(i, predict(config, key)) for i, config in enumerate(configs)]
    return sorted(predicted, key=lambda pair: float("inf") if pair[1] is None else pair[1])


def spread(configs: Sequence[Config], count: int, seed: int = SEED) -> list[int]:
    """Indices: the first `count` are far from each other in every setting; the others follow in their order.

    Each pick is the remaining config that is nearest to the next point of a scrambled Sobol sequence.
    """
    places = _places(configs)
    count = min(count, len(configs))
    points = torch.quasirandom.SobolEngine(places.shape[1], scramble=True, seed=seed).draw(count).double().numpy()
    picked: list[int] = []
    left = np.ones(len(configs), bool)
    for point in points:
        at = int(np.where(left, np.square(places - point).sum(1), np.inf).argmin())
        left[at] = False
        picked.append(at)
    return [*picked, *np.flatnonzero(left).tolist()]


def _places(configs: Sequence[Config]) -> np.ndarray:
    """Each config as a point of the unit box, (configs, settings): its value's place among the values of a setting."""
    names = list(dict.fromkeys(name for config in configs for name in config)) or [""]
    places = np.zeros((len(configs), len(names)))
    for column, name in enumerate(names):
        values = list(dict.fromkeys(repr(config.settings.get(name)) for config in configs))
        at = {value: (i + 0.5) / len(values) for i, value in enumerate(values)}
        places[:, column] = [at[repr(config.settings.get(name))] for config in configs]
    return places
