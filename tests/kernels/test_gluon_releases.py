"""Every Gluon kernel compiles with this release of Triton, and keeps its waits and signals. `make newest` runs this on
the newest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pkt.kernels.shared import gluon_fits
from pkt.kernels.shared.fp8 import FP8
from pkt.language.inspect import count_markers

from . import test_gluon_all_to_all_matmul as heads
from . import test_gluon_flash_decode as decode
from . import test_gluon_ring_attention as ring
from . import test_gluon_ring_backward as ring_backward
from . import test_gluon_ulysses_attention as ulysses
from .gluon_compiling import product, reduce, scatter

BF16 = torch.bfloat16


def of(call: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    return lambda world, monkeypatch: call(world, 1024, 1024, 1024, dtype).kernel


def backward(at: int) -> Callable[..., Any]:
    return lambda world, monkeypatch: ring_backward.compiled(ring_backward.launches(monkeypatch, 2, 64, BF16, True)[at])


KERNELS = {  # with its waits and signals
    "product": (of(product, BF16), 2, 4),
    "product of fp8": (of(product, FP8), 6, 6),
    "scatter": (of(scatter, BF16), 1, 1),
    "scatter of fp8": (of(scatter, FP8), 1, 1),
    "reduce": (of(reduce, BF16), 4, 1),
    "reduce of fp8": (of(reduce, FP8), 4, 1),
    "heads": (lambda *_: heads.compiled(2, BF16, False, False, gluon_fits.TILES), 1, 0),
    "decode": (lambda *_: decode.compiled(BF16, 128, 1, 64, False, False), 0, 0),
    "decode of fp8": (lambda *_: decode.compiled(BF16, 128, 1, 64, False, True, "fp8e4nv"), 0, 0),
    "ring": (lambda *_: ring.compiled(2, 128, BF16, True), 1, 0),
    "ring backward, queries": (backward(0), 1, 0),
    "ring backward, keys": (backward(1), 1, 0),
    "ulysses": (lambda *_: ulysses.compiled(2, 128, BF16, 1, False, False, True), 2, 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles(name: str, compiling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make, waits, signals = KERNELS[name]
    kernel = make(compiling(0, 2), monkeypatch)
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared <= gluon_fits.SHARED
    assert "cubin" in kernel.asm
    assert count_markers(kernel.asm["ttgir"]) == {"wait": waits, "signal": signals}
