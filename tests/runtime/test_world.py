"""World: collective objects, buffers, opening and closing, and the errors without a world."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import pkt
from pkt.errors import CollectiveMismatch, DtypeError, RankError, ShapeError, TransportError, Unsupported
from pkt.runtime.processes import wire


def test_every_rank_gets_every_object(ranks):
    def main(world):
        everything = {
            "rank": world.rank,
            (1, 2): [None, 1.5, b"x"],
            "t": torch.full((2,), world.rank, dtype=torch.bfloat16),
        }
        gathered = world.all_gather_object(everything)
        assert [g["rank"] for g in gathered] == list(range(world.size))
        assert [g["t"][1].item() for g in gathered] == list(range(world.size))
        assert gathered[world.rank] is not everything
        assert world.broadcast(f"from {world.rank}", root=2) == "from 2"
        with pytest.raises(RankError, match="root"):
            world.broadcast(1, root=3)
        with pytest.raises(DtypeError, match="found object"):
            world.all_gather_object(object())

    ranks(3, main)


PLAIN = [None, True, 3, -2.5, float("inf"), "text", b"\x00\xff", torch.bfloat16]
NESTED = [[1, [2]], (1, (2,)), {"a": 1, 2: (3,)}, {1, 2}, {}, {"tuple": [1]}]
ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.int64(4),
    torch.ones(2, 3).to(torch.bfloat16),
    torch.zeros(0, 2),
    torch.tensor(3),
    torch.ones(2)[::2],
    torch.arange(6.0).view(2, 3).t(),
]


@pytest.mark.parametrize("value", PLAIN + NESTED + ARRAYS)
def test_wire_carries_values(value):
    back = wire.decode(wire.encode(value))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert (back == value).all()
    else:
        assert back == value


STRANGE = [
    *('{"tensor": ["os", [1], ""]}', '{"object": 1}', '{"a": 1, "b": 2}', "{}", "not json"),
    '{"tuple": [], "set": []}',
    *("[" * 100_000, '{"tuple": ' * 300 + "1" + "}" * 300, '{"tuple": 1}', '{"set": [[1]]}', '{"tensor": 3}'),
    *(
        '{"tensor": ["float32", [7], "AAAA"]}',
        '{"tensor": ["float32", "x", "AAAA"]}',
        '{"ndarray": ["f4", [1e99], ""]}',
    ),
]


@pytest.mark.parametrize("text", STRANGE)
def test_wire_refuses_other_text(text):
    with pytest.raises(ValueError):
        wire.decode(text)


@pytest.mark.parametrize("text", [*STRANGE, None, 7, [], {}])
def test_an_object_that_no_rank_encoded_is_refused(ranks, monkeypatch, text):
    def main(world):
        original = world.backend.exchange
        monkeypatch.setattr(
            world.backend, "exchange", lambda value, what: [original(value, what)[0], text], raising=False
        )
        for call in (lambda: world.all_gather_object(1), lambda: world.broadcast(1, root=1)):
            with pytest.raises(TransportError, match=f"rank {world.rank}: the object of rank 1 in .*; refused"):
                call()

    ranks(2, main)


def test_wire_refuses_endless_values():
    endless, deep = {}, 1
    endless["self"] = endless
    with pytest.raises(DtypeError, match=f"more than {wire.MAX_NESTED} nested"):
        wire.encode(endless)
    for _ in range(wire.MAX_NESTED):
        deep = {1: deep}
    assert wire.decode(wire.encode(deep)) == deep
    with pytest.raises(DtypeError):
        wire.encode([deep])


def test_ranks_in_different_calls_are_named(ranks):
    with pytest.raises(CollectiveMismatch, match=r"rank 0: barrier\(\); rank 1: all_gather_object\(\)"):
        ranks(2, lambda world: world.barrier() if world.rank == 0 else world.all_gather_object(1))


def test_buffers_are_made_once(ranks):
    def main(world):
        made = [world.keep(("inbox", 4), lambda: pkt.empty(4)) for _ in range(3)]
        assert made[0] is made[1] is made[2]
        assert world.keep("other", lambda: 5) == 5
        return len(world.heap.live)

    assert ranks(2, main) == [1, 1]


def test_init_inside_a_world_returns_it(ranks):
    def main(world):
        assert pkt.init() is world
        assert pkt.init(heap="64KiB") is world
        assert pkt.current_world() is world
        with pytest.raises(
            ShapeError,
            match="pkt.init: heap: found 8 GiB, wanted at most 1 MiB, which",
        ):
            pkt.init(heap="8GiB")

    ranks(2, main)


def test_the_context_manager_closes_the_world(ranks):
    def main(world):
        with world as inner:
            assert inner is world
        assert world.closed
        with pytest.raises(pkt.Closed, match="with world: the world is closed"), world:
            pass

    ranks(1, main)


def test_an_error_in_the_body_is_not_hidden_by_a_guard_word(ranks):
    def main(world):
        flags = pkt.signals(1)
        world.heap.words_of(flags._allocation).zero_()
        with pytest.raises(ZeroDivisionError), world:
            1 / 0
        assert world.closed

    ranks(1, main)


def test_the_world_argument_of_a_kernel(ranks):
    def main(world):
        device = world.device
        assert world.device is device
        assert device.status.data_ptr() == world.backend.base
        return device.rank, device.size.value, device.stride.value, device.multicast.value

    assert ranks(2, main) == [(0, 2, 1 << 20, False), (1, 2, 1 << 20, False)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_errors_name_the_simulator():
    for call in (pkt.init, lambda: pkt.launch(print, ranks=2, device="cuda")):
        with pytest.raises(Unsupported, match=r'found .*GPU.*pkt.launch\(fn, ranks=4, device="cpu"\)'):
            call()
    with pytest.raises(Unsupported, match="there is no world: call pkt.init"):
        pkt.current_world()
    with pytest.raises(Unsupported, match=r"pkt.empty: there is no world"):
        pkt.empty(3)


def test_wrong_arguments_of_launch_are_refused():
    for ranks in (0, -1, 2.0, True):
        with pytest.raises(ShapeError, match="pkt.launch: ranks"):
            pkt.launch(print, ranks=ranks, device="cpu")
    with pytest.raises(Unsupported, match='"cuda" or "cpu"'):
        pkt.launch(print, device="tpu")
    with pytest.raises(Unsupported, match="found the option 'smss': wanted compile, faults, "):
        pkt.launch(print, ranks=1, device="cpu", smss=4)
    with pytest.raises(ShapeError, match="the simulator: sms: found 0, wanted an integer from 1"):
        pkt.launch(print, ranks=1, device="cpu", sms=0)
    assert pkt.launch(lambda world: world.size, ranks=2, device="cpu", timeout=3.0, multicast=False) == [2, 2]


def test_importing_pkt_touches_no_driver():
    code = "import sys, torch, triton; had = set(sys.modules); import pkt; print(*set(sys.modules) - had)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pkt.errors" in run.stdout
    assert "cuda" not in run.stdout
