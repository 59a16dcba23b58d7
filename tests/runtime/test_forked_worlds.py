"""A process forked from a rank can neither use the world nor harm it."""

import os
import pickle

import pytest

import pkt
from pkt.errors import Closed, Unsupported

from . import forked


def in_child(main):
    """main()'s result or exception, in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = main()
        except BaseException as error:
            answer = error
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        return pickle.loads(file.read())


def survives(child):
    """Run `child(world)` in a process forked from rank 0: its result, after the world was used again."""

    def main(world):
        with world:
            x = pkt.full((4,), world.rank)
            said = in_child(lambda: child(world, x)) if world.rank == 0 else None
            world.barrier()
            pkt.zeros(8)
            assert not world.backend.left(1 - world.rank)
            assert world.all_gather_object(world.rank) == [0, 1]
            assert x.peer(1 - world.rank).sum().item() == 4 * (1 - world.rank)
            return said

    ends = forked.in_worlds(2, main, timeout=3.0)
    for end in ends:
        if end.error:
            raise end.error
    return ends[0].value


def test_close_in_a_forked_process_leaves_the_world_alone():
    assert survives(lambda world, x: world.close()) is None


def test_an_error_inside_with_world_of_a_forked_process_leaves_the_world_alone():
    def child(world, x):
        error = LookupError("in the child")
        world.__exit__(type(error), error, None)  # as a `with` around the fork does
        return "raised"

    assert survives(child) == "raised"


def test_uses_in_a_forked_process_are_refused():
    def child(world, x):
        with pytest.raises(
            Closed, match=r"^rank 0: barrier\(\): found a process forked from the rank, pid \d+: a forked"
        ):
            world.barrier()
        with pytest.raises(Closed):
            x.free()
        with pytest.raises(Unsupported, match="there is no world"):
            pkt.zeros(4)
        return world.closed, pickle.loads(pickle.dumps(Closed.forked(0, "barrier()", 1))).rank

    assert survives(child) == (True, 0)
