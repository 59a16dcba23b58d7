"""The programs that gpu/test_graphs.py replays; a few launches of each in the simulator. There a replay is a launch, so
launches back to back would be the same ones again."""

import pytest

import pkt
from tests.gpu.cases_graphs import CASES, PROGRAMS, back_to_back, skewed


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("back to back")])
def test_many_launches(name: str, ranks: int) -> None:
    seeds = {2: (0, 1), 3: (3,)}[ranks]
    pkt.simulate(CASES[name], ranks=ranks, seeds=seeds, heap="1MiB", multicast=False).check()


@pytest.mark.parametrize("name", PROGRAMS)
def test_skewed_launches_are_right(name: str) -> None:
    pkt.simulate(skewed, ranks=2, seeds=(4, 6), args=(name, 4), heap="1MiB", multicast=False).check()


def test_the_result_of_an_earlier_launch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(PROGRAMS["all_gather_matmul"]):
        """Returns the result of the launch before."""

        before = None

        def operator(self):
            late, self.before = self.before, super().operator().clone()
            return self.before if late is None else late

    monkeypatch.setitem(PROGRAMS, "late", Late)
    with pytest.raises(pkt.RankFailed, match=r"\(4, [1-9]\d*\) launches and wrong results, not \(4, 0\)"):
        pkt.launch(back_to_back, ranks=2, device="cpu", args=("late", 3), heap="1MiB")
