"""The process of one rank of pkt.launch(device="cuda"): waits for jobs on a pipe, runs them, and stays warm.

It is started as `python -m pkt.runtime.workers.worker FD`. A fork would not do, because CUDA does not survive one; nor
would multiprocessing's spawn, which runs the caller's main module again, and a notebook has none. The parent that
started this process pickles all that comes over the pipe.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import socket
import sys
import traceback
from typing import Any

from pkt.errors import PeerLost, WaitTimeout
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import dumps, imported, loads, receive, send

PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Serve jobs until the parent closes the pipe."""
    # The kernel ends this process with its parent: a parent that is killed cannot close the pipe in an orderly way.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, and ends this process or passes it on
    interrupts.passed_on = True
    with socket.socket(fileno=fd) as pipe:
        while (job := receive(pipe)) is not None:
            send(pipe, dumps(_serve(loads(job))))


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
            return {"result": dumps(loads(job["fn"])(world, *loads(job["args"])))}
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
