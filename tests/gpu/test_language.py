"""Every device function on GPUs: the programs that the simulator runs in tests/test_cases_cpu.py."""

import pytest

from tests.cases_language import CASES
from tests.gpu.run import Batch, on_ranks

BATCH = Batch({case.name: case.fn for case in CASES})


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", BATCH.programs)
def test_case(name: str, ranks: int) -> None:
    BATCH.check(name, ranks)
