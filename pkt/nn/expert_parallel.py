"""The style for experts, which torch lacks. It loads no part of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ExpertParallel:
    """A style for `parallelize`: a mixture of experts, each on one rank. torch 2.13 has none.

    It takes two kinds of modules, and knows them by the attributes that transformers gives them. It does not ask for
    classes: transformers has one for each model and release, and pkt does not import it.

    - A block with a Linear `gate` and a ModuleList `experts` of modules with the Linears gate_proj, up_proj and
      down_proj (Qwen) or w1, w3 and w2 (Mixtral) and the activation `act_fn`; `top_k`; `norm_topk_prob` of Qwen's;
      perhaps an MLP `shared_expert` and a Linear `shared_expert_gate`. A `MoE` takes its place.
    - Experts with the parameters gate_up_proj (experts, 2 * hidden, features) and down_proj and with `act_fn`, which
      are called with (x, topk_idx, topk_weights). `Experts` take their place; the router stays.
    """

    def __init__(
        self, layout: Placement | None = None, *, router_logits: bool = True, use_local_output: bool = True,
        max_tokens: int | None = None, tokens_per_rank: int | None = None,
    ) -> None:  # fmt: skip
        """layout: of the tokens, given and returned: Shard(dim), of which each rank has a part, or Replicate(), also
        None. router_logits: a block returns (result, logits), as in transformers 4. use_local_output: as for torch's
        styles. max_tokens, tokens_per_rank: as for `pkt.moe`."""
        self.layout, self.router_logits, self.use_local_output = layout, router_logits, use_local_output
        self.room = {"max_tokens": max_tokens, "tokens_per_rank": tokens_per_rank}
