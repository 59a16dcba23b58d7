"""Do the ranks make the same collective calls? The only place that decides when that is checked.

A call is described by a `Request`. Where the backend keeps a journal that peers can read without waiting, a
rank writes the request down and compares with what peers have written so far; `settle` waits for the rest,
and is called before anything that another rank can see (a launch, a peer view, a barrier). Without a journal
the ranks exchange the request at once. Either way the first difference is raised, by name, on the ranks that
see it, before the memory is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pkt.errors import AllocationMismatch, dtype_text
from pkt.runtime.backend import Backend, Journal


@dataclass(frozen=True)
class Request:
    """One collective call on the heap, as it is compared."""

    op: str  # "allocate" or "free"
    number: int  # the how many-th allocation; for a free, of the tensor that is freed
    shape: tuple[int, ...]
    dtype: str
    kind: str
    site: str

    def text(self) -> str:
        """`(1024,) bf16 at a.py:12`, the form of every message about it."""
        what = f"{self.shape} {dtype_text(self.dtype)}" + (" signals" if self.kind == "signals" else "")
        if self.op == "free":
            what = f"frees #{self.number} {what}"
        return f"{what} at {self.site}"

    def pack(self) -> bytes:
        return json.dumps([self.op, self.number, self.shape, self.dtype, self.kind, self.site]).encode()

    @classmethod
    def unpack(cls, packed: bytes | str) -> Request:
        op, number, shape, dtype, kind, site = json.loads(packed)
        return cls(op, number, tuple(shape), dtype, kind, site)


class Agreement:
    """This rank's side of the comparison."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.ordinal = 0  # collective heap calls so far
        self._journal: Journal | None = getattr(backend, "journal", None)
        self._open: dict[int, tuple[bytes, Request]] = {}  # calls that not every rank is known to have made

    def check(self, request: Request) -> None:
        """This rank makes `request`; raises AllocationMismatch if a peer is known to have made another."""
        packed, self.ordinal = request.pack(), self.ordinal + 1
        if self._journal is None:
            said = self.backend.exchange(packed.decode(), f"heap call #{self.ordinal}")
            _compare(request, packed, {r: text.encode() for r, text in enumerate(said)}, self.backend.rank)
            return
        self._journal.append(packed)
        self._open[self.ordinal] = (packed, request)
        self._read()

    def settle(self) -> None:
        """Every rank is known to have made all calls that this one made; waits where needed."""
        if self._journal is not None and self._open:
            self._read()
            if self._open:
                self._journal.settle(self.ordinal)
                self._read()

    def _read(self) -> None:
        assert self._journal is not None
        for ordinal in list(self._open):
            packed, request = self._open[ordinal]
            said = {r: self._journal.read(r, ordinal) for r in range(self.backend.size)}
            _compare(
                request, packed, {r: text for r, text in said.items() if text is not None}, self.backend.rank
            )
            if None in said.values():
                return  # later calls are not complete either
            del self._open[ordinal]


def _compare(request: Request, packed: bytes, said: Mapping[int, bytes], rank: int) -> None:
    if all(text == packed for text in said.values()):
        return
    requests = {r: Request.unpack(text) for r, text in said.items()} | {rank: request}
    if len({r.op for r in requests.values()}) > 1:
        said_by = {
            r: q.text() if q.op == "free" else f"allocates #{q.number} {q.text()}"
            for r, q in requests.items()
        }
        raise AllocationMismatch.differs("heap call", said_by)
    what = f"{'allocation' if request.op == 'allocate' else 'free of allocation'} #{request.number}"
    raise AllocationMismatch.differs(what, {r: q.text() for r, q in requests.items()})
