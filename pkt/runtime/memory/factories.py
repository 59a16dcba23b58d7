"""pkt.empty, pkt.zeros, ...: torch's factories, in the symmetric heap.

All are collective: every rank makes the same calls in the same order with the same shapes and dtypes. Those that fill
the memory return when every rank's memory is filled, so a peer may be read or signalled at once. `empty` does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pkt.errors import DtypeError, ShapeError
from pkt.runtime.backend import Kind
from pkt.runtime.memory.callsite import call_site
from pkt.runtime.memory.tensor import SymmetricTensor, symmetric_over
from pkt.runtime.world import World, current_world
from pkt.wording import found_text

Size = int | Sequence[int]
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def empty(
    *size: Size, dtype: torch.dtype | None = None, name: str | None = None, world: World | None = None
) -> SymmetricTensor:
    """A symmetric tensor of undefined contents: `empty((m, k))` or `empty(m, k)`.

    dtype: torch's default where None. name: used in messages; where None, the name of the variable that the tensor is
    assigned to. world: the current one where None. Raises ShapeError, DtypeError, AllocationMismatch, HeapFull, Closed.
    """
    return _make("empty", torch.empty, (_shape("empty", size, world),), dtype, name, world, fill=False)


def zeros(
    *size: Size, dtype: torch.dtype | None = None, name: str | None = None, world: World | None = None
) -> SymmetricTensor:
    """`empty`, filled with zeros on every rank."""
    return _make("zeros", torch.zeros, (_shape("zeros", size, world),), dtype, name, world)


def ones(
    *size: Size, dtype: torch.dtype | None = None, name: str | None = None, world: World | None = None
) -> SymmetricTensor:
    """`empty`, filled with ones on every rank."""
    return _make("ones", torch.ones, (_shape("ones", size, world),), dtype, name, world)


def full(
    size: Size,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`empty`, filled with `fill_value`, which may differ between ranks; of its dtype where dtype is None."""
    return _make("full", torch.full, (_shape("full", (size,), world), fill_value), dtype, name, world)


def rand(
    *size: Size,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`empty`, filled with what torch.rand gives for `generator` or this rank's default one: uniform in [0, 1)."""
    return _make("rand", torch.rand, (_shape("rand", size, world),), dtype, name, world, generator=generator)


def randn(
    *size: Size,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`empty`, filled with what torch.randn gives for `generator` or this rank's default one: standard normal."""
    return _make("randn", torch.randn, (_shape("randn", size, world),), dtype, name, world, generator=generator)


def randint(
    low: int,
    high: int | Size | None = None,
    size: Size | None = None,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """Integers in [low, high), as torch.randint: `randint(low, high, size)` or `randint(high, size)`; int64 by
    default."""
    if size is None:
        low, high, size = 0, low, high if isinstance(high, Sequence) else None
    if size is None or not isinstance(high, int):
        raise _refused("randint", "arguments", (low, high, size), "(low, high, size) or (high, size)", world)
    if high <= low:
        raise _refused("randint", "low and high", (low, high), "low < high", world)
    shape = _shape("randint", (size,), world)
    return _make("randint", torch.randint, (low, high, shape), dtype, name, world, generator=generator)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """start, start + step, ... below end, as torch.arange; `arange(end)` starts at 0."""
    if end is None:
        start, end = 0, start
    if step == 0 or (end - start) / step < 0:
        found = (start, end, step)
        raise _refused("arange", "start, end, step", found, "a step that leads from start to end", world)
    return _make("arange", torch.arange, (start, end, step), dtype, name, world)


class Like(Protocol):
    """The type of `empty_like` and others."""

    def __call__(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        name: str | None = None,
        world: World | None = None,
    ) -> SymmetricTensor: ...


def _like(factory: Callable[..., SymmetricTensor], filled: Callable[..., torch.Tensor], fill: bool = True) -> Like:
    """`factory`, which allocates what torch's `filled` would, for the shape and dtype of another tensor."""
    call = f"{factory.__name__}_like"

    def like(
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        name: str | None = None,
        world: World | None = None,
    ) -> SymmetricTensor:
        shape = (_shape_of(call, x, world),)
        return _make(call, filled, shape, dtype or x.dtype, name, world, fill=fill, generator=generator)

    like.__name__ = like.__qualname__ = call
    like.__doc__ = f"`{factory.__name__}` with the shape and dtype of `x`; contiguous, whatever the strides of x are."
    return like


empty_like = _like(empty, torch.empty, fill=False)
zeros_like = _like(zeros, torch.zeros)
ones_like = _like(ones, torch.ones)
rand_like = _like(rand, torch.rand)
randn_like = _like(randn, torch.randn)


def full_like(
    x: torch.Tensor,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`full` with the shape and dtype of `x`."""
    return _make("full_like", torch.full, (_shape_of("full_like", x, world), fill_value), dtype or x.dtype, name, world)


def randint_like(
    x: torch.Tensor,
    low: int,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`randint` with the shape and dtype of `x`."""
    if high <= low:
        raise _refused("randint_like", "low and high", (low, high), "low < high", world)
    args = (low, high, _shape_of("randint_like", x, world))
    return _make("randint_like", torch.randint, args, dtype or x.dtype, name, world, generator=generator)


def signals(
    n: int,
    *,
    dtype: torch.dtype = torch.int32,
    unwaited: bool = False,
    name: str | None = None,
    world: World | None = None,
) -> SymmetricTensor:
    """`n` counters for signal and wait, apart from data. They begin at zero and are never reset.

    dtype: int32, or int64 for counts that outgrow it, such as bytes or positions of a stream. Barriers take int32.

    64 bytes lie before them (an int64 epoch word, then guard words) and 64 bytes of guard words after them. free, close
    and world.check() raise SignalIndexError if a guard word was overwritten.

    unwaited: signals that no kernel looks at are meant, such as credits that are left over at the end, or counters that
    only the host reads. Otherwise they are LostSignal in the simulator. Raises as `empty`.
    """
    shape = _shape("signals", (n,), world)
    if shape == (0,):
        raise _refused("signals", "n", n, "at least 1", world)
    if dtype not in (torch.int32, torch.int64):
        rank = (world or current_world("pkt.signals")).rank
        raise DtypeError.argument("signals", "dtype", dtype, "torch.int32 or torch.int64", rank)
    return _make("signals", torch.empty, (shape,), dtype, name, world, kind="signals", unwaited=unwaited)


def _refused(call: str, name: str, found: Any, wanted: str, world: World | None) -> ShapeError:
    """The error to raise for argument `name`."""
    rank = (world or current_world(f"pkt.{call}")).rank
    return ShapeError.argument(call, name, found, wanted, rank)


def _shape_of(call: str, x: torch.Tensor, world: World | None) -> tuple[int, ...]:
    if not isinstance(x, torch.Tensor):
        rank = (world or current_world(f"pkt.{call}")).rank
        raise DtypeError.argument(call, "x", found_text(x), "a tensor", rank)
    return tuple(x.shape)


def _shape(call: str, size: tuple[Any, ...], world: World | None) -> tuple[int, ...]:
    # The test for an int comes first, because the test for a Sequence costs as much as the rest of this function.
    given = size[0] if len(size) == 1 and type(size[0]) is not int and isinstance(size[0], Sequence) else size
    for extent in given:
        if type(extent) is not int or extent < 0:
            raise _refused(call, "size", tuple(given), "integers that are not negative", world)
    return tuple(given)


def _make(
    call: str,
    like: Any,
    args: tuple[Any, ...],
    dtype: torch.dtype | None,
    name: str | None,
    world: World | None,
    *,
    kind: Kind = "data",
    unwaited: bool = False,
    fill: bool = True,
    generator: torch.Generator | None = None,
) -> SymmetricTensor:
    """Allocate the tensor that torch's `like(*args)` would return, and let torch fill it."""
    if world is not None and not isinstance(world, World):
        raise DtypeError.argument(call, "world", type(world).__name__, "a pkt.World", current_world(f"pkt.{call}").rank)
    world = world or current_world(f"pkt.{call}")
    heap = world.heap
    if name is not None and not isinstance(name, str):
        raise DtypeError.argument(call, "name", found_text(name), "a string", world.rank)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        found = found_text(dtype)
        raise DtypeError.argument(call, "dtype", found, "a torch.dtype", world.rank)
    if dtype in _QUANTIZED:
        raise DtypeError.argument(call, "dtype", dtype, "a dtype that is not quantized", world.rank)
    if fill and kind == "data":
        try:  # torch knows the shape and dtype of its factory's result, and refuses wrong arguments
            meta = like(*args, dtype=dtype, device="meta")
            if like is torch.full:  # on "meta" every number fits every dtype
                torch.full((), args[1], dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, ValueError) as error:
            wanted = f"what torch.{like.__name__} takes ({error})"
            raise DtypeError.argument(call, "arguments", args, wanted, world.rank) from error
        shape, dtype = tuple(meta.shape), meta.dtype
    else:
        (shape,), dtype = args, dtype or torch.get_default_dtype()
    site = call_site(call)
    label = name or site.assigned or f"{call}@{site.text}"
    allocation = heap.allocate(shape, dtype, label, site.text, kind, unwaited)
    plain = heap.tensor(allocation)
    if fill:
        if kind == "data":
            options = {"generator": generator} if generator is not None else {}
            try:
                like(*args, out=plain, device=plain.device, **options)  # whatever torch.set_default_device says
            except (RuntimeError, TypeError, ValueError):  # torch has no such kernel, and so on every rank
                heap.free(allocation, site.text)
                raise
        heap.collective_point(f"filling allocation #{allocation.number}")
    return symmetric_over(plain, allocation)
