"""Attention, and products with an exchange of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import pkt
from pkt.errors import DtypeError, ShapeError, Unsupported

from .tried import COUNT, HUGE, NO_FLAG, NO_INTEGER, NO_NUMBER, Bad, Tried, int32


# -------------------------------------------------------------------------------------------------------- flash_decode
def _decode() -> dict[str, Any]:
    return {
        "q": torch.ones(2, 1, 4, 16), "k_cache": torch.ones(3, 4, 2, 16), "v_cache": torch.ones(3, 4, 2, 16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, 1, dtype=torch.int32),
        "sinks": None, "out": None, "k_scale": None, "v_scale": None,
    }  # fmt: skip


def _decode_wrong() -> Bad:
    q, cache = torch.ones(2, 1, 4, 16), torch.ones(3, 4, 2, 16)
    turned = torch.ones(3, 16, 2, 4).transpose(1, 3)
    return {
        "v_dim v_cache": {ShapeError: ((0, None), (17, None), (1 << 40, None))},
        "q": {
            ShapeError: (q[0], q[:, :, :3], q[..., None]),
            DtypeError: (None, q.int(), q.double()),
        },
        "k_cache": {
            ShapeError: (cache[0], cache[..., :8], turned),
            DtypeError: (None, cache.half(), cache.int(), cache.to(torch.float8_e4m3fn)),
        },
        "v_cache": {
            ShapeError: (cache[0], cache[:2], cache[:, :3], cache[:, :, :1], turned),
            DtypeError: (cache.half(), cache.int(), cache.to(torch.float8_e5m2)),
        },
        "v_scale v_cache": {ShapeError: ((torch.ones(2), None),)},
        "k_scale": {
            ShapeError: (torch.ones(3), torch.ones(1, 1), torch.ones(0)),
            DtypeError: (2.0, torch.ones(2).half(), torch.ones(2, dtype=torch.float64)),
        },
        "v_scale": {ShapeError: (torch.ones(4),), DtypeError: (torch.ones(2).half(),)},
        "block_table": {
            ShapeError: (int32(0, 1), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2, 1, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2)),
        },
        "seq_lens": {
            ShapeError: (int32(0, 1), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)),
        },
        "sinks": {
            ShapeError: (torch.ones(3), torch.ones(4, 1)),
            DtypeError: (torch.ones(4).half(), torch.ones(4).int()),
        },
        "out": {ShapeError: (q[..., :8], q[0], q[:, :, :3]), DtypeError: (q.half(),)},
        "v_dim": {ShapeError: (0, -1, 16, *HUGE), DtypeError: NO_INTEGER},
        "scale": {ShapeError: (float("nan"), float("inf"), -float("inf")), DtypeError: NO_NUMBER},
        "soft_cap": {ShapeError: (0, -1.0, float("nan"), float("inf")), DtypeError: NO_NUMBER},
        "block": {ShapeError: (0, -1, 3, 8, 1 << 21, *HUGE), DtypeError: NO_INTEGER},
        "stages": {ShapeError: (0, -1, 17, *HUGE), DtypeError: NO_INTEGER},
        "warps": {ShapeError: (0, -1, 3, 32, *HUGE), DtypeError: NO_INTEGER},
        "programs": {**COUNT, ShapeError: (0, -1, 3, *HUGE)},  # of 2 SMs
    }


def _decode_differ() -> Mapping[str, tuple[Any, Any]]:
    return {
        "scale": (0.5, 0.6), "soft_cap": (1.0, 2.0), "block": (32, 64), "stages": (1, 4), "warps": (1, 2),
        "programs": (1, 2),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ ring_attention
def _ring() -> dict[str, Any]:
    return {**{name: torch.ones(1, 4, 2, 8) for name in ("q", "k", "v")}, "out": None, "cu_seqlens": None}


def _ring_wrong() -> Bad:
    x = torch.ones(1, 4, 2, 8)
    return {
        "q": {
            ShapeError: (x[0], x[..., None], torch.ones(1, 4, 2, 257)),
            DtypeError: (None, x.int(), x.double()),
        },
        "k": {
            ShapeError: (x[0], x[:, :3], x[..., :4], torch.ones(1, 4, 3, 8), torch.ones(2, 4, 2, 8)),
            DtypeError: (None, x.half(), x.int()),
        },
        "v": {ShapeError: (x[0], x[:, :3], x[..., :4], x[:, :, :1]), DtypeError: (None, x.half(), x.int())},
        "out": {ShapeError: (x[0], x[:, :3], x[..., :4]), DtypeError: (x.half(),)},
        "cu_seqlens q k v": {
            ShapeError: ((int32(), *3 * [x[0]]), (int32(0, 4)[None], *3 * [x[0]])),
            DtypeError: ((torch.tensor([0, 4]), *3 * [x[0]]), (torch.tensor([0.0, 4.0]), *3 * [x[0]])),
        },
        "length cu_seqlens q k v": {ShapeError: ((4, int32(0, 4), *3 * [x[0]]),)},
        "q cu_seqlens": {ShapeError: ((x, int32(0, 4)),)},
        "causal": {DtypeError: NO_FLAG},
        "return_lse": {DtypeError: NO_FLAG},
        "layout": {Unsupported: ("", "ring", 3, None, ["zigzag"])},
        "scale": {ShapeError: (0, -1.0, float("nan"), float("inf")), DtypeError: NO_NUMBER},
        "window": {
            ShapeError: ((-2, 0), (0, -2), (1 << 40, 0)),
            DtypeError: (3, "ab", b"ab", (1,), (1, 2, 3), (1.5, 2), ("1", 2), {1: 2}, (None, 1)),
        },
        "length": {ShapeError: (-1, 9, *HUGE), DtypeError: NO_INTEGER},
        "num_comm_sms": COUNT,
        "chunk": COUNT,
        "tiles": {
            ShapeError: ((16,), (16, 8), (0, 16), (17, 16), (16, 16, 3), (16, 16, 4, 0), (16, 16, 4, 17), (512, 16)),
            DtypeError: (16, "16", (16, 2.5), (16, "16"), {16: 16}, (16, None)),
        },
    }


def _ring_differ() -> Mapping[str, tuple[Any, Any]]:
    return {
        "scale": (0.5, 0.6), "window": ((1, 0), (1, 1)), "length": (6, 7), "mode": ("copy", "unfused"),
        "chunk": (16, 32), "num_comm_sms": (1, 2), "tiles": ((16, 16), (16, 32)),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- ulysses_attention
def _ulysses_wrong() -> Bad:
    """As ring_attention's where the names are the same; and heads that two ranks do not divide."""
    alike = {n: v for n, v in _ring_wrong().items() if not {"length", "layout", "return_lse"} & set(n.split())}
    return {**alike, "q k v": {ShapeError: (3 * (torch.ones(1, 4, 3, 8),),)}, "heads": COUNT}


def _ulysses_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"scale": (0.5, 0.6), "window": ((1, 0), (1, 1))}


# ---------------------------------------------------------------------------------------------- products with exchanges
def _to_heads() -> dict[str, Any]:
    turned = {"norm": None, "cos": None, "sin": None}
    return {"x": torch.ones(1, 3, 8), "weight": torch.ones(8, 4, 2), "out": None, "bias": None, **turned}


def _to_heads_wrong() -> Bad:
    x, weight, norm, angles = torch.ones(1, 3, 8), torch.ones(8, 4, 2), torch.ones(4, 2), torch.ones(3, 1)
    return {
        "norm qk_heads": {
            ShapeError: ((norm, None), (norm[:2], 1), (torch.ones(4, 3), 1)),
            DtypeError: ((norm.half(), 1),),
        },
        "qk_heads norm": {ShapeError: ((3, norm), (None, norm))},
        "cos sin qk_heads": {
            ShapeError: ((angles, angles, None), (angles, None, 1), (angles[:2], angles, 1)),
            DtypeError: ((angles.half(), angles, 1),),
        },
        "sin cos qk_heads": {
            ShapeError: ((torch.ones(3, 2), angles, 1), (angles, None, 1)),
            DtypeError: ((angles.double(), angles, 1),),
        },
        "qk_heads": COUNT,
        "eps": {ShapeError: (0.0, -1.0, float("nan"), float("inf")), DtypeError: NO_NUMBER},
        "x": {ShapeError: (x[0], torch.ones(1, 3, 8, 1)), DtypeError: (None, x.int(), x.double())},
        "weight": {
            ShapeError: (weight[0], weight[:7], weight[:, :3], weight[:, :1], weight.flatten(1)),
            DtypeError: (None, weight.half(), weight.int()),
        },
        "bias": {
            ShapeError: (torch.ones(8), torch.ones(2, 2), torch.ones(4, 3), torch.ones(3, 2)),
            DtypeError: (torch.ones(4, 2).half(), torch.ones(4, 2).int()),
        },
        "out": {
            ShapeError: (torch.ones(1, 3, 2, 2), torch.ones(1, 6, 4, 2), torch.ones(1, 6, 4)),
            DtypeError: (torch.ones(1, 6, 2, 2).half(),),
        },
        "tiles": _TILES_WRONG,
    }


_TILES_WRONG = {
    ShapeError: ((16, 16), (0, 16, 16), (17, 16, 16), (16, 16, 8), (16,) * 8, (16, 16, 16, 0), (16, 16, 16, 8, 3)),
    DtypeError: (16, "16", b"16", (16, 16, 2.5), (16, 16, "16"), (16, 16, None), {16: 16}),
}


def _to_heads_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"x": (torch.ones(1, 4, 8), torch.ones(1, 5, 8))}


def _from_heads() -> dict[str, Any]:
    return {"x": torch.ones(1, 6, 2, 2), "weight": torch.ones(4, 2, 5), "out": None, "bias": None}


def _from_heads_wrong() -> Bad:
    x, weight, bias = torch.ones(1, 6, 2, 2), torch.ones(4, 2, 5), torch.ones(5)
    return {
        "x": {
            ShapeError: (x[0], x[:, :5], x.flatten(2), torch.ones(1, 6, 2, 2, 1)),
            DtypeError: (None, x.int(), x.double()),
        },
        "weight": {
            ShapeError: (weight[0], weight[:2], weight[:3], weight[:, :1], weight.flatten(0, 1)),
            DtypeError: (None, weight.half(), weight.int()),
        },
        "bias": {ShapeError: (bias[:4], torch.ones(1, 5)), DtypeError: (bias.half(), bias.int())},
        "out": {
            ShapeError: (torch.ones(1, 6, 5), torch.ones(1, 3, 4), torch.ones(3, 5)),
            DtypeError: (torch.ones(1, 3, 5).half(),),
        },
        "num_comm_sms": COUNT,
        "chunk": COUNT,
        "tiles": _TILES_WRONG,
    }


def _from_heads_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"x": (torch.ones(1, 8, 2, 2), torch.ones(2, 8, 2, 2))}


ATTENTION = (
    Tried(pkt.flash_decode, _decode, _decode_wrong, _decode_differ),
    Tried(pkt.ring_attention, _ring, _ring_wrong, _ring_differ),
    Tried(pkt.ulysses_attention, _ring, _ulysses_wrong, _ulysses_differ),
    Tried(pkt.matmul_all_to_all, _to_heads, _to_heads_wrong, _to_heads_differ),
    Tried(pkt.all_to_all_matmul, _from_heads, _from_heads_wrong, _from_heads_differ),
)
