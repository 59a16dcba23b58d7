"""benchmarks.nodes without a GPU: its products are right in the simulator, and it would notice if they were not."""

from __future__ import annotations

import functools

import pytest
import torch

import pkt
from benchmarks import nodes
from pkt.errors import RankFailed


def run(operator: str, wrong: bool, world: pkt.World) -> list[str]:
    runs, exact = nodes.OPERATORS[operator](world, world, 32)
    for name, each in runs.items():
        nodes.checked(world, name, each, torch.roll(exact, 1, 0) if wrong else exact)
    return list(runs)


@pytest.mark.parametrize("near", [1, 2])
@pytest.mark.parametrize("operator", nodes.OPERATORS)
def test_products_are_right(operator: str, near: int) -> None:
    program = functools.partial(run, operator, False)
    names, *_ = pkt.launch(program, ranks=2 * near, node_size=near, device="cpu", sms=4)
    assert names[:2] == ["one node", "two nodes"]
    assert len(names) == 2 + len(nodes.COMMUNICATORS) * (operator == "all_gather_matmul")


def test_a_wrong_product_is_found() -> None:
    with pytest.raises(RankFailed, match=r"one node: error .*, wanted at most 0\.01"):
        pkt.launch(functools.partial(run, "all_gather_matmul", True), ranks=2, node_size=1, device="cpu", sms=4)


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(pkt.Unsupported, match="found 3 ranks: give torchrun an even number"):
        nodes.main()
