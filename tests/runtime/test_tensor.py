"""Symmetric tensors: views, peers, names, and factories that equal torch's."""

import copy
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import pkt
from pkt.errors import DtypeError, NotSymmetric, RankError, ShapeError
from pkt.runtime.memory.tensor import SymmetricTensor, facts


def test_peers_see_each_others_values(ranks):
    def main(world):
        x = pkt.full((4, 6), world.rank, dtype=torch.float16)
        return [x.peer(r)[3, 5].item() for r in range(world.size)], x.multicast

    assert ranks(3, main) == [([0.0, 1.0, 2.0], None)] * 3


VIEWS = {
    "x[1:]": lambda x: x[1:],
    "x[2]": lambda x: x[2],
    "x[2, 3]": lambda x: x[2, 3],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x.T": lambda x: x.T,
    "torch.transpose": lambda x: torch.transpose(x, 0, 1),
    "x.view": lambda x: x.view(3, 16),
    "reshape": lambda x: x.reshape(-1),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: torch.select(x, 1, 5),
    "int32": lambda x: x.view(torch.int32)[1],
    "bytes": lambda x: x.view(torch.uint8)[2:, 5:],
    "unsqueeze": lambda x: x[3].unsqueeze(0),
    "expand": lambda x: x[0].expand(5, 8),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (8, 1), 9),
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(3)[2],
    "split": lambda x: torch.split(x, 4)[1],
    "unbind": lambda x: x.unbind(1)[7],
    "view of a view": lambda x: x[1:][2:].T[3:],
    "empty view": lambda x: x[2:2],
    "contiguous": lambda x: x[1:3].contiguous(),
    "conjugate": lambda x: x.view(torch.complex64).conj(),
    "negative": lambda x: x.view(torch.complex64)[2, 1:2].conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_symmetric(ranks, name):
    make = VIEWS[name]

    def main(world):
        source = torch.arange(48, dtype=torch.float32).view(6, 8) + 100 * world.rank
        x = pkt.empty(6, 8)
        x.copy_(source)
        world.barrier()
        view = make(x)
        assert type(view) is SymmetricTensor
        assert view.world is world
        assert view.symbol == "x"
        for rank in range(world.size):
            theirs = view.peer(rank)
            wanted = make(source - 100 * world.rank + 100 * rank)
            assert type(theirs) is torch.Tensor
            assert theirs.dtype == wanted.dtype == view.dtype
            assert theirs.stride() == view.stride()
            assert torch.equal(theirs, wanted)
        if view.numel():
            with torch._C.DisableTorchFunctionSubclass():
                assert view.data_ptr() == torch.Tensor.data_ptr(view)

    ranks(2, main)


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 1:], lambda x: x[..., 2::2], lambda x: x.split(2, 1)[1], lambda x: x[:0, 3:]]
)
@pytest.mark.parametrize("rows", [0, 2])
def test_views_without_elements_stay_symmetric(ranks, rows, view):
    """Though they may begin behind the tensor's memory."""

    def main(world):
        found = view(pkt.empty(rows, 4))
        assert isinstance(found, pkt.SymmetricTensor)
        assert found.numel() or pkt.all_gather(found, mode="pull").numel() == 0

    ranks(2, main)


def test_results_with_storage_of_their_own_are_plain(ranks):
    def main(world):
        x, y = pkt.ones(4, 4), pkt.ones(4, 4)
        for result in (
            x + 1,
            x @ y,
            x.clone(),
            x.to(torch.bfloat16),
            x.T.contiguous(),
            torch.cat([x, y]),
            x.cpu()[0] + x[0],
            x.sum(),
        ):
            assert type(result) is torch.Tensor
        assert type(copy.deepcopy(x)) is torch.Tensor
        assert type(pickle.loads(pickle.dumps(x))) is torch.Tensor
        assert type(x.plain()) is torch.Tensor
        assert x.plain().data_ptr() == x.data_ptr()
        assert x.add_(1) is x
        out = torch.mul(x, 2, out=y)
        assert out is y
        assert y.peer(0)[0, 0] == 4
        values, indices = x.max(dim=0)
        assert type(values) is type(indices) is torch.Tensor
        assert "symmetric 'x' of rank 0: tensor(" in repr(x)

    ranks(1, main)


def test_names(ranks):
    def main(world):
        x = pkt.empty(3)
        typed: torch.Tensor = pkt.empty(3)
        several = pkt.empty(
            (3, 4),
            dtype=torch.int8,
        )
        named = pkt.empty(3, name="weights")

        class Holder:
            pass

        holder = Holder()
        holder.inbox = pkt.zeros(1)
        nameless = pkt.empty(3) if world.size else None
        listed = [pkt.empty(3)]
        same = x == pkt.empty(3)  # noqa: F841  the value of a comparison is not the tensor
        flags = pkt.signals(3)
        last = pkt.rand_like(x)
        a = b = pkt.empty(1)  # noqa: F841
        one, two = pkt.empty(1), pkt.empty(2)
        kept = [x, typed, several, named, holder.inbox, flags, last, b]
        return [t.symbol for t in kept], [one.symbol, two.symbol], [nameless.symbol, listed[0].symbol]

    (names, pair, nameless), *_ = ranks(1, main)
    assert names == ["x", "typed", "several", "weights", "inbox", "flags", "last", "a"]
    if sys.version_info >= (3, 11):  # older Pythons cannot tell the two calls on that line apart
        assert pair == ["one", "two"]
    assert all(name.startswith("empty@test_tensor.py:") for name in nameless)


def both(call, *args, seeded=False, **options):
    """(pkt's, torch's) result of the same call."""

    def generator():
        return {"generator": torch.Generator().manual_seed(5)} if seeded else {}

    return getattr(pkt, call)(*args, **options, **generator()), getattr(torch, call)(*args, **options, **generator())


def test_factories_equal_those_of_torch(ranks):
    x = torch.zeros(2, 3, dtype=torch.float16)
    calls = [
        ("zeros", (2, 3), {}),
        ("zeros", ((2, 3),), {"dtype": torch.int8}),
        ("ones", ([4],), {"dtype": torch.bfloat16}),
        ("full", ((2, 2), 7), {}),
        ("full", ((2,), 1.5), {"dtype": torch.bfloat16}),
        ("full", ((3,), True), {}),
        ("arange", (10,), {}),
        ("arange", (3, 3), {}),
        ("arange", (1, 2, 0.25), {}),
        ("arange", (5, 0, -2), {"dtype": torch.float32}),
        ("zeros_like", (x,), {}),
        ("ones_like", (x,), {"dtype": torch.int32}),
        ("full_like", (x, 3), {}),
        ("zeros", (0, 4), {}),
        ("zeros", ((),), {}),
        ("zeros", (3,), {"dtype": torch.float8_e4m3fn}),
        ("ones", (2,), {"dtype": torch.bool}),
        ("zeros", (5,), {"dtype": torch.complex64}),
    ]
    drawn = [
        ("rand", (3, 5), {}),
        ("rand", ((7,),), {"dtype": torch.bfloat16}),
        ("randn", (4, 4), {"dtype": torch.float16}),
        ("randn", (33,), {}),
        ("randint", (3, 9, (20,)), {}),
        ("randint", (9, (20,)), {"dtype": torch.int8}),
    ]

    def main(world):
        for seeded, some in ((False, calls), (True, drawn)):
            for call, args, options in some:
                ours, theirs = both(call, *args, seeded=seeded, **options)
                assert type(ours) is SymmetricTensor
                assert (ours.shape, ours.dtype, ours.stride()) == (
                    theirs.shape,
                    theirs.dtype,
                    theirs.stride(),
                ), (call, args)
                assert torch.equal(
                    ours.view(torch.uint8) if ours.dim() else ours,
                    theirs.view(torch.uint8) if theirs.dim() else theirs,
                )
        for like in ("empty_like", "rand_like", "randn_like"):
            assert getattr(pkt, like)(x.T).shape == (3, 2)
        assert pkt.randint_like(x, 2, 3).eq(2).all()
        assert pkt.empty(5).dtype == torch.get_default_dtype()
        torch.manual_seed(11)
        ours = pkt.randn(8)
        torch.manual_seed(11)
        assert torch.equal(ours, torch.randn(8))
        with torch.device("meta"):  # a default device changes nothing
            ours = pkt.arange(5)
        assert ours.tolist() == [0, 1, 2, 3, 4]

    ranks(1, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: pkt.empty(-1),
            ShapeError,
            "rank 0: empty: size: found (-1,), wanted integers that are not negative",
        ),
        (lambda: pkt.empty(2.5), ShapeError, "found (2.5,)"),
        (lambda: pkt.zeros((3, "4")), ShapeError, "found (3, '4')"),
        (
            lambda: pkt.empty(4, dtype="bfloat16"),
            DtypeError,
            "rank 0: empty: dtype: found str 'bfloat16', wanted a torch.dtype",
        ),
        (lambda: pkt.randint(5, 5, (3,)), ShapeError, "rank 0: randint: low and high: found (5, 5), wanted low < high"),
        (lambda: pkt.randint(5), ShapeError, "(low, high, size) or (high, size)"),
        (lambda: pkt.arange(0, 5, -1), ShapeError, "a step that leads from start to end"),
        (lambda: pkt.zeros(3, name=5), DtypeError, "rank 0: zeros: name: found int 5, wanted a string"),
        (lambda: pkt.signals(3, name=b"s"), DtypeError, "rank 0: signals: name: found bytes b's', wanted a string"),
        (lambda: pkt.zeros_like(5), DtypeError, "rank 0: zeros_like: x: found int 5, wanted a tensor"),
        (
            lambda: pkt.full(3, 300, dtype=torch.uint8),
            DtypeError,
            "rank 0: full: arguments: found ((3,), 300), wanted what torch.full takes (value cannot be converted",
        ),
        (lambda: pkt.full_like([5], 1), DtypeError, "rank 0: full_like: x: found list [5], wanted a tensor"),
        (lambda: pkt.Workspace(5), DtypeError, "pkt.Workspace: world: found int, wanted a pkt.World"),
        (lambda: pkt.signals(0), ShapeError, "rank 0: signals: n: found 0, wanted at least 1"),
        (lambda: pkt.signals(1, dtype=torch.float32), DtypeError, "rank 0: signals: dtype: found fp32"),
        (lambda: pkt.signals(-2), ShapeError, "not negative"),
        (lambda: pkt.empty(3).peer(2), RankError, "rank 0: empty"),
        (lambda: pkt.empty(3).peer(-1), RankError, "found rank -1, wanted an integer from 0 to 1"),
        (lambda: pkt.empty(3).peer("1"), RankError, "found rank '1'"),
    ],
)
def test_wrong_arguments_are_refused(ranks, call, error, message):
    def main(world):
        before = len(world.heap.live)
        with pytest.raises(error) as caught:
            call()
        assert message in str(caught.value) or world.rank
        assert len(world.heap.live) - before == (error is RankError)

    ranks(2, main)


def test_a_fill_that_torch_cannot_do_gives_the_memory_back(ranks):
    def main(world):
        with pytest.raises((RuntimeError, pkt.PktError)):
            pkt.rand(4, dtype=torch.float8_e5m2)
        return len(world.heap.live)

    assert ranks(2, main) == [0, 0]


def test_arguments_of_kernel_wrappers(ranks):
    def main(world):
        x = pkt.zeros(4)
        assert pkt.symmetric(x, "x", world, shape=(4,), dtype=torch.float32) is x
        assert pkt.symmetric(x[2:], "x", world).shape == (2,)
        for wrong, said in (
            (torch.zeros(4), r"a plain tensor \(4,\) float32 on cpu"),
            (x.peer(0), "a plain tensor"),
            (5, "int 5"),
        ):
            with pytest.raises(
                NotSymmetric,
                match=f"rank 0: gather: src must be a symmetric tensor of this world .* found {said}",
            ):
                pkt.symmetric(wrong, "src", world, call="gather")
        with pytest.raises(NotSymmetric, match="found a symmetric tensor of another world, 'x'"):
            pkt.symmetric(x, "x", SimpleNamespace(rank=0, lineage=()), call="gather")
        with pytest.raises(ShapeError, match=r"gather: x: found \(4,\), wanted \(5,\)"):
            pkt.symmetric(x, "x", world, shape=(5,), call="gather")
        with pytest.raises(DtypeError, match="gather: x: found fp32, wanted bfloat16"):
            pkt.symmetric(x, "x", world, dtype=torch.bfloat16, call="gather")

    ranks(1, main)


def test_a_result_of_another_shape_in_out_changes_the_facts(ranks):
    def main(world):
        x, empty = pkt.ones(4, 8), pkt.empty(0)
        before = facts([x], world, "test")[0][0]
        torch.add(torch.ones(2, 8), 1, out=x)
        torch.add(torch.ones(0), 1, out=empty)
        return before, facts([x], world, "test")[0][0], tuple(empty.peer(0).shape)

    assert ranks(2, main) == [((4, 8), (2, 8), (0,))] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.set_(torch.arange(3)),
        lambda x: setattr(x, "data", torch.arange(3)),
        lambda x: x.resize_(100),
    ],
)
def test_a_change_that_leads_out_of_the_allocation_is_refused_and_undone(ranks, change):
    def main(world):
        x = pkt.arange(6)
        with pytest.raises((NotSymmetric, RuntimeError)):
            change(x)
        return x.tolist(), x.peer(0).tolist()

    assert ranks(2, main) == [([0, 1, 2, 3, 4, 5],) * 2] * 2


@pytest.mark.timeout(60)
def test_a_function_of_autograd_may_write_to_one_with_a_history(ranks):
    """torch then resets its hooks under a lock, for which most functions on a view of it wait."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def main(world):
        leaf, x = torch.ones(3, requires_grad=True), pkt.empty(3)
        x.copy_(leaf)
        assert isinstance(Doubled.apply(x), pkt.SymmetricTensor)
        x.sum().backward()
        return x.tolist(), leaf.grad.tolist()

    assert ranks(2, main) == [([2.0] * 3,) * 2] * 2


def test_results_without_storage_are_plain(ranks):
    alone = threading.Lock()  # torch's levels of forward-mode derivatives belong to the process, not to a thread

    def main(world):
        x = pkt.ones(3)
        with alone:
            _, tangent = torch.func.jvp(lambda x: x * x, (x,), (torch.ones(3),))
        return x.to_sparse().sum().item(), tangent.tolist()

    assert ranks(2, main) == [(3.0, [2.0, 2.0, 2.0])] * 2
