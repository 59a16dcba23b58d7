"""Copies by the copy engines: no SM moves data, and a link takes 392 GB/s instead of 362 out of an H200.

What moves is a box, runs of elements at even distances on both sides, so that a part of a tensor goes straight to its
place. A rank's copies go on one stream of their own, one after the other and to the next peer each time: one engine
fills the links, and ranks that begin together send to different peers throughout. Where kernels of several ranks must
know of each other's copies, the stream is joined first and they meet inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch import beside, cooperative_launch
from pkt.runtime.world import World

from . import _common

MAX_PITCH = (1 << 31) - 1
"""Bytes from one run to the next that an engine can take in one copy, CU_DEVICE_ATTRIBUTE_MAX_PITCH."""


@triton.jit
def meet_kernel(bar_ptr, world):
    """All ranks have come here: their copies have arrived, and what they have read may be overwritten."""
    pl.barrier(bar_ptr, world)


@triton.jit
def copy_kernel(
    dst_ptr,  # on `peer`
    src_ptr,  # this rank's
    box,  # Box
    world,
    BLOCK: tl.constexpr,
):
    """In the place of a copy engine in the simulator, where a copy of torch's would escape the race detector."""
    n = box.planes * box.runs * box.run
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        plane, run, element = i // (box.runs * box.run), i // box.run % box.runs, i % box.run
        source = src_ptr + box.source.start + plane * box.source.plane + run * box.source.pitch + element
        target = dst_ptr + box.target.start + plane * box.target.plane + run * box.target.pitch + element
        pl.store(target, tl.load(source, mask=i < n), box.peer, world, mask=i < n)


class Place(NamedTuple):
    """Where a box is in a tensor, in elements."""

    start: int
    pitch: int  # from one run to the next
    plane: int  # from one plane to the next


class Box(NamedTuple):
    """Elements of a tensor of this rank, and where they go in one of `peer`."""

    peer: int
    planes: int
    runs: int  # in a plane
    run: int  # elements together in memory on both sides
    target: Place
    source: Place


def layout(*shape: int) -> torch.Tensor:
    """A contiguous tensor with no memory, to cut the views for `boxes` from."""
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def boxes(peer: int, target: torch.Tensor, source: torch.Tensor, itemsize: int) -> list[Box]:
    """What moves `source` to `target` of `peer`: one box, unless the runs lie too far apart for that; none for nothing.

    target, source: views of a `layout` of 1 to 3 dimensions, of the same shape, the last dimension contiguous.
    """
    if source.numel() == 0:
        return []
    while source.ndim < 3:
        target, source = target[None], source[None]
    if source.shape[1] == 1:
        target, source = target.transpose(0, 1), source.transpose(0, 1)
    planes, runs, run = source.shape
    places = [Place(int(v.storage_offset()), v.stride(1), v.stride(0)) for v in (target, source)]
    if planes * runs > 1 and max(p.pitch for p in places) * itemsize > MAX_PITCH:
        rows = [(p, r) for p in range(planes) for r in range(runs)]  # of gigabytes each, so there are few
        return [box for row in rows for box in boxes(peer, target[row], source[row], itemsize)]
    return [Box(peer, planes, runs, run, *places)]


def send(world: World, what: Sequence[Box], target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue the copy of each box of `source`, this rank's, into its peer's `target`, on the current stream."""
    copy = getattr(world.backend, "copy", None)
    if copy is None:
        for box in what:
            beside(copy_kernel, (1,), target, source, box, world.device, 1024)
        return
    itemsize, window = source.element_size(), world.backend.stride
    to, of = target.data_ptr(), source.data_ptr()
    for box in what:
        copy(
            to + (box.peer - world.rank) * window + box.target.start * itemsize, of + box.source.start * itemsize,
            (box.planes, box.runs, box.run * itemsize),
            *((place.pitch * itemsize, place.plane * itemsize) for place in (box.target, box.source)),
        )  # fmt: skip


class Side:
    """A world's stream for copies beside the current one. In the simulator everything is done in the order in which it
    is queued, and so it may be on GPUs: what waits is always queued behind what it waits for."""

    def __init__(self, world: World) -> None:
        self.stream: torch.cuda.Stream | None = None
        if world.torch_device.type == "cuda":
            device = world.torch_device
            self.stream = world.workspace(("pkt.kernels", "copies"), lambda: torch.cuda.Stream(device))

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """What is queued inside runs on this stream, behind what the current one has so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What this stream has so far, for `reach`."""
        return None if self.stream is None else self.stream.record_event()

    def reach(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on when all before `mark` is done."""
        if self.stream is not None and mark is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(mark)


def meeting(world: World) -> Callable[[], None]:
    """meet(): all ranks' current streams come to one point."""
    start, bar = cooperative_launch(world, meet_kernel, (1,), num_warps=1), _common.barrier_counters(world)
    return lambda: start(bar, world.device)


def exchange_launch(world: World, what: Sequence[Box]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """launch(x, out): each box of this rank's `x` into its peer's `out`, and when it ends that of all ranks. Two
    meetings of all ranks around the copies."""
    side, meet = Side(world), meeting(world)
    own, others = ([box for box in what if (box.peer == world.rank) == mine] for mine in (True, False))

    def launch(x: torch.Tensor, out: torch.Tensor) -> None:
        meet()  # before overwrite: every rank is done with what it had in `out`
        with side.behind():
            send(world, others, out, x)
            sent = side.mark()
        send(world, own, out, x)
        side.reach(sent)
        meet()  # publish: all parts are there

    return launch
