"""The builder behind the interpreted `tl`: arithmetic with the GPU's rounding, memory accesses by the simulated device.

Triton's own interpreter supplies most of the ~150 builder calls. This class replaces those that Triton's lacks or gets
wrong (bf16, fp8, tf32, rounding modes, reductions by descriptors), and every memory access: the simulated machine
performs it.
"""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import interpreter as base
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

from pkt.errors import Unsupported
from pkt.simulate import numerics
from pkt.simulate.loops import POLL, Slice
from pkt.simulate.numerics import (
    BITS,
    decode,
    decode_finite,
    encode,
    flushed,
    matmul,
    scale,
    to_half,
    to_integer,
    to_nearest_tf32,
    unpack_fp4,
)
from pkt.simulate.sites import site

ATOMICS: dict[Any, Any] = {
    ir.ATOMIC_OP.ADD: np.add,
    ir.ATOMIC_OP.FADD: np.add,
    ir.ATOMIC_OP.AND: np.bitwise_and,
    ir.ATOMIC_OP.OR: np.bitwise_or,
    ir.ATOMIC_OP.XOR: np.bitwise_xor,
    ir.ATOMIC_OP.MAX: np.maximum,
    ir.ATOMIC_OP.UMAX: np.maximum,
    ir.ATOMIC_OP.MIN: np.minimum,
    ir.ATOMIC_OP.UMIN: np.minimum,
    ir.ATOMIC_OP.XCHG: lambda old, new: new,
}
_REGISTERS = re.compile(r"mov\.u(?:32|64) \$0, %(globaltimer|smid);")  # tl.extra.cuda.globaltimer and smid
_BARRIER = re.compile(r"bar(?:rier)?\.sync 0;")
_INSTEAD = "use the functions of pkt.language or tl"
_PARTS = {"BF16x3": 2, "BF16x6": 3}  # of an operand of tl.dot: three or six products of them
_OF_NUMBERS: dict[Any, Any] = {np.maximum: np.fmax, np.minimum: np.fmin}  # by TMA, which passes over NaN
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_BITS = (ir.ATOMIC_OP.AND, ir.ATOMIC_OP.OR, ir.ATOMIC_OP.XOR)  # of floats, too
_UNSIGNED = (ir.ATOMIC_OP.UMAX, ir.ATOMIC_OP.UMIN, *_BITS)
_SIGNED = (ir.ATOMIC_OP.MAX, ir.ATOMIC_OP.MIN)
_TOWARD_ZERO = {("fp32", "fp16"), ("fp32", "bf16"), ("fp32", "fp8e5")}  # conversions that GPUs have
_NOT_CONVERTED = {*itertools.permutations(("fp64", "fp8e4nv", "fp8e5"), 2)}
_UNSIGNED_OF = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # by bytes


class Tile:
    """The elements that one TMA instruction accesses: a descriptor's box at given offsets, clipped to the tensor.

    box: full block shape. inside: the slices of the box that lie inside the tensor. address, shape, strides: first
    address, shape and byte strides of that part.
    """

    def __init__(self, desc: Any, offsets: list[TensorHandle]) -> None:
        element = desc.base.dtype.element_ty
        self.element = element
        self.dtype = np_dtype(element)
        size = self.dtype.itemsize
        start = [int(o.data.item()) for o in offsets]
        if (start[-1] * size) % 16:
            where = f"descriptor offset {start} of {element} at {site()}"
            raise ValueError(f"{where}: the last one is no multiple of 16 bytes, which TMA needs")
        extent = [int(s.data.item()) for s in desc.shape]
        stride = [int(s.data.item()) * size for s in desc.strides]
        self.box = tuple(desc.block_shape)
        low = [max(0, -o) for o in start]
        high = [max(lo, min(b, n - o)) for lo, b, n, o in zip(low, self.box, extent, start)]
        self.inside = tuple(slice(lo, hi) for lo, hi in zip(low, high))
        self.shape = tuple(hi - lo for lo, hi in zip(low, high))
        self.strides = tuple(stride)
        self.address = int(desc.base.data.item()) + sum((o + lo) * s for o, lo, s in zip(start, low, stride))


def _written(desc: Any, offsets: list[TensorHandle]) -> Tile:
    """The tile that a TMA store or reduction writes. To a GPU a negative offset there is an illegal instruction."""
    start = [int(o.data.item()) for o in offsets]
    if min(start) < 0:
        what = "a GPU writes no tile that begins outside the tensor"
        raise ValueError(f"descriptor offset {start} at {site()}: {what}: begin it at 0 or later")
    return Tile(desc, offsets)


_DTYPES: dict[str, np.dtype] = {}


def np_dtype(ty: tl.dtype) -> np.dtype:
    """The numpy type that holds an element of `ty`."""
    known = _DTYPES.get(ty.name)
    if known is not None:
        return known
    name = ty.scalar.name
    known = _DTYPES.get(name)
    if known is None:
        known = _DTYPES[name] = base._get_np_dtype(ty.scalar)
    return known


def handle(data: np.ndarray, ty: tl.dtype) -> TensorHandle:
    return TensorHandle(data, ty.scalar)


class _Results:
    """The results of inline assembly."""

    def __init__(self, *results: TensorHandle) -> None:
        self.get_result = results.__getitem__


def _flushing(name: str) -> Any:
    """The builder's function `name`, which on GPUs takes fp32 numbers below the smallest normal one for zeros."""
    function = getattr(InterpreterBuilder, name)
    return lambda self, arg: function(self, handle(flushed(arg.data), arg.dtype))


class Builder(InterpreterBuilder):
    """The one builder of the process."""

    pkt: Any = None  # the SimulatedDevice while a machine runs, also for the primitives of pkt.language.ptx

    def __init__(self) -> None:
        super().__init__()
        # The overflow checks of `tl` take a quarter of the run, and the GPU has none.
        # debug=True checks `tl.device_assert`, as on the GPU.
        precisions = CUDAOptions.allowed_dot_input_precisions
        self.options = InterpreterOptions(sanitize_overflow=False, debug=True, allowed_dot_input_precisions=precisions)

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def binary_op(self, lhs, rhs, op):
        ty = lhs.dtype.scalar
        if ty.name in BITS:
            if ty.name != "bf16":
                raise _not_compiled(f"arithmetic of {ty.name}", "cast to fp32 first")
            out = op(decode(lhs.data, ty), decode(rhs.data, ty))
            return handle(out, tl.int1) if out.dtype == np.bool_ else handle(encode(out, ty), ty)
        if ty.name == "int1" and op in (np.add, np.subtract, np.multiply, np.left_shift):  # one bit wraps
            return handle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(np.bool_), ty)
        out = super().binary_op(lhs, rhs, op)
        if out.data.dtype == np.bool_ and ty.name != "int1":
            return handle(out.data, tl.int1)
        if ty.is_floating() and out.data.dtype != lhs.data.dtype:
            return handle(out.data.astype(lhs.data.dtype), ty)
        return out

    def unary_op(self, arg, op):
        ty = arg.dtype.scalar
        if ty.name in BITS:
            return handle(encode(op(decode(arg.data, ty)), ty), ty)
        return super().unary_op(arg, op)

    create_ceil, create_floor = _flushing("create_ceil"), _flushing("create_floor")
    create_sqrt, create_rsqrt = _flushing("create_sqrt"), _flushing("create_rsqrt")
    create_erf, create_sin = _flushing("create_erf"), _flushing("create_sin")

    def create_exp2(self, arg):
        return handle(flushed(super().create_exp2(arg).data), arg.dtype)

    def create_fma(self, x, y, z):
        ty = z.dtype.scalar
        if ty == tl.float64:
            return handle(numerics.fma64(*np.broadcast_arrays(x.data, y.data, z.data)), ty)
        wide = [decode(h.data, h.dtype.scalar).astype(np.float64) for h in (x, y, z)]
        out = numerics.fma(*np.broadcast_arrays(*wide))
        return handle(encode(out, ty) if ty.name in BITS else out.astype(z.data.dtype), ty)

    def create_umulhi(self, lhs, rhs):
        a, b = (h.data.view(f"u{h.data.itemsize}") for h in (lhs, rhs))
        return handle(numerics.high_product(a, b).view(lhs.data.dtype), lhs.dtype)

    def create_histogram(self, data, bins, mask):
        self.pkt.join_threads()
        if data.data.itemsize != 4:
            raise _not_compiled(f"a histogram of {data.dtype.scalar}", "cast to int32 first")
        chosen = data.data if mask is None else data.data[mask.data]
        outside = chosen[(chosen < 0) | (chosen >= bins)]
        if outside.size:
            what = f"{outside[0]} is in none of the {bins} bins, and a GPU may count it in any"
            raise ValueError(f"tl.histogram at {site()}: {what}: mask it")
        return handle(np.bincount(chosen.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    def get_all_ones_value(self, type):
        return handle(np.array([True] if type == tl.int1 else [-1]).astype(np_dtype(type)), type)

    def create_minnumf(self, lhs, rhs):
        """`tl.minimum` by default: of a NaN and a number, the number."""
        return self.binary_op(lhs, rhs, numerics.fmin)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, numerics.fmax)

    def create_minimumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, numerics.minimum)

    def create_maximumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, numerics.maximum)

    def create_select(self, cond, lhs, rhs):
        """It selects bits: of a signed and an unsigned integer, `tl.atomic_min` of floats takes either's."""
        return handle(np.where(cond.data, lhs.data, rhs.data.view(lhs.data.dtype)), lhs.dtype)

    def create_clampf(self, arg, lo, hi, propagate_nans):
        """`tl.clamp`: of a NaN by default the lower bound."""
        keep = propagate_nans == ir.PROPAGATE_NAN.ALL
        least = self.binary_op(arg, lo, numerics.maximum if keep else numerics.fmax)
        return self.binary_op(least, hi, numerics.minimum if keep else numerics.fmin)

    def create_frem(self, lhs, rhs):
        return self.binary_op(lhs, rhs, numerics.frem)

    def create_fabs(self, arg):
        bits = arg.data.view(getattr(np, f"uint{arg.data.itemsize * 8}"))
        top = bits.dtype.type(1 << (arg.data.itemsize * 8 - 1))
        return handle((bits & ~top).view(arg.data.dtype), arg.dtype)

    def create_ashr(self, lhs, rhs):
        signed = getattr(np, f"int{lhs.data.itemsize * 8}")
        out = np.right_shift(lhs.data.astype(signed), rhs.data.astype(signed))
        return handle(out.astype(lhs.data.dtype, copy=False), lhs.dtype)

    def create_lshr(self, lhs, rhs):
        data = np.right_shift(*(h.data.view(_UNSIGNED_OF[h.data.itemsize]) for h in (lhs, rhs)))
        return handle(data.view(lhs.data.dtype), lhs.dtype)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        have, want = src.dtype.scalar.name, dst_type.scalar.name
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        if (have, want) not in _TOWARD_ZERO if toward_zero else (have, want) in _NOT_CONVERTED:
            raise _not_compiled(f"a cast of {have} to {want}{' towards zero' * toward_zero}", "cast to fp32 first")
        return self.cast_impl(src, dst_type, toward_zero)

    def cast_impl(self, src, dst_type, toward_zero=False):
        have, want = src.dtype.scalar, dst_type.scalar
        if "fp8e4b15" in (have.name, want.name):
            raise Unsupported.simulated("a conversion of float8e4b15", str(site()), "use float8e4nv or float8e5")
        if want.name in BITS:
            values = decode_finite(src.data) if (have.name, want.name) == ("fp8e5", "bf16") else decode(src.data, have)
            return handle(encode(values, want, toward_zero), want)
        values = decode(src.data, have)
        if want.name == "fp16" and values.dtype == np.float32:
            return handle(to_half(values, toward_zero), want)
        dtype = np_dtype(want)
        if values.dtype.kind == "f" and dtype.kind in "iu":
            return handle(to_integer(values, dtype), want)
        return handle(values.astype(dtype), want)

    def get_bf16(self, value):
        """A constant. Triton makes it from six decimals, so that 1e-7 is 0."""
        return handle(encode(np.array([float(f"{np.float32(value):f}")]), tl.bfloat16), tl.bfloat16)

    def create_extern_elementwise(self, lib_name, lib_path, symbol, args, ty, is_pure):
        if not symbol.startswith("__nv_"):
            raise Unsupported.simulated(f"extern function {symbol!r}", str(site()), _INSTEAD)
        from pkt.simulate import libdevice  # few kernels call it, so importing pkt does not load it

        return handle(libdevice.call(symbol, [a.data for a in args], np_dtype(ty)), ty)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        tf32 = input_precision == ir.INPUT_PRECISION.TF32
        parts = _PARTS.get(str(input_precision).split(".")[-1], 0)
        product = matmul(a.data, a.dtype.scalar, b.data, b.dtype.scalar, tf32, parts)
        self.pkt.computed(2.0 * product.size * a.data.shape[-1])
        self.pkt.join_threads()
        product += decode(d.data, d.dtype.scalar)
        ty = d.dtype.scalar
        return handle(encode(product, ty) if ty.name in BITS else product.astype(d.data.dtype, copy=False), ty)

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast, a_k_pack, b_k_pack, acc):
        x = self._operand(a, a_format, -1 if a_k_pack else -2)
        y = np.swapaxes(self._operand(b, b_format, -2 if b_k_pack else -1), -1, -2)
        for exponents in (a_scale, b_scale):
            if exponents is not None and x.shape[-1] != 32 * exponents.data.shape[-1]:
                raise Unsupported.simulated(
                    "tl.dot_scaled with groups of 16", str(site()), "scale groups of 32 (ue8m0)"
                )
        x, y = (scale(v, None if e is None else e.data) for v, e in ((x, a_scale), (y, b_scale)))
        product = matmul(x, tl.float32, np.swapaxes(y, -1, -2), tl.float32, tf32=False)
        self.pkt.computed(2.0 * product.size * x.shape[-1])
        self.pkt.join_threads()
        return handle(product + acc.data, tl.float32)

    def _operand(self, block, kind, packed_axis):
        if kind == ir.ScaleDotElemTypeTY.E2M1:
            return unpack_fp4(block.data, packed_axis)
        return decode(block.data, block.dtype.scalar).astype(np.float32)

    def create_join(self, lhs, rhs):
        """Of a signed and an unsigned integer, too, whose bits it joins."""
        return handle(np.stack([lhs.data, rhs.data.view(lhs.data.dtype)], -1), lhs.dtype)

    def create_split(self, val):
        return tuple(handle(np.ascontiguousarray(val.data[..., i]), val.dtype) for i in (0, 1))

    def create_trans(self, arg, perm):
        return handle(np.ascontiguousarray(np.transpose(arg.data, perm)), arg.dtype)

    def create_bitcast(self, src, dst_type):
        return handle(np.ascontiguousarray(src.data).view(np_dtype(dst_type)), dst_type)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # -- memory -----------------------------------------------------------------------------------------------------

    def create_load(self, ptr, *policy):
        return self._load(ptr, None, None, policy[-1])

    def create_masked_load(self, ptrs, mask, other, *policy, **named):
        return self._load(ptrs, mask, other, named.get("is_volatile", policy[-1] if policy else False))

    def create_tensor_pointer_load(self, ptr, boundary_check, padding_option, *policy):
        """As Triton's, whose padding with NaN is 0 in the integers that hold bf16 and fp8."""
        if padding_option != ir.PADDING_OPTION.PAD_NAN:
            return super().create_tensor_pointer_load(ptr, boundary_check, padding_option, *policy)
        ptrs, mask = ptr.materialize_pointers(boundary_check)
        ty = ptrs.get_element_ty()
        nan = np.full(ptrs.data.shape, np.nan, np.float32)
        other = encode(nan, ty) if ty.name in BITS else nan.astype(np_dtype(ty))
        return self.create_masked_load(ptrs, mask, handle(other, ty), *policy)

    def _load(self, ptrs, mask, other, volatile):
        ty = ptrs.get_element_ty()
        return handle(self.loaded(ptrs.data, np_dtype(ty), mask, other, bool(volatile)), ty)

    def loaded(self, addresses, dtype, mask, other=None, volatile=False):
        """The elements at `addresses`, and where the mask is false those of `other`. mask, other: handles, or None."""
        m = selected(mask, addresses.shape)
        values = self.pkt.load(addresses, m, dtype, volatile)
        return values if m is None or other is None else np.where(m, values, other.data)

    def create_store(self, ptr, val, *policy):
        self._store(ptr, val, None)

    def create_masked_store(self, ptrs, value, mask, *policy, **named):
        self._store(ptrs, value, mask)

    def _store(self, ptrs, value, mask):
        self.stored(ptrs.data, value.data.astype(np_dtype(ptrs.get_element_ty()), copy=False), mask)

    def stored(self, addresses, data, mask):
        """Store the array `data` at `addresses`. mask: a handle, or None."""
        self.pkt.store(addresses, selected(mask, addresses.shape), _like(data, addresses.shape))

    def create_addptr(self, ptr, offset):
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return TensorHandle(ptr.data + offset.data.astype(np.uint64) * np.uint64(size), ptr.dtype)

    def create_make_tensor_descriptor(self, base, shape, strides, *rest):
        element = base.dtype.element_ty
        size = np_dtype(element).itemsize
        parts = {"its address": base.data.item()}
        parts |= {f"stride {at}": stride.data.item() * size for at, stride in enumerate(strides[:-1])}
        for name, nbytes in parts.items():
            if nbytes % 16:
                found = f"{name} is {nbytes % 16} bytes past a multiple of 16 bytes, which TMA needs"
                raise ValueError(f"descriptor of {element} at {site()}: {found}: align it, or use tl.load")
        return super().create_make_tensor_descriptor(base, shape, strides, *rest)

    def create_descriptor_load(self, desc, indices, *policy):
        tile = Tile(desc, indices)
        nan = desc.padding == ir.PADDING_OPTION.PAD_NAN
        values = self.pkt.load_tile(tile, np.nan if nan else 0)
        if getattr(desc, "round_f32_to_tf32", False) and values.dtype == np.float32:  # Triton 3.9
            values = to_nearest_tf32(values)
        return handle(values, tile.element)

    def create_descriptor_store(self, desc, value, indices):
        tile = _written(desc, indices)
        self.pkt.store_tile(tile, value.data.astype(tile.dtype, copy=False).reshape(tile.box))

    def create_descriptor_reduce(self, kind, desc, value, indices):
        tile = _written(desc, indices)
        name = str(kind).split(".")[-1].upper()
        op = ATOMICS[getattr(ir.ATOMIC_OP, name)]
        if tile.element.is_floating():
            op = _OF_NUMBERS.get(op, op)
        elif op in _BITWISE and tile.dtype.itemsize == 8:
            what = f"{desc.base.dtype.element_ty} at {site()}"
            raise Unsupported.here(
                f"a descriptor's atomic_{name.lower()} of {what}",
                "GPUs have it for 32 bits",
                "use tl.atomic_" + name.lower(),
            )
        update = _rounded(op, tile.element)
        self.pkt.reduce_tile(tile, value.data.astype(tile.dtype, copy=False).reshape(tile.box), update)

    def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
        op = ATOMICS[rmwOp]
        ty = val.dtype.scalar
        dtype = val.data.dtype
        values = _like(val.data, ptr.data.shape).reshape(-1)
        if rmwOp in _UNSIGNED or rmwOp in _SIGNED:
            view = np.dtype(f"{'u' if rmwOp in _UNSIGNED else ''}int{dtype.itemsize * 8}")
            inner = op
            op = lambda old, new: inner(old.view(view), new.view(view)).view(dtype)  # noqa: E731
        update = _rounded(op, ty)
        change = lambda now, where: update(now, values[where])  # noqa: E731
        old = self.pkt.atomic(ptr.data, selected(mask, ptr.data.shape), dtype, change, *_order(sem, scope))
        return handle(old, ty)

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        return handle(self.swapped(ptr.data, cmp.data, val.data, *_order(sem, scope)), val.dtype)

    def swapped(self, addresses, cmp, val, sem, scope):
        """The old elements of a compare-and-swap. It compares bits: -0.0 is not 0.0, and a NaN may be found."""
        dtype = _UNSIGNED_OF[val.itemsize]
        expected = _like(cmp, addresses.shape).reshape(-1).view(dtype)
        values = _like(val, addresses.shape).reshape(-1).view(dtype)
        if addresses.size == 1:  # without numpy's `where`
            update = lambda now, where: values if now[0] == expected[0] else now  # noqa: E731
        else:
            update = lambda now, where: np.where(now == expected[where], values[where], now)  # noqa: E731
        return self.pkt.atomic(addresses, None, dtype, update, sem, scope, expected=expected).view(val.dtype)

    def create_atomic_load(self, ptr, mask, sem, scope):  # Triton 3.9
        dtype = np_dtype(ptr.get_element_ty())
        same = lambda now, where: now  # noqa: E731
        old = self.pkt.atomic(ptr.data, selected(mask, ptr.data.shape), dtype, same, *_order(sem, scope))
        return handle(old, ptr.get_element_ty())

    def create_atomic_store(self, ptr, val, mask, sem, scope):  # Triton 3.9
        values = _like(val.data, ptr.data.shape).reshape(-1)
        new = lambda now, where: values[where]  # noqa: E731
        self.pkt.atomic(ptr.data, selected(mask, ptr.data.shape), val.data.dtype, new, *_order(sem, scope))

    def create_atomic_poll(self, ptr, expected, timeout_ns, sem, scope):  # Triton 3.9
        matched = np.zeros(ptr.data.shape, np.bool_)
        for where in np.ndindex(ptr.data.shape):
            address = TensorHandle(np.asarray(ptr.data[where]).reshape(1), ptr.dtype)
            self.pkt.enter_loop(POLL, Slice((), frozenset([0]), (), frozenset([0])))
            self.pkt.look(((POLL, 0),))
            while self.create_atomic_load(address, None, sem, scope).data.item() != expected.data[where]:
                self.pkt.iterated(POLL, {})
            self.pkt.look(())
            self.pkt.leave_loops((POLL,))
            matched[where] = True
        return handle(matched, tl.int1)

    def create_inline_asm(self, inlineAsm, constraints, values, type, isPure, pack):
        made = _REGISTERS.fullmatch(inlineAsm)
        if made is not None:
            return _Results(handle(np.array([self.pkt.register(made[1])]).astype(np_dtype(type[0])), type[0]))
        if _BARRIER.fullmatch(inlineAsm.strip()):
            self.pkt.join_threads()
        elif not inlineAsm.startswith("griddepcontrol."):  # the kernels of a rank run one after the other
            text = textwrap.shorten(inlineAsm, 120, placeholder=" ...")
            raise Unsupported.simulated(f"inline assembly {text!r}", str(site()), _INSTEAD)
        return _Results(handle(np.zeros(1, np.int32), tl.int32))

    def create_print(self, prefix, hex, values, isSigned):
        """Prints the values, in hexadecimal their bits."""
        begin = f"({', '.join(map(str, self.grid_idx))}) rank {self.pkt.rank}{prefix}"
        for value in values:
            if hex:
                bits = np.ascontiguousarray(value.data).view(_UNSIGNED_OF[value.data.itemsize])
                text = np.array2string(bits, formatter={"int": f"0x{{:0{2 * bits.itemsize}x}}".format})
            else:
                text = str(decode(value.data, value.dtype.scalar))
            print(f"{begin} {text}")
        if not values:
            print(begin)

    def create_grid_dependency_wait(self) -> None:
        """Nothing, as for `launch_dependents`: the kernels of a rank run one after the other."""

    def create_assume(self, condition) -> None:
        if not condition.data.all():
            self.pkt.assumed_falsely("tl.assume")

    def create_grid_dependency_launch_dependents(self) -> None:
        """See `create_grid_dependency_wait`."""


def _not_compiled(what: str, remedy: str) -> Unsupported:
    return Unsupported.here(f"{what} at {site()}", "Triton does not compile it for GPUs", remedy)


def _like(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return data if data.shape == shape else np.broadcast_to(data, shape)


def selected(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    if mask is None:
        return None
    data = mask.data if isinstance(mask, TensorHandle) else np.asarray(mask)
    return None if b"\0" not in data.tobytes() else _like(data, shape)  # half the time of data.all()


@functools.cache
def _order(sem: Any, scope: Any) -> tuple[str, str]:
    """The names of `sem` and `scope` in lower case: ("acquire_release", "system") for example."""
    return str(sem).split(".")[-1].lower(), str(scope).split(".")[-1].lower()


def _rounded(op: Any, ty: tl.dtype) -> Any:
    """`op` on stored bits of format `ty`, with the rounding of the hardware's reduction."""
    if ty.name not in BITS:
        return op
    return lambda old, new: encode(op(decode(old, ty), decode(new, ty)), ty)
