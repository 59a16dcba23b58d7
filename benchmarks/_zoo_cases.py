"""The tensor-parallel products of published models, as cases of benchmarks/zoo.py.

A column-parallel product (qkv, gate_up; q_b and kv_b of DeepSeek's attention) follows an all-gather of its rows. A
row-parallel product (o, down) comes before a reduce-scatter or an all-reduce. Routed experts are not among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

TOKENS = (*(1 << i for i in range(15)), 3, 66, 514, 1500, 7000)
COLUMN, ROW = ("all_gather_matmul",), ("matmul_reduce_scatter", "matmul_all_reduce")
SHORT = {"all_gather_matmul": "AG+GEMM", "matmul_reduce_scatter": "GEMM+RS", "matmul_all_reduce": "GEMM+AR"}
LAYOUTS = ("row-major", "transposed")
"""How the weights are stored: (K, N), or (N, K) as in a Linear, of which the operator gets the transposed view."""
SEED = 20261123  # of the order of the cases


@dataclass(frozen=True)
class Model:
    """Published dimensions. intermediate: of the dense MLP; 0 if every layer has experts. q_lora, kv_lora, rope: of
    DeepSeek's latent attention, where head_dim is that of a head's value and of the part of its key without rope."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope: int = 0

    def products(self, ranks: int) -> dict[str, tuple[tuple[str, ...], int, int]]:
        """Name -> operators, N and K of the product that each rank computes. Products whose heads or columns the ranks
        cannot share are left out. A rank has at least one head of keys and values, as in engines."""
        found: dict[str, tuple[tuple[str, ...], int, int]] = {}
        heads = self.heads // ranks
        if self.heads % ranks == 0:
            if self.q_lora:
                found["q_b"] = (COLUMN, heads * (self.head_dim + self.rope), self.q_lora)
                found["kv_b"] = (COLUMN, heads * 2 * self.head_dim, self.kv_lora)
            else:
                kv_heads = max(1, self.kv_heads // ranks)
                found["qkv"] = (COLUMN, (heads + 2 * kv_heads) * self.head_dim, self.hidden)
            found["o"] = (ROW, self.hidden, heads * self.head_dim)
        if self.intermediate and self.intermediate % ranks == 0:
            found["gate_up"] = (COLUMN, 2 * self.intermediate // ranks, self.hidden)
            found["down"] = (ROW, self.hidden, self.intermediate // ranks)
        return found


MODELS = {
    "Llama 3 8B": Model(4096, 32, 8, 128, 14336),
    "Llama 3 70B": Model(8192, 64, 8, 128, 28672),
    "Llama 3 405B": Model(16384, 128, 8, 128, 53248),
    "Qwen3 32B": Model(5120, 64, 8, 128, 25600),
    "Qwen3 235B-A22B": Model(4096, 64, 4, 128),
    "Mixtral 8x22B": Model(6144, 48, 8, 128),
    "GPT-OSS 120B": Model(2880, 64, 8, 64),
    "DeepSeek V3": Model(7168, 128, 128, 128, 18432, q_lora=1536, kv_lora=512, rope=64),
}
TINY = {"Tiny": Model(32, 8, 2, 8, 48), "Tiny latent": Model(48, 8, 8, 8, 0, q_lora=32, kv_lora=16, rope=8)}
"""For the simulator."""


@dataclass
class ZooCase:
    """One product. M, N, K: of the product that each rank computes, the tuner's key. tokens: the numbers of tokens that
    have this M: the rows that ranks share (all-gather, reduce-scatter) are padded to a multiple of the ranks."""

    operator: str
    M: int
    N: int
    K: int
    size: int
    layout: str
    tokens: list[int] = field(default_factory=list)
    products: list[str] = field(default_factory=list)  # "model product" of every model that has it

    @property
    def key(self) -> tuple[str, int, int, int, int, str]:
        return self.operator, self.M, self.N, self.K, self.size, self.layout

    @property
    def label(self) -> str:
        """Such as "AG+GEMM, 16 x 4096 x 14336, transposed: Llama 3 8B gate_up" (M x K x N)."""
        shape = f"{self.M} x {self.K} x {self.N}"
        return f"{SHORT[self.operator]}, {shape}, {self.layout}: {', '.join(self.products)}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def cases(ranks: int, models: dict[str, Model] | None = None, tokens: Iterable[int] = TOKENS) -> list[ZooCase]:
    """Every product once, with the models that have it, in an order that the seed decides."""
    found: dict[tuple, ZooCase] = {}
    for name, model in (MODELS if models is None else models).items():
        for product, (operators, N, K) in model.products(ranks).items():
            for operator in operators:
                for count in sorted(tokens):
                    M = count if operator == "matmul_all_reduce" else -(-count // ranks) * ranks
                    for layout in LAYOUTS:
                        case = ZooCase(operator, M, N, K, ranks, layout)
                        case = found.setdefault(case.key, case)
                        case.tokens = sorted({*case.tokens, count})
                        case.products = list(dict.fromkeys([*case.products, f"{name} {product}"]))
    return random.Random(SEED).sample(list(found.values()), len(found))


def sent(operator: str, M: int, N: int, K: int, ranks: int) -> float:
    """The least number of bytes that leave a GPU in bf16."""
    whole = {"all_gather_matmul": M * K, "matmul_reduce_scatter": M * N, "matmul_all_reduce": 2 * M * N}[operator]
    return 2 * whole * (ranks - 1) / ranks


def piece(every: list[ZooCase], which: int, of: int) -> list[ZooCase]:
    """Piece `which`, from 1, of `of` pieces, each a sample of all cases."""
    return every[which - 1 :: of]
