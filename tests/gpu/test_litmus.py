"""Ten million messages of each litmus test, none stale. PKT_TEST_MESSAGES changes how many."""

import time
from typing import Any

import pytest

from tests.cases_litmus import LITMUS, WRONG
from tests.gpu.run import launch, on_ranks, scaled

MESSAGES = scaled("MESSAGES", 10**7)


def enough(world: Any, name: str, messages: int) -> tuple[int, int, float]:
    """(messages, stale, seconds) of this rank: the ranks together send at least `messages`."""
    fn, programs = LITMUS[name], world.num_sms
    fn(world, programs, 4)  # compiles the kernel; the next call has counters of its own
    world.barrier()
    # Every program of every rank receives at least one message a round. Some tests leave a few programs out.
    # With tickets only the later of two partners must see its message, and a few rounds are cut off.
    wanted = 2 * messages + 10_000 if name == "store buffering, tickets" else messages
    rounds = -(-wanted // ((programs - programs % 3) * world.size))
    start = time.perf_counter()
    found = fn(world, programs, rounds)
    return found.messages, found.stale, time.perf_counter() - start


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", LITMUS)
def test_no_message_is_stale(name: str, ranks: int) -> None:
    results = launch(enough, ranks, name, MESSAGES)
    messages, stale = sum(r[0] for r in results), sum(r[1] for r in results)
    print(f"{name}, {ranks} ranks: {messages:.3g} messages, {stale} stale, {max(r[2] for r in results):.2f} s")
    assert messages >= MESSAGES
    assert stale == 0


def early(world: Any, name: str) -> int:
    return WRONG[name](world, world.num_sms, 2000).stale


@on_ranks(2, 4)
@pytest.mark.parametrize("name", WRONG)
def test_stale_messages_are_counted(name: str, ranks: int) -> None:
    """A count that never rises would prove nothing."""
    assert sum(launch(early, ranks, name)) > 0
