"""pkt.nn's modules against the unsplit ones in fp64: results, gradients, state dicts, errors, compiled code."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import pkt
from pkt.kernels.all_gather_matmul import host

from .helpers import MLP, Attention, Block, drawn, gradients, near, on_ranks, part, whole_block


def split_block(world: Any, sequence_parallel: bool) -> Block:
    """`whole_block` on this rank, through its state dict."""
    attention = pkt.nn.Attention(16, 8, 4, bias=True, sequence_parallel=sequence_parallel)
    block = Block(attention, pkt.nn.SwiGLUMLP(16, 24, bias=True, sequence_parallel=sequence_parallel))
    if sequence_parallel:
        pkt.nn.sequence_parallel(block.before)
        pkt.nn.sequence_parallel(block.between, world=world)
    block.load_state_dict(whole_block().state_dict())
    return block


def by_keys(module: nn.Module, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by the keys of the state dict, where modules keep several weights in one parameter."""
    for prefix, one in module.named_modules():
        for name, parts in getattr(one, "parts", {}).items():
            grad = found.pop(f"{prefix}.{name}".lstrip("."))
            found |= {f"{prefix}.{p.key}".lstrip("."): g for p, g in zip(parts, one.separate(name, grad))}
    return found


def compare(world: Any, module: nn.Module, whole: nn.Module, x: torch.Tensor, given: int | None, got: Any) -> None:
    """Results and gradients of a split module. given, got: dimensions of x and of the result of which ranks have parts;
    None: every rank has all."""
    exact = copy.deepcopy(whole).double()
    scale = drawn(*exact(x.double()).shape, seed=9)
    wanted = gradients(exact, x.double(), scale.double())
    mine = [x if given is None else x.chunk(world.size, given)[world.rank]]
    mine += [scale if got is None else scale.chunk(world.size, got)[world.rank]]
    found = by_keys(module, gradients(module, *mine))
    assert found.keys() == wanted.keys()
    least = 0.01 * max(value.abs().max() for name, value in wanted.items() if name != "result").item()
    for name, value in found.items():
        dim = {"result": got, "x": given}.get(name)
        of_rank = wanted[name] if dim is None else wanted[name].chunk(world.size, dim)[world.rank]
        exactly = of_rank if name in ("result", "x") else part(of_rank, value, world)
        near(value, exactly, name, least if name != "result" else 0.0)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block(ranks: int, sequence_parallel: bool) -> None:
    def run(world: Any) -> None:
        dim = 1 if sequence_parallel else None
        compare(world, split_block(world, sequence_parallel), whole_block(), drawn(2, 8, 16), dim, dim)

    on_ranks(ranks, run)


def test_linears_in_every_layout() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(1)
        whole, x = nn.Linear(8, 12), drawn(4, 2, 8)
        for bias in (True, False):
            one = whole if bias else nn.Linear(8, 12, bias=False)
            for dim in (0, 1, -2, None):
                column = pkt.nn.ColumnParallelLinear.of(one, sequence_dim=dim)
                compare(world, column, one, x, dim, -1)
                column.gather_output = True
                compare(world, column, one, x, dim, None)
                compare(world, pkt.nn.RowParallelLinear.of(one, sequence_dim=dim), one, x, -1, dim)

    on_ranks(2, run)


def test_an_empty_batch_of_split_tokens() -> None:
    def run(world: Any) -> None:
        x = torch.empty(0, 4, 8, requires_grad=True)
        column = pkt.nn.ColumnParallelLinear(8, 12, sequence_dim=1)
        row = pkt.nn.RowParallelLinear(12, 8, sequence_dim=1)
        result = row(column(x))
        assert result.shape == x.shape
        result.sum().backward()
        assert not column.weight.grad.any()
        assert not row.bias.grad.any()

    on_ranks(2, run)


def test_gathered_inputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keep="whole" the backward pass gathers none of them, and finds the same gradients."""
    monkeypatch.setattr(host, "all_gather", None)

    def run(world: Any) -> None:
        block = split_block(world, True)
        block.attention.keep = block.mlp.keep = "whole"
        compare(world, block, whole_block(), drawn(2, 8, 16), 1, 1)
        torch.manual_seed(1)
        whole, x = nn.Linear(8, 12), drawn(4, 2, 8)
        compare(world, pkt.nn.ColumnParallelLinear.of(whole, sequence_dim=0, keep="whole"), whole, x, 0, -1)
        two = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        gather = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        products = {"0.0": ColwiseParallel(), "0.1": RowwiseParallel(output_layouts=Shard(0))}
        plan = {"0": gather, **products}
        split = pkt.parallelize(nn.Sequential(copy.deepcopy(two)), world, plan, keep="whole")
        compare(world, split, nn.Sequential(two), x, 0, 0)
        with pytest.raises(pkt.Unsupported, match="pkt.parallelize: found keep='all': use"):
            pkt.parallelize(nn.Sequential(two), world, plan, keep="all")  # type: ignore[arg-type]
        with pytest.raises(pkt.PktError, match="found keep 'all': wanted 'shard' or 'whole'"):
            pkt.nn.ColumnParallelLinear.of(whole, sequence_dim=0, keep="all")(x)  # type: ignore[arg-type]

    on_ranks(2, run)


@pytest.mark.parametrize("dim", [None, 1])
def test_gradients_of_gradients(dim: int | None) -> None:
    """Of a penalty on the gradients of all parameters, those that every rank has and those that the ranks share."""

    def run(world: Any) -> None:
        torch.manual_seed(1)
        tokens = torch.tensor([[0, 9, 4, 5], [5, 1, 9, 2]])
        whole = nn.Sequential(nn.Embedding(10, 8), nn.RMSNorm(8, eps=0.1), nn.Linear(8, 6), nn.Tanh(), MLP(6, 12))
        mlp = pkt.nn.SwiGLUMLP(6, 12, bias=True, sequence_parallel=dim is not None)
        column = pkt.nn.ColumnParallelLinear(8, 6, gather_output=True)
        embedding = pkt.nn.VocabParallelEmbedding(10, 8, sequence_dim=dim)
        split = nn.Sequential(embedding, copy.deepcopy(whole[1]), column, nn.Tanh(), mlp)
        if dim is not None:
            pkt.nn.sequence_parallel(split[1])
            split[2] = pkt.nn.sequence_parallel(nn.Linear(8, 6))
        split.load_state_dict(whole.state_dict())
        found, wanted = (by_keys(one, _penalised(one, tokens)) for one in (split, whole.double()))
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            near(value, part(wanted[name], value, world), name)

    on_ranks(2, run)


def _penalised(module: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter, the gradient of the sum of the squares of all parameters' gradients."""
    leaves = dict(module.named_parameters())
    first = torch.autograd.grad(module(tokens).sin().sum(), list(leaves.values()), create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in first]).sum()
    return dict(zip(leaves, torch.autograd.grad(penalty, list(leaves.values()), materialize_grads=True)))


def test_two_dimensions_and_one_rank() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(1)
        attention, whole = pkt.nn.Attention(16, 4, 2, sequence_parallel=True), Attention(16, 4, 2)
        whole.load_state_dict(pkt.nn.full_state_dict(attention))
        x = drawn(6, 16)
        mine = x.chunk(world.size)[world.rank]
        near(attention(mine), whole.double()(x[None].double())[0].chunk(world.size)[world.rank])

    for ranks in (1, 2):
        on_ranks(ranks, run)


def test_an_embedding() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(1)
        whole, tokens = nn.Embedding(10, 6), torch.tensor([[0, 9, 4, 5], [5, 1, 9, 2]])
        for dim in (None, 1):
            split = pkt.nn.VocabParallelEmbedding.of(whole, sequence_dim=dim)
            exact, scale = whole(tokens), drawn(2, 4, 6)
            wanted = torch.autograd.grad((exact * scale).square().sum(), whole.weight)[0]
            mine = (lambda x: x) if dim is None else lambda x: x.chunk(world.size, 1)[world.rank]
            found = split(tokens)
            assert torch.equal(found, mine(exact))
            near(
                torch.autograd.grad((found * mine(scale)).square().sum(), split.weight)[0],
                part(wanted, split.weight, world),
            )

    on_ranks(2, run)


def test_an_infinite_row_of_an_embedding_is_its_tokens_own() -> None:
    def run(world: Any) -> None:
        whole, tokens = nn.Embedding(8, 2), torch.tensor([0, 3, 4, 7])
        with torch.no_grad():
            whole.weight.copy_(drawn(8, 2))
            whole.weight[::4] = torch.tensor([math.inf, math.nan])  # the first row of each rank
        for dim in (None, 0):
            found = pkt.nn.VocabParallelEmbedding.of(whole, sequence_dim=dim)(tokens[:, None])
            exact = whole(tokens[:, None]) if dim is None else whole(tokens[:, None]).chunk(world.size)[world.rank]
            torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)

    on_ranks(2, run)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_hooks_of_inner_linears_run(sequence_parallel: bool) -> None:
    def run(world: Any) -> None:
        block, seen = split_block(world, sequence_parallel), []
        for inner in (block.attention.o_proj, block.mlp.down_proj):
            inner.register_forward_hook(lambda module, inputs, y: seen.append((module, y)))
        block(drawn(2, 4, 16))
        assert [module for module, _ in seen] == [block.attention.o_proj, block.mlp.down_proj]
        block.mlp.down_proj.register_forward_hook(lambda module, inputs, y: 0 * y)
        assert not block.mlp(drawn(2, 4, 16)).any()

    on_ranks(2, run)


def test_rotation_and_a_cache_are_the_callers() -> None:
    def run(world: Any) -> None:
        attention = pkt.nn.Attention(16, 4, 2)
        seen: list[Any] = []

        def rotate(q: torch.Tensor, k: torch.Tensor) -> Any:
            seen.append((tuple(q.shape), tuple(k.shape)))
            return q * 0, k

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append((tuple(q.shape), tuple(v.shape), q.abs().max().item()))
            return q

        assert attention(drawn(3, 5, 16), rotate, attend).abs().max() == 0
        assert seen == [((3, 5, 2, 4), (3, 5, 1, 4)), ((3, 2, 5, 4), (3, 1, 5, 4), 0.0)]

    on_ranks(2, run)


def test_autocast() -> None:
    def run(world: Any) -> None:
        torch.manual_seed(1)
        whole, x, dtypes = MLP(16, 24), drawn(4, 16), set()
        exact = whole(x).detach()
        gathers = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        for split in (True, False):
            mlp = pkt.nn.SwiGLUMLP(16, 24, bias=True, sequence_parallel=split)
            mlp.load_state_dict(whole.state_dict())
            rows = RowwiseParallel(output_layouts=Shard(0) if split else Replicate())
            plan = {"0.[gu]*": ColwiseParallel(), "0.down_proj": rows}
            planned = nn.Sequential(copy.deepcopy(whole))
            pkt.parallelize(planned, world, {**plan, "0": gathers} if split else plan)
            for module in (mlp, planned):
                with torch.autocast("cpu", torch.bfloat16):
                    found = module(x.chunk(2)[world.rank] if split else x)
                found.sum().backward()
                dtypes.add(found.dtype)
                error = found.float() - (exact.chunk(2)[world.rank] if split else exact)
                assert error.abs().max() <= 2**-6 * exact.abs().max()
        assert dtypes == {torch.bfloat16}
        assert mlp.gate_up_weight.grad.dtype == torch.float32

    on_ranks(2, run)


# ---------------------------------------------------------------------------------------------------------- state dicts
def test_state_dicts_of_whole_weights_and_of_parts() -> None:
    def run(world: Any) -> None:
        whole, block = whole_block(), split_block(world, True)
        back = pkt.nn.full_state_dict(block)
        assert list(back) == list(block.state_dict())
        assert back.keys() == whole.state_dict().keys()
        assert all(torch.equal(back[key], tensor) for key, tensor in whole.state_dict().items())
        parts = {key: tensor.clone() for key, tensor in block.state_dict().items()}
        for assign in (False, True):
            other = Block(pkt.nn.Attention(16, 8, 4, bias=True), pkt.nn.SwiGLUMLP(16, 24, bias=True))
            for given in (parts, back):
                assert str(other.load_state_dict(given, assign=assign)) == "<All keys matched successfully>"
                for key, tensor in other.state_dict().items():
                    assert torch.equal(tensor, parts[key])
        assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in other.parameters())

    on_ranks(2, run)


def test_assigned_parts_keep_no_whole_tensor() -> None:
    def run(world: Any) -> None:
        for module in (
            pkt.nn.ColumnParallelLinear(8, 12, device="meta"),
            pkt.nn.VocabParallelEmbedding(12, 8, device="meta"),
        ):
            whole = {"weight": drawn(12, 8), "bias": drawn(12)}
            module.load_state_dict({key: whole[key] for key in module.state_dict()}, assign=True)
            for key, tensor in module.state_dict().items():
                assert torch.equal(tensor, whole[key].chunk(world.size)[world.rank])
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        module.load_state_dict(parts := {"weight": drawn(6, 8)}, assign=True)
        assert module.weight.data_ptr() == parts["weight"].data_ptr()  # as torch does

    on_ranks(2, run)


def test_keys_that_are_missing_or_wrong() -> None:
    def run(world: Any) -> None:
        mlp, state = pkt.nn.SwiGLUMLP(16, 24, names=("w1", "w3", "w2")), {}
        assert list(mlp.state_dict()) == ["w1.weight", "w3.weight", "w2.weight"]
        state = pkt.nn.full_state_dict(mlp)
        up = state.pop("w3.weight")
        with pytest.raises(RuntimeError, match=r'Missing key.*"w3.weight"\. $') as raised:
            mlp.load_state_dict(state)
        assert "gate_up" not in str(raised.value)
        kept = mlp.gate_up_weight.clone()
        assert mlp.load_state_dict(state, strict=False).missing_keys == ["w3.weight"]
        assert torch.equal(mlp.gate_up_weight, kept)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"w4.weight"'):
            mlp.load_state_dict({**state, "w3.weight": up, "w4.weight": up})
        with pytest.raises(RuntimeError, match=r"size mismatch for w2.weight.*\(?\[16, 20\]"):
            mlp.load_state_dict({**state, "w3.weight": up, "w2.weight": torch.ones(16, 20)})
        for shape in ((7, 16), (12, 15), (7,), ()):
            wanted = rf"size mismatch for w3.weight: .* \[{', '.join(map(str, shape))}\] .* \[12, 16\]"
            with pytest.raises(RuntimeError, match=wanted):
                mlp.load_state_dict({**state, "w3.weight": torch.ones(shape)}, strict=False)
            assert torch.equal(mlp.gate_up_weight, kept)

    on_ranks(2, run)


def test_one_seed_makes_one_model_on_any_number_of_ranks() -> None:
    def run(world: Any) -> dict[str, Any]:
        torch.manual_seed(4)
        mlp = pkt.nn.SwiGLUMLP(8, 12, bias=True)
        return {key: tensor.tolist() for key, tensor in pkt.nn.full_state_dict(mlp).items()}

    torch.manual_seed(4)
    whole = {key: tensor.tolist() for key, tensor in MLP(8, 12).state_dict().items()}
    assert on_ranks(1, run)[0] == on_ranks(2, run)[1] == whole


def test_copies_and_meta() -> None:
    def run(world: Any) -> None:
        block = split_block(world, True)
        other = copy.deepcopy(block)
        assert other.mlp.world is world
        assert other.before.world is world
        assert other.mlp.gate_up_weight is not block.mlp.gate_up_weight
        x = drawn(2, 4, 16)
        assert torch.equal(other(x), block(x))
        empty = pkt.nn.SwiGLUMLP(16, 24, bias=True, device="meta", dtype=torch.bfloat16)
        assert empty.gate_up_weight.is_meta
        empty.to_empty(device="cpu").load_state_dict(block.mlp.state_dict())
        assert torch.equal(empty.down_proj.weight, block.mlp.down_proj.weight.bfloat16())

    on_ranks(2, run)


def test_a_world_is_not_copied_and_not_pickled() -> None:
    def run(world: Any) -> None:
        own = nn.Module()  # one that holds a world, as a user's may
        own.world = world
        assert copy.deepcopy(own).world is world
        norm = pkt.nn.sequence_parallel(nn.RMSNorm(8))
        same = copy.deepcopy(norm)
        assert type(same) is type(norm)
        assert same.world is world
        assert torch.equal(same(torch.ones(2, 8)), norm(torch.ones(2, 8)))
        for module in (own, pkt.nn.SwiGLUMLP(16, 24), norm):
            with pytest.raises(pkt.Unsupported, match=rf"rank {world.rank}: pickle: found World.*state_dict"):
                torch.save(module, io.BytesIO())

    on_ranks(2, run)


# --------------------------------------------------------------------------------------------------------------- errors
def test_weights_that_are_computed_are_refused() -> None:
    def run(world: Any) -> None:
        planned = pkt.parallelize(nn.Sequential(nn.Linear(8, 6)), world, {"0": ColwiseParallel()})
        norms = [pkt.nn.sequence_parallel(kind(8)) for kind in (nn.RMSNorm, nn.LayerNorm, nn.BatchNorm1d)]
        for module in (pkt.nn.RowParallelLinear(16, 6), planned[0], *norms):  # type: ignore[index]
            parametrize.register_parametrization(module, "weight", nn.Identity())
            with pytest.raises(pkt.Unsupported, match="found no parameter 'weight': a parametrization or pruning"):
                module(drawn(2, 8))

    on_ranks(2, run)


def test_wrong_arguments() -> None:
    def run(world: Any) -> None:
        def refused(match: str, call: Any) -> None:
            before = world.heap.ledger.free_bytes
            with pytest.raises(pkt.ShapeError, match=rf"rank {world.rank}: {match}"):
                call()
            assert world.heap.ledger.free_bytes == before

        nn_ = pkt.nn
        refused(
            "pkt.nn.ColumnParallelLinear: out_features: found 7, wanted a multiple of 2",
            lambda: nn_.ColumnParallelLinear(8, 7),
        )
        refused(
            "pkt.nn.RowParallelLinear: in_features: found 7, wanted a multiple", lambda: nn_.RowParallelLinear(7, 8)
        )
        refused("pkt.nn.VocabParallelEmbedding: num_embeddings: found 5", lambda: nn_.VocabParallelEmbedding(5, 8))
        refused("pkt.nn.SwiGLUMLP: hidden: found 9", lambda: nn_.SwiGLUMLP(8, 9))
        refused("pkt.nn.Attention: features: found 33 for 4 heads, wanted a multiple", lambda: nn_.Attention(33, 4))
        refused("pkt.nn.Attention: kv_heads: found 1, wanted a multiple of 2", lambda: nn_.Attention(8, 4, 1))
        refused(
            "pkt.nn.Attention: heads and kv_heads: found 4 and 3, wanted a multiple", lambda: nn_.Attention(8, 4, 3)
        )
        column, row = nn_.ColumnParallelLinear(8, 6, sequence_dim=0), nn_.RowParallelLinear(8, 6, sequence_dim=1)
        refused(r"pkt.nn.ColumnParallelLinear: x: found \(4, 9\), wanted \(..., 8\)", lambda: column(drawn(4, 9)))
        refused(r"pkt.nn.RowParallelLinear: x: found \(4, 8\), wanted \(..., 4\)", lambda: row(drawn(4, 8)))
        refused(r"pkt.nn.RowParallelLinear: x: found x \(4, 4\) and sequence dimension 1", lambda: row(drawn(4, 4)))
        refused(
            r"pkt.nn.RowParallelLinear: x: found x \(2, 3, 4\), wanted a multiple of 2 in dimension 1",
            lambda: row(drawn(2, 3, 4)),
        )
        refused(r"pkt.nn.SwiGLUMLP: x: found \(8,\)", lambda: nn_.SwiGLUMLP(8, 4)(drawn(8)))
        refused(r"pkt.nn.Attention: x: found \(1, 1, 2, 8\)", lambda: nn_.Attention(8, 4)(drawn(1, 1, 2, 8)))
        with pytest.raises(
            pkt.Unsupported, match="pkt.nn.sequence_parallel: found Block, inside which.*the norms inside"
        ):
            nn_.sequence_parallel(whole_block())
        refused("pkt.nn.Attention: heads and kv_heads: found 0 and 0, wanted.* at least 1", lambda: nn_.Attention(8, 0))
        refused("pkt.nn.Attention: heads and kv_heads: found -4 and 2", lambda: nn_.Attention(8, -4, 2))

    on_ranks(2, run)


def test_transforms_of_torch_func() -> None:
    def run(world: Any) -> None:
        tokens, planned = torch.zeros(2, 3, dtype=torch.int64), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        pkt.parallelize(planned, world, {"?": ColwiseParallel()})
        embedding, norm = pkt.nn.VocabParallelEmbedding(8, 8), pkt.nn.sequence_parallel(nn.RMSNorm(8))
        modules = [planned[0], pkt.nn.RowParallelLinear(16, 8), pkt.nn.SwiGLUMLP(8, 4), norm, pkt.nn.MoE(8, 4, 2, 1)]
        for module, x in [(embedding, tokens), *[(module, drawn(2, 2, 8)) for module in modules]]:
            match = rf"rank {world.rank}: pkt.nn.*: found a transform of torch.func.*use loss.backward\(\)"
            with pytest.raises(pkt.Unsupported, match=match):
                torch.vmap(module)(x)
            differentiated = torch.func.grad(lambda p, m=module, x=x: torch.func.functional_call(m, p, x).sum())
            with pytest.raises(pkt.Unsupported, match=match):
                differentiated(dict(module.named_parameters()))

    on_ranks(2, run)


def test_wrong_types() -> None:
    def run(world: Any) -> None:
        def refused(match: str, call: Any, error: Any = pkt.DtypeError) -> None:
            with pytest.raises(error, match=rf"rank {world.rank}: pkt.nn.{match}"):
                call()

        nn_, given = pkt.nn, {"world": 3}
        for tokens, found in ((drawn(4), "fp32"), (drawn(4).to(torch.uint8), "uint8"), ([1], "list")):
            wanted = f"VocabParallelEmbedding: tokens: found {found}, wanted integers of 32 or 64 bits"
            refused(wanted, lambda tokens=tokens: nn_.VocabParallelEmbedding(4, 8)(tokens))
        for make in (nn_.ColumnParallelLinear, nn_.RowParallelLinear, nn_.SwiGLUMLP, nn_.Attention):
            refused(f"{make.__name__}: world: found int, wanted a pkt.World", lambda make=make: make(8, 8, **given))
        refused("MoE: world: found int", lambda: nn_.MoE(8, 8, 4, 1, **given))
        refused("sequence_parallel: world: found int", lambda: nn_.sequence_parallel(nn.RMSNorm(8), **given))
        column: Any = nn_.ColumnParallelLinear(8, 6, sequence_dim=0)
        refused("ColumnParallelLinear: x: found NoneType, wanted a tensor", lambda: column(None))
        refused(
            "ColumnParallelLinear: x: found a tensor on meta, wanted one on cpu", lambda: column(drawn(2, 8).to("meta"))
        )
        column.sequence_dim = "0"
        refused("ColumnParallelLinear: sequence_dim: found str '0', wanted an integer", lambda: column(drawn(2, 8)))
        for names in (("w1", "w2"), "gud"):
            refused(
                "SwiGLUMLP: found names=.*: give 3 names",
                lambda names=names: nn_.SwiGLUMLP(8, 4, names=names),
                pkt.Unsupported,
            )
            refused(
                "Attention: found names=.*: give 4 names",
                lambda names=names: nn_.Attention(8, 4, names=names),
                pkt.Unsupported,
            )

    on_ranks(2, run)


def test_a_module_needs_a_world() -> None:
    with pytest.raises(pkt.Unsupported, match="pkt.nn.SwiGLUMLP: there is no world"):
        pkt.nn.SwiGLUMLP(8, 4)


# ------------------------------------------------------------------------------------------------------------- compiled
def test_layers_share_compiled_code() -> None:
    def run(world: Any) -> None:
        layers = [pkt.nn.sequence_parallel(nn.RMSNorm(16)) for _ in range(3)]
        assert len({type(layer) for layer in layers}) == 1  # torch guards the class
        assert type(pkt.nn.sequence_parallel(nn.LayerNorm(16))) is not type(layers[0])

    on_ranks(2, run)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_block_is_one_graph(checkpoints: bool) -> None:
    def run(world: Any) -> None:
        both = Block(split_block(world, True).attention, split_block(world, False).mlp)  # an operator of each kind
        pkt.nn.sequence_parallel(both.before)
        if checkpoints:
            inner = both.forward
            both.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        wanted = gradients(both, x := drawn(2, 4, 16), torch.ones(2, 4, 16))
        torch._dynamo.reset()
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        found = gradients(compiled, x, torch.ones(2, 4, 16))
        for one, other in zip(found.values(), wanted.values(), strict=True):
            near(one, other.double(), least=0.1)

    on_ranks(2, run)


@pytest.mark.parametrize("dim", [None, 0])
def test_ranks_share_the_graph_of_an_embedding(dim: int | None) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def run(world: Any) -> None:
        embedding, tokens = pkt.nn.VocabParallelEmbedding(8, 4, sequence_dim=dim), torch.tensor([1, 5, 7, 0, 2, 3])
        found = torch.compile(embedding, backend=counter, fullgraph=True)(tokens)
        assert torch.equal(found, embedding(tokens))

    torch._dynamo.reset()
    on_ranks(2, run)
    assert counter.frame_count == 1
