"""The form "gluon": ring attention's kernel in specialised warps over all heads of a rank, in one launch.

Copy engines push one group of heads after the other into inboxes on their ranks, as in the form "copy", and a number
behind each group. Small groups of several batches are one copy. The kernel's programs take the heads in the same order.
A loader waits for the group of a task's head from all peers; its consumers store each finished tile where the result
belongs, on the rank of its queries. So only the exchange of the first group is not hidden. What a rank has already, its
own positions of its own heads, is read where it is: a copy within a GPU may need SMs, and the kernel has all of them.

Of long sequences all programs of a rank begin their tasks together, see `rules.is_long`.

All of a peer's copies run in one order, so a group of queries is behind the heads of keys that it shares with groups
before it. Ranks meet when a launch ends, and not when it begins, see `groups`: a tile goes to a rank that has sent its
group of this launch, and so is done with the results of the last one.
"""

from __future__ import annotations

import itertools

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pkt.runtime.launch.launch import cooperative_launch
from pkt.runtime.launch.passing import lasts
from pkt.runtime.memory.factories import signals
from pkt.runtime.memory.tensor import SymmetricTensor

from ..declaration import Call, Launch
from ..ring_attention.exact import view_of
from ..ring_attention.gluon import REGISTERS, STAGES, attend, load, open_memory
from ..ring_attention.gluon_tasks import Heads, Job
from ..ring_attention.kernel import Attention
from ..ring_attention.planning import GLUON_ROWS, GLUON_TILES, WHOLE, Plan, documents, sizes
from ..ring_attention.sequence import parts, pieces
from ..ring_attention.turns import NEAR, heads_together, task_costs
from ..shared import copies
from ..shared.gluon_host import CONSUMER_WARPS, descriptor
from ..shared.gluon_scales import CONSUMERS
from ..shared.grid import num_programs
from ..shared.products import fitting
from .groups import groups_of, moving, sending, window
from .heads import heads_of
from .rules import delay, is_long, joined_batches


@gluon.jit(do_not_specialize=["together"])
def gluon_heads_kernel(
    q,  # (B, R, size * H * D) this rank's, blocks of 1 x BLOCK_M / 2 x D
    k,  # (B, R, size * KV / REPEATS * D) this rank's, blocks of 1 x BLOCK_N x D
    v,  # as k
    q_inbox,  # ((size - 1) * B, R, H * D) this rank's; rank - d stores [(d - 1) * B + b]
    k_inbox,  # ((size - 1) * B, R, KV * D), as q_inbox
    v_inbox,  # as k_inbox
    p,  # Attention, without the tensors above. S is R, the rows of a rank; H, KV: heads on a rank. out_ptr: (B, R,
    # size * H, D) on every rank. ready_ptr: int32 (B, H / GROUP, size - 1), this rank's; [b, g, d - 1] is the number of
    # the last launch whose group g, of batch b and those that come with it, of rank - d is here; the number of this
    # launch follows. bar_ptr: this rank's, where programs meet before each task; None: they do not
    together,  # heads of all batches that programs work on at a time
    world,
    GROUP: gl.constexpr,  # heads of queries that come together
    REPEATS: gl.constexpr,  # heads of keys that are one head of `k`
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attention of all positions of this rank's heads."""
    number = gl.load(p.ready_ptr + p.B * (p.H // GROUP) * (world.size - 1))
    memory = open_memory(q.dtype, p, STAGES)
    job = Job(p, together, gl.cast(world.rank, gl.int32), number, world, Heads(GROUP, REPEATS))
    gl.warp_specialize(
        [
            (attend, (0, p, job, memory)),
            (attend, (1, p, job, memory)),
            (load, (p, job, memory, (q, k, v), (q_inbox, k_inbox, v_inbox))),
        ],
        [num_warps, 1],
        REGISTERS,
    )


def planned_heads(call: Call) -> Launch:
    """The plan of the form. Collective."""
    world, itemsize, out = call.world, call.dtype.itemsize, call["out"]
    rank, size = world.rank, world.size
    b, s, h, g, d = (call[letter] for letter in "bshgd")
    held, each, joined = heads_of(h, g, size), call["heads"], joined_batches(call)
    groups = groups_of(held, each)
    here = {"q": held.queries, "k": held.keys, "v": held.keys}
    inboxes = {name: window(call, f"gluon.{name}", (size - 1, b, s, n, d)) for name, n in here.items()}
    home = None if isinstance(out, SymmetricTensor) else window(call, "home", (b, s, h, d))

    def make() -> SymmetricTensor:
        return signals(b * len(groups) * (size - 1) + 1, name=f"{call.name}.gluon", world=world)

    def make_bar() -> SymmetricTensor:
        return signals(1, name=f"{call.name}.gluon.bar", world=world)

    counters = world.keep((call.name, "gluon", b, s, *held, d, call.dtype, each), make)
    bar = world.keep((call.name, "gluon", "bar"), make_bar) if is_long(call) else None
    side = copies.Side(world)

    sends: list[tuple[str, copies.Send]] = []
    for i, (at, group) in itertools.product(range(0, b, joined), enumerate(groups)):
        for distance in copies.turn(size, at):
            peer = (rank + distance) % size
            for name in "qkv" if group.first else "q":
                heads, batches = group.queries if name == "q" else group.keys, slice(i, i + joined)
                place = copies.layout(size - 1, b, s, here[name], d)[distance - 1, batches]
                boxes = moving(call, name, peer, heads, place, batches)
                sends.append((name, copies.sending(world, boxes, inboxes[name])))
            counter = (i * len(groups) + at) * (size - 1) + distance - 1
            sends.append(("this", copies.telling(world, peer, counters, counter)))

    blocks = {"q": GLUON_TILES.block_m // CONSUMERS.value, "k": GLUON_TILES.block_n, "v": GLUON_TILES.block_n}
    fits = {name: fitting(call[name]) for name in "qkv"}

    def fitted(name: str, x: torch.Tensor) -> torch.Tensor:
        """An operand that TMA can address."""
        fit = fits[name]
        return (fit(x) if fit else x).view(b, s, -1)

    own = {name: descriptor(fitted(name, call[name]), (1, n, d)) for name, n in blocks.items()}
    theirs = [
        lasts(descriptor(x.plain().view((size - 1) * b, s, -1), (1, blocks[name], d))) for name, x in inboxes.items()
    ]  # fmt: skip
    view = view_of(s, size, call["causal"], call["window"], None)
    queries = [piece for r in range(size) for piece in pieces(s, "contiguous", r, size, GLUON_TILES.block_m)][::-1]
    programs = num_programs(world, b * held.queries * len(queries))
    plan = Plan(view, False, GLUON_TILES, WHOLE, [], 0, [], joined)
    constants = {"H": held.queries, "KV": held.keys, "WAY": "copied"}
    same = {**dict.fromkeys(Attention._fields), **sizes(call, plan), "num_comm_sms": 0, "ready_ptr": counters}
    same["bar_ptr"] = bar
    same |= {name: tl.constexpr(x) for name, x in constants.items()}
    near = max(NEAR // (2 * size * s * d * itemsize), 1) * held.sharing
    costs = task_costs(call, queries, parts(size * s, "contiguous", 0, 1), view, GLUON_ROWS)
    together = heads_together(costs, b * held.queries, min(near, each), programs, held.sharing, delay(call))
    spans_of = documents(call)
    options = {"GROUP": each, "REPEATS": held.repeats, "STAGES": STAGES, "num_warps": CONSUMER_WARPS}
    start = cooperative_launch(world, gluon_heads_kernel, (programs,), **options)
    meet, send = copies.meeting(world), sending(world, counters[-1:].plain(), side, sends)

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        gone = send(q, k, v)
        p = Attention(**{**same, "spans_ptr": spans_of(cu_seqlens), "out_ptr": out if home is None else home})
        try:
            for (name, one), x in zip(own.items(), (q, k, v)):
                one.base = fitted(name, x)
            start(*own.values(), *theirs, p, together, world.device)
        finally:
            for one in own.values():
                one.base = None
        side.reach(gone)
        meet()  # publish: all results are at home; before overwrite: all ranks have read their heads
        if home is not None:
            out.view(home.shape).copy_(home.plain())
        return out

    return launch
