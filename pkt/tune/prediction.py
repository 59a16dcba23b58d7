"""pkt.tune.predict: how long a call over many nodes should take, before anybody has the nodes.

    print(pkt.tune.predict("all_reduce", (128 << 20,), nodes=64, node_size=8))

It is a prediction by the cost model with two kinds of links (pkt.model.network). The links of a node and the GPU have
the rates that were measured on H200. The network's are its line rate and assumed latencies. Nothing of it has been
compared with a measurement: no operator of pkt has run over a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import Operator, named, operators
from pkt.model.config import Config
from pkt.model.cost import MODELLED, modelled
from pkt.model.gpu import H200, Gpu, gpu_named
from pkt.model.network import Network, TwoLinks
from pkt.wording import count_text, dtype_text

CALL = "pkt.tune.predict"
MOST_ELEMENTS = 1 << 40
"""Of a tensor that is asked about: more than the memory of a GPU holds."""


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call on every rank; str() explains it.

    operator, mode, shape, dtype, nodes, node_size: the call. network: of each GPU. gpu: as torch names it. parts: of
    the time, in seconds.
    """

    operator: str
    mode: str
    shape: tuple[int, ...]
    dtype: str
    nodes: int
    node_size: int
    network: Network
    gpu: str
    parts: TwoLinks

    @property
    def seconds(self) -> float:
        """Predicted seconds of a call, with the launch and without the host."""
        return self.parts.total

    @property
    def efficiency(self) -> float:
        """The share of `seconds` that the bytes alone would take on the slower kind of link at its full rate, or a
        product in the tensor cores, if that is longer."""
        return self.parts.limit / self.parts.total

    def __str__(self) -> str:
        p, ranks, nodes = self.parts, self.nodes * self.node_size, count_text(self.nodes, "node")
        compute, cores = (f"compute {_ms(p.compute)}, ", " and tensor cores") if p.compute else ("", "")
        return (
            f"{self.operator} of {self.shape} {self.dtype} on {ranks} x {self.gpu}, {nodes} of "
            f"{self.node_size}, {self.network.name} a GPU\n"
            f"predicted, not measured: {_ms(self.seconds)} ms, {self.efficiency:.0%} of what the links{cores} allow\n"
            f"in ms: launch {_ms(p.launch)} + max({compute}memory {_ms(p.memory)}, network {_ms(p.network)}, "
            f"links of a node {_ms(p.node)}, waits of a program {_ms(p.waits)}) + exposed {_ms(p.exposed)} + "
            f"sync {_ms(p.sync)}"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def predict(
    operator: str | Callable[..., Any],
    shape: int | Sequence[int],
    nodes: int,
    node_size: int,
    network: str | Network = "400Gb",
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    gpu: str = H200.name,
) -> Prediction:
    """The predicted time of an operator over several nodes, where the caller gives it operands and nothing else. A
    prediction that was never held against a measurement. Needs no GPU and no world; not collective.

    operator: its name or function; a collective, or a product that says how it is tuned, with a form over nodes.
    shape: of x on each rank; of a product M, N and K that each rank computes. nodes, node_size: at least two nodes of
    so many GPUs. network: what the link of each GPU carries in a second, as "400Gb", or a pkt.model.network.Network.
    dtype: of the operands; a product's is bf16 or fp16. gpu: as torch names it; its links and memory have H200's rates.
    Raises ShapeError, DtypeError.
    """
    declared = _declared(operator)
    case = asked(CALL, declared, shape, nodes, node_size, network, dtype, gpu_named(gpu))
    parts = case.predicted(Config(mode=case.mode))
    if parts is None:
        raise DtypeError.argument(CALL, "dtype", repr(dtype), " or ".join(MODELLED))
    return Prediction(
        declared.name, case.mode, case.shape, case.case["dtype"], nodes, node_size, case.key["network"], gpu, parts
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- shared with across.py
@dataclass(frozen=True)
class Asked:
    """A call over several nodes, checked, that nobody makes. mode: the form that it takes. shape: as `predict` has it.
    case: for people. key: as that form's `space` and `seconds` take it."""

    operator: Operator
    mode: str
    shape: tuple[int, ...]
    case: Mapping[str, Any]
    key: Mapping[str, Any]
    gpu: Gpu

    @property
    def form(self) -> Any:
        """The operator's Form."""
        return self.operator.across[self.mode]

    def predicted(self, config: Mapping[str, Any]) -> TwoLinks | None:
        """The parts of the time with the settings of a config; None where nothing is known."""
        if self.form.seconds is None or (self.operator.tuning is not None and not modelled(self.key)):
            return None
        found = self.form.seconds(config, self.key, self.gpu)
        assert isinstance(found, TwoLinks)
        return found

    def space(self) -> list[Config]:
        """The form's candidates."""
        return [] if self.form.space is None else [*self.form.space(self.key, self.gpu)]


def asked(
    call: str, operator: Operator, shape: Any, nodes: Any, node_size: Any, network: Any, dtype: Any, gpu: Gpu
) -> Asked:
    """The arguments of `predict` for an operator with a form over nodes, checked for `call`. Raises ShapeError,
    DtypeError."""
    found = Network.parse(call, network) if not isinstance(network, Network) else network
    for name, value, least in (("nodes", nodes, 2), ("node_size", node_size, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ShapeError.argument(call, name, repr(value), f"an integer from {least}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else (-1,)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise ShapeError.argument(call, "shape", repr(shape), "integers from 1, as in (4096, 8192)")
    check_held(call, "shape", *([sizes] if operator.tuning is None else combinations(sizes, 2)))
    kinds = {dtype_text(t): t for t in next(iter(operator.tensors.values())).dtypes}
    kind = kinds.get(dtype_text(dtype))
    if kind is None:
        raise DtypeError.argument(call, "dtype", repr(dtype), " or ".join(kinds))
    mode, key = operator.over_nodes(sizes, kind, nodes, node_size, found, gpu)
    lengths = {"x": sizes} if operator.tuning is None else dict(zip("MNK", sizes))
    case = {**lengths, "dtype": dtype_text(kind), "size": nodes * node_size, "node_size": node_size}
    return Asked(operator, mode, sizes, case | {"network": found.name}, key, gpu)


def check_held(call: str, name: str, *shapes: Sequence[int]) -> None:
    """Raise ShapeError for the shape of a tensor that no GPU can hold. name: of the argument that asks for it."""
    for shape in shapes:
        if math.prod(shape) > MOST_ELEMENTS:
            raise ShapeError.argument(call, name, f"a tensor {tuple(shape)}", f"at most {MOST_ELEMENTS} elements")


def predictable(operator: Operator) -> bool:
    """Whether it is a collective or a product whose form over nodes predicts its time."""
    known = operator.tuning is not None or [*operator.tensors] == ["x"]
    return known and any(form.seconds is not None for form in [*operator.across.values()][:1])


def _declared(operator: Any) -> Operator:
    """The operator of that name or function whose time over nodes can be predicted. Raises ShapeError."""
    name = getattr(operator, "__name__", operator)
    declared = named(name) if isinstance(name, str) else None
    if declared is None or not predictable(declared):
        wanted = ", ".join(each.name for each in operators().values() if predictable(each))
        raise ShapeError.argument(CALL, "operator", repr(name), f"one with a form over nodes: {wanted}")
    return declared
