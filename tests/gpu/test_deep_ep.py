"""DeepEP's names on GPUs: the programs of tests/test_deep_ep.py."""

import pytest

from tests.gpu.run import launch, on_ranks
from tests.test_deep_ep import PROGRAMS


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, ranks: int) -> None:
    program, *arguments = PROGRAMS[name]
    launch(program, ranks, *arguments)
