"""Host code beside its rank's launches: which torch functions wait for them, and what they access.

On a GPU a launch returns at once, and torch's own work queues behind it on the stream. Here torch computes at once, so
a torch function that reads or writes memory which a launch may touch waits until the rank's launches have ended. Such
memory is the symmetric heap, and the tensors that are arguments of the launches. Views and shapes do not wait. The race
detector learns which parts of the heap such a function reads and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from pkt.errors import UseAfterFree
from pkt.runtime.memory.tensor import name_of
from pkt.simulate.loops import POLL, HostLoop, Slice
from pkt.simulate.memory import Access, Place, Scattered, Strided, Unmapped
from pkt.simulate.modes import Modes
from pkt.simulate.sites import host_state
from pkt.simulate.tasks import Host

# Torch functions that read and write no element. `__get__` is any attribute, such as `shape` and `T`; those whose names
# end in "=" set one.
_NO_ACCESS = frozenset(
    "__get__ __len__ size dim ndimension numel nelement stride element_size storage_offset data_ptr untyped_storage "
    "is_contiguous is_floating_point is_complex get_device requires_grad_ detach as_subclass view view_as as_strided "
    "select narrow unbind split chunk transpose swapaxes t permute movedim squeeze unsqueeze expand expand_as "
    "unflatten diagonal unfold swapdims moveaxis adjoint tensor_split broadcast_to view_as_real view_as_complex set_ "
    "resize_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ empty_like zeros_like ones_like "
    "rand_like randn_like randint_like new_empty new_zeros new_ones is_pinned is_shared is_same_size _is_view is_neg "
    "is_conj is_inference is_set_to hsplit vsplit dsplit split_with_sizes unsafe_split unsafe_chunk atleast_1d "
    "atleast_2d atleast_3d meshgrid broadcast_tensors real imag conj positive".split()
)
# Nor do these where the tensor is contiguous: they return a view of it, or the tensor itself.
_NO_ACCESS_CONTIGUOUS = frozenset("reshape reshape_as flatten ravel contiguous".split())

# Torch functions that change their first argument and whose names do not end in one underscore.
_CHANGES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__".split()
)
_WORDS = 4096  # bytes that a poll of host code reads at most
_BASIC = (int, slice, type(None), type(...), np.integer)  # such indices make a view; a bool does not
_HOST_READS = Slice((), frozenset(), (), frozenset())


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a torch function."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def accesses(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the torch function `name` may read or write elements of its arguments."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, bool) or not isinstance(i, _BASIC) for i in index)
    if name in _NO_ACCESS_CONTIGUOUS and args and isinstance(args[0], torch.Tensor) and "memory_format" not in kwargs:
        with torch._C.DisableTorchFunctionSubclass():
            return not args[0].is_contiguous()
    return name not in _NO_ACCESS and not name.endswith("=")


def _address(tensor: torch.Tensor) -> int:
    """Of its first element, of a freed tensor, too."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


class _Watch(TorchFunctionMode):
    """Active in the host code of a rank while its launches run, and from its first plain tensor over the heap, or its
    first `free`, on."""

    def __init__(self, stream: Stream, host: Host) -> None:
        super().__init__()
        self.stream, self.host = stream, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.host.waits:
            return func(*args, **kwargs)
        name = name_of(func)
        self.stream.accessed(name, args, kwargs)
        self.stream.told = self.host.rank, name, (*args, *kwargs.values())
        try:
            return func(*args, **kwargs)
        finally:
            self.stream.told = None


class Stream:
    """The watch over the host code of one machine's ranks."""

    def __init__(self, machine: Any) -> None:
        self.m = machine
        self._watches = [_Watch(self, host) for host in machine.hosts]
        self.told: tuple[int, str, tuple] | None = None
        """The rank, name and arguments of a torch function that a watch has told of; a symmetric tensor tells again."""

    def close(self) -> None:
        """The watches refer to this stream."""
        self._watches.clear()

    def watched(self, host: Host) -> Modes:
        """The modes in which the host code of a rank goes on: with its watch, if launches run."""
        watch, own = self._watches[host.rank], host.modes
        needed = host.launched or host.watched
        if not needed and watch not in own.functions:
            return own
        functions = tuple(mode for mode in own.functions if mode is not watch)
        # Inside a torch function that waits, torch has put the watch aside and will put it back.
        return own._replace(functions=functions if host.waits or not needed else (watch, *functions))

    def watch_of(self, rank: int) -> TorchFunctionMode:
        """The watch over a rank's host code."""
        return self._watches[rank]

    def watch(self, host: Host) -> None:
        """Watch the host code of a rank from now on: it has plain tensors over memory that others use."""
        if host.watched or self.m.current is not host.task:
            return
        host.watched = True
        count = torch._C._len_torch_function_stack()
        inner = [_pop_mode() for _ in range(count)]
        if self._watches[host.rank] not in inner:
            inner.append(self._watches[host.rank])  # outermost, so that the code's own modes end as they began
        for mode in reversed(inner):
            _push_mode(mode)

    def accessed(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a torch function of host code: wait for the rank's launches if it accesses memory that they may, and
        tell the race detector which parts of the heap it reads and writes. Raises UseAfterFree."""
        m = self.m
        task = m.current
        if task is None or not task.is_host or m.hosts[task.rank].waits or not accesses(name, args, kwargs):
            return
        if CompileContext.try_get() is not None:  # it asks for facts, under a lock for which no other rank may wait
            return
        told, self.told = self.told, None
        values = (*args, *kwargs.values())
        if told is not None and told[:2] == (task.rank, name) and list(map(id, told[2])) == list(map(id, values)):
            return
        host = m.hosts[task.rank]
        tensors = [tensor for tensor in tensors_in(values) if self._shared(tensor)]
        if not tensors:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors if m.freed else ():
                region = self.m.space.holding(_address(tensor))
                if region is not None and region.freed_at:
                    raise UseAfterFree.host(task.rank, name, region.name, region.freed_at)
        host.waits = True
        try:
            m.finish_launches()  # other tasks may run here: so outside the `with`, whose effect is the thread's
            loop = task.loops.get(POLL)
            if isinstance(loop, HostLoop) and loop.pauses:
                m.pause()
            with torch._C.DisableTorchFunctionSubclass():
                written = self._written(name, args, kwargs)
                if m.races:
                    self._record(name, args, kwargs, tensors, written)
                if not written:  # on a GPU some of these wait for the result
                    m.settle()
                self._polled(task, name, [] if written else tensors)
        finally:
            host.waits = False

    def _polled(self, task: Any, name: str, tensors: list[torch.Tensor]) -> None:
        """Note what a torch function reads: host code that only reads the same words again lets other tasks run."""
        read = [access for tensor in tensors if (access := self._access(tensor)) is not None]
        if not read or sum(access.nbytes for access in read) > _WORDS:
            task.loops.clear()
            return
        loop = task.loops.setdefault(POLL, HostLoop(_HOST_READS))
        values = [access.view(np.dtype(f"V{access.itemsize}")).tobytes() for access in read]
        loop.seen = hash((name, *values, *(access.first() for access in read)))
        if not loop.turned(host_state(sys._getframe()), ()):
            self.m.device.end_round(loop)
        loop.progress = self.m.progress
        loop.polled.update((access.first(), access) for access in read)

    @staticmethod
    def _written(name: str, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        written = list(tensors_in([kwargs.get("out")]))
        changes = (name.endswith("_") and not name.endswith("__")) or name in _CHANGES or kwargs.get("inplace")
        if changes:  # one tensor, or the list of a `_foreach` function
            written += tensors_in((*args, *kwargs.values())[:1])
        return written

    def _record(self, name: str, args: tuple, kwargs: dict[str, Any], tensors: list, written: list) -> None:
        from pkt.simulate.chosen import chooses  # here, because importing pkt should load little

        first = next(iter((*args, *kwargs.values())))
        for tensor in tensors:
            some = tensor is first and chooses(name)
            access = self._some(tensor, name, args, kwargs) if some else self._access(tensor)
            if access is not None and any(tensor is other for other in written):
                self.m.device.detector.write(access, "store", is_async=False)
            elif access is not None:
                self.m.device.detector.read(access, "load")

    def _some(self, tensor: torch.Tensor, name: str, args: tuple, kwargs: dict[str, Any]) -> Access | None:
        """The part of the heap that a torch function chooses from `tensor`, its first argument."""
        from pkt.simulate.chosen import chosen

        if name == "__setitem__" and not accesses("__getitem__", args, {}):  # of a view
            return self._access(tensor[args[1]])
        whole = self._access(tensor)
        if whole is None:
            return None
        offsets = whole.place.offset + chosen(tensor, name, args, kwargs)
        return Scattered(whole.region, offsets, whole.itemsize) if offsets.size else None

    def _access(self, tensor: torch.Tensor) -> Strided | None:
        """The part of the heap that a tensor lies on; None for other memory."""
        itemsize = tensor.element_size()
        address = _address(tensor)
        if not tensor.numel() or self.m.space.owner(address) is None:
            return None
        try:
            region = self.m.space.find(address)
        except Unmapped:
            return None
        axes = [(n, s * itemsize) for n, s in zip(tensor.shape, tensor.stride()) if n > 1 and s]
        axes.sort(key=lambda axis: -axis[1])
        if not axes or axes[-1][1] != itemsize:
            axes.append((1, itemsize))
        shape, strides = zip(*axes)
        return Strided(region, Place(address - region.base, shape, strides, itemsize))

    def _shared(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.device.type != "cpu":
                return False
            try:
                address = tensor.untyped_storage().data_ptr()
            except NotImplementedError:  # it has no storage, as a sparse tensor or one inside of torch.func.jvp
                return False
        return self.m.space.shared(address)

    @contextmanager
    def launching(self, host: Host) -> Iterator[None]:
        """Inside the `with`, torch functions of this host code do not wait."""
        outer, host.waits = host.waits, True
        try:
            yield
        finally:
            host.waits = outer
