"""Quantising to fp8 by 128 columns: right within a rounding, ragged sizes, and it compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pkt.kernels.shared.fp8 import BLOCK, LEAST_SCALE, quantize_kernel, quantized
from pkt.language.inspect import Pointer, compile_only

from .helpers import on_ranks, random
from .machine_code import resources


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_right_within_a_rounding(dtype: torch.dtype) -> None:
    """Rows and columns that fill no program, a group of zeros, and one group far larger than its neighbours."""

    def run(world: Any) -> None:
        x = random((5, 1152), dtype, 1)
        x[1, 128:256], x[4, 1024:] = 0, 2**30
        found, scales = quantized(world, x)
        groups = x.double().view(5, 9, 128)
        scale = (groups.abs().amax(2) / 448).clamp(min=LEAST_SCALE)
        assert ((scales.double() - scale).abs() <= 2.0**-23 * scale).all()
        values = found.double().view(5, 9, 128) * scales.double()[:, :, None]
        # e4m3 has 3 bits behind the point, and its least number is 2^-9.
        assert ((values - groups).abs() <= (2.0**-4 + 2.0**-21) * groups.abs() + 2.0**-10 * scale[:, :, None]).all()
        assert [part.shape for part in quantized(world, x[:0])] == [(0, 1152), (0, 9)]

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch: int, tmp_path: Path) -> None:
    args = Pointer("bf16", 4096), Pointer("fp8e4nv", 4096), Pointer("fp32", 4096), 128, 7168, LEAST_SCALE, *BLOCK
    compiled = compile_only(quantize_kernel, *args, arch=arch)
    usage = resources(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
