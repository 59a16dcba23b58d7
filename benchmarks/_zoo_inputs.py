"""The operands of a case of benchmarks/zoo.py on one rank, its exact result, and the runs of its variants."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import pkt
from benchmarks import _cublasmp
from benchmarks._case import normal
from benchmarks._process_group import group_name, torch_symmetric
from benchmarks._zoo_cases import ZooCase
from pkt.errors import Unsupported
from pkt.kernels.operator import operators

Run = Callable[[torch.Tensor], torch.Tensor]
"""The result for weights."""
CALLS = 16  # most calls of a loop, so most copies of the weights
COLD = 128 << 20  # bytes of weights that a loop goes through, if CALLS copies are enough for it
CHECKED = 512  # rows whose result is compared with fp32: some of every tile
ONE_SHOT = 4 << 20  # bytes of the largest result that torch's one-shot all-reduce sums
PLAIN_ROWS = 1024  # above so many rows, forms in plain Triton are left out
DEFAULT, NCCL, FUSED = "pkt default", "NCCL + cuBLAS", "torch symm_mem fused"
ALONE = "cuBLAS alone"
"""The product without its collective: a limit, not a baseline."""


def variants(operator: str, cuda: bool, forms: str = "", M: int = 0) -> dict[str, dict[str, Any]]:
    """Variant of pkt -> keywords of the operator. forms: names of the forms to time besides the default; every form
    where empty. Forms in plain Triton are timed up to PLAIN_ROWS rows."""
    found: dict[str, dict[str, Any]] = {DEFAULT: {}} if cuda else {}
    for mode, form in operators()[operator].forms.items():
        plain = not form.gpu and "tiles" in form.settings
        wanted = (not forms or mode in forms.split(",")) and not (plain and M > PLAIN_ROWS)
        if wanted and (cuda or (not form.gpu and mode != "nccl")):
            found[f"pkt {mode}"] = {"mode": mode} | ({} if cuda else dict(form.small))
    return found


class Pool:
    """Buffers of random numbers that all cases share; a tensor is a view of one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}
        self.shared: list[torch.Tensor] = []  # in torch's symmetric memory

    def take(self, name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        """A tensor in the buffer `name`: normal numbers, until something is written there."""
        count = shape[0] * shape[1]
        if name not in self.buffers or self.buffers[name].numel() < count:
            self.buffers.pop(name, None)
            self.buffers[name] = normal((count,), seed, self.device)
        return self.buffers[name][:count].view(*shape)

    def symmetric(self, count: int) -> torch.Tensor:
        """So many numbers in torch's symmetric memory. Collective."""
        if not self.shared or self.shared[0].numel() < count:
            like = torch.empty(max(count, 1 << 24), dtype=torch.bfloat16, device=self.device)
            self.shared[:] = [torch_symmetric(like)]
        return self.shared[0][:count]


class Inputs:
    """The operands of a case and the runs of its variants. a, b: views of the pool."""

    def __init__(self, world: Any, case: ZooCase, pool: Pool) -> None:
        self.world, self.case, self.pool, W = world, case, pool, world.size
        self.cuda = world.torch_device.type == "cuda"
        gathers, scatters = case.operator == "all_gather_matmul", case.operator == "matmul_reduce_scatter"
        self.a = pool.take("a", (case.M // W if gathers else case.M, case.K), world.rank)
        self.rows = case.M // W if scatters else case.M
        nbytes = 2 * case.K * case.N
        count = max(1, min(CALLS, -(-COLD // nbytes))) if self.cuda else 1
        transposed = case.layout == "transposed"
        shape = (case.N, case.K) if transposed else (case.K, case.N)
        every = pool.take("b", (count * shape[0], shape[1]), 100 + world.rank).view(count, *shape)
        self.stored = list(every)
        self.copies = [w.t() if transposed else w for w in self.stored]
        self.out = pool.take("out", (self.rows, case.N))
        each = case.M if case.operator == "matmul_all_reduce" else case.M // W
        step = max(1, each // (CHECKED if case.operator == "matmul_all_reduce" else max(1, CHECKED // W)))
        offset = random.Random(each).randrange(step)
        self.sample = torch.arange(offset, each, step, device=pool.device)  # in every rank's rows, or in all rows
        self.mp: Any = None
        self.factor = 1.0

    def mul_(self, factor: float) -> None:
        """Multiply the input, wherever variants keep it."""
        self.factor *= factor
        self.a.mul_(factor)
        if self.mp is not None:
            self.mp.a.copy_(self.a)

    def restore(self) -> None:
        """Undo a multiplication that a failed check left."""
        if self.factor != 1:
            self.mul_(1 / self.factor)

    def checked(self, run: Run, b: torch.Tensor) -> torch.Tensor:
        """The rows of a run's result that are compared with the exact one."""
        result = run(b)
        plain = result.plain() if isinstance(result, pkt.SymmetricTensor) else result
        if self.case.operator != "all_gather_matmul":
            return plain.index_select(0, self.sample)
        return plain.view(self.world.size, -1, self.case.N).index_select(1, self.sample).flatten(0, 1)

    def exact(self) -> torch.Tensor:
        """Those rows in fp32. Collective."""
        world, b = self.world, self.copies[0].float()
        if self.case.operator == "all_gather_matmul":
            return torch.cat(self._from_all(self.a.index_select(0, self.sample))).float() @ b
        at = self.sample
        if self.case.operator == "matmul_reduce_scatter":
            m = self.case.M // world.size
            at = torch.cat([rank * m + self.sample for rank in range(world.size)])
        total = torch.stack(self._from_all(self.a.index_select(0, at).float() @ b)).sum(0)
        if self.case.operator == "matmul_all_reduce":
            return total
        return total.view(world.size, -1, self.case.N)[world.rank].clone()

    def _from_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        if not self.cuda:
            return [each.clone() for each in self.world.all_gather_object(x)]
        every = [torch.empty_like(x) for _ in range(self.world.size)]
        torch.distributed.all_gather(every, x.contiguous())
        return every

    # ------------------------------------------------------------------------------------------------------ variants
    def pkt_runs(self, forms: str) -> dict[str, Run]:
        """pkt's default and its forms, with ordinary tensors."""
        function = operators()[self.case.operator].function
        a, out, world = self.a, self.out, self.world

        def runs_with(given: dict[str, Any]) -> Run:
            return lambda b: function(a, b, out, world=world, **given)

        every = variants(self.case.operator, self.cuda, forms, self.case.M)
        return {name: runs_with(given) for name, given in every.items()}

    def baselines(self) -> dict[str, Run]:
        """cuBLAS alone, and beside NCCL and torch."""
        import torch.distributed as dist

        case, a, out, pool = self.case, self.a, self.out, self.pool
        symm = torch.ops.symm_mem
        if case.operator == "all_gather_matmul":
            gathered = pool.take("gathered", (case.M, case.K))

            def gather(b: torch.Tensor) -> torch.Tensor:
                dist.all_gather_into_tensor(gathered, a)
                return torch.mm(gathered, b, out=out)

            return {
                ALONE: lambda b: torch.mm(gathered, b, out=out),
                NCCL: gather,
                FUSED: lambda b: symm.fused_all_gather_matmul(a, [b], 0, group_name())[1][0],
            }
        if case.operator == "matmul_reduce_scatter":
            product = pool.take("product", (case.M, case.N))

            def scatter(b: torch.Tensor) -> torch.Tensor:
                torch.mm(a, b, out=product)
                dist.reduce_scatter_tensor(out, product)
                return out

            return {
                ALONE: lambda b: torch.mm(a, b, out=product),
                NCCL: scatter,
                FUSED: lambda b: symm.fused_matmul_reduce_scatter(a, b, "sum", 0, group_name()),
            }

        def reduce(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=out)
            dist.all_reduce(out)
            return out

        summed = pool.symmetric(case.M * case.N).view(case.M, case.N)

        def one_shot(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=summed)
            return symm.one_shot_all_reduce(summed, "sum", group_name())

        def two_shot(b: torch.Tensor) -> torch.Tensor:
            torch.mm(a, b, out=summed)
            return symm.two_shot_all_reduce_(summed, "sum", group_name())

        found: dict[str, Run] = {
            ALONE: lambda b: torch.mm(a, b, out=out),
            NCCL: reduce,
            "cuBLAS + torch two-shot": two_shot,
        }
        if 2 * case.M * case.N <= ONE_SHOT:
            found["cuBLAS + torch one-shot"] = one_shot
        return found

    def cublasmp(self, handle: _cublasmp.CuBLASMp, skipped: dict[str, str]) -> dict[str, Run]:
        """cuBLASMp's algorithms that take the case; why the others do not is added to `skipped`. Collective."""
        case, found = self.case, dict[str, Run]()
        self.mp = handle.product(case.operator, case.M, case.N, case.K, case.layout == "transposed")
        self.mp.a.copy_(self.a)
        for name, number in _cublasmp.ALGORITHMS.items():
            try:
                found[name] = self.mp.algorithm(number, self.stored[0])
            except Unsupported as unfit:
                skipped[name] = str(unfit)
        return found

    def close(self) -> None:
        """Give cuBLASMp's memory back. Collective."""
        if self.mp is not None:
            self.mp.free()
            self.mp = None
