"""pkt's files about this machine, which several jobs may share: the tuner's choices and the rates of GPUs.

A writer holds a lock, reads the file, changes it and replaces it, so readers need no lock and two writers lose nothing.
Other people and programs can write to the folder, so nothing in it is trusted. Only regular files are opened, no
symbolic link is followed, at most MOST_BYTES are read, and a writer waits LOCK_SECONDS for the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
"""Of a file: about 50,000 choices."""
LOCK_SECONDS = 5.0
"""A writer holds the lock for milliseconds."""


def folder() -> Path:
    """The folder of these files: PKT_TUNE_CACHE, or one in the user's cache directory. Raises OSError if the user has
    no home directory."""
    given = os.environ.get("PKT_TUNE_CACHE")
    if given:
        found = os.path.expanduser(given)
    else:
        import platformdirs

        try:
            found = str(platformdirs.user_cache_path("pkt") / "tune")
        except RuntimeError:  # newer releases raise where older ones leave the ~
            found = "~"
    if found.startswith("~"):  # nothing expands it where the user is unknown
        raise OSError("there is no home directory: set HOME or PKT_TUNE_CACHE")
    return Path(found)


def text_of(path: Path) -> str:
    """The content of a file of at most MOST_BYTES. Raises OSError, ValueError."""
    with open(_open(path, os.O_RDONLY), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(f"it is longer than {MOST_BYTES} bytes")
    return content.decode()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One writer of the file at a time; makes its folder. The lock ends with the process that holds it. Raises OSError
    after LOCK_SECONDS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, end = f"{path}.lock", time.monotonic() + LOCK_SECONDS
    descriptor = _open(lock, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(f"another process has held {lock} for {LOCK_SECONDS:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def replace(path: Path, content: dict[str, Any]) -> None:
    """Replace a file so that readers see the whole old or the whole new one. Call it under the lock. Raises OSError."""
    written = json.dumps(content, indent=1, sort_keys=True).encode()
    if len(written) > MOST_BYTES:
        raise OSError(f"it would be longer than {MOST_BYTES} bytes: remove it to tune into a new one")
    fresh = Path(f"{path}.new")
    fresh.unlink(missing_ok=True)  # of a writer that died
    with open(_open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _open(path: Path | str, flags: int) -> int:
    """A descriptor of a regular file. Does not block. Raises OSError for a symbolic link, FIFO, device or folder."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{os.fspath(path)} is no regular file")
