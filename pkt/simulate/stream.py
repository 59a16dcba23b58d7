"""Host code beside its rank's launches: which torch functions wait for them.

On a GPU a launch returns at once, and torch's own work queues behind it on the stream. Here torch computes at once, so
a torch function that reads or writes memory which a launch may touch waits until the rank's launches have ended. Such
memory is the symmetric heap, and the tensors that are arguments of the launches. Views and shapes do not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pkt.simulate.modes import Modes
from pkt.simulate.tasks import Host

# Torch functions that read and write no element. `__get__` is any attribute, such as `shape` and `T`.
_NO_ACCESS = frozenset(
    "__get__ __len__ size dim ndimension numel nelement stride element_size storage_offset data_ptr untyped_storage "
    "is_contiguous is_floating_point is_complex get_device requires_grad_ detach as_subclass view view_as as_strided "
    "select narrow unbind split chunk transpose swapaxes t permute movedim squeeze unsqueeze expand expand_as "
    "unflatten diagonal unfold".split()
)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a torch function."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def accesses(name: str, args: tuple) -> bool:
    """Whether the torch function `name` may read or write elements of its arguments."""
    if name == "__getitem__":  # a view, unless it is indexed by a tensor, a list or an array
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, (torch.Tensor, np.ndarray, list)) for i in index)
    return name not in _NO_ACCESS


class _Watch(TorchFunctionMode):
    """Active in the host code of a rank while its launches run."""

    def __init__(self, stream: Stream, host: Host) -> None:
        super().__init__()
        self.stream, self.host = stream, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.host.launched and not self.host.waits and accesses(getattr(func, "__name__", ""), args):
            self.stream.before(self.host, (*args, *kwargs.values()))
        return func(*args, **kwargs)


class Stream:
    """The watch over the host code of one machine's ranks."""

    def __init__(self, machine: Any) -> None:
        self.m = machine
        self._watches = [_Watch(self, host) for host in machine.hosts]

    def watched(self, host: Host) -> Modes:
        """The modes in which the host code of a rank goes on: with its watch, if launches run."""
        watch, own = self._watches[host.rank], host.modes
        if not host.launched and watch not in own.functions:
            return own
        functions = tuple(mode for mode in own.functions if mode is not watch)
        # Inside a torch function that waits, torch has put the watch aside and will put it back.
        return own._replace(functions=functions if host.waits or not host.launched else (watch, *functions))

    def before(self, host: Host, values: Any) -> None:
        """Wait for the launches of a rank if a torch function with these arguments accesses memory that they may."""
        if any(self._shared(tensor) for tensor in tensors_in(values)):
            with self.launching(host):
                self.m.finish_launches()

    def _shared(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                return False
            address = tensor.untyped_storage().data_ptr()
        return self.m.space.shared(address)

    @contextmanager
    def launching(self, host: Host) -> Iterator[None]:
        """Inside the `with`, torch functions of this host code do not wait."""
        outer, host.waits = host.waits, True
        try:
            yield
        finally:
            host.waits = outer
