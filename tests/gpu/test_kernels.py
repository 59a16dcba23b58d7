"""The operators of pkt.kernels on GPUs: sizes that fill a GPU, layouts, defaults and layers. The programs that the
simulator explores are in test_operators."""

from itertools import product
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_reduce import OPERATOR
from tests.gpu.run import launch, on_ranks


def integers(world: Any, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers. A seed gives the same ones on every rank, so each rank knows the others' inputs."""
    generator = torch.Generator(device=world.torch_device).manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator, device=world.torch_device).to(dtype)


def collectives(world: Any, n: int, dtype: torch.dtype) -> None:
    """Check all forms of the collectives, three times with other inputs."""
    x, out, gathered = pkt.empty(n, dtype=dtype), pkt.empty(n, dtype=dtype), pkt.empty(world.size * n, dtype=dtype)
    whole = pkt.empty(world.size * n, dtype=dtype)
    for turn in range(3):
        inputs = [integers(world, (n,), turn * world.size + r, dtype) for r in range(world.size)]
        x.copy_(inputs[world.rank])
        for mode in ("push", "pull", "copy", *(["low_latency"] if n <= 1 << 20 else [])):
            gathered.fill_(-99)
            got = pkt.all_gather(x, gathered, mode=mode)
            assert torch.equal(got.plain(), torch.cat(inputs)), mode
        total = torch.stack([i.double() for i in inputs]).sum(0)
        for mode in OPERATOR.forms:
            if "low_latency" in mode and n > 1 << 20:
                continue  # its slots would take gigabytes
            out.fill_(-99)
            assert torch.equal(pkt.all_reduce(x, out, mode=mode).double(), total), mode
        most = torch.stack(inputs).amax(0)
        for mode in ("one_shot", "two_shot", "copy"):
            assert torch.equal(pkt.all_reduce(x, out, op="max", mode=mode).plain(), most), mode
        assert torch.equal(pkt.all_reduce(x).double(), total), "in place"
        x.copy_(inputs[world.rank])
        assert torch.equal(pkt.all_reduce(x, mode="copy").double(), total), "in place"
        wholes = [integers(world, (world.size * n,), 77 + turn * world.size + r, dtype) for r in range(world.size)]
        whole.copy_(wholes[world.rank])
        mine = torch.stack([w.double() for w in wholes]).sum(0).chunk(world.size)[world.rank]
        for mode in ("pull", "push", "copy", *(["low_latency"] if n <= 1 << 20 else [])):
            assert torch.equal(pkt.reduce_scatter(whole, mode=mode).double(), mine), mode
        root = turn % world.size
        for mode in ("pass_on", *(["low_latency"] if n <= 1 << 20 else [])):
            x.copy_(inputs[world.rank])
            assert torch.equal(pkt.broadcast(x, root, mode=mode).plain(), inputs[root]), mode
        world.barrier()


def layouts(world: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Check the collectives along every dimension, and the all-to-all with all pairs of axes."""
    size, mine = world.size, world.rank
    for turn, dim in enumerate(range(4)):
        shards = [integers(world, shape, 9 * turn + r, dtype) for r in range(size)]
        x, whole = pkt.empty(shape, dtype=dtype), pkt.empty(torch.cat(shards, dim).shape, dtype=dtype)
        x.copy_(shards[mine])
        for mode in ("push", "pull", "copy", "low_latency"):
            whole.fill_(-99)
            assert torch.equal(pkt.all_gather(x, whole, dim=dim, mode=mode).plain(), torch.cat(shards, dim)), (
                dim,
                mode,
            )
        wholes = [integers(world, tuple(whole.shape), 99 + 9 * turn + r, dtype) for r in range(size)]
        whole.copy_(wholes[mine])
        total = torch.stack([w.double() for w in wholes]).sum(0).chunk(size, dim)[mine]
        for mode in ("pull", "push", "copy", "low_latency"):
            assert torch.equal(pkt.reduce_scatter(whole, dim=dim, mode=mode).double(), total), (dim, mode)
        for gather in range(4):
            wanted = torch.cat([w.chunk(size, dim)[mine] for w in wholes], gather)
            out = pkt.empty(wanted.shape, dtype=dtype)
            for mode in ("push", "copy", "low_latency"):
                got = pkt.all_to_all(whole, out.fill_(-99), scatter=dim, gather=gather, mode=mode).plain()
                assert torch.equal(got, wanted), (dim, gather, mode)
            pulled = pkt.all_to_all(whole, scatter=dim, gather=gather, mode="pull")
            assert torch.equal(pulled, wanted), (dim, gather)
            world.barrier()
            out.free()
        x.free(), whole.free()


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_collectives(dtype: torch.dtype, ranks: int) -> None:
    launch(all_sizes, ranks, dtype)


def all_sizes(world: Any, dtype: torch.dtype) -> None:
    for n in (8, 1000, 65_544, 3_000_000):
        collectives(world, n, dtype)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layouts(dtype: torch.dtype, ranks: int) -> None:
    launch(all_layouts, ranks, dtype)


def all_layouts(world: Any, dtype: torch.dtype) -> None:
    for shape in ((1, 5, 3, 7), (2, 48, 8, 64), (1, 333, 12, 120)):
        layouts(world, shape, dtype)


def product_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, divided by the norm of `wanted`."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def normal(world: Any, shape: tuple[int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator(device=world.torch_device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=world.torch_device).bfloat16()


def products(world: Any, m: int, k: int, N: int) -> None:
    """Check the fused products against the plain ones, twice with other inputs."""
    from pkt.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    for turn in range(2):
        seeds = [turn * world.size + r for r in range(world.size)]
        shards = [normal(world, (m, k), s) for s in seeds]
        b = normal(world, (k, N), 99 + world.rank)
        wanted = torch.cat(shards).float() @ b.float()
        for mode in ("push", *(["copy"] if k % 8 == 0 else [])):
            error = product_error(pkt.all_gather_matmul(shards[world.rank], b, mode=mode), wanted)
            assert error < 1e-2, (all_gather_matmul.__name__, mode, turn, error)
        operands = [(normal(world, (world.size * m, k), s), normal(world, (k, N), s + 500)) for s in seeds]
        total = sum(x.float() @ y.float() for x, y in operands)
        for mode in ("add", "inbox"):
            error = product_error(
                pkt.matmul_reduce_scatter(*operands[world.rank], mode=mode), total.chunk(world.size)[world.rank]
            )
            assert error < 2e-2, (matmul_reduce_scatter.__name__, mode, turn, error)
        error = product_error(pkt.matmul_all_reduce(*operands[world.rank]), total)
        assert error < 2e-2, (matmul_all_reduce.__name__, turn, error)
        world.barrier()


@on_ranks(2, 3, 4)
def test_fused_products(ranks: int) -> None:
    launch(all_products, ranks)


def all_products(world: Any) -> None:
    for shape in ((512, 1024, 768), (136, 264, 520)):
        products(world, *shape)


def runs_gluon(name: str, world: Any, dtype: torch.dtype, m: int, K: int, N: int) -> bool:
    """Whether the operator's Gluon form can run."""
    from pkt.kernels.declaration import Call
    from pkt.kernels.operator import named

    call = Call(name, world, {"a": torch.empty(0, dtype=dtype)}, {"shard": "rows"}, {}, None)
    call.sizes = {"m": m, "k": K, "n": N}
    return not named(name).forms["gluon"].fits(call)


def defaults(world: Any, m: int, K: int, N: int, dtype: torch.dtype, mode: str | None) -> None:
    """Check the form that operators choose (mode None), or a form, three times with other inputs in the same tensors.

    Results or inputs of an earlier launch would be wrong. The number of rows `m` may be small, ragged or large.
    """
    size, device = world.size, world.torch_device
    a, b = torch.empty(m, K, dtype=dtype, device=device), torch.empty(K, N, dtype=dtype, device=device)
    rows = torch.empty(size * m, K, dtype=dtype, device=device)
    whole, part = torch.empty(size * m, N, dtype=dtype, device=device), torch.empty(m, N, dtype=dtype, device=device)
    for turn in range(3):
        seeds = [1000 * turn + r for r in range(size)]
        shards = [normal(world, (m, K), s).to(dtype) for s in seeds]
        a.copy_(shards[world.rank])
        b.copy_(normal(world, (K, N), 99 + seeds[world.rank]))
        whole.fill_(float("nan"))
        pkt.all_gather_matmul(a, b, whole, mode=mode)
        a.fill_(float("nan"))  # the caller may overwrite it at once
        error = product_error(whole, torch.cat(shards).float() @ b.float())
        assert error < 1e-2, ("all_gather_matmul", m, K, N, turn, error)
        operands = [
            (normal(world, (size * m, K), s).to(dtype), normal(world, (K, N), s + 500).to(dtype)) for s in seeds
        ]
        rows.copy_(operands[world.rank][0])
        b.copy_(operands[world.rank][1])
        part.fill_(float("nan"))
        pkt.matmul_reduce_scatter(rows, b, part, mode=mode)
        rows.fill_(float("nan"))
        total = sum(x.float() @ y.float() for x, y in operands).chunk(size)[world.rank]
        error = product_error(part, total)
        assert error < 1e-2, ("matmul_reduce_scatter", m, K, N, turn, error)
        bits = part.clone()
        rows.copy_(operands[world.rank][0])
        pkt.matmul_reduce_scatter(rows, b, part, mode=mode)
        assert torch.equal(part, bits) or mode != "gluon", "Gluon forms add in one order"
    world.barrier()


def all_defaults(world: Any, dtype: torch.dtype) -> None:
    from pkt.kernels.shared import gluon_fits

    for shape in ((512, 1024, 768), (1, 64, 128), (333, 1544, 1032), (136, 264, 520), (96, 200, 333), (64, 512, 6144)):
        m, K, N = shape
        gluon = runs_gluon("all_gather_matmul", world, dtype, m, K, N)
        assert gluon == (not gluon_fits.missing(world) and all(n * dtype.itemsize % 16 == 0 for n in (K, N)))
        for mode in (None, *(["gluon"] if gluon else [])):
            defaults(world, *shape, dtype, mode)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_default_forms(dtype: torch.dtype, ranks: int) -> None:
    launch(all_defaults, ranks, dtype)


def on_each_of_torch_s_streams(world: Any) -> None:
    """torch lends 32 streams in turn. The copies wait for their kernel, so on its stream they would wait for ever."""
    if not runs_gluon("matmul_reduce_scatter", world, torch.bfloat16, 512, 512, 512):
        return
    operands = [(normal(world, (512, 512), r), normal(world, (512, 512), 50 + r)) for r in range(world.size)]
    wanted = sum(a.float() @ b.float() for a, b in operands).chunk(world.size)[world.rank]  # type: ignore[union-attr]
    for _ in range(34):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager = pkt.matmul_reduce_scatter(*operands[world.rank], mode="gluon", copies=2)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = pkt.matmul_reduce_scatter(*operands[world.rank], mode="gluon", copies=2)
        graph.replay()
        for got in (eager, captured):
            assert product_error(got, wanted) < 2e-2
    world.barrier()


@on_ranks(2)
def test_copies_beside_each_of_torch_s_streams(ranks: int) -> None:
    launch(on_each_of_torch_s_streams, ranks)


def layers(world: Any, m: int, K: int, N: int, epilogue: Any) -> None:
    """Check all forms that can run against torch, with weights as a Linear holds them, a bias and an epilogue."""
    from pkt.kernels.shared.tile_product import finished

    size = world.size
    gluon = runs_gluon("all_gather_matmul", world, torch.bfloat16, m, K, N)
    shards = [normal(world, (m, K), r) for r in range(size)]
    weights = [normal(world, (N, K), 50 + r).t() for r in range(size)]
    bias = normal(world, (1, N), 7)[0]
    operands = [(normal(world, (size * m, K), 90 + r), w) for r, w in enumerate(weights)]
    product = torch.cat(shards).float() @ weights[world.rank].float()
    total = sum(x.float() @ w.float() for x, w in operands)
    out = pkt.empty(size * m, N, dtype=torch.bfloat16)
    options = {"bias": bias, "epilogue": epilogue}
    for mode in ("push", "unfused", *(["copy"] if K % 8 == 0 else []), *(["gluon"] if gluon else [])):
        got = pkt.all_gather_matmul(shards[world.rank], weights[world.rank], mode=mode, **options)
        assert product_error(got, finished(product, bias, epilogue)) < 1e-2, (mode, epilogue, m, K, N)
    wanted = finished(total, bias, epilogue)
    for mode in ("add", "inbox", "unfused", *(["gluon"] if gluon else [])):
        got = pkt.matmul_reduce_scatter(*operands[world.rank], mode=mode, **options)
        assert product_error(got, wanted.chunk(size)[world.rank]) < 2e-2, (mode, epilogue, m, K, N)
    for mode in ("lcsc", "unfused", *(["gluon"] if gluon else [])):
        for given in (None, out):
            got = pkt.matmul_all_reduce(*operands[world.rank], given, mode=mode, **options)
            assert product_error(got, wanted) < 2e-2, (mode, epilogue, m, K, N)
    world.barrier()


def all_layers(world: Any) -> None:
    """Each shape has one epilogue: every form runs every epilogue, but not every pair of the two is compiled."""
    shapes = ((333, 1544, 1032), (512, 1024, 768), (96, 200, 328), (1, 264, 520))
    for shape, epilogue in zip(shapes, ("gelu", "silu", "relu", "none")):
        layers(world, *shape, epilogue)


@on_ranks(2, 3, 4)
def test_layers(ranks: int) -> None:
    launch(all_layers, ranks)


def gated(world: Any) -> None:
    """silu(A @ gate) * (A @ up) with a bias each, in all forms that can run, against torch."""
    from pkt.kernels.shared.tile_product import FEW_ROWS, finished

    size = world.size
    for (m, K, n), shard in product([(333, 1544, 520), (512, 1024, 384), (1, 264, 260)], ["rows", "columns"]):
        rows = shard == "rows"
        gluon = rows and runs_gluon("all_gather_matmul", world, torch.bfloat16, FEW_ROWS + 1, K, n)
        shards = [normal(world, (m, K), r) for r in range(size)]
        gate, up = (normal(world, (n, K if rows else size * K), 50 + i).t() for i in range(2))
        bias = pkt.interleave(*(normal(world, (1, n), 7 + i)[0] for i in range(2)))
        b = pkt.interleave(gate, up)
        wanted = finished(torch.cat(shards, dim=0 if rows else 1).float() @ b.float(), bias, "swiglu")
        few = ["low_latency"] if m == 1 else []
        modes = "push", "unfused", *few, *(["copy"] if rows else []), *(["gluon"] if gluon else []), None
        for mode in modes:
            got = pkt.all_gather_matmul(
                shards[world.rank], b, mode=mode, shard=shard, bias=bias, epilogue="swiglu"
            )  # fmt: skip
            assert product_error(got, wanted) < 2e-2, (mode, shard, m, K, n)
    world.barrier()


@on_ranks(2, 4)
def test_swiglu(ranks: int) -> None:
    launch(gated, ranks)


def several_weights(world: Any) -> None:
    """A list of weights, side by side and not, in all forms that can run, thrice with other inputs."""
    size, ns = world.size, (1024, 264, 264)
    for m, K in ((512, 1024), (333, 1544), (1, 264)):
        gluon = runs_gluon("all_gather_matmul", world, torch.bfloat16, 128, K, 264)
        few = ["low_latency"] if m == 1 else []
        for mode in ("push", "copy", "unfused", *few, *(["gluon"] if gluon else []), None):
            for turn in range(3):
                shards = [normal(world, (m, K), 10 * turn + r) for r in range(size)]
                fused = normal(world, (sum(ns), K), 50 + turn)
                wanted = (torch.cat(shards).float() @ fused.float().t()).split(ns, dim=1)
                joined = [w.t() for w in fused.split(ns)]
                for weights in (joined, [w.t().contiguous() for w in fused.split(ns)], [w.clone() for w in joined]):
                    got = pkt.all_gather_matmul(shards[world.rank], weights, mode=mode)
                    for x, y in zip(got, wanted, strict=True):
                        assert product_error(x, y) < 1e-2, (mode, m, K, turn)
    world.barrier()


@on_ranks(2, 4)
def test_several_weights(ranks: int) -> None:
    launch(several_weights, ranks)


def parts_of_tensors(world: Any) -> None:
    """Check operands that TMA cannot address on one rank only, then a k that differs between ranks."""
    size, device, m, N = world.size, world.torch_device, 130, 264
    shards = [normal(world, (m, 72), r) for r in range(size)]
    b = normal(world, (72, N), 9)
    begin = int(world.rank == 0)
    a = torch.empty(m * 72 + 1, dtype=torch.bfloat16, device=device)[begin:][: m * 72].view(m, 72)
    out = torch.empty(size * m * N + 1, dtype=torch.bfloat16, device=device)[begin:][: size * m * N].view(size * m, N)
    for _ in range(2):
        a.copy_(shards[world.rank])
        assert product_error(pkt.all_gather_matmul(a, b, out), torch.cat(shards).float() @ b.float()) < 1e-2
    ks = [61 + 8 * r if r else 64 for r in range(size)]
    operands = [(normal(world, (size * m, k), r), normal(world, (k, N), 50 + r)) for r, k in enumerate(ks)]
    total = sum(x.float() @ y.float() for x, y in operands).chunk(size)[world.rank]
    for _ in range(2):
        assert product_error(pkt.matmul_reduce_scatter(*operands[world.rank]), total) < 1e-2
    world.barrier()


@on_ranks(2, 4)
def test_ranks_whose_operands_differ_take_one_form(ranks: int) -> None:
    launch(parts_of_tensors, ranks)
