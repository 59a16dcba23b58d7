"""The process behind one rank of pkt.launch(device="cuda"): waits for jobs on a private pipe, runs them, stays warm.

Started as `python -m pkt.runtime.workers.worker FD`, not by fork (CUDA does not survive one) and not by
multiprocessing's spawn (which runs the caller's main module again, and a notebook has none). What comes over the pipe
was pickled by the parent that started us; nobody else has the other end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import signal
import socket
import sys
import traceback
from typing import Any

from pkt.errors import PeerLost, WaitTimeout
from pkt.runtime.workers import interrupts
from pkt.runtime.workers.carry import dumps, loads, receive, send

PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Serve jobs until the parent closes the pipe."""
    # No orphans: a parent that is killed cannot close anything in an orderly way.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the interrupt and ends us, or passes it on
    interrupts.passed_on = True
    with socket.socket(fileno=fd) as pipe:
        while (job := receive(pipe)) is not None:
            send(pipe, dumps(_serve(loads(job))))


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; the answer says what `fn` returned or how it failed."""
    world = None
    try:
        opener = _named(job["opener"])
        if not gc.get_freeze_count():
            # torch and Triton are loaded, and stay: 200,000 objects that the garbage collector need not walk through
            # again and again. Its full passes were a third of the time of 10^4 allocations.
            gc.freeze()
        world = opener(job)
        with world:
            return {"result": dumps(loads(job["fn"])(world, *loads(job["args"])))}
    except BaseException as error:
        text = traceback.format_exc()
        return {
            "error": _portable(error),
            "traceback": text,
            "remoteness": _remoteness(error),
        }
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _portable(error: BaseException) -> bytes | None:
    try:
        return dumps(error)
    except Exception:  # an exception may hold anything, a socket say; its traceback is text and goes anyway
        return None


def _remoteness(error: BaseException) -> int:
    """How far from the cause an error is: 0 for a rank's own, 1 for what it waited for in vain, 2 for what others did
    and it was told."""
    return 2 if isinstance(error, PeerLost) else 1 if isinstance(error, WaitTimeout) else 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
