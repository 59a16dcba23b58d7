"""torch's attention kernels by name, for callers that need the logarithms of the sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""attend(q, k, v, causal, scale) of (B, S, heads, D) -> the result, contiguous, and fp32 (B, heads, S), contiguous."""


def _by_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    aten = torch.ops.aten
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]


def _by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def attend_by(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: Sequence[tuple[slice, slice, bool]]
) -> Attend | None:
    """The kernel that takes all calls: of rows of q and rows of k and v, causal or not. cuDNN's, else FlashAttention;
    None where neither takes them. Nothing is launched."""
    if q.device.type == "cpu":
        return _attend(_on_cpu)
    for takes, kernel in ((can_use_cudnn_attention, _by_cudnn), (can_use_flash_attention, _by_flash)):
        if all(takes(_described(q[:, mine], k[:, theirs], v[:, theirs], causal)) for mine, theirs, causal in calls):
            return _attend(kernel)
    return None


def _described(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> SDPAParams:
    return SDPAParams(*(x.transpose(1, 2) for x in (q, k, v)), None, 0.0, causal, q.shape[2] != k.shape[2])


def _attend(kernel: Callable[..., tuple[torch.Tensor, ...]]) -> Attend:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse = kernel(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2).contiguous(), lse.reshape(out.shape[:3]).contiguous()

    return attend
