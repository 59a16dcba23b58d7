"""The arguments of the kernels, but for this rank's tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl


class Size(NamedTuple):
    """The numbers of a dispatch."""

    T: Any  # this rank's tokens
    H: Any  # elements of a token
    R: Any  # rows of the result
    S: Any  # slots
    G: Any  # scales of a token
    COUNTERS: Any  # programs that count and number tokens, the first ones
    EXPERTS: tl.constexpr  # OWN times the number of ranks
    CHOICES: tl.constexpr  # of them exist
    OWN: tl.constexpr  # of a rank
    K: tl.constexpr  # experts of a token
    K2: tl.constexpr  # the next power of two
    ALIGNMENT: tl.constexpr
    CLEAR: tl.constexpr  # zeros in the rows behind the last expert's
    CHUNK: tl.constexpr  # slots that a source takes in turn
    LEAST: tl.constexpr  # tokens a signal, at least
    SENDERS: tl.constexpr  # programs that store into inboxes
    TOKENS: tl.constexpr  # numbered at a time
    ROWS: tl.constexpr  # copied at a time, ROWS x COLS
    COLS: tl.constexpr
    STAGES: tl.constexpr  # of these copies in flight
    SCALED: tl.constexpr  # tokens have scales


class Result(NamedTuple):
    """Dispatched, as pointers, this rank's."""

    rows: Any
    weights: Any
    counts: Any
    offsets: Any
    source: Any
    tokens: Any
    places: Any
    needed: Any
    scales: Any  # as int32


class Buffers(NamedTuple):
    """A launch's memory, on every rank. What peers do not access is there, too, so that the simulator watches it."""

    table: Any  # int32 (2, size, EXPERTS + size): rank r stores [:, r], its totals of hist and sent; halves by the
    # launch's parity: a peer may be a launch ahead, while this rank still reads
    inbox: Any  # (S, H): tokens, in the order in which each source sends them
    meta: Any  # int32 (S, 2 * K + 2 + G): of each the rows here and weights of its pairs, its number at the source, its
    # slot, and its scales
    ready: Any  # int32 (1 + S / CHUNK,): ranks whose counts are here; of each chunk the last launch that has filled it
    grid: Any  # int32 (1,): of the grid barrier
    hist: Any  # int32 (programs, EXPERTS): pairs of token and expert among the tokens of a program
    sent: Any  # int32 (programs, size): tokens of it that go to each rank
    base: Any  # int32 (programs, EXPERTS): the row of the program's next token for an expert, on the expert's rank
    order: Any  # int32 (size, S): the tokens that go to each rank, as they are sent
    sorting: Any  # Sorting, this rank's; None: tokens are sent in their own order


class Few(NamedTuple):
    """The numbers of a low-latency dispatch. Where they mean the same, names are those of `Size`."""

    T: Any
    H: Any
    R: Any
    S: Any
    G: Any
    P: Any  # places that a rank has on every other rank
    THIRD: Any  # words of a token
    SCALES: Any  # words of its scales
    PARTS: Any  # workers that share a token
    CHOICES: tl.constexpr
    OWN: tl.constexpr
    OWN2: tl.constexpr  # the next power of two
    K: tl.constexpr
    K2: tl.constexpr
    ALIGNMENT: tl.constexpr
    CLEAR: tl.constexpr
    CHUNK: tl.constexpr  # slots that a source takes in turn
    EXPERT_WORDS: tl.constexpr  # of counts by expert
    COUNTED: tl.constexpr  # of all counts
    EACH: tl.constexpr  # programs an SM
    SENDING: tl.constexpr  # SMs whose programs only put tokens; 0 on one rank; a rank's only SM works, too
    TOKENS: tl.constexpr  # counted at a time
    BLOCK: tl.constexpr  # words of a token moved at a time
    SENT: tl.constexpr  # put at a time
    LANES: tl.constexpr  # threads
    AT_ONCE: tl.constexpr  # token t is put into place t, before it is known how many tokens go there
    SCALED: tl.constexpr


class Words(NamedTuple):
    """The memory of a low-latency dispatch."""

    words: Any  # int32 (2, room, 4) on every rank, see words.py
    launches: Any  # of this rank; only its launch counter is used
    room: Any
