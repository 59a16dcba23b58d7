"""The elements that a torch function chooses from a tensor by an index or a mask.

A table tells how to choose the same elements from another tensor of that shape. It is applied to the elements' places
in memory. What some functions write by an index, another one reads by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


# The parameters have torch's names, as calls may use them.
def _at(input: torch.Tensor, index: Any, *_: Any) -> torch.Tensor:
    return input[index]


def _at_all(input: torch.Tensor, indices: Any, *_: Any, **__: Any) -> torch.Tensor:
    return input[tuple(indices)]


def _along(input: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    if input.dim():
        index = index % input.shape[dim]  # for a function that counts negative ones from the end
    return input.index_select(dim, index)


def _gathered(input: torch.Tensor, dim: int, index: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input.gather(dim, index)


def _taken(input: torch.Tensor, index: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input.take(index)


def _taken_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None, **_: Any) -> torch.Tensor:
    return input.take_along_dim(indices, dim)


def _unmasked(input: torch.Tensor, mask: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return input.masked_select(mask)


_CHOOSE: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("__getitem__", "__setitem__"), _at),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _at_all),
    **dict.fromkeys(("index_select", "index_add_", "index_copy_", "index_fill_", "index_reduce_"), _along),
    **dict.fromkeys(("gather", "scatter_", "scatter_add_", "scatter_reduce_"), _gathered),
    **dict.fromkeys(("take", "put_"), _taken),
    "take_along_dim": _taken_along,
    **dict.fromkeys(("masked_select", "masked_fill_", "masked_scatter_"), _unmasked),
}


def chooses(name: str) -> bool:
    """Whether the torch function `name` reads or writes only some elements of its first argument."""
    return name in _CHOOSE


def chosen(tensor: torch.Tensor, name: str, args: tuple, kwargs: dict[str, Any]) -> np.ndarray:
    """Byte offsets from the first element of `tensor`, the function's first argument, to those that it reads or writes.
    There are none where it only makes a view, or will raise."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        places = torch.zeros((), dtype=torch.int64)
        for n, stride in zip(tensor.shape, tensor.stride()):
            places = places.unsqueeze(-1) + torch.arange(n) * (stride * tensor.element_size())
        others = {key: value for key, value in kwargs.items() if key not in ("input", "out")}
        try:
            found = _CHOOSE[name](places, *args[1:], **others)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return _NONE
        if name == "__getitem__" and found.untyped_storage().data_ptr() == places.untyped_storage().data_ptr():
            return _NONE
        return found.reshape(-1).numpy()


_NONE = np.empty(0, np.int64)
