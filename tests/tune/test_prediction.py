"""pkt.tune.predict: what it follows from, whom it refuses, and the table in docs/scale-out.md."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import pkt
from benchmarks import figures, scale_out
from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import operators
from pkt.model.gpu import H200
from pkt.model.network import LATENCY, Network
from pkt.tune import predict
from pkt.tune.prediction import predictable

OVER_NODES = [name for name, operator in operators().items() if predictable(operator) and operator.tuning is None]


def test_the_committed_predictions_are_those_of_today() -> None:
    for record in (scale_out.predicted(), scale_out.published()):
        path = scale_out.RESULTS / f"{record['benchmark']}.json"
        assert path.read_text() == scale_out.text(record), f"{path.name}: run python -m benchmarks.scale_out"
        assert json.loads(scale_out.text(record)) == record


def test_the_tables_of_the_docs_have_the_predictions() -> None:
    record = scale_out.predicted()
    last = predict("all_reduce", 128 << 20, 512, 8)
    wanted = f"{1e3 * last.seconds:.3g} ({last.efficiency:.0%})"
    assert record["predicted"]["all_reduce"]["256"][-1]["gpus"] == 4096
    (row,) = [line for line in figures.predicted_table(record).splitlines() if line.startswith("| 4,096 ")]
    assert row.split(" | ")[4] == wanted
    page = (figures.ROOT / "docs/scale-out.md").read_text(encoding="utf-8")
    assert figures.predicted_table(record) in page, "run python -m benchmarks.figures"
    assert figures.published_table(scale_out.published()) in page, "run python -m benchmarks.figures"


def test_the_shape_of_published_times_is_predicted() -> None:
    """Of the exchange of tokens over 16 to 256 GPUs. A model without the network, or without the part that stays in a
    node, misses by more."""
    record = scale_out.published()
    for row in record["compared"]:
        assert 0.85 < row["published_us"] / row["predicted_us"] < 1.15, row


@pytest.mark.parametrize("name", OVER_NODES)
def test_no_prediction_beats_the_links(name: str) -> None:
    """By hand: what leaves a rank over the network at line rate, and over the links of its node, and a latency."""
    for nodes, size in ((2, 8), (64, 8), (512, 8), (3, 1)):
        n, ranks = 3 << 20, nodes * size
        part = 2 * n if name == "all_gather" else 2 * n / ranks
        far = {"all_reduce": 2, "all_to_all": size}.get(name, 1) * (nodes - 1) * part
        near = {"all_reduce": 2}.get(name, 1) * (size - 1) * nodes * part
        found = predict(name, n, nodes, size)
        assert found.parts.limit == pytest.approx(max(far / 50e9, near / H200.link), rel=1e-4)
        assert found.seconds > found.parts.limit + LATENCY + H200.launch
        assert 0 < found.efficiency < 1


@pytest.mark.parametrize("name", OVER_NODES)
def test_more_bytes_slower_networks_and_more_latency_take_longer(name: str) -> None:
    def seconds(mib: int = 64, network: Any = "400Gb") -> float:
        return predict(name, mib << 19, 16, 8, network).seconds

    assert seconds() < seconds(128) < 4 * seconds()
    assert seconds() <= seconds(network="200Gb") < seconds(network="50Gb/s")
    slow = Network("far away", 50e9, latency=1e-3)
    assert seconds() + 9e-4 < seconds(network=slow) < seconds() + 3e-3


def test_a_prediction_says_what_it_is() -> None:
    found = predict(pkt.all_reduce, (1024, 4096), 4, 8, dtype="fp32")
    assert (found.operator, found.mode, found.dtype, found.network.rate) == ("all_reduce", "nodes", "fp32", 50e9)
    assert "predicted, not measured" in str(found)
    assert math.isclose(found.seconds, found.parts.total)


@pytest.mark.parametrize(
    ("given", "error", "wanted"),
    [
        ({"operator": "broadcast"}, ShapeError, "operator: found 'broadcast', wanted one with a form over nodes: "),
        ({"operator": 3}, ShapeError, "operator"),
        ({"nodes": 1}, ShapeError, "nodes: found 1, wanted an integer from 2"),
        ({"node_size": 0}, ShapeError, "node_size"),
        ({"network": "400GB"}, ShapeError, "gigabits a second"),
        ({"network": "0Gb"}, ShapeError, "gigabits a second"),
        ({"shape": (0, 3)}, ShapeError, "shape"),
        (
            {"shape": (1 << 40, 3)},
            ShapeError,
            "shape: found a tensor .1099511627776, 3., wanted at most 1099511627776 elem",
        ),
        ({"shape": (7, 3)}, ShapeError, "dimension 0 divisible by 16 ranks"),
        ({"dtype": torch.int32}, DtypeError, "dtype"),
    ],
)
def test_wrong_calls_are_refused(given: dict[str, Any], error: type[Exception], wanted: str) -> None:
    call = {"operator": "reduce_scatter", "shape": (64, 3), "nodes": 2, "node_size": 8} | given
    with pytest.raises(error, match=wanted):
        predict(**call)
