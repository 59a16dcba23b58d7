"""The operators' kernels, compiled for sm_90 and sm_100 without a GPU: no wait or signal lost, no spill, memory fits.

The operators run in the simulator with its launch replaced by a recorder. So the kernels compile with the default
tiles, the arguments and the options of a real call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather import all_gather
from pkt.kernels.all_gather_matmul import all_gather_matmul
from pkt.kernels.all_reduce import all_reduce
from pkt.kernels.all_to_all import all_to_all
from pkt.kernels.broadcast import broadcast
from pkt.kernels.matmul_all_reduce import matmul_all_reduce
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from pkt.kernels.reduce_scatter import reduce_scatter
from pkt.language.inspect import compile_only, count_markers
from pkt.language.world import DeviceWorld

from .launches import NAMES, SHARED_LIMIT, all_launched, compile_checked, launched
from .machine_code import resources

ARCHS = (90, 100)


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def weight(k: int, n: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    return tensor(n, k, dtype=dtype).t() if transposed else tensor(k, n, dtype=dtype)


N = 1 << 20
COLLECTIVES = {
    "all_gather push": lambda t: all_gather(tensor(N, dtype=t), pkt.empty(4 * N, dtype=t), mode="push"),
    "all_gather pull": lambda t: all_gather(pkt.empty(N, dtype=t), mode="pull"),
    "all_gather push of columns": lambda t: all_gather(
        tensor(512, 2056, dtype=t), pkt.empty(512, 8224, dtype=t), dim=1, mode="push"
    ),
    "all_gather pull of columns": lambda t: all_gather(pkt.empty(512, 2056, dtype=t), dim=1, mode="pull"),
    "reduce_scatter": lambda t: reduce_scatter(tensor(8 * N, dtype=t)),
    "reduce_scatter pull": lambda t: reduce_scatter(pkt.empty(4 * N, dtype=t), mode="pull"),
    "reduce_scatter push min": lambda t: reduce_scatter(tensor(512, 8224, dtype=t), dim=1, op="min", mode="push"),
    "reduce_scatter max of columns": lambda t: reduce_scatter(
        pkt.empty(512, 8224, dtype=t), dim=1, op="max", mode="pull"
    ),
    "all_to_all push of heads": lambda t: all_to_all(
        tensor(1, 512, 16, 24, dtype=t), pkt.empty(1, 2048, 4, 24, dtype=t), scatter=2, gather=1, mode="push"
    ),
    "all_to_all pull of tokens": lambda t: all_to_all(
        pkt.empty(1, 2048, 4, 24, dtype=t), scatter=1, gather=2, mode="pull"
    ),
    "broadcast": lambda t: broadcast(pkt.empty(N, dtype=t), 2),
    "all_reduce one_shot": lambda t: all_reduce(pkt.empty(N, dtype=t), mode="one_shot"),
    "all_reduce one_shot min": lambda t: all_reduce(pkt.empty(N, dtype=t), mode="one_shot", op="min"),
    "all_reduce two_shot": lambda t: all_reduce(pkt.empty(N, dtype=t), mode="two_shot"),
    "all_reduce two_shot_push": lambda t: all_reduce(pkt.empty(8 * N, dtype=t), mode="two_shot_push"),
    "all_reduce multimem": lambda t: all_reduce(pkt.empty(N, dtype=t), mode="multimem"),
}


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
COPIES = ("push of", "pull of", "broadcast")  # these only move elements, so one type is enough
# Each dtype on one GPU, and one dtype on both. Only products differ between GPUs by dtype.
TARGETS = [(torch.bfloat16, 90), (torch.bfloat16, 100), (torch.float16, 100), (torch.float32, 90)]
TYPED = [(name, *to) for name in COLLECTIVES for to in TARGETS[: 2 if any(c in name for c in COPIES) else 4]]
every_target = pytest.mark.parametrize(("dtype", "arch"), TARGETS, ids=lambda x: NAMES.get(x, x))


@pytest.mark.parametrize(("name", "dtype", "arch"), TYPED, ids=lambda x: NAMES.get(x, x))
def test_collectives(name: str, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    multicast = name.endswith("multimem")
    call = COLLECTIVES[name]
    compiled = compile_checked(launched(lambda w: call(dtype), 4, multicast, monkeypatch), arch, tmp_path)
    ptx = compiled.asm["ptx"]
    assert ("multimem.ld_reduce" in ptx) == ("multimem.st" in ptx) == multicast
    # peers are read or written 16 bytes a thread
    wide = r"multimem\.ld_reduce\S*\.v4" if multicast else r"(ld|st)\.global\.v(2\.b64|4\.b32)"
    assert re.search(wide, ptx), "no wide access"
    least = set(re.findall(r"\b(?:min|max)\.(\S*?)b?f(?:16|32)", ptx))
    assert least == ({"NaN."} if {"min", "max"} & set(name.split()) else set())  # .NaN keeps a NaN
    assert not re.search(r"(ld|st)\.global\.(b|u)(8|16)\b", ptx), "an element at a time"


UNEVEN = {
    "all_gather": lambda t: all_gather(tensor(512, 1001, dtype=t), pkt.empty(512, 4004, dtype=t), dim=1, mode="push"),
    "all_gather low_latency": lambda t: all_gather(tensor(512, 1001, dtype=t), dim=1, mode="low_latency"),
    "reduce_scatter": lambda t: reduce_scatter(pkt.empty(512, 4004, dtype=t), dim=1, mode="pull"),
    "reduce_scatter push": lambda t: reduce_scatter(tensor(8192, 4004, dtype=t), dim=1),
    "all_reduce two_shot_push": lambda t: all_reduce(pkt.empty(8 * N + 1, dtype=t)[1:], mode="two_shot_push"),
    "reduce_scatter push of 4 bytes": lambda t: reduce_scatter(tensor(4096, 4104, dtype=t), dim=1, op="min"),
    "reduce_scatter push of 16 bytes": lambda t: reduce_scatter(tensor(8191, 4128, dtype=t), dim=1),
    "reduce_scatter low_latency": lambda t: reduce_scatter(tensor(512, 4004, dtype=t), dim=1, mode="low_latency"),
    "all_to_all low_latency": lambda t: all_to_all(
        tensor(1, 99, 12, 3, dtype=t), scatter=2, gather=1, mode="low_latency"
    ),
    "all_to_all": lambda t: all_to_all(
        tensor(1, 99, 12, 3, dtype=t), pkt.empty(1, 396, 3, 3, dtype=t), scatter=2, gather=1
    ),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", UNEVEN)
def test_runs_that_are_not_whole(name: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_checked(launched(lambda w: UNEVEN[name](torch.bfloat16), 4, False, monkeypatch), arch, tmp_path)


@pytest.mark.parametrize("columns", [1001, 1002, 1004, 1008])
def test_accesses_are_as_wide_as_runs_allow(columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stores into an inbox have 16 bytes, whatever the length of a run."""

    def stores(call: Callable[[], Any]) -> set[str]:
        with pytest.MonkeyPatch.context() as patch:
            launch = launched(lambda w: call(), 4, False, patch)
        return set(re.findall(r"st\.global\.(\S+)", compile_checked(launch, 90, tmp_path).asm["ptx"]))

    own = {1001: "b16", 1002: "b32", 1004: "v2.b32", 1008: "v4.b32"}[columns]
    x, whole = tensor(4096, columns, dtype=torch.bfloat16), tensor(4096, 4 * columns, dtype=torch.bfloat16)
    gathered = (4096, 4 * columns)
    assert stores(lambda: all_gather(x, pkt.empty(gathered, dtype=x.dtype), dim=1, mode="push")) == {own}
    assert stores(lambda: reduce_scatter(whole, dim=1, mode="push")) == {own, "v4.b32"}


@pytest.mark.parametrize(("n", "dtype", "arch"), [(1, torch.bfloat16, 90), *((1 << 14, *to) for to in TARGETS)])
@pytest.mark.parametrize("mode", ["low_latency", "low_latency_two_shot"])
def test_low_latency(
    mode: Any, n: int, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = launched(lambda w: all_reduce(tensor(n, dtype=dtype), mode=mode, op="max"), 4, False, monkeypatch)
    ptx = compile_checked(launch, arch, tmp_path).asm["ptx"]
    shots, words = (1, 4) if mode == "low_latency" else (2, 3)  # to each rank; to each peer
    assert len(re.findall(r"st\.relaxed\.sys\.global\.b128", ptx)) == words * shots
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128 word", ptx)) == words * shots
    assert ptx.count("// pkt.wait") == shots
    assert set(re.findall(r"\b(?:min|max)\.(\S*?)b?f(?:16|32)", ptx)) == {"NaN."}
    # every thread has looked at the launch counter before one of them counts
    looked, counted = ptx.index("ld.relaxed.sys.global.b64"), re.search(r"atom\S*add\S*64", ptx).start()
    assert "bar.sync" in ptx[looked:counted]
    # neither barrier between ranks nor fence; the atomics at gpu scope are the launch counter's
    outside = re.sub(r"// pkt\.wait.*?// end inline asm", "", ptx, flags=re.S)
    assert not re.search(r"fence|(atom|red)\S*\.sys", outside)


@every_target
@pytest.mark.parametrize("move", [all_gather, reduce_scatter, all_to_all, broadcast])
def test_low_latency_moves(
    move: Any, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One flight: only the words to each peer carry flags, and there is neither a barrier nor a fence."""
    launch = launched(lambda w: move(tensor(1 << 12, dtype=dtype), mode="low_latency"), 4, False, monkeypatch)
    ptx = compile_checked(launch, arch, tmp_path).asm["ptx"]
    assert len(re.findall(r"st\.relaxed\.sys\.global\.b128", ptx)) == 3
    looked = len(re.findall(r"ld\.relaxed\.sys\.global\.b128 word", ptx))
    assert looked == (4 if move is broadcast else 3)  # root's, and a word of everybody
    outside = re.sub(r"// pkt\.wait.*?// end inline asm", "", ptx, flags=re.S)
    assert not re.search(r"fence|(atom|red)\S*\.sys", outside)


@pytest.mark.parametrize("ranks", [16, 32])
def test_low_latency_of_many_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = launched(lambda w: all_reduce(pkt.empty(1 << 12, dtype=torch.bfloat16)), ranks, False, monkeypatch)
    ptx = compile_checked(launch, 90, tmp_path).asm["ptx"]
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128 word", ptx)) == ranks


def with_bias(wanted: bool, n: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"bias": tensor(n, dtype=dtype)} if wanted else {}


def push(
    shard: Any, m: int, k: int, n: int, transposed: bool = False, bias: bool = False, ranks: int = 4, **options: Any
) -> Callable[[torch.dtype], Any]:
    rows = k if shard == "rows" else ranks * k
    return lambda t: all_gather_matmul(
        tensor(m, k, dtype=t),
        weight(rows, n, t, transposed),
        mode="push",
        shard=shard,
        **with_bias(bias, n, t),
        **options,
    )


def scatter(
    mode: Any, m: int, k: int, n: int, transposed: bool = False, bias: bool = False, **options: Any
) -> Callable[[torch.dtype], Any]:
    return lambda t: matmul_reduce_scatter(
        tensor(4 * m, k, dtype=t), weight(k, n, t, transposed), mode=mode, **with_bias(bias, n, t), **options
    )


def reduce(
    in_place: bool, m: int, k: int, n: int, transposed: bool = False, bias: bool = False, **options: Any
) -> Callable[[torch.dtype], Any]:
    def call(t: torch.dtype) -> torch.Tensor:
        out = pkt.empty(m, n, dtype=t) if in_place else None
        return matmul_all_reduce(
            tensor(m, k, dtype=t), weight(k, n, t, transposed), out, **with_bias(bias, n, t), **options
        )

    return call


EVEN, RAGGED = (256, 512, 512), (250, 501, 509)  # (m, k, n): rows through TMA, or through registers
FUSED = {
    "all_gather_matmul push rows": lambda s, **o: push("rows", *s, **o),
    "all_gather_matmul push columns": lambda s, **o: push("columns", *s, **o),
    "matmul_reduce_scatter add": lambda s, **o: scatter("add", *s, **o),
    "matmul_reduce_scatter inbox": lambda s, **o: scatter("inbox", *s, **o),
    "matmul_all_reduce": lambda s, **o: reduce(False, *s, **o),
    "matmul_all_reduce in place": lambda s, **o: reduce(True, *s, **o),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=["tma", "registers"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_products(
    name: str, sizes: tuple, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = FUSED[name](sizes)
    multicast = name.endswith("in place") and sizes is EVEN
    compiled = compile_checked(launched(lambda w: call(dtype), 4, multicast, monkeypatch), arch, tmp_path)
    ptx = compiled.asm["ptx"]
    if dtype == torch.bfloat16:
        assert "wgmma.mma_async" in ptx if arch == 90 else "tcgen05.mma" in ptx
    assert ("cp.async.bulk.tensor.3d.shared" in ptx) == (sizes is EVEN)
    assert ("cp.reduce.async.bulk.tensor" in ptx) == name.endswith("add")
    assert ("multimem.ld_reduce" in ptx) == multicast


@pytest.mark.parametrize(
    ("name", "arch"),
    [*((name, 90) for name in FUSED), ("all_gather_matmul push columns", 100), ("matmul_reduce_scatter add", 100)],
)
def test_transposed_weights(name: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TMA loads them, and the tensor cores read them, in the order they lie in: registers transpose nothing."""
    call = FUSED[name](EVEN, transposed=True)
    compiled = compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), arch, tmp_path)
    ptx = compiled.asm["ptx"]
    assert "cp.async.bulk.tensor.3d.shared" in ptx
    assert "wgmma.mma_async" in ptx if arch == 90 else "tcgen05.mma" in ptx
    assert "ldmatrix" not in ptx


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in FUSED), ("matmul_reduce_scatter inbox", torch.float32)]
)
def test_bias_and_epilogue(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gelu needs the most registers. With tiles of 128 x 256 it needs more than there are, at the end of a tile."""
    call = FUSED[name](EVEN, bias=True, epilogue="gelu")
    compile_checked(launched(lambda w: call(dtype), 4, False, monkeypatch), 90, tmp_path)


@pytest.mark.parametrize(("epilogue", "arch"), [("relu", 90), ("silu", 90), ("gelu", 100)])
def test_each_epilogue(epilogue: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = scatter("add", *EVEN, bias=True, epilogue=epilogue)
    compiled = compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), arch, tmp_path)
    assert ("ex2.approx" in compiled.asm["ptx"]) == (epilogue != "relu")


@pytest.mark.parametrize(
    ("dtype", "arch"), [(torch.bfloat16, 90), (torch.bfloat16, 100), (torch.float32, 90)], ids=lambda x: NAMES.get(x, x)
)
@pytest.mark.parametrize("sizes", [EVEN, (250, 501, 510)], ids=["tma", "registers"])
@pytest.mark.parametrize("shard", ["rows", "columns"])
def test_swiglu(
    shard: Any, sizes: tuple, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gate and up of a column meet in a thread's own registers: no more shared memory than without."""

    def compiled(**options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            call = push(shard, *sizes, transposed=shard == "columns", **options)
            return compile_checked(launched(lambda w: call(dtype), 4, False, patch), arch, tmp_path)

    found, plain = compiled(epilogue="swiglu", bias=True), compiled()
    assert found.metadata.shared <= plain.metadata.shared
    assert ("cp.async.bulk.tensor.3d.shared" in found.asm["ptx"]) == (sizes is EVEN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("name", ["all_gather_matmul push columns", "matmul_all_reduce"])
def test_transposed_weights_in_registers(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = FUSED[name](RAGGED if dtype == torch.bfloat16 else EVEN, transposed=True)
    compile_checked(launched(lambda w: call(dtype), 4, False, monkeypatch), 90, tmp_path)


WIDE, SQUARE = (128, 256, 64, 8, 8, 3), (128, 128, 64, 8, 8, 4)
MEASURED: dict[str, Callable[[Any], Callable[[torch.dtype], Any]]] = {
    "push": lambda tiles: push("rows", 1024, 4096, 1024, tiles=tiles),
    "add": lambda tiles: scatter("add", 1024, 1024, 4096, tiles=tiles),
    "inbox": lambda tiles: scatter("inbox", 1024, 1024, 4096, tiles=tiles),
    "all-reduce": lambda tiles: reduce(False, 4096, 1024, 4096, tiles=tiles, num_comm_sms=16),
}


@pytest.mark.parametrize("tiles", [WIDE, SQUARE], ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_tiles_that_are_measured(name: str, tiles: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmarks' tiles and sizes, on 4 ranks."""
    call = MEASURED[name](tiles)
    compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), 90, tmp_path)


@pytest.mark.parametrize("tiles", [WIDE, SQUARE], ids=str)
def test_kernels_beside_copy_engines(tiles: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A barrier, and a product that only waits: `compile_only` raises LostSync where a wait is lost. The kernels that
    stand for the engines in the simulator, a copy and its signal, are never compiled."""

    def call(world: Any) -> None:
        a, b = tensor(1024, 4096, dtype=torch.bfloat16), tensor(4096, 1024, dtype=torch.bfloat16)
        all_gather_matmul(a, b, mode="copy", tiles=tiles)

    launches = all_launched(call, 4, False, monkeypatch)
    assert [x.kernel.__name__ for x in launches] == [
        "begin_kernel", *["copy_kernel", "tell_kernel"] * 12, "push_kernel",
    ]  # fmt: skip
    kernels = [compile_only(x.kernel, *x.args, **x.options) for x in (launches[0], launches[-1])]
    found = [count_markers(kernel.asm["ptx"]) for kernel in kernels]
    assert [(markers["wait"] > 0, markers["signal"] > 0) for markers in found] == [(1, 1), (1, 0)]
    usage = resources(kernels[-1], tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert kernels[-1].metadata.shared <= SHARED_LIMIT


ADDED = {
    "rows": (4, lambda t: reduce_scatter(tensor(4 * N, dtype=t), mode="copy", chunks=4)),
    "columns": (2, lambda t: reduce_scatter(tensor(512, 8224, dtype=t), dim=1, mode="copy", chunks=2)),
    "all_reduce": (3, lambda t: all_reduce(tensor(N, dtype=t), pkt.empty(N, dtype=t), mode="copy", chunks=3)),
}


@every_target
@pytest.mark.parametrize("name", ADDED)
def test_sums_beside_copy_engines(
    name: str, dtype: torch.dtype, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One kernel for all chunks, which loads and stores 16 bytes a thread."""
    chunks, call = ADDED[name]
    launches = all_launched(lambda w: call(dtype), 4, False, monkeypatch)
    sums = [x for x in launches if x.kernel.__name__ == "sum_kernel"]
    fixed = [i for i, p in enumerate(sums[0].kernel.params) if not p.do_not_specialize and "ptr" not in p.name]
    of_all = [[str(x.args[i]) for i in fixed if not isinstance(x.args[i], DeviceWorld)] for x in sums]
    assert of_all == of_all[:1] * chunks
    ptx = compile_checked(sums[0], arch, tmp_path).asm["ptx"]
    assert re.search(r"ld\.global\.v(2\.b64|4\.b32)", ptx)
    assert re.search(r"st\.global\.v(2\.b64|4\.b32)", ptx)
    assert not re.search(r"(ld|st)\.global\.(b|u)(8|16)\b", ptx), "an element at a time"


@pytest.mark.parametrize("name", FUSED)
def test_the_widest_tile(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = FUSED[name](EVEN, tiles=(128, 256, 64, 8, 8, 3))  # faster than the default for the largest products
    compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), 90, tmp_path)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_other_rank_counts(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = FUSED[name]((8, 64, 64), **({"ranks": ranks} if "columns" in name else {}))
    compile_checked(launched(lambda w: call(torch.float16), ranks, False, monkeypatch), 90, tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        push("rows", 1, 1, 1, num_comm_sms=1),
        push("columns", 1, 1, 1, num_comm_sms=1),
        scatter("add", 1, 1, 1),
        scatter("inbox", 1, 1, 1),
        reduce(False, 1, 1, 1, num_comm_sms=1),
        reduce(False, 64, 64, 64, num_comm_sms=0),
    ],
)
def test_arguments_that_become_constants(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), 90, tmp_path)


DECODE = {  # K = 8192, N = 28672 on four ranks, as in the paper Three Taxes; and the way back
    "push": lambda m, **o: push("columns", m, 2048, 7168, **o),
    "add": lambda m, **o: scatter("add", m, 7168, 8192, **o),
    "all-reduce": lambda m, **o: reduce(False, m, 7168, 8192, **o),
}


@pytest.mark.parametrize(("m", "block_m"), [(1, 16), (16, 16), (40, 64), (128, 64), (1024, 128)])
@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str, m: int, block_m: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiles have no more rows than the product needs, and use the tensor cores."""
    call = DECODE[name](m)
    launch = launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch)
    ptx = compile_checked(launch, 90, tmp_path).asm["ptx"]
    assert ("wgmma" in ptx) == (block_m >= 64)
    assert ("mma.sync" in ptx) == (block_m < 64)
    if hasattr(launch.args[0], "BLOCK_M"):
        assert launch.args[0].BLOCK_M.value == block_m
    assert launch.options["num_warps"] == (8 if block_m == 128 else 4)


@pytest.mark.parametrize(("name", "arch"), [*((name, 90) for name in DECODE), ("push", 100)])
def test_decode_of_a_layer(name: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = DECODE[name](16, transposed=True, bias=True, epilogue="gelu")
    compile_checked(launched(lambda w: call(torch.bfloat16), 4, False, monkeypatch), arch, tmp_path)


def test_a_spill_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = launched(lambda w: COLLECTIVES["all_reduce two_shot"](torch.float32), 4, False, monkeypatch)
    starved = launch._replace(options=launch.options | {"maxnreg": 32})
    with pytest.raises(AssertionError, match="STACK"):
        compile_checked(starved, 90, tmp_path)
