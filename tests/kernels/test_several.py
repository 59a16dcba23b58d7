"""all_gather_matmul(a, [wq, wk, wv]): several weights after one gather, one launch for those that lie side by side."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt
from pkt.kernels.all_gather_matmul import all_gather_matmul, reference
from pkt.kernels.all_gather_matmul.host import OPERATOR, Keywords
from pkt.kernels.all_gather_matmul.plain import push_kernel
from pkt.kernels.operator import Operator
from pkt.kernels.several import side_by_side
from pkt.language.inspect import compile_only, count_markers
from tests.conformance import inputs as conformance
from tests.conformance.checks import set_launches
from tests.conformance.inputs import bound

from .helpers import DTYPES, GATHER_FORMS, LAUNCHES, as_weight, inputs, on_ranks, random
from .launches import SHARED_LIMIT, all_launched, compile_checked
from .machine_code import resources

every_form = pytest.mark.parametrize(("mode", "shard"), GATHER_FORMS)
Weights = Sequence[torch.Tensor]


def separate(weights: Weights) -> list[torch.Tensor]:
    return [weight.clone() for weight in weights]


def separate_transposed(weights: Weights) -> list[torch.Tensor]:
    return [as_weight(weight) for weight in weights]


def in_rows(weights: Weights) -> list[torch.Tensor]:
    """Columns of one weight."""
    return list(torch.cat(list(weights), dim=-1).split([w.shape[-1] for w in weights], dim=-1))


def in_rows_transposed(weights: Weights) -> list[torch.Tensor]:
    """Rows of one Linear's weight, each as its transposed view."""
    return [w.t() for w in torch.cat([w.t() for w in weights]).split([w.shape[1] for w in weights])]


STORED: list[Callable[[Weights], list[torch.Tensor]]] = [separate, separate_transposed, in_rows, in_rows_transposed]


def settings(mode: str | None) -> dict[str, Any]:
    return dict(OPERATOR.forms[mode].small) if mode else {}


def multiplies(
    world: Any, mode: Any, shard: Any, m: int, k: int, ns: Sequence[int], dtype: torch.dtype, stored: Any, *,
    bias: bool = False, epilogue: Any = "none", given: Any = None, launches: int = LAUNCHES, values: Any = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Right, for every weight and in every launch. given: makes `out` of tensors of the results' shapes."""
    each = 2 if epilogue == "swiglu" else 1
    rows = k if shard == "rows" else world.size * k
    outs, results = None, []
    for launch in range(launches):
        shards = inputs(world, (m, k), dtype, launch)
        bs = [random((rows, each * n), dtype, launch, world.rank, i) for i, n in enumerate(ns)]
        biases = [random((each * n,), dtype, launch, world.rank, i, 5) for i, n in enumerate(ns)] if bias else None
        length = m * (world.size if shard == "rows" else 1)
        if given and outs is None:
            outs = given([torch.full((length, n), torch.nan, dtype=dtype) for n in ns])
        results = all_gather_matmul(
            shards[world.rank], stored(bs), outs, bias=biases, epilogue=epilogue, mode=mode, shard=shard,
            **(settings(mode) if values is None else values),
        )  # fmt: skip
        assert isinstance(results, list)
        assert outs is None or all(x is y for x, y in zip(results, outs))
        for i, (b, n) in enumerate(zip(bs, ns, strict=True)):
            added = [biases[i]] * world.size if biases else None
            operands = {"a": shards, "b": [b] * world.size, "bias": added}
            case = conformance.Case({"m": m, "k": k, "n": n}, arguments={"epilogue": epilogue, "shard": shard})
            exact = reference(world.rank, **operands, epilogue=epilogue, shard=shard)
            limit = bound(OPERATOR, mode or "push", case, world.rank, world.size, operands, dtype)
            assert results[i].shape == exact.shape
            assert ((results[i].double() - exact).abs() <= limit).all(), (mode, shard, i, launch, stored.__name__)
    return results


# ------------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@every_form
def test_several_weights(mode: Any, shard: Any, ranks: int) -> None:
    """Of any number of columns, in every dtype, however they are stored. Even and odd numbers of ranks share the sizes
    between them."""

    def run(world: Any) -> None:
        for i, stored in enumerate(STORED):
            if mode == "copy" or (i + ranks) % 2 == 0:
                multiplies(world, mode, shard, 20, 24, (16, 40, 16), DTYPES[i % 3], stored, bias=i % 2 == 0, launches=2)
            else:
                dtype = DTYPES[(i + 1) % 3]
                multiplies(world, mode, shard, 7, 13, (21, 5, 1), dtype, stored, bias=i % 2 == 1, launches=2)
        multiplies(world, mode, shard, 33, 8, (24, 7), torch.bfloat16, separate)  # one whose rows TMA cannot take

    on_ranks(ranks, run, seed=ranks)


@every_form
def test_swiglu_of_each(mode: Any, shard: Any) -> None:
    def run(world: Any) -> None:
        for stored in STORED:
            multiplies(world, mode, shard, 12, 16, (8, 24), torch.float32, stored, bias=True, epilogue="swiglu")

    on_ranks(2, run)


@pytest.mark.parametrize("shard", ["rows", "columns"])
def test_defaults(shard: Any) -> None:
    def run(world: Any) -> None:
        for stored in STORED:
            multiplies(world, None, shard, 20, 24, (16, 40), torch.bfloat16, stored)

    on_ranks(3, run)


@every_form
def test_given_outputs(mode: Any, shard: Any) -> None:
    """Of their own, also where the weights are one, and side by side like the weights."""

    def run(world: Any) -> None:
        for stored, given in ((separate, separate), (in_rows_transposed, separate), (in_rows, in_rows)):
            multiplies(world, mode, shard, 20, 24, (16, 40, 16), torch.bfloat16, stored, given=given)

    on_ranks(2, run)


def test_symmetric_outputs() -> None:
    def run(world: Any) -> None:
        given = lambda outs: [pkt.empty(*out.shape, dtype=out.dtype) for out in outs]  # noqa: E731
        multiplies(world, "push", "rows", 20, 24, (16, 40), torch.bfloat16, in_rows_transposed, given=given)

    on_ranks(2, run)


def test_one_weight_and_none_of_a_columns() -> None:
    def run(world: Any) -> None:
        multiplies(world, "push", "rows", 9, 8, (16,), torch.float32, separate)
        for stored in STORED:
            multiplies(world, "push", "rows", 9, 8, (0, 16, 0, 8), torch.float32, stored, bias=True)
        for m, k, ns in ((0, 8, (16, 8)), (9, 0, (16, 8)), (9, 8, (0, 0))):
            multiplies(world, "push", "rows", m, k, ns, torch.float32, separate, bias=True)

    on_ranks(2, run)


def test_forms_in_turn() -> None:
    """With one weight and several, in the same inboxes."""

    def run(world: Any) -> None:
        for turn in range(3):
            for mode, shard in GATHER_FORMS:
                multiplies(world, mode, shard, 20, 24, (16, 40), torch.bfloat16, separate, launches=1 + turn % 2)
                multiplies(world, mode, shard, 20, 24, (40,), torch.bfloat16, separate, launches=1)

    on_ranks(3, run, seed=3)


def test_the_launch_number_wraps() -> None:
    def run(world: Any) -> None:
        multiplies(world, "push", "rows", 20, 24, (16, 40), torch.float32, separate, launches=1)
        world.barrier()
        set_launches(world, 2**32 - 3)
        world.barrier()
        multiplies(world, "push", "rows", 20, 24, (16, 40), torch.float32, separate, launches=5)

    on_ranks(3, run, sms=2)


# ------------------------------------------------------------------------------------------------- what it costs
def kernels(stored: Any, mode: Any, patch: pytest.MonkeyPatch, m: int = 256, **options: Any) -> list[Any]:
    def run(world: Any) -> None:
        bs = stored([torch.empty(512, n, dtype=torch.bfloat16) for n in (256, 1024, 256)])
        all_gather_matmul(torch.empty(m, 512, dtype=torch.bfloat16), bs, mode=mode, **options)

    return all_launched(run, 4, False, patch)


def test_weights_side_by_side_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for stored in (in_rows, in_rows_transposed):
        (launch,) = kernels(stored, "push", monkeypatch)
        assert launch.args[0].N == 1536
        assert launch.args[0].TMA.value


def test_a_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the launch of the greatest product; the others only compute."""
    pushes = kernels(separate, "push", monkeypatch)
    few = kernels(separate, "low_latency", monkeypatch, 4)
    for found in (pushes, few):
        assert [(x.args[0].N, x.args[0].GATHERED.value) for x in found] == [(1024, False), (256, True), (256, True)]
    sent = {len([x for x in kernels(s, "copy", monkeypatch) if x.kernel is not push_kernel]) for s in STORED}
    assert len(sent) == 1
    computed = [x for x in kernels(separate, "copy", monkeypatch) if x.kernel is push_kernel]
    assert [x.args[0].N for x in computed] == [1024, 256, 256]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("mode", "m"), [("push", 256), ("low_latency", 4)])
@pytest.mark.parametrize("options", [{}, {"epilogue": "swiglu"}, {"shard": "columns"}], ids=str)
def test_what_only_computes_compiles(
    options: Any, mode: Any, m: int, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "shard" in options:
        stored = lambda bs: separate([b.repeat(4, 1) for b in bs])  # noqa: E731
    else:
        stored = separate_transposed
    first, *_, launch = kernels(stored, mode, monkeypatch, m, **options)
    compile_checked(first, arch, tmp_path)
    compiled = compile_only(launch.kernel, *launch.args, arch=arch, **launch.options)
    usage = resources(compiled, tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert count_markers(compiled.asm["ptx"]) == {"wait": 0, "signal": 0}
    if mode == "push":
        assert "wgmma.mma_async" in compiled.asm["ptx"] if arch == 90 else "tcgen05.mma" in compiled.asm["ptx"]


@every_form
def test_later_calls_are_not_planned_again(mode: Any, shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the plan keeps no tensor."""

    def run(world: Any) -> None:
        alive: list[weakref.ref] = []
        for stored in STORED:
            k = 16 * (world.size if shard == "columns" else 1)
            for turn in range(2):
                a, bs = torch.ones(8, 16), stored([torch.ones(k, n) for n in (16, 8)])
                outs = [torch.empty(8 * (world.size if shard == "rows" else 1), n) for n in (16, 8)]
                given = outs if stored in (separate, separate_transposed) else None
                options = {"mode": mode, "shard": shard, **settings(mode)}
                if turn:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(Operator, "plan", lambda *_: pytest.fail("planned again"))
                        patch.setattr("pkt.kernels.several._plan", lambda *_: pytest.fail("planned again"))
                        before = [x._version for x in outs]
                        found = all_gather_matmul(a, bs, given, **options)
                        assert given is None or all(x._version > v for x, v in zip(outs, before))
                else:
                    found = all_gather_matmul(a, bs, given, **options)
                assert not any(x.requires_grad for x in found)
            alive += [weakref.ref(x) for x in (a, *bs, *outs)]
            del a, bs, outs, given, found
        gc.collect()
        assert not any(x() is not None for x in alive), "the plan keeps a tensor"

    on_ranks(1, run)


def test_a_workspace_gives_back_what_is_kept() -> None:
    def run(world: Any) -> None:
        before = world.heap.ledger.free_bytes
        with pkt.Workspace() as workspace:
            values = {**settings("push"), "workspace": workspace}
            multiplies(world, "push", "rows", 20, 24, (16, 40), torch.float32, separate, values=values)
            assert world.heap.ledger.free_bytes < before
        assert world.heap.ledger.free_bytes == before

    on_ranks(2, run)


def test_weights_that_are_trained() -> None:
    """Parameters, and views of one, which record; so do the results."""

    def run(world: Any) -> None:
        whole = torch.nn.Parameter(torch.ones(24, 8))
        for bs in ([w.t() for w in whole.split([16, 8])], [torch.nn.Parameter(torch.ones(8, n)) for n in (16, 8)]):
            found = all_gather_matmul(torch.ones(4, 8), bs)
            assert [x.eq(8).all().item() and x.requires_grad for x in found] == [True, True]

    on_ranks(2, run)


# ------------------------------------------------------------------------------------------------------------ protocol
@pytest.mark.parametrize(("mode", "shard"), [form for form in GATHER_FORMS if form[0] != "unfused"])
def test_every_schedule_is_right_and_every_fault_is_caught(mode: Any, shard: Any) -> None:
    @functools.cache  # all schedules have the same
    def operands(launch: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The ranks' shards, the weights, and the exact results."""
        a = [conformance.whole((6, 20), launch * 8 + r, torch.float32) for r in range(size)]
        rows = 20 * (size if shard == "columns" else 1)
        bs = [conformance.whole((rows, n), launch * 8 + 4 + n, torch.float32) for n in (16, 8)]
        return a, bs, [reference(0, a, [b], shard=shard) for b in bs]

    def run(world: Any) -> None:
        """Three launches of two weights, with whole numbers."""
        for launch in range(3):
            a, bs, exact = operands(launch, world.size)
            given = [b.clone() for b in bs]
            found = all_gather_matmul(a[world.rank].clone(), given, mode=mode, shard=shard, **settings(mode))
            for x, right in zip(found, exact):
                assert torch.equal(conformance.read(x).double(), right), launch

    report = pkt.simulate(run, ranks=3, seeds=20, mutants=True, lost_signals=True, lost_ranks=2, sms=2)
    print(report)
    report.check()
    assert report.mutants
    assert report.signals


# ------------------------------------------------------------------------------------------------------- side by side
def test_the_keywords_have_types() -> None:
    """Once for one weight and for several."""
    assert {*Keywords.__annotations__} == {*OPERATOR.keywords, "workspace", "world"}


def test_side_by_side() -> None:
    weight = torch.arange(48.0).view(4, 12)
    q, k, v = weight.split([6, 4, 2], dim=1)
    assert torch.equal(side_by_side([q, k, v]), weight)  # type: ignore[arg-type]
    assert side_by_side([q, k, v]).data_ptr() == weight.data_ptr()  # type: ignore[union-attr]
    transposed = [x.t() for x in weight.split([1, 3])]
    assert torch.equal(side_by_side(transposed), weight.t())  # type: ignore[arg-type]
    vector = torch.arange(9.0)
    assert torch.equal(side_by_side(vector.split([2, 3, 4])), vector)  # type: ignore[arg-type]
    for parts in (
        [q, k], [k, q, v], [q, k.clone(), v], [q, k, v.int()], [q, q], [q.clone(), k.clone()], [q, vector],
        [q, k[:2], v], [q, weight.as_strided((4, 6), (6, 1), 6)],
    ):  # fmt: skip
        assert side_by_side(parts) is None


# -------------------------------------------------------------------------------------------------------- wrong calls
def refused(error: type[Exception], match: str, *b: Any, out: Any = None, ranks: int = 2, **options: Any) -> None:
    def run(world: Any) -> None:
        before = world.heap.ledger.free_bytes
        with pytest.raises(error, match=rf"rank {world.rank}: all_gather_matmul\b.*{match}"):
            all_gather_matmul(torch.ones(4, 4), list(b), out, **options)
        assert world.heap.ledger.free_bytes == before, "memory was allocated"

    on_ranks(ranks, run)


def test_wrong_calls_are_refused_before_anything_happens() -> None:
    w, x = torch.ones(4, 6), torch.ones(4, 2)
    refused(pkt.ShapeError, "b: found no tensors, wanted a tensor, or a list of them")
    refused(pkt.DtypeError, r"b\[1\]: found int, wanted a tensor", w, 3)
    refused(pkt.ShapeError, r"of b\[1\]: b: found \(5, 4\), wanted \(4, 4\)", w, torch.ones(5, 4))
    refused(pkt.DtypeError, r"of b\[1\]: b: found fp16, wanted float32", w, x.half())
    refused(pkt.ShapeError, r"of b\[0\]: b: found .*strides.*b.contiguous", torch.ones(4, 12)[:, :6], x)
    refused(pkt.DtypeError, "out: found Tensor, wanted None or a list of 2, as b is a list", w, x, out=torch.ones(8, 6))
    refused(pkt.ShapeError, "out: found a list of 1, wanted 2, one for each of b", w, x, out=[torch.ones(8, 6)])
    refused(pkt.ShapeError, "bias: found a list of 3, wanted 2", w, x, bias=[w[0]] * 3)
    refused(pkt.DtypeError, r"bias\[1\]: found NoneType, wanted a tensor", w, x, bias=[w[0], None])
    refused(pkt.ShapeError, r"of b\[1\]: bias: found \(6,\), wanted \(2,\)", w, x, bias=[w[0], w[0]])
    outs = [torch.ones(8, 6), torch.ones(8, 3)]
    refused(pkt.ShapeError, r"of b\[1\]: out: found \(8, 3\), wanted \(8, 2\)", w, x, out=outs)
    refused(
        pkt.ShapeError, r"of b\[1\]: b: found \(4, 3\), wanted an even number", w, torch.ones(4, 3), epilogue="swiglu"
    )
    refused(pkt.Unsupported, "of b.0.: found mode 'send'|wanted 'push' or", w, x, mode="send")
    refused(pkt.Unsupported, "found epilogue 'tanh'", w, x, epilogue="tanh")
    refused(pkt.Unsupported, "mode='gluon'.*Gluon is compiled only", w, x, mode="gluon")
    refused(pkt.ShapeError, "num_comm_sms: found 0, wanted at least 1", w, x, num_comm_sms=0)
    joined = torch.ones(4, 8).split([6, 2], dim=1)
    refused(pkt.ShapeError, r"bias\[1\]: found \(6,\), wanted \(2,\)", *joined, bias=[w[0], w[0]])
    turned = torch.ones(8, 8).split([2, 6], dim=1)
    refused(pkt.ShapeError, r"out\[0\]: found \(8, 2\), wanted 6 columns", *joined, out=turned)
    odd = torch.ones(4, 8).split([5, 3], dim=1)
    refused(pkt.ShapeError, r"b\[0\]: found \(4, 5\), wanted a multiple of 2 columns", *odd, epilogue="swiglu")
    refused(pkt.ShapeError, r"of b\[0\]: b: found \(4,\), wanted 2 dimensions", *torch.ones(8).split(4))
    room = torch.ones(100)
    outs = [room[:48].view(8, 6), room[40:56].view(8, 2)]
    refused(pkt.ShapeError, r"out: found a tensor .* bytes from out\[0\], wanted memory of its own", w, x, out=outs)
    outs = [torch.ones(8, 6), room[:16].view(8, 2)]
    refused(pkt.ShapeError, r"out: found a tensor .* bytes from b\[0\]", room[10:34].view(4, 6), x, out=outs)


def test_a_form_that_takes_one_weight_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is named; else another form runs."""
    import dataclasses

    w, x = torch.ones(4, 6), torch.ones(4, 2)
    monkeypatch.setitem(OPERATOR.forms, "push", dataclasses.replace(OPERATOR.forms["push"], several=None))
    refused(pkt.Unsupported, "mode='push'.*found a list of weights, of which this form takes one", w, x, mode="push")
    on_ranks(2, lambda world: multiplies(world, None, "columns", 4, 4, (6, 2), torch.float32, separate))


def test_ranks_that_disagree_are_told() -> None:
    def run(world: Any) -> None:
        bs = [torch.ones(4, 6 + 2 * world.rank), torch.ones(4, 2)]
        all_gather_matmul(torch.ones(4, 4), bs)

    with pytest.raises(pkt.CollectiveMismatch, match=r"rank 0: all_gather_matmul\(.*rank 1: all_gather_matmul\("):
        on_ranks(2, run)


@pytest.mark.parametrize("stored", STORED)
def test_the_op_of_compiled_code_returns_tensors_of_their_own(stored: Any) -> None:
    """Contiguous, as compiled code has been told, and without shared memory, in which it writes."""

    def run(world: Any) -> None:
        bs = stored([random((24, n), torch.float32, n) for n in (16, 40)])
        made: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for rows in (1, 5):
            a = random((rows, 24), torch.float32, world.rank)
            compiled = torch.compile(lambda a, *bs: all_gather_matmul(a, list(bs)), backend="aot_eager", fullgraph=True)
            made.append((a, compiled(a, *bs)))
        for a, results in made:
            each = all_gather_matmul(a, bs)
            assert all(torch.equal(x, y) and x.is_contiguous() for x, y in zip(results, each, strict=True))
            first, second = results
            assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()

    on_ranks(2, run)
