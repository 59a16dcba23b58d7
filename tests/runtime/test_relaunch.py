"""A repeated launch passes the arguments that Triton's launcher would pass. It leaves a call to Triton if the call may
need another kernel.

Kernels are compiled for a GPU, and Triton's own code encodes descriptors. A list replaces the launcher's C function.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import pkt
from pkt.kernels.shared import gluon_tma as tma
from pkt.language.inspect import Pointer, compile_only
from pkt.language.world import DeviceWorld
from pkt.runtime.launch import passing, relaunch
from pkt.runtime.launch.passing import lasts
from pkt.runtime.launch.relaunch import repeated
from pkt.runtime.memory.tensor import SymmetricTensor

STREAM, FUNCTION, OLD = 77, 88, triton.__version__.startswith("3.6")


class Pair(NamedTuple):
    scale: int
    words: torch.Tensor
    width: tl.constexpr


@triton.jit
def plain_kernel(x_ptr, y_ptr, bias_ptr, n, one, pair, BLOCK: tl.constexpr, ODD: tl.constexpr = 3):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0) * pair.scale + one + ODD
    if bias_ptr is not None:
        x += tl.load(bias_ptr + i)
    tl.store(y_ptr + i, x + tl.load(pair.words) + pair.width, mask=i < n)


@triton.jit
def world_kernel(x_ptr, numbers, world):
    tl.store(x_ptr, numbers[0] + numbers[1][0] + numbers[1][1] + world.rank + world.size + tl.load(world.status))


@triton.jit
def described_kernel(a, n, b, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = a.load([0, 0]) + b.load([n, 0])
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], total)


@gluon.jit
def gluon_kernel(a, c, n):
    smem = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a.block_type.nbytes)
    tma.async_load(a, [n, 0], bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(c, [0, 0], smem)


class CudaLauncher:
    """Triton's launcher with a list in place of the function in C."""

    num_ctas, launch_cooperative_grid, launch_pdl = 1, True, False
    global_scratch_align = profile_scratch_size = 0
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self, compiled: Any, scratch: int = 0) -> None:
        self.launches: list[tuple[Any, ...]] = []
        metas = getattr(compiled.metadata, "tensordesc_meta", None)
        self.launch = wrap_handle_tensordesc(self.take, dict(compiled.src.signature), metas)
        self.global_scratch_size = scratch

    def take(self, *args: Any) -> None:
        """Keep (grid, stream, function, cooperative, pdl, scratch memory, metadata, the kernel's arguments)."""
        if OLD:
            room, profile, packed, *hooks = args[7:13]
            values = args[13:]
        else:
            packed, *hooks, room, profile, annotations, signature, values = args[7:]
            assert (annotations, signature) == (self.arg_annotations, self.kernel_signature)
        assert (profile, hooks) == (None, [None] * 3)
        self.launches.append((*args[:7], room, packed, *values))


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the descriptors that are encoded; an encoding is the tuple of the arguments."""
    made: list[tuple[Any, ...]] = []

    def encode(*facts: Any) -> Any:
        made.append(facts)
        return tuple(tuple(f) if isinstance(f, list) else f for f in facts)

    utils = SimpleNamespace(**{"fill_tma_descriptor" if OLD else "fill_tma_descriptor_tiled": encode})
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    return made


def of_triton(launcher: CudaLauncher, kernel: Any, args: tuple[Any, ...], named: dict[str, Any], packed: Any) -> Any:
    """The arguments that Triton passes to C, with addresses in place of tensors."""
    bound = kernel.signature.bind(*args, **{k: v for k, v in named.items() if k in kernel.arg_names})
    bound.apply_defaults()
    how, values = (4, 1, 1, STREAM, FUNCTION, True, False), bound.arguments.values()
    if OLD:
        launcher.launch(*how, None, None, packed, None, None, None, *values)
    else:
        types = launcher.arg_annotations, launcher.kernel_signature
        launcher.launch(*how, packed, None, None, None, None, None, *types, tuple(values))
    return tuple(address(x) for x in launcher.launches.pop())


def address(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(address(v) for v in x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def prepared(
    kernel: Any, args: tuple[Any, ...], scratch: int = 0, grid: tuple[int, ...] = (4,), **named: Any
) -> tuple[Any, Any, Any]:
    """repeat(*args), its launcher, and the compiled kernel."""
    named = {"launch_cooperative_grid": True, "grid": grid} | named
    options = {k: v for k, v in named.items() if k not in ("grid", "launch_cooperative_grid")}
    compiled = compile_only(kernel, *map(standing, args), **options)
    launcher = compiled._run = CudaLauncher(compiled, scratch)
    compiled.module, compiled.function = object(), FUNCTION
    repeat = repeated(kernel, compiled, grid, args, named)
    return lambda *args: repeat(args, STREAM), launcher, compiled


NAMES = {torch.float32: "fp32", torch.int32: "i32", torch.bfloat16: "bf16"}


def standing(argument: Any) -> Any:
    """A stand-in for `argument` with which a kernel is compiled."""
    if isinstance(argument, torch.Tensor):
        return Pointer(NAMES[argument.dtype])
    if isinstance(argument, tuple):
        found = map(standing, argument)
        return type(argument)(*found) if hasattr(argument, "_fields") else tuple(found)
    return argument


def plain_args(bias: bool = False) -> tuple[Any, ...]:
    x, y, words = torch.zeros(64), torch.zeros(64), torch.zeros(4, dtype=torch.int32)
    return x, y, torch.zeros(64) if bias else None, 48, 1, Pair(7, words, tl.constexpr(5))


@pytest.mark.parametrize("bias", [False, True])
def test_pointers_numbers_tuples_and_constants(bias: bool) -> None:
    args = plain_args(bias)
    repeat, launcher, compiled = prepared(plain_kernel, args, BLOCK=64)
    assert repeat(*args) is compiled
    found = launcher.launches.pop()
    assert found == of_triton(launcher, plain_kernel, args, {"BLOCK": 64}, compiled.packed_metadata)
    assert not any(isinstance(x, torch.Tensor) for x in found), "C gets addresses and looks up none"


def test_other_tensors_are_passed_by_their_addresses() -> None:
    args = plain_args()
    repeat, launcher, compiled = prepared(plain_kernel, args, BLOCK=64)
    others = (torch.ones(64), torch.ones(80)[16:], *args[2:])
    assert repeat(*others) is compiled
    found = launcher.launches.pop()
    assert found == of_triton(launcher, plain_kernel, others, {"BLOCK": 64}, compiled.packed_metadata)
    assert repeat(*args) is compiled
    assert launcher.launches.pop() != found


def test_arguments_that_may_need_another_kernel_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, bias, n, one, pair = args = plain_args()
    repeat, launcher, compiled = prepared(plain_kernel, args, BLOCK=64)
    large = 10**6
    for other in (
        (torch.zeros(65)[1:], y, bias, n, one, pair),  # its address is no multiple of 16
        (x.bfloat16(), y, bias, n, one, pair),
        (x, None, bias, n, one, pair),
        (x, y, x, n, one, pair),
        (x, y, bias, 49, one, pair),
        (x, y, bias, n, True, pair),  # bool is another type than int
        (x, y, bias, n, one, pair._replace(scale=8)),
    ):
        assert repeat(*other) is None
    assert repeat(x, y, bias, int("48"), one, pair) is compiled, "an equal number"
    assert prepared(plain_kernel, (x, y, bias, large, one, pair), BLOCK=64)[0](*args) is None
    launcher.launches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(plain_kernel, "pre_run_hooks", [print])
        assert repeat(*args) is None
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, SimpleNamespace(calls=[print]))
            assert repeat(*args) is None
            patch.setattr(triton.knobs.runtime, name, print)
            assert repeat(*args) is None
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *args, **named: None)  # as in a run that only compiles
        assert repeat(*args) is None
    assert not launcher.launches
    assert repeat(*args) is compiled


def test_tuples_and_worlds() -> None:
    *most, pair = plain_args()
    repeat, launcher, compiled = prepared(plain_kernel, (*most, pair), BLOCK=64)
    words = torch.ones(8, dtype=torch.int32)
    for other in (pair._replace(words=words), Pair(7, words[4:], tl.constexpr(5))):
        assert repeat(*most, other) is compiled
        found = launcher.launches.pop()
        assert found == of_triton(launcher, plain_kernel, (*most, other), {"BLOCK": 64}, compiled.packed_metadata)
    for other in (
        pair._replace(words=words[1:]),
        pair._replace(words=words.float()),
        pair._replace(width=tl.constexpr(6)),
        pair._replace(width=5),
        tuple(pair),
    ):
        assert repeat(*most, other) is None

    world = DeviceWorld(1, tl.constexpr(4), tl.constexpr(64), tl.constexpr(False), words, tl.constexpr(3))
    args = (torch.zeros(4, dtype=torch.int32), (5, (6, 7)), world)
    repeat, launcher, compiled = prepared(world_kernel, args)
    assert repeat(*args) is compiled
    assert launcher.launches.pop() == of_triton(launcher, world_kernel, args, {}, compiled.packed_metadata)
    assert repeat(args[0], (5, (int("6"), 7)), world) is compiled
    assert repeat(args[0], (5, (6, 8)), world) is None
    assert repeat(args[0], (5, (6, 7, 8)), world) is None
    assert repeat(*args[:2], world._replace(rank=1)) is None, "another world"


def test_no_tensor_is_kept() -> None:
    *most, pair = plain_args()
    repeat, _, compiled = prepared(plain_kernel, (*most, pair), BLOCK=64)
    others = [torch.ones_like(most[0]), torch.ones_like(pair.words)]
    assert repeat(others[0], *most[1:], pair._replace(words=others[1])) is compiled
    gone = [weakref.ref(t) for t in (most[0], most[1], pair.words, *others)]
    del most, pair, others
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


@pytest.mark.parametrize(("grid", "programs"), [((4,), 4), ((4, 3), 12), ((4, 3, 5), 60), ((1, 1, 7), 7)])
def test_a_kernel_gets_the_scratch_memory_it_needs(grid: tuple[int, ...], programs: int) -> None:
    asked = []
    args = plain_args()
    repeat, launcher, compiled = prepared(plain_kernel, args, scratch=128, grid=grid, BLOCK=64)
    before = _allocation._allocator.get()
    triton.set_allocator(lambda *how: asked.append(how) or "room")
    try:
        assert repeat(*args) is compiled
    finally:
        triton.set_allocator(before)
    assert asked == [(programs * 128, 0, STREAM)]
    assert launcher.launches[0][:3] == (*grid, 1, 1)[:3]
    assert launcher.launches[0][7] == "room"


@pytest.mark.parametrize("aligned", [True, False])
def test_the_alignment_of_a_tensor_decides_the_kernel(aligned: bool) -> None:
    """Both ways: a kernel for aligned addresses takes no other, and one for any takes no aligned one, for which Triton
    would compile another."""
    room = torch.empty(64 + 8)
    of, other = room[: 64 if aligned else 65][0 if aligned else 1 :], room[1:65] if aligned else room[4:68]
    assert [x.data_ptr() % 16 == 0 for x in (of, other)] == [aligned, not aligned]
    pass_on = passing.passing(["x"], (of,), {}, [])
    assert pass_on((of,)) == (of.data_ptr(),)
    assert pass_on((other,)) is None
    assert pass_on((of.view(torch.int32),)) is None


def with_descriptors(kernel: Any) -> tuple[Any, ...]:
    """Two tensors, their descriptors, and arguments of `kernel`."""
    a, b = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2))
    if kernel is gluon_kernel:
        swizzled = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
        first, second = (GluonDescriptor(t, [64, 64], [64, 1], [16, 64], swizzled) for t in (a, b))
        args, named = (first, second, 32), {}
    else:
        first, second = (TensorDescriptor(t, [64, 64], [64, 1], [16, 16]) for t in (a, b))
        args, named = (first, 16, second, torch.zeros(16, 16)), {"BLOCK": 16}
    return a, b, first, second, args, named


@pytest.mark.parametrize("kernel", [described_kernel, gluon_kernel])
def test_descriptors(kernel: Any, encoded: list[tuple[Any, ...]]) -> None:
    a, b, first, second, args, named = with_descriptors(kernel)
    repeat, launcher, compiled = prepared(kernel, args, **named)

    def same() -> bool:
        assert repeat(*args) is compiled
        found = tuple(address(x) for x in launcher.launches.pop())
        return bool(found == of_triton(launcher, kernel, args, named, compiled.packed_metadata))

    assert same()
    made, bases = len(encoded), [torch.zeros_like(a) for _ in range(2)]
    described = made > 0
    for base in (*bases, *bases):  # each base is encoded once
        first.base = base
        assert same()
    of_triton_alone = 4 * 2 * described
    assert len(encoded) - made == 2 * described + of_triton_alone
    for base in (torch.zeros(64, 64), a.to(torch.float16)):
        first.base = base
        assert repeat(*args) is None
    first.base = a
    again = type(first)(*(getattr(first, f) for f in first.__dataclass_fields__))
    assert repeat(again, *args[1:]) is None, "only the plan's own descriptor is known"
    assert same()


@pytest.mark.parametrize("kernel", [described_kernel, gluon_kernel])
def test_a_descriptor_that_lasts_is_read_once(kernel: Any) -> None:
    class Watched:
        """A tensor, whose address was asked for so often."""

        dtype, asked = torch.bfloat16, 0

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def data_ptr(self) -> int:
            self.asked += 1
            return self.tensor.data_ptr()

    a, b, first, second, args, named = with_descriptors(kernel)
    assert lasts(second) is second
    repeat, launcher, compiled = prepared(kernel, args, **named)
    first.base, second.base = Watched(a), Watched(b)
    for _ in range(3):
        assert repeat(*args) is compiled
    assert (first.base.asked, second.base.asked) == (3, 0)
    first.base, second.base = a, b
    found = tuple(address(x) for x in launcher.launches.pop())
    assert found == of_triton(launcher, kernel, args, named, compiled.packed_metadata)
    again = lasts(type(second)(*(getattr(second, f) for f in second.__dataclass_fields__)))
    assert repeat(*(again if x is second else x for x in args)) is None, "it is another"


def test_old_encodings_are_dropped(encoded: list[tuple[Any, ...]]) -> None:
    swizzled = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
    tensors = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3 * passing.MOST_ENCODED)]
    first, second = (GluonDescriptor(t, [64, 64], [64, 1], [16, 64], swizzled) for t in tensors[:2])
    repeat, launcher, _ = prepared(gluon_kernel, (first, second, 32))
    for tensor in tensors:
        first.base = tensor
        repeat(first, second, 32)
        assert launcher.launches.pop()[9][0] == tensor.data_ptr()
    assert len(encoded) == 2 + len(tensors) - 1
    first.base = tensors[0]
    repeat(first, second, 32)
    assert len(encoded) == 2 + len(tensors), "encoded anew"


WHYS = [
    "another release", "hooks before a run", "another launcher", "it is profiled", "it is watched", "fp4", "im2col",
    "a descriptor in a tuple",
]  # fmt: skip


def closure(launcher: Any, tensordesc_meta: Any, relevant_paths: Any) -> Any:
    """As Triton 3.8 and 3.9 make one for a kernel with descriptors."""

    def inner(*args: Any) -> Any:
        return launcher(*args, tensordesc_meta, relevant_paths)

    return inner


@pytest.mark.parametrize("why", WHYS)
def test_unknown_launchers_are_left_to_triton(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = plain_args()
    _, launcher, compiled = prepared(plain_kernel, args, BLOCK=64)
    if why == "another release":
        monkeypatch.setattr(relaunch, "KNOWN", False)
    elif why == "hooks before a run":
        monkeypatch.setattr(plain_kernel, "pre_run_hooks", [print])
    elif why == "another launcher":
        compiled._run = SimpleNamespace()
    elif why == "it is profiled":
        monkeypatch.setattr(launcher, "profile_scratch_size", 8)
    elif why == "it is watched":
        monkeypatch.setattr(launcher, "gsan_enabled", True, raising=False)
    elif why == "a descriptor in a tuple":
        launcher.launch = closure(launcher.take, [], {2: {1: {}}})
    else:
        how = {"fp4_padded": why == "fp4", "is_im2col": why == "im2col"}
        launcher.launch = closure(launcher.take, [how], {0: {}})
    repeat = repeated(plain_kernel, compiled, (4,), args, {"BLOCK": 64, "grid": (4,)})
    assert repeat(args, STREAM) is None
    assert not launcher.launches


def test_a_tuple_of_another_length_is_left_to_triton() -> None:
    x = torch.zeros(4)
    pass_on = passing.passing(["pair"], ((x, 3),), {}, [])
    assert pass_on(((x, 3),)) == ((x.data_ptr(), 3),)
    for other in ((x,), (x, 3, 4), (x, 3, x), [x, 3], (x, 4), (3, x)):
        assert pass_on((other,)) is None


def test_a_tuple_of_symmetric_memory_is_looked_into_once() -> None:
    """As long as it is the same tuple. Another one of the same kind may lie elsewhere."""

    class Watched(SymmetricTensor):
        asked = 0

        def data_ptr(self) -> int:
            Watched.asked += 1
            return super().data_ptr()

    def main(world: pkt.World) -> None:
        memory = [pkt.empty(64, dtype=torch.int32, world=world) for _ in range(3)]
        x, y, z = (tensor.as_subclass(Watched) for tensor in memory)
        for tensor, of in zip((x, y, z), memory):
            tensor.__dict__.update(of.__dict__)
        kept = Pair(7, x, (y, tl.constexpr(5)))
        pass_on = passing.passing(["pair"], (kept,), {}, [])
        Watched.asked = 0
        assert pass_on((kept,)) == ((7, memory[0].data_ptr(), (memory[1].data_ptr(), kept.width[1])),)
        assert Watched.asked == 0
        others = kept._replace(words=z)
        assert pass_on((others,)) == ((7, memory[2].data_ptr(), (memory[1].data_ptr(), kept.width[1])),)
        assert Watched.asked == 1, "the inner tuple is the same"

    pkt.launch(main, 1, "cpu")
    plain = Pair(7, torch.zeros(4), 5)
    pass_on = passing.passing(["pair"], (plain,), {}, [])
    at = plain.words.data_ptr()
    plain.words.set_(torch.zeros(4))
    assert pass_on((plain,)) == ((7, plain.words.data_ptr(), 5),) != ((7, at, 5),), "other tensors may move"
