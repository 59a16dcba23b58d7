"""What the wrappers share: argument checks that come before any launch, grids, counters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from pkt.errors import CollectiveMismatch, DtypeError, NotSymmetric, ShapeError, Unsupported
from pkt.runtime.memory.checks import symmetric
from pkt.runtime.memory.factories import signals
from pkt.runtime.memory.tensor import SymmetricTensor, facts
from pkt.runtime.world import Workspace, World, current_world

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What reduces and multiplies; every one accumulates in fp32."""

COPY_BYTES = 16384
"""Bytes of a block that a program moves through registers at a time: with 8 warps the links are full from 16
programs."""

MAX_BLOCK = 1 << 20
"""Elements that Triton has in a block at most."""

COPY_OPTIONS = {"num_warps": 8, "maxnreg": 255}
"""How the kernels that only move and add are launched: one program an SM, so all the registers are its own."""


def world_of(call: str, world: World | None, *arguments: Any) -> World:
    """`world`, or that of the first symmetric tensor or workspace, or the current one. Raises DtypeError."""
    if world is not None:
        if not isinstance(world, World):
            raise DtypeError.argument(call, "world", type(world).__name__, "a pkt.World", current_world(call).rank)
        return world
    for argument in arguments:
        # An isinstance that says no is slow, and these are what most arguments are.
        if argument is None or type(argument) is torch.Tensor:
            continue
        if isinstance(argument, (SymmetricTensor, Workspace)):
            return argument.world
    return current_world(call)


def num_programs(world: World, tasks: int) -> int:
    """A grid that is resident on every rank, the same on all, no larger than `tasks` asks for."""
    known = world.lasting  # of the world, whatever the workspace: asked for each, some ranks might ask alone
    if "pkt.kernels.sms" not in known:
        known["pkt.kernels.sms"] = min(world.all_gather_object(world.num_sms))
    return max(1, min(known["pkt.kernels.sms"], tasks))


def barrier_counters(world: World) -> SymmetricTensor:
    """A counter for each program index, for `pl.barrier`; shared by all operators, which leave it balanced."""
    sms = num_programs(world, world.num_sms)
    return world.keep(("pkt.kernels", "barrier"), lambda: signals(sms, name="kernels.barrier", world=world))


Launch = Callable[..., torch.Tensor]
"""What is left of an operator once its arguments are known to be good: launch(*tensors) -> the result. It keeps none of
the tensors that it was made with."""


def planned(
    call: str,
    plan: Callable[..., Launch],
    world: World,
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    out: Any = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """plan(world, *tensors, *settings)(*tensors), where the plan is made once for tensors of the same facts. out: which
    of them is written, if any: autograd is told, so that a backward pass that needs what it held before raises.

    Checks, workspaces and the choice of a grid cost a hundred microseconds, as much as a small operator: they are
    plan's, and belong to `workspace`, to the world where None. Raises what `plan` raises, each time.
    """
    if workspace is not None:
        with world.using(workspace, call):
            return planned(call, plan, world, tensors, settings, out)
    plans = world.plans
    try:
        key = (plan, settings, *facts(tensors, world, call, out))
        launch = plans.get(key)
    except (TypeError, RuntimeError):  # a list among the settings, or a tensor with no address: nothing to look up
        key = launch = None
    if launch is None:
        launch = plan(world, *tensors, *settings)
        if key is not None:
            plans[key] = launch
    result = launch(*tensors)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return result


def fresh(shape: Sequence[int], dtype: torch.dtype, world: World) -> Callable[[], torch.Tensor]:
    """Makes new tensors for results."""
    return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=world.torch_device)


# ------------------------------------------------------------------------------------------------------ checks
def check_tensor(
    call: str,
    name: str,
    tensor: Any,
    world: World,
    *,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    peers: bool = False,
) -> torch.Tensor:
    """`tensor`, contiguous, on this rank's device, of the shape and dtype asked for; symmetric if `peers`
    access it.

    Raises NotSymmetric, ShapeError or DtypeError, naming `name` and `call`.
    """
    check_dense(call, name, tensor, world)
    if peers:
        symmetric(tensor, name, world, call=call)
    if dtype is not None and tensor.dtype != dtype:
        raise DtypeError.argument(call, name, tensor.dtype, _name(dtype), world.rank)
    if dtypes is not None and tensor.dtype not in dtypes:
        raise DtypeError.argument(call, name, tensor.dtype, " or ".join(map(_name, dtypes)), world.rank)
    found = tuple(tensor.shape)
    if ndim is not None and tensor.ndim != ndim:
        raise ShapeError.argument(call, name, found, f"{ndim} dimensions", world.rank)
    if shape is not None and found != tuple(shape):
        raise ShapeError.argument(call, name, found, str(tuple(shape)), world.rank)
    if not tensor.is_contiguous():
        strides = f"{found} with strides {tuple(tensor.stride())}"
        remedy = (
            "allocate one of this shape with pkt" if isinstance(tensor, SymmetricTensor)
            else "allocate one, and copy from it" if name == "out"
            else f"{name}.contiguous()"
        )  # fmt: skip
        raise ShapeError.argument(call, name, strides, f"a contiguous tensor: {remedy}", world.rank)
    if tensor.device.type != world.torch_device.type:
        raise NotSymmetric.argument(world.rank, name, f"one on {tensor.device}", call)
    return tensor


def check_dense(call: str, name: str, tensor: Any, world: World) -> None:
    """Raise DtypeError unless `tensor` is a tensor that has strides."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError.argument(call, name, type(tensor).__name__, "a tensor", world.rank)
    if tensor.layout is not torch.strided:
        found = f"a tensor with layout {_name(tensor.layout)}"
        remedy = "" if name == "out" else f": {name}.to_dense()"
        raise DtypeError.argument(call, name, found, f"a dense one{remedy}", world.rank)


def check_apart(
    call: str, x: torch.Tensor, out: torch.Tensor, world: World, own: int | None = None, name: str = "x"
) -> None:
    """Raise ShapeError if `out` and `x`, called `name`, share memory, which would be read after it is overwritten;
    except where the smaller of the two is place `own` of the larger one, cut in parts of its size."""
    start = out.data_ptr() - x.data_ptr()
    if not -out.nbytes < start < x.nbytes or not x.nbytes or not out.nbytes:
        return
    place = start if out.nbytes < x.nbytes else -start  # of the smaller one in the larger one
    if own is None or place != own * min(x.nbytes, out.nbytes):
        wanted = "memory of its own" + ("" if own is None else ", or this rank's part")
        raise ShapeError.argument(call, "out", f"a tensor {start} bytes from {name}", wanted, world.rank)


def check_block(call: str, block: int | None, world: World) -> None:
    """Raise ShapeError or DtypeError unless `block` is None or a power of two that Triton can take."""
    check_integers(call, world, block=block)
    if block is not None and (not 1 <= block <= MAX_BLOCK or block & (block - 1)):
        raise ShapeError.argument(call, "block", block, f"a power of two up to {MAX_BLOCK}", world.rank)


def check_integers(call: str, world: World, **given: Any) -> None:
    """Raise DtypeError unless each of `given` is an int, as Triton takes no other, or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, int):
            raise DtypeError.argument(call, name, f"{type(value).__name__} {value!r:.40}", "an integer", world.rank)


def check_choice(call: str, name: str, found: Any, choices: tuple[str, ...], world: World) -> None:
    """Raise Unsupported unless `found` is one of `choices`."""
    if found not in choices:
        raise Unsupported.here(
            f"rank {world.rank}: {call}", f"found {name} {found!r}", f"wanted {' or '.join(map(repr, choices))}"
        )


def check_agreed(call: str, world: World, **arguments: Any) -> None:
    """Collective the first time a signature is seen: every rank called with the same one. Raises CollectiveMismatch.

    Tensors count with shape, dtype and, if symmetric, their offset in the heap, because peers find them by arithmetic.
    """
    if world.handed_in is not None:
        arguments["workspace"] = world.handed_in
    signature = tuple(_signature(value, world) for value in arguments.values())

    def compare() -> bool:
        said = ", ".join(f"{name}={_described(value)}" for name, value in zip(arguments, signature))
        everybody = world.all_gather_object(f"{call}({said})")
        if len(set(everybody)) > 1:
            raise CollectiveMismatch.calls(dict(enumerate(everybody)))
        return True

    world.keep(("pkt.kernels", "agreed", call, signature), compare)


def anywhere(tensor: Any) -> Any:
    """`tensor` for `check_agreed` where only its own rank accesses it: its place in the heap does not count."""
    return tensor.plain() if isinstance(tensor, SymmetricTensor) else tensor


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int | None  # in the heap, if symmetric


def _signature(value: Any, world: World) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    offset = value.data_ptr() - world.backend.base if isinstance(value, SymmetricTensor) else None
    return _Tensor(tuple(value.shape), value.dtype, offset)


def _described(value: Any) -> str:
    if not isinstance(value, _Tensor):
        return repr(value)
    where = "" if value.offset is None else f" at heap offset {value.offset}"
    return f"{value.shape} {_name(value.dtype)}{where}"


def _name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row of these begins at a multiple of 16 bytes, as TMA and multimem need."""
    return all(t.data_ptr() % 16 == 0 and (t.shape[-1] * t.element_size()) % 16 == 0 for t in tensors if t.numel())


def copy_block(tensor: torch.Tensor, block: int | None) -> int:
    """Elements a program moves at a time: `block`, or COPY_BYTES of them, less where there are fewer."""
    return block or min(COPY_BYTES // tensor.element_size(), triton.next_power_of_2(max(tensor.numel(), 16)))
