"""The Gluon kernels as the wrappers launch them, compiled for sm_90: resources, instructions, order. Without a GPU."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from pkt.errors import PktError, ShapeError, Unsupported
from pkt.language.inspect import compile_only, count_markers, device_world
from pkt.tune import tuner
from pkt.tune.config import Config

gluon = pytest.importorskip("pkt.kernels._gluon")
from pkt.kernels import _common, _copies, _forms  # noqa: E402
from pkt.kernels import _gluon_all_gather_matmul as push  # noqa: E402
from pkt.kernels import _gluon_matmul_all_reduce as two_shot  # noqa: E402
from pkt.kernels import _gluon_matmul_reduce_scatter as inbox  # noqa: E402
from pkt.kernels._gluon import SHARED, TILES  # noqa: E402
from pkt.kernels._matmul import Tiles  # noqa: E402
from pkt.kernels._push_plan import PushPlan, push_plan  # noqa: E402
from pkt.kernels.all_gather_matmul import all_gather_matmul  # noqa: E402
from pkt.kernels.matmul_all_reduce import matmul_all_reduce  # noqa: E402
from pkt.kernels.matmul_reduce_scatter import matmul_reduce_scatter  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="written for Triton 3.6")
NARROW = Tiles(128, 128, 64, num_stages=6)


class Symmetric:
    """Stands for a symmetric tensor."""

    def __init__(self, *shape, dtype, **_):
        self.tensor = torch.empty(*shape, dtype=dtype)
        self.dtype = dtype

    def peer(self, rank):
        return self.tensor

    def plain(self):
        return self.tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


class Compiled:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, kernel, kernels):
        self.kernel, self.kernels = kernel, kernels

    def run(self, *args, grid, warmup, **options):
        assert not warmup
        args = tuple("*i32" if isinstance(a, Symmetric) else a for a in args)
        self.kernels.append((compile_only(self.kernel, *args, grid=grid, **options), grid, options, args))


class World(SimpleNamespace):
    """Stands for a world."""

    def all_gather_object(self, value):
        return [value] * self.size

    def workspace(self, key, make):
        if key not in self.spaces:
            self.spaces[key] = make()
        return self.spaces[key]


@pytest.fixture
def launched(monkeypatch):
    """`launched(rank, size)`: a world whose kernels are compiled, not launched; `.kernels`: what came of it."""
    kernels: list = []
    modules = {push: "gluon_push_kernel", inbox: "gluon_inbox_kernel", two_shot: "gluon_two_shot_kernel"}
    for module, name in modules.items():
        monkeypatch.setattr(module, "empty", Symmetric)
        monkeypatch.setattr(module, "signals", lambda n, **_: Symmetric(n, dtype=torch.int32))
        monkeypatch.setattr(module, name, Compiled(getattr(module, name), kernels))

    def gathering(world, m, k, dtype, step):
        inbox, counters = Symmetric(world.size, m, k, dtype=dtype), Symmetric(4, dtype=torch.int32)
        world.begun = []
        join = lambda: world.begun.append(len(kernels))  # noqa: E731
        return _copies.Gathering(inbox, counters, lambda x: world.begun.append((step, len(kernels))) or join)

    def scattering(world, tiles, tile, dtype, parcel):
        inbox, counters = Symmetric(world.size - 1, tiles * tile, dtype=dtype), Symmetric(4, dtype=torch.int32)
        world.begun = []
        begin = lambda: world.begun.append(parcel) or (lambda: world.begun.append(len(kernels)))  # noqa: E731
        return _copies.Scattering(inbox, torch.empty_like(inbox.tensor), counters, begin)

    monkeypatch.setattr(_copies, "gathering", gathering)
    monkeypatch.setattr(_copies, "scattering", scattering)
    cuda = torch.device("cuda")
    return lambda rank=0, size=4: World(
        rank=rank,
        size=size,
        device=device_world(rank, size),
        torch_device=cuda,
        streams=None,
        num_sms=132,
        spaces={},
        plans={},
        lasting={},
        handed_in=None,
        capturing=False,
        kernels=kernels,
        span=range(0),
    )


def bias_of(wanted, N, dtype):
    return torch.empty(N, dtype=dtype) if wanted else None


def lying(b, transposed):
    return b.t().contiguous().t() if transposed else b


def product(world, m, N, K, dtype=torch.bfloat16, transposed=False, bias=False, plan=None, tiles=None, **options):
    a, b, out = (torch.empty(*shape, dtype=dtype) for shape in ((m, K), (K, N), (world.size * m, N)))
    b, plan, tiles = lying(b, transposed), plan or PushPlan(split=4), tiles or TILES
    push.push_launch(world, a, b, out, plan, tiles, **options)(a, b, out, bias_of(bias, N, dtype))
    return world.kernels[-1][:3]


def scatter(world, m, N, K, dtype=torch.bfloat16, transposed=False, bias=False, tiles=None, **options):
    a, b, out = (torch.empty(*shape, dtype=dtype) for shape in ((world.size * m, K), (K, N), (m, N)))
    b = lying(b, transposed)
    inbox.inbox_launch(world, a, b, out, tiles or TILES, options.pop("lag", 3), **options)(
        a, b, out, bias_of(bias, N, dtype)
    )
    return world.kernels[-1][:3]


def reduce(world, M, N, K, dtype=torch.bfloat16, transposed=False, bias=False, tiles=None, lag=None, **options):
    a, b = torch.empty(M, K, dtype=dtype), torch.empty(K, N, dtype=dtype)
    chosen = two_shot.settings(M, N, world, tiles, lag)
    out = Symmetric(M, N, dtype=dtype)
    b = lying(b, transposed)
    two_shot.two_shot_launch(world, a, b, out, *chosen, **options)(a, b, bias_of(bias, N, dtype))
    return world.kernels[-1][:3]


def tool(name, kernel, tmp_path, *flags):
    program = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    return subprocess.run([program, *flags, path], capture_output=True, text=True, check=True).stdout


def assert_fits(kernel, grid, tmp_path):
    """One program an SM, nothing spilled, no stack; consumers may have the registers they ask for."""
    assert grid[0] <= 132
    assert kernel.metadata.shared <= SHARED
    assert kernel.metadata.num_warps == 12
    usage = tool("cuobjdump", kernel, tmp_path, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, shared, local = map(int, found.groups())
    assert registers * 12 * 32 <= 65536
    assert (stack, local) == (0, 0)
    assert kernel.metadata.shared + shared <= SHARED
    assert "st.local" not in kernel.asm["ptx"]


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tiles", [TILES, NARROW])
def test_push_fits(launched, tmp_path, split, tiles):
    kernel, grid, options = product(launched(2), 1024, 1024, 4096, plan=PushPlan(split=split), tiles=tiles)
    assert grid == (132,)
    assert options["launch_cooperative_grid"]
    assert_fits(kernel, grid, tmp_path)
    sass = tool("cuobjdump", kernel, tmp_path, "--dump-sass")
    widths = sorted({tiles.block_n, tiles.block_n // split})
    found = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", sass)
    assert sorted(map(int, found)) == [width for width in widths for _ in range(4)]
    assert len(re.findall(r"UTMASTG\.2D", sass)) == 2 * 3  # a unit of each lane, to each peer
    assert len(re.findall(r"UTMASTG\.3D", sass)) == sum(max(width // 64, 2) for width in widths)
    assert count_markers(kernel.asm["ptx"])["wait"] == len(widths)


def test_push_with_a_part_left_out(launched, tmp_path):
    """What the benchmark leaves out: waiting in the source, pushing and computing by a number of nothing."""
    world, found = launched(), {}
    for part in ("wait", "push", "product"):
        kernel, grid, _ = product(world, 1024, 1024, 1024, leave_out=part)
        assert_fits(kernel, grid, tmp_path)
        found[part] = (count_markers(kernel.asm["ptx"])["wait"], *world.kernels[-1][3][-6:-1:4])  # num_comm, rows
    assert found == {"wait": (0, 8, 1024), "push": (0, 0, 1024), "product": (2, 8, 0)}


@pytest.mark.parametrize("split", [1, 2])
def test_copied_fits(launched, tmp_path, split):
    """Copies have been begun before, and are waited for behind it; the kernel sends and signals nothing."""
    world = launched()
    plan = push_plan(1000, 1024, 4096, 4, TILES, 132, num_comm_sms=0, split=split)
    kernel, grid, _ = product(world, 1000, 1024, 4096, plan=plan)
    assert_fits(kernel, grid, tmp_path)
    assert world.begun == [(8 * 128, 0), 1]
    assert count_markers(kernel.asm["ptx"]) == {"wait": split, "signal": 0}
    assert not re.search(r"(?:atom|red)\.global", kernel.asm["ptx"])
    assert not re.search(r"UTMASTG\.2D", tool("cuobjdump", kernel, tmp_path, "--dump-sass"))
    product(world, 1000, 1024, 4096, plan=plan, leave_out="push")
    assert world.begun == []


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_push_on_any_number_of_ranks(launched, tmp_path, size, rank):
    if rank < size:
        kernel, grid, _ = product(launched(rank, size), 333, 1032, 1544)
        assert_fits(kernel, grid, tmp_path)
        signals = re.findall(r"(?:atom|red)\.global\.sys\.relaxed", kernel.asm["ptx"])
        assert len(signals) == 2 * (size - 1)  # each lane's, to each peer


@pytest.mark.parametrize("tiles", [None, NARROW, TILES._replace(num_stages=3)])
def test_inbox_fits(launched, tmp_path, tiles):
    kernel, grid, _ = scatter(launched(), 1024, 4096, 1024, tiles=tiles)
    assert_fits(kernel, grid, tmp_path)
    sass = tool("cuobjdump", kernel, tmp_path, "--dump-sass")
    blocks = (tiles or TILES).block_n // 128  # a store of 64 columns each, for each half
    assert len(re.findall(r"UTMASTG\.2D", sass)) == 2 * (1 + 3) * blocks
    assert count_markers(kernel.asm["ptx"]) == {"wait": 3, "signal": 1}  # for each other rank's partial sums


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_what_is_copied_is_stored_here(launched, tmp_path, copies):
    """Behind the kernel the copies are queued; it stores others' tiles in one place, and counts them for its own rank's
    engine."""
    world = launched()
    kernel, grid, _ = scatter(world, 1024, 4096, 1024, lag=128, copies=copies)
    assert_fits(kernel, grid, tmp_path)
    assert world.begun == [triton.cdiv(128, copies), len(world.kernels)]
    sass = tool("cuobjdump", kernel, tmp_path, "--dump-sass")
    assert len(re.findall(r"UTMASTG\.2D", sass)) == 2 * (1 + 1) * 2  # halves of 128 columns: mine, and a peer's
    assert count_markers(kernel.asm["ptx"]) == {"wait": 3, "signal": 1}
    assert len(re.findall(r"(?:atom|red)\.global\.sys\.relaxed", kernel.asm["ptx"])) == 1


@pytest.mark.parametrize("tiles", [None, NARROW])
def test_inbox_without_links(launched, tmp_path, tiles):
    """What the benchmark leaves out is left out of the source, so no sync of it can get lost."""
    kernel, grid, _ = scatter(launched(), 1024, 4096, 1024, tiles=tiles, leave_out="links")
    assert_fits(kernel, grid, tmp_path)
    assert count_markers(kernel.asm["ptx"]) == {"wait": 0, "signal": 0}
    assert count_markers(kernel.asm["ttgir"]) == {"wait": 0, "signal": 0}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_inbox_on_any_number_of_ranks(launched, tmp_path, size):
    kernel, grid, _ = scatter(launched(size - 1, size), 333, 1032, 1544)
    assert_fits(kernel, grid, tmp_path)


@pytest.mark.parametrize(("call", "tiles"), [(product, TILES), (scatter, NARROW), (reduce, TILES)])
def test_transposed_weights(launched, tmp_path, call, tiles):
    kernel, grid, _ = call(launched(2), 1024, 1024, 1024, tiles=tiles, transposed=True)
    assert_fits(kernel, grid, tmp_path)
    sass = tool("cuobjdump", kernel, tmp_path, "--dump-sass")
    assert len(re.findall(rf"HGMMA\.64x{tiles.block_n}x16\.F32\.BF16", sass)) == 4
    # the bit before the last: B lies with its columns one behind the other, as it does not here
    row_major = call(launched(2), 1024, 1024, 1024, tiles=tiles)[0]
    transposes = [set(re.findall(r"wgmma\.mma_async[^;]*, (\d), (\d);", k.asm["ptx"])) for k in (kernel, row_major)]
    assert transposes == [{("0", "0")}, {("0", "1")}]


@pytest.mark.parametrize("call", [product, scatter, reduce])
@pytest.mark.parametrize(("tiles", "epilogue"), [(TILES, "gelu"), (NARROW, "silu")])
def test_bias_and_epilogue(launched, tmp_path, call, tiles, epilogue):
    kernel, grid, _ = call(launched(2), 1024, 1024, 1024, tiles=tiles, bias=True, epilogue=epilogue)
    assert_fits(kernel, grid, tmp_path)
    assert "ex2.approx" in kernel.asm["ptx"]


def test_bias_and_epilogue_through_the_operators(operators, tmp_path):
    for call in (gather_call, scatter_call, reduce_call):
        world = operators()
        call(world, 333, 1032, 1544, bias=True, epilogue="relu")
        kernel, grid, options, args = world.kernels[-1]
        assert options["EPILOGUE"] == "relu"
        assert "ex2.approx" not in kernel.asm["ptx"]
        assert any(isinstance(a, torch.Tensor) and a.shape == (1032,) for a in args)
        assert_fits(kernel, grid, tmp_path)


@pytest.mark.parametrize("tiles", [None, NARROW, TILES._replace(num_stages=3)])
def test_two_shot_fits(launched, tmp_path, tiles):
    kernel, grid, options = reduce(launched(2), 4096, 4096, 1024, tiles=tiles)
    assert grid == (132,)
    assert options["launch_cooperative_grid"]
    assert_fits(kernel, grid, tmp_path)
    sass = tool("cuobjdump", kernel, tmp_path, "--dump-sass")
    blocks = (tiles or two_shot.NARROW).block_n // 128  # a store of 64 columns each, for each half
    assert len(re.findall(r"UTMASTG\.2D", sass)) == 2 * (1 + 3 + 3) * blocks
    assert count_markers(kernel.asm["ptx"])["wait"] == 3 + 1  # for each other rank's partial sums, and at the end
    assert len(re.findall(r"atom\.global\.sys\.relaxed|red\.global\.sys\.relaxed", kernel.asm["ptx"])) == 1 + 4


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_two_shot_on_any_number_of_ranks(launched, tmp_path, size):
    kernel, grid, _ = reduce(launched(size - 1, size), 333, 1032, 1544)
    assert_fits(kernel, grid, tmp_path)


def test_own_tiles_are_rounds_behind(launched):
    """One, in the all-reduce of narrow tiles two; at most all that a rank owns, and at least one tile."""
    world = launched()
    sides = (1024, 4096, 8192, 16384, 32768)
    assert [two_shot.settings(side, side, world, TILES, None)[1] for side in sides] == [8, 33, 33, 33, 33]
    assert [two_shot.settings(side, side, world, NARROW, None)[1] for side in sides] == [16, 66, 66, 66, 66]
    parts = [(side // 4, side, side // 4) for side in sides]
    found = [inbox.settings(*part, world, TILES, None, copies=0)[1:] for part in parts]
    assert found == [(8, 0), (33, 0), (33, 0), (33, 0), (33, 0)]
    found = [inbox.settings(*part, world, TILES, None)[1:] for part in parts]
    assert found == [(8, 0), (33, 0), (512, 2), (2048, 2), (8192, 2)]
    assert inbox.settings(*parts[-1], world, TILES, 5)[1:] == (5, 0)
    assert inbox.settings(1, 8, 8, world, TILES, 5)[1] == two_shot.settings(1, 8, world, TILES, 5)[1] == 1  # one tile


def test_fp16(launched, tmp_path):
    for call in (product, scatter, reduce):
        kernel, grid, _ = call(launched(), 512, 512, 512, torch.float16)
        assert_fits(kernel, grid, tmp_path)
        assert "f32.f16.f16" in kernel.asm["ptx"]


def comes_after(lines, i, words):
    """Whether on every way to line i the last of `words` is met, before it the one before, ..., with no store after."""
    while words:
        i -= 1
        line = lines[i]
        if words[-1] in line:
            words = words[:-1]
        elif "st.global" in line or "cp.async.bulk.tensor" in line:
            return False
        elif line.startswith("$L"):
            label = line.split(":")[0]
            ways = [n for n, other in enumerate(lines) if re.search(rf"bra(\.uni)?\s+{re.escape(label)};", other)]
            ways += [] if re.match(r"(bra\.uni|ret)", lines[i - 1]) else [i]
            return bool(ways) and all(comes_after(lines, n, words) for n in ways)
    return True


@pytest.mark.parametrize("call", [product, scatter, reduce])
def test_the_place_of_the_next_tile_comes_out_of_the_product(call, launched):
    """Found while the first step of this one is under way, and carried on: of two such numbers Triton 3.6's loop-aware
    CSE has kept the first tile's for all."""
    kernel, _, _ = call(launched(), 1024, 1024, 1024)
    text = kernel.asm["ttgir"]
    products = text.count("warp_group_dot ")
    assert products == (2 if call is product else 1)
    assert len(re.findall(r"%acc:3 = scf\.for .*-> \(i32, i32, tensor<", text)) == products
    assert len(re.findall(r"scf\.yield %\w+, %\w+, %acc#1 : i32, i32, i32", text)) == products


@pytest.mark.parametrize("call", [product, scatter, reduce])
def test_tma_sees_what_consumers_have_stored_and_loads_after_they_have_loaded(call, launched):
    """What they store into or load from shared memory is fenced before they say that they have."""
    kernel, _, _ = call(launched(), 1024, 1024, 1024)
    found = re.findall(r"stmatrix|ldmatrix|fence\.proxy\.async\.shared::cta|mbarrier\.arrive\.", kernel.asm["ptx"])
    stored = [n for n, what in enumerate(found) if what in ("stmatrix", "ldmatrix")]
    assert ("ldmatrix" in found) == (call is not product)
    assert stored
    for n in stored:
        after = next(what for what in found[n:] if not what.endswith("matrix"))
        assert after == "fence.proxy.async.shared::cta"


@pytest.mark.parametrize(("call", "signals"), [(product, 6), (scatter, 1), (reduce, 5)])
def test_data_land_before_the_signal(launched, call, signals):
    """wait_group, proxy fence, (barrier of the warp,) system fence, then the relaxed atomic of one thread."""
    kernel, _, _ = call(launched(), 1024, 1024, 1024)
    lines = [line.strip() for line in kernel.asm["ptx"].splitlines()]
    lines = [line for line in lines if line and not re.match(r"//|\.loc|\$L__tmp", line)]
    relaxed = [n for n, line in enumerate(lines) if re.search(r"(atom|red)\.global\.sys\.relaxed", line)]
    assert len(relaxed) == signals
    order = ["cp.async.bulk.wait_group ", "fence.proxy.async.global", "fence.acq_rel.sys"]
    for n in relaxed:
        assert comes_after(lines, n, order)
        assert not comes_after(lines, n, order[::-1])


def test_what_does_not_fit_is_refused_before_a_launch(launched):
    world = launched()
    for options in (
        {"plan": PushPlan(-1)},
        {"plan": PushPlan(0)},
        {"plan": PushPlan(0, chunk=0, skip=1)},
        {"plan": PushPlan(chunk=96)},
        {"plan": PushPlan(split=3)},
        {"tiles": Tiles(64, 256, 64)},
    ):
        with pytest.raises(PktError, match="wanted"):
            product(world, 512, 512, 512, **options)
    with pytest.raises(PktError, match="16 bytes"):
        product(world, 512, 513, 512)
    with pytest.raises(PktError, match="bfloat16 or float16"):
        scatter(world, 512, 512, 512, torch.float32)
    with pytest.raises(PktError, match="shared memory"):
        scatter(world, 512, 512, 512, tiles=TILES._replace(num_stages=5))
    assert not world.kernels


# -------------------------------------------------------------------------------------------------- the operators
@pytest.fixture
def operators(launched, monkeypatch):
    """As `launched`, on what passes for an H200: CPU tensors are taken for the GPU's. Nothing is tuned; `known` takes
    what is: operator -> settings."""
    known: dict = {}
    monkeypatch.setattr(tuner, "choice", lambda call, key, world: known.get(call) and Config(**known[call]))
    monkeypatch.setattr(sys.modules[matmul_all_reduce.__module__], "empty", Symmetric)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_common, "check_tensor", lambda call, name, tensor, world, **_: tensor)

    def make(*where):
        world = launched(*where)
        world.known = known
        return world

    return make


def test_transposed_weights_through_the_operators(operators, tmp_path):
    """Where k is padded, too."""
    for call in (gather_call, scatter_call, reduce_call):
        world = operators()
        call(world, 333, 1032, 1544, transposed=True)
        kernel, grid, options, _ = world.kernels[-1]
        assert options["TRANSPOSED"]
        assert_fits(kernel, grid, tmp_path)
    world = operators()
    scatter_call(world, 128, 64, 61, transposed=True)
    assert world.kernels[-1][2]["TRANSPOSED"]


def gather_call(world, m, N, K, dtype=torch.bfloat16, transposed=False, bias=False, **options):
    rows = world.size * K if options.get("shard") == "columns" else K
    a, b, out = (torch.empty(*shape, dtype=dtype) for shape in ((m, K), (rows, N), (world.size * m, N)))
    assert all_gather_matmul(a, lying(b, transposed), out, world=world, bias=bias_of(bias, N, dtype), **options) is out


def scatter_call(world, m, N, K, dtype=torch.bfloat16, transposed=False, bias=False, **options):
    a, b, out = (torch.empty(*shape, dtype=dtype) for shape in ((world.size * m, K), (K, N), (m, N)))
    assert (
        matmul_reduce_scatter(a, lying(b, transposed), out, world=world, bias=bias_of(bias, N, dtype), **options) is out
    )


def reduce_call(world, M, N, K, dtype=torch.bfloat16, transposed=False, bias=False, **options):
    a, b, out = (torch.empty(*shape, dtype=dtype) for shape in ((M, K), (K, N), (M, N)))
    options = {"mode": "gluon"} | options
    assert matmul_all_reduce(a, lying(b, transposed), out, world=world, bias=bias_of(bias, N, dtype), **options) is out


SIZES = [(1024, 1024, 4096), (2048, 2048, 4096), (333, 4096, 1544), (65, 8, 8)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize(("call", "name"), [(gather_call, "gluon_push_kernel"), (scatter_call, "gluon_inbox_kernel")])
def test_operators_choose_it(operators, tmp_path, call, name, shape, size):
    world = operators(1, size)
    call(world, *shape)
    ((kernel, grid, *_),) = world.kernels
    assert kernel.metadata.name == name
    assert_fits(kernel, grid, tmp_path)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "gluon", "copies": -1}, "copies"),
        ({"mode": "gluon", "copies": 2, "lag": 3}, "lag"),
        ({"mode": "gluon", "lag": 0}, "lag"),
        ({"mode": "add", "copies": 2}, "copies"),
        ({"copies": 2}, "copies"),
    ],
)
def test_copies_that_do_not_fit_are_refused(operators, options, name):
    world = operators()
    with pytest.raises(ShapeError, match=f"{name}: found"):
        scatter_call(world, 512, 512, 512, **options)
    assert not world.kernels


@pytest.mark.parametrize("longest", [1024, 2048])
def test_all_ranks_copy_where_one_s_k_is_long_enough(operators, longest):
    """One that stored where the others copy would wait for ever."""
    world = operators()
    world.all_gather_object = lambda value: [value, longest if isinstance(value, int) else value]
    scatter_call(world, 2048, 4096, 1024)
    assert world.kernels[-1][2]["COPIED"] == (longest == 2048)


def test_every_plan_that_is_chosen():
    """Copied where the product takes longer. Those that push are left out of the rounds that pushing takes. What is
    left after the last whole round is cut in two, if then it is less than a round, unless the links are the limit."""
    for side, copied, pushed in (
        (4096, PushPlan(0, 0, 0, 0, 1, 0), PushPlan(8, 512, 0, 2, 1, 1)),
        (6144, PushPlan(0, 0, 0, 0, 2, 2), PushPlan(8, 512, 0, 3, 1, 2)),
        (8192, PushPlan(0, 0, 0, 0, 1, 3), PushPlan(8, 512, 0, 4, 2, 4)),
        (12288, PushPlan(0, 0, 0, 0, 1, 8), PushPlan(8, 512, 0, 6, 2, 9)),
        (16384, PushPlan(0, 0, 0, 0, 1, 15), PushPlan(8, 512, 0, 8, 1, 16)),
        (32768, PushPlan(0, 0, 0, 0, 2, 62), PushPlan(8, 512, 0, 15, 1, 62)),
    ):
        case = side // 4, side // 4, side, 4, TILES, 132
        assert push_plan(*case, num_comm_sms=0) == copied
        assert push_plan(*case, num_comm_sms=8) == pushed
        assert push_plan(*case) == (copied if side >= 8192 else pushed)
        assert push_plan(*case, skip=1) == pushed._replace(skip=1)
        assert push_plan(*case, chunk=64) == pushed._replace(chunk=64)
    case = 8192, 8192, 512
    alone = {n: push_plan(*case, 4, TILES, 132, num_comm_sms=n).skip for n in (4, 8, 16)}
    assert alone == {4: 29, 8: 15, 16: 15}  # half the programs, twice the time; eight fill the links
    assert push_plan(*case, 4, NARROW, 132, num_comm_sms=8).skip == 29  # half the tile
    assert push_plan(128, 256, 512, 4, TILES, 2).num_comm_sms == 8  # there may be fewer programs than push
    assert push_plan(8192, 8192, 8192, 1, TILES, 132).num_comm_sms == 8  # nobody to copy to


def test_ranks_may_differ_in_where_operands_begin_and_in_k(operators, tmp_path):
    """What only one rank sees must not change its form: the operand is copied, or padded, instead."""
    for k, begin in ((64, 1), (61, 0), (0, 0)):
        world = operators()
        a = torch.empty(4 * 128 * k + 1, dtype=torch.bfloat16)[begin:][: 4 * 128 * k].view(512, k)
        out = torch.zeros(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64)
        assert matmul_reduce_scatter(a, torch.empty(k, 64, dtype=torch.bfloat16), out, world=world) is out
        kernel, grid, *_ = world.kernels[-1]
        assert kernel.metadata.name == "gluon_inbox_kernel"
        assert_fits(kernel, grid, tmp_path)


@pytest.mark.parametrize("call", [gather_call, scatter_call])
def test_what_asks_for_another_form_gets_it(operators, call, monkeypatch):
    mode = "gluon"
    world = operators()
    with pytest.raises(Unsupported, match="float32, not bfloat16 or float16"):
        call(world, 512, 512, 512, torch.float32, mode=mode)
    with pytest.raises(Unsupported, match="not multiples of 16 bytes"):
        call(world, 512, 509, 512, mode=mode)
    with pytest.raises(Unsupported, match="1 ranks, not 2 to 8"):
        call(operators(0, 1), 512, 512, 512, mode=mode)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    with pytest.raises(Unsupported, match="rank 0 has sm_100, not sm_90"):
        call(operators(), 512, 512, 512, mode=mode)
    assert not world.kernels


def test_the_keywords_reach_it(operators, tmp_path):
    """As a tuner says them: numbers, and lists of numbers."""
    world = operators()
    world.num_sms = 100
    gather_call(
        world, 1024, 1024, 4096, mode="gluon", num_comm_sms=32, chunk=512, tiles=[128, 128, 64, 4, 8, 5],
        push_rows=3, skip=2, split=2, whole=5,
    )  # fmt: skip
    scatter_call(world, 1024, 1024, 4096, mode="gluon", tiles=[128, 128, 64, 4, 8, 5], lag=7)
    for kernel, grid, options, _ in world.kernels:
        assert_fits(kernel, grid, tmp_path)
        assert [options[name] for name in ("BLOCK_N", "GROUP", "STAGES")] == [128, 4, 5]
    options = world.kernels[0][2]
    assert [options[n] for n in ("CHUNK", "SPLIT")] == [512, 2]
    assert world.kernels[0][3][-6:-1] == (32, 2, 5, 3, 1024)
    assert world.kernels[1][3][-3:-1] == (7, 1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tiles": (64, 256, 64)}, "tiles"),
        ({"tiles": (128, 256, 64, 8, 4, 4)}, "tiles"),
        ({"tiles": (128, 256, 64, 8, 8, 5)}, "tiles"),
        ({"num_comm_sms": -1}, "num_comm_sms"),
        ({"num_comm_sms": 0, "chunk": 512}, "chunk"),
        ({"num_comm_sms": 0, "skip": 1}, "skip"),
        ({"chunk": 288}, "chunk"),
        ({"push_rows": -1}, "push_rows"),
        ({"skip": -1}, "skip"),
        ({"split": 3}, "split"),
        ({"whole": -1}, "whole"),
    ],
)
def test_what_does_not_fit_together_is_refused(operators, options, name):
    world = operators()
    with pytest.raises(ShapeError, match=f"{name}: found"):
        gather_call(world, 512, 512, 512, mode="gluon", **options)
    assert not world.kernels
    assert not any("all_gather_matmul" in key for key in world.spaces)


def test_the_two_shot_is_reached_by_name(operators, tmp_path):
    world = operators()
    reduce_call(world, 2048, 2048, 512, tiles=[128, 128, 64, 4, 8, 5], lag=3)
    reduce_call(world, 1, 8, 5)
    (first, second) = world.kernels
    assert first[2]["STAGES"] == 5
    assert first[3][-2] == 3
    assert second[3][-2] == 1
    for kernel, grid, *_ in world.kernels:
        assert kernel.metadata.name == "gluon_two_shot_kernel"
        assert_fits(kernel, grid, tmp_path)
    wrong = ({"lag": 0}, {"num_comm_sms": 4}, {"lag": 1, "mode": "lcsc"}, {"tiles": (64, 64, 64)})
    for options, name in zip(wrong, ("lag", "num_comm_sms", "lag", "tiles")):
        with pytest.raises(ShapeError, match=f"{name}: found"):
            reduce_call(world, 512, 512, 512, **options)
    with pytest.raises(Unsupported, match="float32, not bfloat16 or float16"):
        reduce_call(world, 512, 512, 512, torch.float32)
    with pytest.raises(Unsupported, match="not multiples of 16 bytes"):
        reduce_call(world, 512, 509, 512)
    assert len(world.kernels) == 2


class Agreed(Exception):
    """Raised where the ranks would agree: the form is chosen by then, and nothing launched."""


@pytest.mark.parametrize("call", [gather_call, scatter_call])
def test_elsewhere_the_plain_form_is_the_default(operators, call, monkeypatch):
    def agreed(call, world, *, mode, **_):
        raise Agreed(mode)

    def chosen(world, *shape, **options):
        with pytest.raises(Agreed) as found:
            call(world, *shape, **options)
        return str(found.value)

    monkeypatch.setattr(_common, "check_agreed", agreed)
    special, plain = ("gluon", "push") if call is gather_call else ("gluon", "add")
    assert chosen(operators(), 512, 512, 512) == special
    assert chosen(operators(), 512, 512, 512, torch.float16) == special
    assert chosen(operators(), 512, 512, 512, mode=plain) == plain
    assert chosen(operators(), 512, 512, 512, torch.float32) == plain
    assert chosen(operators(), 65, 512, 512) == special
    assert chosen(operators(), 64, 512, 512) == plain  # half of its tiles' rows would be empty
    assert chosen(operators(), 64, 512, 512, mode=special) == special
    assert chosen(operators(), 512, 509, 512) == plain
    assert chosen(operators(), 512, 512, 512, tiles=(128, 128, 64)) == plain
    assert chosen(operators(0, 1), 512, 512, 512) == plain
    assert chosen(operators(0, 9), 512, 512, 512) == plain
    if call is gather_call:
        assert chosen(operators(), 512, 512, 509) == plain
        assert chosen(operators(), 512, 512, 512, num_comm_sms=16) == plain
        assert chosen(operators(), 512, 512, 512, chunk=1024) == plain
        assert chosen(operators(), 1025, 512, 512, shard="columns") == plain
        assert chosen(operators(), 1024, 512, 512, shard="columns") == "unfused"
    for version in ("3.5.1", "3.9.0"):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "__version__", version)
            assert chosen(operators(), 512, 512, 512) == plain
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert chosen(operators(), 512, 512, 512) == plain


# ------------------------------------------------------------------------------------------------- what was tuned
TUNED = {
    "all_gather_matmul": (
        ("gather", {"mode": "gluon", "num_comm_sms": 12, "chunk": 256, "skip": 3, "split": 2, "push_rows": 1}),
        ("gather", {"mode": "push", "num_comm_sms": 5, "chunk": 512, "tiles": (64, 64, 64)}),
    ),
    "matmul_reduce_scatter": (
        ("scatter", {"mode": "gluon", "tiles": (128, 128, 64, 16, 8, 5)}),
        ("scatter", {"mode": "inbox", "tiles": (64, 64, 64)}),
    ),
    "matmul_all_reduce": (
        ("reduce", {"mode": "gluon", "tiles": (128, 128, 64), "lag": 3}),
        ("reduce", {"num_comm_sms": 9, "tiles": (64, 64, 64)}),
    ),
}
CALLS = {"gather": "all_gather_matmul", "scatter": "matmul_reduce_scatter", "reduce": "matmul_all_reduce"}


def settled(operators, monkeypatch, name, settings, *shape, dtype=torch.bfloat16, **given):
    """What the ranks agree on in a call for which `settings` were tuned."""

    def agreed(call, world, **said):
        raise Agreed(said)

    monkeypatch.setattr(_common, "check_agreed", agreed)
    call = {"gather": gather_call, "scatter": scatter_call, "reduce": plain_reduce}[name]
    world = operators()
    world.known[CALLS[name]] = settings
    with pytest.raises(Agreed) as found:
        call(world, *shape, dtype, **given)
    return found.value.args[0]


def plain_reduce(world, M, N, K, dtype, **options):
    a, b = torch.empty(M, K, dtype=dtype), torch.empty(K, N, dtype=dtype)
    return matmul_all_reduce(a, b, world=world, **options)


@pytest.mark.parametrize(("name", "settings"), [pair for pairs in TUNED.values() for pair in pairs])
def test_what_was_tuned_is_taken(operators, monkeypatch, name, settings):
    said = settled(operators, monkeypatch, name, settings, 512, 512, 512)
    for setting, value in settings.items():
        found = said.get(setting)
        if setting == "tiles":
            found = tuple(found)[: len(value)]
        assert found == value, (setting, said)


@pytest.mark.parametrize(("name", "settings"), [pair for pairs in TUNED.values() for pair in pairs])
def test_what_is_given_is_not_tuned(operators, monkeypatch, name, settings):
    mode = {"gather": "push", "scatter": "add", "reduce": "lcsc"}[name]
    said = settled(operators, monkeypatch, name, settings, 512, 512, 512, tiles=(32, 32, 32))
    assert tuple(said["tiles"])[:3] == (32, 32, 32)
    assert said["mode"] == mode


@pytest.mark.parametrize("name", CALLS)
def test_a_tuned_form_that_cannot_run_leaves_the_operators_own_rule(operators, monkeypatch, name):
    gluon, rule = TUNED[CALLS[name]][0][1], {"gather": "push", "scatter": "add", "reduce": "lcsc"}[name]
    assert settled(operators, monkeypatch, name, gluon, 512, 512, 512, dtype=torch.float32)["mode"] == rule
    assert settled(operators, monkeypatch, name, gluon, 512, 509, 512)["mode"] == rule
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert settled(operators, monkeypatch, name, gluon, 512, 512, 512)["mode"] == rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_are_multiplied_apart_from_their_all_reduce(operators, monkeypatch, dtype):
    """On GPUs, where nothing is given or tuned."""
    tuned = TUNED["matmul_all_reduce"][1][1]

    def mode(rows, settings=None, **given):
        said = settled(operators, monkeypatch, "reduce", settings or {}, rows, 512, 512, dtype=dtype, **given)
        assert (said["tiles"] is None) == (said["mode"] == "unfused")
        return said["mode"]

    assert [mode(rows) for rows in (1, 16, 128, 129, 512)] == ["unfused"] * 3 + 2 * [
        "lcsc" if dtype == torch.float32 else "gluon"
    ]
    assert (
        mode(16, tuned) == mode(16, tiles=(32, 32, 32)) == mode(16, num_comm_sms=8) == mode(16, mode="lcsc") == "lcsc"
    )
    assert mode(512, {"mode": "unfused"}) == "unfused"
    for name in ("gather", "scatter"):
        assert settled(operators, monkeypatch, name, {}, 16, 512, 512)["mode"] in ("push", "add")


@pytest.mark.parametrize("name", CALLS)
def test_nccl_where_it_was_faster_and_can_run(operators, monkeypatch, name):
    asked = []
    monkeypatch.setattr(_forms, "process_group", asked.append)
    assert settled(operators, monkeypatch, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == "nccl"
    assert asked

    def refuses(world):
        raise Unsupported.here("a group", "found others", "make one")

    monkeypatch.setattr(_forms, "process_group", refuses)
    rule = "gluon"
    assert settled(operators, monkeypatch, name, {"mode": "nccl"}, 512, 512, 512)["mode"] == rule
