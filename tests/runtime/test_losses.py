"""A rank lost at any step of any protocol, by KILL, STOP, TERM and INT: every survivor names it in time.

PKT_LOSSES=200 plays as many losses of each kind: on one host, on several, and of the workers of pkt.launch.
"""

import os
import random
from collections import Counter

from . import losses_workers
from .losses import HOSTS_PROTOCOLS, PROTOCOLS, SIGNALS, Loss, Stall, lose

STEPS = {"store": 6, "rendezvous": 40, "votes": 80, "journal": 60, "heap": 40, "exchange": 12, "barrier": 12,
         "farewell": 12, "take": 6, "world": 120, "work": 30, "answer": 20}  # fmt: skip
"""About how many a protocol has. A step that comes after its end is the end."""


def number(least):
    """How many losses to play."""
    return int(os.environ.get("PKT_LOSSES", least))


def picked(count, protocols, seed, hosts=("",)):
    """Each protocol with each signal in turn, at random steps."""
    pick, losses = random.Random(seed), []
    for number in range(count):
        protocol, how = protocols[number % len(protocols)], SIGNALS[number // len(protocols) % len(SIGNALS)]
        names = pick.choice(hosts)
        size = len(names) or pick.randint(2, 4)
        step = pick.randrange(STEPS.get(protocol, 12))
        losses.append(Loss(size, pick.randrange(size), protocol, step, how, names))
    return losses


def play(losses, lose):
    """A busy machine may stall for longer than the grace, so losses that were late are played again, one at a time. A
    loss that is late every time fails."""
    late = lose(losses)
    for _ in range(3):
        late = {loss: text for loss in late for text in lose([loss]).values()}
    assert not late, "\n".join(f"{loss}: {text}" for loss, text in late.items())
    print(f"{len(losses)} losses:", dict(Counter(f"{loss.protocol} {loss.how.name}" for loss in losses)))


def test_every_survivor_names_a_rank_lost_at_any_step():
    play(picked(number(len(PROTOCOLS) * len(SIGNALS)), PROTOCOLS, 1), lose)


def test_a_survivor_on_a_busy_machine_names_the_victim_and_no_survivor_that_left_before_it():
    """Rank 0 gives up, and rank 1 sees that only after a stall, when the victim and rank 0 are both away."""
    kill, stop, _, interrupt = SIGNALS
    waits = (Stall(0, "heap", 2, 2.2), Stall(1, "heap", 0, 1.0), Stall(1, "heap", 2, 1.5))
    play(
        [
            Loss(3, 2, "journal", 60, interrupt, stalls=waits),
            Loss(3, 2, "journal", 60, stop, stalls=waits),
            Loss(3, 2, "exchange", 12, kill, stalls=(Stall(1, "barrier", 0, 1.0),)),
            Loss(3, 2, "exchange", 12, stop, stalls=(Stall(1, "barrier", 0, 3.5),)),
            Loss(3, 2, "exchange", 12, interrupt, stalls=(Stall(0, "barrier", 0, 1.0), Stall(1, "barrier", 0, 2.0))),
        ],
        lose,
    )


def test_every_survivor_on_several_hosts_names_a_rank_lost_at_any_step():
    play(picked(number(len(HOSTS_PROTOCOLS) + 2), HOSTS_PROTOCOLS, 2, ("ab", "aab", "abc", "abba")), lose)


def test_a_launch_names_a_worker_lost_at_any_step_of_its_job():
    play(picked(number(2 * len(losses_workers.PROTOCOLS)), losses_workers.PROTOCOLS, 3), losses_workers.lose)
