"""Data that carries its own flag: three quarters of a word are data, the last says which launch it belongs to.

A word, 16 bytes, is stored and loaded whole, so who finds the flag has the data: there is neither a barrier nor a
fence, and a message costs one flight. In return a quarter of what is moved is flags. It is what NCCL calls LL, with
words of twice the size: since PTX ISA 8.3 an access of type b128 is one, and not two. None of 2 x 10^7 messages between
H200s was torn (`gpu_tests.json`).

The flag is to be another one whenever a word is used again. `pl.epoch` counts launches, so it is one; the rest is that
nobody puts into a word before what is there has been taken. With two halves used in turn, by the launch's parity, that
holds if every rank takes something from every other in each launch. Who puts in launch e + 1 has ended launch e, so has
what every rank put in launch e; so every rank had ended launch e - 1, and taken what was put for it into this half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, ptx


@triton.jit
def put_flagged(ptr, values, flag, peer, world, mask=None):
    """Three `values` with `flag` into rank `peer`'s words.

    ptr: scalar or block of pointers to int32 in my heap, each to the first of the four of a word, at a multiple of 16
    bytes; values: a tuple of three, int32 of that shape (bitcast what is no int32); flag: int32 scalar, never twice the
    same for a word in a row. `st.relaxed.sys.global.b128`, one a word. No order: it publishes nothing but itself.
    """
    ptx.put_flagged(address.peer(ptr, peer, world), values, flag, mask)


@triton.jit
def take_flagged(ptr, flag, world, mask=None):
    """The data of my words, once each has `flag`: a tuple of three, int32 of ptr's shape, 0 where the mask is false.

    Spin on `ld.relaxed.sys.global.b128`, each thread on its own words one after the other, with the deadline and the
    record of `wait`. No order: what else the putter did is not visible by this. Where the result is used in another
    layout Triton may take it twice, which finds the same; a word a thread avoids that.
    """
    return ptx.take_flagged(ptr, 0, 1, flag, mask, world)[0]


@triton.jit
def take_flagged_all(ptr, stride, flag, world, mask=None, parts: tl.constexpr = None):
    """What every rank has put: a tuple of what `take_flagged` has of rank 0's words, of rank 1's, ...

    ptr: to rank 0's words; stride: int32 from one rank's to the next one's, a multiple of 4; parts: so many ranks',
    where not all have words. A thread's words of all ranks are polled together, so that what has come from all is found
    in one flight, not in one for each.
    """
    count: tl.constexpr = world.size if parts is None else parts
    return ptx.take_flagged(ptr, stride, count, flag, mask, world)
