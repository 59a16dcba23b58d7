"""No test of the tuner uses the cache or the PKT_NCCL of the person who runs it."""

import pytest

from pkt.tune import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty folder for this test alone, and no memory of other tests."""
    monkeypatch.setenv("PKT_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PKT_NCCL", raising=False)
    monkeypatch.setattr(cache, "_simulated", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"
