"""The table of a search says what was found, what was dropped and why, and how good the model was."""

from dataclasses import replace

import pytest
from rich.console import Console

import pkt
from pkt.model.config import Config
from pkt.tune import tables
from pkt.tune.report import report
from pkt.tune.search import Candidate, Search
from tests.tune.helpers import OPERATORS

KEY = {"M": 64, "dtype": "bf16"}


def printed(search, width=200):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(report(search))
    return console.export_text()


def config(n):
    return Config(num_comm_sms=n, tiles=(128, 256, 64, 8, 8, 3))


FOUND = Search(
    what="all_gather_matmul",
    key=KEY,
    candidates=(
        Candidate(config(8), 1.1e-3, (1.0e-3, 1.2e-3, 1.4e-3)),
        Candidate(config(16), 1.0e-3, (0.8e-3, 0.8e-3)),
        Candidate(config(20), 1.599e-3, (1.6e-3,)),
        Candidate(config(24), 1.2e-3),
        Candidate(config(32), 0.9e-3, dropped="rank 1: out of registers"),
        Candidate(config(40), 0.95e-3, dropped="rank 1: out of registers"),
        Candidate(config(48), 1.3e-3, (0.1e-3,), dropped="rank 2: the result is wrong"),
    ),
    best=config(16),
    seconds=3.25,
)


def cells(text):
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_predicted_and_measured_side_by_side():
    text = printed(FOUND)
    assert text.startswith("all_gather_matmul: M=64, dtype=bf16")
    # place, place by the model, predicted, median, off, spread
    assert cells(text) == [
        ["1", "3", "1", "0.8", "+25%", "0%", "num_comm_sms=16"],
        ["2", "4", "1.1", "1.2", "-8%", "33%", "num_comm_sms=8"],
        ["3", "7", "1.599", "1.6", "0%", "", "num_comm_sms=20"],
    ]


def test_settings_are_shown_as_they_are():
    found = Search(
        "f", {}, (Candidate(Config(s="[/]"), None, (1e-3,)), Candidate(Config(s="[b]"), None, (2e-3,))), None, 1.0
    )
    assert [row[-1] for row in cells(printed(found))] == ["s=[/]", "s=[b]"]


def test_lines_below_the_table():
    lines = printed(FOUND).splitlines()
    assert "3 of 7 measured in 3.2 s" in lines
    assert "all: tiles=128x256x64,8,8,3" in lines
    assert "model off by: median 8%, worst 25% of 3" in lines
    assert "1 not measured; of these the model's first: 1.2 ms, num_comm_sms=24" in lines
    assert "dropped: num_comm_sms=32 and 1 more: rank 1: out of registers" in lines
    assert "dropped: num_comm_sms=48: rank 2: the result is wrong" in lines


def test_a_function_that_launches_nothing_takes_no_time_on_the_modelled_clock():
    (found,) = pkt.launch(lambda world: pkt.tune.tune(lambda n: n, configs=pkt.space(n=[1, 2])), 1, device="cpu")
    text = printed(replace(found, candidates=(*found.candidates, Candidate(Config(n=3), 1e-3, (0.0, 0.0)))))
    assert [row[-1] for row in cells(text)] == ["n=1", "n=2", "n=3"]
    assert "3 of 3 measured" in text
    assert "n=2" in found._repr_html_()


def test_without_a_model_and_interrupted():
    some = (Candidate(Config(x=1), None, (1e-3,)), Candidate(Config(x=2)))
    text = printed(Search("kernel", {}, some, Config(x=1), 0.0, interrupted=True))
    assert cells(text) == [["1", "1", "", "x=1"]]
    assert "1 of 2 measured, then interrupted: the best so far" in text.splitlines()
    assert "1 not measured" in text.splitlines()
    assert "model" not in text.split("settings")[1]


def test_a_long_search_is_cut_short():
    some = tuple(Candidate(Config(x=n), None, (n * 1e-3,)) for n in range(1, 31))
    text = printed(Search("kernel", {}, some, Config(x=1), 0.0))
    assert [row[0] for row in cells(text)] == [str(n) for n in range(1, 25)]
    assert "shown: the first 24; the slowest took 30 ms" in text.splitlines()


def test_a_search_that_found_nothing():
    text = printed(Search("kernel", {}, (Candidate(Config(x=1), dropped="rank 0: no"),), None, 1.0))
    assert cells(text) == []
    assert "dropped: Config(x=1): rank 0: no" in text.splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_shipped_results_can_be_shown(width):
    for search in tables.measured(OPERATORS["all_gather_matmul"]):
        text = printed(search, width)
        assert "gpu=NVIDIA H200" in text
        assert f"{len(search.candidates)} of {len(search.candidates)} measured" in text
        assert max(map(len, text.splitlines())) <= width
