"""The kernels of gpu/test_timeouts.py in the simulator: a dropped signal is a deadlock that names the same waiters."""

import pytest

import pkt
from pkt.simulate.findings import Deadlock
from tests.gpu.cases_timeouts import HOWS, drop_once, waiters


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", HOWS)
def test_a_dropped_signal_names_the_waiters(how: str, ranks: int) -> None:
    with pytest.raises(Deadlock) as caught:
        pkt.launch(drop_once, ranks=ranks, device="cpu", args=(how, ranks - 1, 1), heap="1MiB")
    found = {(w.rank, w.program if isinstance(w.program, int) else w.program[0]) for w in caught.value.waits}
    assert found == waiters(how, ranks, ranks - 1, 1)
