"""torch's process group and symmetric memory for the baselines, with multicast off in torch and in pkt."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch

from pkt.errors import Unsupported

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
ENVIRONMENT = OFF | {"PKT_DISABLE_MULTICAST": "1"}


def prepare(world: Any) -> None:
    """Set the allocator for descriptors that kernels make, and make a process group that is kept between jobs."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem  # its import registers the fused operators
    import triton

    for name, value in ENVIRONMENT.items():
        if os.environ.get(name) != value:
            raise Unsupported.here(
                "benchmarks", f"found {name}={os.environ.get(name)!r}", f"wanted {value!r}: no multicast"
            )
    torch.cuda.set_device(world.torch_device)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = world.broadcast(probe.getsockname()[1])
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size,
            device_id=world.torch_device,
        )  # fmt: skip
        with contextlib.suppress(AttributeError), warnings.catch_warnings():  # newer versions need no such call
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(group_name())


def group_name() -> Any:
    """The process group's name, for torch.ops.symm_mem."""
    import torch.distributed as dist

    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def torch_symmetric(like: torch.Tensor) -> torch.Tensor:
    """A tensor in torch's symmetric memory, after the ranks have exchanged addresses. Collective."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    tensor = symm_mem.empty(*like.shape, dtype=like.dtype, device=like.device)
    symm_mem.rendezvous(tensor, dist.group.WORLD)  # type: ignore[arg-type]
    return tensor


def torch_copies(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that copies `x` into torch's symmetric memory, which it allocates in its first call. Collective."""
    made: list[torch.Tensor] = []

    def copied() -> torch.Tensor:
        if not made:
            made.append(torch_symmetric(x))
        return made[0].copy_(x)

    return copied
