"""The registry: one plan for all tensors alike, another for others, and the calls that every operator refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pkt
from pkt.errors import Closed, CollectiveMismatch, DtypeError, RankError, ShapeError, UseAfterFree
from pkt.kernels.declaration import Call, Case, Form, Launch, Operand
from pkt.kernels.operator import Operator, module_of, names, operators
from pkt.kernels.shared import flagged
from pkt.runtime.memory.tensor import facts
from pkt.runtime.workers.carry import dumps, loads
from tests.conformance import inputs


def scaled(
    x: torch.Tensor, out: torch.Tensor | None = None, *, factor: Any = 2, mode: str | None = None, world: Any = None
) -> torch.Tensor:
    """Counts its plans in a workspace."""
    return SCALED((x, out), (factor, mode), world)


def plan(call: Call) -> Launch:
    factor = call["factor"]
    call.world.keep("calls", list).append((tuple(call["x"].shape), factor))
    if factor < 0:
        raise call.refuse("factor", factor, "at least 0")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(x.plain() if isinstance(x, pkt.SymmetricTensor) else x, factor, out=out)

    return launch


SCALED = Operator(
    scaled,
    tensors={"x": Operand("m n", (torch.float32, torch.float64), transposed=True)},
    result="m n",
    arguments={"factor": lambda call, name, value: value[0] if isinstance(value, list) else value},
    forms={"only": Form(plan)},
    reference=lambda rank, x, factor: x[rank] * factor,
)


def on_one_rank(main: Any) -> Any:
    return pkt.launch(main, ranks=1, device="cpu", heap="1MiB")[0]


def test_a_plan_is_made_once_for_tensors_alike() -> None:
    def main(world: Any) -> Any:
        for values in ([[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]):
            x = torch.tensor(values)
            assert scaled(x, world=world).tolist() == (2 * x).tolist()
        return world.keep("calls", list)

    assert on_one_rank(main) == [((1, 2), 2)]


DIFFERENT = {
    "argument": lambda x: (x, 3),
    "shape": lambda x: (torch.zeros(2, 5), 2),
    "dtype": lambda x: (torch.zeros(2, 3, dtype=torch.float64), 2),
    "strides": lambda x: (torch.zeros(3, 2).t(), 2),
    "alignment": lambda x: (torch.zeros(7)[1:].view(2, 3), 2),
    "symmetric": lambda x: (pkt.zeros(2, 3, dtype=torch.float32, name="y"), 2),
    "in the heap": lambda x: (pkt.zeros(2, 3, dtype=torch.float32, name="y").plain(), 2),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_tensors_that_differ_have_plans_of_their_own(what: str) -> None:
    def main(world: Any) -> int:
        x = torch.zeros(2, 3)
        scaled(x, world=world)
        other, factor = DIFFERENT[what](x)
        scaled(other, factor=factor, world=world)
        return len(world.keep("calls", list))

    assert on_one_rank(main) == 2


def test_values_that_are_equal_but_of_another_type_have_plans_of_their_own() -> None:
    """True equals 1 and 1.0: a plan for one would let the others past the checks."""

    def main(world: Any) -> Any:
        x = torch.ones(1, 2)
        for factor in (1, True, 1.0, 1, True, 1.0):
            scaled(x, factor=factor, world=world)
        return [(type(factor), factor) for _, factor in world.keep("calls", list)]

    assert on_one_rank(main) == [(int, 1), (bool, True), (float, 1.0)]


def test_true_is_no_number_after_a_call_with_1() -> None:
    """Nor is 512.0 an integer, alone and in a tuple, of one weight and of several."""
    x, w = torch.ones(32, 32), torch.ones(32, 32)
    q = torch.ones(1, 16, 1, 16)
    wrong: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (lambda **keywords: pkt.all_gather(x, **keywords), {"dim": 1}, {"dim": True}),
        (lambda **keywords: pkt.all_gather(x, **keywords), {"dim": 0}, {"dim": 0.0}),
        (lambda **keywords: pkt.broadcast(x, **keywords), {"root": 0}, {"root": False}),
        (lambda **keywords: pkt.ring_attention(q, q, q, **keywords), {"tiles": (16, 16)}, {"tiles": (16, 16.0)}),
        (lambda **keywords: pkt.ring_attention(q, q, q, **keywords), {"causal": True}, {"causal": 1}),
        (lambda **keywords: pkt.all_gather_matmul(x, w, **keywords), {"num_comm_sms": 1}, {"num_comm_sms": True}),
        (lambda **of: pkt.all_gather_matmul(x, [w, 2 * w], **of), {"num_comm_sms": 1}, {"num_comm_sms": True}),
    ]  # fmt: skip

    def main(world: Any) -> None:
        for call, right, other in wrong:
            for _ in range(2):
                call(**right)
                with pytest.raises((DtypeError, ShapeError, RankError)):
                    call(**other)

    on_one_rank(main)


def test_symmetric_tensors_at_other_addresses_have_plans_of_their_own() -> None:
    def main(world: Any) -> int:
        x, y = (pkt.zeros(4, 4, dtype=torch.float32, name=name) for name in "xy")
        for tensor in (x, y, x, y, y[0:], y[1:]):
            scaled(tensor)
        return len(world.keep("calls", list))

    assert on_one_rank(main) == 3


def test_a_plan_that_raises_is_not_kept() -> None:
    def main(world: Any) -> int:
        for _ in range(2):
            with pytest.raises(ShapeError, match="rank 0: scaled: factor: found -1, wanted at least 0"):
                scaled(torch.zeros(2, 2), factor=-1, world=world)
        return len(world.keep("calls", list))

    assert on_one_rank(main) == 2


def test_a_tensor_reshaped_in_place_is_another() -> None:
    def main(world: Any) -> None:
        x = pkt.zeros(2, 3, dtype=torch.float32)
        before = facts([x], world, "test")
        x.t_()
        assert facts([x], world, "test") != before
        assert facts([x], world, "test") == facts([x.t().t()], world, "test")
        x.t_()
        assert facts([x], world, "test") == before
        x.as_strided_((2,), (1,), 3)
        assert x.data_ptr() == x.plain().data_ptr()

    on_one_rank(main)


def test_keywords_that_cannot_be_looked_up_are_planned_each_time() -> None:
    def main(world: Any) -> int:
        for _ in range(2):
            assert scaled(torch.ones(1, 1), factor=[3], world=world).item() == 3
        return len(world.keep("calls", list))

    assert on_one_rank(main) == 2


def test_no_plan_after_free_or_close() -> None:
    def main(world: Any) -> Any:
        x = pkt.zeros(2, 2, dtype=torch.float32)
        scaled(x)
        x.free()
        with pytest.raises(UseAfterFree):
            scaled(x)
        y = torch.zeros(2, 2)
        scaled(y, world=world)
        world.close()
        with pytest.raises(Closed, match="rank 0: scaled: the world is closed"):
            scaled(y, world=world)

    on_one_rank(main)


@pytest.mark.parametrize("name", operators())
def test_operators_travel_to_other_processes(name: str) -> None:
    """A function that a user launches on GPUs may name an operator."""
    assert loads(dumps(operators()[name])).names == operators()[name].names


def test_a_setting_declared_but_not_taken_is_refused() -> None:
    with pytest.raises(TypeError, match="scaled: declared or taken, but not both: factor"):
        Operator(
            scaled, tensors=SCALED.tensors, result="m n", forms=SCALED.forms, reference=SCALED.reference,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tensors": {"y": SCALED.tensors["x"]}}, "x, y"),
        ({"arguments": {**SCALED.arguments, "time": SCALED.settings}}, "time"),
        ({"written": "there"}, "there"),
    ],
)
def test_a_name_that_the_function_does_not_take_is_refused(wrong: dict[str, Any], named: str) -> None:
    kept = "tensors", "result", "forms", "reference", "arguments", "settings"
    with pytest.raises(TypeError, match=f"scaled: declared or taken, but not both: {named}$"):
        Operator(scaled, **{**{name: getattr(SCALED, name) for name in kept}, **wrong})


def greatest(world: Any, sizes: dict[str, int], alone: bool = False) -> int:
    call = Call("test", world, {"x": torch.zeros(1)}, {}, {}, None)
    call.sizes = sizes
    return call.greatest("k", alone)


def test_ranks_that_differ_in_a_size_take_the_greatest() -> None:
    """Of every call in which it is new, as in models: the products behind attention and behind the MLP differ in k."""

    def main(world: Any) -> list[int]:
        return [greatest(world, {"k": k + world.rank, "n": n}) for k, n in ((5, 1), (5, 2), (9, 1), (5, 1))]

    assert pkt.launch(main, ranks=2, device="cpu", heap="1MiB") == [[6, 6, 10, 6]] * 2


def test_a_rank_that_comes_alone_with_another_size_takes_the_greatest_of_the_first_call() -> None:
    def main(world: Any) -> list[int]:
        found = [greatest(world, {"k": 5 + world.rank, "n": n}, alone=True) for n in (1, 2)]
        if world.rank == 0:
            found.append(greatest(world, {"k": 9, "n": 1}, alone=True))
        return found

    assert pkt.launch(main, ranks=2, device="cpu", heap="1MiB") == [[6, 6, 6], [6, 6]]


def test_a_rank_that_asks_alone_for_the_greatest_size_is_named() -> None:
    def main(world: Any) -> None:
        if world.rank == 0:
            greatest(world, {"k": 9})
        world.barrier()

    with pytest.raises(CollectiveMismatch, match=r"rank 0: test: the first call with this k .*; rank 1: barrier"):
        pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_plain_tensors_that_overlap_are_refused_after_a_call_with_others_alike() -> None:
    """Neither tensor shows the overlap: its shape, strides and alignment are the same as before."""

    def main(world: Any) -> None:
        x = torch.arange(80.0)
        for sizes, operator in (
            ((64, 64), functools.partial(pkt.all_reduce, mode="low_latency", world=world)),
            ((64, 32), functools.partial(pkt.reduce_scatter, world=world)),
            ((32, 64), functools.partial(pkt.all_gather, mode="low_latency", world=world)),
        ):
            operator(*(torch.ones(n) for n in sizes))
            mine, out = x[: sizes[0]], x[4 : 4 + sizes[1]]
            for pair in ((mine, out), (x[4 : 4 + sizes[0]], x[: sizes[1]])):
                with pytest.raises(ShapeError, match="out: found a tensor -?16 bytes from x, wanted memory of its own"):
                    operator(*pair)
            operator(x[: sizes[0]], torch.ones(sizes[1]))
        assert pkt.all_reduce(mine, mode="low_latency", world=world) is mine, "in place"

    pkt.launch(main, ranks=2, device="cpu", heap="4MiB")


COLLECTIVES = [operator for operator in operators().values() if list(operator.tensors) == ["x"]]
KINDS = {  # how a tensor of these elements may lie in memory
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack((x, x), -1)[..., 0],
    "symmetric, transposed": lambda x: pkt.empty(*x.t().shape, dtype=x.dtype).copy_(x.t()).t(),
    "negative": lambda x: torch._neg_view(-x),
    "symmetric, negative": lambda x: torch._neg_view(pkt.empty(*x.shape, dtype=x.dtype).copy_(-x)),
}


@pytest.fixture(params=["few", "many"])
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Many: as if a tensor were too large for flagged words."""
    if request.param == "many":
        monkeypatch.setattr(flagged, "few", lambda *_: False)
        monkeypatch.setattr(flagged, "few_of_parts", lambda *_: False)
        monkeypatch.setattr(flagged, "shots", lambda *_: 0)
    return request.param


@pytest.mark.usefixtures("elements")
@pytest.mark.parametrize("operator", COLLECTIVES, ids=lambda operator: operator.name)
def test_collectives_take_any_tensor(operator: Any) -> None:
    """Twice each, the second time with other elements."""

    def main(world: Any) -> None:
        everybody = [torch.arange(24.0).view(4, 6) + 100 * rank for rank in range(world.size)]
        given = {"root": 1} if operator.name == "broadcast" else {}
        exact = operator.reference(world.rank, everybody, **given).float()
        for kind, place in KINDS.items():
            for as_out in (None, "plain", "transposed", "negative") if "out" in operator.names else (None,):
                x, out = place(everybody[world.rank]), as_out and KINDS[as_out](torch.zeros_like(exact))
                outs = {} if out is None else {"out": out}
                for launch in (0, 1):
                    x.copy_(everybody[world.rank] + launch)
                    found = operator.function(x, **given, **outs, world=world)
                    wanted = exact + launch * (world.size if "reduce" in operator.name else 1)
                    assert torch.equal(found, wanted), (kind, as_out, found, wanted)
                    assert found is (x if operator.name == "broadcast" else found if out is None else out)

    pkt.launch(main, ranks=2, device="cpu", heap="8MiB", sms=2)


NAMED = [(o, mode) for o in COLLECTIVES for mode, form in o.forms.items() if form.symmetric and not form.gpu]


@pytest.mark.parametrize(("operator", "mode"), NAMED, ids=lambda of: getattr(of, "name", of))
def test_a_named_form_takes_symmetric_tensors_of_any_strides(operator: Any, mode: str) -> None:
    """Twice each, the second time with other elements."""

    def main(world: Any) -> None:
        everybody = [torch.arange(24.0).view(4, 6) + 100 * rank for rank in range(world.size)]
        given = {"root": 1} if operator.name == "broadcast" else {}
        exact = operator.reference(world.rank, everybody, **given).float()
        x, out = (KINDS["symmetric, transposed"](like) for like in (everybody[world.rank], exact))
        outs = {"out": out} if "out" in operator.names else {}
        for launch in (0, 1):
            x.copy_(everybody[world.rank] + launch)
            found = operator.function(x, **given, **outs, mode=mode, world=world)
            assert torch.equal(found, exact + launch * (world.size if "reduce" in operator.name else 1))
            assert found is (out if outs else x)

    pkt.launch(main, ranks=2, device="cpu", heap="8MiB", sms=2)


@pytest.mark.usefixtures("elements")
@pytest.mark.parametrize("operator", COLLECTIVES, ids=lambda operator: operator.name)
def test_collectives_take_tensors_of_another_team(operator: Any) -> None:
    """As plain ones."""

    def main(world: Any) -> None:
        row, column = divmod(world.rank, 2)
        team, other = world.team([2 * row, 2 * row + 1]), world.team([column, column + 2])
        everybody = [torch.arange(24.0).view(4, 6) + 100 * rank for rank in range(team.size)]
        given = {"root": 1} if operator.name == "broadcast" else {}
        exact = operator.reference(team.rank, everybody, **given).float()
        x = pkt.empty(4, 6, world=other).copy_(everybody[team.rank])
        outs = {"out": pkt.empty(*exact.shape, world=other)} if "out" in operator.names else {}
        assert torch.equal(operator.function(x, **given, **outs, world=team), exact)
        for mode, form in operator.forms.items():
            if form.symmetric:
                with pytest.raises(pkt.NotSymmetric, match="found a symmetric tensor of another world"):
                    operator.function(x, **given, **outs, mode=mode, world=team)

    pkt.launch(main, ranks=4, device="cpu", heap="16MiB", sms=2)


def test_a_named_form_copies_nothing_into_the_heap() -> None:
    def main(world: Any) -> None:
        with pytest.raises(pkt.NotSymmetric, match="all_gather: x must be a symmetric tensor"):
            pkt.all_gather(torch.ones(4), mode="pull", world=world)
        with pytest.raises(pkt.NotSymmetric, match="all_gather: out must be a symmetric tensor.*, found None: all"):
            pkt.all_gather(torch.ones(4), mode="push", world=world)
        with pytest.raises(ShapeError, match="elements that share no memory"):
            pkt.all_reduce(torch.ones(1).expand(4), world=world)

    pkt.launch(main, ranks=2, device="cpu", heap="1MiB")


def test_ranks_that_copy_different_tensors_are_told() -> None:
    """Where peers access x in the form that is taken, as over nodes."""

    def main(world: Any) -> None:
        x = pkt.ones(8)
        pkt.all_reduce(x if world.rank else x.plain().clone(), world=world)

    with pytest.raises(pkt.CollectiveMismatch, match="plain='x'"):
        pkt.launch(main, ranks=2, node_size=1, device="cpu")


def test_ranks_that_take_different_forms_are_told() -> None:
    def main(world: Any) -> None:
        x = pkt.ones(8, dtype=torch.float64)  # of which there are no flagged words
        pkt.all_gather(x if world.rank else x.plain().clone(), world=world)

    with pytest.raises(pkt.CollectiveMismatch, match=r"mode='inbox'\).*mode='pull'\)"):
        pkt.launch(main, ranks=2, device="cpu")


def rows_of(name: str) -> int:
    """Rows of a (., 48) for which a product on two ranks has 48 rows."""
    operator = operators()[name]
    for m in (24, 48):
        shapes = inputs.shapes_of(operator, Case(sizes={"m": m, "k": 48, "n": 48}), 2)
        operands = {n: None if n == "bias" else [torch.empty(shape)] * 2 for n, shape in shapes.items()}
        if operator.reference(0, **operands).shape == (48, 48):
            return shapes["a"][0]
    raise AssertionError(name)


@pytest.mark.parametrize("mode", [None, "unfused"])
@pytest.mark.parametrize("name", [name for name, operator in operators().items() if operator.tuning])
def test_outputs_of_products_share_no_memory_with_what_is_read(name: str, mode: str | None) -> None:
    """Such outputs are refused also after a call with tensors alike that share none. Nothing is written."""
    shape = (rows_of(name), 48)

    def main(world: Any) -> None:
        def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return getattr(pkt, name)(a, b, out, bias=bias, mode=mode, world=world)

        rows, memory = shape[0], torch.arange(2.0 * 96 * 48)
        a, bias = torch.ones(shape), torch.ones(48)
        call(a, torch.ones(48, 48), torch.ones(48, 48), bias)
        room = world.heap.ledger.free_bytes
        b, lower = memory[: 48 * 48].view(48, 48), memory[16 * 48 : 64 * 48].view(48, 48)
        for what, given in (
            ("0 bytes from b", (a, b, b, bias)),
            ("0 bytes from b", (a, b.t(), b, bias)),
            ("3072 bytes from b", (a, b, lower, bias)),
            ("-3072 bytes from b", (a, lower, b, bias)),
            ("0 bytes from a", (memory[: rows * 48].view(shape), torch.ones(48, 48), b, bias)),
            ("-192 bytes from bias", (a, torch.ones(48, 48), b, memory[48:96])),
        ):
            before = memory.clone()
            with pytest.raises(ShapeError, match=f"rank {world.rank}: {name}: out: found a tensor {what}"):
                call(*given)
            assert torch.equal(memory, before)
        assert world.heap.ledger.free_bytes == room
        call(a, b, memory[48 * 48 : 96 * 48].view(48, 48), bias)

    pkt.launch(main, ranks=2, device="cpu", heap="4MiB")


def test_operators_go_to_other_processes() -> None:
    own = operators()["all_gather"]
    assert loads(dumps(own)) is own
    x = torch.ones(2, 3)
    there = loads(dumps(SCALED))
    assert there is not SCALED
    assert on_one_rank(lambda world: there((x, None), (3, None), world).tolist()) == (3 * x).tolist()


def test_an_operator_in_the_folder_of_another_is_found() -> None:
    name = "ring_attention_backward"
    assert module_of(name) == f"pkt.kernels.ring_attention.{name}"
    assert operators()[name].function is getattr(pkt, name)
    assert loads(dumps(operators()[name])) is operators()[name]
    assert "all_gather_matmul_kept" not in names()  # of another file name
