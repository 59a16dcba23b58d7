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
        return json.dumps([self.op, self.number, self.shape, self.dtype, self.kind, self.site[-200:]]).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Request:
        op, number, shape, dtype, kind, site = json.loads(packed)
        return cls(op, number, tuple(shape), dtype, kind, site)


class Agreement:
    """This rank's side of the comparison."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.ordinal = 0  # collective heap calls so far
        self._journal: Journal | None = getattr(backend, "journal", None)
        self._open: dict[int, Request] = {}  # calls that not every rank is known to have made

    def check(self, request: Request) -> None:
        """This rank makes `request`; raises AllocationMismatch if a peer is known to have made another."""
        self.ordinal += 1
        if self._journal is None:
            said = self.backend.exchange(request.pack().decode(), f"heap call #{self.ordinal}")
            _compare(request, {r: text.encode() for r, text in enumerate(said)}, self.backend.rank)
            return
        self._journal.append(request.pack())
        self._open[self.ordinal] = request
        if self.ordinal % self._journal.period == 0:
            self.settle()
        else:
            self._read()

    def settle(self) -> None:
        """Every rank is known to have made all calls that this one made; waits where needed."""
        if self._open:
            self._read()
        if self._open and self._journal is not None:
            self._journal.settle(self.ordinal)
            self._read()

    def _read(self) -> None:
        assert self._journal is not None
        for ordinal, request in list(self._open.items()):
            said = {r: self._journal.read(r, ordinal) for r in range(self.backend.size)}
            _compare(request, {r: text for r, text in said.items() if text is not None}, self.backend.rank)
            if None in said.values():
                return  # later calls are not complete either
            del self._open[ordinal]


def _compare(mine: Request, said: Mapping[int, bytes], rank: int) -> None:
    """Raise unless all said the same; `said` has an entry of this rank."""
    if len(set(said.values())) == 1:
        return
    requests = {r: mine if r == rank else _readable(text, mine) for r, text in said.items()}
    if len({q.op for q in requests.values()}) > 1:
        texts = {r: q.text() if q.op == "free" else f"allocates #{q.number} {q.text()}" for r, q in requests.items()}
        raise AllocationMismatch.differs("heap call", texts)
    what = f"{'allocation' if mine.op == 'allocate' else 'free of allocation'} #{mine.number}"
    raise AllocationMismatch.differs(what, {r: q.text() for r, q in requests.items()})


def _readable(text: bytes, mine: Request) -> Request:
    try:
        return Request.unpack(text)
    except ValueError:  # too long for the journal, which then keeps a digest
        return Request(mine.op, mine.number, (), "?", "data", text[:80].decode(errors="replace"))
