"""The Gluon kernels' own source in many orders of events: results are exact, and no launch hangs."""

from itertools import product

import pytest

from .gluon_backward_runs import run_ring_backward
from .gluon_decode_runs import run_decode
from .gluon_heads_runs import run_heads
from .gluon_runs import SIZES, run_inbox, run_landed, run_push, run_ring, run_two_shot
from .gluon_ulysses_runs import run_ulysses

# -------------------------------------------------------------------------------------------------- all_gather_matmul
PLANS = [
    {},
    {"num_comm": 9, "cut_last": 1, "chunk": 4},  # every program pushes
    {"num_comm": 2, "rounds_alone": 2, "push_rows": 2, "stages": 4, "width": 16, "cut_last": 4},
    {"rounds_alone": 99, "chunk": 16, "push_rows": 2, "cut_last": 4},
    {"rounds_alone": 2, "whole_rounds": 0, "cut_last": 2},
    {"rounds_alone": 3, "whole_rounds": 1, "width": 16, "cut_last": 4, "stages": 4},
    {"num_comm": 0},
    {"num_comm": 0, "push_rows": 2, "whole_rounds": 1, "width": 16, "cut_last": 4, "stages": 4},
]


@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize(("size", "m", "N", "K"), [*SIZES, (5, 9, 20, 10)])
def test_push(plan, size, m, N, K):
    for seed in range(3):
        run_push(size, m, N, K, 2 + seed, seed, **PLANS[plan])


@pytest.mark.parametrize(("size", "m", "N", "K"), [(2, 16, 24, 16), (2, 13, 48, 24), (3, 8, 8, 24), (4, 13, 10, 40)])
def test_a_gathered_input_that_is_kept(size, m, N, K):
    """Of more columns than tiles in a row and of fewer. It is read before a peer's next launch writes to the inbox."""
    for seed in range(3):
        plan = {"whole_rounds": 1, "cut_last": 4, "width": 16, "stages": 4} if seed == 2 else {}
        run_push(size, m, N, K, 2 + seed, seed, num_comm=0, push_rows=1 + seed % 2, keep=True, **plan)


@pytest.mark.parametrize("stages", [3, 4, 6])
@pytest.mark.parametrize("chunk", [4, 12, 32])
def test_chunks_of_few_and_many_units(chunk, stages):
    """Chunks of one unit, of more units than are stored at a time, and of more than a row has. More programs push than
    there are chunks for."""
    for num_comm in (1, 2, 3):
        run_push(3, 21, 16, 18, 3, num_comm, chunk=chunk, stages=stages, num_comm=num_comm, rounds_alone=2)


def test_fewer_tiles_than_programs():
    for seed in range(5):
        for cut_last in (1, 2, 4):
            run_push(2, 5, 7, 6, 5, seed, num_comm=1 + seed, cut_last=cut_last)


def test_push_on_eight_ranks():
    run_push(8, 8, 8, 8, 2, 0, launches=2)


# ---------------------------------------------------------------------------------------------- matmul_reduce_scatter
@pytest.mark.parametrize(("size", "m", "N", "K"), SIZES)
@pytest.mark.parametrize(("stages", "lag"), [(3, 1), (4, 2), (3, 99)])
def test_inbox(size, m, N, K, stages, lag):
    for seed in range(4):
        run_inbox(size, m, N, K, 1 + seed, seed, stages=stages, lag=lag)


@pytest.mark.parametrize(("size", "m", "N", "K"), [*SIZES, (5, 9, 20, 10)])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_parcels(size, m, N, K, copies):
    """Copied in parcels, also in more copies than tiles."""
    for seed in range(3):
        run_inbox(size, m, N, K, 1 + seed, seed, copies=copies, finish=seed == 1)


# -------------------------------------------------------------------------------------------------- all_to_all_matmul
@pytest.mark.parametrize(
    ("size", "B", "S", "k", "N"), [(1, 2, 16, 16, 16), (2, 1, 24, 8, 16), (2, 3, 13, 4, 10), (4, 2, 21, 8, 24)]
)
@pytest.mark.parametrize("step", [1, 2, 9])
def test_heads_products(size, B, S, k, N, step):
    """Ragged rows of several sequences, in copies of one row block, of two, and of all."""
    for seed in range(3):
        run_heads(size, B, S, k, N, 1 + 2 * seed, seed, step=step, transposed=seed == 1, finish=seed == 2)


# -------------------------------------------------------------------------------------------------- matmul_all_reduce
@pytest.mark.parametrize(("size", "M", "N", "K"), [*SIZES, (3, 8, 8, 20), (4, 40, 24, 12), (2, 57, 33, 7)])
@pytest.mark.parametrize("lag", [1, 2, 99])
def test_two_shot(size, M, N, K, lag):
    """Also with fewer tiles than ranks."""
    for seed in range(4):
        run_two_shot(size, M, N, K, 1 + seed, seed, lag=lag)
        run_landed(size, M, N // 2 * 2, K, 1 + seed, seed, lag=lag)


# ----------------------------------------------------------------------------------------------------- ring_attention
ZIGZAG = [*product((1, 2, 3), (1, 7, 16, 21)), (5, 16)]


@pytest.mark.parametrize(
    ("size", "S", "H", "KV"), [(1, 19, 2, 1), (2, 16, 2, 2), (2, 13, 2, 1), (3, 8, 1, 1), (4, 21, 2, 1)]
)
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}, {"window": (9, -1)}])
def test_ring(size, S, H, KV, told):
    """Ragged rows, and chunks that a mask or a window hides from a peer, which does not wait for them."""
    for seed in range(3):
        run_ring(size, S, H, KV, 1 + seed, seed, B=1 + seed % 2, together=1 + seed, **told)


@pytest.mark.parametrize(("size", "S"), ZIGZAG)
def test_zigzag_ring(size, S):
    """Also where a block of keys reaches into rows that come later."""
    for seed in range(4):
        run_ring(size, S, 2, 1, 1 + seed, seed, zigzag=True, chunk=4 * (1 + seed % 2), causal=seed != 3)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
def test_padded_ring(size, zigzag):
    """Also ranks all of whose rows are padding."""
    for seed, length in enumerate((0, 1, 6, 13, size * 13 - 1)):
        run_ring(size, 13, 2, 1, 1 + seed % 2, seed, zigzag=zigzag, length=length, causal=seed % 2 == 0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}])
def test_documents_in_a_ring(size, zigzag, told):
    """Short and empty ones, one over all ranks, and rows before the first and behind the last."""
    for seed, documents in enumerate(([0, size * 14], [3, 4, 4, 9, 12, size * 14 - 1], [0, 11], [5, 5], [13])):
        run_ring(size, 14, 2, 1, 1 + seed % 2, seed, zigzag=zigzag, documents=documents, **told)


@pytest.mark.parametrize(
    ("size", "S", "H", "KV"), [(1, 19, 2, 1), (1, 8, 1, 1), (2, 16, 4, 2), (2, 13, 2, 1), (3, 8, 2, 2), (4, 21, 2, 1)]
)
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}, {"window": (9, -1)}])
def test_ring_backward(size, S, H, KV, told):
    """Also where nobody here sees some keys or queries of a peer, which are not sent."""
    for seed in range(3):
        options = {"B": 1 + seed % 2, "together": 1 + seed, "stages": 2 + seed % 2}
        run_ring_backward(size, S, H, KV, 1 + seed, seed, **options, **told)


def test_each_batch_of_a_ring_backward_is_waited_for():
    for seed in range(3):
        run_ring_backward(2, 8, 1, 1, 1, seed, B=3, launches=1, causal=False)


@pytest.mark.parametrize("run", [run_ring, run_ring_backward])
@pytest.mark.parametrize("size", [2, 3])
def test_batches_whose_chunks_come_together(run, size):
    for seed in range(4):
        run(size, 13, 2, 1, 1 + seed, seed, B=3, joined=2 + seed % 2, zigzag=seed > 1, causal=seed != 3)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_low_scores_in_a_ring_backward(size, zigzag):
    """The zeros behind the keys of a chunk would have infinite weights."""
    for seed in range(3):
        run_ring_backward(size, 13, 2, 1, 1 + seed, seed, zigzag=zigzag, causal=False, low=True)


@pytest.mark.parametrize(("size", "S"), ZIGZAG)
def test_zigzag_ring_backward(size, S):
    """Also where a block reaches into rows of another part, which may come later."""
    for seed in range(4):
        window = (9, 2) if seed == 2 else None
        run_ring_backward(size, S, 2, 1, 1 + seed, seed, zigzag=True, causal=seed != 3, window=window)


@pytest.mark.parametrize(("S", "window"), [(17, (0, 3)), (33, (8, 0))])
def test_a_task_without_rows_in_a_ring_backward(S, window):
    """The second part has a piece less than the first. The queries that see the next key may not be sent here."""
    for seed in range(2):
        run_ring_backward(2, S, 1, 1, 1, seed, zigzag=True, causal=False, window=window, launches=1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
def test_padded_ring_backward(size, zigzag):
    """Also ranks all of whose rows are padding."""
    for seed, length in enumerate((0, 1, 6, 13, size * 13 - 1)):
        run_ring_backward(size, 13, 2, 1, 1 + seed % 2, seed, zigzag=zigzag, length=length, causal=seed % 2 == 0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}])
def test_documents_in_a_ring_backward(size, zigzag, told):
    """Short and empty ones, one over all ranks, and rows before the first and behind the last."""
    for seed, documents in enumerate(([0, size * 14], [3, 4, 4, 9, 12, size * 14 - 1], [0, 11], [5, 5], [13])):
        run_ring_backward(size, 14, 2, 1, 1 + seed % 2, seed, zigzag=zigzag, documents=documents, **told)


# -------------------------------------------------------------------------------------------------- ulysses_attention
@pytest.mark.parametrize(
    ("size", "R", "H", "KV", "group"),
    [
        (2, 16, 4, 4, 1),
        (2, 13, 8, 2, 2),  # two groups share a head of keys, which came with the first
        (2, 5, 8, 4, 4),  # a group has two heads of keys
        (3, 8, 6, 2, 1),  # one rank needs two heads of keys, the others one
        (4, 21, 4, 1, 1),  # fewer heads of keys than ranks
    ],
)
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}, {"window": (9, -1)}])
def test_ulysses(size, R, H, KV, group, told):
    """Ragged rows, and launches that come one after the other."""
    for seed in range(3):
        batches = {"B": 1 + seed, "joined": 1 + seed // 2}
        options = {"together": 1 + seed % 2, "launches": 2 + seed % 2, **batches}
        run_ulysses(size, R, H, KV, 1 + seed, seed, group=group, **options, **told)


@pytest.mark.parametrize("programs", [2, 5, 7, 99])
def test_programs_of_ulysses_that_begin_their_tasks_together(programs):
    """As many tasks for each, one more for some, and none for some."""
    for seed in range(3):
        run_ulysses(2, 13, 8, 2, programs, seed, causal=False, meeting=True)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("told", [{}, {"causal": False}, {"window": (5, 3), "causal": False}])
def test_documents_in_ulysses(size, told):
    """Short and empty ones, one over all ranks, and rows before the first and behind the last."""
    for seed, documents in enumerate(([0, size * 14], [3, 4, 4, 9, 12, size * 14 - 1], [0, 11], [5, 5], [13])):
        run_ulysses(size, 14, 2 * size, 2, 1 + seed % 2, seed, B=1 + seed % 2, documents=documents, **told)


# -------------------------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize("stages", [3, 4, 6])
def test_a_short_inner_dimension(stages):
    """Fewer steps than slots: the ring comes round more than once before a tile is out."""
    for seed in range(4):
        run_push(2, 16, 32, 4, 2, seed, stages=stages)
        run_push(2, 16, 40, 4, 3, seed, stages=stages, cut_last=4)
        run_inbox(3, 16, 32, 3, 2, seed, stages=stages)


def test_transposed_weights():
    for seed in range(3):
        run_push(3, 13, 10, 18, 2, seed, transposed=True)
        run_inbox(3, 13, 10, 18, 2, seed, transposed=True)
        run_two_shot(3, 29, 10, 18, 2, seed, transposed=True)


def test_products_that_are_added_in_registers():
    """As of fp8, without scales."""

    def promoted(functions):
        functions["multiply"] = functions["multiply_promoted"]

    for seed in range(4):
        for run in (run_push, run_inbox, run_two_shot):
            run(3, 13, 10, 18, 2, seed, broken=promoted, transposed=True)


def test_bias_and_epilogue():
    """The rank that finishes a tile applies both once, to each half of the tile with its own columns of the bias."""
    for seed in range(3):
        for size in (1, 3):
            run_push(size, 13, 10, 18, 2, seed, finish=True)
            run_inbox(size, 13, 10, 18, 2, seed, finish=True)
            run_two_shot(size, 29, 10, 18, 2, seed, finish=True)


@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_a_second_weight(plan):
    """By a launch that finds A in the inbox, while peers may be a launch ahead."""
    for seed, (size, m, N, K) in enumerate(SIZES):
        run_push(size, m, N, K, 2 + seed % 3, seed, more=(N, 2, 20)[seed % 3], gated=seed == 3, **PLANS[plan])


@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_swiglu(plan):
    """Half as many columns leave, also of tiles that are cut, and through rooms for whole ones."""
    for seed, (size, m, N, K) in enumerate(SIZES):
        options = {"finish": seed % 2 == 1, "transposed": seed > 2, **PLANS[plan]}
        run_push(size, m, N, K, 2 + seed % 3, seed, gated=True, **options)


def test_on_eight_ranks():
    run_inbox(8, 8, 8, 8, 2, 0, launches=2)
    run_two_shot(8, 24, 24, 8, 2, 0, launches=2)
    run_landed(8, 24, 24, 8, 2, 0, launches=2)


# ------------------------------------------------------------------------------------------------------- flash_decode
@pytest.mark.parametrize(
    ("lens", "heads"),
    [
        ([[20]], 4),  # a unit
        ([[70], [5]], 5),  # whose last rows do not exist
        ([[17], [0], [33]], 6),  # a sequence without keys
        ([[20, 21], [0, 0], [33, 40], [1, 2]], 3),  # query tokens of a unit see other keys
        ([[0, 9], [7, 0]], 3),  # one of them none
        ([[0], [0]], 4),
    ],
)
@pytest.mark.parametrize("page", [4, 8, 24])
def test_latent_caches(lens, heads, page):
    """Pages of half a tile, of a tile and of several, shared by few programs and by more than there are tiles. In fp8
    pages may have any number of keys."""
    for seed in range(4):
        changed = {"cap": 2.0 if seed == 1 else None, "scale": 0.5 if seed else None}
        run_decode(lens, heads, page, 1 + 3 * seed, seed, **changed)
        run_decode(lens, heads, page - seed % 2, 1 + 2 * seed, seed, **changed, fp8=True)
