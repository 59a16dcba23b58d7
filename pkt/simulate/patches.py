"""Attributes of other modules and their classes that a simulation replaces, and puts back at its end."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Owner:
    """A module or a class: its attributes before the patches, and those that these change."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.is_module = owner, inspect.ismodule(owner)
        self.before = dict(vars(owner))
        self.changed: dict[str, Any] = {}  # name -> value before, where there was one
        self.values: dict[str, Any] = {}  # name -> value

    def set(self, values: dict[str, Any]) -> None:
        if self.is_module:  # at once: this takes a tenth of the time
            vars(self.owner).update(values)
            return
        for name, value in values.items():
            setattr(self.owner, name, value)

    def undo(self) -> None:
        self.set(self.changed)
        for name in self.values.keys() - self.changed.keys():
            if name in vars(self.owner):
                delattr(self.owner, name)


class Patches:
    """Attributes, and the values that they have between `apply` and `remove`."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._applied: list[_Owner] = []
        self.replaced: dict[int, Any] = {}
        """Id of each value of a module that the patches replace -> its replacement."""
        self._modules: set[str] = set()  # names of those that have taken no replacement

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of `owner` at the next `apply`."""
        known = self._owners.get(id(owner))
        if known is None:
            known = self._owners[id(owner)] = _Owner(owner)
        # The class's own dictionary: getattr would bind descriptors and find inherited names.
        if name in known.before:
            known.changed[name] = known.before[name]
            if known.is_module:
                self.replaced[id(known.before[name])] = value
        known.values[name] = value

    def value(self, owner: Any, name: str) -> Any:
        """An attribute as the patches so far make it."""
        known = self._owners.get(id(owner))
        return known.values[name] if known is not None and name in known.values else getattr(owner, name)

    def serve(self) -> bool:
        """Whether no attribute of their owners has changed since they were made."""
        return bool(self._owners) and all(vars(o.owner) == o.before for o in self._owners.values())

    def clear(self) -> None:
        self._owners.clear()
        self.replaced.clear()

    def apply(self) -> None:
        self._modules = set(sys.modules)
        for owner in self._owners.values():
            self._applied.append(owner)  # first: an interrupt may come while half of its values are set
            owner.set(owner.values)

    def _return_imports(self) -> None:
        """Give modules that were imported since `apply` what `from triton.language import exp` would have given them
        before."""
        new = {name for name in list(sys.modules) if name.partition(".")[0] != "pkt"} - self._modules
        if not new:
            return
        owners = [owner for owner in self._owners.values() if owner.is_module]
        before = {id(owner.values[name]): value for owner in owners for name, value in owner.changed.items()}
        for name in new:
            module = sys.modules.get(name)
            if inspect.ismodule(module) and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                vars(module).update({n: before[id(v)] for n, v in vars(module).items() if id(v) in before})
                self._modules.add(name)

    def remove(self) -> None:
        self._return_imports()
        while self._applied:
            self._applied.pop().undo()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the context lasts, attributes have their values from before."""
        self._return_imports()
        for owner in self._applied:
            owner.undo()
        try:
            yield
        finally:
            for owner in self._applied:
                owner.set(owner.values)
