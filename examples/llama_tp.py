"""A Llama with random weights, tensor-parallel by torch's own plans: prefill, decode, and a step of training.

    torchrun --nproc-per-node 2 examples/llama_tp.py     Llama 3 8B's shape on 2 GPUs, beside the same model on NCCL
    python examples/llama_tp.py                          a tiny one on 2 simulated ranks, with no GPU

The model is ordinary torch. `pkt.parallelize` puts it on pkt's operators; torch's `parallelize_module`, with the same
plans, on NCCL. SERVING keeps all tokens on every rank (GEMM + all-reduce), TRAINING splits the sequence between blocks
(all-gather + GEMM, GEMM + reduce-scatter). It has run on 1 and 2 GPUs.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional

import pkt


class Shape(NamedTuple):
    vocabulary: int
    features: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int


SHAPES = {"8b": Shape(128256, 4096, 32, 32, 8, 14336), "tiny": Shape(64, 32, 2, 4, 2, 48)}


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, tokens, head) with its positions (tokens,) in."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 500000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.features // shape.heads
        self.wq, self.wo = (nn.Linear(shape.features, shape.features, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(shape.features, shape.kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, positions), rotated(k, positions)
        seen = None
        if cache is not None:
            for kept, new in zip(cache, (k, v)):
                kept.index_copy_(2, positions, new)
            if tokens == 1:  # decoding: the token sees all that is kept; a prompt sees itself
                k, v = cache
                seen = torch.arange(k.shape[2], device=x.device) <= positions[:, None]
        y = functional.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.features, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.features), nn.RMSNorm(shape.features)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.features)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.output = nn.RMSNorm(shape.features), nn.Linear(shape.features, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, caches: Any = None) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens) at positions (tokens,); with caches of keys and
        values, by block, of the last token alone."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, positions, cache)
        return self.output(self.norm(x if caches is None else x[:, -1:]))


def serving() -> dict[str, Any]:
    """All tokens on every rank."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(),
        "blocks.*.feed_forward.w[13]": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def training() -> dict[str, Any]:
    """A part of the sequence on each rank, but inside attention and feed-forward."""
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    gather_first = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**gather_first),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.ffn_norm": SequenceParallel(),
        "blocks.*.feed_forward": PrepareModuleInput(**gather),
        "blocks.*.feed_forward.w[13]": ColwiseParallel(),
        "blocks.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Stack(NamedTuple):
    """What makes a model parallel: pkt and a world, or torch and a mesh over NCCL."""

    name: str
    parallelize: Callable[..., nn.Module]
    mesh: Any
    device: torch.device

    def model(self, shape: Shape, plan: dict[str, Any]) -> nn.Module:
        """The same random weights on every rank, in parts."""
        torch.manual_seed(0)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with self.device:
            whole = Llama(shape).to(dtype)
        return self.parallelize(whole, self.mesh, plan, src_data_rank=None)


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    """Of the next token. data: (batch, tokens + 1), the same on every rank."""
    positions = torch.arange(data.shape[1] - 1, device=data.device)
    logits = model(data[:, :-1].contiguous(), positions)
    return functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())


def train(stack: Stack, shape: Shape, data: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step of training, which returns the loss."""
    model = stack.model(shape, training())
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        loss = loss_of(model, data)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss.detach()

    return step


@torch.no_grad()
def serve(stack: Stack, shape: Shape, prompt: torch.Tensor, ranks: int, room: int) -> tuple[Any, Any]:
    """(prefill, decode) of a batch of prompts. decode appends one token to each, and returns the tokens; on a GPU it is
    a CUDA graph. room: positions in the cache beyond the prompt."""
    model = stack.model(shape, serving())
    batch, length = prompt.shape
    kept = (batch, shape.kv_heads // ranks, length + room, shape.features // shape.heads)
    like = {"device": stack.device, "dtype": next(model.parameters()).dtype}
    caches = [(torch.zeros(kept, **like), torch.zeros(kept, **like)) for _ in range(shape.layers)]
    tokens, position = prompt[:, :1].clone(), torch.tensor([length], device=stack.device)
    positions = torch.arange(length, device=stack.device)

    @torch.no_grad()
    def run(given: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        tokens.copy_(model(given, at, caches).argmax(-1))
        position.copy_(at[-1:] + 1)
        return tokens

    prefill, decode = functools.partial(run, prompt, positions), functools.partial(run, tokens, position)
    prefill()
    if stack.device.type == "cpu":
        return prefill, decode
    decode()  # a first call allocates, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    return prefill, lambda: graph.replay() or tokens


def speed(world: Any, run: Callable[[], Any], tokens: int, repeats: int) -> float:
    """Tokens a second of the slowest rank, behind one call that warms up."""
    run()
    world.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    world.synchronize()
    return repeats * tokens / max(world.all_gather_object(time.perf_counter() - begin))


def main(world: Any, shape: Shape, length: int, batch: int, repeats: int, stacks: Any = None) -> dict[str, list[float]]:
    """By job: tokens a second of each stack, and at the end the losses of the first step."""
    device = world.torch_device
    stacks = stacks or [Stack("pkt", pkt.parallelize, world, device)]
    generator = torch.Generator().manual_seed(1)
    drawn = functools.partial(torch.randint, shape.vocabulary, generator=generator, device="cpu")
    data, prompt = drawn((1, length + 1)).to(device), drawn((batch, length // batch)).to(device)
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "training": [], "loss": []}
    for stack in stacks:
        prefill, decode = serve(stack, shape, prompt, world.size, room=2 * repeats + 4)
        found["prefill"].append(speed(world, prefill, prompt.numel(), repeats))
        found["decode"].append(speed(world, decode, batch, repeats))
        del prefill, decode
        step = train(stack, shape, data)
        found["loss"].append(step().item())
        found["training"].append(speed(world, step, length, repeats))
        del step
    if world.rank == 0:
        where = "simulated, which says nothing of a GPU" if device.type == "cpu" else torch.cuda.get_device_name()
        print(f"tokens a second on {world.size} ranks ({where}): {', '.join(stack.name for stack in stacks)}")
        for job, values in found.items():
            print(f"  {job:9}", *(f"{value:12.4f}" if job == "loss" else f"{value:12.1f}" for value in values))
    return found


if __name__ == "__main__":
    on_gpus = "RANK" in os.environ  # torchrun
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b" if on_gpus else "tiny")
    for name, on_gpu, simulated, text in (
        ("--layers", None, None, "of the shape's own where not given"),
        ("--length", 4096, 16, "tokens of a prefill and of a step"),
        ("--batch", 16, 2, "sequences that are decoded"),
        ("--repeats", 10, 1, "of each job"),
        ("--ranks", None, 2, "of the simulator"),
    ):
        parser.add_argument(name, type=int, default=on_gpu if on_gpus else simulated, help=text)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    arguments = (shape._replace(layers=given.layers or shape.layers), given.length, given.batch, given.repeats)
    if not on_gpus:
        pkt.launch(main, given.ranks, device="cpu", args=arguments)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        mesh = torch.distributed.init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        with pkt.init(heap="4GiB") as world:
            both = [("pkt", pkt.parallelize, world), ("NCCL", torchs.parallelize_module, mesh)]
            main(world, *arguments, [Stack(*stack, world.torch_device) for stack in both])
        torch.distributed.destroy_process_group()
