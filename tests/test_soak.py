"""A short soak of simulated ranks, and that the soak sees what grows."""

import pytest

from benchmarks import soak


def test_nothing_grows_in_a_short_soak():
    found = soak.soak("cpu", 2.0, seed=1, ranks=3, calls=4)
    assert found["worlds"] >= 3
    assert found["grown"] == {}
    assert 0 < found["distance"] < soak.BOUND


@pytest.mark.parametrize("name", soak.SLACK)
def test_what_grows_is_seen(name):
    steady = dict.fromkeys(soak.SLACK, 100.0)
    states = [{**steady, name: 100.0 + 30 * at} for at in range(9)]
    assert list(soak.grown(states)) == [name]
    assert soak.grown([steady] * 9) == {}
