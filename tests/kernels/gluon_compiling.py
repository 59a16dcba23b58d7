"""Calls that would launch Gluon kernels compile them for sm_90 instead, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pkt.kernels import agreement, choosing, operator
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_gather_matmul import gluon as push
from pkt.kernels.all_gather_matmul.rules import PushPlan
from pkt.kernels.matmul_all_reduce import gluon as two_shot
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_all_reduce import rules as reduce_rules
from pkt.kernels.matmul_reduce_scatter import gluon as inbox
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.operator import Operator
from pkt.kernels.shared import checks, gluon_fits
from pkt.kernels.shared import copies as _copies
from pkt.kernels.shared import scales as words
from pkt.kernels.shared.fp8 import FP8
from pkt.kernels.shared.gluon_warps import Constants
from pkt.kernels.shared.tile_product import Tiles, columns_each
from pkt.language.inspect import compile_only, device_world

from .helpers import as_weight
from .machine_code import OLD, resources, sass

SPILLED = 0 if OLD else 64
"""Bytes of a thread that newer releases of Triton may keep on the stack."""
TILES, NARROW, NARROW8 = gluon_fits.TILES, gluon_fits.NARROW, gluon_fits.NARROW8

SIGNAL = r"(?:atom|red)\.global\.sys\.relaxed"  # in PTX


# --------------------------------------------------------------------------------------------------------- worlds
class Symmetric:
    """Stands for a symmetric tensor."""

    def __init__(self, *shape: int, dtype: torch.dtype, **_: Any) -> None:
        self.tensor = torch.empty(*shape, dtype=dtype)
        self.dtype = dtype

    def peer(self, rank: int, world: World | None = None) -> torch.Tensor:
        return self.tensor

    def plain(self) -> torch.Tensor:
        return self.tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class Compiled(NamedTuple):
    """A kernel, and how it would have been launched."""

    kernel: Any
    grid: tuple[int, ...]
    options: dict[str, Any]
    args: tuple

    @property
    def constants(self) -> Constants:
        """The values of a Gluon kernel's constants."""
        (found,) = (a for a in self.args if isinstance(a, Constants))
        return Constants(*(x.value for x in found))

    @property
    def ptx(self) -> str:
        return self.kernel.asm["ptx"]


class Kernel:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, compiled: list[Compiled]) -> None:
        self.kernel, self.compiled, self.arg_names = kernel, compiled, kernel.arg_names

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        assert not warmup
        args = tuple("*i32" if isinstance(a, Symmetric) else a for a in args)
        self.compiled.append(Compiled(compile_only(self.kernel, *args, grid=grid, **options), grid, options, args))


class World(SimpleNamespace):
    """Stands for a world of one node."""

    nodes = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.spaces:
            self.spaces[key] = make()
        return self.spaces[key]


def compiling_worlds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """The fixture `compiling`. A world's `begun` lists the sizes that its copies were given, and the number of kernels
    when they began and when they ended."""
    kernels: list[Compiled] = []
    modules = {push: "gluon_push_kernel", inbox: "gluon_inbox_kernel", two_shot: "gluon_two_shot_kernel"}
    for module, name in modules.items():
        monkeypatch.setattr(module, "empty", Symmetric)
        monkeypatch.setattr(module, "signals", lambda n, **_: Symmetric(n, dtype=torch.int32))
        monkeypatch.setattr(module, name, Kernel(getattr(module, name), kernels))

    def gathering(world: World, m: int, k: int, dtype: torch.dtype, step: int, chunk: int) -> _copies.Gathering:
        inbox, counters = Symmetric(world.size, m, k, dtype=dtype), Symmetric(4, dtype=torch.int32)
        world.begun = []
        join = lambda: world.begun.append(len(kernels))  # noqa: E731
        return _copies.Gathering(inbox, counters, lambda x: world.begun.append((step, chunk, len(kernels))) or join)

    def scattering(world: World, tiles: int, tile: int, dtype: torch.dtype, parcel: int) -> _copies.Scattering:
        inbox, counters = Symmetric(world.size - 1, tiles * tile, dtype=dtype), Symmetric(4, dtype=torch.int32)
        world.begun = []
        begin = lambda: world.begun.append(parcel) or (lambda: world.begun.append(len(kernels)))  # noqa: E731
        return _copies.Scattering(inbox, torch.empty_like(inbox.tensor), counters, begin)

    monkeypatch.setattr(words, "zeros", Symmetric)
    monkeypatch.setattr(operator, "World", World)
    monkeypatch.setattr(agreement, "World", World)
    monkeypatch.setattr(push, "gathering", gathering)
    monkeypatch.setattr(inbox, "scattering", scattering)
    return lambda rank=0, size=4: World(
        rank=rank,
        size=size,
        device=device_world(rank, size),
        torch_device=torch.device("cuda"),
        streams=None,
        num_sms=132,
        spaces={},
        plans={},
        lasting={},
        handed_in=None,
        capturing=False,
        kernels=kernels,
        backend=SimpleNamespace(gpu="NVIDIA H200", exchange=lambda value, what: [value] * size),
        group="of torch",
        span=range(0),
    )


def pass_for_h200s(compiling: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """The fixture `h200s`: operators take CPU tensors for tensors of a GPU."""

    monkeypatch.setattr(choosing, "_advice", [lambda operator, key, world: world.tuned.get(operator, {})])
    monkeypatch.setattr(sys.modules[matmul_all_reduce.__module__], "empty", Symmetric)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(checks, "check_tensor", lambda call, name, tensor, world, **_: None)

    def make(rank: int = 0, size: int = 4, **tuned: dict[str, Any]) -> World:
        world = compiling(rank, size)
        world.tuned = tuned
        return world

    return make


# ---------------------------------------------------------------------------------------------------------- calls
BF16 = torch.bfloat16
Shape = tuple[int, int]


def tensors(
    a: Shape, b: Shape, out: Shape, dtype: torch.dtype, transposed: bool, bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """a, b, out and, if wanted, the bias. Of fp8 operands b is transposed."""
    weight, of_result = torch.empty(*b, dtype=dtype), result_dtype(dtype)
    return (
        torch.empty(*a, dtype=dtype),
        as_weight(weight) if transposed or dtype == FP8 else weight,
        torch.empty(*out, dtype=of_result),
        torch.empty(b[1], dtype=of_result) if bias else None,
    )


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product of operands of this dtype."""
    return BF16 if dtype == FP8 else dtype


def scales(rows: int, N: int, dtype: torch.dtype, each: str | None) -> dict[str, torch.Tensor]:
    """Of fp8 operands: one for each row and column, "both", or one for A and one for B, or for one of them "rows" or
    "columns"."""
    if dtype != FP8:
        return {}
    of_rows, of_columns = each in ("both", "rows"), each in ("both", "columns")
    shapes = {"scale_a": (rows if of_rows else 1, 1), "scale_b": (1, N if of_columns else 1)}
    return {name: torch.empty(*shape) for name, shape in shapes.items()}


def product(
    world: World, m: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    plan: PushPlan | None = None, tiles: Tiles | None = None, each: str | None = None, keep: bool = False,
    **options: Any,
) -> Compiled:  # fmt: skip
    columns = N // columns_each(options.get("epilogue", "none"))
    a, b, out, added = tensors((m, K), (K, N), (world.size * m, columns), dtype, transposed, bias)
    of, tiles = scales(m, N, dtype, each), tiles or (NARROW8 if dtype == FP8 else TILES)
    launch = push.push_launch(world, a, b, out, plan or PushPlan(cut_last=4), tiles, **options, **of)
    launch(a, b, out, added, *of.values(), **({"whole": torch.empty(world.size * m, K, dtype=dtype)} if keep else {}))
    return world.kernels[-1]


def scatter(
    world: World, m: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    tiles: Tiles | None = None, lag: int = 3, each: str | None = None, **options: Any,
) -> Compiled:  # fmt: skip
    a, b, out, added = tensors((world.size * m, K), (K, N), (m, N), dtype, transposed, bias)
    of, tiles = scales(world.size * m, N, dtype, each), tiles or (NARROW8 if dtype == FP8 else TILES)
    inbox.inbox_launch(world, a, b, out, tiles, lag, **options, **of)(a, b, out, added, *of.values())
    return world.kernels[-1]


def reduce(
    world: World, M: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    tiles: Tiles | None = None, lag: int | None = None, each: str | None = None, in_place: bool = False, **options: Any,
) -> Compiled:  # fmt: skip
    """in_place: peers can reach the output."""
    a, b, _, added = tensors((M, K), (K, N), (M, N), dtype, transposed, bias)
    tiles = tiles or (NARROW8 if dtype == FP8 else None)
    settings, of = reduce_rules.settings(M, N, K, world, tiles, lag, dtype), scales(M, N, dtype, each)
    landed = Symmetric(M, N, dtype=result_dtype(dtype))
    out = landed if in_place else torch.empty_like(landed.tensor)
    two_shot.two_shot_launch(world, a, b, out, landed, *settings, **options, **of)(a, b, out, added, *of.values())
    return world.kernels[-1]


def gather_call(
    world: World, m: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    rows = world.size * K if options.get("shard") == "columns" else K
    columns = N // columns_each(options.get("epilogue", "none"))
    a, b, out, added = tensors((m, K), (rows, N), (world.size * m, columns), dtype, transposed, bias)
    assert all_gather_matmul(a, b, out, world=world, bias=added, **options) is out


def scatter_call(
    world: World, m: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    a, b, out, added = tensors((world.size * m, K), (K, N), (m, N), dtype, transposed, bias)
    assert matmul_reduce_scatter(a, b, out, world=world, bias=added, **options) is out


def reduce_call(
    world: World, M: int, N: int, K: int, dtype: torch.dtype = BF16, transposed: bool = False, bias: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    a, b, out, added = tensors((M, K), (K, N), (M, N), dtype, transposed, bias)
    assert matmul_all_reduce(a, b, out, world=world, bias=added, **options) is out


CALLS = {"all_gather_matmul": gather_call, "matmul_reduce_scatter": scatter_call, "matmul_all_reduce": reduce_call}


class Chosen(Exception):
    """Raised where an operator would allocate and launch, with the form and its settings."""


def chosen(name: str, world: World, *shape: int, **given: Any) -> dict[str, Any]:
    """The form, as "mode", and the settings that an operator takes for a call."""
    return chosen_by(lambda: CALLS[name](world, *shape, **given))


def chosen_by(call: Callable[[], Any]) -> dict[str, Any]:
    """The same of `call`, which calls an operator and gets no further than the choice."""

    def take(self: Operator, call: Any, form: Any) -> None:
        raise Chosen({"mode": call.mode, **call.settings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operator, "_filled", take)
        with pytest.raises(Chosen) as found:
            call()
    return found.value.args[0]


def with_another_rank(monkeypatch: pytest.MonkeyPatch, world: World, k: int) -> list[int]:
    """The k that the world's rank tells, one list entry a time; the other rank's is always `k`."""
    told: list[int] = []
    exchange = world.backend.exchange

    def exchanged(value: Any, what: str) -> list[Any]:
        if "the first call with this k" not in what:
            return exchange(value, what)
        told.append(value)
        return [value, k]

    monkeypatch.setattr(world.backend, "exchange", exchanged)
    return told


# --------------------------------------------------------------------------------------------------- what was built
def assert_fits(launch: Compiled, folder: Path) -> None:
    """One program an SM, nothing spilled, no stack, and the registers that the consumers ask for. The products of the
    tensor cores are waited for once a step, and once at the end, of fp8 after SUMMED steps. A small change can make
    ptxas wait for each of them instead: a comparison of the number of steps did, and all products took 8 % longer."""
    assert launch.grid[0] <= 132
    assert launch.kernel.metadata.num_warps == 12
    usage = resources(launch.kernel, folder)
    assert usage["REG"] * 12 * 32 <= 65536
    assert usage["STACK"] <= SPILLED, usage
    assert usage["LOCAL"] == 0, usage
    assert launch.kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
    assert "st.local" not in launch.ptx
    code, steps = sass(launch.kernel, folder), TILES.block_k // 16
    waits = code.count("WARPGROUP.DEPBAR") * steps
    assert (code.count("HGMMA.64") + code.count("QGMMA.64")) * 2 == waits > 0
