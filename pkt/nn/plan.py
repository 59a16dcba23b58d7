"""`pkt.parallelize`: torch's parallel plans on pkt's operators."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, Union

import torch
from torch import nn

from pkt import launcher
from pkt.errors import DtypeError, Unsupported
from pkt.kernels.broadcast import broadcast
from pkt.runtime import world as worlds
from pkt.runtime.world import World, check_rank, current_world

from .expert_parallel import ExpertParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

CALL = "pkt.parallelize"
PIECE = 1 << 22
"""Elements of a weight that are broadcast at a time."""


Style = Union["ParallelStyle", ExpertParallel]


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh | World | None,
    plan: Style | Mapping[str, Style],
    *,
    src_data_rank: int | None = 0,
    keep: Literal["shard", "whole"] = "shard",
) -> nn.Module:
    """`module`, changed as torch's parallelize_module would change it, on pkt's operators. Collective.

    mesh: a DeviceMesh of one dimension, or of several with one that is named "tp". Its ranks make a world, or use the
    one that they made before. Parameters become DTensors, as torch's. Or a pkt.World, which may be a team: parameters
    are then plain tensors, and every module takes and returns plain tensors, whatever `use_local_output` says. None:
    the current world. In the simulator there is no process group, so no mesh.
    plan: a style for the module, or styles by the names of modules in it, in which * stands for anything between dots.
    Styles of torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput;
    and `pkt.nn.ExpertParallel`.
    src_data_rank: whose parameters are split; the others' are ignored. None: each rank splits its own.
    keep: what a ColwiseParallel Linear keeps of an input that it gathers, as `pkt.nn.ColumnParallelLinear`. "whole"
    takes the ranks' number times the memory, and saves a gather in the backward pass.

    ColwiseParallel Linears that stand side by side in a module and take one input, as q, k and v, compute one product:
    their weights lie below each other in memory, and each parameter is a view of its rows. See pkt/nn/siblings.py.

    Every rank has the whole module, on its device or on "meta". Planned Linears, Embeddings and experts are replaced by
    modules of pkt.nn, with new parameters; others stay. A name that matches no module is a warning, as torch's. Returns
    the module, or what takes its place if the plan is one style. Raises Unsupported, with the module's name: for a
    style or layout that pkt has not, and if the plan replaces no product. Raises ShapeError if the ranks do not divide
    a weight.
    """
    from . import styles  # here, because it loads torch's DTensor

    world, mesh = _world(mesh)
    if not isinstance(module, nn.Module):
        raise DtypeError.argument(CALL, "module", type(module).__name__, "a torch.nn.Module", world.rank)
    if keep not in ("shard", "whole"):
        raise Unsupported.here(f"rank {world.rank}: {CALL}", f"found keep={keep!r}", 'use "shard" or "whole"')
    if src_data_rank is not None:
        check_rank(src_data_rank, world, f"{CALL}(src_data_rank=)")
    planned = list(_found(module, plan if isinstance(plan, Mapping) else {"": plan}, world))
    planned.sort(key=lambda found: isinstance(found[1], styles.INPUTS))  # behind the Linears, which it looks for
    places = [styles.Place(name, world, mesh, keep) for name, _ in planned]
    modules = [module.get_submodule(name) for name, _ in planned]
    # All checks come before the first change.
    _check_once(planned, places, styles.INPUTS)
    _check_ties(module, {name for name, _ in planned}, world)
    changes = [styles.change(style, one, place) for (_, style), one, place in zip(planned, modules, places)]
    if not any(isinstance(style, styles.PRODUCTS) for _, style in planned):
        names = ", ".join(repr(n) for n, m in module.named_modules() if isinstance(m, nn.Linear)) or "none"
        names_of_plan = list(plan) if isinstance(plan, Mapping) else [""]
        found = f"found no Linear, no Embedding and no experts under the plan's names {names_of_plan}"
        remedy = f"the module has the Linears {names}; make no call for a pipeline stage that has none"
        raise Unsupported.here(f"rank {world.rank}: {CALL}", found, remedy)
    ties: dict[tuple[int, int | None], Any] = {}  # parameters that several modules share
    for (name, style), one, change in zip(planned, modules, changes):
        if src_data_rank is not None and not isinstance(style, styles.INPUTS):
            _agree(one, src_data_rank, world)
        made = change()
        if made is one:
            continue
        for key, (part, *_) in getattr(made, "parts", {}).items():
            if key in one._parameters:
                made._parameters[key] = ties.setdefault((id(one._parameters[key]), part.dim), made._parameters[key])
        if name == "":
            module = made
        else:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made)
    styles.join(module)
    return module


def _check_once(planned: Sequence[tuple[str, Any]], places: Sequence[Any], inputs: type) -> None:
    """Raise Unsupported if two names of the plan match one module, but for its inputs."""
    seen: set[tuple[str, bool]] = set()
    for (name, style), place in zip(planned, places):
        key = name, isinstance(style, inputs)
        if key in seen:
            raise place.refused("two styles", "let one name of the plan match it")
        seen.add(key)


def _world(mesh: Any) -> tuple[World, Any]:
    """The world of a mesh or of a call, and the mesh of one dimension; None where there is none."""
    if mesh is None:
        return current_world(CALL), None
    if isinstance(mesh, World):
        return mesh, None
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise DtypeError.argument(CALL, "mesh", type(mesh).__name__, "a DeviceMesh, a pkt.World or None")
    if mesh.ndim != 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            found = f"found a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}"
            raise Unsupported.here(CALL, found, 'give one of them, as mesh["tp"]')
        mesh = mesh["tp"]
    group = mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    for world in worlds._open:
        if world.group is not None and dist.get_process_group_ranks(world.group) == ranks:
            return world, mesh
    return launcher.init(group=group), mesh


def _found(module: nn.Module, plan: Mapping[str, Style], world: World) -> Iterator[tuple[str, Style]]:
    """Names of the planned modules, and their styles. Of a name that matches none, a warning."""
    for key, style in plan.items():
        if not isinstance(key, str):
            raise DtypeError.argument(CALL, "plan", f"the name {key!r}", "names of modules, as strings", world.rank)
        names = list(_matching(module, key.split("."))) if key else [""]
        if not names:
            warnings.warn(f"{CALL}: the plan's name {key!r} matches no module", stacklevel=3)
        for name in names:
            yield name, style


def _matching(module: nn.Module, tokens: list[str], before: str = "") -> Iterator[str]:
    first, *rest = tokens
    for name, child in module.named_children():
        if fnmatch(name, first):
            if rest:
                yield from _matching(child, rest, f"{before}{name}.")
            else:
                yield before + name


def _check_ties(module: nn.Module, planned: set[str], world: World) -> None:
    """Raise Unsupported if a planned module shares a parameter with one that is not planned."""
    modules = dict(module.named_modules(remove_duplicate=False))

    def place(name: str) -> tuple[int, str]:
        parent, _, last = name.rpartition(".")
        return id(modules[parent]), last

    places = {place(name) for name in planned}  # two names have one place inside a module that is there twice
    owners = {id(p): name for name in planned for p in modules[name]._parameters.values() if p is not None}
    for name, one in modules.items():
        for parameter in one._parameters.values():
            if parameter is not None and place(name) not in places and id(parameter) in owners:
                where = f"rank {world.rank}: {CALL}: module {owners[id(parameter)]!r}"
                if one is modules[owners[id(parameter)]]:
                    found, remedy = f"found it under the name {name!r}, too", "make two modules of one weight"
                    raise Unsupported.here(where, found, remedy)
                found = f"found a parameter that module {name!r} has, too"
                raise Unsupported.here(where, found, f"plan {name!r} as well, or give it a parameter of its own")


def _agree(module: nn.Module, source: int, world: World) -> None:
    """Give a module the parameters of rank `source`."""
    for parameter in module.parameters():
        if parameter.is_meta:
            continue
        flat = parameter.detach().reshape(-1)
        if world.size > 1:
            pieces = [broadcast(piece.clone(), source, world=world) for piece in flat.split(PIECE)]
            parameter.data.copy_(torch.cat(pieces).view(parameter.shape))
