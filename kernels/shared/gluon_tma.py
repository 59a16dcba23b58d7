"""TMA, and views of shared memory, in Gluon. Triton 3.6 and 3.7 call these functions otherwise than 3.8 and 3.9."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait


@builtin
def viewed(memory: Any, shape: Any, layout: Any, dtype: Any = None, _semantic: Any = None) -> Any:
    """Shared memory, seen as a block of another shape and layout, and of another dtype if one is given."""
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret
    return reinterpret(dtype or memory.dtype, shape, layout, _semantic=_semantic)
