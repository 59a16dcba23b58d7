"""pkt.launch and pkt.init with wrong arguments leave nothing behind."""

import tempfile

import pytest
import torch

import pkt
from pkt.errors import ShapeError
from pkt.runtime import bootstrap
from pkt.runtime.workers import workers


@pytest.fixture
def one_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU; the folder of temporary files, empty."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bootstrap, "own_device", lambda: 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def test_init_with_a_wrong_heap_leaves_no_directory(one_gpu):
    with pytest.raises(ShapeError, match="heap= or PKT_HEAP"):
        pkt.init(heap="much")
    assert list(one_gpu.iterdir()) == []


def test_init_that_finds_its_gpu_broken_leaves_no_directory(one_gpu, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(bootstrap, "own_device", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        pkt.init()
    assert list(one_gpu.iterdir()) == []


def test_launch_with_a_wrong_heap_starts_no_process(one_gpu, monkeypatch):
    started = []
    monkeypatch.setattr(workers.Workers, "_start", lambda self, *args: started.append(self.size))
    monkeypatch.setattr(workers, "_warm", {})
    with pytest.raises(ShapeError, match="heap= or PKT_HEAP"):
        pkt.launch(print, ranks=1, heap="much")
    assert not started


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": "soon"}, "timeout: found 'soon', wanted seconds: a number above 0"),
        ({"timeout": -1}, "timeout: found -1"),
        ({"ranks": "2"}, "ranks: found '2', wanted an integer from 1"),
        ({"node_size": "1"}, "node_size: found '1', wanted an integer from 1"),
    ],
)
def test_a_simulation_refuses_what_a_launch_on_gpus_refuses(given, said):
    with pytest.raises(ShapeError, match=said):
        pkt.launch(print, device="cpu", **given)
