"""Torch's ParallelStyle classes on pkt's operators. Only `parallelize` imports this: it loads torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.nn.utils.parametrize import is_parametrized

from . import experts_style
from .embedding import VocabParallelEmbedding
from .expert_parallel import ExpertParallel
from .gathering import Gather, Ungathered
from .linear import ColumnParallelLinear, RowParallelLinear, check_features
from .norm import SequenceParallel, has_inner_parameters, sequence_parallel
from .place import Place
from .sharded import HOOKS, Sharded
from .siblings import Siblings, group

LAST = Shard(-1)


class PlannedColumn(ColumnParallelLinear):
    """ColwiseParallel on a Linear."""

    place: Place
    style: Any
    siblings: Siblings
    gathers = False
    """Whether it is expected to gather the input of the module around it."""

    @property
    def runs(self) -> str:
        return "all_gather_matmul" if self.gathers else super().runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = x
        dim = self.sequence_dim
        if isinstance(x, Ungathered):
            given = x.source
            x, dim = given.shard, given.dim
        elif isinstance(x, DTensor):
            x, layout = self.place.mine(x, "input")
            dim = self.place.tokens(layout, "an input of layout")
        check_features("pkt.nn.ColumnParallelLinear", x, self.in_features, self.world)
        y = self.finished(self.siblings.product(self, given, x, dim))
        return self.place.given(y, self.style.output_layouts[0], self.style.use_local_output)


class PlannedRow(RowParallelLinear):
    """RowwiseParallel on a Linear."""

    place: Place
    style: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            last = x.ndim - 1
            x, layout = self.place.mine(x, "input")
            if layout not in (LAST, Shard(last)):
                raise self.place.refused(f"an input of layout {layout!r}", "give Shard(-1), as ColwiseParallel returns")
        y = super().forward(x)
        return self.place.given(y, self.style.output_layouts[0], self.style.use_local_output)


class PlannedEmbedding(VocabParallelEmbedding):
    """RowwiseParallel on an Embedding."""

    place: Place
    style: Any

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(tokens, DTensor):
            tokens, layout = self.place.mine(tokens, "input")
            if layout != Replicate():
                raise self.place.refused(f"tokens of layout {layout!r}", "give Replicate()")
        y = super().forward(tokens)
        return self.place.given(y, self.style.output_layouts[0], self.style.use_local_output)


class Prepared:
    """PrepareModuleInput on a module: a hook before its forward pass."""

    def __init__(self, style: Any, place: Place) -> None:
        self.place = place
        self.positional = self._layouts(style.input_layouts or (), style.desired_input_layouts or ())
        given, wanted = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        self.named = dict(zip(given, self._layouts(tuple(given.values()), tuple(wanted.get(n) for n in given))))

    def _layouts(self, given: Sequence[Any], wanted: Sequence[Any]) -> list[tuple[Any, bool] | None]:
        """By input: its layout and whether it is gathered; None for one that is passed on."""
        found: list[tuple[Any, bool] | None] = []
        for layout, to in zip(given, wanted):
            if layout is None:
                found.append(None)
            elif to is None or layout == to:
                found.append((layout, False))
            elif to == Replicate():
                self.place.tokens(layout, "an input of layout")
                found.append((layout, True))
            else:
                remedy = "use Shard(dim) to Replicate(), or the same layout twice"
                raise self.place.refused(f"PrepareModuleInput from {layout!r} to {to!r}", remedy)
        return found

    def apply(self, module: nn.Module) -> nn.Module:
        """Make the change."""
        for child in module.children():
            if isinstance(child, PlannedColumn):
                child.gathers = True
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        return module

    def before(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.positional and len(inputs) != len(self.positional):
            found = f"{len(inputs)} inputs, and layouts of {len(self.positional)} in PrepareModuleInput"
            raise self.place.refused(found, "give one layout, or None, for each positional input")
        layouts = self.positional or [None] * len(inputs)
        changed = tuple(self._prepared(x, layout) for x, layout in zip(inputs, layouts))
        return changed, {name: self._prepared(x, self.named.get(name)) for name, x in named.items()}

    def _prepared(self, x: Any, planned: tuple[Any, bool] | None) -> Any:
        if planned is None or not isinstance(x, torch.Tensor):
            return x
        layout, gather = planned
        if isinstance(x, DTensor):
            x, layout = self.place.mine(x, "input")
            gather = gather and layout != Replicate()
        if not gather:
            return x
        dim = self.place.tokens(layout, "an input of layout")
        assert dim is not None
        return Gather(self.place.name, x, dim, self.place.world).tensor()


PRODUCTS = (torchs.ColwiseParallel, torchs.RowwiseParallel, ExpertParallel)
INPUTS = torchs.PrepareModuleInput


def change(style: Any, module: nn.Module, place: Place) -> Callable[[], nn.Module]:
    """Check that a style fits a module, and return the function that makes the change. That returns what takes the
    module's place: a module of pkt or the module itself. Raises Unsupported, ShapeError, DtypeError."""
    if isinstance(style, torchs.ColwiseParallel):
        return _column(style, module, place)
    if isinstance(style, torchs.RowwiseParallel):
        return _row(style, module, place)
    if isinstance(style, torchs.SequenceParallel):
        return _sequence(style, module, place)
    if isinstance(style, INPUTS):
        prepared = Prepared(style, place)
        return lambda: prepared.apply(module)
    if isinstance(style, ExpertParallel):
        return experts_style.change(style, module, place)
    if isinstance(style, type):
        raise place.refused(f"the class {style.__name__} as a style", f"make one: {style.__name__}()")
    names = "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput or pkt.nn.ExpertParallel"
    raise place.refused(f"style {type(style).__name__}", f"use {names}")


def join(module: nn.Module) -> None:
    """Make siblings of the planned Linears that stand side by side in a module. Those of an earlier plan stay."""
    for parent in module.modules():
        group(c for c in parent.children() if isinstance(c, PlannedColumn) and "siblings" not in vars(c))
    if isinstance(module, PlannedColumn):
        group([module])


def _check_plain(module: nn.Module, kind: type[nn.Module], place: Place) -> None:
    """Raise Unsupported where a module of pkt would not do what this one does."""
    if isinstance(module, Sharded):
        raise place.refused(f"{type(module).__name__}, which is parallel already", "plan each module once")
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        found = f"{type(module).__name__}, which is no plain {kind.__name__}"
        raise place.refused(found, "plan Linears and Embeddings of torch.nn; for others use torch's parallelize_module")
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise place.refused("a module with hooks", "add hooks after pkt.parallelize, to the module that it makes")
    if is_parametrized(module):
        found = f"{kind.__name__} with a parametrization, as weight_norm makes"
        raise place.refused(
            found, "use torch.nn.utils.parametrize.remove_parametrizations first, or leave it out of the plan"
        )


def _column(style: Any, module: nn.Module, place: Place) -> Callable[[], nn.Module]:
    if isinstance(module, nn.Embedding):
        raise place.refused("ColwiseParallel on an Embedding", "use RowwiseParallel, which splits the vocabulary")
    _check_plain(module, nn.Linear, place)
    given, returned = style.input_layouts[0], style.output_layouts[0]
    if returned not in (LAST, Replicate()):
        raise place.refused(f"ColwiseParallel to {returned!r}", "use Shard(-1) or Replicate()")
    dim, whole = place.tokens(given, "ColwiseParallel from"), returned == Replicate()
    place.check_parameters(module, 0)
    linear: Any = module
    return lambda: _placed(
        PlannedColumn.of(linear, sequence_dim=dim, gather_output=whole, keep=place.keep, world=place.world),
        style,
        place,
    )


def _row(style: Any, module: nn.Module, place: Place) -> Callable[[], nn.Module]:
    embedding, whole = isinstance(module, nn.Embedding), cast(Any, module)
    _check_plain(module, nn.Embedding if embedding else nn.Linear, place)
    given, wanted = style.input_layouts[0], Replicate() if embedding else LAST
    if given != wanted:
        raise place.refused(f"RowwiseParallel from {given!r}", f"use input_layouts={wanted!r}")
    dim = place.tokens(style.output_layouts[0], "RowwiseParallel to")
    place.check_parameters(module, 0 if embedding else 1)
    if not embedding:
        return lambda: _placed(PlannedRow.of(whole, sequence_dim=dim, world=place.world), style, place)
    for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(whole, option) is not None and getattr(whole, option) is not False:
            raise place.refused(f"an Embedding with {option}", "make it without, or leave it out of the plan")
    return lambda: _placed(PlannedEmbedding.of(whole, sequence_dim=dim, world=place.world), style, place)


def _placed(made: Any, style: Any, place: Place) -> Any:
    made.place, made.style = place, style
    place.distribute(made)
    return made


def _sequence(style: Any, module: nn.Module, place: Place) -> Callable[[], nn.Module]:
    layout: Placement = style.sequence_sharding[0]
    place.tokens(layout, "SequenceParallel of")
    if has_inner_parameters(module):
        found = f"SequenceParallel on {type(module).__name__}, inside which modules have parameters of their own"
        raise place.refused(found, "plan the norms inside it")
    if isinstance(module, (Sharded, SequenceParallel)):
        raise place.refused(f"{type(module).__name__}, which is parallel already", "plan each module once")
    place.check_parameters(module, None)
    return lambda: _norm(style, module, place, layout)


def _norm(style: Any, module: nn.Module, place: Place, layout: Placement) -> nn.Module:
    sequence_parallel(module, world=place.world)
    if place.mesh is None:
        return module
    place.replicate(module)

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        x, *rest = inputs
        if not isinstance(x, DTensor):
            return None
        x, found = place.mine(x, "input")
        if found != layout:
            raise place.refused(f"an input of layout {found!r}", f"give {layout!r}")
        return x, *rest

    module.register_forward_pre_hook(before)
    if not style.use_local_output:
        module.register_forward_hook(lambda module, inputs, y: place.given(y, layout, False))
    return module
