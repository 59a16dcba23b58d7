"""Runs Gluon kernels without a GPU or a compiler: their own source, as Python, one greenlet a partition of warps.

Triton's interpreter does not know Gluon. Here the functions of a module run unchanged, with other meanings of `gl`,
`tma`, `mbarrier`, `pl` and `ptx`. Ranks, programs and partitions take turns in an order drawn from a seed. A TMA
operation reads and writes at any moment between its issue and the wait for it. A product of the tensor cores reads its
operands when it is waited for. So each of these gives a wrong result or a deadlock: a slot that is reused too early, a
signal before its data, a missed phase, a launch that overtakes the one before it.

Values are fp32 throughout. Layouts, widths, proxies and fences are not modelled; other tests look for them in the PTX.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

PAUSES = 0.3  # how often a partition that could go on lets others go on


class TooManyArrivals(AssertionError):
    """A phase of an mbarrier got more arrivals than it has."""


class Stuck(AssertionError):
    """Every partition waits, and no operation is left to run."""


class Tile:
    """A block of values, or an accumulator."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.type = SimpleNamespace(layout="registers")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to(self, dtype: Any) -> Tile:
        return Tile(self.data.copy())

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.data.reshape(shape))

    def permute(self, *order: int) -> Tile:
        return Tile(self.data.transpose(order))

    def split(self) -> tuple[Tile, Tile]:
        return Tile(self.data[..., 0].copy()), Tile(self.data[..., 1].copy())

    def __getitem__(self, index: tuple) -> Tile:
        return Tile(self.data[index])

    def __lt__(self, bound: float) -> np.ndarray:
        return self.data < bound

    def __eq__(self, value: Any) -> Any:
        return self.data == value

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Tile:
        return Tile(-self.data)

    def __truediv__(self, other: Any) -> Tile:
        return Tile(self.data / _data(other))

    def __rtruediv__(self, other: float) -> Tile:
        return Tile(other / self.data)

    def __mul__(self, other: Any) -> Tile:
        return Tile(self.data * _data(other))

    def __add__(self, other: Any) -> Tile:
        return Tile(self.data + _data(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Tile:
        return Tile(self.data - _data(other))

    def __rsub__(self, other: float) -> Tile:
        return Tile(other - self.data)

    def __iadd__(self, other: Tile) -> Tile:
        self.data = self.data + other.data
        return self


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Tile) else x


def _apart(of_numbers: Callable, of_arrays: Callable) -> Callable:
    """A function of numbers, of arrays and of tiles."""

    def call(*args: Any) -> Any:
        if any(isinstance(x, Tile) for x in args):
            return Tile(of_arrays(*map(_data, args)))
        return (of_arrays if any(isinstance(x, np.ndarray) for x in args) else of_numbers)(*args)

    return call


class Shared:
    """Shared memory, NaN until it is written. pause: lets others go on, before values are read."""

    def __init__(self, data: np.ndarray, pause: Callable[[], None]) -> None:
        self.data, self.shape, self.pause = data, data.shape, pause
        self.dtype = "dtype"

    def index(self, i: int) -> Shared:
        return Shared(self.data[i], self.pause)

    def viewed(self, shape: list[int], layout: Any, dtype: Any = None) -> Shared:
        view = self.data.reshape(shape)
        assert np.shares_memory(view, self.data)
        return Shared(view, self.pause)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data[(slice(None),) * dim + (slice(start, start + length),)], self.pause)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.data.transpose(order), self.pause)

    def load(self, layout: Any) -> Tile:
        self.pause()
        return Tile(self.data.copy())

    def store(self, tile: Tile) -> None:
        assert tile.data.shape == self.data.shape
        self.data[...] = tile.data


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are here."""

    def __init__(self) -> None:
        self.count = self.pending = self.phase = self.bytes = 0

    def step(self) -> None:
        assert self.count, "not initialised"
        if self.pending < 0:
            raise TooManyArrivals
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Barriers(list):
    def index(self, i: int) -> Barrier:
        return self[i]


class Descriptor:
    """A tensor in memory, and the block that TMA moves. Elements outside the tensor are not written and read as 0."""

    def __init__(self, data: np.ndarray, *block: int) -> None:
        self.data, self.block_shape = data, block
        self.dtype = self.layout = "of the block"

    def _inside(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        assert min(at) >= 0
        memory, block = [], []
        for x, size, extent in zip(at, self.block_shape, self.data.shape):
            n = max(0, min(size, extent - x))
            memory.append(slice(x, x + n))
            block.append(slice(0, n))
        return tuple(memory), tuple(block)

    def read(self, at: list[int]) -> np.ndarray:
        memory, block = self._inside(at)
        found = np.zeros(self.block_shape, np.float32)
        found[block] = self.data[memory]
        return found

    def write(self, at: list[int], values: np.ndarray) -> None:
        memory, block = self._inside(at)
        self.data[memory] = values.reshape(self.block_shape)[block]


class Pointer:
    """A pointer into the counters of a rank."""

    def __init__(self, counters: list[np.ndarray], rank: int, offset: int = 0) -> None:
        self.counters, self.rank, self.offset = counters, rank, offset

    def __add__(self, n: int) -> Pointer:
        return Pointer(self.counters, self.rank, self.offset + int(n))

    def of(self, rank: int) -> Pointer:
        return Pointer(self.counters, rank, self.offset)


class Vector:
    """A pointer into a tensor in memory that is read and written element by element."""

    def __init__(self, data: np.ndarray, offset: int = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, offsets: Any) -> Vector | tuple[np.ndarray, np.ndarray]:
        if isinstance(offsets, (int, np.integer)):
            return Vector(self.data, self.offset + offsets)
        return self.data, self.offset + offsets


class Symmetric(NamedTuple):
    """A pointer into a symmetric tensor."""

    everywhere: list[np.ndarray]
    offset: int = 0

    def __add__(self, offset: Any) -> Symmetric:  # type: ignore[override]
        return Symmetric(self.everywhere, self.offset + offset)

    def of(self, rank: int) -> Vector:
        return Vector(self.everywhere[rank].reshape(-1), self.offset)


def _load(pointers: Any, mask: Any = None, other: float = 0) -> Any:
    if isinstance(pointers, Pointer):
        return int(pointers.counters[pointers.rank][pointers.offset])
    if isinstance(pointers, Vector):
        return pointers.data[pointers.offset].item() if mask is None or mask else other
    data, offsets = pointers
    assert (offsets[mask] < len(data)).all()
    found = np.where(mask, data[np.where(mask, offsets, 0)], other)
    return found if data.dtype.kind == "i" else Tile(found)


def _load_numbers(pointers: Any, mask: Any, other: int) -> Any:
    """Integers, which are no tiles."""
    if isinstance(pointers, Vector):
        return int(pointers.data[pointers.offset]) if mask else other
    return _load(pointers, mask, other).data


def _put(pointers: tuple[np.ndarray, np.ndarray], values: Tile, mask: np.ndarray) -> None:
    data, offsets = pointers
    mask = np.broadcast_to(mask, offsets.shape)
    data[offsets[mask]] = values.data[mask]


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, np.ndarray):
        found = np.where(condition, _data(x), _data(y))
        return found if found.dtype.kind == "i" else Tile(found)
    return x if condition else y


def _reduced(reduction: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """Of a tile a tile, of integers integers."""
    return lambda x, axis: Tile(reduction(x.data, axis)) if isinstance(x, Tile) else reduction(x, axis)


def _exp2(tile: Tile) -> Tile:
    with np.errstate(over="ignore"):  # of values that a mask leaves out
        return Tile(np.exp2(tile.data))


def _log2(tile: Tile) -> Tile:
    with np.errstate(divide="ignore"):  # of a sum of no weights
        return Tile(np.log2(tile.data))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


_minimum, _maximum = _apart(min, np.minimum), _apart(max, np.maximum)


def _numbers_where(condition: Any, x: Any, y: Any) -> Any:
    """Of integers, arrays of them too, which are no tiles."""
    found = _where(condition, x, y)
    return found.data if isinstance(found, Tile) and not isinstance(x, Tile) and not isinstance(y, Tile) else found


class Warps:
    """A partition: where it runs and what it has under way."""

    def __init__(self, machine: Machine, rank: int, program: int, run: Callable[[], Any]) -> None:
        self.rank, self.program = rank, program
        self.ready: Callable[[], bool] | None = None
        self.stores: list[dict[str, bool]] = []  # commit groups, oldest first
        self.products: list[tuple[Tile, np.ndarray, np.ndarray]] = []  # of the tensor cores, oldest first
        self.name = ""
        self.greenlet = greenlet(run, machine.hub)


class Machine:
    """`size` ranks with `programs` programs each. `run(launches)`: launches[rank][e]() starts launch e of a rank."""

    def __init__(self, size: int, programs: int, seed: int) -> None:
        self.size, self.programs, self.random = size, programs, random.Random(seed)
        self.warps: list[Warps] = []
        self.here: Any = None  # the partition that runs
        self.running = [0] * size  # how many of them each rank has
        self.asynchronous: list[Callable[[], None]] = []
        self.writes: list[Callable[[], None]] = []  # of stores that have read their values
        self.copies: list[Callable[[], None]] = []  # by copy engines
        self.hub = getcurrent()
        self.epochs = [0] * size  # of the last launch that counted
        self.slowness = self.random.choice((0.3, 0.8, 0.99))  # of asynchronous operations
        self.late = self.random.random() < 0.5  # whether writes come after all other operations
        self.last = self.random.random() < 0.5  # whether copies come last of all

    # ---------------------------------------------------------------------------------------------- scheduling
    def until(self, ready: Callable[[], bool]) -> None:
        if not ready() or self.random.random() < PAUSES:
            self.here.ready = ready
            self.hub.switch()

    def pause(self) -> None:
        """Let others go on, now and then."""
        if self.random.random() < PAUSES:
            self.hub.switch()

    def start(self, rank: int, program: int, run: Callable[[], Any]) -> Warps:
        warps = Warps(self, rank, program, run)
        warps.name = getattr(run, "__name__", "")
        self.warps.append(warps)
        self.running[rank] += 1
        return warps

    def able(self) -> Warps | None:
        """A random one of the partitions that can go on."""
        # Each one that waits goes behind those not yet asked. Drawing all of them at once takes twice as long.
        warps, random = self.warps, self.random.random
        for left in range(len(warps), 0, -1):
            at = int(random() * left)
            found = warps[at]
            if found.ready is None or found.ready():
                return found
            warps[at], warps[left - 1] = warps[left - 1], found
        return None

    def run(self, launches: list[list[Callable[[int], Any]]]) -> None:
        """Start each launch of a rank when the one before has ended; each program calls it with the program's index."""
        next_launch = [0] * self.size
        while True:
            for rank in range(self.size):
                if next_launch[rank] < len(launches[rank]) and not self.running[rank]:
                    body = launches[rank][next_launch[rank]]
                    next_launch[rank] += 1
                    for program in range(self.programs):
                        self.start(rank, program, lambda body=body, program=program: body(program))
            queues = [self.asynchronous or self.writes] if self.late else [self.asynchronous, self.writes]
            if not self.last:
                queues.append(self.copies)
            operations = sum(map(len, queues))
            warps = self.able() if not operations or self.random.random() < self.slowness else None
            if warps is not None:
                warps.ready, self.here = None, warps
                warps.greenlet.switch()
                if warps.greenlet.dead:
                    self.warps.remove(warps)
                    self.running[warps.rank] -= 1
            elif operations or self.copies:
                self._operate(queues if operations else [self.copies])
            elif self.warps:
                where = sorted({(w.rank, w.program, w.name) for w in self.warps})
                raise Stuck(f"{len(where)} partitions wait: {where[:12]}")
            else:
                return

    def _operate(self, queues: list[list[Callable[[], None]]]) -> None:
        """Do a random one of the operations in `queues`."""
        at = self.random.randrange(sum(map(len, queues)))
        for queue in queues:
            if at < len(queue):
                queue.pop(at)()
                return
            at -= len(queue)

    def copied(self, copy: Callable[[], None]) -> None:
        """Run `copy` at a random time, and return when it is done."""
        done: list[bool] = []
        self.copies.append(lambda: done.append(copy() is None))
        self.until(lambda: bool(done))

    # ------------------------------------------------------------------------------------------- the other meanings
    def meanings(self) -> dict[str, Any]:
        def static_assert(condition: bool, *why: str) -> None:
            assert condition, why

        def specialise(functions: list, warps: list[int], registers: list[int]) -> None:
            parent = self.here
            children = [
                self.start(parent.rank, parent.program, lambda f=f, args=args: f(*args)) for f, args in functions
            ]
            for child, (f, _) in zip(children, functions):
                child.name = f.__name__
            self.until(lambda: all(child.greenlet.dead for child in children))

        gl = SimpleNamespace(
            constexpr=int, int32=int, int64="barriers", int8="bytes", float32=float, float16="fp16",
            bfloat16="bf16",
            static_assert=static_assert,
            program_id=lambda axis: self.here.program, num_programs=lambda axis: self.programs, num_warps=lambda: 4,
            cdiv=_cdiv, minimum=_minimum, maximum=_maximum, where=_where,
            max=_reduced(np.max), sum=_reduced(np.sum), associative_scan=lambda x, axis, add: np.cumsum(x, axis),
            exp2=_exp2, log2=_log2,
            full=lambda shape, value, *_: Tile(np.full(shape, value, np.float32)),
            DotOperandLayout=lambda *_: None,
            cast=lambda x, dtype: x if isinstance(x, np.ndarray) else int(x), static_range=range,
            zeros=lambda shape, *_: Tile(np.zeros(shape, np.float32)),
            NVMMADistributedLayout=lambda **_: None, convert_layout=lambda tile, layout: tile,
            SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
            arange=lambda begin, end, layout: np.arange(begin, end), load=_load, store=_put,
            allocate_shared_memory=self._allocate, atomic_add=self._atomic_add, warp_specialize=specialise,
        )  # fmt: skip
        tl = SimpleNamespace(
            where=_numbers_where, exp=lambda tile: 0.0,  # so that silu(x) is x, exactly
            cdiv=_cdiv, minimum=_minimum, maximum=_maximum, static_range=range, load=_load_numbers,
        )  # fmt: skip
        tma = SimpleNamespace(
            async_load=self._load, async_store=self._store,
            store_wait=lambda pendings: self._wait_group("read", pendings),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            init=self._init, expect=self._expect, arrive=self._arrive, wait=self._wait, MBarrierLayout=lambda: None,
        )  # fmt: skip
        pl = SimpleNamespace(
            wait=lambda p, wanted, world: self.until(lambda: int(p.counters[p.rank][p.offset]) >= wanted),
            peer=lambda p, rank, world: p.of(rank),
            signal=self._signal,
            grid_barrier=self._grid_barrier,
            epoch=self._epoch,
        )
        sync = SimpleNamespace(peek_epoch=lambda flags: self.epochs[flags.rank] + 1)
        ptx = SimpleNamespace(
            drain=lambda world, pending=0: self._wait_group("done", pending), cta_barrier=lambda: None,
            fence=lambda: None, prefetch=lambda pointers, mask: _load(pointers, mask, 0.0) and None,
        )  # fmt: skip
        return {
            "gl": gl, "tl": tl, "sync": sync, "tma": tma, "mbarrier": mbarrier, "pl": pl, "ptx": ptx,
            "fence_async_shared": lambda: None, "half_layout": lambda *_: None, "accumulator": lambda *_: None,
            "whole_rows": lambda *_: None, "itemsize": lambda dtype: 2,
            "warpgroup_mma": self._mma, "warpgroup_mma_wait": self._mma_wait,
            "viewed": Shared.viewed,
        }  # fmt: skip

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == "barriers":
            return Barriers(Barrier() for _ in range(shape[0]))
        return Shared(np.full(shape, np.nan, np.float32), self.pause)

    def _epoch(self, flags: Pointer, world: Any) -> int:
        self.epochs[flags.rank] = world.launch
        return world.launch

    def _signal(self, p: Pointer, peer: int, world: Any, value: int, op: str) -> None:
        assert op == "set"
        p.counters[peer][p.offset] = value

    def _grid_barrier(self, p: Pointer, world: Any) -> None:
        """Counts arrivals, from no launch to the last."""
        counters = p.counters[p.rank]
        complete = (counters[p.offset] // self.programs + 1) * self.programs
        counters[p.offset] += 1
        self.until(lambda: counters[p.offset] >= complete)

    def _atomic_add(self, p: Pointer, value: int, sem: str, scope: str) -> None:
        assert scope == "sys"
        p.counters[p.rank][p.offset] += value

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _expect(self, barrier: Barrier, nbytes: int, pred: bool = True) -> None:
        if pred:
            barrier.bytes += nbytes
            barrier.pending -= 1
            barrier.step()

    def _arrive(self, barrier: Barrier, count: int) -> None:
        barrier.pending -= count
        barrier.step()
        self.pause()

    def _wait(self, barrier: Barrier, parity: int) -> None:
        self.until(lambda: barrier.phase & 1 != parity)

    def _load(self, d: Descriptor, at: list[int], barrier: Barrier, into: Shared, pred: bool = True) -> None:
        if not pred:
            return
        at = [int(x) for x in at]
        into.data[...] = np.nan  # it may be written from now on

        def land() -> None:
            found = d.read(at)
            into.data[...] = found
            barrier.bytes -= found.size * 2
            barrier.step()

        self.asynchronous.append(land)

    def _store(self, d: Descriptor, at: list[int], part: Shared) -> None:
        at = [int(x) for x in at]
        group: dict[str, Any] = {"read": False, "done": False}
        self.here.stores.append(group)

        def read() -> None:
            group["values"] = part.data.copy()
            group["read"] = True
            self.writes.append(write)

        def write() -> None:
            d.write(at, group["values"])
            group["done"] = True

        self.asynchronous.append(read)

    def _wait_group(self, what: str, pending: int) -> None:
        stores = self.here.stores
        while stores and stores[0]["done"]:
            del stores[0]
        due = stores[: max(len(stores) - pending, 0)]  # those issued before this call, and not the newest

        def ready() -> bool:
            while due and due[-1][what]:
                due.pop()
            return not due

        self.until(ready)

    def _mma(self, a: Shared | Tile, b: Shared, acc: Tile, is_async: bool, use_acc: bool = True) -> Tile:
        if not use_acc:
            acc = Tile(np.zeros_like(acc.data))
        self.here.products.append((acc, a.data, b.data))
        return acc

    def _mma_wait(self, outstanding: int, deps: tuple[Tile, ...]) -> Any:
        self.pause()
        while len(self.here.products) > outstanding:
            acc, a, b = self.here.products.pop(0)
            acc.data = acc.data + a @ b
        return deps[0] if len(deps) == 1 else deps


def as_python(modules: list[ModuleType], machine: Machine) -> dict[str, Callable]:
    """The jitted functions and the aggregates of `modules`, which may import from each other, as Python functions and
    classes with those meanings."""
    shared: dict[str, Any] = {}

    def as_function(jitted: JITFunction, name: str) -> FunctionType:
        return FunctionType(jitted.fn.__code__, shared, name, jitted.fn.__defaults__)

    def as_class(aggregate: Any) -> type:
        def fill(self: Any, *values: Any) -> None:
            vars(self).update(zip(aggregate.fields, values, strict=True))

        methods = {name: as_function(f, name) for name, f in vars(aggregate).items() if isinstance(f, JITFunction)}
        methods |= {name: f.fn for name, f in vars(aggregate).items() if isinstance(f, ConstexprFunction)}
        return type(aggregate.__name__, (), {"__init__": fill, **methods})

    classes = {v: as_class(v) for m in modules for v in vars(m).values() if hasattr(v, "__triton_aggregate__")}
    for module in modules:
        for name, value in vars(module).items():
            if not isinstance(value, JITFunction):
                value = value.value if isinstance(value, constexpr) else value
                value = value.fn if isinstance(value, ConstexprFunction) else value
                shared.setdefault(name, classes[value] if hasattr(value, "__triton_aggregate__") else value)
    shared |= machine.meanings()
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                # Every name means one function: no two of these modules give one name to different functions.
                key = f"{module.__name__}.{name}"
                function = shared[key] = as_function(value, name)
                if value.fn.__module__ == module.__name__ or name not in shared:
                    shared[name] = function
    return shared
