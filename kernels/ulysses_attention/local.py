"""Attention of whole sequences on one rank, by torch, and its gradients.

torch's scaled_dot_product_attention has a causal mask of its own. For windows and documents it is given masks, for some
queries at a time, so that a mask has at most MASK elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ring_attention import sequence
from ..ring_attention.sequence import View

MASK = 1 << 26


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """(B, S, heads, D), each head so often, one after the other. torch adds the gradients of these in a fixed order,
    unlike those of repeat_interleave."""
    return x if times == 1 else x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)


class Part(NamedTuple):
    """Some queries, and the keys that they may see."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # bool (queries, keys), true where a query sees a key
    causal: bool


class Local(NamedTuple):
    """What is computed. q, k, v are (B, S, heads, D); heads of queries share those of keys."""

    view: View
    scale: float | None

    def parts(self, S: int, cu_seqlens: torch.Tensor | None, device: Any) -> Iterator[Part]:
        """All queries of a sequence of S positions, in their order."""
        left, right, _ = self.view
        if cu_seqlens is None and left >= S - 1 and (right >= S - 1 or not right):
            yield Part(slice(S), slice(S), None, bool(right < S - 1))
            return
        at = torch.arange(S, device=device)
        documents = None if cu_seqlens is None else sequence.spans(cu_seqlens, at, S)
        step = max(MASK // S, 1)
        for start in range(0, S, step):
            end = min(start + step, S)
            keys = slice(max(start - left, 0), min(end + right, S))
            mine, theirs = at[start:end, None], at[keys]
            mask = (theirs >= mine - left) & (theirs <= mine + right)
            if documents is not None:
                first, behind = documents[:, start:end, None]
                mask = mask & (theirs >= first) & (theirs < behind)
            yield Part(slice(start, end), keys, mask, False)

    def _attended(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The result of a part, (B, queries, heads, D). A query that sees no key gets 0."""
        q, k, v, mask, seen = q[:, part.queries], k[:, part.keys], v[:, part.keys], part.mask, None
        if mask is not None:
            seen = mask.any(1)
            mask = mask | ~seen[:, None]  # or the softmax would be of nothing
            # With a mask and shared heads torch may take a form that keeps all scores.
            k, v = (repeated(x, q.shape[2] // x.shape[2]) for x in (k, v))
        # bool: comparisons of a compiled graph's sizes are SymBools, which torch's attention does not take.
        found = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), mask, is_causal=part.causal, scale=self.scale,
            enable_gqa=bool(q.shape[2] != k.shape[2]),
        )  # fmt: skip
        found = found.transpose(1, 2)
        return found if seen is None else torch.where(seen[:, None, None], found, 0.0)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """The result, (B, S, heads, D)."""
        found = [self._attended(part, q, k, v) for part in self.parts(q.shape[1], cu_seqlens, q.device)]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def gradients(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
        grad: torch.Tensor, wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Those of "q", "k" and "v" that are wanted. Attention is computed once more. The gradients of keys are added
        over the parts, in their order, in fp32."""
        again = torch.is_grad_enabled()  # gradients of these are wanted, too, which only torch's plain form has
        named = {"q": q, "k": k, "v": v}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if again else contextlib.nullcontext():
            leaves = {n: x if again and x.requires_grad else x.detach().requires_grad_() for n, x in named.items()}
            of = [leaves[name] for name in named if name in wanted]
            totals: list[torch.Tensor] = []
            for part in self.parts(q.shape[1], cu_seqlens, q.device):
                found = self._attended(part, *leaves.values())
                each = torch.autograd.grad(found, of, grad[:, part.queries], create_graph=again)
                if part.mask is not None:
                    each = tuple(x.float() for x in each)
                totals = [a + b for a, b in zip(totals, each)] if totals else list(each)
        return dict(zip((name for name in named if name in wanted), (x.to(q.dtype) for x in totals)))
