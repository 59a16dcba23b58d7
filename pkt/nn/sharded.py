"""What modules with a part of each weight have in common: the world, and state dicts of whole weights or of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pkt.errors import ShapeError, Unsupported
from pkt.kernels.agreement import world_of
from pkt.kernels.all_gather import all_gather
from pkt.runtime.world import World

PIECE = 1 << 22
"""Elements of a weight that full_state_dict gathers at a time: it needs a few times as much symmetric memory."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Of torch's modules: what a module that takes another's place would lose."""


class Part(NamedTuple):
    """A tensor of the state dict, of which this rank holds a part."""

    key: str
    dim: int | None  # that is split among the ranks; None: every rank holds the whole
    size: int  # of that dimension, of all ranks


class Sharded(nn.Module):
    """A module that holds this rank's part of its parameters.

    `load_state_dict` takes whole tensors, of which it copies this rank's part, and this rank's parts as `state_dict`
    returns them; it tells them by their shapes. `full_state_dict` returns whole tensors.
    """

    world: World
    parts: dict[str, tuple[Part, ...]]
    """By parameter: the tensors of the state dict that it is made of."""

    def __init__(self, world: World | None) -> None:
        super().__init__()
        self.world = world_of(f"pkt.nn.{type(self).__name__}", world)
        self.parts = {}

    def divided(self, name: str, size: int) -> int:
        """This rank's share of `size`. Raises ShapeError."""
        if size % self.world.size:
            wanted = f"a multiple of {self.world.size}, the number of ranks"
            raise ShapeError.argument(f"pkt.nn.{type(self).__name__}", name, size, wanted, self.world.rank)
        return size // self.world.size

    def named(self, of: str, names: Sequence[str], count: int) -> None:
        """Raise Unsupported unless `names` are `count`, those of `of`."""
        if isinstance(names, str) or len(names) != count:
            where, found = f"rank {self.world.rank}: pkt.nn.{type(self).__name__}", f"found names={names!r:.80}"
            raise Unsupported.here(where, found, f"give {count} names, those of {of}")

    def hold(self, name: str, tensors: Sequence[torch.Tensor], parts: Sequence[Part], trained: bool = True) -> None:
        """Make the parameter `name` of this rank's parts of whole tensors. trained: it requires grad."""
        self.parts[name] = tuple(parts)
        shares = [share(tensor.detach(), part, self.world) for tensor, part in zip(tensors, parts)]
        made = self.joined(name, shares).clone(memory_format=torch.contiguous_format)
        self.register_parameter(name, nn.Parameter(made, requires_grad=trained))

    def local(self, name: str) -> Any:
        """This rank's part of a parameter, as a plain tensor; None where there is none."""
        found = self.held(name)
        return None if found is None else local(found)

    def held(self, name: str) -> Any:
        """The parameter itself. Raises Unsupported where a parametrization or pruning has taken its place."""
        return held(self, name, self.world)

    def joined(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter that parts make; several lie below each other."""
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

    def separate(self, name: str, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts that make a parameter."""
        parts = self.parts[name]
        return [parameter] if len(parts) == 1 else parameter.split([part.size // self.world.size for part in parts])

    def whole(self) -> dict[str, torch.Tensor]:
        """Collective: the whole tensors of this module's own parameters, by key, new on every rank."""
        found = {}
        for name, parts in self.parts.items():
            for part, mine in zip(parts, self.separate(name, self.local(name).detach())):
                found[part.key] = mine.clone() if part.dim is None else _gathered(mine, part.dim, self.world)
        return found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parts in self.parts.items():
            parameter = destination.pop(prefix + name)
            mine = local(parameter)
            for part, own in zip(parts, self.separate(name, mine)):
                destination[prefix + part.key] = parameter if own is mine else like(parameter, own)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:  # fmt: skip
        for name, parts in self.parts.items():
            keys = [prefix + part.key for part in parts]
            lacking = [key for key in keys if key not in state_dict]
            if lacking == [prefix + name]:
                continue  # torch reports it
            missing_keys += lacking if strict else []
            present = [(state_dict.pop(key), part) for key, part in zip(keys, parts) if key in state_dict]
            given = [share(tensor, part, self.world) for tensor, part in present]
            own = self.separate(name, torch.empty_like(self.local(name), device="meta"))
            wrong = [] if lacking else mismatches(keys, given, [tensor.shape for tensor in own])
            error_msgs += wrong
            if lacking or wrong:
                state_dict[prefix + name] = self._parameters[name]  # unchanged, and not missing by its own name
            else:
                mine = self.joined(name, given).contiguous()
                if local_metadata.get("assign_to_params_buffers") and mine is given[0] is not present[0][0]:
                    mine = mine.clone()  # a view would keep the memory of the whole tensor
                state_dict[prefix + name] = like(self._parameters[name], mine)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def held(module: nn.Module, name: str, world: World) -> Any:
    """A parameter of a module. Raises Unsupported where a parametrization or pruning has taken its place."""
    if name not in module._parameters:
        where = f"rank {world.rank}: pkt.nn: {type(module).__name__}"
        found = f"found no parameter {name!r}: a parametrization or pruning took its place"
        raise Unsupported.here(where, found, "remove that, or prune before the weight is split")
    return module._parameters[name]


def check_transforms(call: str, world: World) -> None:
    """Raise Unsupported inside a transform of torch.func or torch.vmap."""
    if torch._C._are_functorch_transforms_active():
        found = "found a transform of torch.func or torch.vmap around the call, which cannot reach other ranks"
        raise Unsupported.here(f"rank {world.rank}: {call}", found, "use loss.backward(), and one call for a batch")


def is_dtensor(tensor: Any) -> bool:
    """Whether this is torch's DTensor, which nothing here imports."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def share(tensor: torch.Tensor, part: Part, world: World) -> torch.Tensor:
    """This rank's part of a whole tensor, as a view; the tensor itself where it is no whole one."""
    if part.dim is None or is_dtensor(tensor) or tensor.ndim <= part.dim or tensor.shape[part.dim] != part.size:
        return tensor
    return tensor.chunk(world.size, part.dim)[world.rank]


def mismatches(keys: Sequence[str], given: Sequence[torch.Tensor], wanted: Sequence[Sequence[int]]) -> list[str]:
    """What torch says of tensors of a state dict that do not have the shapes of this rank's own."""
    text = "size mismatch for {}: copying a param with shape {} from checkpoint, the shape in current model is {}."
    shapes = [(key, list(local(tensor).shape), list(shape)) for key, tensor, shape in zip(keys, given, wanted)]
    return [text.format(*each) for each in shapes if each[1] != each[2]]


def like(parameter: Any, given: torch.Tensor) -> torch.Tensor:
    """`given`, this rank's part, as a DTensor where the parameter is one."""
    if not is_dtensor(parameter) or is_dtensor(given):
        return given
    return type(parameter).from_local(given, parameter.device_mesh, parameter.placements, run_check=False)


def _gathered(mine: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    pieces = [all_gather(p, world=world).view(world.size, -1) for p in mine.contiguous().view(-1).split(PIECE)]
    return torch.cat([each.view(mine.shape) for each in torch.cat(pieces, dim=1)], dim)


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: the state dict of the model that is not split, the same on every rank.

    module: with modules of pkt.nn at any depth. Every rank gets new whole tensors, on the device of their parts: as
    much memory as the whole model. Tensors that are not split are copies of this rank's own.
    """
    whole = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in module.state_dict().items()}
    for prefix, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, Sharded):
            whole |= {f"{prefix}.{key}" if prefix else key: tensor for key, tensor in one.whole().items()}
    return whole
