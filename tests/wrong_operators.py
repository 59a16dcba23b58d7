"""Operators that take no square matrices: right operands, and what is wrong for each name, by its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import pkt
from pkt.errors import DtypeError, HeapFull, PktError, ShapeError, Unsupported
from pkt.kernels.all_gather_grouped_matmul import Gathered
from pkt.kernels.declaration import MAX_INT
from pkt.kernels.dispatch import Dispatched

Bad = Mapping[str, Mapping[type[PktError], tuple[Any, ...]]]
HUGE = (1 << 31, 1 << 40, 1 << 70)
NO_INTEGER = (2.5, "2", (2,), [], torch.ones(9, 9), b"2", True)
NO_NUMBER = ("1", [], (1.0,), True, 1j, torch.ones(1))
COUNT = {ShapeError: (0, -1, *HUGE), DtypeError: NO_INTEGER}
"""Of a setting that counts something, from 1."""
AT_LEAST_1 = {ShapeError: (0, -1, *HUGE), DtypeError: (*NO_INTEGER, None)}
NO_FLAG = (2, None, "True", [True])
_TILES_DIFFER = (16, 16, 16), (16, 32, 16)


class Tried(NamedTuple):
    """One operator. function: what users call. right: its operands and the keywords without a default, by name; those
    that lie in a handle have its name, too, as "dispatched.tokens". wrong: values by name and error. differ: values
    that are right on each of two ranks, and on both together a CollectiveMismatch."""

    function: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    wrong: Callable[[], Bad]
    differ: Callable[[], Mapping[str, tuple[Any, Any]]] = dict


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def apart(*shape: int) -> torch.Tensor:
    """Ones of which no two lie together."""
    return torch.ones(*shape, 2)[..., 0]


# ----------------------------------------------------------------------------------------------------- grouped_matmul
def _grouped() -> dict[str, Any]:
    return {"x": torch.ones(6, 8), "w": torch.ones(2, 8, 4), "offsets": int32(0, 3, 6), "out": torch.ones(6, 4)}


def _grouped_wrong() -> Bad:
    w = torch.ones(2, 8, 4)
    return {
        "x": {
            ShapeError: (torch.ones(8), torch.ones(6, 8, 1), torch.ones(1, 8).expand(1 << 31, 8), apart(6, 8)),
            DtypeError: (None, torch.ones(6, 8).int(), torch.ones(6, 8).double()),
        },
        "w": {
            ShapeError: (w[0], torch.ones(2, 7, 4), w[:0], w[..., ::2], torch.ones(4, 8, 2).permute(2, 1, 0)),
            DtypeError: (None, w.half(), w.int()),
        },
        "offsets": {
            ShapeError: (int32(0, 6), int32(), int32(0, 3, 6, 6), int32(0, 3, 6)[:, None], int32(*range(6))[::2]),
            DtypeError: (None, torch.tensor([0, 3, 6]), torch.zeros(3), torch.zeros(3, dtype=torch.int16)),
        },
        "clear": {DtypeError: (2, "True", [True])},
        "out": {
            ShapeError: (torch.ones(6, 5), torch.ones(6, 4, 1), apart(6, 4)),
            DtypeError: (torch.ones(6, 4).half(),),
        },
        "tiles": {
            ShapeError: (
                (16, 16),
                (0, 16, 16),
                (16, 16, -16),
                (17, 16, 16),
                (16, 16, 1 << 40),
                (16, 16, 16, 0),
                (16, 16, 16, 1, 1, 17),
            ),
            DtypeError: (16, "16", (16, 16, 2.5), {16: 16}, (16, 16, None)),
        },
        "expected": {ShapeError: (-1, *HUGE), DtypeError: NO_INTEGER},
    }


# ------------------------------------------------------------------------------------------------ dispatch and combine
def _dispatch() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 8), "topk_idx": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.ones(3, 2),
        "out": None, "num_experts": 4, "max_tokens": 16,
    }  # fmt: skip


def _dispatch_wrong() -> Bad:
    return {
        "x": {
            ShapeError: (torch.ones(8), torch.ones(3, 8, 1)),
            DtypeError: (None, torch.ones(3, 8).int(), torch.ones(3, 8).double()),
        },
        "topk_idx": {
            ShapeError: tuple(torch.zeros(shape, dtype=torch.int64) for shape in ((3,), (4, 2), (3, 2, 1), (3, 17))),
            DtypeError: (None, torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int16)),
        },
        "topk_weights": {
            ShapeError: (torch.ones(3), torch.ones(3, 3), torch.ones(2, 2)),
            DtypeError: (None, torch.ones(3, 2).half(), torch.ones(3, 2).double()),
        },
        "out": {
            ShapeError: (torch.ones(15, 8), torch.ones(16, 7), torch.ones(16), torch.ones(16, 8, 1)),
            DtypeError: (torch.ones(16, 8).half(),),
        },
        "num_experts": AT_LEAST_1,
        "max_tokens": {**AT_LEAST_1, HeapFull: (1 << 24, MAX_INT)},
        "alignment": {ShapeError: (0, -1, MAX_INT, 1 << 29, *HUGE), DtypeError: NO_INTEGER[:-1]},  # 1 == True
        "clear": {DtypeError: (2, "True", [True])},
        "num_comm_sms": COUNT,
        "tokens_per_rank": {ShapeError: (0, -1, 2, *HUGE), DtypeError: NO_INTEGER},
    }


def _dispatch_differ() -> Mapping[str, tuple[Any, Any]]:
    x = torch.ones(3, 8)
    return {
        "x": (x.half(), x.bfloat16()), "num_experts": (5, 6), "max_tokens": (17, 18), "alignment": (2, 3),
        "num_comm_sms": (1, 2),
    }  # fmt: skip


def _combine() -> dict[str, Any]:
    """With a routing in which no token goes anywhere."""
    return {
        "y": torch.ones(5, 4), "dispatched.tokens": torch.full((7, 2), -1, dtype=torch.int32),
        "dispatched.places": torch.full((8,), -1, dtype=torch.int32), "dispatched.weights": torch.ones(5),
        "dispatched.source": torch.zeros(5, 3, dtype=torch.int32), "out": None,
    }  # fmt: skip


def _combine_wrong() -> Bad:
    return {
        "y": {
            ShapeError: (torch.ones(5), torch.ones(5, 4, 1)),
            DtypeError: (None, torch.ones(5, 4).int(), torch.ones(5, 4).double()),
        },
        "dispatched": {DtypeError: (None, 3, (), torch.ones(3), [None] * 8, object())},
        "dispatched.tokens": {
            ShapeError: (int32(1, 2), torch.zeros(7, 17, dtype=torch.int32), torch.zeros(7, 2, 1, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(7, 2, dtype=torch.int64), torch.zeros(7, 2)),
        },
        "dispatched.places": {
            ShapeError: (int32(1, 2, 3), torch.zeros(4, 2, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(8, dtype=torch.int64), torch.zeros(8)),
        },
        "dispatched.weights": {
            ShapeError: (torch.ones(4), torch.ones(5, 1)),
            DtypeError: (torch.ones(5).half(), torch.ones(5).int()),
        },
        "out": {
            ShapeError: (torch.ones(5, 4), torch.ones(4, 5), torch.ones(4, 4, 1)),
            DtypeError: (torch.ones(4, 4).half(),),
        },
        "dispatched.source": {
            ShapeError: (torch.zeros(4, 3, dtype=torch.int32), torch.zeros(14, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.int64)),
        },
        "num_comm_sms": COUNT,
        "tokens_per_rank": {ShapeError: (0, -1, 3, *HUGE), DtypeError: NO_INTEGER},
    }


def _combine_differ() -> Mapping[str, tuple[Any, Any]]:
    return {
        "y": (torch.ones(5, 4).half(), torch.ones(5, 4).bfloat16()), "num_comm_sms": (1, 2),
        "tokens_per_rank": (4, 5),
    }  # fmt: skip


def _dispatch_matmul() -> dict[str, Any]:
    right = {name: value for name, value in _dispatch().items() if name != "num_experts"}
    return {**right, "w": torch.ones(2, 8, 4)}


def _dispatch_matmul_wrong() -> Bad:
    wrong = {name: bad for name, bad in _dispatch_wrong().items() if name != "num_experts"}
    w = torch.ones(2, 8, 4)
    return {
        **wrong,
        "max_tokens": AT_LEAST_1,
        "w": {
            ShapeError: (w[0], w[:0], w[:, :7].contiguous(), w[..., ::2], torch.ones(4, 8, 2).permute(2, 1, 0)),
            DtypeError: (None, w.half(), w.int()),
        },
        "tiles": _grouped_wrong()["tiles"],
    }


def _dispatch_matmul_differ() -> Mapping[str, tuple[Any, Any]]:
    differ = {name: values for name, values in _dispatch_differ().items() if name in ("max_tokens", "alignment")}
    return {**differ, "tiles": _TILES_DIFFER}


def _matmul_combine() -> dict[str, Any]:
    """With a routing in which no token goes anywhere."""
    handle = {name: value for name, value in _again().items() if name.startswith("dispatched.")}
    offsets = {"dispatched.offsets": int32(0, 2, 5)}
    return {"x": torch.ones(5, 8), "w": torch.ones(2, 8, 4), **handle, **offsets, "out": None}


def _matmul_combine_wrong() -> Bad:
    parts = (
        "dispatched", "dispatched.tokens", "dispatched.places", "dispatched.weights", "dispatched.source", "out",
        "tokens_per_rank",
    )  # fmt: skip
    return {
        **{name: wrong for name, wrong in _combine_wrong().items() if name in parts},
        "x": {
            ShapeError: (torch.ones(5), torch.ones(5, 8, 1)),
            DtypeError: (None, torch.ones(5, 8).int(), torch.ones(5, 8).double()),
        },
        "w": _dispatch_matmul_wrong()["w"],
        "dispatched.offsets": {
            ShapeError: (int32(0, 5), int32(0, 2, 5, 5), int32(0, 2, 5)[None]),
            DtypeError: (None, torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        },
        "tiles": _grouped_wrong()["tiles"],
    }


def _matmul_combine_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"tiles": _TILES_DIFFER, "tokens_per_rank": (4, 5)}


def _shared_experts() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 8), "topk_idx": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.ones(3, 2),
        "w": torch.ones(2, 8, 4), "out": None,
    }  # fmt: skip


def _shared_experts_wrong() -> Bad:
    parts = "x", "topk_idx", "topk_weights", "clear", "num_comm_sms", "w", "tiles"
    return {
        **{name: wrong for name, wrong in _dispatch_matmul_wrong().items() if name in parts},
        "out": {
            ShapeError: (torch.ones(6, 4), torch.ones(12, 5), torch.ones(12, 4, 1)),
            DtypeError: (torch.ones(12, 4).half(),),
        },
    }


def _scattered() -> dict[str, Any]:
    """With a routing in which no token has an expert."""
    handle = {
        "tokens": torch.full((8, 2), -1, dtype=torch.int32), "places": torch.full((8,), -1, dtype=torch.int32),
        "weights": torch.ones(5), "source": torch.full((5, 3), -1, dtype=torch.int32), "offsets": int32(0, 2, 5),
    }  # fmt: skip
    gathered = {f"gathered.{name}": part for name, part in handle.items()}
    return {"x": torch.ones(5, 8), "w": torch.ones(2, 8, 4), **gathered, "out": None}


def _scattered_wrong() -> Bad:
    wrong = {name.replace("dispatched", "gathered"): bad for name, bad in _matmul_combine_wrong().items()}
    del wrong["tokens_per_rank"]
    return {
        **wrong,
        "gathered.places": {
            ShapeError: (int32(1, 2, 3), torch.zeros(6, dtype=torch.int32), torch.zeros(8, 1, dtype=torch.int32)),
            DtypeError: (None, torch.zeros(8, dtype=torch.int64), torch.zeros(8)),
        },
    }


def _again() -> dict[str, Any]:
    """With a routing in which no token goes anywhere."""
    handle = {name: value for name, value in _combine().items() if name.startswith("dispatched.")}
    return {"x": torch.ones(4, 8), **handle, "y": None, "out": None}


def _again_wrong() -> Bad:
    parts = ("dispatched", "dispatched.tokens", "dispatched.places", "dispatched.source", "num_comm_sms")
    return {
        **{name: wrong for name, wrong in _combine_wrong().items() if name in parts},
        "x": {
            ShapeError: (torch.ones(4), torch.ones(4, 8, 1)),
            DtypeError: (None, torch.ones(4, 8).int(), torch.ones(4, 8).double()),
        },
        "dispatched.weights": {ShapeError: (torch.ones(5, 1),), DtypeError: (None, torch.ones(5).half())},
        "y": {ShapeError: (torch.ones(5, 7), torch.ones(4, 8)), DtypeError: (torch.ones(5, 8).half(),)},
        "out": {ShapeError: (torch.ones(5, 7), torch.ones(4, 8)), DtypeError: (torch.ones(5, 8).half(),)},
    }


def _again_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"x": (torch.ones(4, 8).half(), torch.ones(4, 8).bfloat16()), "num_comm_sms": (1, 2)}


# -------------------------------------------------------------------------------------------------- grouped_outer, moe
def _outer() -> dict[str, Any]:
    return {"x": torch.ones(6, 8), "y": torch.ones(6, 4), "offsets": int32(0, 3, 6)}


def _outer_wrong() -> Bad:
    return {
        "x": {
            ShapeError: (torch.ones(8), torch.ones(6, 8, 1), torch.ones(5, 8), apart(6, 8)),
            DtypeError: (None, torch.ones(6, 8).int(), torch.ones(6, 8).double()),
        },
        "y": {
            ShapeError: (torch.ones(4), torch.ones(5, 4), torch.ones(6, 4, 1), apart(6, 4)),
            DtypeError: (None, torch.ones(6, 4).half()),
        },
        "offsets": {
            ShapeError: (int32(), int32(0), int32(0, 3, 6)[:, None], int32(*range(6))[::2]),
            DtypeError: (None, torch.tensor([0, 3, 6]), torch.zeros(3)),
        },
        "tiles": _grouped_wrong()["tiles"],
    }


def _activation() -> dict[str, Any]:
    return {"x": torch.ones(6, 8), "offsets": int32(0, 3, 6)}


def _activation_wrong() -> Bad:
    wrong = _outer_wrong()
    return {
        "x": {**wrong["x"], ShapeError: (torch.ones(8), torch.ones(6, 8, 1), torch.ones(6, 7), apart(6, 8))},
        "offsets": wrong["offsets"],
        "activation": {Unsupported: ("", "none", 3, None, ["swiglu"], torch.ones(9, 9).numpy())},
        "clear": {DtypeError: (2, "True", [True])},
    }


def _moe() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 8), "topk_idx": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.ones(3, 2),
        "w1": torch.ones(2, 8, 12), "w2": torch.ones(2, 6, 4),
    }  # fmt: skip


def _moe_wrong() -> Bad:
    w1, w2 = torch.ones(2, 8, 12), torch.ones(2, 6, 4)
    return {
        "x": {
            ShapeError: (torch.ones(8), torch.ones(3, 8, 1)),
            DtypeError: (None, torch.ones(3, 8).int(), torch.ones(3, 8).double()),
        },
        "topk_idx": {
            ShapeError: tuple(torch.zeros(shape, dtype=torch.int64) for shape in ((3,), (4, 2), (3, 2, 1), (3, 17))),
            DtypeError: (None, torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int16)),
        },
        "topk_weights": _dispatch_wrong()["topk_weights"],
        "w1": {
            ShapeError: (w1[0], w1[:0], w1[:, :7], w1[..., :11], apart(2, 8, 12)),
            DtypeError: (None, w1.half()),
        },
        "w2": {ShapeError: (w2[0], w2[:, :5], w2[:1], apart(2, 6, 4)), DtypeError: (None, w2.half())},
        "activation": {Unsupported: ("", "gated", 3, None, ["swiglu"], torch.ones(9, 9).numpy())},
        "shared": {
            ShapeError: ((w1[0], w2[0][:, :3]), (w1[0], w2[0][:5]), (w1[0][:7], w2[0]), (w1, w2)),
            DtypeError: (3, (w1[0],), (w1[0], None), (w1[0].half(), w2[0])),
        },
        "max_tokens": {ShapeError: (0, -1, *HUGE), DtypeError: NO_INTEGER},
        "tokens_per_rank": {ShapeError: (0, -1, *HUGE), DtypeError: NO_INTEGER},
        "needed": {ShapeError: (int32(1), int32(1, 2, 3), int32(1, 2)[None]), DtypeError: (3, torch.zeros(2))},
    }


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


# --------------------------------------------------------------------------------------------------------- fused norms
def _norm() -> dict[str, Any]:
    return {"x": torch.ones(4, 8), "residual": torch.ones(4, 8), "weight": torch.ones(8), "out": None}


def _norm_wrong() -> Bad:
    x, matrix = torch.ones(4, 8), (torch.ones(4), torch.ones(4, 8, 1))
    return {
        "x": {ShapeError: matrix, DtypeError: (None, x.int(), x.double())},
        "residual": {ShapeError: (*matrix, torch.ones(4, 7), torch.ones(3, 8)), DtypeError: (None, x.half(), x.int())},
        "weight": {ShapeError: (torch.ones(7), torch.ones(1, 8)), DtypeError: (None, torch.ones(8).half())},
        "out": {ShapeError: (*matrix, torch.ones(4, 7)), DtypeError: (x.half(), x.to(torch.float8_e4m3fn))},
        "eps": {ShapeError: (0, -1e-6, float("nan"), float("inf")), DtypeError: NO_NUMBER},
        "quant": {Unsupported: ("fp8", "", 8, True, ["fp8_token"]), ShapeError: ("fp8_group",)},  # H is 8, not 128
        "rows": COUNT,
    }


def _norm_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"eps": (1e-5, 2e-5)}


def _all_norm_wrong() -> Bad:
    return {**_norm_wrong(), "parts": {ShapeError: (0, -1, 3, *HUGE), DtypeError: NO_INTEGER}}


def _shared_norm_differ() -> Mapping[str, tuple[Any, Any]]:
    return {"eps": (1e-5, 2e-5), "rows": (1, 2)}


def _shared_norm() -> dict[str, Any]:
    return {**_norm(), "x": torch.ones(8, 8), "out": None}


def _shared_norm_wrong() -> Bad:
    wrong = _norm_wrong()
    out = {ShapeError: (torch.ones(4, 8), torch.ones(8)), DtypeError: (torch.ones(8, 8).half(),)}
    return {**wrong, "x": {**wrong["x"], ShapeError: (torch.ones(7, 8), torch.ones(8))}, "out": out}


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


OTHERS = (
    Tried(pkt.grouped_matmul, _grouped, _grouped_wrong),
    Tried(pkt.dispatch, _dispatch, _dispatch_wrong, _dispatch_differ),
    Tried(pkt.combine, _combine, _combine_wrong, _combine_differ),
    Tried(pkt.dispatch_matmul, _dispatch_matmul, _dispatch_matmul_wrong, _dispatch_matmul_differ),
    Tried(pkt.matmul_combine, _matmul_combine, _matmul_combine_wrong, _matmul_combine_differ),
    Tried(pkt.dispatch_again, _again, _again_wrong, _again_differ),
    Tried(pkt.all_gather_grouped_matmul, _shared_experts, _shared_experts_wrong, lambda: {"tiles": _TILES_DIFFER}),
    Tried(pkt.grouped_matmul_reduce_scatter, _scattered, _scattered_wrong, lambda: {"tiles": _TILES_DIFFER}),
    Tried(pkt.grouped_outer, _outer, _outer_wrong),
    Tried(pkt.grouped_activation, _activation, _activation_wrong),
    Tried(pkt.moe, _moe, _moe_wrong),
    Tried(pkt.all_reduce_rms_norm, _norm, _all_norm_wrong, _norm_differ),
    Tried(pkt.reduce_scatter_rms_norm, _shared_norm, _shared_norm_wrong, _shared_norm_differ),
    Tried(pkt.flash_decode, _decode, _decode_wrong, _decode_differ),
    Tried(pkt.ring_attention, _ring, _ring_wrong, _ring_differ),
    Tried(pkt.ulysses_attention, _ring, _ulysses_wrong, _ulysses_differ),
    Tried(pkt.matmul_all_to_all, _to_heads, _to_heads_wrong, _to_heads_differ),
    Tried(pkt.all_to_all_matmul, _from_heads, _from_heads_wrong, _from_heads_differ),
)


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, as the function takes them: those of a handle's parts in a handle."""
    found = {n: v for n, v in values.items() if "." not in n}
    for name, kind in (("dispatched", Dispatched), ("gathered", Gathered)):
        parts = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{name}.")}
        if parts and name not in found:
            found[name] = kind(**{**dict.fromkeys(kind._fields), **parts})
    return found
