"""The Gluon kernels of ring attention's backward pass, compiled for sm_90, and the plan that launches them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pkt.kernels.declaration import Call
from pkt.kernels.ring_attention import gluon_backward as host
from pkt.kernels.ring_attention import planning, rules
from pkt.kernels.ring_attention.backward import Backward, _queries, keys_kernel
from pkt.kernels.ring_attention.forms import OPERATOR as FORWARD
from pkt.kernels.ring_attention.kernel import num_pieces
from pkt.kernels.ring_attention.planning import GLUON_ROWS, GLUON_TILES, planned, sizes
from pkt.kernels.ring_attention.ring_attention_backward import OPERATOR
from pkt.kernels.ring_attention.sequence import pieces
from pkt.kernels.shared import gluon_fits
from pkt.language.inspect import compile_only, device_world
from pkt.runtime.launch.launch import beside_launch, cooperative_launch

from .machine_code import of_old, resources, sass
from .test_ring_attention import planned as called
from .test_ring_attention_backward import check

B, S, H, KV = 2, 1024, 16, 8


def launches(
    monkeypatch: pytest.MonkeyPatch, size: int, d: int, dtype: torch.dtype, zigzag: bool, offset: int = 0,
    packed: bool = False,
) -> list[Any]:  # fmt: skip
    """(kernel, arguments, options) of the two launches for causal attention on rank 0. offset: elements before k.
    packed: with documents."""
    found: list[Any] = []

    def prepare(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        def start(*args: Any) -> None:
            bases = [(x, x.base) for x in args if hasattr(x, "base")]
            found.append((kernel, args, {**options, "grid": grid}, bases))

        return start

    monkeypatch.setattr(host, "cooperative_launch", prepare)
    monkeypatch.setattr(host, "beside_launch", prepare)
    world = SimpleNamespace(size=size, rank=0, device=device_world(0, size), num_sms=132)
    q, dout = (torch.randn(B, S, H, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(B * S * KV * d + offset).to(dtype)[offset:].view(B, S, KV, d) for _ in range(2))
    arguments = {"causal": True, "layout": "zigzag" if zigzag else "contiguous", "scale": None, "window": None,
                 "length": None}  # fmt: skip
    call = Call("", world, {"q": q, "k": k, "v": v, "dout": dout, "cu_seqlens": None}, arguments, {"chunk": 512}, None)  # type: ignore[arg-type]
    call.sizes = {"b": B, "s": S, "h": H, "g": KV, "d": d}
    plan = planned(call, GLUON_TILES)
    words = torch.zeros(64, dtype=torch.int32)
    of_ring = {"ready_ptr": words, "number_ptr": words}
    exchange = SimpleNamespace(
        keys=2 * [inbox(size - 1, B, S, KV, d, dtype=dtype)], queries=2 * [inbox(size - 1, B, S, H, d, dtype=dtype)],
        rows=inbox(size - 1, 2, B, H, S, dtype=torch.float32),
    )  # fmt: skip
    results = dict(zip(("dq_ptr", "dk_ptr", "dv_ptr"), map(torch.empty_like, (q, k, v))))
    p = Backward(**{
        **dict.fromkeys(Backward._fields), **sizes(call, plan), "num_comm_sms": 0, "BLOCK_N": tl.constexpr(GLUON_ROWS),
        "STAGES": tl.constexpr(1), "PIECE": tl.constexpr(GLUON_ROWS),
        "spans_ptr": torch.zeros(2, size * S, dtype=torch.int32) if packed else None,
        "rows_ptr": torch.empty(2, B, H, S), **results, **(of_ring if size > 1 else {}),
    })  # fmt: skip
    launch = host.planned_gradients(call, plan, exchange if size > 1 else None)  # type: ignore[arg-type]
    launch(q, k, v, dout, p)
    return found


def inbox(*shape: int, dtype: torch.dtype) -> Any:
    return SimpleNamespace(plain=lambda: torch.empty(shape, dtype=dtype))


def compiled(launch: Any) -> Any:
    kernel, args, options, bases = launch
    for x, base in bases:
        x.base = base
    return compile_only(kernel, *args, **options)


@of_old
@pytest.mark.parametrize(
    ("size", "d", "dtype", "zigzag"),
    [(1, 128, torch.bfloat16, False), (2, 128, torch.float16, True), (2, 64, torch.bfloat16, True)],
)  # fmt: skip
def test_products_overlap_and_little_is_spilled_between_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, d: int, dtype: torch.dtype, zigzag: bool
) -> None:
    """Of dq a consumer waits for the first scores, then in the loop for the products with dout, the scores and dq, and
    in the end for the last two. Of dk and dv it waits in the loop for the scores, for the products with dout, and for
    both results. Some values of the setup go to the stack before the first product."""
    rows, steps = GLUON_ROWS // 16, d // 16
    products = [3 * steps + rows + steps + rows, 2 * steps + 2 * rows]
    for launch, count, waits in zip(launches(monkeypatch, size, d, dtype, zigzag), products, (6, 3), strict=True):
        kernel = compiled(launch)
        usage, code = resources(kernel, tmp_path), sass(kernel, tmp_path)
        assert kernel.metadata.num_warps == 12
        assert kernel.metadata.shared + usage["SHARED"] <= gluon_fits.SHARED
        events = re.findall(r"HGMMA\.64x(?:64|128)x16|WARPGROUP\.DEPBAR|\bSTL\b", code)
        found = [i for i, event in enumerate(events) if event.startswith("HGMMA")]
        assert len(found) == 2 * count
        for first, last in ((found[0], found[count - 1]), (found[count], found[-1])):
            assert events[first : last + 1].count("WARPGROUP.DEPBAR") == waits - 1
            assert events[first : last + 1].count("STL") <= (d == 128 and launch[0].__name__ == "gluon_dkv_kernel")
        assert events.count("WARPGROUP.DEPBAR") == 2 * waits
        assert usage["STACK"] <= STACK[launch[0].__name__]


STACK = {"gluon_dq_kernel": 96, "gluon_dkv_kernel": 216}
"""Bytes a thread. With D = 128 results and operands of dk and dv leave 16 registers for the numbers of a task, one of
which is stored in the loop over blocks."""


def test_operands_that_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA is given copies of those that do not begin at a multiple of 16 bytes, and no tensor is kept."""
    for _, args, _, bases in launches(monkeypatch, 1, 64, torch.bfloat16, False, offset=1):
        assert len(bases) >= 6
        assert all(base.data_ptr() % 16 == 0 for _, base in bases)
        assert all(x.base is None for x in args if hasattr(x, "base"))


# --------------------------------------------------------------------------------------------- the plan of the form
@triton.jit
def plain_dq_kernel(p, world):
    """In the place of the Gluon kernel in the simulator."""
    epoch = tl.load(p.number_ptr) if world.size > 1 else 0
    for task in range(tl.program_id(0), p.B * p.H * num_pieces(p, p.BLOCK_M), tl.num_programs(0)):
        _queries(task, p, world, epoch)


def with_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The form "gluon" in the simulator, with plain kernels of the same tiles. Returns the ranks that have launched it
    so far."""
    started: list[int] = []

    def given(p: Backward, names: str, args: Any) -> Backward:
        """With the tensors of descriptors."""
        return p._replace(**{f"{name}_ptr": x.base for name, x in zip(names.split(), args, strict=True)})

    def of_queries(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        start = cooperative_launch(world, plain_dq_kernel, grid)
        return lambda *args: start(given(args[6], "q dout k v k_inbox v_inbox", args[:6]), world.device)

    def of_keys(world: Any, kernel: Any, grid: tuple[int, ...], **options: Any) -> Any:
        def start(*args: Any) -> None:
            started.append(world.rank)
            p = given(args[8], "q dout rows k v q_inbox dout_inbox rows_inbox", args[:8])
            count = p.B * p.KV.value * len(pieces(p.S, layout_of(p), world.rank, world.size, GLUON_ROWS))
            beside_launch(world, keys_kernel, (count,))(p, world.device)

        return start

    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")
    monkeypatch.setattr(host, "cooperative_launch", of_queries)
    monkeypatch.setattr(host, "beside_launch", of_keys)
    return started


def layout_of(p: Backward) -> str:
    return "zigzag" if p.ZIGZAG.value else "contiguous"


@pytest.mark.parametrize(
    ("size", "rows", "joined", "told"),
    [(1, 70, 1, {"causal": True}), (2, 150, 1, {"causal": True}), (3, 130, 1, {"window": (9, 20)}),
     (2, 250, 1, {"causal": True, "layout": "zigzag"}), (2, 100, 1, {"causal": True, "length": 150}),
     (2, 100, 2, {"causal": True, "length": 150})],
)  # fmt: skip
def test_the_plan_of_the_form(
    monkeypatch: pytest.MonkeyPatch, size: int, rows: int, joined: int, told: dict[str, Any]
) -> None:  # fmt: skip
    """Copies, counters, the kernels' arguments and their order, launched twice. Three batches where there is padding,
    whose chunks may come together."""
    monkeypatch.setattr(planning, "JOIN", joined * rows * 64 * 2)
    started = with_plain_kernels(monkeypatch)
    monkeypatch.setattr(FORWARD, "default", lambda call: "fused")
    monkeypatch.setattr(OPERATOR, "default", lambda call: "gluon")
    generator = torch.Generator().manual_seed(rows)
    everybody = [
        [torch.randn(3 if "length" in told else 1, rows, heads, 64, generator=generator) for _ in range(size)]
        for heads in (2, 1, 1)
    ]  # fmt: skip
    check(everybody, torch.bfloat16, launches=2, **told)
    assert len(started) == 2 * size


def test_where_the_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the simulator" in rules.fits_gluon(called(4096))
    monkeypatch.setattr(rules, "missing_anywhere", lambda world: "")
    assert rules.default_backward(called(49152, dlse=torch.empty(1, 16, 49152))) == "gluon"
    assert rules.default_backward(called(49152)) == "parts"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert rules.default_backward(called(49152)) == "gluon"
