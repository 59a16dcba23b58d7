"""How many heads at a time tasks are taken of."""

from __future__ import annotations

from pkt.kernels.ring_attention import sequence, turns
from pkt.kernels.ring_attention.sequence import View


def test_a_measured_case_is_spread_evenly() -> None:
    """Causal, 8192 positions, 2 x 8 heads of keys that 4 heads of queries share, on 132 programs. On an H200 dk and dv
    took 5.22 ms with 1 head at a time, 5.94 with 2, 4.26 with 5 and 3.80 with 9: as uneven as the work is."""
    costs = [3 + 4 * (128 - 2 * i) for i in range(64)]
    for together, ms in ((1, 5.22), (2, 5.94), (5, 4.26), (9, 3.80)):
        assert abs(ms / turns._most(costs, 16, together, 132) - 3.40) < 0.08
    chosen = turns.heads_together(costs, 16, 1, 132)
    assert turns._most(costs, 16, chosen, 132) <= turns.EVEN


def test_equal_tasks_stay_near() -> None:
    assert turns.heads_together([7.0] * 33, 40, 5, 132) == 5
    assert turns.heads_together([7.0] * 4, 3, 5, 132) == 3


def test_blocks_that_see_a_piece_of_keys() -> None:
    """Against each query and key, with padding, and parts that begin anywhere; in blocks of a row and of 4 rows."""
    view = View(9, 2, 41)

    def sees(query: int, piece: sequence.Part) -> bool:
        keys = range(piece.position, min(piece.position + piece.rows, view.length))
        return query < view.length and any(-view.left <= key - query <= view.right for key in keys)

    for layout, size in (("contiguous", 2), ("contiguous", 3), ("zigzag", 3)):
        for rank in range(size):
            queries = sequence.parts(15, layout, rank, size)
            keys = sequence.pieces(15, layout, (rank + 1) % size, size, 4)
            counts = [
                [sum(sees(p.position + i, piece) for i in range(p.rows)) for p in queries] for piece in keys
            ]  # fmt: skip
            assert turns.blocks_seen(keys, queries, view, 1) == [sum(count) for count in counts]
            assert turns.blocks_seen(keys, queries, view, 4) == [sum(-(-n // 4) for n in count) for count in counts]
