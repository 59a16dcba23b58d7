"""Choices of earlier runs, in JSON files that several jobs may share.

Each operator or kernel has a file under PKT_TUNE_CACHE or the user's cache directory: {"format": 1, "choices": {case:
choice}}, where a case is everything that a choice depends on, as text. Only rank 0 reads and writes. A file that
pkt.model.files cannot read or write costs one warning, and the tuner goes on as if nothing was kept. A file in another
format is left as it is.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton

from pkt.model import files
from pkt.model.config import Config
from pkt.runtime.world import World

FORMAT = 1
DEEPEST = 4  # lists in lists in a setting
LONGEST = 1000  # characters of a text in a setting

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
        choice = _choices(what).get(text)
    return None if choice is None else Config.of(choice["config"])


def kept(what: str, key: Mapping[str, Any], ranks: int, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"config", "seconds", "date"} of the choice for the operator `what` in the case `key`, or None; without a world.
    machine: those entries of `machine`'s result that are known. Of several choices that fit, the last one."""
    facts = {"source": "", "key": dict(key), "ranks": ranks, **machine, **_versions()}
    fitting = [c for text, c in _choices(what).items() if facts.items() <= _facts(text).items()]
    return max(fitting, key=lambda choice: choice.get("date", ""), default=None)


def store(world: World, what: str, text: str, config: Config, seconds: float) -> None:
    """Keep a choice, its time and the day for the case `text`. Warns if the file cannot be written."""
    choice = {"config": dict(config.settings), "seconds": seconds, "date": datetime.date.today().isoformat()}
    if _modelled(world):
        _simulated.setdefault(what, {})[text] = choice
        return
    path: Path | str = what
    try:
        if not _is_choice(choice):
            raise OSError(f"{config} in {seconds} s is longer than a reader takes, or has numbers that are none")
        path = _path(what)
        with files.locked(path):
            choices = _read(path)
            if choices is not None:
                files.replace(path, {"format": FORMAT, "choices": {**choices, text: choice}})
    except OSError as error:
        _warn(path, f"cannot be written ({error}): what was tuned is forgotten when this process ends")


def _modelled(world: World) -> bool:
    return world.backend.timed is not None


def _path(what: str) -> Path:
    name = re.sub(r"\W", "_", what)
    if name != what:  # two names may become the same
        name += "-" + hashlib.sha256(what.encode()).hexdigest()[:8]
    return files.folder() / f"{name}.json"


def _choices(what: str) -> dict[str, Any]:
    """The choices for `what`; {} if there are none that can be read, with one warning."""
    try:
        path = _path(what)
    except OSError as error:
        _warn(what, f"has no cache ({error})")
        return {}
    return _read(path) or {}


def _read(path: Path) -> dict[str, Any] | None:
    """The choices of a file; {} if there is no file; None, with one warning, for a file in another format."""
    try:
        content = json.loads(files.text_of(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(path, f"cannot be read ({error}): it is ignored; remove it to tune into a new one")
        return None
    choices = content.get("choices") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(choices, dict) or not all(_is_choice(choice) for choice in choices.values()):
        _warn(path, f"holds no choices in format {FORMAT}: it is ignored; remove it to tune into a new one")
        return None
    return choices


def _facts(text: str) -> dict[str, Any]:
    """What the text of a case says; {} if it says nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_choice(choice: Any) -> bool:
    """Whether `store` could have made this. The operator or kernel checks the names and values of the settings."""
    if not isinstance(choice, dict) or not isinstance(choice.get("config"), dict):
        return False
    seconds, date = choice.get("seconds"), choice.get("date", "")
    if (
        not isinstance(seconds, (int, float))
        or not seconds > 0
        or isinstance(seconds, bool)
        or not isinstance(date, str)
    ):
        return False
    return all(map(_is_setting, (seconds, date, *choice["config"], *choice["config"].values())))


def _is_setting(value: Any, deep: int = 0) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST and not any("\ud800" <= c <= "\udfff" for c in value)  # lone surrogates, no text
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):  # bool is one
        return -(1 << 63) <= value < 1 << 63
    if isinstance(value, (list, tuple)):
        return deep < DEEPEST and all(_is_setting(part, deep + 1) for part in value)
    return value is None


def _warn(path: Path | str, what: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(f"pkt.tune: {path} {what}", stacklevel=2)
