"""The rule for the form and for its groups: predicted seconds on H200s.

A prediction counts the exchange before the first group, attention of all groups, and the way home of the last group.
"""

from __future__ import annotations

import math

from pkt.model.calibration import collective_seconds
from pkt.model.cost import waves
from pkt.model.gpu import H200, link_rate

from ..declaration import Call
from ..ring_attention.planning import JOIN
from ..ring_attention.rules import lacks_gluon
from ..ring_attention.turns import NEAR
from .heads import heads_of, is_group

ATTENTION = 650e12
"""FLOP a second of torch's attention, and of the Gluon kernel's, with D = 128 in bf16 on one H200, where all SMs are
busy."""
GROUPS = 8
"""Groups of heads on each rank in "push" and "gluon", at most."""
BLOCK_M = 128
"""Queries that one SM is assumed to take at a time."""
STAGE = 10e-6
"""Seconds that a group costs in "copy"."""


def _attention(call: Call, heads: int) -> float:
    """Of so many heads of whole sequences. Half of the scores under a causal mask."""
    S = call.world.size * call["s"]
    one = 4 * BLOCK_M * S * call["d"] / (ATTENTION / H200.sms)
    whole = waves(call["b"] * heads * math.ceil(S / BLOCK_M), one, H200.sms)
    return whole / 2 if call["causal"] else whole


def _flops(call: Call, heads: int) -> float:
    """Of so many heads of whole sequences."""
    S = call.world.size * call["s"]
    return 4 * call["b"] * heads * S * S * call["d"] / (2 if call["causal"] else 1)


def _copies(call: Call, *heads: int, batches: int | None = None) -> float:
    """Of the copies of so many heads of an operand each to every peer. batches: where not all."""
    sizes = [(batches or call["b"]) * call["s"] * n * call["d"] * call.dtype.itemsize for n in heads]
    return (call.world.size - 1) * sum(n / link_rate("copy engine put", 0, n) for n in sizes)


def _copied(call: Call, heads: int) -> float:
    """Of copies of so many heads of this rank's positions within its GPU."""
    return 2 * call["b"] * call["s"] * heads * call["d"] * call.dtype.itemsize / H200.memory


def seconds_copied(call: Call, n: int) -> float:
    """Of "copy" with groups of n heads of queries. Groups fill each other's last wave, so attention of all heads takes
    what it takes in one launch. Before it come the exchange of the first group and, meanwhile, copies of own parts;
    behind it the way home of the last one, and copies of what peers have sent home."""
    held = heads_of(call["h"], call["g"], call.world.size)
    groups, keys = held.queries // n, max(n // held.sharing, 1)
    there, home = _copies(call, n, keys, keys), _copies(call, n)
    own, others = _copied(call, held.queries + 2 * held.keys), _copied(call, call["h"] - held.queries)
    longer = max(_attention(call, held.queries), (groups - 1) * (there + home))
    return H200.launch + max(there, own) + longer + groups * STAGE + home + others + H200.barrier


def seconds_unfused(call: Call) -> float:
    """Of "unfused": four all-to-alls, each of which takes what an all-gather of as many bytes takes, and attention."""
    size, held = call.world.size, heads_of(call["h"], call["g"], call.world.size)
    row = call["b"] * call["s"] * call["d"] * call.dtype.itemsize * (size - 1)
    moved = sum(
        collective_seconds("all_gather", "pkt", n * row, size)
        for n in (held.queries, held.keys, held.keys, held.queries)
    )
    return H200.launch + moved + _attention(call, held.queries)


def seconds_gluon(call: Call) -> float:
    """Of "gluon": the exchange of the first group, and attention or the other exchanges."""
    held, n = heads_of(call["h"], call["g"], call.world.size), gluon_heads(call)
    batches, keys = _joined(call, n), max(n // held.sharing, 1)
    groups = math.ceil(call["b"] / batches) * (held.queries // n)
    there = _copies(call, n, keys, keys, batches=batches)
    attention = _flops(call, held.queries) / ATTENTION
    longer = max(attention, (groups - 1) * there)
    return H200.launch + there + longer + _copied(call, call["h"]) + H200.barrier


def is_long(call: Call) -> bool:
    """Whether in "gluon" all programs of a rank begin their tasks together: where a head's keys and values are too many
    to stay in the L2 cache, and tasks are equal, since all queries see all keys. Without it programs drift apart, and
    attention to 65,536 positions takes 3 to 4 % longer (`ulysses_attention_together_2.json`)."""
    if call["causal"] or call["window"] is not None or call["cu_seqlens"] is not None:
        return False
    return 2 * call.world.size * call["s"] * call["d"] * call.dtype.itemsize > NEAR


def delay(call: Call) -> float:
    """How long one more head takes to come in "gluon", as a share of the time of attention to all heads."""
    held, n = heads_of(call["h"], call["g"], call.world.size), call["heads"]
    keys = max(n // held.sharing, 1)
    return _copies(call, n, keys, keys) / (call["b"] * n) / (_flops(call, held.queries) / ATTENTION)


def pushed_heads(call: Call) -> int:
    """As few heads a group as make at most GROUPS groups."""
    if not call["h"]:
        return 1
    held = heads_of(call["h"], call["g"], call.world.size)
    return next(n for n in range(1, held.queries + 1) if held.queries <= GROUPS * n and is_group(n, held))


def gluon_heads(call: Call) -> int:
    """As `pushed_heads`, but so many that a group has JOIN bytes of queries, or all heads of the rank."""
    if not call["h"]:
        return 1
    held = heads_of(call["h"], call["g"], call.world.size)
    fits = (n for n in range(pushed_heads(call), held.queries + 1) if is_group(n, held))
    return next(n for n in fits if n == held.queries or _bytes(call, n) >= JOIN)


def joined_batches(call: Call) -> int:
    """Batches whose groups travel together in "gluon"."""
    return _joined(call, call["heads"])


def _joined(call: Call, n: int) -> int:
    return max(min(math.ceil(JOIN / max(_bytes(call, n), 1)), call["b"]), 1)


def _bytes(call: Call, n: int) -> int:
    """Of n heads of the queries of a batch and a rank."""
    return int(call["s"] * n * call["d"] * call.dtype.itemsize)


def default_heads(call: Call) -> int:
    """The groups of "copy" with the least predicted time."""
    if not call["q"].numel():
        return 1
    held = heads_of(call["h"], call["g"], call.world.size)
    return min((n for n in range(held.queries, 0, -1) if is_group(n, held)), key=lambda n: seconds_copied(call, n))


def fits_gluon(call: Call) -> str:
    """Why the form "gluon" cannot run a call; "" where it can."""
    return lacks_gluon(call.world, call["q"]) or ("one rank, not 2 or more" if call.world.size == 1 else "")


def default(call: Call) -> str:
    """The form with the least predicted time. "copy" where `heads` is given. With documents and windows, whose time no
    prediction knows, "gluon" if it can run the call, else "unfused"."""
    if "heads" in call.given:
        return "copy"
    if not call["q"].numel():
        return "unfused"
    own = not fits_gluon(call)
    if call["cu_seqlens"] is not None or call["window"] is not None:
        return "gluon" if own else "unfused"
    predicted = {"copy": seconds_copied(call, default_heads(call)), "unfused": seconds_unfused(call)}
    if own:
        predicted["gluon"] = seconds_gluon(call)
    return min(predicted, key=lambda form: predicted[form])
