"""One operator of a world in flight at a time, whatever streams they are called on.

The operators of a world share counters and buffers, and each takes as many SMs as it can get. Two at once would mix up
their counts; and where two streams are free to start in any order, rank 0 may run one operator while rank 1 runs the
other, and each waits for ever for its peers. So they run in the order in which host code calls them, which is the same
on every rank: a stream other than that of the last call first waits for it. NCCL does the same within a communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneInFlight:
    """Which stream a world's operators were last called on. Nothing but a comparison while that is the same one.

    While a graph is captured, its operators are ordered among themselves, as edges of the graph. When a graph is
    replayed nobody asks here: replays are the caller's to order with other calls, as all work on streams is.
    """

    __slots__ = ("_captured", "_cuda", "_device", "_eager", "_last", "_raw")

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device.index, cuda
        self._last = -1  # the stream of the last call as the driver names it; -1 where that was under capture
        self._eager: Any = None  # the stream of the last call that was not, as torch names it
        self._captured: Any = None  # and of the last one that was
        # What Triton asks at every launch; a torch that was built without CUDA has it not.
        found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._raw = found if cuda is torch.cuda and found else lambda index: cuda.current_stream(index).cuda_stream

    def follow(self) -> bool:
        """Make the current stream wait for all that the stream of the last call has been given, if it is another.
        Returns whether it records a CUDA graph, which a stream that was called on before may begin unnoticed."""
        return self._raw(self._device) != self._last and self._change()

    def handle(self) -> int:
        """The current stream, as the driver names it."""
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
            # Work outside a capture cannot be waited for inside, nor the reverse; what is captured runs later, and
            # torch.cuda.graph waits for everything before it begins.
            if before is not None and before != here and self._capturing(before) == capturing:
                here.wait_stream(before)
        if capturing:
            self._last, self._captured = -1, here
        else:
            if self._captured is None and self._eager is not None and self._capturing(self._eager):
                self._captured = self._eager  # drawn into a capture after its last call outside, unnoticed
            self._last, self._eager = here.cuda_stream, here
        return capturing

    def _capturing(self, stream: Any) -> bool:
        if not stream.cuda_stream:  # the legacy stream cannot be captured, and may not even be asked during a capture
            return False
        with self._cuda.stream(stream):
            return self._cuda.is_current_stream_capturing()
