"""Candidates: a config has one value for each setting; a space is a list of configs."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pkt.errors import DtypeError, NoCandidate, ShapeError
from pkt.wording import count_text


class Config(Mapping[str, Any]):
    """One candidate: an immutable, hashable mapping from each setting's keyword to its value.

        pkt.Config(num_comm_sms=16, BLOCK_M=128, num_warps=8)

    Values are None, bool, int, float, str and tuples of these; lists become tuples. So a config can be sent to other
    ranks and kept in a file. Two configs are equal if their settings are, in any order; 1, 1.0 and True differ.
    """

    __slots__ = ("_settings", "_text", "pre_hook")

    def __init__(self, /, **settings: Any) -> None:
        """Raises ShapeError for a value that cannot be kept."""
        kept = {name: _plain(name, value) for name, value in settings.items()}
        self._settings = MappingProxyType(kept)
        self._text = json.dumps(kept, sort_keys=True)
        self.pre_hook: Callable[[dict[str, Any]], Any] | None = None
        """triton.Config's hook, called with the arguments by name before each launch. Not compared, sent or kept."""

    @classmethod
    def of(cls, value: Config | Mapping[str, Any] | Any) -> Config:
        """`value` as a Config: `value` is a Config, a mapping of settings, or a triton.Config."""
        if isinstance(value, Config):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        if not hasattr(value, "all_kwargs"):  # what makes a triton.Config
            wanted = "a pkt.Config, a mapping of settings or a triton.Config"
            raise ShapeError.argument("pkt.Config.of", "config", f"{value!r}", wanted)
        config = cls(**value.all_kwargs())
        config.pre_hook = value.pre_hook
        return config

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting by keyword, in the order given; Triton's launch options are among them."""
        return self._settings

    @property
    def text(self) -> str:
        """JSON of the settings sorted by name: equal configs have the same text on every rank."""
        return self._text

    def __getitem__(self, name: str) -> Any:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._settings.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Config.of, (dict(self._settings),)


def space(
    where: Callable[[Config], bool] | Sequence[Callable[[Config], bool]] | None = None, **axes: Any
) -> list[Config]:
    """Every combination of the axes that meets the constraints, without duplicates; the last axis varies fastest.

        pkt.space(num_comm_sms=range(2, 66, 2), BLOCK_M=[64, 128], num_warps=8)

    axes: the values of a setting, or one value (a str is one value). where: one constraint on a config, or several.
    Raises NoCandidate if nothing is left, DtypeError.
    """
    values = {name: _values(axis) for name, axis in axes.items()}
    for name, some in values.items():
        if not some:
            raise NoCandidate.empty("pkt.space", f"the axis {name} has no values")
    constraints = [] if where is None else [*where] if isinstance(where, Iterable) else [where]
    if not all(map(callable, constraints)):
        raise DtypeError.argument("pkt.space", "where", f"{where!r:.80}", "a function of a config, or a list of them")
    every = [Config(**dict(zip(values, point))) for point in itertools.product(*values.values())]
    found = list(dict.fromkeys(c for c in every if all(constraint(c) for constraint in constraints)))
    if not found or not axes:
        found_none = f"none of {count_text(len(every), 'config')} meets `where`" if axes else "no axis given"
        raise NoCandidate.empty("pkt.space", found_none)
    return found


def configs_of(call: str, configs: Iterable[Any], name: str = "configs") -> list[Config]:
    """`configs`, of an argument, as Configs, without duplicates. Raises NoCandidate, DtypeError if they are no list."""
    if isinstance(configs, (str, Mapping)) or not isinstance(configs, Iterable):
        raise DtypeError.argument(call, name, f"{configs!r:.80}", "a list of configs, as pkt.space makes it")
    found = list(dict.fromkeys(Config.of(config) for config in configs))
    if not found:
        raise NoCandidate.empty(call, "configs is empty")
    return found


def _values(axis: Any) -> list[Any]:
    return list(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else [axis]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_plain(name, part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ShapeError.argument("pkt.Config", name, f"{value!r}", "None, bool, int, float, str or a tuple of these")


NCCL = Config(mode="nccl")
"""The baseline, a candidate of every fused operator: cuBLAS, and NCCL through torch.distributed."""
UNFUSED = Config(mode="unfused")
"""Another candidate of every fused operator: cuBLAS, and pkt's own collective before or after it."""


def nccl_wanted() -> bool:
    """Whether the baseline may be chosen: not with PKT_NCCL=0."""
    return os.environ.get("PKT_NCCL", "").strip() != "0"
