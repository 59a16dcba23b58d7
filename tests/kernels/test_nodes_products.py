"""Products over several nodes, where the conformance suite does not look: bytes, order, settings, several weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pkt
from pkt.errors import ShapeError
from pkt.kernels.all_gather_matmul import over_nodes
from pkt.simulate.far import Far
from tests.kernels.helpers import DTYPES, on_ranks
from tests.simulate.helpers import failures

SMALL = {"tiles": (16, 16, 16)}
CALLS = {  # of tensors of small whole numbers, whose sums are exact: (call, shape of a, of b)
    "all_gather_matmul": (pkt.all_gather_matmul, (36, 24), (24, 32)),
    "matmul_reduce_scatter": (pkt.matmul_reduce_scatter, (80, 24), (24, 32)),
    "matmul_all_reduce": (pkt.matmul_all_reduce, (80, 24), (24, 32)),
}
BYTES = {  # that leave a rank over the network: a has 36 * 24 floats, the product 80 * 32
    "all_gather_matmul": lambda N, W: 4 * 36 * 24 * (N - 1),
    "matmul_reduce_scatter": lambda N, W: 4 * 80 // W * 32 * (N - 1),
    "matmul_all_reduce": lambda N, W: 2 * 4 * 80 // W * 32 * (N - 1),
}


def whole(shape: tuple[int, ...], *seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers from -2 to 2, the same for the same seed on every rank."""
    generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(("node_size", "programs"), [(1, 32), (2, 48)])
def test_more_programs_gather_by_default_where_nodes_have_several_ranks(
    monkeypatch: pytest.MonkeyPatch, node_size: int, programs: int
) -> None:
    found = []
    space = over_nodes._space

    def seen(call: Any, **more: Any) -> Any:
        found.append(space(call, **more))
        return found[-1]

    monkeypatch.setattr(over_nodes, "_space", seen)

    def main(world: Any) -> None:
        pkt.all_gather_matmul(torch.ones(400, 16), torch.ones(16, 32), tiles=(16, 16, 16), world=world)

    pkt.launch(main, ranks=2 * node_size, device="cpu", node_size=node_size, sms=64)
    assert [one.num_comm_sms for one in found] == [programs] * 2 * node_size


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that ranks have put over the network."""
    found: dict[int, int] = {}
    put = Far._put

    def counted(self: Any, to: int, data: Any, *rest: Any, **more: Any) -> None:
        rank = self.m.current.rank
        assert (rank - to) % self.m.node_size == 0, "not along the rail"
        found[rank] = found.get(rank, 0) + (data[0].nbytes if data is not None else 0)
        put(self, to, data, *rest, **more)

    monkeypatch.setattr(Far, "_put", counted)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_no_put_is_overtaken_by_those_of_the_next_launch(name: str) -> None:
    def launches(world: Any) -> None:
        for _ in range(3):
            CALLS[name][0](torch.ones(2 * 3, 8), torch.ones(8, 6), mode="nodes", num_comm_sms=1, world=world)

    assert failures(launches, seeds=range(10), node_size=1, sms=3) == {}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("ranks", "node_size"), [(4, 2), (2, 1)])
def test_bytes_over_the_network(name: str, ranks: int, node_size: int, sent: dict[int, int]) -> None:
    call, a, b = CALLS[name]
    on_ranks(ranks, lambda world: call(torch.ones(a), torch.ones(b), **SMALL), node_size=node_size)
    assert sent == dict.fromkeys(range(ranks), BYTES[name](ranks // node_size, ranks))


def test_several_weights_gather_once(sent: dict[int, int]) -> None:
    """Of other columns each, with and without a bias, by rows and by columns."""

    def main(world: Any) -> None:
        for launch in range(2):
            for dim, shard in enumerate(("rows", "columns")):
                a = [whole((18, 8), r, launch) for r in range(4)]
                full = torch.cat(a, dim)
                weights = [whole((full.shape[1], n), world.rank, n) for n in (5, 40, 16)]
                biases = [whole((n,), n, 7) for n in (5, 40, 16)]
                found = pkt.all_gather_matmul(a[world.rank], weights, bias=biases, shard=shard, num_comm_sms=1, **SMALL)
                for c, w, bias in zip(found, weights, biases):
                    assert torch.equal(c, full @ w + bias)

    on_ranks(4, main, node_size=2, seed=1)
    assert sent == dict.fromkeys(range(4), 4 * 4 * 18 * 8)


@pytest.mark.parametrize("shard", ["rows", "columns"])
def test_a_kept_a_is_not_gathered_again(shard: Any, sent: dict[int, int]) -> None:
    def main(world: Any) -> None:
        dim = int(shard == "columns")
        a = [whole((18, 8), r) for r in range(4)]
        full = torch.cat(a, dim)
        b = whole((full.shape[1], 12), world.rank, 1).requires_grad_()
        c = pkt.all_gather_matmul(a[world.rank], b, shard=shard, keep="whole")
        grad = whole(tuple(c.shape), world.rank, 2)
        c.backward(grad)
        assert torch.equal(c.detach(), full @ b.detach())
        assert torch.equal(b.grad, full.t() @ grad)

    on_ranks(4, main, node_size=2, seed=2)
    assert sent == dict.fromkeys(range(4), 4 * 18 * 8)


@pytest.mark.parametrize("node_size", [1, 2])
def test_calls_that_keep_a_and_others_take_turns(node_size: int) -> None:
    """They count other pieces."""

    def main(world: Any) -> None:
        a, b = torch.ones(18, 8), torch.ones(8, 12, requires_grad=True)
        for keeps in (True, False, False, True):
            with torch.set_grad_enabled(keeps):
                assert (pkt.all_gather_matmul(a, b, keep="whole") == 8).all()

    on_ranks(4, main, node_size=node_size)


@triton.jit
def _places(found_ptr, tiles, world, NEAR: tl.constexpr):
    for task in range(world.size * tiles):
        source, index = over_nodes._place(task, tiles, world, NEAR)
        tl.store(found_ptr + 2 * task, source)
        tl.store(found_ptr + 2 * task + 1, index)


@pytest.mark.parametrize(("ranks", "near"), [(6, 2), (4, 4), (3, 1)])
def test_tiles_are_computed_in_the_order_of_arrival(ranks: int, near: int) -> None:
    """Every tile once: my own shard's, those of my node, and then node by node; row by row of the ranks of a node."""

    def main(world: Any) -> None:
        tiles, node = 3, world.rank // near
        found = torch.zeros(ranks * tiles, 2, dtype=torch.int32)
        _places[(1,)](found, tiles, world.device, near)
        wanted = [(world.rank, t) for t in range(tiles)]
        for i in range(ranks // near):
            origin = (node - i) % (ranks // near)
            peers = [origin * near + (world.rank + j) % near for j in range(i == 0, near)]
            wanted += [(peer, t) for t in range(tiles) for peer in peers]
        assert found.tolist() == [list(place) for place in wanted]

    on_ranks(ranks, main, node_size=near)


@pytest.mark.parametrize("name", CALLS)
def test_any_settings(name: str) -> None:
    """Pieces of several row blocks, and row blocks of several pieces; no programs that only communicate."""
    call, shape_a, shape_b = CALLS[name]
    gathers = name == "all_gather_matmul"
    given = [{"push_rows": n} for n in (0, 1, 2)] if gathers else [{"num_comm_sms": n} for n in (0, 1, 3)]

    def main(world: Any) -> None:
        a = [whole(shape_a, r) for r in range(4)]
        b = [whole(shape_b, r, 1) for r in range(4)]
        total = sum(x @ y for x, y in zip(a, b))
        exact = {
            "all_gather_matmul": torch.cat(a) @ b[world.rank],
            "matmul_reduce_scatter": total.chunk(4)[world.rank],
            "matmul_all_reduce": total,
        }[name]
        for settings in given:
            for tiles in ((16, 16, 16), (32, 16, 16)):
                found = call(a[world.rank], b[world.rank], tiles=tiles, **settings)
                assert torch.equal(found, exact), (settings, tiles)

    on_ranks(4, main, node_size=2, seed=1)


def test_a_gather_needs_a_program() -> None:
    def main(world: Any) -> None:
        wanted = f"rank {world.rank}: all_gather_matmul: num_comm_sms: found 0, wanted at least 1"
        with pytest.raises(ShapeError, match=wanted):
            pkt.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 4), num_comm_sms=0)

    on_ranks(2, main, node_size=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_has_the_same_sum(dtype: torch.dtype) -> None:
    """Of fewer rows than ranks, of ranks with other k, with other inputs each time: the same bits on all ranks."""

    def main(world: Any) -> torch.Tensor:
        for m in (3, 5, 9):
            generator = torch.Generator().manual_seed(world.rank)
            k = 3 + 7 * world.rank
            a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, 19)))
            found = pkt.matmul_all_reduce(a, b, **SMALL)
        return found

    found = on_ranks(4, main, node_size=2, seed=1)
    assert all(torch.equal(x, found[0]) for x in found)
