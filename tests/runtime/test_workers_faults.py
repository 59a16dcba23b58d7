"""Workers of pkt.launch under threads, stopped and killed processes, hostile files and many descriptors."""

import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socketpair

import pytest

from pkt.errors import RankFailed, Unsupported
from pkt.runtime.workers import answers
from pkt.runtime.workers import workers as module
from pkt.runtime.workers.carry import dumps, loads
from pkt.runtime.workers.pipe import Pipe, receive, send
from pkt.runtime.workers.workers import Workers

from . import losses_workers
from .processes import OPENER

ROOT = Path(__file__).parents[2]
HOSTILE = "open({marker!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(3)\n"
SOCKETS = 1100  # more than the 1,024 descriptors that select takes


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(answers, "GRACE", 0.3)


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    """What the hostile files write to."""
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def pool(tmp_path_factory, marker):
    """Started and used by a thread that has ended, in a hostile working directory, with 1,100 descriptors open."""
    hostile = tmp_path_factory.mktemp("hostile")
    for name in ("cloudpickle", "ctypes", "torch", "pkt"):
        (hostile / f"{name}.py").write_text(HOSTILE.format(marker=str(marker)))
    before, limits, made = os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE), []

    def start():
        made.append(Workers(2))
        made.append(run(made[0], lambda world: os.getpid()))

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * SOCKETS, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(SOCKETS)]
    os.chdir(hostile)
    try:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    finally:
        os.chdir(before)
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    made[0].first_pids = made[1]
    yield made[0]
    made[0].close()


def run(pool, fn, *args, timeout=20.0):
    return pool.run(fn, args, OPENER, timeout, heap=1 << 20)


def gone(pid, seconds=30.0):
    """Whether a process ends in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not os.path.exists(f"/proc/{pid}"):
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------ how they start
def test_workers_import_nothing_from_the_working_directory(pool, marker):
    found = run(pool, lambda world: [sys.modules[name].__file__ for name in ("cloudpickle", "torch", "pkt")])
    assert not marker.exists(), marker.read_text()
    assert found[0] == [sys.modules[name].__file__ for name in ("cloudpickle", "torch", "pkt")]


def test_a_worker_has_the_callers_path_and_environment(pool):
    def main(world):
        return sys.path, os.environ.get("PYTHONPATH")

    assert run(pool, main) == [(sys.path, os.environ.get("PYTHONPATH"))] * 2


def test_workers_outlive_the_thread_that_started_them(pool):
    assert run(pool, lambda world: os.getpid()) == pool.first_pids


def test_the_pipes_may_have_high_numbers(pool):
    """select takes no descriptor from 1,024 on."""
    assert all(pipe.fileno() > 1024 for pipe in pool._pipes)
    assert run(pool, lambda world: world.rank) == [0, 1]


ISOLATED = """
import os, sys
sys.path[:0] = {path!r}
from pkt.runtime.workers.workers import Workers
pool = Workers(1)
print(pool.run(lambda world: [sys.flags.isolated, sys.path], (), {opener!r}, 30.0, heap=1 << 20) == [[1, sys.path]])
pool.close()
"""


def test_a_worker_of_an_isolated_caller_is_isolated(tmp_path):
    marker = tmp_path / "ran"
    for name in ("cloudpickle", "ctypes", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(HOSTILE.format(marker=str(marker)))
    text = ISOLATED.format(path=[str(ROOT)], opener=OPENER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-I", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True\n", done.stderr
    assert not marker.exists(), marker.read_text()


def test_no_job_runs_after_its_caller_was_killed(tmp_path):
    """The job waits in the pipe while the worker imports, and the caller is killed meanwhile."""
    trace, (reader, writer) = tmp_path / "trace", os.pipe()
    caller = os.fork()
    if not caller:
        pool = Workers(1)
        job = lambda world: trace.write_text("the job ran")  # noqa: E731
        threading.Thread(target=run, args=(pool, job)).start()
        os.write(writer, str(pool.pids[0]).encode())
        time.sleep(0.1)  # the job is written
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    worker = int(os.read(reader, 20))
    os.close(reader)
    os.waitpid(caller, 0)
    assert gone(worker)
    assert not trace.exists()


# ------------------------------------------------------------------------------------------------------------- threads
def test_launches_of_several_threads_get_their_own_results(pool):
    def launch(n):
        return run(pool, lambda world, n: (world.all_gather_object((n, world.rank)), bytes([n]) * 100_000), n)

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(launch, range(12)))
    assert found == [[([(n, 0), (n, 1)], bytes([n]) * 100_000)] * 2 for n in range(12)]


def test_a_failure_stays_with_its_own_launch(pool):
    def main(world, n):
        if n % 2:
            raise LookupError(f"launch {n}")
        return n

    def launch(n):
        try:
            return run(pool, main, n)
        except RankFailed as error:
            return str(error.__cause__)

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(launch, range(6))) == [f"launch {n}" if n % 2 else [n, n] for n in range(6)]


def test_a_launch_in_a_signal_handler_of_a_launch_is_refused(pool):
    refused = []

    def handler(number, frame):
        with pytest.raises(Unsupported, match=r"^pkt\.launch: found a launch of this thread that has not returned"):
            run(pool, lambda world: 0)
        refused.append(number)

    def main(world):
        if world.rank == 0:
            os.kill(os.getppid(), signal.SIGUSR1)
        return world.rank

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert run(pool, main) == [0, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused == [signal.SIGUSR1]


# ----------------------------------------------------------------------------------------------------------- the pipe
def sockets():
    """This process's sockets."""
    return [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}") and socket(fd)]


def socket(fd):
    return stat.S_ISSOCK(os.stat(f"/proc/self/fd/{fd}").st_mode)


def alone(pool, fn, *args):
    """fn's result on rank 0."""
    return run(pool, lambda world: fn(*args) if world.rank == 0 else None)[0]


def test_a_program_that_a_job_starts_does_not_have_the_pipe(pool):
    command = ["ls", "-l", "/proc/self/fd"]
    text = alone(pool, lambda: subprocess.check_output(command, close_fds=False, text=True))
    assert "socket:" not in text


def test_a_process_that_a_job_forks_does_not_have_the_pipe(pool):
    def main():
        mine = set(sockets())
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, repr(mine - set(sockets())).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(reader, 1000).decode()

    closed = alone(pool, main)
    assert closed not in ("", "set()")


def test_a_message_with_another_number_is_never_unpickled(tmp_path):
    """Something in the worker's process writes to the pipe."""

    class Trap:
        def __reduce__(self):
            return Path.write_text, (trace, "unpickled")

    def main(world, trap):
        import pickle
        import socket as sockets_module

        from pkt.runtime.workers.pipe import send

        pipe = next(fd for fd in sockets() if sockets_module.socket(fileno=os.dup(fd)).family == sockets_module.AF_UNIX)
        with sockets_module.socket(fileno=os.dup(pipe)) as end:
            send(end, 0, pickle.dumps(trap()))
        return "never read"

    trace = tmp_path / "trace"
    pool = Workers(1)
    try:
        with pytest.raises(RankFailed, match="sent a message that does not belong to this launch"):
            run(pool, main, Trap)
        assert not trace.exists()
    finally:
        pool.kill()


# ------------------------------------------------------------------------------------- stopped and killed (these last)
def test_a_stopped_worker_and_a_large_argument(pool):
    run(pool, lambda world: None)
    os.kill(pool.pids[1], signal.SIGSTOP)
    with pytest.raises(
        RankFailed, match=r"rank 1 raised:\n\nthe process \(pid \d+\) did not take its job within 0\.5 s and is stopped"
    ):
        run(pool, lambda world, data: len(data), bytes(8 << 20), timeout=0.2)
    assert not pool.alive


def test_the_next_launch_starts_new_processes(pool):
    assert run(pool, lambda world: world.rank) == [0, 1]


def test_a_worker_that_stops_in_the_middle_of_its_answer(pool):
    def main(world):
        import socket as sockets_module

        real = sockets_module.socket.sendall

        def half(end, data):
            if world.rank == 0 and len(data) > 1 << 20:
                real(end, data[: 1 << 19])
                os.kill(os.getpid(), signal.SIGSTOP)
            real(end, data)

        sockets_module.socket.sendall = half
        return bytes(4 << 20)

    run(pool, lambda world: None)
    with pytest.raises(RankFailed, match=r"sent no more of its answer for 0\.5 s and is stopped"):
        run(pool, main, timeout=0.2)


def test_the_answer_of_a_long_job_may_come_in_two_pieces():
    """As on a busy machine. The patience, here 0.5 s, counts from the first piece, not from the job's beginning."""
    ours, theirs = socketpair()
    answer = dumps({"result": dumps(7), "closed": True})

    def work():
        number, _ = receive(theirs)
        send(theirs, number, b"")
        time.sleep(0.8)
        whole = struct.pack("!QQ", number, len(answer)) + answer
        theirs.sendall(whole[:16])
        time.sleep(0.25)
        theirs.sendall(whole[16:])

    thread = threading.Thread(target=work)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            gathered = answers.Answers([Pipe(ours)], [process], [b"a job"], timeout=0.2, new=False)
            thread.start()
            [found] = gathered.all()
        finally:
            process.kill()
            thread.join()
            ours.close()
            theirs.close()
    assert loads(found["result"]) == 7


def test_a_worker_that_stops_when_the_others_are_done(monkeypatch):
    """Its peers have their results, and wait for it no more; the launch would."""
    monkeypatch.setattr(module, "_start_process", losses_workers._start_process)  # forks, which cost little
    few = Workers(2)
    late = threading.Timer(10.0, os.kill, (few.pids[0], signal.SIGKILL))

    def main(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return world.rank

    late.start()
    try:
        with pytest.raises(RankFailed, match=r"rank 0 raised:\n\n.* did not end its function and is stopped"):
            run(few, main, timeout=1.0)
    finally:
        late.cancel()
        few.kill()


def test_a_killed_worker_whose_child_has_the_pipe(pool, tmp_path):
    note = tmp_path / "child"

    def main(world):
        if world.rank == 0:
            for fd in sockets():
                os.dup(fd)
            child = os.fork()
            if not child:
                time.sleep(100)
                os._exit(0)
            note.write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    run(pool, lambda world: None)
    try:
        with pytest.raises(RankFailed, match="ended by signal 9"):
            run(pool, main, timeout=0.2)
        assert os.path.exists(f"/proc/{note.read_text()}"), "the child still has the pipe"
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_forked_child_neither_uses_nor_harms_the_workers(pool):
    run(pool, lambda world: None)
    processes = list(pool._processes)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, repr((pool.pids, pool.alive)).encode())
        pool.close()
        os.write(writer, b" closed")
        time.sleep(100)
        os._exit(0)
    try:
        said = b""
        while not said.endswith(b" closed"):  # it may come in one piece or in two
            said += os.read(reader, 100)
        assert said == b"([], False) closed"
        assert run(pool, lambda world: world.rank) == [0, 1]
        pool.close()
        assert [process.returncode for process in processes] == [0, 0], "they saw the end of the pipe"
        with pytest.raises(Unsupported, match="are closed"):
            run(pool, lambda world: world.rank)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
