"""Fused norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import pkt
from pkt.errors import DtypeError, ShapeError, Unsupported

from .tried import COUNT, HUGE, NO_INTEGER, NO_NUMBER, Bad, Tried


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


NORMS = (
    Tried(pkt.all_reduce_rms_norm, _norm, _all_norm_wrong, _norm_differ),
    Tried(pkt.reduce_scatter_rms_norm, _shared_norm, _shared_norm_wrong, _shared_norm_differ),
)
