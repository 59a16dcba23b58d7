"""Compiling without a GPU, and the check that the compiler loses no wait or signal."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import triton
import triton.language as tl
from triton.runtime import driver

import pkt.language as pl
from pkt.errors import LostSync
from pkt.language import inspect, world
from pkt.language.inspect import check_sync, compile_only, count_markers, device_world

from .compiled import ARCHS, compiled, instructions
from .test_sync import signal_kernel, wait_kernel

WORLD = device_world()


@triton.jit
def tile_kernel(a, b, c, flags, M, N, K, world, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WS: tl.constexpr):
    ad = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    bd = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    cd = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    for t in tl.range(tl.program_id(0), (M // BM) * (N // BN), tl.num_programs(0), warp_specialize=WS):
        m = t // (N // BN) * BM
        n = t % (N // BN) * BN
        pl.wait(flags + t, 1, world)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(ad.load([m, k]), bd.load([n, k]).T, acc)
        cd.store([m, n], acc.to(tl.bfloat16))
        pl.signal(flags + t, 2, world)


@triton.jit
def k_loop_kernel(a, b, c, flags, K, world, B: tl.constexpr, WS: tl.constexpr):
    ad = tl.make_tensor_descriptor(a, [B, K], [K, 1], [B, 64])
    bd = tl.make_tensor_descriptor(b, [B, K], [K, 1], [B, 64])
    acc = tl.zeros((B, B), tl.float32)
    for k in tl.range(0, K, 64, warp_specialize=WS):
        pl.wait(flags + k // 64, 1, world)
        acc = tl.dot(ad.load([0, k]), bd.load([0, k]).T, acc)
    tl.store(c + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], acc.to(tl.bfloat16))


@triton.jit
def branches_kernel(flags, x, world):
    if tl.load(x) > 3:
        pl.wait(flags, 1, world)
        pl.signal(flags + 1, 1, world)
    else:
        pl.wait(flags, 2, world)
        pl.signal(flags + 1, 2, world)


@triton.jit
def behind_kernel(a, b, c, flags, K, world, B: tl.constexpr, WS: tl.constexpr):
    pl.wait(flags, 1, world)
    ad = tl.make_tensor_descriptor(a, [B, K], [K, 1], [B, 64])
    bd = tl.make_tensor_descriptor(b, [B, K], [K, 1], [B, 64])
    acc = tl.zeros((B, B), tl.float32)
    for k in tl.range(0, K, 64, warp_specialize=WS):
        acc = tl.dot(ad.load([0, k]), bd.load([0, k]).T, acc)
    tl.store(c + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], acc.to(tl.bfloat16))
    pl.signal(flags, 2, world)


def tile(arch, specialize, num_warps=4):
    return compile_only(
        tile_kernel, "*bf16", "*bf16", "*bf16", "*i32", 1024, 1024, 1024, WORLD,
        BM=128, BN=128, BK=64, WS=specialize, arch=arch, num_warps=num_warps,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_a_persistent_loop_keeps_its_calls(arch):
    k = tile(arch, specialize=False)
    assert count_markers(k.asm["ttir"]) == count_markers(k.asm["ptx"]) == {"wait": 1, "signal": 1}


@pytest.mark.parametrize("num_warps", [4, 8])
def test_a_call_lost_in_a_warp_specialised_loop_is_an_error(num_warps):
    # At 8 warps Triton keeps the call on sm_90, but no kernel may depend on that.
    with pytest.raises(LostSync, match=r"tile_kernel: 1 wait inside tl.range\(warp_specialize=True\)"):
        tile(90, specialize=True, num_warps=num_warps)


def test_a_call_in_a_warp_specialised_loop_never_compiles_silently_for_sm_100(capfd):
    # Triton 3.6 fails in a pass; 3.9 compiles it, with TMA loads that pass the wait.
    with pytest.raises((LostSync, RuntimeError)):
        tile(100, specialize=True)
    with pytest.raises((LostSync, RuntimeError)):
        compile_only(k_loop_kernel, "*bf16", "*bf16", "*bf16", "*i32", 1024, WORLD, B=128, WS=True, arch=100)
    capfd.readouterr()  # the failing pass prints its input


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_around_a_warp_specialised_loop_are_fine(arch):
    k = compile_only(behind_kernel, "*bf16", "*bf16", "*bf16", "*i32", 1024, WORLD, B=128, WS=True, arch=arch)
    assert count_markers(k.asm["ptx"]) == {"wait": 1, "signal": 1}


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_that_llvm_merges_are_not_lost(arch):
    k = compiled(branches_kernel, "*i32", "*i32", WORLD, arch=arch)
    assert count_markers(k.asm["ttir"]) == {"wait": 2, "signal": 2}
    assert all(1 <= n <= 2 for n in count_markers(k.asm["ptx"]).values())


def test_the_check_detects_a_call_missing_at_either_step():
    k = compiled(wait_kernel, "*int32", 7, WORLD, "ge")
    asm = dict(k.asm)
    check_sync(asm)
    for stage in ("ttgir", "ptx"):
        with pytest.raises(LostSync, match="some_kernel: 1 wait"):
            check_sync({**asm, stage: asm[stage].replace("pkt.wait", "")}, "some_kernel")
    asm = dict(compiled(branches_kernel, "*i32", "*i32", WORLD).asm)
    with pytest.raises(LostSync, match="2 wait"):
        check_sync({**asm, "ttgir": asm["ttgir"].replace("pkt.wait", "", 1)})
    k = compiled(signal_kernel, "*int32", 3, WORLD, "add")
    with pytest.raises(LostSync, match="1 signal"):
        check_sync({**k.asm, "ptx": k.asm["ptx"].replace("pkt.signal", "")})


def test_compiling_restores_the_driver():
    marker = object()
    before = driver._active
    try:
        driver._active = marker
        compile_only(wait_kernel, "*int32", 7, device_world(0, 6), "ge")
        assert driver._active is marker
        with pytest.raises(triton.CompilationError):
            compile_only(wait_kernel, "*int32", 7, WORLD, "never")
        assert driver._active is marker
    finally:
        driver._active = before


def test_targets_do_not_mix():
    for arch in (90, 100, 90):
        k = compile_only(wait_kernel, "*int32", 7, WORLD, "ge", arch=arch)
        assert f".target sm_{arch}a" in k.asm["ptx"]
        assert k.metadata.target.arch == arch


def test_the_listener_raises_on_a_lost_call_and_calls_the_previous_listener(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: heard.append(facts["metadata"]["name"]))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # not the knob: undone, it would no longer follow the environment
    inspect.install_listener()
    inspect.install_listener()  # a second call has no effect
    monkeypatch.setattr(inspect, "check_sync", _strict(inspect.check_sync))
    compile_only(wait_kernel, "*int32", 7, device_world(0, 7), "ge")
    assert heard == ["wait_kernel"]
    assert _strict.seen >= 1
    with pytest.raises(LostSync):
        tile(90, specialize=True)


def test_the_listener_checks_cached_kernels_too(monkeypatch):
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **facts: hits.append(facts["cache_hit"]))
    inspect.install_listener()
    checked = []
    monkeypatch.setattr(inspect, "check_sync", lambda asm, kernel: checked.append(asm["ptx"]))
    for _ in range(2):
        branches_kernel.device_caches.clear()  # drop the kernels that this process has compiled
        compile_only(branches_kernel, "*i32", "*i32", device_world(0, 3))
    assert hits[-1] is True
    assert len(checked) == 4  # by the listener and by compile_only, each time
    assert all(count_markers(text)["wait"] for text in checked)


def _strict(check):
    _strict.seen = 0

    def wrapped(asm, kernel="kernel"):
        _strict.seen += 1
        assert {"ttir", "ttgir", "ptx"} <= set(asm)
        check(asm, kernel)

    return wrapped


def test_importing_and_compiling_look_for_no_gpu():
    program = """
        from triton.runtime import driver
        import pkt.language
        from pkt.language.inspect import compile_only, device_world
        from tests.language.test_sync import fence_kernel
        compile_only(fence_kernel, "*i32", device_world())
        print(driver._active, driver._default)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=True, cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout.split() == ["None", "None"]


def test_everything_public_is_exported_and_documented():
    for name in pl.__all__:
        thing = getattr(pl, name)
        assert (thing.__doc__ or "").strip(), name
    for module in (pl.tile, pl.shmem, pl.order, pl.template):
        for name, thing in vars(module).items():
            if isinstance(thing, triton.JITFunction) and not name.startswith("_"):
                assert thing.__doc__, f"{module.__name__}.{name}"


def test_the_hash_covers_every_source_of_the_language(tmp_path, monkeypatch):
    here = pathlib.Path(world.__file__).parent
    sources = sorted(path.relative_to(here) for path in here.rglob("*.py"))
    assert {pathlib.Path("sync.py"), pathlib.Path("ptx/spin.py")} <= set(sources)
    for path in sources:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((here / path).read_bytes())
    monkeypatch.setattr(world, "__file__", str(tmp_path / "world.py"))
    hashes = set()
    try:
        for path in (None, *sources):
            if path is not None:
                with (tmp_path / path).open("a") as f:
                    f.write("# another\n")
            world.code_hash.cache_clear()
            hashes.add(world.code_hash())
    finally:
        world.code_hash.cache_clear()
    assert len(hashes) == len(sources) + 1


def test_a_change_of_device_code_changes_the_kernels_key():
    one = compile_only(wait_kernel, "*int32", 7, device_world(code=1), "ge")
    other = compile_only(wait_kernel, "*int32", 7, device_world(code=2), "ge")
    assert one.hash != other.hash


def test_primitives_outside_kernels_are_refused():
    from pkt.errors import Unsupported
    from pkt.language import ptx

    with pytest.raises(Unsupported, match="pkt.launch"):
        ptx.fence()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_wait_in_the_persistent_loop_leaves_the_inner_loop_pipelined(arch):
    k = tile(arch, specialize=False)
    ops = [x.op for x in instructions(k)]
    loads = [i for i, op in enumerate(ops) if op.startswith("cp.async.bulk.tensor.2d.shared")]
    # the prologue's loads of several stages, and one pair in the loop
    assert len(loads) >= 6
    wait = ops.index("ld.acquire.sys.global.b32")
    assert wait < loads[0]
    # TMA loads come after the wait's proxy fence and barrier
    assert "fence.proxy.async.global" in ops[wait : loads[0]]
    assert "bar.sync" in ops[wait : loads[0]]
