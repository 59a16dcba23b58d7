"""The arguments of a launch: their names, and the local tensors among them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.language.core import constexpr

from pkt.errors import ShapeError
from pkt.runtime.world import World
from pkt.simulate.memory import AddressSpace, Region

_signature = functools.lru_cache(maxsize=1024)(inspect.signature)
_MISSING = inspect.Parameter.empty


@functools.lru_cache(maxsize=1024)
def _defaults(fn: Any) -> dict[str, Any]:
    """The default value of every parameter, by name; _MISSING for none. Empty if some parameter is no plain one."""
    found = _signature(fn).parameters
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found.values())
    return {name: p.default for name, p in found.items()} if plain else {}


def parameters(kernel: Any) -> list[tuple[str, bool, bool, str]]:
    """(name, is constexpr, is specialised, annotated type such as "i64" or "") for every parameter."""
    found: list[tuple[str, bool, bool, str]] | None = vars(kernel).get("_pkt_parameters")  # kept as long as the kernel
    if found is None:
        if hasattr(kernel, "params"):
            found = [(p.name, p.is_constexpr, not p.do_not_specialize, p.annotation_type) for p in kernel.params]
        else:  # decorated under TRITON_INTERPRET=1, where Triton keeps less of each parameter
            annotated = _signature(kernel.fn).parameters.items()
            found = [(name, "constexpr" in str(p.annotation), True, "") for name, p in annotated]
        vars(kernel)["_pkt_parameters"] = found
    return found


def bind(kernel: Any, args: tuple, named: dict) -> dict[str, Any]:
    """Every parameter's value by name, default values included."""
    defaults = _defaults(kernel.fn)
    given = dict(zip(defaults, args))
    found = {**defaults, **given, **named}
    plain = len(given) == len(args) and len(found) == len(defaults) and given.keys().isdisjoint(named)
    if not plain or any(value is _MISSING for value in found.values()):  # Python says what is wrong
        bound = _signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        found = dict(bound.arguments)
    for name, value in found.items():
        if isinstance(value, World):
            raise ShapeError.argument(kernel.fn.__name__, name, "a pkt.World", "world.device, its form for kernels")
    return found


def register(arguments: dict[str, Any], space: AddressSpace, rank: int, kernel: str) -> list[int]:
    """Make the launch's local tensors addressable; return their base addresses, to be dropped after the launch."""
    bases = []
    with torch._C.DisableTorchFunction():  # facts of tensors, which a watch over the rank's host code need not see
        for name, tensor in (t for key, value in arguments.items() for t in _tensors([value], key)):
            storage = tensor.untyped_storage()
            base, nbytes = storage.data_ptr(), storage.nbytes()
            if space.owner(base) is not None or nbytes == 0:
                continue
            if tensor.device.type != "cpu":
                raise TypeError(f"{kernel}: argument {name} is on {tensor.device}; simulated ranks compute on the CPU")
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()  # keeps the storage alive
            shape = tuple(tensor.shape)
            space.add_local(Region(base, nbytes, memory, rank, name, "local", tensor.element_size(), shape))
            bases.append(base)
    return bases


class Taken:
    """The local tensors whose `data_ptr()` host code has read: a kernel may load these addresses from memory."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, str, int]] = {}  # by first address

    def note(self, tensor: torch.Tensor, where: str) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage), where, tensor.element_size()

    def register(self, space: AddressSpace, rank: int) -> list[int]:
        """Make those that still exist addressable; return their base addresses, to be dropped after the launch."""
        bases = []
        for base, (weak, where, size) in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self._storages[base]
                continue
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            name, n = f"the tensor whose address was taken at {where}", storage.nbytes()
            space.add_local(Region(base, n, memory, rank, name, "local", size, (n // size,)))
            bases.append(base)
        return bases


_NO_TENSOR = frozenset({int, bool, float, str, type(None), constexpr})  # isinstance takes long to say no


def _tensors(values: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for value in values:
        if type(value) in _NO_TENSOR:
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from _tensors(value, name)
        else:  # a descriptor, triton.reinterpret's, or a descriptor of that
            yield from _tensors([getattr(value, "base", None)], name)
