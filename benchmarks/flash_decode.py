"""Benchmark of flash decode in bf16: keys of S positions for each sequence, of which every rank holds S / size.

    python -m benchmarks.flash_decode --ranks 1                   one GPU, which exchanges with itself alone
    python -m benchmarks.flash_decode --ranks 2 --sizes "B 1"     some cases
    python -m benchmarks.flash_decode --device cpu --quick        check in the simulator; time nothing

"SDPA alone" is torch's attention over this rank's keys in one contiguous tensor, in the backend that torch chooses. It
exchanges nothing, so its result is not checked. "SDPA + NCCL" gathers cuDNN's results and merges them with torch. The
variants of pkt have pages of 64 keys in random order. Those named "captured" are replayed. Every variant of a case runs
in the same job. Further settings than the default are there to be compared: bytes loaded at a time, loads on their way,
programs on an SM.

The numbers of the caches are half those of float8_e4m3fn. So the fp8 caches, with a scale of 0.5, hold the same keys
and values as those in bf16, and every variant computes the same.

B 1, heads 96/96: of a sequence 96 query heads and 96 KV heads, of 128 elements. latent: one KV head of 576 elements,
whose first 512 are its value, as in multi-head latent attention; torch's attention does not take it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._case import Case, captured, normal
from benchmarks._command import main
from pkt.kernels.flash_decode import flash_decode

TITLE = "Flash decode, bf16"
PAGE, D, LATENT = 64, 128, (576, 512)
SIZES = (
    (1, 96, 96, 32768), (1, 96, 96, 131072), (1, 64, 8, 131072), (16, 64, 8, 32768), (64, 64, 8, 8192),
    (1, 8, 1, 65536), (1, 128, 0, 32768), (64, 128, 0, 8192), (64, 16, 0, 8192),
)  # fmt: skip
"""B, heads, KV heads and S. 0 KV heads stand for one latent head."""
PLAIN: dict[str, dict[str, Any]] = {
    "pkt default": {},
    "pkt fused": {"mode": "fused"},
    "pkt waits": {"mode": "waits"},
    "pkt unfused": {"mode": "unfused"},
    "pkt nccl": {"mode": "nccl"},
    "pkt 64 keys, 2 stages": {"block": 64, "stages": 2},
    "pkt 32 keys, 6 stages": {"block": 32, "stages": 6},
    "pkt 128 keys, 2 stages, 8 warps": {"block": 128, "stages": 2, "warps": 8},
    "pkt 128 keys, 3 stages, 8 warps": {"block": 128, "stages": 3, "warps": 8},
    "pkt 64 keys, 3 stages, 2 an SM": {"block": 64, "stages": 3, "each": 2},
    "pkt 32 keys, 5 stages, 2 an SM": {"block": 32, "stages": 5, "each": 2},
    "pkt fp8 cache": {"fp8": True},
    "pkt fp8 cache, fused": {"fp8": True, "mode": "fused"},
    "pkt fp8 cache, waits": {"fp8": True, "mode": "waits"},
    "pkt fp8 cache, unfused": {"fp8": True, "mode": "unfused"},
    "pkt fp8 cache, nccl": {"fp8": True, "mode": "nccl"},
    "pkt fp8 cache, 128 keys, 2 an SM": {"fp8": True, "block": 128, "stages": 2, "each": 2},
    "pkt fp8 cache, 128 keys, 3 stages, 1 an SM": {"fp8": True, "block": 128, "stages": 3, "each": 1},
}
QUICK: dict[str, dict[str, Any]] = {
    "pkt default": {"block": 16, "stages": 1},
    "pkt waits": {"mode": "waits", "block": 16, "stages": 1},
    "pkt unfused": {"mode": "unfused", "block": 16, "stages": 1},
    "pkt fp8 cache": {"fp8": True, "block": 16, "stages": 1},
}
CAPTURED = {name: f"{name}, captured" for name in ("pkt default", "pkt fp8 cache")}
BASELINES = ("SDPA alone", "SDPA + NCCL", "SDPA + NCCL, captured")


def variants(device: str, quick: bool) -> list[str]:
    if device == "cpu":
        return list(QUICK)
    return [*BASELINES, *CAPTURED.values(), *PLAIN]


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    sizes = ((2, 4, 2, 192), (1, 4, 0, 192)) if quick else SIZES
    return {
        f"B {B}, heads {heads}/{kv or 'latent'}, S = {S}": {"B": B, "heads": heads, "kv_heads": kv, "S": S}
        for B, heads, kv, S in sizes
    }


def case(world: Any, B: int, heads: int, kv_heads: int, S: int) -> Case:
    size, device, latent = world.size, world.torch_device, kv_heads == 0
    n = S // size  # keys of a rank, in whole pages but for the last
    each = -(-n // PAGE)
    long, wide = LATENT if latent else (D, D)  # elements of a key, and of a value
    q = normal((B, 1, heads, long), 1, device)
    shape = B * each, PAGE, max(kv_heads, 1), long
    small = [normal(shape, 2 + 2 * world.rank + i, device, 2.0).to(torch.float8_e4m3fn) for i in range(2 - latent)]
    half = torch.full((1,), 0.5, dtype=torch.float32, device=device)
    whole = [cache.bfloat16() * half.bfloat16() for cache in small]
    random = torch.Generator(device=device).manual_seed(world.rank)
    table = torch.randperm(B * each, generator=random, device=device).int().view(B, each)
    lens = torch.full((B, 1), n, dtype=torch.int32, device=device)

    def run(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
        given = {name: value for name, value in options.items() if name not in ("each", "fp8")}
        if "each" in options:
            given["programs"] = options["each"] * world.num_sms
        if "fp8" in options:
            given |= {"k_scale": half} if latent else {"k_scale": half, "v_scale": half}
        if latent:
            given["v_dim"] = wide
        k, v = (*(small if "fp8" in options else whole), None)[:2]
        return lambda: flash_decode(q, k, v, table, lens, world=world, **given)[0]

    together = [_together(cache, table, n) for cache in whole]
    keys, values = together[0], together[-1][..., :wide]

    def exact() -> torch.Tensor:
        """From every rank's result over its keys in fp32, a KV head at a time."""
        out, lse = _in_fp32(q, keys, values)
        every = world.all_gather_object((out.cpu(), lse.cpu()))
        return _merged(torch.stack([o for o, _ in every]), torch.stack([one for _, one in every])).to(device)

    runs = {name: run(options) for name, options in (QUICK if device.type == "cpu" else PLAIN).items()}
    if device.type == "cuda":
        runs |= {} if latent else _baselines(q, keys, values, size)
        runs |= {name: captured(runs[plain]) for plain, name in CAPTURED.items()}
    return Case(
        nbytes=4.0 * (size - 1) * B * heads * (wide + 1),
        flops=2.0 * B * heads * n * (long + wide),
        variants=runs,
        exact=exact,
        scaled=None,
        unchecked=frozenset({"SDPA alone"}),
        optional=frozenset({"pkt nccl", "pkt fp8 cache, nccl"}),
        skipped=_skipped(latent) if device.type == "cuda" else {},
    )


def _skipped(latent: bool) -> dict[str, str]:
    """Why variants are left out."""
    if not latent:
        return dict.fromkeys(("pkt fused", "pkt fp8 cache, fused"), "the default")
    large = [name for name, options in PLAIN.items() if options.get("block") == 128 or "each" in options]
    return dict.fromkeys(BASELINES, "heads of 576 elements") | dict.fromkeys(large, "too large for an SM")


def _together(cache: torch.Tensor, table: torch.Tensor, n: int) -> torch.Tensor:
    """(B, KV heads, n, elements of a key), contiguous."""
    B, each = table.shape
    pages = cache[table.long().flatten()].view(B, each * PAGE, *cache.shape[2:])
    return pages[:, :n].transpose(1, 2).contiguous()


def _in_fp32(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, 1, heads, elements of a value), lse (B, 1, heads)) over these keys."""
    B, _, heads, long = q.shape
    x = q.view(B, keys.shape[1], heads // keys.shape[1], long).float()
    outs, sums = [], []
    for head in range(keys.shape[1]):
        score = x[:, head] @ keys[:, head].float().transpose(1, 2) * long**-0.5
        sums.append(torch.logsumexp(score, -1))
        outs.append(torch.softmax(score, -1) @ values[:, head].float())
    return torch.stack(outs, 1).view(B, 1, heads, -1), torch.stack(sums, 1).view(B, 1, heads)


def _merged(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Of (ranks, ...), over all their keys."""
    return (torch.softmax(lses, 0)[..., None] * outs.float()).sum(0)


def _baselines(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, size: int
) -> dict[str, Callable[[], torch.Tensor]]:
    import torch.distributed as dist

    B, _, heads, _ = q.shape
    x = q.transpose(1, 2).contiguous()  # (B, heads, 1, D)
    grouped = keys.shape[1] < heads
    # The rows of a KV head as query tokens of it: none is masked, and each key is read once.
    by_group = x.view(B, keys.shape[1], heads // keys.shape[1], D)
    everybodys = torch.empty(size, B, heads, D + 1, dtype=torch.float32, device=q.device)
    mine = torch.empty(B, heads, D + 1, dtype=torch.float32, device=q.device)

    def alone() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values, enable_gqa=grouped)

    def with_nccl() -> torch.Tensor:
        """cuDNN's operator, which returns the logarithm of the sums, too."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(by_group, keys, values, None, True)
        mine[..., :D] = out.reshape(B, heads, D)
        mine[..., D] = lse.reshape(B, heads)
        dist.all_gather_into_tensor(everybodys, mine)
        return _merged(everybodys[..., :D], everybodys[..., D]).bfloat16().view(B, 1, heads, D)

    return {"SDPA alone": alone, "SDPA + NCCL": with_nccl, "SDPA + NCCL, captured": captured(with_nccl)}


if __name__ == "__main__":
    sys.exit(main("flash_decode", TITLE))
