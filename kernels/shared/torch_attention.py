"""torch's attention kernels by name, for callers that need or have the logarithms of the sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

aten = torch.ops.aten


def _cudnn(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)


def _cudnn_gradients(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    no, S, T = torch.empty(2, dtype=torch.int64, device=q.device), q.shape[2], k.shape[2]  # of dropout, not read
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None], no[0], no[1], None, None, None, S, T, 0.0, causal, scale=scale
    )


def _flash(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)


def _flash_gradients(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    no, S, T = torch.empty(2, dtype=torch.int64, device=q.device), q.shape[2], k.shape[2]  # of dropout, not read
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, S, T, 0.0, causal, no, no[:0], scale=scale
    )


def _cpu(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_gradients(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    shape, times = k.shape, q.shape[1] // k.shape[1]
    k, v = [x.repeat_interleave(times, 1) for x in (k, v)]
    dq, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, *[x.reshape(*shape[:2], times, *shape[2:]).float().sum(2).to(x.dtype) for x in others]


class Kernel(NamedTuple):
    """One of torch's. Tensors are (B, S, heads, D), a result is contiguous; logarithms are fp32 (B, heads, S)."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The result and its logarithms."""
        out, lse = self.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, scale)[:2]
        return out.transpose(1, 2).contiguous(), lse.reshape(out.shape[:3]).contiguous()

    def gradients(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, causal: bool, scale: float,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Of q, k and v. `out` and `lse` may be of more keys than these."""
        heads = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        found = self.backward(*heads, lse.contiguous(), causal, scale)
        return [x.transpose(1, 2).contiguous() for x in found]


CUDNN, FLASH, CPU = Kernel(_cudnn, _cudnn_gradients), Kernel(_flash, _flash_gradients), Kernel(_cpu, _cpu_gradients)


def kernel_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: Sequence[tuple[slice, slice, bool]]
) -> Kernel | None:
    """The kernel that takes all calls: of rows of q and rows of k and v, causal or not. cuDNN's, else FlashAttention;
    None where neither takes them, with gradients. Nothing is launched."""
    if q.device.type == "cpu":
        return CPU
    if q.shape[3] % 8:  # torch pads before it calls FlashAttention, and does not say so here
        return None
    described = [_described(q[:, mine], k[:, theirs], v[:, theirs], causal) for mine, theirs, causal in calls]
    if q.shape[3] <= _most_of_cudnn(q) and all(map(can_use_cudnn_attention, described)):
        return CUDNN
    return FLASH if all(map(can_use_flash_attention, described)) else None


def _most_of_cudnn(q: torch.Tensor) -> int:
    """The greatest D with which cuDNN is called: 256 on sm_90, where both passes were right, else 128."""
    return 256 if q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0) else 128


def _described(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> SDPAParams:
    heads = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    return SDPAParams(*heads, None, 0.0, causal, q.shape[2] != k.shape[2])
