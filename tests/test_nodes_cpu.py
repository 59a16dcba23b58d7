"""The parts of tests/gpu/cases_nodes.py in the simulator, with two nodes of one rank and of two."""

import functools

import pytest

import pkt
from tests.gpu import cases_nodes

ON_GPUS = ("memory",)  # of NVSHMEM's


@pytest.mark.parametrize("name", [name for name in cases_nodes.PARTS if name not in ON_GPUS])
def test_part_is_right(name: str) -> None:
    pkt.launch(functools.partial(_run, name), ranks=2, node_size=1, device="cpu", sms=4)


@pytest.mark.parametrize("name", ["places", "calls", "within", "all_reduce", "moe"])
def test_part_is_right_on_nodes_of_two(name: str) -> None:
    pkt.launch(functools.partial(_run, name), ranks=4, node_size=2, device="cpu", sms=4)


def _run(name: str, world: pkt.World) -> None:
    with world.torch_device:
        cases_nodes.PARTS[name](world)


def test_every_operator_over_nodes_has_a_part() -> None:
    assert len(cases_nodes.ACROSS) == 11
    assert all([*cases_nodes.cases_of(name)] for name in cases_nodes.ACROSS)
