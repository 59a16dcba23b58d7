"""The picture shows what the searches found: a line a size over num_comm_sms."""

import builtins

import pytest

from pkt.errors import Unsupported
from pkt.model.config import Config
from pkt.tune import tables
from pkt.tune.picture import draw
from pkt.tune.search import Candidate, Search
from tests.tune.helpers import OPERATORS


def candidate(n, chunk, predicted, *times, dropped=""):
    return Candidate(Config(num_comm_sms=n, chunk=chunk), predicted, times, dropped)


SMALL = Search(
    "operator",
    {"M": 64, "N": 32, "K": 16},
    (
        candidate(16, 1, 2.2e-3, 2e-3, 2e-3, 5e-3),
        candidate(16, 2, 3.0e-3, 4e-3),
        candidate(4, 1, 2.5e-3, 3e-3),
        candidate(8, 1, 2.1e-3),
        candidate(32, 1, 1.0e-3, 1e-3, dropped="rank 1: wrong"),
        Candidate(Config(mode="pull"), 1e-3, (1e-3,)),
    ),
    Config(num_comm_sms=16, chunk=1),
    1.0,
)


def lines(figure):
    """Of each line that has points: its style, and the points."""
    (axes,) = figure.axes
    return [(line.get_linestyle(), line.get_xydata().tolist()) for line in axes.lines if len(line.get_xydata())]


def labels(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_fastest_at_each_split_over_the_best():
    found = draw([SMALL])
    predicted, measured, best = (points for _, points in lines(found))
    assert measured == [[4, pytest.approx(1.5)], [16, pytest.approx(1.0)]]
    assert predicted == [[4, pytest.approx(1.25)], [8, pytest.approx(1.05)], [16, pytest.approx(1.1)], [32, 0.5]]
    assert best == [[16, 1.0]]
    assert labels(found) == ["64 x 32 x 16: 2 ms at 16"]
    assert [tick.get_text() for tick in found.axes[0].get_xticklabels()] == ["4", "16"]


def test_only_predicted_is_said_so():
    some = tuple(Candidate(Config(num_comm_sms=n), seconds) for n, seconds in ((2, 2e-3), (0, 1e-3), (4, 9e-3)))
    found = draw([Search("kernel", {"rows": 7}, some, None, 0.0)])
    assert labels(found) == ["rows=7: 1 ms at 0, predicted"]
    assert lines(found)[0][1] == [[0, 1.0], [2, 2.0], [4, pytest.approx(9.0)]]
    assert found.axes[0].get_ylim()[1] == 2.5  # what is nine times the best presses nothing together


def test_another_setting():
    found = draw([SMALL], setting="chunk")
    assert lines(found)[1][1] == [[1, 1.0], [2, 2.0]]


def test_nothing_to_draw():
    with pytest.raises(Unsupported, match="no candidate with a time that has the setting stages"):
        draw([SMALL], setting="stages")


def test_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'pkt-triton\[plot\]'"):
        draw([SMALL])


def test_shipped_results_are_drawn(tmp_path):
    searches = [search for search in tables.measured(OPERATORS["matmul_all_reduce"]) if search.key["size"] == 4]
    found = draw(searches, title="matmul_all_reduce, 4 H200")
    assert len(labels(found)) == len(searches) == 5
    found.savefig(tmp_path / "splits.png")
    assert (tmp_path / "splits.png").stat().st_size > 10_000
