"""Rules of flash decode: which form a call takes, and with which settings."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from ..declaration import Call, integer
from ..declaration import block as block_size
from ..shared.gluon_fits import missing_anywhere
from ..shared.grid import num_programs, several

FP8 = torch.float8_e4m3fn, torch.float8_e5m2
"""Of caches, beside q's dtype."""
LEAST_SIDE = 16
"""Of an operand of tl.dot."""
MOST_ROWS, MOST_SUMS = 64, 1 << 14
"""Of a unit: rows, and rows times columns of a value. With more, the kernel spills registers."""
MOST_AN_SM = 32
"""Programs that an SM of sm_90 and sm_100 takes, however small they are."""
STAGE_BYTES = 32 << 10
"""Bytes of a cache that a program loads at a time if every query head has its own keys; twice as many otherwise."""
LATENT, MORE = 512, 64
"""Of a latent cache that "gluon" takes: elements of a value, and the most by which a key is longer."""


FEW = 1 << 16
"""Elements of results that "gluon" puts in words. On 2 H200 an all-gather takes less time with 256 rows, and as much
with 128 (`flash_decode_words_2.json`)."""


def padded(n: int) -> int:
    """n, rounded up to a side of an operand of tl.dot."""
    return max(triton.next_power_of_2(n), LEAST_SIDE)


def aligned(cache: torch.Tensor) -> bool:
    """Whether the keys of a cache lie at multiples of 16 bytes, as TMA demands."""
    return all(n % 16 == 0 for n in (cache.data_ptr(), *(cache.element_size() * n for n in cache.stride()[:3])))


def boxed(call: Call, keys: int) -> bool:
    """Whether TMA can load tiles of so many keys: 16-bit queries, and each tile in one page."""
    caches = [x for x in (call["k_cache"], call["v_cache"]) if x is not None]
    pages, page = caches[0].shape[:2]
    return pages > 0 and page % keys == 0 and call.dtype.itemsize == 2 and all(map(aligned, caches))


def fits_gluon(call: Call) -> str:
    """Why the form "gluon" cannot run a call; "" where it can."""
    key, value, page = call["d"], call.shape[-1], call["n"]
    if not math.prod(call.shape):
        return "no queries, and TMA loads no empty tensor"
    if call["v_cache"] is not None:
        return "a v_cache, not keys whose first elements are the values"
    if call["g"] != 1:
        return f"{call['g']} KV heads, not 1"
    if value != LATENT or not LATENT < key <= LATENT + MORE:
        return f"keys of {key} elements and values of {value}, not of {LATENT + 1} to {LATENT + MORE} and {LATENT}"
    cache = call["k_cache"]
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"q of {call.dtype}, not bfloat16 or float16"
    if cache.dtype not in FP8:  # TMA loads it
        if page % MORE and page not in (8, 16, 32):
            return f"pages of {page} keys, not of 8, 16, 32 or a multiple of {MORE}"
        if not aligned(cache):
            return f"keys at {cache.data_ptr()} and strides {cache.stride()}, not multiples of 16 bytes"
    return missing_anywhere(call.world)


def in_words(call: Call) -> bool:
    """Whether "gluon" puts results in words, as "fused" does; else see `planning.exchanging`."""
    return call.world.size == 1 or math.prod(call.shape) <= FEW


def default_form(call: Call) -> str:
    """gluon where it can run and the caller gives no settings, else fused."""
    return "gluon" if call.left and not fits_gluon(call) else "fused"


# ----------------------------------------------------------------------------------------------------------- settings
# The best of the settings in benchmarks/flash_decode.py on an H200 (`flash_decode_1.json`, for more than 16 rows
# `flash_decode_tried_1.json`, for latent caches `flash_decode_gluon_2.json`): up to 16 rows that share keys two small
# programs an SM, for more rows one large one.
def _alone(call: Call) -> bool:
    """Whether one row alone attends to a KV head's keys."""
    return call["s"] * (call["h"] // max(call["g"], 1)) == 1


def _small(call: Call) -> bool:
    """Whether the registers and the shared memory of an SM hold two programs."""
    return rows_of(call) == LEAST_SIDE and call["d"] <= 256


def _boxed_fp8(call: Call) -> bool:
    """Whether four programs an SM take small caches in fp8, 64 keys at a time, in tiles that TMA loads where pages hold
    them. While one converts numbers, others load. On 2 H200 they take 1 to 7 % less time than two programs with 128
    keys, in one case of five 2 % more (`flash_decode_boxed_fp8_2.json`)."""
    fp8 = call["k_cache"].dtype in FP8 and call.dtype.itemsize == 2
    small = rows_of(call) == LEAST_SIDE and max(call["d"], call.shape[-1]) <= 128
    whole = call["n"] % 64 == call["d"] % 16 == call.shape[-1] % 16 == 0  # tiles in a page, and aligned rows
    return fp8 and small and whole and not call.given


def _latent_fp8(call: Call) -> bool:
    """Whether the keys are those of a latent cache in fp8, and V needs no loads. On 2 H200 64 of them at a time take a
    quarter less time than 32, though some numbers that the kernel needs behind its loop are spilled before it."""
    D, shared = call["d"], call["v_cache"] is None and padded(call.shape[-1]) == 1 << call["d"].bit_length() - 1
    return shared and 256 < D <= LATENT + MORE and call["k_cache"].dtype in FP8 and call.dtype.itemsize == 2


def default_block(call: Call) -> int:
    """Keys whose K and V are as many bytes as a program loads at a time, no less than 16 and no more than 128. fp8
    counts as q's dtype, which its numbers have in registers. With 128 keys and more than 16 rows the kernel spills."""
    if _latent_fp8(call) or _boxed_fp8(call):
        return 64
    D, E = call["d"], 0 if call["v_cache"] is None else call["e"]
    twice = call["k_cache"].dtype in FP8 if _small(call) else not _alone(call)
    keys = STAGE_BYTES * (2 if twice else 1) // max((D + E) * call.dtype.itemsize, 1)
    return min(max(1 << keys.bit_length() - 1, LEAST_SIDE), 128 if rows_of(call) <= LEAST_SIDE else 64)


def default_stages(call: Call) -> int:
    """Loads that are on their way at once."""
    return 3 if _latent_fp8(call) or (_alone(call) and call["k_cache"].dtype not in FP8) else 2


def rows_of(call: Call) -> int:
    """Rows of a unit."""
    heads, kv_heads = call["h"], call["g"]
    most = min(MOST_ROWS, max(MOST_SUMS // padded(call.shape[-1]), LEAST_SIDE))
    return min(max(triton.next_power_of_2(call["s"] * (heads // max(kv_heads, 1))), LEAST_SIDE), most)


def default_warps(call: Call) -> int:
    """More where rows are long or many, so that they fit into the registers."""
    return 4 if _small(call) else 8


def default_programs(call: Call) -> int:
    """One an SM, or several small ones on a GPU."""
    each = 4 if _boxed_fp8(call) else 2 if _small(call) else 1
    return (each if call.on_gpu else 1) * num_programs(call.world, call.world.num_sms)


def keys_at_a_time(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `block`."""
    block_size(call, name, value)
    if value is not None and value < LEAST_SIDE:
        raise call.refuse(name, value, f"at least {LEAST_SIDE}")
    return value


def warps_of(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `warps`."""
    integer()(call, name, value)
    if value is not None and value not in (1, 2, 4, 8, 16):
        raise call.refuse(name, value, "1, 2, 4, 8 or 16")
    return value


def resident_programs(call: Call, name: str, value: Any) -> Any:
    """The check of the keyword `programs`: no more than may run at once. Of large programs fewer fit, as the launch
    says."""
    return integer(1, several(call, MOST_AN_SM, call.world.num_sms))(call, name, value)
