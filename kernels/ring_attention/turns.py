"""How many heads at a time the programs of a Gluon kernel take tasks of.

Every program takes as many tasks, in rounds that go through the programs in alternating directions. Under a causal mask
a head's tasks have ever less to do. The more heads are taken together, the longer such a descent, and the more evenly
the work is spread. The fewer, the more of what they share is found in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sequence import Part, View

EVEN = 1.02
"""The work of the program that has the most, of the mean, which is even enough."""
CHOICES = 16
"""Numbers of heads that are compared."""


def blocks_seen(keys: Sequence[Part], queries: Sequence[Part], view: View, rows: int) -> list[int]:
    """For each piece of keys, blocks of so many rows in which queries of some parts see one of its keys."""
    found = []
    for piece in keys:
        end = min(piece.position + piece.rows, view.length)
        low = max(piece.position - view.right, 0)
        high = min(end + view.left, view.length) if end > piece.position else low
        seen = (min(high, p.position + p.rows) - max(low, p.position) for p in queries)
        found.append(sum(-(-max(count, 0) // rows) for count in seen))
    return found


def heads_together(costs: Sequence[float], heads: int, least: int, programs: int) -> int:
    """The fewest heads from `least` on that spread the work evenly, or the most even number of those compared. costs:
    of the tasks of each head, in their order."""
    least = min(least, heads)
    choices = [*range(least, heads, max((heads - least) // CHOICES, 1)), heads]
    uneven = []
    for together in choices:
        uneven.append(_most(costs, heads, together, programs))
        if uneven[-1] <= EVEN:
            return together
    return choices[uneven.index(min(uneven))]


def _most(costs: Sequence[float], heads: int, together: int, programs: int) -> float:
    """The work of the program that has the most, of the mean."""
    one = torch.tensor(costs, dtype=torch.float32, device="cpu")
    order = torch.cat([one.repeat_interleave(min(together, heads - begin)) for begin in range(0, heads, together)])
    rounds = torch.nn.functional.pad(order, (0, -len(order) % programs)).view(-1, programs)
    rounds[1::2] = rounds[1::2].flip(1)
    return float(rounds.sum(0).max() * programs / order.sum())
