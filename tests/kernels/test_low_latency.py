"""The most bytes that flagged words take, the number of shots, and the words of a program. The collectives' tests check
the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pkt.kernels.shared import flagged as _low_latency

from .helpers import on_ranks


@pytest.mark.parametrize(
    ("nbytes", "size", "shots"),
    [
        *((1 << 14, size, 1) for size in (1, 2, 3, 4, 8)),
        *((1 << 17, size, 1) for size in (2, 4)),
        (1 << 17, 8, 2),
        *((1 << 20, size, shots) for size, shots in ((1, 1), (2, 1), (3, 2), (4, 2), (8, 2))),
        *((1 << 21, size, shots) for size, shots in ((2, 1), (3, 2), (4, 0), (8, 0))),
        (1 << 22, 2, 0),
        (1 << 22, 1, 0),
        *((1 << 14, size, shots) for size, shots in ((9, 1), (16, 1), (72, 0))),  # a thread holds a word of each
        *((1 << 17, size, 0) for size in (9, 72)),
    ],
)
def test_the_number_of_shots_follows_bytes_and_ranks(nbytes: int, size: int, shots: int) -> None:
    assert _low_latency.shots(nbytes, size, _low_latency.FLAG_BYTES) == shots


@pytest.mark.parametrize(("shots", "block"), [(1, None), (2, None), (1, 64), (2, 64)])
@pytest.mark.parametrize("n", [1, 1000, 1 << 13, (1 << 19) + 1, 1 << 21])
def test_a_thread_takes_one_word_as_long_as_there_are_programs(
    n: int, shots: int, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def bound(world: Any, kernel: Any, grid: tuple[int], num_warps: int) -> Any:
        return lambda *args: found.append((grid[0], num_warps, args[-1], args[-4]))

    def run(world: Any) -> None:
        x = torch.ones(n, dtype=torch.bfloat16)
        _low_latency.reduce_launch(world, x, "sum", shots, block)(x, x)

    monkeypatch.setattr(_low_latency, "cooperative_launch", bound)
    on_ranks(2, run, sms=132)
    programs, warps, words, third = found[0]
    assert 3 * 2 * third * shots >= n
    assert programs == min(132, -(-third // words))
    if block:
        assert words == 16  # of 6 elements: the next power of two
    else:
        assert words <= 512
        assert programs * words >= third or words == 512
    assert warps == max(1, min(words // 32, 16))
