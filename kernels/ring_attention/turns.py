"""How many heads at a time the programs of a Gluon kernel take tasks of.

Every program takes as many tasks, in rounds that go through the programs in alternating directions. Under a causal mask
a head's tasks have ever less to do. The more heads are taken together, the longer such a descent, and the more evenly
the work is spread. The fewer, the more of what they share is found in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..declaration import Call
from .sequence import Part, View

NEAR = 16 << 20
"""Bytes of keys and values, or of queries and dout, that programs work on at a time, so that they find most of them in
the L2 cache."""
EVEN = 1.02
"""Work is spread evenly enough if the busiest program has at most so much of it, divided by the mean, with delays."""
CHOICES = 32
"""Numbers of heads that are compared."""
TASK = 3.0
"""Blocks that take as long as the beginning and the end of a task."""


def blocks_seen(pieces: Sequence[Part], others: Sequence[Part], view: View, rows: int) -> list[int]:
    """For each piece of queries, the number of blocks of `rows` keys of which one of its queries sees a key. others:
    the parts of the keys. With `view.turned` the pieces are of keys, and the others of queries."""
    found = []
    for piece in pieces:
        end = min(piece.position + piece.rows, view.length)
        low = max(piece.position - view.left, 0)
        high = min(end + view.right, view.length) if end > piece.position else low
        seen = (min(high, p.position + p.rows) - max(low, p.position) for p in others)
        found.append(sum(-(-max(count, 0) // rows) for count in seen))
    return found


def task_costs(
    call: Call, pieces: Sequence[Part], others: Sequence[Part], view: View, rows: int, heads: int = 1
) -> list[float]:  # fmt: skip
    """The cost of each task of a head, one for each of `pieces`, in blocks of `rows` rows. heads: of the others that a
    task looks at. With documents, which only the device knows, all tasks cost the same."""
    known = call["cu_seqlens"] is None
    seen = blocks_seen(pieces, others, view, rows) if known else [1] * len(pieces)
    return [TASK + heads * count for count in seen]


def heads_together(
    costs: Sequence[float], heads: int, near: int, programs: int, unit: int = 1, delay: float = 0.0
) -> int:  # fmt: skip
    """How many heads to take at a time: `near`, whose operands stay in the L2 cache, if that spreads the work evenly;
    else the smallest multiple of `unit` that does; else the best of those compared.

    costs: of the tasks of each head, in their order. delay: how much later tasks begin for each head that is taken
    together, while heads are still to come, as a share of the time of all tasks.
    """
    near = min(near, heads)
    choices = [near, *range(unit, heads, max(heads // unit // CHOICES, 1) * unit), heads]
    times = []
    for together in choices:
        times.append(_most(costs, heads, together, programs) + delay * together)
        if times[-1] <= EVEN:
            return together
    return choices[times.index(min(times))]


def _most(costs: Sequence[float], heads: int, together: int, programs: int) -> float:
    """The work of the program that has the most, of the mean."""
    one = torch.tensor(costs, dtype=torch.float32, device="cpu")
    times, rest = divmod(heads, together)
    order = torch.cat((one.repeat_interleave(together).repeat(times), one.repeat_interleave(rest)))
    rounds = torch.nn.functional.pad(order, (0, -len(order) % programs)).view(-1, programs)
    rounds[1::2] = rounds[1::2].flip(1)
    return float(rounds.sum(0).max() * programs / order.sum())
