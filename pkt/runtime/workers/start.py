"""The first instructions of a worker process: `python start.py FD CALLER PATH...`, run as a file.

Nothing of pkt, torch or Triton is imported before the kernel has been told to end this process with its caller. FD is
the worker's end of the pipe, CALLER the caller's process number, and PATH... the caller's sys.path. Python puts the
folder of this file, or nothing, ahead of sys.path; the caller's path replaces all of it. So a worker imports from the
working directory only if the caller would.
"""

import sys


def main() -> None:
    """End with the caller from now on, then serve jobs."""
    fd, caller, sys.path[:] = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    del sys.argv[1:]
    import ctypes
    import os
    import signal

    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != caller:  # it ended before the call above
        os._exit(1)
    os.set_inheritable(fd, False)  # programs that a job starts must not have the pipe
    from pkt.runtime.workers import worker

    worker.serve(fd)


if __name__ == "__main__":  # not in a process that multiprocessing spawns from a worker
    main()
