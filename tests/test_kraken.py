"""The baseline kraken: installed, missing, and hidden by another package of its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _kraken

FUSED = """
import torch
from . import kept
def all_gather_matmul(a, b):
    assert b.t().is_contiguous() and not kept._tma_desc_cache
    kept._tma_desc_cache["result"] = a @ b
    return a, kept._tma_desc_cache["result"]
gemm_one_shot_all_reduce_fused = gemm_reduce_scatter_ce_persistent = lambda a, b: all_gather_matmul(a, b)[1]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kraken"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "kraken"]:
        del sys.modules[name]


def test_missing_kraken_gives_no_variant_and_a_reason() -> None:
    a = torch.ones(4, 4)
    assert _kraken.all_gather_matmul(a, a) == _kraken.matmul_reduce_scatter(a, a) == {}
    assert _kraken.matmul_all_reduce(a, a, 2) == {}
    assert _kraken.missing() == {"kraken": "kraken is not installed"}
    assert _kraken.shard(a) is a


def test_found_rejects_another_package_named_kraken(package: Path) -> None:
    assert not _kraken.found()


def test_variants_transpose_weights_once_and_clear_the_cache(package: Path) -> None:
    (package / "fused").mkdir()
    (package / "fused" / "__init__.py").write_text(FUSED)
    (package / "fused" / "kept.py").write_text("_tma_desc_cache = {}\n")
    assert _kraken.found()
    assert _kraken.missing() == {}
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    for variants in (
        _kraken.all_gather_matmul(a, b),
        _kraken.matmul_reduce_scatter(a, b),
        _kraken.matmul_all_reduce(a, b, 2),
    ):
        (run,) = variants.values()
        for _ in range(2):
            torch.testing.assert_close(run(), a @ b)


def test_all_reduce_has_no_variant_with_too_few_signals(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kraken needs a signal of four bytes from each rank for each block of 64 x 64."""
    import torch.distributed._symmetric_memory as symm_mem

    (package / "fused").mkdir()
    (package / "fused" / "__init__.py").write_text(FUSED)
    monkeypatch.setattr(symm_mem, "get_signal_pad_size", lambda: 4 * 3 * 6)
    a, b = torch.empty(65, 1), torch.empty(1, 192)
    assert _kraken.matmul_all_reduce(a, b, 3)
    assert not _kraken.matmul_all_reduce(a, b, 4)
    assert not _kraken.matmul_all_reduce(a, torch.empty(1, 193), 3)
