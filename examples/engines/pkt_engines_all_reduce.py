"""An all-reduce of pkt with the interface of CustomAllreduce, which vLLM and SGLang have in common.

Both engines ask `should_custom_ar(x)` for every all-reduce of a tensor-parallel group, and call
`custom_all_reduce(x)` if it says yes; else they take NCCL. `capture()` stands around the capture of CUDA graphs.
Looked at: vLLM's custom_all_reduce.py at commit 00d618aab604, SGLang's custom_all_reduce.py at 004e6561cb8a and
custom_all_reduce_v2.py at 08d6c0169a56. The tests run this on simulated ranks under fakes of the engines. It has not
run on GPUs, nor in an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import pkt

MAX_BYTES = 8 << 20
"""Larger tensors are left to NCCL, as the engines' own classes leave them."""
HEAP = "256MiB"
"""Symmetric memory of a rank: flagged words take 8 / 3 * ranks times the bytes of a tensor, other forms less."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
logger = logging.getLogger(__name__)


def open_world(group: Any) -> pkt.World:
    """A world of the ranks of a process group, of any backend: its store alone is used. Collective."""
    return pkt.init(heap=HEAP, group=group)


class PktAllReduce:
    """CustomAllreduce of one rank of a group."""

    open_world: Callable[[Any], pkt.World] = staticmethod(open_world)

    def __init__(self, group: Any, device: Any, max_size: int = MAX_BYTES, **unused: Any) -> None:
        """group: the engine's CPU group of the ranks. device: this process's GPU, already the current one. unused:
        keywords of some versions, about buffers that pkt has not. If the GPUs cannot reach each other, `disabled` stays
        True, and the engine takes NCCL."""
        self.disabled, self.max_size = True, max_size
        self.planned: set[Any] = set()
        try:
            self.world = self.open_world(group)
        except pkt.Unsupported as error:  # on every rank
            logger.warning("pkt's all-reduce is disabled: %s", error)
            return
        self.rank, self.world_size = self.world.rank, self.world.size
        self.disabled = self.world_size == 1

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether `custom_all_reduce` takes this tensor. Alike on all ranks, whose tensors are alike."""
        if self.disabled or inp.dtype not in DTYPES or not inp.is_contiguous():
            return False
        if not 0 < inp.nbytes <= self.max_size:
            return False
        # The first call with a shape makes buffers, which a capture may not. The engines warm up each shape first.
        return self._key(inp) in self.planned or not self._capturing()

    def custom_all_reduce(self, input: torch.Tensor, override_algo: Any = None) -> torch.Tensor | None:
        """The sum in a new tensor; None where `should_custom_ar` says no. Warm-ups run it, too, which plans shapes."""
        if override_algo is not None:
            found, remedy = f"found override_algo={override_algo}", "leave it away: pkt chooses the form by size"
            raise pkt.Unsupported(f"rank {self.rank}: PktAllReduce: {found}: {remedy}")
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False
    ) -> torch.Tensor:
        """The sum, in `out` or a new tensor. registered: without meaning here, because pkt moves inp by itself."""
        out = torch.empty_like(inp) if out is None else out
        self.planned.add(self._key(inp))
        with torch.no_grad():
            return pkt.all_reduce(inp, out, world=self.world)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around a capture. Nothing is registered: a graph holds addresses of the world's heap, which stay."""
        yield

    def register_graph_buffers(self) -> None:
        """Nothing to do, as in `capture`."""

    def finalize_p2p(self) -> None:
        """Nothing to do: pkt.init has tried the links."""

    def close(self) -> None:
        """End the world. Graphs that were captured before must not run again. Collective."""
        if not self.disabled:
            self.disabled = True
            self.world.close()

    def _key(self, inp: torch.Tensor) -> Any:
        """What a plan of pkt depends on."""
        return tuple(inp.shape), inp.dtype, inp.data_ptr() % 16

    def _capturing(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
