"""NVSHMEM's host library, as far as pkt calls it, by ctypes. The tests put a fake in the place of `Library`.

The structures are those of the versions in pkt.language.ptx.nvshmem.TRIED; others are refused before they are loaded.
Most calls are collective: they return when every rank has made them. `bounded` gives such a call a deadline.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from pkt.errors import DriverError
from pkt.runtime.gpu.driver import OUT_OF_MEMORY
from pkt.wording import size_text

T = TypeVar("T")
STATE = "nvshmemi_device_state_d"
"""The variable of a module that holds NVSHMEM's state."""
_BY_UNIQUE_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_STARTED = 2  # NVSHMEM_STATUS_IS_INITIALIZED; greater ones are kinds of it
SLACK = 1 << 20  # bytes: NVSHMEM aligns blocks, and adds what it needs itself
_LOST = "see what NVSHMEM printed; NVSHMEM_DEBUG=INFO says more"


class _Id(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("internal", ctypes.c_char * 124)]


class _IdArguments(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int),
        ("id", ctypes.POINTER(_Id)),
        ("rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("unique_id", _IdArguments), ("content", ctypes.c_char * 96)]


class _Attributes(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("mpi", ctypes.c_void_p), ("arguments", _Arguments)]


def _version(structure: type[ctypes.Structure]) -> int:
    return (1 << 16) + ctypes.sizeof(structure)


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {  # name: type of the result, types of the arguments
    "nvshmemx_vendor_get_version_info": (None, [ctypes.POINTER(ctypes.c_int)] * 3),
    "nvshmemx_init_status": (ctypes.c_int, []),
    "nvshmemx_get_uniqueid": (ctypes.c_int, [ctypes.POINTER(_Id)]),
    "nvshmemx_set_attr_uniqueid_args": (
        ctypes.c_int,
        [ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Id), ctypes.POINTER(_Attributes)],
    ),
    "nvshmemx_hostlib_init_attr": (ctypes.c_int, [ctypes.c_uint, ctypes.POINTER(_Attributes)]),
    "nvshmem_my_pe": (ctypes.c_int, []),
    "nvshmem_n_pes": (ctypes.c_int, []),
    "nvshmem_malloc": (ctypes.c_void_p, [ctypes.c_size_t]),
    "nvshmem_ptr": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
    "nvshmem_barrier_all": (None, []),
    "nvshmemx_cumodule_init": (ctypes.c_int, [ctypes.c_void_p]),
}


class Library:
    """The calls of one rank, whose GPU is `device`. Each either succeeds or raises DriverError, which names rank, call
    and code."""

    def __init__(self, rank: int, device: int, folder: Path) -> None:
        """folder: of the library's files."""
        self.rank, self.device = rank, device
        try:
            self._library = ctypes.CDLL(str(folder / "libnvshmem_host.so.3"))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise DriverError.failed(rank, f"loading {folder}/libnvshmem_host.so.3", -1, str(error)) from error

    def version(self) -> str:
        """Of the library that is loaded, as "3.4.5"."""
        parts = [ctypes.c_int() for _ in range(3)]
        self._library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
        return ".".join(str(part.value) for part in parts)

    def started(self) -> bool:
        """Whether NVSHMEM runs in this process, whoever started it."""
        return self._library.nvshmemx_init_status() >= _STARTED

    def unique_id(self) -> bytes:
        """A name for one job of NVSHMEM's, which this rank serves."""
        found = _Id(version=_version(_Id))
        self._check("nvshmemx_get_uniqueid", self._library.nvshmemx_get_uniqueid(ctypes.byref(found)))
        return bytes(found)

    def start(self, unique_id: bytes, ranks: int) -> None:
        """Collective: start NVSHMEM in this process, as this rank of `ranks`."""
        given, attributes = _Id.from_buffer_copy(unique_id), _Attributes(version=_version(_Attributes))
        attributes.arguments.version = _version(_Arguments)
        attributes.arguments.unique_id.version = _version(_IdArguments)
        by = ctypes.byref(given), ctypes.byref(attributes)
        self._check(
            "nvshmemx_set_attr_uniqueid_args", self._library.nvshmemx_set_attr_uniqueid_args(self.rank, ranks, *by)
        )
        code = self._library.nvshmemx_hostlib_init_attr(_BY_UNIQUE_ID, by[1])
        self._check("nvshmemx_hostlib_init_attr", code)
        found = self._library.nvshmem_my_pe(), self._library.nvshmem_n_pes()
        if found != (self.rank, ranks):
            text = f"found PE {found[0]} of {found[1]}, wanted {self.rank} of {ranks}"
            raise DriverError.failed(self.rank, "nvshmemx_hostlib_init_attr", -1, text)

    def check_room(self, nbytes: int) -> None:
        """Whether the GPU has so much memory free. Without it NVSHMEM may end the process."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < nbytes:
            raise self._no_memory(nbytes, f"found {size_text(free)} free")

    def malloc(self, nbytes: int) -> int:
        """Collective: the address of new memory, which lies at one offset of NVSHMEM's heap on all ranks."""
        address = self._library.nvshmem_malloc(nbytes)
        if not address:
            raise self._no_memory(nbytes, "NVSHMEM gave none; NVSHMEM_SYMMETRIC_SIZE may be too small")
        return int(address)

    def address(self, mine: int, rank: int) -> int:
        """Where `rank`'s copy of the memory at `mine` is mapped here; 0 where only the network reaches it."""
        return int(self._library.nvshmem_ptr(mine, rank) or 0)

    def barrier(self) -> None:
        """Collective: all that was sent has arrived everywhere."""
        self._library.nvshmem_barrier_all()

    def hand_over(self, module: int) -> None:
        """Give NVSHMEM's state to a module that holds STATE."""
        self._check("nvshmemx_cumodule_init", self._library.nvshmemx_cumodule_init(module))

    def enter(self) -> None:
        """A new thread is to make calls."""
        torch.cuda.set_device(self.device)

    def _no_memory(self, nbytes: int, found: str) -> DriverError:
        return DriverError.failed(self.rank, f"nvshmem_malloc({nbytes})", OUT_OF_MEMORY, found)

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise DriverError.failed(self.rank, call, code, "an error of NVSHMEM's", _LOST)


def bounded(library: Any, call: str, seconds: float, run: Callable[[], T]) -> T:
    """`run()`, a collective call of NVSHMEM's, in another thread. Raises DriverError if it has not returned after
    `seconds`: some rank did not come. NVSHMEM cannot be used in this process any more."""
    found: list[T] = []
    errors: list[BaseException] = []

    def in_thread() -> None:
        try:
            library.enter()
            found.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=in_thread, name=f"pkt: {call}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        remedy = "a rank did not come; end all processes, and start them again with a longer PKT_TIMEOUT"
        raise DriverError.failed(library.rank, call, -1, f"no answer after {seconds:g} s", remedy)
    return found[0]


def prepare(one_host: bool, nbytes: int) -> None:
    """Settings of NVSHMEM's that pkt chooses where the user did not. They must be there before it starts. nbytes: of
    the first world's memory."""
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast objects: not every host's GPUs survive them
    if one_host:  # nothing then listens on the network
        os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(nbytes + SLACK))  # of heaps that do not grow
