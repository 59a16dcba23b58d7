"""Choices of earlier runs, in JSON files that several jobs may share.

Each operator or kernel has a file under PKT_TUNE_CACHE or the user's cache directory: {"format": 1, "choices": {case:
choice}}, where a case is everything that a choice depends on, as text. Only rank 0 reads and writes. A writer holds a
lock, reads the file, adds its choice and replaces the file, so readers need no lock and two writers lose nothing. A
file in another format is left as it is, with one warning.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton

from pkt.model.config import Config
from pkt.model.rates import folder
from pkt.runtime.world import World

FORMAT = 1

# Choices made on a modelled clock. They are no measurements, so no file keeps them.
_simulated: dict[str, dict[str, Any]] = {}
_warned: set[str] = set()


def case(world: World, source: str, key: Mapping[str, Any]) -> str:
    """Everything that a choice depends on, as text: the source of the tuned kernel or function ("" for an operator of
    pkt), the key, the number of ranks, the machine and the versions."""
    facts = {"source": source, "key": dict(key), "ranks": world.size, **machine(world), **_versions()}
    return json.dumps(facts, sort_keys=True)


def machine(world: World) -> dict[str, Any]:
    """{"gpu": "NVIDIA H200", "sms": 132, "topology": "peer"}; topology is "multicast" where the world has it. The gpu
    of a simulated rank is "simulated"."""
    topology = "multicast" if world.multicast else "peer"
    return {"gpu": world.backend.gpu, "sms": world.num_sms, "topology": topology}


@functools.cache
def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("pkt-triton")
    except importlib.metadata.PackageNotFoundError:
        own = "source"  # it need not be installed to run
    return {"pkt": own, "torch": torch.__version__, "triton": triton.__version__}


def load(world: World, what: str, text: str) -> Config | None:
    """The choice for the case `text`, or None."""
    if _modelled(world):
        choice = _simulated.get(what, {}).get(text)
    else:
        choice = (_read(_path(what)) or {}).get(text)
    return None if choice is None else Config.of(choice["config"])


def kept(what: str, key: Mapping[str, Any], ranks: int, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"config", "seconds", "date"} of the choice for the operator `what` in the case `key`, or None; without a world.
    machine: those entries of `machine`'s result that are known. Of several choices that fit, the last one."""
    facts = {"source": "", "key": dict(key), "ranks": ranks, **machine, **_versions()}
    fitting = [c for text, c in (_read(_path(what)) or {}).items() if facts.items() <= json.loads(text).items()]
    return max(fitting, key=lambda choice: choice.get("date", ""), default=None)


def store(world: World, what: str, text: str, config: Config, seconds: float) -> None:
    """Keep a choice, its time and the day for the case `text`. Warns if the file cannot be written."""
    choice = {"config": dict(config.settings), "seconds": seconds, "date": datetime.date.today().isoformat()}
    if _modelled(world):
        _simulated.setdefault(what, {})[text] = choice
        return
    path = _path(what)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            choices = _read(path)
            if choices is not None:
                _replace(path, {"format": FORMAT, "choices": {**choices, text: choice}})
    except OSError as error:
        _warn(path, f"cannot be written ({error}): what was tuned is forgotten when this process ends")


def _modelled(world: World) -> bool:
    return world.backend.timed is not None


def _path(what: str) -> Path:
    name = re.sub(r"\W", "_", what)
    if name != what:  # two names may become the same
        name += "-" + hashlib.sha256(what.encode()).hexdigest()[:8]
    return folder() / f"{name}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """The choices of a file; {} where there is no file; None, with one warning, for a file in another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(path, f"cannot be read ({error}): it is ignored; remove it to tune into a new one")
        return None
    choices = content.get("choices") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(choices, dict) or not all(_is_choice(choice) for choice in choices.values()):
        _warn(path, f"holds no choices in format {FORMAT}: it is ignored; remove it to tune into a new one")
        return None
    return choices


def _is_choice(choice: Any) -> bool:
    config = choice.get("config") if isinstance(choice, dict) else None
    kept = (str, int, float, list, type(None))  # bool is an int
    return isinstance(config, dict) and all(isinstance(value, kept) for value in config.values())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time. The lock ends with the process that holds it."""
    with open(f"{path}.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Replace a file so that readers see the whole old or the whole new one. Call it under the lock."""
    fresh = Path(f"{path}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _warn(path: Path, what: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(f"pkt.tune: {path} {what}", stacklevel=2)
