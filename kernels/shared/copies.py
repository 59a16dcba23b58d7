"""Copies by the copy engines: no SM moves data, and a link takes 392 GB/s instead of 362 out of an H200.

What moves is a box, runs of elements at even distances on both sides, so that a part of a tensor goes straight to its
place. A rank's copies go on one stream of their own, one after the other and to the next peer each time: one engine
fills the links, and ranks that begin together send to different peers throughout. Where kernels of several ranks must
know of each other's copies, the stream is joined first and they meet inside; or, while they run, an engine says so
behind its copy, and a kernel counts what it has finished (`gathering`, `scattering`). Such a kernel may have all SMs
while it waits, so nothing in front of those copies may need one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import beside_launch, cooperative_launch
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.pool import outside_pools
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Launch
from .grid import barrier_counters

UNEVEN = 8
"""From an eighth of the bytes on engines copy what is no whole 16 bytes long in one run: programs move it in narrower
accesses. On 3 x H200 what makes 128 MiB of runs of 5460 bytes is gathered in 0.264 ms, and pushed in 0.374; such runs
of 128 MiB are reduced in 0.300, and pushed in 0.378 (benchmarks/results/collectives_3.json)."""

BLOCK = 4096
"""Elements that a program of `within` copies."""

MAX_PITCH = (1 << 31) - 1
"""Bytes from one run to the next that an engine can take in one copy, CU_DEVICE_ATTRIBUTE_MAX_PITCH."""


@triton.jit
def meet_kernel(bar_ptr, world):
    """All ranks have come here: their copies have arrived, and what they have read may be overwritten."""
    pl.barrier(bar_ptr, world)


@triton.jit(do_not_specialize=["zeros"])
def begin_kernel(number_ptr, bar_ptr, zeros, world):
    """All ranks have come to a launch whose copies are announced: to the one of this number, counted here. `zeros`:
    words behind it that count from zero in each launch."""
    pl.barrier(bar_ptr, world)
    tl.store(number_ptr, tl.load(number_ptr) + 1)
    for i in range(zeros):
        tl.store(number_ptr + 1 + i, 0)


@triton.jit
def tell_kernel(counter_ptr, number_ptr, peer, world):
    """In the place of a copy engine in the simulator: behind a copy, the number of the launch into `peer`'s counter."""
    pl.signal(counter_ptr, peer, world, tl.load(number_ptr), "set")


@triton.jit
def copy_kernel(
    dst_ptr,  # on `peer`
    src_ptr,  # this rank's
    peer,
    planes,
    runs,
    run,
    target_place,  # Place
    source_place,  # Place
    world,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS runs of a box, and of these COLUMNS elements: within a GPU, where engines do not work, and in the simulator
    in the place of an engine, where a copy of torch's would escape the race detector."""
    across, block = tl.cdiv(run, COLUMNS), tl.program_id(0)
    row = (block // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    element = block % across * COLUMNS + tl.arange(0, COLUMNS)
    plane, inside = row // runs, (row < planes * runs)[:, None] & (element < run)
    source = src_ptr + source_place.start + plane * source_place.plane + row % runs * source_place.pitch
    target = dst_ptr + target_place.start + plane * target_place.plane + row % runs * target_place.pitch
    pl.store(target[:, None] + element, tl.load(source[:, None] + element, mask=inside), peer, world, mask=inside)


def turn(size: int, g: int) -> list[int]:
    """In which order a rank's peers, rank + 1, ..., rank + size - 1, have the g-th copies: the last one first the next
    time, so that ranks change peers as seldom as can be. While one has, and others have not, two send to one peer."""
    first = -g % max(size - 1, 1)
    return [1 + (first + i) % (size - 1) for i in range(size - 1)]


def least(nbytes: int, run: int, itemsize: int) -> int:
    """From how many bytes on engines are chosen for runs of `run` elements, where it is `nbytes` for those of whole 16
    bytes."""
    return nbytes if run * itemsize % 16 == 0 else nbytes // UNEVEN


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
    if source.is_contiguous() and target.is_contiguous():
        target, source = target.flatten(), source.flatten()
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


Send = Callable[[torch.Tensor, "int | None"], None]


def sending(world: World, what: Sequence[Box], target: torch.Tensor) -> Send:
    """send(x, stream): queue the copy of each box of `x`, this rank's, into its peer's `target`, on a stream by its
    handle, the current one where None. The addresses are worked out here: at each launch that would take as long as the
    driver does."""
    engines = world.backend.copies
    if engines is None:
        start = within(world, what)
        return lambda x, stream: start(x, target)
    itemsize, to, here = target.element_size(), target.data_ptr(), world.backend.window(world.rank)
    moves = [
        (
            to + world.backend.window(box.peer) - here + box.target.start * itemsize, box.source.start * itemsize,
            (box.planes, box.runs, box.run * itemsize),
            (box.target.pitch * itemsize, box.target.plane * itemsize),
            (box.source.pitch * itemsize, box.source.plane * itemsize),
        )
        for box in what
    ]  # fmt: skip

    def send(x: torch.Tensor, stream: int | None) -> None:
        of = x.data_ptr()
        for to, start, *how in moves:
            engines.copy(to, of + start, *how, stream)

    return send


def within(world: World, what: Sequence[Box]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """copy(x, target): each box of `x` into `target`, by a kernel on the current stream, which does not wait for the
    world's other calls. For boxes of this rank: within a GPU the driver's copies are kernels, too. They take twice as
    long where the strides of the two sides differ (`copies_within_1.json`)."""
    steps = []
    for box in what:
        columns = min(triton.next_power_of_2(box.run), BLOCK)
        rows = min(triton.next_power_of_2(box.planes * box.runs), BLOCK // columns)
        grid = (triton.cdiv(box.planes * box.runs, rows) * triton.cdiv(box.run, columns),)
        steps.append((beside_launch(world, copy_kernel, grid), box, rows, columns))

    def copy(x: torch.Tensor, target: torch.Tensor) -> None:
        for start, box, rows, columns in steps:
            start(target, x, *box, world.device, rows, columns)

    return copy


def sent_to(world: World, what: Sequence[Box]) -> Callable[[torch.Tensor, torch.Tensor, int | None], None]:
    """send(x, target, stream), as of `sending`, for targets that change. The addresses in the last one are kept."""
    if world.backend.copies is None:
        return lambda x, target, stream: sending(world, what, target)(x, stream)
    at, known = -1, sending(world, (), layout(1))

    def send(x: torch.Tensor, target: torch.Tensor, stream: int | None) -> None:
        nonlocal at, known
        if at != target.data_ptr():
            at, known = target.data_ptr(), sending(world, what, target)
        known(x, stream)

    return send


class Side:
    """A world's stream beside the current one, whichever that is: nobody else has this stream. In the simulator
    everything is done in the order in which it is queued.

    name: a world has one stream of each name. That of the copies is the default.
    """

    def __init__(self, world: World, name: str = "copies") -> None:
        self.stream: torch.cuda.Stream | None = None
        if world.torch_device.type == "cuda":
            engines, known, key = world.backend.copies, world.lasting, f"pkt.kernels.{name}"
            assert engines is not None, "GPUs have copy engines"
            if key not in known:
                known[key] = engines.stream()
            self.stream = known[key]

    def here(self) -> torch.cuda.Event | None:
        """What the current stream has so far, for `behind`."""
        return None if self.stream is None else torch.cuda.current_stream(self.stream.device).record_event()

    def follow(self, here: torch.cuda.Event | None = None) -> None:
        """What is queued on this stream from now on runs behind what the current stream has so far, or had `here`."""
        if self.stream is not None:
            self.stream.wait_event(here or self.here())

    @contextlib.contextmanager
    def behind(self, here: torch.cuda.Event | None = None) -> Iterator[int | None]:
        """This stream's handle, when it follows the current one, see `follow`."""
        self.follow(here)
        yield None if self.stream is None else self.stream.cuda_stream

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this stream is the current one."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """What this stream has so far, for `reach`."""
        return None if self.stream is None else self.stream.record_event()

    def reach(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on when all before `mark` is done."""
        if self.stream is not None and mark is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(mark)


def meeting(world: World) -> Callable[[], None]:
    """meet(): all ranks' current streams come to one point."""
    start, bar = cooperative_launch(world, meet_kernel, (1,), num_warps=1), barrier_counters(world)
    return lambda: start(bar, world.device)


def counting(world: World, number: SymmetricTensor, zeros: int = 0) -> Callable[[], None]:
    """begin(): all ranks' current streams come to one point, the number of a launch is counted, and so many words
    behind it are 0. For launches whose kernels wait for copies, so not on the stream for these."""
    start, bar = cooperative_launch(world, begin_kernel, (1,), num_warps=1), barrier_counters(world)
    return lambda: start(number, bar, zeros, world.device)


def telling(world: World, peer: int, counters: SymmetricTensor, at: int) -> Send:
    """tell(this, stream): queue the copy of `this`, the last of this rank's `counters`, to `peer`'s counter `at`: the
    number of the launch, behind what the stream has moved so far."""
    if world.backend.copies is not None:
        word, words = layout(1), layout(counters.numel())
        return sending(world, boxes(peer, words[at : at + 1], word, counters.element_size()), counters)
    start, number = beside_launch(world, tell_kernel, (1,), num_warps=1), counters[-1:]
    return lambda this, stream: start(counters[at:], number, peer, world.device)


def announcing(
    world: World, counters: SymmetricTensor, parts: Sequence[tuple[Send, Send]]
) -> Callable[[torch.Tensor], Callable[[], None]]:  # fmt: skip
    """begin(x): when all ranks have come here, the parts of `x` in this order on a stream beside the current one: what
    moves one, and then what tells the number of the launch, the last of `counters`. Returns join(), behind which on the
    current stream `x` may be overwritten.

    A kernel that is queued behind begin() waits for this number. An engine copies it behind its part: of two copies in
    a stream the first is done when the second begins. So it needs no program of a kernel, and is right in a replayed
    graph.
    """
    start, side, this = counting(world, counters[-1:]), Side(world), counters[-1:].plain()

    def begin(x: torch.Tensor) -> Callable[[], None]:
        start()  # before overwrite: every rank's launch before has ended
        with side.behind() as stream:
            for move, tell in parts:
                move(x, stream)
                tell(this, stream)
            sent = side.mark()
        return lambda: side.reach(sent)

    return begin


class Gathering(NamedTuple):
    """What `gathering` sends, and what a kernel that waits for it needs."""

    inbox: SymmetricTensor  # (size, m, k); rank r stores [r] of all the others
    counters: SymmetricTensor  # int32 (size * groups * chunks + 1); [(r * groups + g) * chunks + c] counts launches:
    # columns c * chunk, ... of rows g * step, ... of rank r are here up to that one; the last counter is this launch's
    begin: Callable[[torch.Tensor], Callable[[], None]]


def gathering(world: World, m: int, k: int, dtype: torch.dtype, step: int, chunk: int | None = None) -> Gathering:
    """begin(x) -> join(), as of `announcing`: this rank's `x`, (m, k), into the inbox of every peer, `step` rows at a
    time and of these `chunk` columns, every peer's first rows before anybody's next. Collective."""
    chunk = chunk or k
    rank, size, groups, chunks = world.rank, world.size, triton.cdiv(m, step), triton.cdiv(k, chunk)

    def make() -> tuple[SymmetricTensor, SymmetricTensor]:
        inbox = empty(size, m, k, dtype=dtype, name="kernels.gathered", world=world)
        return inbox, signals(size * groups * chunks + 1, name="kernels.gatherings", world=world)

    inbox, counters = world.keep(("pkt.kernels", "gathered", m, k, dtype, step, chunk), make)
    shard, theirs = layout(m, k), layout(size, m, k)[rank]

    def part(g: int, peer: int, c: int) -> tuple[Send, Send]:
        """What moves columns c * chunk, ... of rows g * step, ... to `peer`, and what then says so there."""
        here = slice(g * step, (g + 1) * step), slice(c * chunk, (c + 1) * chunk)
        at = (rank * groups + g) * chunks + c
        move = sending(world, boxes(peer, theirs[here], shard[here], dtype.itemsize), inbox)
        return move, telling(world, peer, counters, at)

    order = itertools.product(range(groups), range(1, size), range(chunks))
    parts = [part(g, (rank + d) % size, c) for g, d, c in order]
    return Gathering(inbox, counters, announcing(world, counters, parts))


class Scattering(NamedTuple):
    """What `scattering` sends, and what a kernel that fills and waits for it needs."""

    inbox: SymmetricTensor  # (size - 1, tiles * tile); rank - d stores [d - 1]
    outbox: torch.Tensor  # the same of this rank, for rank + d
    counters: SymmetricTensor  # int32 (2 * (size - 1) * parcels + 1); [(d - 1) * parcels + g] is the number of the last
    # launch whose parcel g of rank - d is here; then the number of this launch; and then, in the same order, how many
    # tiles of a parcel for rank + d this launch has finished
    begin: Callable[[], Callable[[], None]]


def scattering(world: World, tiles: int, tile: int, dtype: torch.dtype, parcel: int) -> Scattering:
    """begin(): all ranks have come here. Returns send(), to call when the kernel is queued that fills the outbox: each
    parcel of `parcel` tiles, as soon as all of them are finished, into its owner's inbox, on a stream beside the
    current one, in the order in which they are finished: all of rank + 1's, all of rank + 2's, ... The current stream
    goes on when all have gone.

    tile: elements of one. The owner's kernel waits for the number of this launch, as in `gathering`. The waits are
    queued behind the kernel that they wait for, because streams may share a queue of the GPU's. On GPUs only.
    Collective.
    """
    rank, size, parcels = world.rank, world.size, triton.cdiv(tiles, parcel)
    count, shape = (size - 1) * parcels, (size - 1, tiles * tile)

    def make() -> tuple[SymmetricTensor, torch.Tensor, SymmetricTensor]:
        inbox = empty(*shape, dtype=dtype, name="kernels.scattered", world=world)
        outbox = outside_pools(lambda: torch.empty_like(inbox.plain()), world.torch_device)
        return inbox, outbox, signals(2 * count + 1, name="kernels.scatterings", world=world)

    inbox, outbox, counters = world.keep(("pkt.kernels", "scattered", tiles, tile, dtype, parcel), make)
    boxed, word, words = layout(*shape), layout(1), layout(counters.numel())
    number, side, engines = counters[count:], Side(world), world.backend.copies
    start = counting(world, number, count)
    assert engines is not None, "GPUs have copy engines"

    def part(d: int, g: int) -> tuple[int, int, Send, Send]:
        """Of parcel g for rank + d: its word of finished tiles, how many it has, what moves it, and what says so."""
        at, peer = (d - 1) * parcels + g, (rank + d) % size
        here = boxed[d - 1, g * parcel * tile : (g + 1) * parcel * tile]
        told = boxes(peer, words[at : at + 1], word, counters.element_size())
        finished = counters.data_ptr() + (count + 1 + at) * counters.element_size()
        move = sending(world, boxes(peer, here, here, dtype.itemsize), inbox)
        return finished, min(parcel, tiles - g * parcel), move, sending(world, told, counters)

    parts, this = [part(d, g) for d in range(1, size) for g in range(parcels)], number.plain()

    def begin() -> Callable[[], None]:
        start()  # before overwrite: every rank's launch before has ended
        here = side.here()

        def send() -> None:
            with side.behind(here) as stream:
                for finished, wanted, move, tell in parts:
                    engines.hold(finished, wanted, stream)
                    move(outbox, stream)
                    tell(this, stream)
                sent = side.mark()
            side.reach(sent)

        return send

    return Scattering(inbox, outbox, counters, begin)


def exchange_launch(world: World, what: Sequence[Box]) -> Launch:
    """launch(x, out): each box of this rank's `x` into its peer's `out`, and when it ends that of all ranks. Two
    meetings of all ranks around the copies. Returns `out`."""
    side, meet = Side(world), meeting(world)
    own, others = (sent_to(world, [b for b in what if (b.peer == world.rank) == mine]) for mine in (True, False))

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        meet()  # before overwrite: every rank is done with what it had in `out`
        with side.behind() as stream:
            others(x, out, stream)
            sent = side.mark()
        own(x, out, None)
        side.reach(sent)
        meet()  # publish: all parts are there
        return out

    return launch
