"""The pictures of benchmarks/results: none is older than its data, too wide or without data."""

import json
import shutil

import pytest

from benchmarks import _pictures
from benchmarks._harness import RESULTS

Image = pytest.importorskip("PIL.Image")
DRAWN = _pictures.pictures(RESULTS)


def test_every_picture_has_data_and_every_run_with_a_baseline_has_a_picture():
    assert {path.name for path in RESULTS.glob("*.png")} == {path.name for path in DRAWN}
    assert len(DRAWN) >= 11


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


def test_names_of_lines_stay_apart():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    _pictures.named(axes, [("a", 1.0, "k"), ("b", 1.0, "k"), ("c", 0.2, "k"), ("d", 3.0, "k")], 0.5)
    assert [(text.get_text(), text.xy[1]) for text in axes.texts] == [("d", 3.0), ("a", 1.0), ("b", 0.5), ("c", 0.0)]
