"""A case of pkt.language, and helpers of the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PROGRAMS = 3
LAUNCHES = 2


@dataclass(frozen=True)
class Case:
    """fn(world), and the names in pkt.language that it calls, such as "wait" or "tile.wait"."""

    name: str
    fn: Callable[[Any], None]
    covers: tuple[str, ...]


CASES: list[Case] = []


def case(*covers: str, **values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `fn(world, **values)` to CASES, under its name and values."""

    def add(fn: Callable[..., None]) -> Callable[..., None]:
        def run(world: Any) -> None:
            fn(world, **values)

        said = (str(v).removeprefix("torch.") for v in values.values())
        CASES.append(Case("_".join((fn.__name__, *said)), run, covers))
        return fn

    return add


def local(world: Any, *shape: int, dtype: torch.dtype = torch.int32, fill: float = -1) -> torch.Tensor:
    """A tensor of this rank alone, on its device."""
    return torch.full(shape, fill, dtype=dtype, device=world.torch_device)


def put_in(x: torch.Tensor, values: torch.Tensor, world: Any) -> None:
    """Fill a symmetric tensor; return when all ranks have filled theirs."""
    x.copy_(values.to(x.dtype).reshape(x.shape))
    world.barrier()


def same(world: Any, found: torch.Tensor, wanted: Any) -> None:
    """Assert that the tensors are equal, once this rank's device is done."""
    world.synchronize()
    wanted = torch.as_tensor(wanted).cpu()
    found = found.cpu().reshape(wanted.shape)
    assert torch.equal(found.double(), wanted.double()), f"rank {world.rank}: found {found}, wanted {wanted}"
    world.barrier()
