"""Attention of whole sequences on one rank, and its gradients.

torch's scaled_dot_product_attention computes it where all is seen, or all before a query. Windows and documents are up
to pkt's ring attention on this rank alone, which skips what nobody sees. Where its Gluon kernels do not run, and for
gradients of gradients, torch computes gradients of these, too: with masks for some queries at a time, of at most MASK
elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pkt.runtime.world import World

from ..gradients import Recorded
from ..ring_attention import OPERATOR as RING_ATTENTION
from ..ring_attention import sequence
from ..ring_attention.exact import view_of
from ..ring_attention.rules import lacks_gluon
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

    S: int  # positions
    causal: bool
    window: tuple[int, int] | None
    scale: float | None

    @property
    def view(self) -> View:
        """The keys that a query sees."""
        return view_of(self.S, 1, self.causal, self.window, None)

    def is_masked(self, cu_seqlens: torch.Tensor | None) -> bool:
        """Whether torch's attention needs masks."""
        left, right, last = *self.view[:2], self.S - 1
        return cu_seqlens is not None or left < last or 0 < right < last

    # ------------------------------------------------------------------------------------------------ by pkt's kernels
    def planned(
        self, world: World, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> Callable[..., torch.Tensor]:  # fmt: skip
        """attend(q, k, v, cu_seqlens) for tensors like these: the result, (B, S, heads, D)."""
        if not self.is_masked(cu_seqlens):
            return lambda q, k, v, cu_seqlens: self._attended(next(self.parts(None, None)), q, k, v)
        alone, packed = world.alone, cu_seqlens is not None
        mode = "copy" if lacks_gluon(alone, q) else "gluon"
        operands = [x[0] if packed else x for x in (q, k, v)]
        launch = RING_ATTENTION.planned(alone, *operands, None, cu_seqlens, mode=mode, **self._told())

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
        ) -> torch.Tensor:  # fmt: skip
            if not packed:
                return launch(q, k, v, None, None)[0]
            return launch(q[0], k[0], v[0], None, cu_seqlens)[0][None]

        return attend

    def _told(self) -> dict[str, Any]:
        """The arguments of ring attention."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale}

    # -------------------------------------------------------------------------------------------------------- by torch
    def parts(self, cu_seqlens: torch.Tensor | None, device: Any) -> Iterator[Part]:
        """All queries of a sequence, in their order."""
        (left, right, _), S = self.view, self.S
        if not self.is_masked(cu_seqlens):
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

    def gradients(
        self, call: Recorded, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Those of "q", "k" and "v" that are wanted. Attention is computed once more."""
        cu_seqlens, alone = call["cu_seqlens"], call.world.alone
        if torch.is_grad_enabled() or not self.is_masked(cu_seqlens) or lacks_gluon(alone, q):
            return self._by_torch(q, k, v, cu_seqlens, grad, call.wanted)
        packed = cu_seqlens is not None
        grad, *operands = (x[0] if packed else x for x in (grad, q, k, v))
        told = {"cu_seqlens": cu_seqlens, "mode": "gluon", "world": alone, **self._told()}
        kept = call.operator("ring_attention", *operands, return_lse=True, **told)
        found = call.operator("ring_attention_backward", grad, *operands, *kept, **told)
        return {name: x[None] if packed else x for name, x in zip("qkv", found) if name in call.wanted}

    def _by_torch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None,
        grad: torch.Tensor, wanted: frozenset[str],
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The gradients of keys are added over the parts, in their order, in fp32."""
        again = torch.is_grad_enabled()  # gradients of these are wanted, too, which only torch's plain form has
        named = {"q": q, "k": k, "v": v}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if again else contextlib.nullcontext():
            leaves = {n: x if again and x.requires_grad else x.detach().requires_grad_() for n, x in named.items()}
            of = [leaves[name] for name in named if name in wanted]
            totals: list[torch.Tensor] = []
            for part in self.parts(cu_seqlens, q.device):
                found = self._attended(part, *leaves.values())
                each = torch.autograd.grad(found, of, grad[:, part.queries], create_graph=again)
                if part.mask is not None:
                    each = tuple(x.float() for x in each)
                totals = [a + b for a, b in zip(totals, each)] if totals else list(each)
        return dict(zip((name for name in named if name in wanted), (x.to(q.dtype) for x in totals)))
