"""The protocols of the Gluon kernels: without any one wait or signal, some order of events goes wrong."""

import sys

import pytest

from .gluon_backward_runs import run_ring_backward
from .gluon_decode_runs import run_decode
from .gluon_heads_runs import run_heads
from .gluon_machine import Stuck, TooManyArrivals
from .gluon_runs import (
    BK,
    Wrong,
    run_copied,
    run_inbox,
    run_kept,
    run_landed,
    run_parcels,
    run_push,
    run_ring,
    run_short_push,
    run_two_shot,
)
from .gluon_ulysses_runs import run_ulysses


def without(name, *path):
    """A fault: the function or attribute does nothing."""

    def broken(functions):
        if path:
            setattr(functions[name], path[0], lambda *args, **kwargs: None)
        else:
            functions[name] = lambda *args, **kwargs: None

    return broken


def run_small_ring(size, S, N, K, *args, **options):
    """run_ring of two heads."""
    run_ring(size, S, 2, 1, *args, **options)


def run_small_backward(size, S, N, K, *args, **options):
    """run_ring_backward of two heads."""
    run_ring_backward(size, S, 2, 1, *args, **options)


def run_small_ulysses(size, R, N, K, *args, **options):
    """run_ulysses of two heads on each rank, of batches of two, which all come one by one."""
    run_ulysses(size, R, 2 * size, 2, *args, B=2, **options)


def run_small_heads(size, S, N, K, *args, **options):
    """run_heads of two sequences, in copies of one row block."""
    run_heads(size, 2, S, K, N, *args, **options)


def run_small_decode(size, S, N, K, *args, **options):
    """run_decode of two sequences with keys and one without, in pages of half a tile."""
    run_decode([[S + 1], [0], [2 * N]], 6, 4, *args, **options)


def run_small_fp8(*args, **options):
    """run_small_decode of keys in fp8."""
    run_small_decode(*args, **options, fp8=True)


def goes_wrong(run, seeds, *sizes, **options):
    """Whether a run of two programs gives a wrong result, hangs or breaks an mbarrier, in one of the orders. Any other
    error is one of the test's own."""
    for seed in seeds:
        try:
            run(*sizes, 2, seed, **options)
        except (Wrong, Stuck, TooManyArrivals):
            return True
    return False


@pytest.mark.parametrize(
    "broken",
    [without("pl", "wait"), without("ptx", "drain"), without("tma", "store_wait"), without("mbarrier", "wait")],
    ids=["wait", "drain", "store_wait", "mbarrier.wait"],
)
@pytest.mark.parametrize("run", [run_push, run_inbox, run_two_shot, run_landed])
def test_a_kind_of_wait_that_is_left_out_is_found(run, broken):
    assert goes_wrong(run, range(6), 3, 16, 16, 16, broken=broken)


def test_a_kind_of_wait_that_is_left_out_of_flash_decode_is_found():
    assert goes_wrong(run_small_decode, range(6), 1, 16, 16, 16, broken=without("mbarrier", "wait"))


@pytest.mark.parametrize("broken", [without("pl", "wait"), without("mbarrier", "wait")], ids=["wait", "mbarrier.wait"])
@pytest.mark.parametrize("run", [run_small_heads, run_small_ring, run_small_backward, run_small_ulysses])
def test_a_kind_of_wait_that_is_left_out_of_what_copy_engines_feed_is_found(run, broken):
    assert goes_wrong(run, range(6), 3, 16, 16, 16, broken=broken)


def skipping(name, attribute, line, seen):
    """A fault: the call of `name.attribute` in that line does nothing. `seen`: the lines that call it. A wait
    inside the ring counts for the line that calls the ring."""

    def broken(functions):
        whole = getattr(functions[name], attribute)

        def call(*args, **kwargs):
            caller = sys._getframe(1)
            while caller.f_code.co_name in ("acquire", "await_full"):
                caller = caller.f_back
            here = (caller.f_code.co_filename, caller.f_code.co_name, caller.f_lineno)
            seen.add(here)
            return None if here == line else whole(*args, **kwargs)

        setattr(functions[name], attribute, call)

    return broken


@pytest.mark.parametrize(
    ("run", "name", "attribute", "places"),
    [
        (run_push, "pl", "wait", 1),
        (run_copied, "pl", "wait", 1),
        (run_kept, "pl", "wait", 2),
        (run_push, "gl", "atomic_add", 1),
        (run_push, "ptx", "drain", 2),
        (run_push, "tma", "store_wait", 3),
        (run_short_push, "mbarrier", "wait", 8),
        (run_two_shot, "mbarrier", "wait", 8),
        (run_inbox, "pl", "wait", 1),
        (run_inbox, "gl", "atomic_add", 1),
        (run_parcels, "pl", "wait", 1),
        (run_parcels, "gl", "atomic_add", 1),
        (run_two_shot, "pl", "wait", 2),
        (run_two_shot, "gl", "atomic_add", 2),
        (run_two_shot, "tma", "store_wait", 2),
        (run_landed, "pl", "wait", 2),
        (run_landed, "mbarrier", "wait", 8),
        (run_landed, "gl", "atomic_add", 2),
        (run_small_heads, "pl", "wait", 1),
        (run_small_ring, "pl", "wait", 1),
        (run_small_ring, "mbarrier", "wait", 2),
        (run_small_backward, "pl", "wait", 2),
        (run_small_backward, "mbarrier", "wait", 4),
        (run_small_decode, "mbarrier", "wait", 7),
        (run_small_fp8, "mbarrier", "wait", 6),
        (run_small_ulysses, "pl", "wait", 1),
        (run_small_ulysses, "mbarrier", "wait", 2),
    ],
)
def test_each_wait_and_each_signal_is_needed(run, name, attribute, places):
    lines: set = set()
    run(3, 16, 16, 16, 2, 0, broken=skipping(name, attribute, None, lines))
    lines = {line for line in lines if line[1] not in ("in_turn", "begin_scores")}  # these only save time
    assert len(lines) == places
    for line in lines:
        broken = skipping(name, attribute, line, set())
        wrong = (goes_wrong(run, range(24), 3, 32, 32, K, launches=2, broken=broken) for K in (16, BK))
        assert any(wrong), f"nothing goes wrong without {line}, with four steps or with one"


def test_a_signal_before_the_data_is_found():
    """Here the kernel signals without waiting for its stores first."""

    def broken(functions):
        functions["publish"] = lambda world: None

    for run in (run_two_shot, run_landed, run_parcels):
        assert goes_wrong(run, range(12), 3, 32, 16, 16, broken=broken), run


def waiting_for(group_of):
    """A fault: a loader waits for group_of(group) in the place of a task's group."""

    def broken(functions):
        whole = functions["pl"].wait

        def wait(pointer, wanted, world):
            group, source = divmod(pointer.offset, world.size - 1)
            pointer.offset = group_of(group) * (world.size - 1) + source
            whole(pointer, wanted, world)

        functions["pl"].wait = wait

    return broken


def to_the_next_rank(functions):
    """A fault: results go to the rank behind the one of their queries."""
    functions["pl"].peer = lambda pointer, rank, world: pointer.of((rank + 1) % world.size)


def for_the_first_peer(functions):
    """A fault: a loader waits for the group of one peer alone."""
    whole = functions["pl"].wait
    functions["pl"].wait = lambda p, wanted, world: p.offset % (world.size - 1) or whole(p, wanted, world)


@pytest.mark.parametrize(
    "options",
    [
        {"broken": waiting_for(lambda group: 0)},
        {"broken": waiting_for(lambda group: max(group - 1, 0))},
        {"broken": for_the_first_peer},
        {"broken": to_the_next_rank},
        {"meets": False},
    ],
    ids=["the first group", "the group before", "one peer", "the wrong rank", "no meeting"],
)
def test_faults_in_ulysses_are_found(options):
    assert goes_wrong(run_small_ulysses, range(24), 3, 16, 0, 0, **options)
