"""A rank lost at any step of any protocol, by KILL, STOP, TERM and INT: every survivor names it in time.

PKT_LOSSES=200 plays as many losses. LOSSES are played without it.
"""

import os
import random
from collections import Counter

from .losses import PROTOCOLS, SIGNALS, Loss, lose

LOSSES = int(os.environ.get("PKT_LOSSES", len(PROTOCOLS) * len(SIGNALS)))
STEPS = {"rendezvous": 40, "votes": 80, "journal": 60, "heap": 40, "exchange": 12, "barrier": 12, "farewell": 12}
"""About how many a protocol has. A step that comes after its end is the end."""


def picked(count):
    """Each protocol with each signal in turn, at random steps."""
    pick, losses = random.Random(1), []
    for number in range(count):
        protocol, how = PROTOCOLS[number % len(PROTOCOLS)], SIGNALS[number // len(PROTOCOLS) % len(SIGNALS)]
        size = pick.randint(2, 4)
        losses.append(Loss(size, pick.randrange(size), protocol, pick.randrange(STEPS.get(protocol, 12)), how))
    return losses


def test_every_survivor_names_a_rank_lost_at_any_step():
    """A busy machine may stall for longer than the grace, so losses that were late are played again, one at a time. A
    loss that is late every time fails."""
    losses = picked(LOSSES)
    late = lose(losses)
    for _ in range(3):
        late = {loss: text for loss in late for text in lose([loss]).values()}
    assert not late
    print(f"{len(losses)} losses:", dict(Counter(f"{loss.protocol} {loss.how.name}" for loss in losses)))
