"""Data that carries its own flag: the last int32 of a word names the launch, and the others are data.

A word is stored and loaded as a whole, so a program that finds the flag has the data. A message needs neither a barrier
nor a fence, and takes one flight. NCCL calls this protocol LL.

| word | data | flags among the bytes moved | PTX type |
|---|---|---|---|
| long, 16 bytes | three int32 | a quarter | b128 (*) |
| short, 8 bytes | one int32, as NCCL's | half | b64 |

(*) An access of type b128 is one access since PTX ISA 8.3, and none of 2 x 10^7 messages between H200s was torn
(`gpu_tests.json`). Short words carry the scales of fp8 products, whose results were right on two H200s
(`fp8_products_2.json`).

Two rules keep a flag from being found without its data:

- A word gets another flag whenever it is used again. `pl.epoch` counts launches, so it is such a flag.
- A rank puts into a word only when the old data has been taken. Two halves, used in turn by the launch's parity, ensure
  this if every rank takes something from every other rank in each launch. For a rank that puts in launch e + 1 has
  ended launch e, so it has taken what every rank put in launch e. So every rank had ended launch e - 1 and taken its
  data from this half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import address, ptx


@triton.jit
def put_flagged(ptr, values, flag, peer, world, mask=None):
    """Store three `values`, or one, with `flag` into rank `peer`'s words.

    ptr: scalar or block of pointers to int32 in my heap, each to the first of a word, at a multiple of the word's 16
    bytes, or 8 bytes with one value; values: a tuple of three or one, int32 of that shape (bitcast other types); flag:
    int32 scalar, another one for each use of a word. `st.relaxed.sys.global.b128`, or `.b64`, one a word. No order: it
    publishes nothing but itself.
    """
    ptx.put_flagged(address.near(ptr, peer, world, "pl.put_flagged"), values, flag, mask)


@triton.jit
def take_flagged(ptr, flag, world, mask=None, values: tl.constexpr = 3):
    """Wait until each of my words has `flag`; return its data: a tuple of `values`, int32 of ptr's shape, 0 where
    masked.

    values: 3, or 1, as the sender put. Each thread spins on `ld.relaxed.sys.global.b128` (`.b64`) of its own words, one
    after the other, with the deadline and the record of `wait`. No order: the sender's other accesses do not become
    visible. Where the result is used in another layout, Triton 3.6 takes the words again, with the same result and some
    flights to memory more: `tl.gather(found, tl.arange(0, N), 0)` prevents it.
    """
    return ptx.take_flagged(ptr, 0, 1, flag, mask, world, values)[0]


@triton.jit
def take_flagged_all(ptr, stride, flag, world, mask=None, parts: tl.constexpr = None, values: tl.constexpr = 3):
    """Take the words of every rank: a tuple of `take_flagged`'s result for rank 0's words, for rank 1's, ...

    ptr: to rank 0's words; stride: number of int32 from one rank's words to the next rank's, a multiple of a word's 4
    or 2; mask: of each rank's words, or a tuple with one for each rank; parts: number of ranks, if not all have words.
    A thread polls its words of all ranks together, so that it finds data that has arrived from all of them in one
    flight, not in one for each.
    """
    count: tl.constexpr = world.size if parts is None else parts
    return ptx.take_flagged(ptr, stride, count, flag, mask, world, values)
