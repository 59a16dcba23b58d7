"""Workers of pkt.launch stay warm, label output, raise the first failure, run notebook cells and leave no orphan."""

import ctypes
import linecache
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import triton

import pkt
from pkt.errors import CollectiveMismatch, PeerLost, RankFailed
from pkt.runtime.workers import carry
from pkt.runtime.workers.carry import dumps, loads
from pkt.runtime.workers.workers import Workers

from .processes import OPENER

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workers():
    pool = Workers(2)
    yield pool
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def run(workers, fn, *args, timeout=5.0, **facts):
    return workers.run(fn, args, OPENER, timeout, heap=1 << 20, **facts)


def test_results_warm_processes_and_labels(workers, capsys):
    def main(world, add):
        x = pkt.full((4,), world.rank + add)
        print("hello")
        print("problem", file=sys.stderr)
        return x.peer(1 - world.rank).sum().item(), os.getpid()

    first = run(workers, main, 10)
    assert [value for value, _ in first] == [44, 40]
    assert [pid for _, pid in first] == workers.pids
    assert run(workers, main, 0) == [(4, first[0][1]), (0, first[1][1])]
    out = err = ""
    deadline = time.monotonic() + 10
    while (len(out.splitlines()) < 4 or len(err.splitlines()) < 4) and time.monotonic() < deadline:
        time.sleep(0.02)  # lines arrive through a pipe
        more = capsys.readouterr()
        out, err = out + more.out, err + more.err
    assert sorted(out.splitlines()) == sorted(["[rank 0] hello", "[rank 1] hello"] * 2)
    assert sorted(err.splitlines()) == sorted(["[rank 0] problem", "[rank 1] problem"] * 2)


def test_the_garbage_collector_skips_objects_that_stay(workers):
    def main(world):
        import gc

        return gc.get_freeze_count(), len(gc.get_objects())

    frozen, others = run(workers, main)[0]
    assert frozen > 10 * others
    assert run(workers, main)[0][0] <= frozen, "frozen once: garbage of later calls must be collected"


def test_the_first_traceback_is_raised_and_the_next_call_works(workers):
    def main(world):
        if world.rank == 1:
            raise LookupError("the cause")
        world.barrier()

    with pytest.raises(RankFailed) as caught:
        run(workers, main)
    error = caught.value
    assert error.rank == 1
    assert "LookupError: the cause" in error.traceback
    assert isinstance(error.__cause__, LookupError)
    assert "the other ranks: rank 0: pkt.errors.PeerLost: rank 0: rank 1 (pid" in str(error)
    assert run(workers, lambda world: world.rank) == [0, 1]


def test_close_on_one_rank_only_is_an_error(workers):
    def closes(world, ranks):
        if world.rank in ranks:
            world.close()
        return world.rank

    with pytest.raises(CollectiveMismatch, match="only: rank 0: left it open; rank 1: closed its world: close"):
        run(workers, closes, [1])
    assert run(workers, closes, [0, 1]) == run(workers, closes, []) == [0, 1]


def test_a_timeout_is_raised_rather_than_the_lost_peer_it_caused(workers):
    def main(world):
        from pkt.errors import PeerLost, WaitTimeout

        if world.rank == 1:
            raise PeerLost("rank 0 gave up")
        import time

        time.sleep(0.3)
        raise WaitTimeout("rank 0 waits")

    with pytest.raises(RankFailed) as caught:
        run(workers, main)
    assert caught.value.rank == 0
    assert "WaitTimeout: rank 0 waits" in caught.value.traceback
    assert "rank 1: pkt.errors.PeerLost: rank 0 gave up" in str(caught.value)


CELL = """
import triton, triton.language as tl

@triton.jit
def add_one(x):
    return x + 1

@triton.jit(do_not_specialize=["n"])
def kernel(p, n, BLOCK: tl.constexpr):
    tl.store(p + n, add_one(tl.load(p)))

def main(world):
    import inspect
    return type(kernel).__name__, inspect.getsource(add_one.fn), kernel.do_not_specialize, world.rank
"""


def test_functions_and_kernels_of_a_notebook_cell(workers):
    linecache.cache["<cell 3>"] = (len(CELL), None, CELL.splitlines(True), "<cell 3>")
    names = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 3>", "exec"), names)
    results = run(workers, names["main"])
    kind, source, options, _ = results[1]
    assert kind == "JITFunction"
    assert source == "@triton.jit\ndef add_one(x):\n    return x + 1\n"
    assert options == ["n"]


@triton.jit
def local_kernel(p):
    pass


def helper(x):
    return x + 1


def test_importable_kernels_are_imported():
    from pkt.language import wait  # any kernel of an installed module

    assert loads(dumps(wait)) is wait


def test_kernels_of_the_main_module_go_by_value(monkeypatch):
    """A worker has another main module, even where this process could import it under that name."""
    monkeypatch.setattr(carry, "_findable", lambda module: True)
    monkeypatch.setattr(local_kernel.fn, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "local_kernel", local_kernel, raising=False)
    assert loads(dumps(local_kernel)) is not local_kernel


def test_functions_keep_their_file():
    """Tracebacks and Triton find the source by it. cloudpickle 3.1.3 drops it."""
    outer = loads(dumps(lambda: lambda: None))
    assert outer.__code__.co_filename == outer().__code__.co_filename == __file__


def test_kernels_of_modules_that_a_worker_cannot_find_go_by_value(workers):
    assert run(workers, lambda world: (local_kernel.fn.__name__, helper(3))) == [("local_kernel", 4)] * 2


def test_a_result_that_cannot_be_sent_is_an_error(workers):
    with pytest.raises(RankFailed, match="cannot pickle 'frame' object"):
        run(workers, lambda world: sys._getframe())


def test_a_killed_worker_is_named_and_replaced():
    pool = Workers(2)
    try:

        def main(world):
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            world.barrier()

        with pytest.raises(RankFailed, match=r"rank 0 raised:\n\nthe process \(pid \d+\) ended by signal 9") as caught:
            run(pool, main)
        assert isinstance(caught.value.__cause__, PeerLost)
        assert not pool.alive
    finally:
        pool.kill()


def test_a_worker_that_crashes_says_where(capfd):
    pool = Workers(2)
    try:

        def crash(world):
            if world.rank == 1:
                ctypes.string_at(0)
            world.barrier()

        with pytest.raises(RankFailed, match=r"rank 1 raised:\n\nthe process \(pid \d+\) ended by signal 11"):
            run(pool, crash)
    finally:
        pool.kill()
    said = capfd.readouterr().err
    assert "Segmentation fault" in said
    assert "in crash" in said


PARENT = """
import sys, time
from pkt.runtime.workers.workers import Workers
pool = Workers(2)
print(*pool.pids, flush=True)
time.sleep(60)
"""


def test_no_orphans_when_the_caller_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30  # a worker that is still importing sees the closed pipe when it is done
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
