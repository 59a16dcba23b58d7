"""Parts of the test of worlds of several nodes, and the program that runs them: on two nodes of one or more ranks.

    PKT_NODE_SIZE=1 torchrun --nproc-per-node 2 -m tests.gpu.cases_nodes            all parts
    PKT_NODE_SIZE=1 torchrun --nproc-per-node 2 -m tests.gpu.cases_nodes PART ...   some
    PKT_NODE_SIZE=2 torchrun --nproc-per-node 4 -m tests.gpu.cases_nodes            on two nodes of two ranks

A part has a world of its own. It prints a line when it ends. The program ends with a part that is wrong: the ranks may
no longer be in one part, or a GPU's context gone. PKT_TEST_REPLAYS is how often an operator is replayed. The parts that
need no GPU run in the simulator, too.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

import pkt
from benchmarks import far
from pkt.errors import PktError, Unsupported, WaitTimeout
from pkt.kernels.declaration import Case
from pkt.language.world import Network
from tests.conformance import checks, inputs
from tests.gpu.cases_timeouts import drop_once
from tests.gpu.run import scaled
from tests.gpu.test_operators import GPU_SIZES, OPERATORS, Calls, gpu_cases
from tests.kernels.test_moe import assert_right, layer

HEAP, SECONDS = "256MiB", 30.0  # of a world; seconds that a rank may compile while the other one waits
LIMIT = scaled("PART_SECONDS", 75)  # of a part; the program ends where it takes longer
REPLAYS, FEW, TURNS = scaled("REPLAYS", 10_000), 50, scaled("TURNS", 500)
EVERY = 500  # replays between two looks at the results
WITHIN = (
    "all_gather push",
    "all_reduce low_latency",
    "all_gather_matmul copy",
    "all_gather_matmul gluon",
    "combine pull",
)
ACROSS = [name for name, operator in OPERATORS.items() if "nodes" in operator.across]


# ---------------------------------------------------------------------------------------------------- parts in a world
def places(world: pkt.World) -> None:
    """What the world says of its nodes."""
    near = world.size // 2
    assert (world.nodes, world.node_size) == (2, near)
    assert (world.node, world.local_rank) == divmod(world.rank, near)
    assert world.on_node.ranks == tuple(range(world.node * near, (world.node + 1) * near))
    assert world.rail.ranks == (world.local_rank, world.local_rank + near)
    assert (world.on_node.nodes, world.rail.nodes) == (1, 2)
    assert world.all_gather_object(world.rank) == list(range(world.size))
    assert not world.multicast


def memory(world: pkt.World) -> None:
    """Allocation, free, and memory that is used again; other ranks' memory is refused, but for those of the node."""
    device, arena, near = world.device, len(world.backend.arena), world.on_node
    far = (world.rank + world.node_size) % world.size
    assert Network.of(device.network.value)[:2] == (world.node_size, arena)
    base = world.backend.base
    for _ in range(3):
        made = [pkt.full(1000, float(i)) for i in range(20)]
        counters = [pkt.signals(10), pkt.signals(3, dtype=torch.int64), pkt.signals(5, world=world.on_node)]
        for i, x in enumerate(made):
            assert x.eq(i).all()
            assert x.data_ptr() >= base + 3 * arena
        for flags in counters:
            first = flags.data_ptr() - base
            assert 0 < first < arena
            lane = world.backend.view(world.rank, arena + 2 * first, 2 * flags.nbytes)
            assert lane.eq(0).all()
            assert flags.eq(0).all()
            lane.fill_(1)
        with pytest.raises(Unsupported, match="only the network reaches another node"):
            made[0].peer(far)
        here = pkt.full(1000, float(world.rank))
        world.synchronize()
        world.barrier()
        for rank in near.ranks:
            assert here.peer(rank).eq(rank).all()
        world.barrier()
        here.free()
        for x in (*made, *counters):
            x.free()
        world.barrier()
    world.check()
    again = [pkt.signals(10) for _ in range(30)]  # over lanes that were written to
    for flags in again:
        first = flags.data_ptr() - base
        assert world.backend.view(world.rank, arena + 2 * first, 2 * flags.nbytes).eq(0).all()


def calls(world: pkt.World) -> None:
    """benchmarks.far's check of every device call, between the two ranks of each rail."""
    on_gpu = world.torch_device.type == "cuda"
    with torch.device("cpu"):
        print(far.check(far.ground(world.rail), *((TURNS,) if on_gpu else (2, 40, 2)), grids=on_gpu), flush=True)


def cases_of(name: str) -> Iterator[Case]:
    """A few of an operator's cases over nodes, and a larger one where its sizes are simple."""
    operator = OPERATORS[name]
    yield from [case for case in inputs.cases_of(operator, "nodes") if case.arguments.get("mode") == "nodes"][:3]
    letters = [] if operator.most or any(case.large for case in operator.cases) else inputs.letters_of(operator)
    if letters:
        yield Case(sizes=dict(zip(letters, GPU_SIZES[0])))
    elif list(operator.tensors) == ["x"]:
        yield Case(shapes={"x": "W*4096 33"})


def operator(name: str, world: pkt.World) -> None:
    """Right eagerly and in replayed graphs, with stragglers."""
    kinds, ran = checks.floats(OPERATORS[name], "nodes"), 0
    for at, case in enumerate(cases_of(name)):
        try:
            made = Calls(world, name, "nodes", case, kinds[at % 2], {})
            for launch in range(3):
                made.fill(launch)
                made.call()
                made.check()
        except Unsupported as unfit:  # on all ranks
            print(f"{name}, {case}: {unfit}", flush=True)
            continue
        ran += 1
        replayed(world, made, FEW if at else REPLAYS)
    assert ran, f"no case of {name} suits nodes"


def within(world: pkt.World) -> None:
    """Forms of one node, among the ranks of a node, whose windows NVSHMEM has mapped."""
    on_gpu = world.torch_device.type == "cuda"
    for name, mode in map(str.split, WITHIN):
        if (mode == "copy" and not on_gpu) or (mode == "gluon" and not (on_gpu and world.on_node.size > 1)):
            continue
        made = Calls(world.on_node, name, mode, gpu_cases(name, mode)[-1], checks.floats(OPERATORS[name], mode)[0], {})
        made.fill(0)
        made.call()
        made.check()
        replayed(world.on_node, made, FEW)


def replayed(world: pkt.World, made: Calls, count: int) -> None:
    """Replay a call `count` times with other inputs now and then. Each rank is late now and then."""
    on_gpu, chance, call = world.torch_device.type == "cuda", random.Random(world.rank), made.call
    world.barrier()
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.call()
        found, call = made.found, graph.replay
    world.barrier()
    for i in range(count if on_gpu else 4):
        if i % EVERY == 0 or not on_gpu:
            made.fill(10 + i)
        if on_gpu and chance.random() < 1 / 64:
            torch.cuda._sleep(chance.randrange(400_000))  # clock ticks: up to a fifth of a millisecond
        call()
        if i % EVERY == EVERY - 1 or i == count - 1:
            if on_gpu:
                made.found = found
            made.check()
            made.call()  # eagerly in between
            made.check()
    world.synchronize()
    world.barrier()


def experts(world: pkt.World) -> None:
    """pkt.moe and its gradients, against fp64."""

    def run(**operands: torch.Tensor) -> torch.Tensor:
        return pkt.moe(**{name: x.to(world.torch_device) for name, x in operands.items()}, world=world).cpu()

    with torch.device("cpu"):
        for routing in ("random", "skewed"):
            assert_right(world, layer(world.size, routing, (5,), 2, 2, 12), 2e-3, run)  # products may be in TF32


PARTS: dict[str, Callable[[pkt.World], None]] = {
    "places": places,
    "memory": memory,
    "calls": calls,
    "within": within,
    **{name: functools.partial(operator, name) for name in ACROSS},
    "moe": experts,
}


# ------------------------------------------------------------------------------------ parts that make worlds themselves
def again() -> None:
    """Worlds one after the other, and two at once: the same memory in turn, and zeroed counters."""
    bases = []
    for turn in range(4):
        with pkt.init(HEAP, timeout=SECONDS) as world:
            bases.append(world.backend.base)
            x = torch.full((777,), float(world.rank + turn), device=world.torch_device)
            found = pkt.all_reduce(x)
            assert found.eq(sum(range(world.size)) + world.size * turn).all()
    assert len(set(bases)) == 1
    with pkt.init("1100MiB", timeout=SECONDS) as world:  # more than NVSHMEM was told at its start
        assert world.backend.base not in bases
        assert pkt.full(1 << 28, 3.0).eq(3).all()


def late(how: str) -> None:
    """A signal that a rank of another node does not send is named by the one that waits."""
    with pkt.init(HEAP, timeout=SECONDS) as world:
        drop_once(world, how, -1, -1)  # compiled on both ranks before a wait has a short deadline
    begun = time.monotonic()
    with pytest.raises(PktError) as caught:
        dropped(how)
    taken = time.monotonic() - begun
    print(f"{how}, after {taken:.1f} s: {caught.value}", flush=True)
    assert taken < 30
    if os.environ["RANK"] == "0":
        text = str(caught.value)  # by itself, or as another rank said before it left: in a barrier all wait
        assert isinstance(caught.value, WaitTimeout) or "gave up: WaitTimeout" in text
        assert "drop_kernel" in text
        assert "flags[" in text


def dropped(how: str) -> None:
    with pkt.init(HEAP, timeout=4.0) as world:
        drop_once(world, how, world.size - 1, 1)  # the rank behind it, which waits for its signal, is 0


ALONE: dict[str, Callable[[], None]] = {
    "again": again,
    **{f"late {how}": functools.partial(late, how) for how in ("signal", "barrier", "world_barrier")},
}
NAMES = [*PARTS, *ALONE]


# ---------------------------------------------------------------------------------------------------------- the program
def run(name: str) -> None:
    if name in ALONE:
        ALONE[name]()
        return
    with pkt.init(HEAP, timeout=SECONDS) as world, world.torch_device:
        PARTS[name](world)
        world.synchronize()


def lost() -> None:
    """Rank 1 is killed while both ranks call all_reduce; rank 0 says when it noticed, and how."""
    with pkt.init(HEAP, timeout=SECONDS) as world:
        x = torch.ones(1 << 16, device=world.torch_device)
        pkt.all_reduce(x)
        world.synchronize()
        world.barrier()
        begun = time.monotonic()
        while True:
            for _ in range(50):
                pkt.all_reduce(x)
            if world.rank == 1 and time.monotonic() - begun > 0.2:
                print(f"KILLED {time.time()}", flush=True)
                os.kill(os.getpid(), 9)
            world.synchronize()


def main(names: list[str]) -> int:
    rank = os.environ["RANK"]
    for name in names or NAMES:
        begun, text = time.monotonic(), "right"
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            run(name)
        except Exception as error:
            traceback.print_exc()
            text = f"WRONG {type(error).__name__}: {error}".splitlines()[0]
        print(f"PART {name}: rank {rank}: {text}, {time.monotonic() - begun:.1f} s", flush=True)
        if text != "right":
            time.sleep(3)  # the other rank may fail, too, and say why
            os._exit(3)
        faulthandler.cancel_dump_traceback_later()
    print(f"END rank {rank}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["lost"]:
        try:
            lost()
        except PktError as error:
            print(f"SURVIVED {time.time()} {type(error).__name__}: {error}".replace("\n", " "), flush=True)
            sys.exit(0)
    sys.exit(main(sys.argv[1:]))
