"""Predicted seconds of the kernels of shared.nodes. Nothing of them is measured, see pkt.model.network.

A case (`key`) has nbytes, of x; nodes; node_size; network, a pkt.model.network.Network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pkt.model.gpu import Gpu, link_rate
from pkt.model.network import TwoLinks

from . import nodes
from .grid import COPY_BYTES

Key = Mapping[str, Any]


class Sizes:
    """What a kernel does with parts of so many bytes on each rank."""

    def __init__(
        self, key: Key, gpu: Gpu, part: float, programs: int | None = None, piece: float | None = None
    ) -> None:
        """programs: at most; all where None. piece: bytes of a put; None: by the kernels' rule."""
        self.N, self.M, self.network, self.gpu, self.part = key["nodes"], key["node_size"], key["network"], gpu, part
        most = programs or gpu.sms
        piece = min(piece or nodes.put_bytes(part, most), max(part, 1.0))
        self.pieces = max(1, -(-int(part) // int(piece)))
        self.programs = min(self.N * self.pieces, most)
        self.at_once = min(self.programs * piece, self.N * part)  # bytes of the pieces that all programs are at
        self.link = link_rate("register load", self.programs, COPY_BYTES)
        self.latency = self.network.latency if self.N > 1 else 0.0

    def estimate(self, network: float, node: float, memory: float, exposed: float, sync: float) -> TwoLinks:
        """network, node, memory: bytes. exposed, sync: seconds."""
        issued = -(-(self.N - 1) * self.pieces // self.programs) * self.network.put
        over, within = max(network / self.network.rate, issued), node / self.link
        return TwoLinks(
            launch=self.gpu.launch, compute=0.0, memory=memory / self.gpu.memory, communication=max(over, within),
            exposed=exposed + self.latency, sync=sync, network=over, node=within,
            limit=max(network / self.network.rate, node / self.gpu.link),
        )  # fmt: skip


def gather(s: Sizes, answered: bool = False) -> TwoLinks:
    """The last pieces that arrive must be passed on. answered: nobody waits until its puts are complete."""
    size = s.N * s.M
    spread = s.at_once * (s.M - 1) / s.link
    sync = s.gpu.signal + (0.0 if answered else s.latency)
    return s.estimate((s.N - 1) * s.part, s.N * (s.M - 1) * s.part, (2 + 2 * size) * s.part, spread, sync)


def scatter(s: Sizes, answered: bool = False) -> TwoLinks:
    """The first sums must be there before anything leaves."""
    first = s.at_once * (s.M - 1) / s.link
    sync = 2 * s.gpu.signal + (0.0 if answered else s.latency)
    far = (s.N - 1) * s.part
    return s.estimate(far, s.N * (s.M - 1) * s.part, s.N * s.M * s.part + 3 * far + s.part, first, sync)


def gather_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_gather."""
    return gather(Sizes(key, gpu, key["nbytes"]))


def scatter_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of reduce_scatter."""
    return scatter(Sizes(key, gpu, key["nbytes"] / (key["nodes"] * key["node_size"])))


def reduce_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_reduce."""
    sizes = Sizes(key, gpu, key["nbytes"] / (key["nodes"] * key["node_size"]))
    return scatter(sizes, answered=True).then(gather(sizes, answered=True))


def exchange_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_to_all: the first pieces must be collected before anything leaves."""
    s = Sizes(key, gpu, key["nbytes"] / (key["nodes"] * key["node_size"]))
    first = s.at_once * (s.M - 1) / s.link
    far, whole = (s.N - 1) * s.M * s.part, s.N * s.M * s.part
    sync = 2 * s.gpu.signal + s.latency
    return s.estimate(far, s.N * (s.M - 1) * s.part, 2 * whole + 3 * far, first, sync)
