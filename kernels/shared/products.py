"""What the fused products' declarations share: checks of their keywords, and operands made to suit TMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pkt.errors import DtypeError
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.wording import found_text

from ..declaration import MAX_BLOCK, MAX_STAGES, Call, Case, Launch, Operand, choice, integer
from ..gradients import Gradients, Recorded, Split
from .checks import FLOATS, aligned, stored
from .tile_product import Tiles, finished, padded

EPILOGUES = ("none", "relu", "gelu", "silu")
ARGUMENTS = {"epilogue": choice(*EPILOGUES)}
SMALL = {"tiles": (16, 16, 16)}


def operands(
    a: str, b: str | Callable[[Call], str], columns: str | Callable[[Call], str] = "n", *, same_bias: bool = False
) -> dict[str, Operand]:
    """A and B of these shapes, and the bias for so many columns."""
    bias = Operand(columns, optional=True, same=same_bias)
    return {"a": Operand(a, FLOATS), "b": Operand(b, transposed=True), "bias": bias}


def by_columns(call: Call) -> bool:
    """Whether A's shards lie beside each other; not in operators that take them by rows alone."""
    return call.arguments.get("shard") == "columns"


def nasty(*modes: str, **arguments: Any) -> Iterator[Case]:
    """Shapes that fill no tile, with a bias and an epilogue, in each of `modes`."""
    for at, mode in enumerate(modes):
        epilogue, (m, k, n) = (("silu", (17, 8, 24)), ("gelu", (33, 31, 5)))[at % 2]
        given = {"mode": mode, "epilogue": epilogue, "given": ("bias",), **arguments}
        yield Case({"m": m, "k": k, "n": n}, arguments=given, out="given", explore=False)


def tiles(call: Call, name: str, value: Sequence[int]) -> Tiles:
    """The check of the keyword `tiles`, which fills in what is left out. Raises ShapeError or DtypeError unless the
    blocks are powers of two from 16, for tensor cores, and the rest can be compiled."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or None in value:
        found = found_text(value)
        raise DtypeError.argument(call.name, name, found, "a sequence of integers", call.world.rank)
    for at, size in enumerate(value):
        integer()(call, f"{name}[{at}]", size)
    powers = [size >= 16 and not size & (size - 1) for size in value[:3]]
    if len(value) < 3 or not all(powers):
        raise call.refuse(name, tuple(value[:3]), "three blocks, powers of two from 16")
    if len(value) > len(Tiles._fields):
        raise call.refuse(name, tuple(value), f"at most {', '.join(Tiles._fields)}")
    full = Tiles(*value)
    m, n, k = full[:3]
    if max(m * n, m * k, k * n) > MAX_BLOCK:
        raise call.refuse(name, tuple(full), f"at most {MAX_BLOCK} elements in a block of a, b or out")
    if full.num_warps not in (1, 2, 4, 8, 16) or min(full) < 1 or full.maxnreg > 255:
        wanted = "num_warps a power of two up to 16, maxnreg up to 255, everything from 1"
        raise call.refuse(name, tuple(full), wanted)
    if full.num_stages > MAX_STAGES:
        raise call.refuse(name, tuple(full), f"at most {MAX_STAGES} stages")
    return full


Plan = Callable[[Call], Launch]
Fit = Callable[[torch.Tensor], torch.Tensor]


def whole_runs(plan: Plan) -> Plan:
    """`plan` with zeros after k, up to a multiple of 16 bytes of a row of a, as TMA needs. Ranks may differ in k, and
    must not differ in tiles for it."""

    def whole(call: Call) -> Launch:
        k, dtype = call["a"].shape[1], call.dtype
        missing = padded(max(k, 1), dtype) - k
        if not missing:
            return plan(call)
        pad = torch.constant_pad_nd  # which torch.nn.functional.pad calls, behind two more functions

        def filled(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows, transposed = stored(b)
            return pad(a, (0, missing)), pad(rows, (0, missing)).t() if transposed else pad(b, (0, 0, 0, missing))

        call.tensors["a"], call.tensors["b"] = filled(call["a"], call["b"])
        launch = plan(call)
        return lambda a, b, out, bias, *scales: launch(*filled(a, b), out, bias, *scales)

    return whole


def behind(*epilogues: str) -> Split:
    """`Backward.split` of a product with these epilogues, whose gradients need the sum before them, which a fused
    kernel does not store. So a recorded call returns that sum, rounded, and torch computes the epilogue, and keeps what
    its gradient needs."""

    def split(keywords: Mapping[str, Any], operands: Mapping[str, Any]) -> tuple[Mapping[str, Any], Fit] | None:
        epilogue, b = keywords["epilogue"], operands["b"]
        if not isinstance(epilogue, str) or epilogue not in epilogues or epilogue == "none":
            return None  # nothing to compute, or what the call refuses
        if epilogue == "swiglu" and any(_is_odd(each) for each in (b if isinstance(b, (list, tuple)) else [b])):
            return None
        return {"epilogue": "none"}, lambda total: finished(total, None, epilogue)

    return split


def _is_odd(b: Any) -> bool:
    """Whether no "swiglu" takes so many columns."""
    return isinstance(b, torch.Tensor) and b.ndim == 2 and b.shape[1] % 2 == 1


def both(call: Recorded, grad: torch.Tensor) -> Gradients:
    """The gradients of a and b that are wanted, from that of their whole product."""
    found = {}
    if "a" in call.wanted:
        found["a"] = torch.mm(grad, call["b"].t())
    if "b" in call.wanted:
        found |= of_weights(call, call["a"], [grad])
    return found


def of_weights(call: Recorded, a: torch.Tensor, grads: Sequence[torch.Tensor]) -> Gradients:
    """b's gradients, a^T @ grad, each as its weight lies."""
    ways = zip(grads, call.turned("b"), strict=True)
    return {"b": [torch.mm(grad.t(), a).t() if turned else torch.mm(a.t(), grad) for grad, turned in ways]}


def beside(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The columns of all weights, in a transposed view where all of them are such views: then none is turned."""
    if all(stored(b)[1] for b in weights):
        return torch.cat([b.t() for b in weights]).t()
    return torch.cat(tuple(weights), dim=1)


def in_turn(*launches: Launch) -> Callable[..., None]:
    """launch(a, bs, outs, biases): one launch after the other, each with its weight, `out` and bias."""

    def launch(a: torch.Tensor, bs: Any, outs: Any, biases: Any) -> None:
        for one, b, out, bias in zip(launches, bs, outs, biases):
            one(a, b, out, bias)

    return launch


def fitting(tensor: torch.Tensor) -> Fit | None:
    """Returns a copier for tensors that TMA cannot address, because they begin elsewhere than at a multiple of 16
    bytes; for a symmetric one what takes the plain tensor; None if neither is needed. No reason to choose another form,
    because the peers' tensors may begin elsewhere."""
    symmetric = isinstance(tensor, SymmetricTensor)
    plain = tensor.plain() if symmetric else tensor
    copied = not aligned(stored(plain)[0])
    if not symmetric and not copied:
        return None

    def fit(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.plain() if symmetric else tensor
        return plain.clone() if copied else plain

    return fit


def fitted(plan: Plan, *, out: bool, operands: tuple[str, str] = ("a", "b")) -> Plan:
    """`plan` with operands that TMA descriptors can address. out: `out`, too, which is filled in the end."""

    def fit_and_plan(call: Call) -> Launch:
        fits = [fitting(call[name]) for name in operands] + [fitting(call["out"]) if out else None]
        for name, fit in zip((*operands, "out"), fits):
            if fit:
                call.tensors[name] = fit(call[name])
        launch = plan(call)
        return _fit_and_launch(launch, *fits) if any(fits) else launch

    return fit_and_plan


def _fit_and_launch(launch: Launch, fit_a: Fit | None, fit_b: Fit | None, fit_out: Fit | None) -> Launch:
    def fit_and_launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: Any, *scales: Any) -> torch.Tensor:
        result = fit_out(out) if fit_out else out
        launch(fit_a(a) if fit_a else a, fit_b(b) if fit_b else b, result, bias, *scales)
        if result.data_ptr() != out.data_ptr():
            out.detach().copy_(result)  # as a kernel stores: also into what is trained
        return out

    return fit_and_launch
