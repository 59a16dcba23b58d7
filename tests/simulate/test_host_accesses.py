"""Torch functions on symmetric tensors and on `x.peer(r)` enter the race detector."""

from __future__ import annotations

import contextlib
import copy
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import pkt
import pkt.language as pl
from pkt.simulate.findings import DataRace
from tests.simulate.helpers import failures

pytestmark = pytest.mark.machine

SEEDS = range(5)  # every policy


@triton.jit
def read_peer(x, out, world, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, pl.load(x + i, (world.rank + 1) % world.size, world))


@triton.jit
def write_peer(x, world, N: tl.constexpr):
    pl.store(x + tl.arange(0, N), 5.0, (world.rank + 1) % world.size, world)


WRITES: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda x: x.fill_(1.0),
    "copy_": lambda x: x.copy_(torch.ones(8)),
    "x[i] = v": lambda x: x.__setitem__(3, 1.0),
    "x[i:j] += v": lambda x: x[2:4].add_(1.0),
    "+=": lambda x: x.__iadd__(1.0),
    "out=": lambda x: torch.add(torch.ones(8), 1.0, out=x),
    "a view": lambda x: x.view(2, 4).T[1].zero_(),
    "peer": lambda x: x.peer((x.world.rank + 2) % 3).fill_(1.0),
}
READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[5].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.plain().sum() + float(x.numpy()[0]),
    "clone": lambda x: x.clone(),
    "==": lambda x: bool((x == 1).any()),
    "print": lambda x: f"{x}",
    "peer": lambda x: x.peer((x.world.rank + 2) % 3).sum(),
}


def main(world: Any, kernel: Any, touch: Any, barrier: bool) -> None:
    """Host code touches x between two launches that read or write the peer's x."""
    x, out = pkt.zeros(8), torch.zeros(8)
    for _ in range(2):
        kernel[(1,)](*((x, out) if kernel is read_peer else (x,)), world.device, 8)
        if barrier:
            world.barrier()
        touch(x)
        if barrier:
            world.barrier()


def assert_found(kernel: Any, touch: Any, kind: str, ranks: int) -> None:
    assert failures(main, ranks, SEEDS, args=(kernel, touch, True)) == {}
    found = failures(main, ranks, SEEDS, args=(kernel, touch, False))
    assert len(found) == len(SEEDS)
    for race in found.values():
        assert isinstance(race, DataRace)
        host = race.first if race.first.kernel == "host code" else race.second
        assert host.kernel == "host code"
        assert host.kind == kind
        assert host.site.startswith("test_host_accesses.py:")
        assert f"rank {host.rank} host code at test_host_accesses.py:" in str(race)
        assert "call world.barrier() between the two in host code" in str(race)


@pytest.mark.parametrize("how", WRITES)
def test_a_write_on_the_host_races_with_a_peers_kernel_unless_a_barrier_is_between(how: str) -> None:
    assert_found(read_peer, WRITES[how], "store", 3 if how == "peer" else 2)


@pytest.mark.parametrize("how", READS)
def test_a_read_on_the_host_races_with_a_peers_kernel_unless_a_barrier_is_between(how: str) -> None:
    assert_found(write_peer, READS[how], "load", 3 if how == "peer" else 2)


def test_the_host_and_the_kernels_of_its_own_rank_never_race() -> None:
    @triton.jit
    def add(x, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(x + i, tl.load(x + i) + 1)

    def alone(world: Any) -> None:
        x = pkt.zeros(8)
        for _ in range(3):
            x += 1
            add[(1,)](x, 8)
        assert x.tolist() == [6.0] * 8
        x.fill_(0)

    assert failures(alone, 2, SEEDS) == {}


def test_the_host_races_only_where_the_bytes_are_the_same() -> None:
    def apart(world: Any) -> None:
        x, out = pkt.zeros(8), torch.zeros(4)
        read_peer[(1,)](x, out, world.device, 4)
        x[4:] = 1.0
        x[4:].fill_(2.0)
        assert x.shape == (8,)

    assert failures(apart, 2, SEEDS) == {}


THIRD = torch.tensor([3])
IS_THIRD = torch.arange(8) == 3
CHOSEN_WRITES: dict[str, Callable[[Any], Any]] = {
    "x[tensor] = v": lambda x: x.__setitem__(THIRD, 1.0),
    "x[list] += v": lambda x: x.__setitem__([3], x[[3]] + 1.0),
    "x[array] = v": lambda x: x.__setitem__(np.array([3]), 1.0),
    "x[mask] = v": lambda x: x.__setitem__(IS_THIRD, 1.0),
    "scatter_": lambda x: x.scatter_(0, THIRD, torch.ones(8)),
    "scatter_(dim=)": lambda x: x.scatter_(index=THIRD, dim=-1, value=1.0),
    "scatter_add_": lambda x: x.scatter_add_(0, THIRD, torch.ones(8)),
    "scatter_reduce_": lambda x: x.scatter_reduce_(0, THIRD, torch.ones(8), "amax"),
    "index_put_": lambda x: x.index_put_((THIRD,), torch.ones(1), accumulate=True),
    "index_add_": lambda x: x.index_add_(0, THIRD, torch.ones(1), alpha=2.0),
    "index_copy_": lambda x: x.index_copy_(0, THIRD, torch.ones(1)),
    "index_fill_": lambda x: x.index_fill_(0, THIRD - 8, 1.0),
    "index_reduce_": lambda x: x.index_reduce_(0, THIRD, torch.ones(1), "amax"),
    "masked_fill_": lambda x: x.masked_fill_(IS_THIRD, 1.0),
    "masked_scatter_": lambda x: x.masked_scatter_(IS_THIRD, torch.ones(1)),
    "put_": lambda x: x.put_(THIRD, torch.ones(1)),
    "of a view": lambda x: x.view(2, 4).t().masked_fill_(IS_THIRD.view(2, 4).t(), 1.0),
    "gather(out=)": lambda x: torch.gather(torch.ones(8), 0, THIRD, out=x[3:4]),
}
CHOSEN_READS: dict[str, Callable[[Any], Any]] = {
    "x[tensor]": lambda x: x[THIRD],
    "x[range]": lambda x: x[range(3, 4)],
    "x[mask]": lambda x: x[IS_THIRD],
    "x[i, tensor]": lambda x: x.view(2, 4)[0, THIRD],
    "x[:, None, tensor]": lambda x: x.view(1, 8)[:, None, THIRD],
    "gather": lambda x: x.gather(0, THIRD),
    "gather(input=)": lambda x: torch.gather(input=x, dim=0, index=THIRD),
    "index_select": lambda x: x.view(2, 4).index_select(1, THIRD)[0],
    "masked_select": lambda x: x.masked_select(IS_THIRD),
    "take": lambda x: x.take(THIRD - 8),
    "take_along_dim": lambda x: torch.take_along_dim(x, THIRD),
    "peer": lambda x: x.peer((x.world.rank + 2) % 3)[THIRD],
}
WHOLE_WRITES: dict[str, Callable[[Any], Any]] = {
    "inplace=": lambda x: torch.nn.functional.relu(x, inplace=True),
    "dropout": lambda x: torch.nn.Dropout(0.5, inplace=True)(x),
    "_foreach": lambda x: torch._foreach_add_([torch.ones(2), x], 1.0),
    "nn.init": lambda x: torch.nn.init.uniform_(x),
}
WHOLE_READS: dict[str, Callable[[Any], Any]] = {
    "a source": lambda x: torch.ones(8).masked_scatter_(IS_THIRD, x),
    "a value": lambda x: torch.ones(8).index_put_((torch.arange(8),), x),
    "masked_fill": lambda x: x.masked_fill(IS_THIRD, 1.0),
    "scatter": lambda x: x.scatter(0, THIRD, 1.0),
    "x[True]": lambda x: x[True],
}


@pytest.mark.parametrize("how", CHOSEN_WRITES)
def test_a_write_by_an_index_or_a_mask_is_one_of_these_elements(how: str) -> None:
    assert_found(read_peer, CHOSEN_WRITES[how], "store", 2)
    assert failures(beside, 2, SEEDS, args=(read_peer, CHOSEN_WRITES[how])) == {}


@pytest.mark.parametrize("how", CHOSEN_READS)
def test_a_read_by_an_index_or_a_mask_is_one_of_these_elements(how: str) -> None:
    ranks = 3 if how == "peer" else 2
    assert_found(write_peer, CHOSEN_READS[how], "load", ranks)
    assert failures(beside, ranks, SEEDS, args=(write_peer, CHOSEN_READS[how])) == {}


def beside(world: Any, kernel: Any, touch: Any) -> None:
    """Host code touches x[3] while peers' kernels use x[0] and x[1] only."""
    x, out = pkt.zeros(8), torch.zeros(8)
    kernel[(1,)](*((x, out) if kernel is read_peer else (x,)), world.device, 2)
    touch(x)


@pytest.mark.parametrize("how", WHOLE_WRITES)
def test_a_write_of_a_tensor_in_a_list_or_in_place_by_an_argument_is_found(how: str) -> None:
    assert_found(read_peer, WHOLE_WRITES[how], "store", 2)


@pytest.mark.parametrize("how", WHOLE_READS)
def test_an_operand_that_no_index_chooses_from_is_read_as_a_whole(how: str) -> None:
    assert_found(write_peer, WHOLE_READS[how], "load", 2)


def assert_no_access(code: Callable[[Any], Any]) -> None:
    """What rank 1 does with x, 8 elements that rank 0 writes, is no access."""

    def main(world: Any) -> None:
        x = pkt.empty(8)
        theirs = x.peer(1 - world.rank)
        if world.rank == 0:
            theirs.fill_(1.0)
        else:
            code(x)

    assert failures(main, 2, SEEDS) == {}


def test_a_view_by_an_index_tensor_and_a_wrong_index_are_no_access() -> None:
    def code(x: Any) -> None:
        assert x[torch.tensor(3)].shape == ()
        with pytest.raises(IndexError, match="index 8 is out of bounds"):
            x[torch.tensor([8])]
        assert x[torch.tensor([], dtype=torch.int64)].shape == (0,)

    assert_no_access(code)


def test_the_elements_of_an_index_are_found_in_no_mode_of_the_caller() -> None:
    def main(world: Any) -> int:
        x = pkt.zeros(8)
        with Counting() as counting:
            x[THIRD]
        return counting.calls

    assert pkt.launch(main, ranks=2, device="cpu") == [1, 1]


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@triton.jit
def count(flags, out, world, EVERYWHERE: tl.constexpr):
    if EVERYWHERE:
        pl.signal_all(flags, world)
        pl.wait(flags, world.size, world)
    else:
        pl.signal(flags, (world.rank + 1) % world.size, world)
        pl.wait(flags, 1, world)
        tl.store(out, tl.load(flags))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_counter_may_be_read_after_the_wait_that_saw_it(everywhere: bool) -> None:
    def reads(world: Any) -> None:
        flags, out = pkt.signals(1), torch.ones(1, dtype=torch.int32)
        world.barrier()
        count[(1,)](flags, out, world.device, everywhere)
        assert (flags[0], out[0]) == (world.size if everywhere else 1, 1)
        world.barrier()

    assert failures(reads, 3, SEEDS) == {}


@triton.jit
def put_by_address(x, bases, flag, world, N: tl.constexpr):
    i = tl.arange(0, N)
    peer = (world.rank + 1) % world.size
    theirs = tl.load(bases + peer) + (x.to(tl.int64) - tl.load(bases + world.rank))
    tl.store(theirs.to(tl.pointer_type(tl.float32)) + i, 5.0)
    pl.signal(flag, peer, world)
    pl.wait(flag, 1, world)
    tl.load(x + i)


def table_of_addresses(world: Any) -> None:
    x, flag = pkt.zeros(8), pkt.signals(1)
    bases = torch.tensor([x.peer(r).data_ptr() for r in range(world.size)])
    put_by_address[(1,)](x, bases, flag, world.device, 8)
    x.peer(0).data_ptr()


def test_reading_an_address_on_the_host_is_no_access() -> None:
    assert failures(table_of_addresses, 3, SEEDS) == {}


DESCRIPTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "empty_like": lambda x: torch.empty_like(x),
    "new_zeros": lambda x: x.new_zeros(3),
    "reshape": lambda x: x.reshape(2, 4),
    "flatten": lambda x: x.flatten(),
    "contiguous": lambda x: x.contiguous(),
    "tensor_split": lambda x: x.tensor_split(2),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(4),
    "requires_grad=": lambda x: setattr(x, "requires_grad", True),
    "grad=": lambda x: setattr(x, "grad", None),
    "data=": lambda x: setattr(x, "data", x[:4]),
    "real": lambda x: torch.real(x),
    "hsplit": lambda x: x.hsplit(2),
    "split_with_sizes": lambda x: x.split_with_sizes([4, 4]),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(2, 8)),
}


@pytest.mark.parametrize("how", DESCRIPTIONS)
def test_a_view_or_a_new_tensor_of_the_same_shape_is_no_access(how: str) -> None:
    assert_no_access(DESCRIPTIONS[how])


def test_a_copy_of_what_is_not_contiguous_is_a_read() -> None:
    def main(world: Any) -> None:
        x = pkt.empty(4, 2)
        theirs = x.peer(1 - world.rank)
        if world.rank == 0:
            theirs.fill_(1.0)
        else:
            x.t().reshape(-1)

    assert set(failures(main, 2, SEEDS)) == set(SEEDS)


@pytest.mark.parametrize("view", [lambda x, rank: x.plain(), lambda x, rank: x.peer(rank)], ids=["plain", "peer"])
def test_a_plain_tensor_over_its_own_memory_is_followed(view: Callable[[Any, int], torch.Tensor]) -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(8)
        mine = view(x, world.rank)
        if world.rank == 0:
            x.peer(1).fill_(1.0)
        else:
            mine.sum()

    found = failures(main, 2, SEEDS)
    assert set(found) == set(SEEDS)
    assert all(isinstance(race, DataRace) for race in found.values())


def fill_then(world: Any, call: Callable[[Any, Any, Any], Any]) -> None:
    """Host code queues a write, makes a call, and launches a kernel that reads the peer's copy."""
    x, spare, out = pkt.zeros(8), pkt.empty(4), torch.zeros(8)
    x.fill_(float(world.rank))
    call(world, x, spare)
    read_peer[(1,)](x, out, world.device, 8)


UNORDERED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "empty": lambda world, x, spare: pkt.empty(4),
    "free": lambda world, x, spare: spare.free(),
}
ORDERED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "zeros": lambda world, x, spare: pkt.zeros(4),
    "signals": lambda world, x, spare: pkt.signals(1, unwaited=True),
    "synchronize": lambda world, x, spare: (world.synchronize(), pkt.empty(4)),
    "item": lambda world, x, spare: (x[0].item(), spare.free()),
}


@pytest.mark.parametrize("how", UNORDERED)
def test_a_heap_call_orders_no_queued_work(how: str) -> None:
    """On GPUs it waits for no device work, so that a fast rank's kernel may read before a slow rank's fill."""
    found = failures(fill_then, 2, SEEDS, args=(UNORDERED[how],))
    assert set(found) == set(SEEDS)
    assert all(isinstance(race, DataRace) and "host code" in str(race) for race in found.values())


@pytest.mark.parametrize("how", ORDERED)
def test_a_call_that_waits_for_the_device_orders_the_work_before_it(how: str) -> None:
    assert failures(fill_then, 2, SEEDS, args=(ORDERED[how],)) == {}


@triton.jit
def put_and_signal(x, flags, world, N: tl.constexpr):
    i = tl.arange(0, N)
    pl.put(dst=x + i, src=x + i, peer=1 - world.rank, world=world)
    pl.signal(flags, 1 - world.rank, world)


def test_a_poll_on_the_host_orders_no_data() -> None:
    def main(world: Any) -> None:
        x, flags = pkt.ones(8), pkt.signals(1, unwaited=True)
        if world.rank == 0:
            put_and_signal[(1,)](x, flags, world.device, 8)
        else:
            while flags[0].item() == 0:
                pass
            x[0].item()

    found = failures(main, 2, SEEDS)
    assert list(found) == list(SEEDS)
    for failure in found.values():
        assert isinstance(failure, DataRace)
        assert "load of rank 1's x[0] by rank 1 host code" in str(failure)


HELPERS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.dumps(x),
    "statistics": lambda x: statistics.fmean(x),
    "numpy": lambda x: np.testing.assert_array_equal(x, x),
    "torch": lambda x: torch.testing.assert_close(x, x),
}


@pytest.mark.parametrize("how", HELPERS)
def test_a_race_inside_a_helper_names_the_users_line(how: str) -> None:
    assert_found(write_peer, HELPERS[how], "load", 2)


def test_a_deadlock_inside_a_helper_names_the_users_line() -> None:
    def main(world: Any) -> None:
        if world.rank == 0:
            with contextlib.ExitStack() as stack:
                stack.callback(world.barrier)

    for error in failures(main, 2, SEEDS).values():
        assert "rank 0: in barrier() at test_host_accesses.py:" in str(error)
