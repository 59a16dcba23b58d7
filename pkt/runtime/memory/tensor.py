"""Symmetric tensors: ordinary torch tensors over the symmetric heap, whose copies on other ranks `peer` returns.

A view of a symmetric tensor is symmetric; a result with storage of its own is a plain tensor. The host checks for use
after free and after close, and checks rank numbers. Before anything that a peer can see, it checks that every rank made
the same allocations (see `agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from pkt.errors import NotSymmetric, ShapeError, Unsupported
from pkt.runtime.memory.callsite import call_site
from pkt.runtime.memory.heap import Allocation
from pkt.runtime.world import World, check_rank
from pkt.wording import dtype_text, html_text, size_text

# Allowed after free() and close().
_ALWAYS = frozenset("__get__ size dim numel stride element_size storage_offset __repr__ is_contiguous".split())
# These change the address or the shape of a tensor in place: the facts that it remembers are then read again.
_RESHAPING = frozenset(
    "data= as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)

NO_MEMORY = "a tensor without memory has no facts"
TRACED: set[type] = set()
"""Types of tensors that stand for others in a graph, and have no memory. `pkt.kernels.traced` adds torch's."""


def name_of(func: Any) -> str:
    """The name of a torch function; "grad=" of what sets an attribute."""
    name = getattr(func, "__name__", "a torch function")  # some callables of torch have no name
    return f"{func.__self__.__name__}=" if name == "__set__" else name


def accessed(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Called before each torch function on a symmetric tensor. The simulator puts its own function here."""


def given_out() -> None:
    """Called where host code takes a plain tensor over the heap. The simulator puts its own function here."""


class _Once:
    """A non-data descriptor: an entry of the same name in the instance's __dict__ wins over it."""

    def __init__(self, getter: Any) -> None:
        self.getter = getter

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.getter if instance is None else self.getter.__get__(instance, owner)


class SymmetricTensor(torch.Tensor):
    """A tensor that every rank of a world has at the same offset of its heap. Made by pkt.empty, pkt.zeros, ..."""

    _allocation: Allocation
    _address: int
    _facts: tuple[Any, ...] | None

    # Triton reads dtype and data_ptr of every argument at every launch: a look-up in the instance costs a tenth of a
    # getter that goes through __torch_function__.
    dtype: Any = _Once(torch.Tensor.dtype)

    @property
    def _base(self) -> torch.Tensor | None:  # type: ignore[override]
        """As of any view, and plain: a symmetric one would be a view itself, and have a base in turn for ever."""
        with torch._C.DisableTorchFunctionSubclass():
            return super()._base

    @property
    def world(self) -> World:
        """The world this tensor belongs to."""
        owner = self._allocation.heap.owner
        if not isinstance(owner, World):
            raise Unsupported.no_world(f"{self.symbol}.world")
        return owner

    @property
    def symbol(self) -> str:
        """The name of this tensor in messages: `name=` of the factory, or the variable it was assigned to."""
        return self._allocation.block.name

    @property
    def multicast(self) -> torch.Tensor | None:
        """This tensor in the multicast window, for multimem instructions only; None if the world has no multicast."""
        heap = self._allocation.heap
        return self._in_window(heap.backend.size, "multicast") if heap.backend.multicast else None

    def peer(self, rank: int, world: World | None = None) -> torch.Tensor:
        """Rank `rank`'s copy, same shape and strides, as a plain tensor. world: the team that counts `rank`; the
        tensor's world where None. Raises RankError, NotSymmetric."""
        index = check_rank(rank, world or self._allocation.heap.backend, f"{self.symbol}.peer")
        if world is not None and world is not self.world:
            if self.world not in world.lineage:
                raise NotSymmetric.argument(world.rank, self.symbol, "a symmetric tensor of another world", "peer()")
            index = self.world.ranks.index(world.ranks[index])
        given_out()
        return self._in_window(index, f"peer({index})")

    def free(self) -> None:
        """Collective: give the memory back. Every rank frees the same tensors in the same order. Later use raises
        UseAfterFree; of what `peer` and `plain` returned it is undefined on GPUs. Raises ShapeError for a part of a
        tensor."""
        block = self._allocation.block
        with torch._C.DisableTorchFunctionSubclass():
            part = self.nbytes != math.prod(block.shape) * block.dtype.itemsize
        if part:
            wanted = f"the whole tensor, {block.shape}: free the tensor that it is a view of"
            found, rank = f"a part of {block.name!r}", self._allocation.heap.backend.rank
            raise ShapeError.argument("free", "tensor", found, wanted, rank)
        self._allocation.heap.free(self._allocation, call_site("free").text)

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary torch.Tensor."""
        self._allocation.use("plain()")
        given_out()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def data_ptr(self) -> int:
        """Address in this rank's window. Triton calls this at each launch, so the checks of a launch are here."""
        allocation = self._allocation
        if allocation.freed_at or allocation.heap.closed:
            allocation.use("a launch or data_ptr()")
        allocation.heap.agreement.settle()
        return self._address

    def _in_window(self, rank: int, call: str) -> torch.Tensor:
        allocation = self._allocation
        allocation.use(call)
        allocation.heap.agreement.settle()
        with torch._C.DisableTorchFunctionSubclass():
            itemsize, theirs = self.dtype.itemsize, allocation.heap.payload(allocation, rank)
            elements = theirs[: theirs.numel() // itemsize * itemsize].view(self.dtype)
            # The storage of a view is the block's, which starts with the first element, as the peer's storage does.
            found = elements.as_strided(self.size(), self.stride(), self.storage_offset())
            found = found.conj() if self.is_conj() else found
            return torch._neg_view(found) if self.is_neg() else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch has it
        block, rank = self._allocation.block, self._allocation.heap.backend.rank
        if self._allocation.heap.closed or self._allocation.freed_at:
            return f"symmetric {block.name!r} of rank {rank}, {block.shape} {block.dtype}, no longer allocated"
        with torch._C.DisableTorchFunctionSubclass():
            return f"symmetric {block.name!r} of rank {rank}: {self.as_subclass(torch.Tensor)!r}"

    def _repr_html_(self) -> str:
        """As a notebook shows it: what it is, then its elements."""
        if self._allocation.heap.closed or self._allocation.freed_at:
            return html_text(repr(self))
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
            facts = f"{tuple(plain.shape)} {dtype_text(plain.dtype)}, {size_text(plain.nbytes)}"
            where = f"symmetric {self.symbol!r} of rank {self._allocation.heap.backend.rank}"
            offset = self._address - self._allocation.heap.backend.base
            with torch._tensor_str.printoptions(threshold=100):  # torch's own 1000 fill a screen
                return html_text(f"{where}: {facts} at heap offset {offset}\n{plain!r}")

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # torch tells __torch_function__ of every other change
        return self.__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # in a graph it is a plain tensor
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("", "__set__"):  # both are rare, and a call here would cost each function
            name = name_of(func)
        if name == "_backward_hooks=":  # torch resets them under a lock that other functions take
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        sources = list(_symmetric_in((*args, *kwargs.values())))
        if name not in _ALWAYS:
            for source in sources:
                source._allocation.use(name)
            accessed(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _RESHAPING and args and isinstance(args[0], SymmetricTensor):
                with _reshaped(args[0]):
                    return _wrap(func(*args, **kwargs), sources)
            result = func(*args, **kwargs)
            if "out" in kwargs:  # which may have another shape now
                for source in sources:
                    source._facts = None
            return _wrap(result, sources)


def symmetric_over(plain: torch.Tensor, allocation: Allocation) -> SymmetricTensor:
    """`plain`, which lies in `allocation`, as a symmetric tensor."""
    tensor = plain.as_subclass(SymmetricTensor)
    kept, dtype = tensor.__dict__, plain.dtype
    offset = plain.storage_offset() * dtype.itemsize  # the storage begins with the block's elements
    kept["_allocation"], kept["dtype"], kept["_facts"] = allocation, dtype, None
    kept["_address"] = allocation.heap.backend.base + allocation.block.start + offset
    return tensor


def described(shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
    """A symmetric tensor of no memory and no world, for rules that ask what operands are."""
    heap = SimpleNamespace(closed=False, agreement=SimpleNamespace(settle=lambda: None))
    heap.backend = SimpleNamespace(base=0)
    nowhere = SimpleNamespace(heap=heap, block=SimpleNamespace(start=0), freed_at="", use=lambda call: None)
    return symmetric_over(torch.empty(tuple(shape), dtype=dtype, device="meta"), nowhere)  # type: ignore[arg-type]


@contextmanager
def _reshaped(tensor: SymmetricTensor) -> Iterator[None]:
    """Inside the `with`, a torch function may give `tensor` another shape or address. It is as before if the function
    raises, or leads out of the allocation: then NotSymmetric is raised."""
    before = tensor.detach()
    try:
        yield
        _remember(tensor)
    except BaseException:
        torch.Tensor.data.__set__(tensor, before)  # type: ignore[attr-defined]  # a descriptor
        raise


def _remember(tensor: SymmetricTensor) -> None:
    """Read the facts of `tensor` again, which was reshaped in place."""
    block, plain = tensor._allocation.block, tensor.as_subclass(torch.Tensor)
    address = tensor._allocation.heap.backend.base + block.start
    inside = plain.untyped_storage().data_ptr() + plain.storage_offset() * plain.dtype.itemsize - address
    if not 0 <= inside <= block.end - block.start:
        raise NotSymmetric.argument(
            tensor._allocation.heap.backend.rank, block.name, "memory outside its allocation", "a change in place"
        )
    tensor.__dict__.update(_address=address + inside, dtype=plain.dtype, _facts=None)


def facts(tensors: Iterable[Any], world: World, call: str, out: Any = None) -> list[Any]:
    """For each tensor, hashable, all that the checks and the plan of a launch may depend on: tensors with equal facts
    pass the same checks.

    | argument | facts |
    |---|---|
    | plain tensor | shape, strides, dtype, device, alignment of its address to 16 bytes, or 16 where it has none |
    | symmetric tensor, or plain one that lies in the heap | the address itself: peers compute theirs from it |
    | plain tensor that shares memory with `out`, the tensor written | its distance from `out` in addition |
    | `out` | differ from those of any other tensor |
    | tensor with torch's negative bit | that in addition |
    | no tensor | itself |

    Raises UseAfterFree, Closed; TypeError for a tensor in TRACED.
    """
    found: list[Any] = []
    span = world.span
    begin = end = 0
    # Half of a launch's host cost: so no function for each tensor, and no isinstance that says no, which is slow.
    if out is not None and type(out) is not SymmetricTensor and isinstance(out, torch.Tensor):
        if type(out) in TRACED:
            raise TypeError(NO_MEMORY)
        begin = out.data_ptr()
        end = begin + out.nbytes
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        elif type(tensor) is not torch.Tensor and isinstance(tensor, SymmetricTensor):
            allocation = tensor._allocation
            if allocation.freed_at or allocation.heap.closed:
                allocation.use(call)
            found.append(tensor._facts or _found_out(tensor))
        elif isinstance(tensor, torch.Tensor):
            if type(tensor) in TRACED:
                raise TypeError(NO_MEMORY)
            address = tensor.data_ptr()
            place: Any = address if address in span else address & 15 if address else 16
            if tensor is out:
                place = ~place
            elif address < end and begin - address < tensor.nbytes:
                place = place, begin - address
            if tensor.is_neg():
                place = place, "negative"
            found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place))
        else:
            found.append(tensor)
    return found


def _found_out(tensor: SymmetricTensor) -> tuple[Any, ...]:
    """`facts` of a symmetric tensor, which remembers them."""
    with torch._C.DisableTorchFunctionSubclass():
        known = (tensor.shape, tensor.stride(), tensor.dtype, tensor._address, id(tensor._allocation), tensor.is_neg())
    tensor._facts = known
    return known


def _symmetric_in(values: Any) -> Iterator[SymmetricTensor]:
    for value in values:
        if isinstance(value, SymmetricTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _symmetric_in(value)


def _wrap(result: Any, sources: list[SymmetricTensor]) -> Any:
    """`result`, with views of a source as symmetric tensors."""
    if isinstance(result, SymmetricTensor):
        return result
    if isinstance(result, torch.Tensor):
        if result.device.type == "meta":
            return result
        try:
            storage = result.untyped_storage().data_ptr()
        except NotImplementedError:  # it has none, as a sparse tensor or one inside of torch.func.jvp
            return result
        address = storage + result.storage_offset() * result.dtype.itemsize
        for source in sources:
            block, base = source._allocation.block, source._allocation.heap.backend.base
            inside = base + block.offset <= address <= base + block.end or not result.numel()
            if inside and storage == source.untyped_storage().data_ptr():
                return symmetric_over(result, source._allocation)
        return result
    if isinstance(result, (list, tuple)) and any(isinstance(r, torch.Tensor) for r in result):
        wrapped = [_wrap(r, sources) for r in result]
        if isinstance(result, list):
            return wrapped
        return type(result)(wrapped) if type(result) is not tuple else tuple(wrapped)
    return result
