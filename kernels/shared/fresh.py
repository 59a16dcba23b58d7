"""New tensors for every call of a plan, at half of what `torch.empty` costs the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_modes = torch._C._len_torch_dispatch_stack


def making(of: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """make(): empty contiguous tensors of these shapes and dtypes, on the current GPU where `device` is one.

    By the function that torch's compiled code calls: `torch.empty` takes 1.4 us of Python and dispatch, and this 0.6. A
    dispatch mode of torch does not see it, so it is not called in one. It is private to torch: another release may not
    have it."""
    plain = [functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device) for shape, dtype in of]
    guards: Any = getattr(torch._C._dynamo, "guards", None)
    empty = getattr(guards, f"_empty_strided_{device.type}", None)
    quick = plain
    if empty is not None:
        strides = [torch.empty(tuple(shape), device="meta").stride() for shape, _ in of]
        quick = [functools.partial(empty, tuple(shape), how, dtype) for (shape, dtype), how in zip(of, strides)]
    return lambda: [new() for new in (plain if _modes() else quick)]
