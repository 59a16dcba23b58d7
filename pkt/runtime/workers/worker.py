"""The process of one rank of pkt.launch(device="cuda"): waits for jobs on a pipe, runs them, and stays warm.

Its first instructions are in `start`. A fork would not do, because CUDA does not survive one; nor would
multiprocessing's spawn, which runs the caller's main module again, and a notebook has none. The caller pickles all that
comes over the pipe. Programs that a job starts do not have the pipe, and a process that a job forks closes it at once.
Each job is acknowledged with an empty message before it runs, so that the caller can tell a stopped worker from a long
job.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from typing import Any

from pkt.errors import PeerLost, WaitTimeout
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import dumps, imported, loads
from pkt.runtime.workers.pipe import receive, send


def serve(fd: int) -> None:
    """Run jobs until the caller closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets Ctrl-C, and ends this process or passes it on
    interrupts.passed_on = True
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in a driver or a library prints the lines that called it
    with socket.socket(fileno=fd) as pipe:
        os.register_at_fork(after_in_child=pipe.close)
        while (message := receive(pipe)) is not None:
            number, job = message
            send(pipe, number, b"")
            send(pipe, number, dumps(_serve(loads(job))))


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job. The answer has the result of `fn`, or how it failed."""
    world = None
    try:
        module, _, name = job["opener"].partition(":")
        opener = imported(module, name)
        if not gc.get_freeze_count():
            # torch and Triton stay loaded: 200,000 objects that the garbage collector need not visit again and again.
            # Its full passes took a third of the time of 10^4 allocations.
            gc.freeze()
        world = opener(job)
        with world:
            result = dumps(loads(job["fn"])(world, *loads(job["args"])))
            return {"result": result, "closed": world.closed}
    except BaseException as error:
        return {"traceback": traceback.format_exc(), "error": _portable(error), "remoteness": _remoteness(error)}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _portable(error: BaseException) -> bytes | None:
    try:
        return dumps(error)
    except Exception:  # an exception may hold any object, such as a socket; its traceback goes as text in any case
        return None


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: 0 for a rank's own failure, 1 for a wait that expired, 2 for a lost peer."""
    return 2 if isinstance(error, PeerLost) else 1 if isinstance(error, WaitTimeout) else 0
