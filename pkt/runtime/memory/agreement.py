"""Checks that the ranks make the same collective calls of the heap, and decides when.

A `Request` describes a call. If the backend keeps a journal, which peers read without waiting, a rank only records the
request, with a digest of all its calls so far. Every few calls it compares digests up to the last call that all ranks
have made. `settle` waits for the other ranks; it is called before anything that another rank can see (a launch, a peer
view, a barrier). Without a journal the ranks exchange each request at once. Either way the ranks that see the first
difference raise it, by name, before the memory is used. The lines of the calls may differ: they are only for messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import AnyStr, NamedTuple

from pkt.errors import AllocationMismatch
from pkt.runtime.backend import HEAP_CALL, Backend
from pkt.wording import dtype_text

EVERY = 32  # calls between two looks at the peers' journals


class Request(NamedTuple):
    """One collective call on the heap, as it is compared."""

    op: str  # "allocate" or "free"
    number: int  # allocations are counted from 1; a free has the number of its allocation
    shape: str
    dtype: str
    kind: str
    site: str

    def text(self) -> str:
        """`(1024,) bf16 at a.py:12`, as in every message about the call."""
        what = f"{self.shape} {dtype_text(self.dtype)}" + (" signals" if self.kind == "signals" else "")
        if self.op == "free":
            what = f"frees #{self.number} {what}"
        return f"{what} at {self.site}"

    @classmethod
    def unpack(cls, packed: str) -> Request:
        """The request that `Agreement.check` recorded as `packed`."""
        op, number, shape, dtype, kind, site = packed.split("\x1f")
        return cls(op, int(number), shape, dtype, kind, site)


class Agreement:
    """This rank's side of the comparison."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.ordinal = 0  # collective heap calls so far
        self._journal = backend.journal
        self._digest = 0  # of all calls so far
        self._agreed = 0  # the ordinal up to which all ranks are known to agree

    def check(self, op: str, number: int, shape: str, dtype: str, kind: str, site: str) -> None:
        """Record a call, described as in `Request`. Raises AllocationMismatch if a peer is known to have made another.
        It packs the fields itself, because building a Request would slow down every allocation."""
        packed = f"{op}\x1f{number}\x1f{shape}\x1f{dtype}\x1f{kind}\x1f{site[-200:]}"
        self.ordinal += 1
        if self._journal is None:
            said = self.backend.exchange(packed, f"{HEAP_CALL} #{self.ordinal}")
            if len(set(map(_compared, said))) > 1:
                raise _mismatch(dict(enumerate(said)), self.backend.rank)
            return
        text = packed.encode()
        self._digest = zlib.crc32(_compared(text), self._digest)
        self._journal.append(b"%08x" % self._digest + text)
        if self.ordinal % self._journal.period == 0:
            self.settle()
        elif self.ordinal % EVERY == 0:
            self._compare()

    def settle(self) -> None:
        """Return when every rank has made all calls that this rank made. Raises AllocationMismatch if one differs."""
        if self._journal is not None and self._agreed < self.ordinal:
            self._journal.settle(self.ordinal)
            self._compare()

    def _compare(self) -> None:
        """Compare up to the last call that all ranks have made. Equal digests mean equal calls up to there."""
        assert self._journal is not None
        last = min(self.ordinal, *(self._journal.written(r) for r in range(self.backend.size)))
        if last <= self._agreed:
            return
        if len(set(map(_compared, self._said(last).values()))) > 1:
            for ordinal in range(self._agreed + 1, last + 1):
                records = self._said(ordinal)
                if len(set(map(_compared, records.values()))) > 1:
                    said = {r: record[8:].decode(errors="replace") for r, record in records.items()}
                    raise _mismatch(said, self.backend.rank)
        self._agreed = last

    def _said(self, ordinal: int) -> dict[int, bytes]:
        assert self._journal is not None
        return {r: self._journal.read(r, ordinal) for r in range(self.backend.size)}


def _compared(packed: AnyStr) -> AnyStr:
    """A packed request without its site."""
    return packed.rpartition(b"\x1f" if isinstance(packed, bytes) else "\x1f")[0]


def _mismatch(said: Mapping[int, str], rank: int) -> AllocationMismatch:
    requests = {r: _readable(text) for r, text in said.items()}
    mine = requests[rank]
    if len({q.op for q in requests.values()}) > 1:
        texts = {r: q.text() if q.op == "free" else f"allocates #{q.number} {q.text()}" for r, q in requests.items()}
        return AllocationMismatch.differs("heap call", texts)
    what = f"{'allocation' if mine.op == 'allocate' else 'free of allocation'} #{mine.number}"
    return AllocationMismatch.differs(what, {r: q.text() for r, q in requests.items()})


def _readable(text: str) -> Request:
    try:
        return Request.unpack(text)
    except ValueError:  # it was too long for the journal, which keeps a digest of it
        return Request("allocate", 0, "?", "?", "data", text[:80])
