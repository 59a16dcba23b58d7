"""pkt.tune.predict: how long a collective over many nodes should take, before anybody has the nodes.

    print(pkt.tune.predict("all_reduce", (128 << 20,), nodes=64, node_size=8))

It is a prediction by the cost model with two kinds of links (pkt.model.network). The links of a node and the GPU have
the rates that were measured on H200. The network's are its line rate and assumed latencies. Nothing of it has been
compared with a measurement: no operator of pkt has run on GPUs of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import Operator, named, operators
from pkt.model.config import Config
from pkt.model.gpu import H200, Gpu, gpu_named
from pkt.model.network import Network, TwoLinks
from pkt.wording import dtype_text

CALL = "pkt.tune.predict"


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
        """The share of `seconds` that the bytes alone would take on the slower kind of link, at its full rate."""
        return self.parts.limit / self.parts.total

    def __str__(self) -> str:
        p, ranks = self.parts, self.nodes * self.node_size
        return (
            f"{self.operator} of {self.shape} {self.dtype} on {ranks} x {self.gpu}, {self.nodes} nodes of "
            f"{self.node_size}, {self.network.name} a GPU\n"
            f"predicted, not measured: {_ms(self.seconds)} ms, {self.efficiency:.0%} of what the links allow\n"
            f"in ms: launch {_ms(p.launch)} + max(memory {_ms(p.memory)}, network {_ms(p.network)}, links of a node "
            f"{_ms(p.node)}, waits of a program {_ms(p.waits)}) + exposed {_ms(p.exposed)} + sync {_ms(p.sync)}"
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
    """The predicted time of a collective over several nodes, where the caller gives it an x of `shape` and nothing
    else. A prediction that was never held against a measurement. Needs no GPU and no world; not collective.

    operator: its name or function; one with a form over nodes: all_gather, reduce_scatter, all_reduce, all_to_all.
    shape: of x on each rank. nodes, node_size: at least two nodes of so many GPUs. network: what the link of each GPU
    carries in a second, as "400Gb", or a pkt.model.network.Network. dtype: of x. gpu: as torch names it; its links and
    memory have H200's rates. Raises ShapeError, DtypeError.
    """
    case = asked(CALL, operator, shape, nodes, node_size, network, dtype, gpu_named(gpu))
    parts = case.predicted(Config(mode=case.mode))
    assert parts is not None
    sizes, kind = case.case["x"], case.case["dtype"]
    return Prediction(
        case.operator.name, case.mode, sizes, kind, nodes, node_size, case.key["network"], gpu, parts
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- shared with across.py
@dataclass(frozen=True)
class Asked:
    """A call over several nodes, checked, that nobody makes. mode: the form that it takes. case: for people. key: as
    that form's `space` and `seconds` take it."""

    operator: Operator
    mode: str
    case: Mapping[str, Any]
    key: Mapping[str, Any]
    gpu: Gpu

    @property
    def form(self) -> Any:
        """The operator's Form."""
        return self.operator.across[self.mode]

    def predicted(self, config: Mapping[str, Any]) -> TwoLinks | None:
        """The parts of the time with the settings of a config; None where the form says nothing."""
        if self.form.seconds is None:
            return None
        found = self.form.seconds(config, self.key, self.gpu)
        assert isinstance(found, TwoLinks)
        return found

    def space(self) -> list[Config]:
        """The form's candidates."""
        return [] if self.form.space is None else [*self.form.space(self.key, self.gpu)]


def asked(
    call: str, operator: Any, shape: Any, nodes: Any, node_size: Any, network: Any, dtype: Any, gpu: Gpu
) -> Asked:
    """The arguments of `predict`, checked for `call`. Raises ShapeError, DtypeError."""
    declared = _declared(call, operator)
    found = Network.parse(call, network) if not isinstance(network, Network) else network
    for name, value, least in (("nodes", nodes, 2), ("node_size", node_size, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ShapeError.argument(call, name, repr(value), f"an integer from {least}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else (-1,)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise ShapeError.argument(call, "shape", repr(shape), "integers from 1, as in (4096, 8192)")
    kinds = {dtype_text(t): t for t in next(iter(declared.tensors.values())).dtypes}
    kind = kinds.get(dtype_text(dtype))
    if kind is None:
        raise DtypeError.argument(call, "dtype", repr(dtype), " or ".join(kinds))
    mode, key = declared.over_nodes(sizes, kind, nodes, node_size, found, gpu)
    case = {"x": sizes, "dtype": dtype_text(kind), "size": nodes * node_size, "node_size": node_size}
    return Asked(declared, mode, case | {"network": found.name}, key, gpu)


def predictable(operator: Operator) -> bool:
    """Whether it is a collective with a form over nodes that predicts its time."""
    return [*operator.tensors] == ["x"] and any(form.seconds is not None for form in operator.across.values())


def _declared(call: str, operator: Any) -> Operator:
    """The collective of that name or function whose time over nodes can be predicted. Raises ShapeError."""
    name = getattr(operator, "__name__", operator)
    declared = named(name) if isinstance(name, str) else None
    if declared is None or not predictable(declared):
        wanted = ", ".join(each.name for each in operators().values() if predictable(each))
        raise ShapeError.argument(call, "operator", repr(name), f"one with a form over nodes: {wanted}")
    return declared
