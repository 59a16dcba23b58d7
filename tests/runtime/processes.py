"""Worlds of real processes on the CPU: the CUDA backend over the fake driver, opened as a worker opens its job."""

from __future__ import annotations

import socket
import threading
from typing import Any

from pkt.runtime import bootstrap
from pkt.runtime.processes.rendezvous import NONCE, Meeting
from pkt.runtime.world import World

from .fake_driver import FakeDriver

STRIDE = 1 << 30


def open_fake(job: dict[str, Any]) -> World:
    """bootstrap.open_job with a FakeDriver."""
    where = bootstrap.Place(job["rank"], job["size"], Meeting(job["directory"], job["token"]))
    driver = FakeDriver(job["rank"])
    return bootstrap.open_world(
        where, job["rank"], job["heap"], job["timeout"], driver=lambda rank: driver, stride=STRIDE
    )


def without_the_token(server: socket.socket) -> threading.Thread:
    """Start a thread that answers one client of `server` without knowing the token. Join it afterwards."""

    def serve() -> None:
        caller, _ = server.accept()
        with caller:
            caller.sendall(b"c" * NONCE)
            caller.recv(1000)
            caller.sendall(b"w" * 32)
            caller.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


OPENER = "tests.runtime.processes:open_fake"  # the name by which a worker imports open_fake
