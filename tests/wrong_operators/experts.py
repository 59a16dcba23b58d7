"""Dispatch, combine and grouped products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import pkt
from pkt.errors import DtypeError, HeapFull, ShapeError, Unsupported
from pkt.kernels.declaration import MAX_INT

from .tried import AT_LEAST_1, COUNT, HUGE, NO_INTEGER, TILES_DIFFER, Bad, Tried, apart, int32


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
    return {**differ, "tiles": TILES_DIFFER}


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
    return {"tiles": TILES_DIFFER, "tokens_per_rank": (4, 5)}


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


EXPERTS = (
    Tried(pkt.grouped_matmul, _grouped, _grouped_wrong),
    Tried(pkt.dispatch, _dispatch, _dispatch_wrong, _dispatch_differ),
    Tried(pkt.combine, _combine, _combine_wrong, _combine_differ),
    Tried(pkt.dispatch_matmul, _dispatch_matmul, _dispatch_matmul_wrong, _dispatch_matmul_differ),
    Tried(pkt.matmul_combine, _matmul_combine, _matmul_combine_wrong, _matmul_combine_differ),
    Tried(pkt.dispatch_again, _again, _again_wrong, _again_differ),
    Tried(pkt.all_gather_grouped_matmul, _shared_experts, _shared_experts_wrong, lambda: {"tiles": TILES_DIFFER}),
    Tried(pkt.grouped_matmul_reduce_scatter, _scattered, _scattered_wrong, lambda: {"tiles": TILES_DIFFER}),
    Tried(pkt.grouped_outer, _outer, _outer_wrong),
    Tried(pkt.grouped_activation, _activation, _activation_wrong),
    Tried(pkt.moe, _moe, _moe_wrong),
)
