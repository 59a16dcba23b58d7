"""Multimem instructions: one access of the multicast window accesses the memory of every rank behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from pkt import errors
from pkt.simulate import findings
from pkt.simulate.accesses import mask_of
from pkt.simulate.atomics import Atomics
from pkt.simulate.builder import np_dtype
from pkt.simulate.constants import new_tensor
from pkt.simulate.detector import accessed
from pkt.simulate.numerics import BITS, decode, encode
from pkt.simulate.sites import site

VECTORS = ("bf16", "fp16", "fp32")  # element types reduced 16 bytes at a time; every type is stored 16 bytes at a time


class Multimem(Atomics):
    """Accesses of the multicast window."""

    def multimem_load_reduce(self, ptr: Any, mask: Any, op: str) -> tl.tensor:
        ty = ptr.dtype.element_ty
        dtype = np_dtype(ty)
        selected = mask_of(mask, ptr)
        self._check_groups("multimem_load_reduce", ptr, selected, ty.name in VECTORS)
        self._step()
        total = access = None  # type: Any
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
        for addresses in self._copies(ptr):
            values = np.zeros(addresses.size, dtype)
            for access, where in self._resolve(addresses, selected, dtype.itemsize, "multimem load_reduce"):
                self._before_read(access, "multimem load_reduce")
                if where is ...:
                    values = access.view(dtype).reshape(-1).copy()
                else:
                    values[where] = access.read(dtype)
            # The 16-bit types add in fp32 and round once: `.acc::f32`.
            wide = decode(values, ty)
            wide = wide.astype(np.float32) if dtype == np.float16 else wide
            total = wide if total is None else combine(total, wide)
        out = (encode(total, ty) if ty.name in BITS else total.astype(dtype)).reshape(ptr.handle.data.shape)
        if self.m.current.looking:
            self._saw(access, out)
        return new_tensor(out, ty, not ptr.shape)

    def multimem_store(self, ptr: Any, value: Any, mask: Any) -> None:
        self._check_groups("multimem_store", ptr, mask_of(mask, ptr), True)
        self._step()
        stored = value.handle.data.astype(np_dtype(ptr.dtype.element_ty), copy=False)
        data = np.broadcast_to(stored, ptr.handle.data.shape)
        for addresses in self._copies(ptr):
            for access, where in self._resolve(addresses, mask_of(mask, ptr), data.dtype.itemsize, "multimem store"):
                self._write(access, data if where is ... else data.reshape(-1)[where], "multimem store", is_async=False)

    def multimem_reduce_add(self, ptr: Any, value: Any, mask: Any) -> None:
        ty = ptr.dtype.element_ty
        data = np.broadcast_to(value.handle.data, ptr.handle.data.shape).reshape(-1)
        self._check_groups("multimem_reduce_add", ptr, mask_of(mask, ptr), ty.name in VECTORS)

        def update(now: np.ndarray, where: Any) -> np.ndarray:
            total = np.add(decode(now, ty), decode(data[where], ty))
            return encode(total, ty) if ty.name in BITS else total

        for addresses in self._copies(ptr):
            self.atomic(addresses, mask_of(mask, ptr), np_dtype(ty), update, "relaxed", "system")

    def _check_groups(self, call: str, ptr: Any, mask: Any, vectors: bool) -> None:
        """Raise ShapeError unless the pointers are runs of 16 bytes, each masked as a whole: an instruction accesses
        16 bytes from the address of its first element, if that element's mask is true."""
        if not vectors:
            return
        itemsize = np_dtype(ptr.dtype.element_ty).itemsize
        groups = ptr.handle.data.reshape(-1, 16 // itemsize)
        ramp = np.arange(groups.shape[1], dtype=groups.dtype) * np.uint64(itemsize)
        wrong = (groups[:, :1] % np.uint64(16) != 0) | (groups != groups[:, :1] + ramp)
        if mask is not None:
            on = mask.reshape(groups.shape)
            wrong = (wrong & on) | (on != on[:, :1])
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            found = f"element {row * groups.shape[1] + column} of the block at {site()}"
            wanted = "runs of 16 bytes that begin at multiples of 16 bytes, each masked as a whole"
            raise errors.ShapeError.argument(call, "ptr", found, wanted, self.rank)

    def _copies(self, ptr: Any) -> list[np.ndarray]:
        """The addresses behind the multicast window, rank by rank."""
        space = self.m.space
        addresses = ptr.handle.data
        owner = space.owner(int(addresses.reshape(-1)[0]))
        if owner != space.size:
            first = int(addresses.reshape(-1)[0])
            region = space.holding(first)
            tensor = "an address" if region is None else f"rank {region.rank}'s {region.element(first)}"
            access = accessed(self.m.current, "multimem access", f"{tensor}, not in the multicast window", site())
            raise findings.OutOfBounds.outside(access, "give it multicast(ptr, world) of a symmetric tensor")
        return [addresses - np.uint64((space.size - r) * space.stride) for r in range(space.size)]
