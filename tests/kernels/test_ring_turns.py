"""How many heads at a time tasks are taken of."""

from __future__ import annotations

from pkt.kernels.ring_attention import sequence, turns
from pkt.kernels.ring_attention.sequence import View


def test_measured_times_are_as_uneven_as_the_work() -> None:
    """Causal, on the 132 programs of an H200. dk and dv of 8192 positions, 2 x 8 heads of keys that 4 heads of queries
    share; dq of 49152 positions, 8 heads. In ms, with so many heads at a time."""
    of_dkv = [3 + 4 * (128 - 2 * i) for i in range(64)], 16, {1: 5.22, 2: 5.94, 5: 4.26, 9: 3.80}, 3.40
    of_dq = [3 + 2 * (384 - i) for i in range(384)], 8, {1: 10.99, 2: 11.71, 4: 10.49, 8: 10.09}, 9.95
    for costs, heads, measured, even in (of_dkv, of_dq):
        for together, ms in measured.items():
            assert abs(ms / turns._most(costs, heads, together, 132) / even - 1) < 0.025
        chosen = turns.heads_together(costs, heads, 1, 132)
        assert turns._most(costs, heads, chosen, 132) <= turns.EVEN


def test_heads_that_share_keys_are_taken_together() -> None:
    costs = [3.0 + 2 * (64 - i) for i in range(64)]
    assert turns._most(costs, 32, 4, 132) > turns.EVEN
    chosen = turns.heads_together(costs, 32, 4, 132, unit=4)
    assert chosen % 4 == 0
    assert turns._most(costs, 32, chosen, 132) < turns._most(costs, 32, 4, 132)


def test_few_heads_are_taken_together_where_heads_are_still_to_come() -> None:
    """Of 4 x 4096 positions and 32 heads of a rank; of them 4 at a time took 1.07 ms on 2 H200, and 88 1.30."""
    costs = [3.0 + 2 * (32 - i) for i in range(32)]
    assert turns.heads_together(costs, 128, 4, 132, unit=8) == 88
    assert turns.heads_together(costs, 128, 4, 132, unit=8, delay=0.003) == 4


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
            turned = view.turned
            counts = [
                [sum(sees(p.position + i, piece) for i in range(p.rows)) for p in queries] for piece in keys
            ]  # fmt: skip
            assert turns.blocks_seen(keys, queries, turned, 1) == [sum(count) for count in counts]
            assert turns.blocks_seen(keys, queries, turned, 4) == [sum(-(-n // 4) for n in count) for count in counts]
