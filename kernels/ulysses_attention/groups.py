"""The form "copy": copy engines move heads group by group, and the SMs attend to each group that has arrived.

A rank's stream for copies sends its peers their first groups, then their second ones, ..., and a number behind each
group. The rank's own parts of all groups are copied by SMs, as nothing else can within a GPU, before attention has
them all: behind the start of a group's kernel they would wait for its last wave, and the next group for them. Then the
current stream and another one take groups in turn: a stream waits for a group's parts and attends to it. The last wave
of a group's programs leaves SMs idle, and programs of the next group run on them. The stream for copies takes the
group's results to peers meanwhile, and a third one puts the rank's own in place. Nothing hides the exchange of the
first group and the way home of the last one.

Ranks meet when a launch ends, and not when it begins: when all results are at home, all heads have been read. A rank's
results of the next launch follow that launch's group of all ranks, so nobody is still at the results of this one.

No wait can block what it waits for. A rank queues all its copies to peers before its first wait, and they need no SM
and no kernel of this launch. So the waits of both streams end, whatever else runs, and each of them is one program.

torch allocates a group's result and workspaces on the stream that attends to it, and only later work of that stream
gets their memory again. The results are kept until the current stream has waited for all that reads them, and the other
stream follows the current one in the next launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import pkt.language as pl
from pkt.runtime.launch.launch import beside_launch
from pkt.runtime.launch.replay import replayed
from pkt.runtime.memory.factories import empty, signals
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World

from ..declaration import Call, Launch
from ..shared import copies
from .heads import Heads, heads_of
from .local import Local


@triton.jit
def arrived_kernel(
    ready_ptr,  # int32 (size,) on every rank; [r] is the number of the last launch whose copies rank r has sent here
    number_ptr,  # int32, this rank's: the number of this launch
    world,
):
    """All peers' copies of this launch are here."""
    number = tl.load(number_ptr)
    for i in range(1, world.size):
        pl.wait(ready_ptr + (tl.cast(world.rank, tl.int32) + i) % world.size, number, world)


class Group(NamedTuple):
    """Some of a rank's heads."""

    queries: range
    keys: range
    first: bool  # these heads of keys are in no group before


def groups_of(held: Heads, n: int) -> list[Group]:
    """Groups of n heads of queries, see `is_group`."""
    starts, share = range(0, held.queries, n), held.sharing
    return [Group(range(i, i + n), range(i // share, -(-(i + n) // share)), i % share == 0) for i in starts]


def window(call: Call, name: str, shape: tuple[int, ...]) -> SymmetricTensor:
    """A symmetric tensor for all calls with such operands. Collective."""
    world, dtype = call.world, call.dtype
    return world.keep(
        (call.name, name, shape, dtype), lambda: empty(*shape, dtype=dtype, name=f"{call.name}.{name}", world=world)
    )


def moving(
    call: Call, name: str, peer: int, heads: range, place: torch.Tensor, batch: slice = slice(None)
) -> list[copies.Box]:
    """What moves this rank's positions of some heads of `peer` there, of operand `name`. place: that of all heads of
    `peer` in its inbox, (batches, s, heads, d) of a `copies.layout`."""
    size, n = call.world.size, place.shape[2]
    repeats = 1 if name == "q" else heads_of(call["h"], call["g"], size).repeats
    mine = copies.layout(call["b"], call["s"], size * n // repeats, call["d"])[batch]
    width, boxes = len(heads) if repeats == 1 else 1, []
    for i in heads[::width]:
        target, source = place.narrow(2, i, width), mine.narrow(2, (peer * n + i) // repeats, width)
        boxes += copies.boxes(peer, target.flatten(2), source.flatten(2), call.dtype.itemsize)
    return boxes


def sending(
    world: World, this: torch.Tensor, side: copies.Side, sends: Sequence[tuple[str, copies.Send]]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.cuda.Event | None]:
    """send(q, k, v): count a launch in `this`, and queue the copies on `side`. Returns what to `side.reach`, None for
    nothing. sends: the operand that it takes, or "this", and what sends it."""

    def send(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.cuda.Event | None:
        if world.streams is not None:
            world.streams.follow()  # the world's last call may be on another stream
        this.add_(1)
        if not sends:
            return None
        given = {"q": q, "k": k, "v": v, "this": this}
        with side.behind() as stream:
            for name, one in sends:
                one(given[name], stream)
            return side.mark()

    return send


Move = Callable[[torch.Tensor, torch.Tensor], None]
"""move(x, target): copies within this GPU, of an x and a target like those that it was planned for."""


def returning(
    call: Call, heads: range, peers: Sequence[int]
) -> tuple[Callable[[torch.Tensor, torch.Tensor, int | None], None], Move]:  # fmt: skip
    """back(found, target, stream), keep(found, out): what moves results of some heads of this rank, (B, size * S,
    heads, D), into a symmetric `target` of the peers that have their queries, in this order, and into `out` here."""
    world, (b, s, h, g, d) = call.world, (call[letter] for letter in "bshgd")
    first = world.rank * heads_of(h, g, world.size).queries + heads.start

    def boxes(owner: int) -> list[copies.Box]:
        found = copies.layout(b, world.size * s, len(heads), d)[:, owner * s : (owner + 1) * s]
        target = copies.layout(b, s, h, d).narrow(2, first, len(heads))
        return copies.boxes(owner, target.flatten(2), found.flatten(2), call.dtype.itemsize)

    back = copies.sent_to(world, [box for owner in peers for box in boxes(owner)])
    return back, copies.within(world, boxes(world.rank))


def fetching(call: Call) -> Move:
    """What moves results of the peers' heads that have come home into a result that is not symmetric."""
    world, (b, s, h, g, d) = call.world, (call[letter] for letter in "bshgd")
    whole, n = copies.layout(b, s, h, d), heads_of(h, g, world.size).queries
    others = whole[:, :, : world.rank * n].flatten(2), whole[:, :, (world.rank + 1) * n :].flatten(2)
    return copies.within(world, [box for x in others for box in copies.boxes(world.rank, x, x, call.dtype.itemsize)])


def copied(call: Call, local: Local) -> Launch:
    """The plan."""
    world, out = call.world, call["out"]
    rank, size = world.rank, world.size
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    held = heads_of(h, g, size)
    groups = groups_of(held, call["heads"])
    here = {"q": held.queries, "k": held.keys, "v": held.keys}
    inboxes = {name: window(call, name, (b, size * s, n, d)) for name, n in here.items()}
    home = None if isinstance(out, SymmetricTensor) else window(call, "home", (b, s, h, d))

    def make() -> SymmetricTensor:  # [g * size + r] is the last launch whose group g rank r has sent here
        return signals(len(groups) * size + 1, name=f"{call.name}.groups", world=world)

    counters = world.keep((call.name, "groups", b, s, *held, d, call.dtype, call["heads"]), make)
    number, side, other, beside = counters[-1:], *(copies.Side(world, *name) for name in ((), ("groups",), ("own",)))

    def moved(name: str, peer: int, heads: range) -> list[copies.Box]:
        place = copies.layout(b, size * s, here[name], d)[:, rank * s : (rank + 1) * s]
        return moving(call, name, peer, heads, place)

    own = [(inboxes[name], copies.within(world, moved(name, rank, range(n)))) for name, n in here.items()]
    sends: list[tuple[str, copies.Send]] = []
    stages = []
    for at, group in enumerate(groups):
        heads = {"q": group.queries, "k": group.keys, "v": group.keys}
        peers = [(rank + i) % size for i in copies.turn(size, at)]
        for peer in peers:
            for name in "qkv" if group.first else "q":
                boxes = moved(name, peer, heads[name])
                sends.append((name, copies.sending(world, boxes, inboxes[name])))
            sends.append(("this", copies.telling(world, peer, counters, at * size + rank)))
        operands = [inboxes[name].plain().narrow(2, of.start, len(of)) for name, of in heads.items()]
        attend = local.planned(world, operands[0], operands[1], operands[2], call["cu_seqlens"])
        wait = beside_launch(world, arrived_kernel, (1,), num_warps=1)  # or it would follow the group before
        stages.append((wait, counters[at * size :], attend, operands, *returning(call, group.queries, peers)))
    meet, send, fetch = copies.meeting(world), sending(world, number.plain(), side, sends), fetching(call)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        send(q, k, v)
        for x, (inbox, place) in zip((q, k, v), own):
            place(x, inbox)
        other.follow()
        found = []  # kept until the copies have ended
        for at, (wait, ready, attend, operands, back, keep) in enumerate(stages):
            with other.current() if at % 2 else contextlib.nullcontext():
                wait(ready, number, world.device)
                found.append(attend(*operands, cu_seqlens).contiguous())
                with side.behind() as stream:
                    back(found[-1], out if home is None else home, stream)
                beside.follow()
            with beside.current():
                keep(found[-1], out)
        for each in (side, beside):  # and so both streams' groups, whose results the copies follow
            each.reach(each.mark())
        meet()  # publish: all results are at home; before overwrite: all ranks have read their heads
        if home is not None:
            fetch(home, out)
        return out

    return again(call, launch)


def again(call: Call, launch: Launch) -> Launch:
    """`launch`, replayed where the call comes again."""
    return replayed(call.world, launch, choices) if call.dtype.itemsize == 2 else launch


def choices() -> Hashable:
    """torch's settings that its attention in bf16 and fp16 depends on."""
    of = torch.backends.cuda
    return (
        of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled(), of.cudnn_sdp_enabled(),
        of.fp16_bf16_reduction_math_sdp_allowed(),
    )  # fmt: skip
