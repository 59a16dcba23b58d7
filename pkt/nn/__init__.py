"""Torch modules on pkt's operators, and torch's parallel plans: `pkt.nn`.

Each module holds this rank's part of the weights, and loads the state dict of the model that is not split. The loss is
one: gradients are those that the unsplit model would have, as with torch.distributed.tensor.parallel. See
docs/inside-torch.md.
"""

from .attention import Attention
from .embedding import VocabParallelEmbedding
from .expert_parallel import ExpertParallel
from .experts import Experts
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import SwiGLUMLP
from .moe import MoE
from .norm import fused_norms, sequence_parallel
from .plan import parallelize
from .sharded import full_state_dict

__all__ = [
    "Attention", "ColumnParallelLinear", "ExpertParallel", "Experts", "MoE", "RowParallelLinear", "SwiGLUMLP",
    "VocabParallelEmbedding", "full_state_dict", "fused_norms", "parallelize", "sequence_parallel",
]  # fmt: skip
