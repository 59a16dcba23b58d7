"""Elements in and out of flagged words (pkt/language/flagged.py), each of which has room for three int32.

The t-th word has the t-th int32 of what is moved, and those a third and two thirds of it farther on, so that threads
side by side load and store what lies side by side. PER: elements in an int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .reduction import combine


@triton.jit
def load(x_ptr, word, inside, end, PER: tl.constexpr):
    """PER elements in each int32; 0 for words not `inside`, and from element `end` on."""
    if PER == 1:
        return tl.load(x_ptr + word, mask=inside & (word < end), other=0).to(tl.int32, bitcast=True)
    else:
        offs = _elements(word, PER)
        return packed(tl.load(x_ptr + offs, mask=inside[:, None] & (offs < end), other=0))


@triton.jit
def thirds(x_ptr, word, third, inside, end, PER: tl.constexpr):
    """What goes into words."""
    return (
        load(x_ptr, word, inside, end, PER),
        load(x_ptr, word + third, inside, end, PER),
        load(x_ptr, word + 2 * third, inside, end, PER),
    )


@triton.jit
def store(out_ptr, word, values, inside, end, PER: tl.constexpr):
    """The reverse of `load`."""
    offs, elements, mask = unpacked(out_ptr.dtype.element_ty, word, values, inside, end, PER)
    tl.store(out_ptr + offs, elements, mask=mask)


@triton.jit
def unpacked(dtype: tl.constexpr, word, values, inside, end, PER: tl.constexpr):
    """Where `store` stores what: offsets, elements and mask."""
    if PER == 1:
        return word, values.to(dtype, bitcast=True), inside & (word < end)
    else:
        offs = _elements(word, PER)
        return offs, _parts(values, PER).to(dtype, bitcast=True), inside[:, None] & (offs < end)


@triton.jit
def load_part(x_ptr, word, inside, end, span, index, SIZE: tl.constexpr, PER: tl.constexpr):
    """`load` of part `index` of SIZE that take turns, each with `span` elements."""
    if PER == 1:
        place = _place(word, span, index, SIZE)
        return tl.load(x_ptr + place, mask=inside & (word < end), other=0).to(tl.int32, bitcast=True)
    else:
        offs = _elements(word, PER)
        place = _place(offs, span, index, SIZE)
        return packed(tl.load(x_ptr + place, mask=inside[:, None] & (offs < end), other=0))


@triton.jit
def thirds_of_part(x_ptr, word, third, inside, end, span, index, SIZE: tl.constexpr, PER: tl.constexpr):
    """`thirds` of it."""
    return (
        load_part(x_ptr, word, inside, end, span, index, SIZE, PER),
        load_part(x_ptr, word + third, inside, end, span, index, SIZE, PER),
        load_part(x_ptr, word + 2 * third, inside, end, span, index, SIZE, PER),
    )


@triton.jit
def store_part(out_ptr, word, values, inside, end, span, index, SIZE: tl.constexpr, PER: tl.constexpr):
    """The reverse of `load_part`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PER == 1:
        place = _place(word, span, index, SIZE)
        tl.store(out_ptr + place, values.to(dtype, bitcast=True), mask=inside & (word < end))
    else:
        offs = _elements(word, PER)
        place = _place(offs, span, index, SIZE)
        tl.store(out_ptr + place, _halves(values).to(dtype, bitcast=True), mask=inside[:, None] & (offs < end))


@triton.jit
def reduced(
    first, found, BEGIN: tl.constexpr, END: tl.constexpr, THIRD: tl.constexpr, dtype: tl.constexpr, OP: tl.constexpr
):
    """`first` and what `found` from BEGIN to END has of a third, reduced in fp32 in this order, rounded; as int32."""
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    total = numbers(first, dtype, PER)
    for i in tl.static_range(BEGIN, END):
        total = combine(total, numbers(found[i][THIRD], dtype, PER), OP)
    if PER == 1:
        return total.to(dtype).to(tl.int32, bitcast=True)
    else:
        return packed(total.to(dtype))


@triton.jit
def _elements(word, PER: tl.constexpr):
    return word[:, None] * PER + tl.arange(0, PER)[None, :]


@triton.jit
def _place(element, span, index, SIZE: tl.constexpr):
    return (element // span * SIZE + index) * span + element % span


@triton.jit
def packed(elements):
    """Blocks (..., 2) of 16-bit elements, or (words, 4) of bytes, as int32."""
    if elements.shape[-1] == 4:
        low, high = tl.split(tl.reshape(elements.to(tl.uint8, bitcast=True), (elements.shape[0], 2, 2)))
        return packed(high.to(tl.uint16) << 8 | low.to(tl.uint16))
    else:
        low, high = tl.split(elements.to(tl.uint16, bitcast=True).to(tl.uint32))
        return (high << 16 | low).to(tl.int32, bitcast=True)


@triton.jit
def _parts(words, PER: tl.constexpr):
    """The reverse of `packed`: (words, PER)."""
    halves = _halves(words)
    if PER == 4:
        halves = tl.reshape(tl.join(halves.to(tl.uint8), (halves >> 8).to(tl.uint8)), (words.shape[0], 4))
    return halves


@triton.jit
def _halves(words):
    bits = words.to(tl.uint32, bitcast=True)
    return tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))


@triton.jit
def numbers(words, dtype: tl.constexpr, PER: tl.constexpr):
    """In fp32: (words,), or (words, 2) where there are two in one."""
    if PER == 1:
        return words.to(dtype, bitcast=True).to(tl.float32)
    else:
        return _halves(words).to(dtype, bitcast=True).to(tl.float32)
