"""pkt.tune.predict: how long a call over many nodes should take, before anybody has the nodes.

    print(pkt.tune.predict("all_reduce", (128 << 20,), nodes=64, node_size=8))
    print(pkt.tune.predict("all_gather_matmul", (8192, 8192, 8192), nodes=2, node_size=8))

It is a prediction by the cost model with two kinds of links (pkt.model.network). The links of a node and the GPU have
the rates that were measured on H200. The network's are its line rate and assumed latencies. Nothing of it has been
compared with a measurement: no operator of pkt has run on GPUs of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import Operator, named, operators
from pkt.model.cost import MODELLED
from pkt.model.gpu import H200, gpu_named
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
        """The share of `seconds` that the bytes alone would take on the slower kind of link at its full rate, or a
        product in the tensor cores, if that is longer."""
        return self.parts.limit / self.parts.total

    def __str__(self) -> str:
        p, ranks = self.parts, self.nodes * self.node_size
        compute, cores = (f"compute {_ms(p.compute)}, ", " and tensor cores") if p.compute else ("", "")
        return (
            f"{self.operator} of {self.shape} {self.dtype} on {ranks} x {self.gpu}, {self.nodes} nodes of "
            f"{self.node_size}, {self.network.name} a GPU\n"
            f"predicted, not measured: {_ms(self.seconds)} ms, {self.efficiency:.0%} of what the links{cores} allow\n"
            f"in ms: launch {_ms(p.launch)} + max({compute}memory {_ms(p.memory)}, links {_ms(p.communication)}) + "
            f"exposed {_ms(p.exposed)} + sync {_ms(p.sync)}; the network {_ms(p.network)}, the links of a node "
            f"{_ms(p.node)}"
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

    operator: its name or function; one with a form over nodes: all_gather, reduce_scatter, all_reduce, all_to_all;
    all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce. shape: of x on each rank; of the last three M, N and K
    of the product that each rank computes. nodes, node_size: at least two nodes of so many GPUs. network: what the link
    of each GPU carries in a second, as "400Gb", or a pkt.model.network.Network. dtype: of the operands; a product's is
    bf16 or fp16. gpu: as torch names it; its links and memory have H200's rates. Raises ShapeError, DtypeError.
    """
    declared = _declared(operator)
    found = Network.parse(CALL, network) if not isinstance(network, Network) else network
    for name, value, least in (("nodes", nodes, 2), ("node_size", node_size, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ShapeError.argument(CALL, name, repr(value), f"an integer from {least}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise ShapeError.argument(CALL, "shape", repr(shape), "integers from 1")
    kinds = {dtype_text(t): t for t in next(iter(declared.tensors.values())).dtypes}
    if declared.tuning is not None:
        kinds = {name: kind for name, kind in kinds.items() if name in MODELLED}
    kind = kinds.get(dtype_text(dtype))
    if kind is None:
        raise DtypeError.argument(CALL, "dtype", repr(dtype), " or ".join(kinds))
    rates = gpu_named(gpu)
    mode, parts = declared.over_nodes(sizes, kind, nodes, node_size, found, rates)
    return Prediction(declared.name, mode, sizes, dtype_text(kind), nodes, node_size, found, gpu, parts)


def _declared(operator: Any) -> Operator:
    """The operator of that name or function that has a form over nodes whose time is modelled. Raises ShapeError."""
    name = getattr(operator, "__name__", operator)
    declared = named(name) if isinstance(name, str) else None
    if declared is None or not _modelled(declared):
        wanted = ", ".join(each.name for each in operators().values() if _modelled(each))
        raise ShapeError.argument(CALL, "operator", repr(name), f"one with a form over nodes: {wanted}")
    return declared


def _modelled(operator: Operator) -> bool:
    return any(form.seconds for form in operator.across.values())
