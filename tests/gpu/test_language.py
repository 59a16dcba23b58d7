"""Every device function on GPUs: the programs that the simulator runs in tests/test_cases_cpu.py."""

import pytest

from tests.cases_language import CASES
from tests.gpu.run import Batch, launch, on_ranks
from tests.language.test_flagged_short import exchange

BATCH = Batch({case.name: case.fn for case in CASES})


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", BATCH.programs)
def test_case(name: str, ranks: int) -> None:
    BATCH.check(name, ranks)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["each", "all"])
def test_short_flagged_words(how: str, ranks: int) -> None:
    launch(exchange, ranks, 2, how, 1000)
