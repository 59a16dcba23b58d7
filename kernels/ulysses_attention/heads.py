"""Heads of queries and of keys on each rank, and the groups that they are cut into."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .local import repeated


class Heads(NamedTuple):
    """Of a rank: heads of queries, heads of keys, and how often each of k's heads is repeated for all ranks."""

    queries: int
    keys: int
    repeats: int

    @property
    def sharing(self) -> int:
        """Heads of queries that share one of keys."""
        return self.queries // self.keys

    def repeated(self, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """(B, S, heads, D) with heads of keys as often as ranks need them; heads of queries as they are."""
        return repeated(x, self.repeats) if x.shape[2] == kv_heads else x


def heads_of(heads: int, kv_heads: int, size: int) -> Heads:
    """So many heads of keys that those of queries that share one lie together on one rank."""
    queries = heads // size
    sharing = math.gcd(queries, heads // kv_heads)
    return Heads(queries, queries // sharing, heads // kv_heads // sharing)


def is_group(n: int, held: Heads) -> bool:
    """Whether a rank's heads of queries can be cut into groups of n: no group has a part of a head of keys and others
    besides."""
    return held.queries % n == 0 and (n % held.sharing == 0 or held.sharing % n == 0)
