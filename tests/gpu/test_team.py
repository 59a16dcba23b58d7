"""Teams on GPUs: kernels and collectives reach the members."""

import pytest

from tests.gpu.run import launch, on_ranks
from tests.runtime.test_team import TEAMS, reach


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", TEAMS)
def test_kernels_and_collectives_reach_the_members(name: str, ranks: int) -> None:
    of, teams = TEAMS[name]
    if of != ranks:
        pytest.skip(f"these teams are of {of} ranks")
    launch(reach, ranks, teams)
