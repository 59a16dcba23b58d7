"""What the conformance suite has no operands for: equal bits, many columns, chosen forms, fp8 by hand, wrong calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_reduce_rms_norm import OPERATOR, all_reduce_rms_norm, bound, default, reference, seconds
from pkt.kernels.declaration import Call
from pkt.kernels.reduce_scatter_rms_norm import reduce_scatter_rms_norm
from pkt.kernels.shared import rms_norm, row_tiles

from .helpers import on_ranks, random
from .launches import all_launched, compile_checked

FORMS = (("low_latency", {"parts": 2}), ("two_shot", {"rows": 2}), ("unfused", {}))


def operands(size: int, T: int, H: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    return {
        "x": [random((T, H), dtype, 1, rank) for rank in range(size)],
        "residual": [random((T, H), dtype, 2)] * size,
        "weight": [random((H,), dtype, 3)] * size,
    }


def mine(every: dict[str, list[torch.Tensor]], rank: int) -> list[torch.Tensor]:
    return [ranks[rank].clone() for ranks in every.values()]


def test_all_ranks_hold_the_same_bits_which_torch_gets_from_the_new_residual() -> None:
    """Programs that share a token, a tile of each rank, and the two kernels of unfused."""

    def run(world: Any) -> list[Any]:
        own = mine(operands(world.size, 2, 40, torch.bfloat16), world.rank)
        found = [all_reduce_rms_norm(*own, mode=mode, **settings, world=world) for mode, settings in FORMS]
        for normed, new in found:
            again = torch.nn.functional.rms_norm(new.float(), (40,), own[2].float(), 1e-6)
            assert torch.allclose(normed.float(), again, rtol=2.0**-7, atol=0)
        return [[t.view(torch.int16).tolist() for t in each] for each in found]

    first, *others = on_ranks(3, run)
    assert all(other == first for other in others)


def right(world: Any, T: int, H: int, dtype: torch.dtype, call: Any, **arguments: Any) -> None:
    every = operands(world.size, T, H, dtype)
    quant = {name: value for name, value in arguments.items() if name == "quant"}
    found = call(*mine(every, world.rank), world=world, **arguments)
    exact = reference(world.rank, **every, **quant)
    roundings = 2 if arguments.get("mode") == "unfused" else 1
    limits = bound(world.rank, dtype, roundings, **every, **quant)
    assert len(found) == len(exact) == (3 if quant else 2)
    for result, wanted, limit in zip(found, exact, limits, strict=True):
        assert ((result.double() - wanted).abs() <= limit).all()


@pytest.mark.parametrize(("mode", "settings"), FORMS)
@pytest.mark.parametrize("quant", ["fp8_token", "fp8_group"])
@pytest.mark.parametrize("sms", [1, 4])
def test_rows_that_are_normed_in_several_blocks(
    mode: str, settings: dict[str, Any], quant: Any, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of more columns than a program holds at once, here 128, and of more than 16 threads hold: in low_latency one
    program has two blocks of two tokens, or two programs share each token."""
    monkeypatch.setattr(row_tiles, "TILE_ELEMENTS", 128)
    monkeypatch.setattr("pkt.kernels.all_reduce_rms_norm.low_latency.MOST_THREADS", 16)

    def run(world: Any) -> None:
        right(world, 2, 768, torch.float16, all_reduce_rms_norm, mode=mode, quant=quant, **settings)

    on_ranks(2, run, sms=sms)


def test_a_quantised_call_that_rounds_by_hand() -> None:
    """Rows of one magnitude: scales are exact, and fp8 has all the numbers. A row of zeros has the least scale."""

    def run(world: Any) -> None:
        x = torch.zeros(2, 256)
        x[0, ::2], x[0, 1::2] = 1 / world.size, -1 / world.size
        own = x, torch.zeros(2, 256), torch.full((256,), 7.0)
        for quant, scales in (("fp8_token", 1), ("fp8_group", 2)):
            normed, new, scale = all_reduce_rms_norm(*own, eps=1e-30, quant=quant, world=world)
            assert normed.dtype == torch.float8_e4m3fn
            assert tuple(scale.shape) == (2, scales)
            assert torch.equal(new[0, :2], torch.tensor([1.0, -1.0]))
            assert torch.allclose(scale[0], torch.full((scales,), 7 / 448), rtol=1e-5)
            assert (scale[1] == rms_norm.LEAST_SCALE).all()
            assert (normed.float()[0].abs() == 448).all()
            assert not normed.float()[1].any()

    on_ranks(2, run)


def test_the_normed_rows_of_a_shared_residual_are_those_of_a_whole_one() -> None:
    def run(world: Any) -> None:
        T, H = 6, 40
        x, residual, weight = mine(operands(world.size, T, H, torch.bfloat16), world.rank)
        each = T // world.size
        part = slice(world.rank * each, (world.rank + 1) * each)
        normed, new = reduce_scatter_rms_norm(x, residual[part].clone(), weight, world=world)
        whole, whole_new = all_reduce_rms_norm(x, residual, weight, mode="unfused", world=world)
        assert torch.allclose(new.float(), whole_new[part].float(), rtol=2.0**-6, atol=2.0**-6)
        assert torch.allclose(normed.float(), whole.float(), rtol=2.0**-5, atol=2.0**-5)
        assert len({str(t.tolist()) for t in world.all_gather_object(normed)}) == 1

    on_ranks(3, run)


def chosen(size: int, T: int, H: int = 8192) -> str:
    x = torch.empty(T, H, dtype=torch.bfloat16, device="meta")
    world: Any = SimpleNamespace(size=size)
    return default(Call(OPERATOR.name, world, {"x": x}, {}, {}, None))


def test_the_form_with_the_least_predicted_time_is_chosen() -> None:
    assert [chosen(2, T) for T in (1, 16, 128, 1024, 8192)] == ["low_latency"] * 3 + ["two_shot"] * 2
    assert [chosen(8, T) for T in (1, 16, 128, 8192)] == ["low_latency", "unfused"] + ["two_shot"] * 2
    assert chosen(1, 1) == chosen(1, 8192) == "two_shot"
    assert chosen(16, 1) != "low_latency"
    for size in (2, 4, 8):
        for T in (1, 64, 4096):
            nbytes = T * 8192 * 2
            assert seconds(chosen(size, T), nbytes, size) == min(seconds(mode, nbytes, size) for mode in OPERATOR.forms)


def test_predictions_are_near_what_2_h100s_took() -> None:
    """Captured calls of 1, 16 and 128 tokens of 8192 in bf16, in us."""
    took = {"low_latency": (9.06, 9.98, 17.4), "two_shot": (15.1, 16.2, 21.6), "unfused": (10.5, 11.6, 20.6)}
    for mode, times in took.items():
        for T, us in zip((1, 16, 128), times, strict=True):
            assert 1e6 * seconds(mode, T * 8192 * 2, 2) == pytest.approx(us, rel=0.06), (mode, T)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, r, w: {"x": x[:, :7]}, "residual"),
        (lambda x, r, w: {"weight": w[:-1]}, "weight"),
        (lambda x, r, w: {"weight": w.half()}, "weight"),
        (lambda x, r, w: {"eps": 0.0}, "eps"),
        (lambda x, r, w: {"quant": "fp8"}, "quant"),
        (lambda x, r, w: {"quant": "fp8_group"}, "multiple of 128"),
        (lambda x, r, w: {"quant": "fp8_token", "out": torch.empty_like(x)}, "out"),
        (lambda x, r, w: {"mode": "two_shot", "parts": 2}, "parts"),
        (lambda x, r, w: {"parts": 3, "mode": "low_latency"}, "power of two"),
    ],
)
def test_wrong_calls(wrong: Any, says: str) -> None:
    def run(world: Any) -> None:
        x, r, w = (random(shape, torch.float32, 1) for shape in ((2, 8), (2, 8), (8,)))
        call = {"x": x, "residual": r, "weight": w, **wrong(x, r, w)}
        with pytest.raises(pkt.PktError, match=says):
            all_reduce_rms_norm(**call, world=world)

    on_ranks(1, run)


def test_fp8_has_no_gradient() -> None:
    def run(world: Any) -> None:
        x = torch.ones(1, 8, requires_grad=True)
        with pytest.raises(pkt.Unsupported, match="quant='fp8_token'"):
            all_reduce_rms_norm(x, torch.ones(1, 8), torch.ones(8), quant="fp8_token", world=world)

    on_ranks(1, run)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    ("T", "H", "settings"),
    [
        (16, 8192, {"mode": "low_latency", "quant": "fp8_token"}),  # several programs of a token
        (1024, 8192, {"mode": "two_shot", "quant": "fp8_group"}),
        (1024, 16384, {"mode": "two_shot"}),  # more columns than a program holds at once
    ],
)
def test_compiles(
    T: int, H: int, settings: dict[str, Any], arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a world of 8 GPUs, with no register spilled; fp8 is rounded by one instruction for two elements."""

    def run(world: Any) -> None:
        world.num_sms = 132
        x = torch.empty(T, H, dtype=torch.bfloat16)
        all_reduce_rms_norm(x, torch.empty_like(x), x.new_empty(H), **settings, world=world)

    (launch,) = all_launched(run, 8, False, monkeypatch)
    ptx = compile_checked(launch, arch, tmp_path).asm["ptx"]
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == ("quant" in settings)
