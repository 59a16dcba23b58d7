"""ParallelKittens for Triton: the public names.

Device code is `import pkt.language as pl`; operators (`pkt.all_gather_matmul`, ...) and the tuner are loaded when first
used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from pkt.errors import (
    AllocationMismatch,
    CandidateMismatch,
    Closed,
    CollectiveMismatch,
    DataRace,
    Deadlock,
    DriverError,
    DtypeError,
    GridTooLarge,
    HeapFull,
    LostSignal,
    LostSync,
    MulticastAccess,
    NoCandidate,
    NotSymmetric,
    OutOfBounds,
    PeerLost,
    PktError,
    RankError,
    RankFailed,
    ShapeError,
    SignalIndexError,
    StaleFlag,
    TooFewResident,
    TransportError,
    Unsupported,
    UseAfterFree,
    WaitTimeout,
)
from pkt.launcher import init, launch
from pkt.layouts import layout
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

if TYPE_CHECKING:
    from pkt.tune.autotune import autotune
    from pkt.tune.config import Config, space
    from pkt.tune.explanation import explain

__all__ = [
    "init",
    "launch",
    "layout",
    "simulate",
    "autotune",
    "Config",
    "space",
    "explain",
    "current_world",
    "World",
    "Workspace",
    "SymmetricTensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "signals",
    "mem_pool",
    "symmetric",
    "check_rank",
    "PktError",
    "WaitTimeout",
    "Deadlock",
    "TooFewResident",
    "GridTooLarge",
    "DataRace",
    "StaleFlag",
    "OutOfBounds",
    "UseAfterFree",
    "MulticastAccess",
    "LostSignal",
    "LostSync",
    "CollectiveMismatch",
    "AllocationMismatch",
    "CandidateMismatch",
    "NoCandidate",
    "HeapFull",
    "NotSymmetric",
    "RankError",
    "SignalIndexError",
    "ShapeError",
    "DtypeError",
    "Closed",
    "PeerLost",
    "RankFailed",
    "TransportError",
    "DriverError",
    "Unsupported",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]

_LAZY = {name: f"pkt.kernels.{name}" for name in __all__[__all__.index("all_gather") :]}
_LAZY |= {"autotune": "pkt.tune.autotune", "Config": "pkt.tune.config", "space": "pkt.tune.config"}
_LAZY |= {"explain": "pkt.tune.explanation"}


def __getattr__(name: str) -> _Any:
    if name == "tune":
        return _import_module("pkt.tune")
    if name not in _LAZY:
        raise AttributeError(f"module 'pkt' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "tune"})
