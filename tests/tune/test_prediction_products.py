"""pkt.tune.predict of products: what it follows from, and whom it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import operators
from pkt.model.gpu import H200
from pkt.tune import predict

PRODUCTS = [name for name, operator in operators().items() if operator.across and operator.tuning is not None]


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_prediction_beats_the_links_or_the_tensor_cores(name: str) -> None:
    """By hand: the bytes of a part of A or of C over each kind of links, and the product."""
    for nodes, size, (M, N, K) in ((2, 8, (8192, 8192, 512)), (8, 8, (8192, 256, 8192)), (3, 1, (6144, 4096, 8192))):
        part = 2 * M // (nodes * size) * (K if name == "all_gather_matmul" else N)
        times = 2 if name == "matmul_all_reduce" else 1
        moved = max(times * (nodes - 1) * part / 50e9, times * (size - 1) * nodes * part / H200.link)
        found = predict(name, (M, N, K), nodes, size)
        assert found.parts.limit == pytest.approx(max(moved, 2 * M * N * K / H200.flops))
        assert found.seconds > found.parts.limit + H200.launch
        assert "tensor cores" in str(found)
        assert found.seconds < predict(name, (2 * M, N, K), nodes, size).seconds


def test_a_product_hides_what_it_moves() -> None:
    """Over 16 GPUs of two nodes; but for the gather at the end of matmul_all_reduce."""
    for name in PRODUCTS:
        parts = predict(name, (8192, 8192, 8192), 2, 8).parts
        assert parts.compute > 0.9e-3 > parts.network > 0.1e-3
        behind = 0.5 * parts.node if name == "matmul_all_reduce" else 0.0
        assert parts.total == pytest.approx(parts.compute + behind, rel=0.2)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (8192, 8192, 512), (256, 4096, 4096)])
def test_candidates_are_no_slower_than_the_form_by_itself(name: str, shape: tuple[int, int, int]) -> None:
    """By the model. They have settings of the form, and none beats the links and the tensor cores."""
    form, found = operators()[name].across["nodes"], predict(name, shape, 2, 8)
    key = {**dict(zip("MNK", shape)), "dtype": "bf16", "size": 16, "nodes": 2, "node_size": 8, "network": found.network}
    assert form.space is not None
    candidates = form.space(key, H200)
    assert len(candidates) > 10
    assert all(config.keys() == {"mode", "num_comm_sms", "tiles"} for config in candidates)
    assert found.parts.limit < min(form.seconds(config, key, H200).total for config in candidates) <= found.seconds


@pytest.mark.parametrize(
    ("given", "error", "wanted"),
    [
        ({"operator": "matmul_reduce_scatter", "shape": (64, 3)}, ShapeError, r"wanted \(M, N, K\) of the product"),
        ({"shape": (8, 8, 8)}, ShapeError, "M divisible by 16 ranks"),
        ({"dtype": "fp32"}, DtypeError, "dtype"),
    ],
)
def test_wrong_calls_are_refused(given: dict[str, Any], error: type[Exception], wanted: str) -> None:
    call = {"operator": "all_gather_matmul", "shape": (64, 8, 8), "nodes": 2, "node_size": 8} | given
    with pytest.raises(error, match=wanted):
        predict(**call)
