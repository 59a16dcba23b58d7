"""The pictures of benchmarks/results: none is older than its data, too wide or without data."""

import json
import shutil

import pytest

from benchmarks import _bars, _pictures, _style
from benchmarks._harness import RESULTS

Image = pytest.importorskip("PIL.Image")
DRAWN = _pictures.pictures(RESULTS)


def test_every_picture_has_data_and_every_run_with_a_baseline_has_a_picture():
    assert {path.name for path in RESULTS.glob("*.png")} == {path.name for path in DRAWN}
    assert len(DRAWN) >= 21


@pytest.mark.parametrize("picture", DRAWN, ids=lambda picture: picture.stem)
def test_no_picture_is_older_than_its_data(picture):
    fresh = _pictures.drawn_from(picture) == _pictures.digest(DRAWN[picture])
    assert fresh, f"{picture.name}: run python -m benchmarks.figures"
    assert Image.open(picture).width <= 2000


def test_changed_data_make_a_picture_old_until_it_is_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    name = "matmul_reduce_scatter_2"
    picture, data = (shutil.copy(RESULTS / f"{name}.{kind}", tmp_path) for kind in ("png", "json"))
    (made,) = _pictures.pictures(tmp_path).items()
    record = json.loads(made[1][0].read_text())
    record["measured"][0]["ms"] *= 2
    made[1][0].write_text(json.dumps(record))
    assert _pictures.drawn_from(made[0]) != _pictures.digest(made[1])
    _pictures.draw(*made)
    assert _pictures.drawn_from(made[0]) == _pictures.digest(made[1])


def test_a_run_without_a_baseline_has_no_picture(tmp_path):
    record = {"benchmark": "collectives", "measured": [{"case": "all-reduce 1 MiB", "variant": "pkt default"}]}
    (tmp_path / "collectives_3.json").write_text(json.dumps(record))
    assert _pictures.pictures(tmp_path) == {}


def test_the_title_has_gpu_ranks_date_and_commit():
    record = json.loads((RESULTS / "collectives.json").read_text())
    texts = [text.get_text() for text in _pictures.collectives(record).texts]
    assert f"4 ranks on 4 NVIDIA H200, {record['date']}, commit {record['commit'][:7]}" in texts
    assert any("times as fast as NCCL" in text for text in texts)


@pytest.mark.parametrize("name", ["ulysses_attention_2", "dispatch_matmul", "moe"])
def test_bars_are_the_measured_operations_a_second(name):
    """The height of the first bars, pkt's, in the order of the cases."""
    pytest.importorskip("matplotlib")
    record = json.loads((RESULTS / f"{name}.json").read_text())
    variant = {"ulysses_attention_2": "pkt default", "moe": "pkt moe, captured"}.get(name, "pkt default, captured")
    wanted = [1e-9 * row["flops"] / row["ms"] for row in record["measured"] if row["variant"] == variant]
    figure = _bars.BARS[_pictures.name_of(name)](record)
    assert [bar.get_height() for bar in figure.axes[0].containers[0]] == pytest.approx(wanted)


def test_bars_of_runs_without_rows_of_variants():
    """A row's case is "full B16 S6144 H16/16 D128, parts, forward + backward", of each of 4 ranks."""
    pytest.importorskip("matplotlib")
    record = json.loads((RESULTS / "ring_attention_4.json").read_text())
    of = _bars.times(record)["full B16 S6144 H16/16 D128"]
    rows = {row["case"]: row["value"] for row in record["rows"]}
    assert of["parts, forward + backward"] == rows["full B16 S6144 H16/16 D128, parts, forward + backward"]
    both = [axes.containers[0][0].get_height() for axes in _bars.ring_attention(record).axes]
    work = 4e-9 * 16 * 16 * 6144**2 * 128 / 4
    assert both == pytest.approx([work / of["parts"], 3.5 * work / of["parts, forward + backward"]])
    decoding = json.loads((RESULTS / "flash_decode.json").read_text())
    first = _bars.flash_decode(decoding).axes[0].containers[0][0].get_height()
    assert first == pytest.approx(1e3 * _bars.times(decoding)["B 1, heads 96/96, S = 32768"]["pkt default, captured"])


def test_names_of_lines_stay_apart():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    _style.named(axes, [("a", 1.0, "k"), ("b", 1.0, "k"), ("c", 0.2, "k"), ("d", 3.0, "k")], 0.5)
    assert [(text.get_text(), text.xy[1]) for text in axes.texts] == [("d", 3.0), ("a", 1.0), ("b", 0.5), ("c", 0.0)]
