"""The simulated address space: every rank's heap at a fixed stride, and the local tensors of launches.

Every access is resolved to its region before it happens, so a wrong address is an error that names the nearest tensor
and never a crash. Regular accesses, such as tiles (rows of contiguous elements at a constant distance), become strided
views. Other accesses are performed element by element.
"""

from __future__ import annotations

import bisect
import math
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pkt.errors import ShapeError
from pkt.simulate.rows import KEPT, SMALL, found_rows, ramp
from pkt.wording import count_text, size_text

OUTSIDE = 1 << 16  # windows from a rank's own to where a peer leads that its team does not have
GRANULE = 16  # bytes that one entry of the race detector's shadow stands for
# Linux's value; Python has the name from 3.13 on. Without the flag Linux counts every window in full as committed
# memory, and refuses a machine of many ranks, or a fork while a few machines wait for the garbage collector.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(eq=False)
class Region:
    """A run of bytes with an owner: one rank's copy of a symmetric tensor, or a local tensor of a launch."""

    base: int
    nbytes: int
    memory: np.ndarray  # uint8
    rank: int
    name: str
    kind: str  # "data", "signals", "status" or "local"
    itemsize: int
    shape: tuple[int, ...]
    header: int = 0  # bytes before element 0: the header of signals
    freed_at: str = ""
    unwaited: bool = False  # signals here that no program looks at are meant
    shadow: Any = None  # the race detector's
    waited: set[int] = field(default_factory=set)  # addresses that some program waited on or tested
    signalled: dict[int, Any] = field(default_factory=dict)  # address -> site of its last signal
    asked: dict[tuple, int] = field(default_factory=dict)  # program, address and value of a wait -> its last launch

    def __post_init__(self) -> None:
        self.end = self.base + self.nbytes

    def element(self, address: int) -> str:
        """The element at `address`, as `name[2, 5]`."""
        index = (address - self.base - self.header) // self.itemsize
        if index < 0 or not self.shape or index >= math.prod(self.shape):
            return f"{self.name}{'' if not self.shape else f'[{index}]'}"
        return f"{self.name}[{', '.join(str(int(i)) for i in np.unravel_index(index, self.shape))}]"


class Place:
    """`shape` elements of `itemsize` bytes at byte `strides` from `offset` of a region, the last axis contiguous."""

    __slots__ = ("offset", "shape", "strides", "itemsize", "end", "count", "nbytes", "touched", "steps")

    def __init__(self, offset: int, shape: tuple, strides: tuple, itemsize: int) -> None:
        self.offset, self.shape, self.strides, self.itemsize = offset, shape, strides, itemsize
        end, count, steps = offset + itemsize, 1, 0
        for n, s in zip(shape, strides):
            end += (n - 1) * s
            count *= n
            if n > 1:
                steps |= s
        self.end, self.count, self.nbytes, self.steps = end, count, count * itemsize, steps
        self.touched: Any = None  # the race detector's

    def repeats(self) -> bool:
        """Whether rows begin before the ones before them end, so that an element may be there more than once."""
        if self.count == 1:
            return False
        inside = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides)):
            if n > 1 and stride < inside:
                return True
            inside += (n - 1) * stride
        return False

    def key(self) -> tuple:
        """Equal for places of the same bytes."""
        return self.offset, self.shape, self.strides, self.itemsize


class Strided:
    """The elements at a place of one region."""

    __slots__ = ("region", "place", "itemsize", "count", "nbytes")

    def __init__(self, region: Region, place: Place) -> None:
        self.region, self.place = region, place
        self.itemsize, self.count, self.nbytes = place.itemsize, place.count, place.nbytes

    def view(self, dtype: np.dtype) -> np.ndarray:
        place = self.place
        return np.ndarray(place.shape, dtype, self.region.memory, place.offset, place.strides)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The elements, flat; of one row a view."""
        return self.view(dtype).reshape(-1)

    def write(self, values: np.ndarray) -> None:
        self.view(values.dtype)[...] = values

    def span(self) -> tuple[int, int]:
        """First byte and one past the last, as offsets in the region."""
        return self.place.offset, self.place.end

    def misaligned(self) -> bool:
        """Whether an element begins at no multiple of its bytes."""
        return bool((self.region.base + self.place.offset | self.place.steps) % self.itemsize)

    def byte_offsets(self) -> np.ndarray:
        """Byte offsets of the elements in the region, flat."""
        place = self.place
        return (ramp(place.shape, place.strides).astype(np.int64) + place.offset).reshape(-1)

    def first(self) -> int:
        return self.region.base + self.place.offset


class Scattered:
    """Elements of one region at arbitrary `offsets` (bytes, int64, 1-D)."""

    __slots__ = ("region", "offsets", "itemsize", "count", "nbytes", "_span")

    def __init__(self, region: Region, offsets: np.ndarray, itemsize: int) -> None:
        self.region, self.offsets, self.itemsize = region, offsets, itemsize
        self.count, self.nbytes = len(offsets), len(offsets) * itemsize
        self._span = int(offsets.min()), int(offsets.max()) + itemsize

    def read(self, dtype: np.dtype) -> np.ndarray:
        memory = self.region.memory
        # count_nonzero takes a third of the time of any(), which numpy calls through Python.
        if not np.count_nonzero(self.offsets % self.itemsize) and self.region.nbytes % self.itemsize == 0:
            return memory.view(dtype)[self.offsets // self.itemsize]
        bytes_ = memory[self.offsets[:, None] + np.arange(self.itemsize)]
        return bytes_.reshape(-1).view(dtype)

    def write(self, values: np.ndarray) -> None:
        memory = self.region.memory
        if not np.count_nonzero(self.offsets % self.itemsize) and self.region.nbytes % self.itemsize == 0:
            memory.view(values.dtype)[self.offsets // self.itemsize] = values
        else:
            memory[self.offsets[:, None] + np.arange(self.itemsize)] = values.view(np.uint8).reshape(-1, self.itemsize)

    def span(self) -> tuple[int, int]:
        return self._span

    def misaligned(self) -> bool:
        return bool((self.region.base | int(np.bitwise_or.reduce(self.offsets))) % self.itemsize)

    def key(self) -> tuple:
        """Equal for accesses to the same bytes of their regions."""
        return self.offsets.tobytes(), self.itemsize

    def byte_offsets(self) -> np.ndarray:
        """Byte offsets of the elements in the region, flat."""
        return self.offsets

    def first(self) -> int:
        return self.region.base + int(self.offsets[0])


Access = Strided | Scattered


class Pending:
    """A store that its own program has made and that no other program sees yet."""

    __slots__ = ("access", "values", "region", "low", "high", "is_async")

    def __init__(self, access: Access, values: np.ndarray, is_async: bool) -> None:
        self.access, self.values, self.is_async = access, values, is_async
        self.region = access.region
        self.low, self.high = access.span()

    def commit(self) -> None:
        self.access.write(self.values)


class Buffered(Pending):
    """A relaxed atomic, whose result its program does not use, that other programs do not see yet."""

    __slots__ = ("perform",)

    def __init__(self, access: Access, perform: Any) -> None:
        super().__init__(access, _NO_VALUES, is_async=False)
        self.perform = perform

    def commit(self) -> None:
        self.perform()


def overlapping(stores: list[Pending], access: Access) -> list[Pending]:
    """Those of the stores that `access` overlaps."""
    region, (low, high) = access.region, access.span()
    return [store for store in stores if store.region is region and low < store.high and store.low < high]


_NO_VALUES, _NO_BYTES = np.empty(0), np.empty(0, np.uint8)


# By id of the addresses, id of the mask, and size of an element: these two, the first address, the place, and the part
# of the block that lies there.
_places: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray | None, int, Place, Any]] = {}


def _keep(addresses: np.ndarray, mask: np.ndarray | None, access: Strided, where: Any) -> None:
    """Keep the place of a few constant addresses: every schedule makes the same accesses again."""
    if addresses.flags.writeable or addresses.size > SMALL or (mask is not None and mask.flags.writeable):
        return
    if len(_places) >= KEPT:
        _places.clear()
    _places[id(addresses), id(mask), access.itemsize] = addresses, mask, access.first(), access.place, where


class Unmapped(Exception):
    """An address that no live region holds; pkt.simulate.bad_address turns it into an error with names."""

    def __init__(self, address: int, region: Region | None = None) -> None:
        self.address, self.region = address, region


class AddressSpace:
    """`size` windows of `stride` bytes, then the multicast window, which has addresses but no memory behind it."""

    def __init__(self, size: int, stride: int) -> None:
        self.size, self.stride = size, stride
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, stride * (size + 1) + GRANULE * 256, flags=flags)
        except (OSError, OverflowError) as error:
            found = f"{size_text(stride)} on each of {count_text(size, 'rank')}"
            raise ShapeError.argument("the simulator", "heap", found, "less, or fewer ranks: it maps all") from error
        self._bytes = np.frombuffer(memory, np.uint8)
        start = self._bytes.ctypes.data
        self.base = -(-start // 4096) * 4096
        self._skip = self.base - start
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._local: dict[int, int] = {}
        self._last: Region | None = None

    def close(self) -> None:
        """Release the memory. It is unmapped when the last tensor over it is gone. Messages may need regions longer."""
        for region in self._regions:
            region.memory, region.shadow = _NO_BYTES, None
        self._regions, self._starts, self._last = [], [], None
        self._bytes = _NO_BYTES

    def window(self, rank: int) -> int:
        return self.base + rank * self.stride

    def slice(self, rank: int, offset: int, nbytes: int) -> np.ndarray:
        at = self._skip + rank * self.stride + offset
        return self._bytes[at : at + nbytes]

    def tensor(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of `slice` as a tensor, whose storage begins with them."""
        at = self._skip + rank * self.stride + offset
        return torch.frombuffer(self._bytes, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)

    def owner(self, address: int) -> int | None:
        """The rank whose window holds `address`, `size` for the multicast window, or None for local memory."""
        rank = (address - self.base) // self.stride
        return int(rank) if 0 <= rank <= self.size else None

    def add(self, region: Region) -> None:
        at = bisect.bisect_left(self._starts, region.base)
        while at < len(self._starts) and self._starts[at] < region.end:  # remove the freed regions that it replaces
            del self._starts[at], self._regions[at]
        if at and self._regions[at - 1].freed_at and self._regions[at - 1].end > region.base:
            at -= 1
            del self._starts[at], self._regions[at]
        self._starts.insert(at, region.base)
        self._regions.insert(at, region)
        self._last = None

    def add_local(self, region: Region) -> None:
        count = self._local.get(region.base, 0)
        self._local[region.base] = count + 1
        if not count:
            self.add(region)

    def drop_local(self, base: int) -> None:
        self._local[base] -= 1
        if not self._local[base]:
            del self._local[base]
            at = bisect.bisect_left(self._starts, base)
            if at < len(self._starts) and self._starts[at] == base:
                del self._starts[at], self._regions[at]
            self._last = None

    def shared(self, address: int) -> bool:
        """Whether a running launch may access the storage that begins at `address`: in the heap, or its argument."""
        return address in self._local or self.owner(address) is not None

    def regions(self) -> list[Region]:
        return list(self._regions)

    def find(self, address: int) -> Region:
        last = self._last
        if last is not None and last.base <= address < last.end:
            return last
        at = bisect.bisect_right(self._starts, address) - 1
        region = self._regions[at] if at >= 0 else None
        if region is None or address >= region.end:
            raise Unmapped(address)
        if region.freed_at:
            raise Unmapped(address, region)
        self._last = region
        return region

    def nearest(self, address: int) -> Region | None:
        """The last region that begins at `address` or before."""
        at = bisect.bisect_right(self._starts, address) - 1
        return self._regions[at] if at >= 0 else None

    def following(self, address: int) -> Region | None:
        """The first region that begins after `address`."""
        at = bisect.bisect_right(self._starts, address)
        return self._regions[at] if at < len(self._regions) else None

    def holding(self, address: int) -> Region | None:
        """The region, in use or freed, that contains `address`."""
        region = self.nearest(address)
        return region if region is not None and address < region.end else None

    def resolve(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> list[tuple[Access, Any]]:
        """The accesses to `addresses` where `mask` is true, each with the part of the block that it covers: an Ellipsis
        for the whole block, else a slice of it or indices, flat."""
        known = _places.get((id(addresses), id(mask), itemsize))
        if known is not None:
            _, _, first, place, where = known
            region = self.find(first)
            if first - region.base == place.offset and place.end <= region.nbytes:
                return [(Strided(region, place), where)]
        if addresses.size == 1 and (mask is None or np.count_nonzero(mask)):
            address = addresses.item(0)
            region = self.find(address)
            if address + itemsize > region.end:
                raise Unmapped(address + itemsize - 1)
            shape = addresses.shape
            scalar = Strided(region, Place(address - region.base, shape, (itemsize,) * len(shape), itemsize))
            _keep(addresses, mask, scalar, ...)
            return [(scalar, ...)]
        if mask is None:
            regular = self._strided(addresses, found_rows(addresses, itemsize), itemsize)
            if regular is not None:
                _keep(addresses, mask, regular, ...)
                return [(regular, ...)]
            chosen, flat = None, addresses.reshape(-1)
        else:
            chosen = mask.reshape(-1).nonzero()[0]
            if addresses.ndim == 1 and len(chosen):  # the end of a row is mostly masked
                run = slice(chosen.item(0), chosen.item(-1) + 1)
                if run.stop - run.start == len(chosen):
                    part = addresses[run]
                    regular = self._strided(part, found_rows(part, itemsize), itemsize)
                    if regular is not None:
                        _keep(addresses, mask, regular, run)
                        return [(regular, run)]
            flat = addresses.reshape(-1)[chosen]
        accesses: list[tuple[Access, Any]] = []
        if len(flat):  # mostly one region has all
            region = self.find(flat.item(0))
            access = Scattered(region, (flat - np.uint64(region.base)).astype(np.int64), itemsize)
            first, end = access.span()
            if first >= 0 and end <= region.nbytes:
                return [(access, np.arange(len(flat)) if chosen is None else chosen)]
        left = np.arange(len(flat))
        while len(left):
            here = flat[left]
            region = self.find(int(here[0]))
            inside = (here >= region.base) & (here < region.end)
            part = left[inside]
            offsets = (flat[part] - np.uint64(region.base)).astype(np.int64)
            over = offsets > region.nbytes - itemsize
            if over.any():
                raise Unmapped(int(flat[part][over][0]) + itemsize - 1)
            accesses.append((Scattered(region, offsets, itemsize), part if chosen is None else chosen[part]))
            left = left[~inside]
        return accesses

    def _strided(self, addresses: np.ndarray, found: tuple[int, tuple] | None, itemsize: int) -> Strided | None:
        if found is None:
            return None
        first, strides = found
        region = self.find(first)
        access = Strided(region, Place(first - region.base, addresses.shape, strides, itemsize))
        return access if access.span()[1] <= region.nbytes else None  # then `resolve` finds the first element outside

    def tile(self, address: int, shape: tuple, strides: tuple, itemsize: int) -> Strided | None:
        """The access to the part of a descriptor's box inside its tensor; None if that part is empty."""
        if not all(shape):
            return None
        region = self.find(address)
        access = Strided(region, Place(address - region.base, shape, strides, itemsize))
        if access.span()[1] > region.nbytes:
            raise Unmapped(region.end)
        return access
