"""ParallelKittens for Triton: the public names.

Device code is `import pkt.language as pl`. Operators (`pkt.all_gather_matmul`, ...), modules (`pkt.nn`) and
the tuner are loaded when first used. Here the two meet: operators take the settings that the tuner found.
"""

from collections.abc import Mapping as _Mapping
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from pkt.errors import (
    AllocationMismatch,
    CandidateMismatch,
    Closed,
    CollectiveMismatch,
    CompileError,
    DriverError,
    DtypeError,
    GridTooLarge,
    HeapFull,
    LostSignal,
    LostSync,
    NoCandidate,
    NotSymmetric,
    PeerLost,
    PktError,
    RankError,
    RankFailed,
    ShapeError,
    SignalIndexError,
    TransportError,
    Unsupported,
    UseAfterFree,
    WaitTimeout,
)
from pkt.kernels import operator as _registry
from pkt.kernels.choosing import take_advice as _take_advice
from pkt.launcher import init, launch
from pkt.layouts import interleave, join_heads, layout
from pkt.runtime.launch import outside as _outside
from pkt.runtime.memory.checks import symmetric
from pkt.runtime.memory.factories import (
    arange,
    empty,
    empty_like,
    full,
    full_like,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    signals,
    zeros,
    zeros_like,
)
from pkt.runtime.memory.pool import mem_pool
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import Workspace, World, check_rank, current_world
from pkt.simulate.explore import simulate  # hides the package of that name, whose modules are still found by import
from pkt.simulate.findings import (
    DataRace,
    Deadlock,
    FalseAssumption,
    FarAccess,
    MisalignedAccess,
    MissingBarrier,
    MissingQuiet,
    MulticastAccess,
    OutOfBounds,
    OverlappingStore,
    OvertakenPut,
    StaleFlag,
    TooFewResident,
)

if TYPE_CHECKING:
    from pkt.kernels.grouped_activation import grouped_activation
    from pkt.kernels.grouped_matmul import grouped_matmul
    from pkt.kernels.grouped_outer import grouped_outer
    from pkt.kernels.moe import moe
    from pkt.model.config import Config, space
    from pkt.nn.plan import parallelize
    from pkt.tune.autotune import autotune
    from pkt.tune.explanation import explain

__all__ = [  # noqa: PLE0604
    "init", "launch", "layout", "interleave", "join_heads", "simulate", "autotune", "Config", "space", "explain",
    "grouped_activation", "grouped_matmul", "grouped_outer", "moe", "parallelize",
    "current_world", "World", "Workspace", "SymmetricTensor", "symmetric", "check_rank", "signals", "mem_pool",
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "PktError", "WaitTimeout", "Deadlock", "TooFewResident", "GridTooLarge",
    "DataRace", "StaleFlag", "OutOfBounds", "UseAfterFree", "MisalignedAccess", "MulticastAccess", "LostSignal",
    "LostSync", "FalseAssumption", "MissingBarrier", "OverlappingStore", "MissingQuiet", "OvertakenPut",
    "FarAccess",
    "CollectiveMismatch", "AllocationMismatch", "CandidateMismatch", "NoCandidate",
    "HeapFull", "NotSymmetric", "RankError", "SignalIndexError", "ShapeError", "DtypeError", "Closed",
    "PeerLost", "RankFailed", "TransportError", "DriverError", "CompileError", "Unsupported",
    "shard_sequence", "unshard_sequence", "sequence_positions",
    *_registry.names(),
]  # fmt: skip

_LAZY = {
    "autotune": "pkt.tune.autotune", "explain": "pkt.tune.explanation",
    "Config": "pkt.model.config", "space": "pkt.model.config",
    "grouped_activation": "pkt.kernels.grouped_activation", "grouped_matmul": "pkt.kernels.grouped_matmul",
    "grouped_outer": "pkt.kernels.grouped_outer", "moe": "pkt.kernels.moe", "parallelize": "pkt.nn.plan",
    **dict.fromkeys(
        ("shard_sequence", "unshard_sequence", "sequence_positions"), "pkt.kernels.ring_attention.sequence"
    ),
}  # fmt: skip
_PACKAGES = ("nn", "tune")


def _tuned(operator: str, key: _Mapping[str, _Any], world: World) -> _Mapping[str, _Any]:
    from pkt.tune.tuner import choice

    return choice(operator, key, world) or {}


_take_advice(_tuned)
_outside.name_the_remedy()


def _version() -> str:
    """Of the installed distribution; "0+source" where pkt is imported from a folder."""
    from importlib import metadata

    try:
        return metadata.version("pkt-triton")
    except metadata.PackageNotFoundError:
        return "0+source"


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        return _version()
    if name in _PACKAGES:
        return _import_module(f"pkt.{name}")
    if name in _registry.registered:
        return _registry.registered[name].function
    if name in _LAZY:
        value = getattr(_import_module(_LAZY[name]), name)
    elif name in _registry.names():
        value = getattr(_import_module(_registry.module_of(name)), name)
    else:
        raise AttributeError(f"module 'pkt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_registry.names(), *_PACKAGES})
