"""Check and time calls to far ranks over NVSHMEM: two GPUs of one host, each a node of its own.

    pip install 'pkt-triton[nvshmem]'
    torchrun --nproc-per-node 2 -m benchmarks.far              check, then time: less than a minute
    torchrun --nproc-per-node 2 -m benchmarks.far --check      check only
    python -m benchmarks.far --simulate                        the same kernels and checks in the simulator

pkt.init makes no world of several nodes yet, so this program makes the kernels' argument by hand, over memory of
NVSHMEM's: a node of one rank needs no window of another. Nothing here accesses a peer's memory but NVSHMEM's own
functions. A wait ends after 20 s. **It has run in the simulator only.**
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.language.inspect import ARENA
from pkt.language.world import STATUS_BYTES, STATUS_DEADLINE, DeviceWorld, Network, code_hash, team_constants
from pkt.progress import steps

PROGRAMS, ELEMENTS = 4, 3000  # of a check; elements of a put, which are no multiple of 16 bytes a thread
BIG, SECONDS = 64 << 20, 20
BLOCK = tl.constexpr(1024)
WAYS = ("put_signal", "fence", "quiet")


class Ground(NamedTuple):
    """What a check needs: of a simulated world, or made by hand."""

    rank: int
    worlds: tuple[Any, Any, Any]  # the kernels' argument: of all ranks, of this node, of the rail
    empty: Callable[[int], Any]  # (elements): symmetric int32
    signals: Callable[[int, torch.dtype], Any]
    device: torch.device
    meet: Callable[[], None]  # return when both ranks' kernels are done


# ------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def value(rank, turn, i):
    """What rank `rank` sends in turn `turn`."""
    return rank * 1000003 + turn * 7919 + i


@triton.jit(do_not_specialize=["before", "turns"])
def exchange_kernel(
    dst,  # int32 (programs, n) on both ranks
    src,  # int32 (programs, n) on both ranks
    ready,  # counters (programs,) on both ranks: the data is here
    done,  # counters (programs,) on both ranks: it was read there
    wrong,  # int32 (1,): elements that were not what was sent
    n,
    before,  # turns of earlier launches
    turns,
    world,
    HOW: tl.constexpr,
):
    """In each turn both ranks send a run and compare what they get."""
    pid, me = tl.program_id(0), tl.cast(world.rank, tl.int32)
    other = 1 - me
    for turn in range(before + 1, before + turns + 1):
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(src + pid * n + i, value(me, turn, i), mask=i < n)
        tl.debug_barrier()
        if HOW == "put_signal":
            pl.put_signal(ready + pid, other, world, dst=dst + pid * n, src=src + pid * n, nbytes=n * 4)
        else:
            pl.put(dst=dst + pid * n, src=src + pid * n, nbytes=n * 4, peer=other, world=world)
            if HOW == "fence":
                pl.fence(world=world)
            else:
                pl.quiet(world)
            pl.signal(ready + pid, other, world)
        pl.wait(ready + pid, turn, world)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            found = tl.load(dst + pid * n + i, mask=i < n, other=0)
            tl.atomic_add(wrong, tl.sum(((found != value(other, turn, i)) & (i < n)).to(tl.int32), 0), sem="relaxed")
        pl.signal(done + pid, other, world)  # the other rank may write src again, and send to dst
        pl.wait(done + pid, turn, world)


@triton.jit(do_not_specialize=["turns"])
def barrier_kernel(dst, src, bar, wrong, turns, world):
    """A barrier completes a put of 4 bytes that has no signal of its own."""
    pid, me = tl.program_id(0), tl.cast(world.rank, tl.int32)
    for turn in range(turns):
        tl.store(src + pid, value(me, turn, pid))
        tl.debug_barrier()
        pl.put(dst=dst + pid, src=src + pid, nbytes=4, peer=1 - me, world=world)
        pl.barrier(bar + pid, world)
        tl.atomic_add(wrong, (tl.load(dst + pid) != value(1 - me, turn, pid)).to(tl.int32), sem="relaxed")
        pl.barrier(bar + pid, world)  # before overwrite


@triton.jit(do_not_specialize=["before", "turns"])
def ping_kernel(dst, src, ready, before, turns, world):
    """8 bytes and a signal go to and fro."""
    me = tl.cast(world.rank, tl.int32)
    for turn in range(before + 1, before + turns + 1):
        if me == 1:
            pl.wait(ready, turn, world)
        pl.put_signal(ready, 1 - me, world, dst=dst, src=src, nbytes=8)
        if me == 0:
            pl.wait(ready, turn, world)


@triton.jit
def send_kernel(dst, src, n, world):
    """Send n elements, a part by each program, and wait until they have arrived."""
    part = n // tl.num_programs(0)
    at = tl.cast(part, tl.int64) * tl.program_id(0)
    pl.put(dst=dst + at, src=src + at, nbytes=part * 4, peer=1 - tl.cast(world.rank, tl.int32), world=world)
    pl.quiet(world)


# --------------------------------------------------------------------------------------------------------------- check
def check(ground: Ground, turns: int, n: int = ELEMENTS, programs: int = PROGRAMS, grids: bool = True) -> list[str]:
    """Raise AssertionError unless every call does what it promises; returns what was checked. grids: launch
    cooperatively, as GPUs need where programs wait."""
    world, options = ground.worlds[0], {"launch_cooperative_grid": True} if grids else {}
    dst, src = ground.empty(programs * n), ground.empty(programs * n)
    wrong = torch.zeros(1, dtype=torch.int32, device=ground.device)
    passed = []

    def verify(what: str) -> None:
        found = int(wrong.item())
        assert found == 0, f"rank {ground.rank}: {what}: {found} elements differ from what was sent"
        passed.append(what)

    for dtype in (torch.int32, torch.int64):
        ready, done = ground.signals(programs, dtype), ground.signals(programs, dtype)
        ground.meet()
        for before, how in enumerate(WAYS):
            for count in (0, turns):  # no turn: compile, which may take one rank longer than a wait of the other lasts
                args = dst, src, ready, done, wrong, n, before * turns, count, world, how
                exchange_kernel[(programs,)](*args, **options)
                ground.meet()
            verify(f"{how} with counters of {dtype.itemsize * 8} bits")
    bar = ground.signals(programs, torch.int32)
    ground.meet()
    for count in (0, turns):
        barrier_kernel[(programs,)](dst, src, bar, wrong, count, world, **options)
        ground.meet()
    verify("barrier")
    _check_all_gather(ground, turns, n, programs, options)
    passed.append("all_gather over nodes")
    return passed


def _check_all_gather(ground: Ground, turns: int, n: int, programs: int, options: dict[str, Any]) -> None:
    """examples/all_gather_nodes.py, whose kernel takes three worlds."""
    from examples.all_gather_nodes import all_gather_kernel

    out, x = ground.empty(2 * n), torch.empty(n, dtype=torch.int32, device=ground.device)
    far, near, bar = (ground.signals(count * programs, torch.int32) for count in (2, 1, 1))
    args = x, out, far, near, bar, n, *ground.worlds, 1024
    if options:
        all_gather_kernel.warmup(*args, grid=(programs,), **options)  # compiled on both ranks before one waits
    for turn in range(turns):
        x.copy_(torch.arange(n, dtype=torch.int32) * (ground.rank + 1) + turn)
        ground.meet()
        all_gather_kernel[(programs,)](*args, **options)
        ground.meet()
        for rank in range(2):
            wanted = torch.arange(n, dtype=torch.int32) * (rank + 1) + turn
            found = torch.as_tensor(out[rank * n : (rank + 1) * n]).cpu()
            assert torch.equal(found, wanted), f"rank {ground.rank}: all_gather, launch {turn}: rank {rank}'s part"


def simulated(world: pkt.World, turns: int = 2, n: int = 40, programs: int = 2) -> list[str]:
    """`check` on a simulated rank."""
    empty = functools.partial(pkt.empty, dtype=torch.int32)
    ground = Ground(
        world.rank,
        (world.device, world.on_node.device, world.rail.device),
        lambda count: empty(count, name="data"),
        lambda count, dtype: pkt.signals(count, dtype=dtype, name="counters"),
        world.torch_device,
        world.barrier,
    )
    return check(ground, turns, n, programs, grids=False)


# ------------------------------------------------------------------------------------------------------------- on GPUs
class _At:
    """Memory as torch.as_tensor takes it."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        typestr = f"<i{dtype.itemsize}"
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": typestr, "data": (address, False), "version": 3}


class Node:
    """This rank and its GPU as a node, over memory of NVSHMEM's."""

    def __init__(self) -> None:
        import torch.distributed as dist

        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # no multicast objects
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != 2:
            raise pkt.errors.Unsupported.here("benchmarks.far", f"found {self.size} ranks", "give torchrun 2")
        self._open()
        self._used = {"arena": STATUS_BYTES, "data": 3 * ARENA}
        self._base = int(self._lib.malloc(3 * ARENA + 4 * BIG))
        assert self._base, "nvshmem_malloc gave no memory"
        self.tensor(self._base, (3 * ARENA + 4 * BIG) // 4).zero_()
        nanoseconds = int(SECONDS * 1e9)
        self.status = self.tensor(self._base, STATUS_BYTES // 4)
        self.status[STATUS_DEADLINE : STATUS_DEADLINE + 2].view(torch.int64).fill_(nanoseconds)
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)
        self.meet()

    def _open(self) -> None:
        """Start NVSHMEM by a unique id over torch.distributed."""
        import numpy as np
        import torch.distributed as dist

        from pkt.language.ptx import nvshmem

        nvshmem.checked("benchmarks.far")
        import nvshmem.bindings as lib  # type: ignore[no-redef]
        import nvshmem.core as core
        from cuda.core import Device

        self._lib = lib
        device = Device(torch.cuda.current_device())
        device.set_current()
        uid = core.get_unique_id(empty=self.rank != 0)
        box = [bytes(uid._data.tobytes()) if self.rank == 0 else b""]
        dist.broadcast_object_list(box, src=0)
        uid._data.view(np.int8).reshape(-1)[:] = np.frombuffer(box[0], dtype=np.int8)
        core.init(device=device, uid=uid, rank=self.rank, nranks=self.size, initializer_method="uid")

    def _loaded(self, module: int, function: int, name: str, metadata_group: Any, hash: str) -> None:
        """Give NVSHMEM's state to a module that Triton has loaded, if the module has room for it."""
        from cuda.bindings import driver

        (code, *_) = driver.cuModuleGetGlobal(module, b"nvshmemi_device_state_d")
        if code == driver.CUresult.CUDA_SUCCESS:
            self._lib.cumodule_init(int(module))

    def tensor(self, address: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(_At(address, count, dtype), device="cuda")

    def _take(self, kind: str, count: int, dtype: torch.dtype, before: int, end: int) -> torch.Tensor:
        start = self._used[kind] + before
        self._used[kind] = -(-(start + count * dtype.itemsize) // 256) * 256
        assert self._used[kind] <= end, f"{kind} is full"
        return self.tensor(self._base + start, count, dtype)

    def empty(self, count: int) -> torch.Tensor:
        return self._take("data", count, torch.int32, 0, 3 * ARENA + 4 * BIG)

    def signals(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._take("arena", count, dtype, 64, ARENA)  # behind an epoch word

    def meet(self) -> None:
        """Both ranks' kernels are done. Raises AssertionError if a wait has expired."""
        import torch.distributed as dist

        from pkt.runtime.gpu.watch import records

        torch.cuda.synchronize()
        expired = records(self.status.tolist())
        assert not expired, f"rank {self.rank}: a wait took more than {SECONDS} s: {expired}"
        dist.barrier()

    def ground(self) -> Ground:
        world = DeviceWorld(
            rank=self.rank,
            size=tl.constexpr(2),
            stride=tl.constexpr(1 << 38),
            multicast=tl.constexpr(False),
            status=self.status,
            code=tl.constexpr(_code()),
            node_size=tl.constexpr(1),
            network=tl.constexpr(Network(1, ARENA).constant),
            shift=0,
        )
        team = tl.constexpr(team_constants([self.rank], 2)[0])
        node = world._replace(rank=0, size=tl.constexpr(1), team=team, node_size=tl.constexpr(0))
        worlds = (world, node, world)
        return Ground(self.rank, worlds, self.empty, self.signals, torch.device("cuda"), self.meet)


def _code() -> int:
    from pkt.language.ptx import nvshmem

    return code_hash(nvshmem.identity())


def timed(node: Node, run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of `run()` on this GPU, in each repeat."""
    found = []
    for _ in range(repeats):
        node.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        node.meet()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def measure(node: Node, turns: int = 1000) -> dict[str, str]:
    """One-way time of put_signal, and GB/s of 64 MB from some numbers of programs."""
    world = node.ground().worlds[0]
    dst, src, ready = node.empty(BIG // 4), node.empty(BIG // 4), node.signals(1, torch.int32)
    launches = iter(range(1 << 20))
    ping = lambda: ping_kernel[(1,)](dst, src, ready, next(launches) * turns, turns, world)  # noqa: E731
    ping_kernel[(1,)](dst, src, ready, 0, 0, world)  # compiled on both ranks before one waits
    node.meet()
    taken = timed(node, ping, 6)[1:]  # the first compiles
    found = {"put_signal of 8 bytes, one way": f"{min(taken) / (2 * turns) * 1e6:.2f} us (at most 2.5 wanted)"}
    for programs in steps((1, 8, 16, 64), "64 MB from programs"):

        def send(programs: int = programs) -> None:
            if node.rank == 0:
                send_kernel[(programs,)](dst, src, BIG // 4, world, num_warps=16)

        rate = BIG / statistics.median(timed(node, send, 8)[1:]) / 1e9
        wanted = " (260 wanted)" if programs == 16 else ""
        found[f"64 MB from {programs} program{'s'[: programs > 1]}"] = f"{rate:.0f} GB/s{wanted}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--simulate", action="store_true", help="check in the simulator")
    parser.add_argument("--turns", type=int, default=2000, help="of each check")
    given = parser.parse_args()
    if given.simulate:
        from benchmarks.far import simulated as importable

        print("\n".join(pkt.launch(importable, ranks=2, node_size=1, device="cpu")[0]))
        return 0
    node = Node()
    begun = time.perf_counter()
    passed = check(node.ground(), given.turns)
    if node.rank == 0:
        print("\n".join(f"right: {what}" for what in passed), f"{time.perf_counter() - begun:.0f} s", sep="\n")
    rows = {} if given.check else measure(node)
    if node.rank == 0:
        print("\n".join(f"{what}: {found}" for what, found in rows.items()), flush=True)
    node.meet()
    os._exit(0)  # NVSHMEM's threads still run, and how it ends beside torch was never tried


if __name__ == "__main__":
    sys.exit(main())
