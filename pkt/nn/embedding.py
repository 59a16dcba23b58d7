"""An embedding whose rows, the vocabulary, the ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pkt.errors import DtypeError
from pkt.kernels.gradients import this_rank
from pkt.kernels.reduce_scatter import reduce_scatter
from pkt.runtime.world import World

from . import rows
from .exchange import summed
from .sharded import Part, Sharded, check_transforms


class VocabParallelEmbedding(Sharded):
    """An Embedding of which this rank holds the rows of its part of the vocabulary.

    tokens: integers (...), the same on every rank; nothing checks that they exist. Returns (..., features): where
    `sequence_dim` is None, the same on every rank, through one all-reduce; else this rank's part of dimension
    `sequence_dim`, through one reduce-scatter.

    weight: (vocabulary / ranks, features). Raises ShapeError if the ranks do not divide the vocabulary.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, sequence_dim: int | None = None, world: World | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """world: the current one where None. The weight is this rank's part of what torch's Embedding draws."""
        self._of(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype), sequence_dim, world)

    def _of(self, embedding: nn.Embedding, sequence_dim: int | None, world: World | None) -> None:
        super().__init__(world)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.sequence_dim = sequence_dim
        self.own = self.divided("num_embeddings", self.num_embeddings)
        weight = embedding.weight
        self.hold("weight", [weight], [Part("weight", 0, self.num_embeddings)], weight.requires_grad)
        self.train(embedding.training)

    @classmethod
    def of(
        cls, embedding: nn.Embedding, *, sequence_dim: int | None = None, world: World | None = None
    ) -> VocabParallelEmbedding:
        """This rank's part of a whole Embedding without padding_idx or max_norm, in new memory."""
        made = cls.__new__(cls)
        made._of(embedding, sequence_dim, world)
        return made

    @property
    def runs(self) -> str:
        """The operator that a forward pass calls."""
        return "all_reduce" if self.sequence_dim is None else "reduce_scatter"

    def extra_repr(self) -> str:
        split = f"sequence_dim={self.sequence_dim}, ranks={self.world.size}, runs={self.runs}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {split}"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        call = "pkt.nn.VocabParallelEmbedding"
        check_transforms(call, self.world)
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            found = getattr(tokens, "dtype", type(tokens).__name__)
            raise DtypeError.argument(call, "tokens", found, "integers of 32 or 64 bits", self.world.rank)
        mine = tokens - this_rank(self.world, tokens) * self.own
        inside = (mine >= 0) & (mine < self.own)
        rows_of_mine = functional.embedding(mine.where(inside, 0), self.local("weight"))
        found = rows_of_mine.masked_fill(~inside.unsqueeze(-1), 0)  # also where row 0 is infinite or NaN
        if self.sequence_dim is None:
            return summed(found, self.world)
        dim = rows.dimension(call, found, self.sequence_dim, self.world)
        part = rows.to_ranks(call, found, dim, self.world)
        shape = rows.part_shape(found.shape, dim, self.world.size, self.embedding_dim)
        return reduce_scatter(part, world=self.world).view(shape)
