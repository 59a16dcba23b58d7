"""One operator of a world in flight at a time, whatever streams they are called on.

The operators of a world share counters and buffers, and each takes as many SMs as it can get. Two at once would mix up
their counts. And if streams could start them in any order, rank 0 might run one operator while rank 1 runs the other,
and both would wait for ever. So operators run in the order in which host code calls them, which is the same on every
rank: the stream of a call first waits for the stream of the last call, if that is another. NCCL does the same within a
communicator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class OneInFlight:
    """The streams that a world's operators were last called on. A call on the same stream costs one comparison.

    The operators of a captured graph are ordered among themselves, as edges of the graph. The caller orders replays
    with other calls, as all work on streams.
    """

    __slots__ = ("_captured", "_cuda", "_device", "_eager", "_last", "_make", "_own", "_raw")

    def __init__(self, device: torch.device, make: Callable[[], Any], cuda: Any = torch.cuda) -> None:
        """make: returns a stream that nobody else has."""
        self._device, self._make, self._cuda = device.index, make, cuda
        self._last = -1  # the driver's handle of the last call's stream; -1 if it was capturing
        self._eager: Any = None  # torch's stream of the last call outside a capture
        self._captured: Any = None  # torch's stream of the last call inside one
        self._own: Any = None  # torch's stream on which calls are recorded for `replay`
        # Triton asks this function at every launch. It is private, and a torch that was built without CUDA lacks it.
        found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._raw = found if cuda is torch.cuda and found else lambda index: cuda.current_stream(index).cuda_stream

    def follow(self) -> bool:
        """Make the current stream wait for everything queued on the last call's stream, if that is another. Returns
        whether the current stream records a CUDA graph; False too if it began to after the last call, made on it."""
        return self._raw(self._device) != self._last and self._change()

    def eager(self) -> int | None:
        """`follow`, and then the driver's handle of the current stream; None if it records a CUDA graph."""
        here = self._raw(self._device)
        if here != self._last and self._change():
            return None
        return None if here and self._cuda.is_current_stream_capturing() else here

    @contextlib.contextmanager
    def recording(self) -> Iterator[bool]:
        """A stream of its own is the current one, so that what is called inside can be recorded. These calls are
        ordered among themselves, and the calls before and after as if they had not been made. False, with nothing
        changed, while the user records: a stream of the world's may belong to that graph."""
        kept = self._last, self._eager, self._captured
        if self._captured is not None and self._capturing(self._captured):
            yield False
            return
        if self._own is None:
            self._own = self._make()
        self._last, self._eager, self._captured = -1, None, None
        try:
            with self._cuda.stream(self._own):
                yield True
        finally:
            self._last, self._eager, self._captured = kept

    def handle(self) -> int:
        """The driver's handle of the current stream."""
        return self._raw(self._device)

    def capturing(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        return self._capturing(self._cuda.current_stream(self._device))

    def _change(self) -> bool:
        here = self._cuda.current_stream(self._device)
        capturing = self._capturing(here)
        if self._captured is not None and not self._capturing(self._captured):
            self._captured = None  # that capture has ended
        for before in (self._eager, self._captured):
            # A capture cannot wait for work outside it, nor the reverse; captured work runs later, and torch.cuda.graph
            # waits for everything before it begins.
            if before is not None and before != here and self._capturing(before) == capturing:
                here.wait_stream(before)
        if capturing:
            self._last, self._captured = -1, here
        else:
            if self._captured is None and self._eager is not None and self._capturing(self._eager):
                self._captured = self._eager  # it joined a capture after its last call outside
            self._last, self._eager = here.cuda_stream, here
        return capturing

    def _capturing(self, stream: Any) -> bool:
        if not stream.cuda_stream:  # the legacy stream cannot be captured, and must not be asked during a capture
            return False
        with self._cuda.stream(stream):
            return self._cuda.is_current_stream_capturing()
