"""What an all-gather with the experts' product behind it returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gathered(NamedTuple):
    """All ranks' tokens, their products, and where each product lies. All tensors are on the device.

    T is the number of this rank's tokens, W of the ranks, K of a token's experts, E of the experts, N of this rank's
    columns of an expert. R = W * T * K. What has a name of `pkt.kernels.dispatch.Dispatched` means the same here.
    """

    product: torch.Tensor
    """(R, N) of x's dtype: the tokens' products, by expert, then by rank and token. Rows behind the last expert's are 0
    if they were cleared, and else undefined."""
    x: torch.Tensor
    """(W * T, H) of x's dtype: the tokens of all ranks, in rank order."""
    weights: torch.Tensor
    """fp32 (R,): the weight of each row, 0 where it is no token's."""
    offsets: torch.Tensor
    """int32 (E + 1,): where the rows of each expert begin, and where the last one's end."""
    source: torch.Tensor
    """int32 (R, 3): the rank, token and number among the token's experts that each row comes from; -1 if from none."""
    tokens: torch.Tensor
    """int32 (W * T, K): the rows of each token of `x`; -1 for none."""
    places: torch.Tensor
    """int32 (T * W,): the place in `tokens` of each of this rank's tokens, once for each rank; -1 if no expert has
    the token."""
