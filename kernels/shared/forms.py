"""Where the Gluon form of an operator can run: the same answer on every rank, for a rank alone would wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from pkt.errors import ShapeError, Unsupported
from pkt.runtime.groups import process_group
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from . import common as _common
from .tile_product import FEW_ROWS, stored

MAX_RANKS = 8
"""Ranks that a Gluon kernel has TMA descriptors for; `_gluon.MAX_PEERS` are the others."""


def missing(world: World) -> str:
    """What this rank lacks for the Gluon forms, in words; "" if nothing."""
    if torch.device(world.torch_device).type != "cuda":
        return "the simulator, and Gluon is compiled only"
    if not 1 < world.size <= MAX_RANKS:
        return f"{world.size} ranks, not 2 to {MAX_RANKS}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version != (3, 6):
        return f"Triton {triton.__version__}, not 3.6"
    major, minor = torch.cuda.get_device_capability(world.torch_device)
    return "" if (major, minor) == (9, 0) else f"sm_{major}{minor}, not sm_90"


def missing_anywhere(world: World) -> str:
    """What a rank lacks. On GPUs collective the first time."""
    if torch.device(world.torch_device).type != "cuda":
        return missing(world)

    known = world.lasting
    if "pkt.kernels.gluon" not in known:
        answers = world.all_gather_object(missing(world))
        known["pkt.kernels.gluon"] = next((f"rank {r} has {text}" for r, text in enumerate(answers) if text), "")
    return known["pkt.kernels.gluon"]


def gluon(call: str, asked: bool, chosen: bool, world: World, dtype: torch.dtype, rows: int, *columns: int) -> bool:
    """Whether this call takes its Gluon form: where it is `asked` for by its name, and where it can run, the caller has
    left the choice open (`chosen`) and the product has `rows` enough for its tiles. columns: row lengths of operands,
    alike on all ranks, which TMA wants to be multiples of 16 bytes. Raises Unsupported where it is asked for and cannot
    run."""
    if not asked and not chosen:
        return False
    unfit = missing_anywhere(world)
    if not unfit and dtype not in (torch.bfloat16, torch.float16):
        unfit = f"{dtype}, not bfloat16 or float16"
    if not unfit and any(n * dtype.itemsize % 16 for n in columns):
        unfit = f"rows of {' and '.join(map(str, columns))} elements, not multiples of 16 bytes"
    if unfit and asked:
        raise Unsupported.here(f"rank {world.rank}: {call}(mode='gluon')", f"found {unfit}", "mode=None runs anywhere")
    # Not before the ranks have met in `missing_anywhere`: that they agree on the rows is only found out later.
    return not unfit and (asked or rows > FEW_ROWS)


def tuned(
    call: str, world: World, key: dict[str, int], dtype: torch.dtype, rows: int, *columns: int, by: str = "MNK"
) -> dict[str, Any]:
    """The settings that were tuned here for this case, or are in pkt's tables for a shape like it; {} where there are
    none, where their form cannot run, and in the simulator, whose clock is modelled. key: M, N and K of the product
    that each rank computes. by: those in which all ranks agree; of the others the greatest counts, that of the first
    call. rows, columns: as in `gluon`. On GPUs collective the first time, which may not be in a capture."""
    if torch.device(world.torch_device).type != "cuda":
        return {}

    def ask() -> dict[str, Any]:
        from pkt.tune.tuner import choice

        sizes = {name: max(world.all_gather_object(key[name])) for name in key if name not in by}
        found = choice(call, {**key, **sizes, "dtype": dtype, "size": world.size}, world)
        settings = {} if found is None else dict(found)
        if settings.get("mode") == "nccl":
            try:
                process_group(world)
            except Unsupported:  # torch's default group has other ranks
                return {}
        return settings

    # Not a workspace: pkt.tune.tune forgets these, and no scope does.
    known: dict[Any, dict[str, Any]] = world.lasting.setdefault("tune.settings", {})
    case = (call, *(key[name] for name in by), dtype)
    if case not in known:
        if world.capturing:
            raise Unsupported.captured(world.rank, case)
        known[case] = ask()
    settings = known[case]
    mode = settings.get("mode")
    if mode == "gluon" and not gluon(call, False, True, world, dtype, rows, *columns):
        return {}
    return dict(settings)


def longest(call: str, world: World, k: int, *shared: object) -> int:
    """The greatest `k` of the ranks', which may differ in it, but not in what follows from it: that of the first call
    with what they share. Collective that time, which may not be in a capture: behind `check_agreed`."""
    known: dict[Any, int] = world.lasting.setdefault("pkt.kernels.longest", {})
    case = (call, *shared)
    if case not in known:
        if world.capturing:
            raise Unsupported.captured(world.rank, case)
        known[case] = max(world.all_gather_object(k))
    return known[case]


def unfused_rows(call: str, size: int) -> int:
    """Rows up to which a product and its collective, left to choose, are not fused; all_gather_matmul with shard
    "columns". By benchmarks/results/*.json of 4 x H200: unfused takes 46, 52 and 64 us with an all-reduce of 1, 16 and
    128 rows, 246 of 1024, the fastest fused form 67, 68, 64 and 223; with an all-gather 51, 52, 56 and 222 us, they 52,
    53, 60 and 246. On 2 with an all-reduce of 1024 rows 363 us, where the fastest fused form takes 392."""
    if call == "all_gather_matmul" or size == 2:
        return 1024
    return 128


def unfused(call: str, world: World, rows: int) -> bool:
    """Whether `call` takes mode "unfused" where the caller has left the choice open and nothing was tuned; never in the
    simulator, whose users are after the fused kernels. rows: alike on all ranks."""
    return torch.device(world.torch_device).type == "cuda" and rows <= unfused_rows(call, world.size)


def check_unfused(call: str, mode: str, given: Mapping[str, object], world: World) -> None:
    """`mode`, of _unfused, can run here, and no setting of the fused forms is given. "nccl" is collective the first
    time. Raises ShapeError, Unsupported."""
    for name, value in given.items():
        raise ShapeError.argument(call, name, value, f'none with mode "{mode}"', world.rank)
    if mode == "nccl":
        process_group(world)


Fit = Callable[[torch.Tensor], torch.Tensor]


def fitting(tensor: torch.Tensor) -> Fit | None:
    """What makes tensors of the same facts as this one fit for a TMA descriptor, None where they are: where it begins
    elsewhere than at a multiple of 16 bytes, a copy that lies as it does. No reason to choose another form, because the
    peers' tensors may begin elsewhere."""
    symmetric = isinstance(tensor, SymmetricTensor)
    plain = tensor.plain() if symmetric else tensor
    copied = not _common.aligned(stored(plain)[0])
    if not symmetric and not copied:
        return None

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.plain() if symmetric else tensor
        return plain.clone() if copied else plain

    return fit


def fitted(
    make: Callable[..., _common.Launch], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> _common.Launch:
    """make(a, b, out), launch(a, b, out, bias), with all three fit for TMA descriptors, and `out` filled in the end;
    out: None where it need not be fit."""
    fit_a, fit_b, fit_out = fitting(a), fitting(b), None if out is None else fitting(out)
    first = fit_out(out) if fit_out and out is not None else out
    launch = make(fit_a(a) if fit_a else a, fit_b(b) if fit_b else b, first)
    if not (fit_a or fit_b or fit_out):
        return launch

    def fit_and_launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = fit_out(out) if fit_out else out
        launch(fit_a(a) if fit_a else a, fit_b(b) if fit_b else b, result, bias)
        if result.data_ptr() != out.data_ptr():
            out.detach().copy_(result)  # as a kernel stores: also into what is trained
        return out

    return fit_and_launch
