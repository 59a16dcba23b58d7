"""Candidates and predicted seconds of the kernels of shared.nodes. Nothing of them is measured, see pkt.model.network.

A case (`key`) has nbytes, of x; itemsize, of its elements; nodes; node_size; network, a pkt.model.network.Network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from pkt.model.config import Config
from pkt.model.gpu import Gpu, link_rate
from pkt.model.network import TwoLinks

from ..declaration import MAX_BLOCK
from . import nodes
from .grid import COPY_BYTES

Key = Mapping[str, Any]
PUTS, LEAST_BYTES = 64, 256
"""Of the candidates for `block`: most puts of a part where a put has fewer bytes than nodes.LEAST_PUT, and the least
bytes of a put. The model does not know how many messages a network card takes in a second."""
STEP = 1e-6
"""Seconds that a program takes for a wait that is over, or for a load from its node, where the next one comes behind
it. Assumed. Many nodes mean many of them for few bytes."""


def _gathered(key: Key) -> float:
    """Bytes of a part where a rank's whole x is one."""
    return float(key["nbytes"])


def _split(key: Key) -> float:
    """Bytes of a part where x has one for each rank."""
    return float(key["nbytes"]) / (key["nodes"] * key["node_size"])


def _space(key: Key, part: float) -> list[Config]:
    """The form's own rule, and puts of a power of two of elements: from small ones up to a whole part."""
    item, most = key["itemsize"], triton.next_power_of_2(max(1, -(-int(part) // key["itemsize"])))
    least = min(most, max(LEAST_BYTES, min(nodes.LEAST_PUT, most * item // PUTS)) // item)
    blocks = (1 << n for n in range(MAX_BLOCK.bit_length()))
    return [Config(mode="nodes"), *(Config(mode="nodes", block=n) for n in blocks if least <= n <= most)]


def gather_space(key: Key, gpu: Gpu) -> list[Config]:
    """The candidates of all_gather."""
    return _space(key, _gathered(key))


def split_space(key: Key, gpu: Gpu) -> list[Config]:
    """The candidates of reduce_scatter, all_reduce and all_to_all."""
    return _space(key, _split(key))


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
        self.link = link_rate("register load", self.programs, min(int(piece), COPY_BYTES))
        self.latency = self.network.latency if self.N > 1 else 0.0

    def tasks(self, nodes: int) -> int:
        """Pieces of so many nodes that the busiest program takes."""
        return -(-nodes * self.pieces // self.programs)

    def estimate(
        self, network: float, node: float, memory: float, exposed: float, sync: float, steps: int
    ) -> TwoLinks:  # fmt: skip
        """network, node, memory: bytes. exposed, sync: seconds. steps: see STEP; of the busiest program."""
        issued = self.tasks(self.N - 1) * self.network.put
        over, within, waits = max(network / self.network.rate, issued), node / self.link, steps * STEP
        return TwoLinks(
            launch=self.gpu.launch, compute=0.0, memory=memory / self.gpu.memory,
            communication=max(over, within, waits), exposed=exposed + self.latency, sync=sync, network=over,
            node=within, waits=waits,
            limit=max(network / self.network.rate, node / self.gpu.link),
        )  # fmt: skip


def gather(s: Sizes, answered: bool = False) -> TwoLinks:
    """The last pieces that arrive must be passed on. answered: nobody waits until its puts are complete."""
    size = s.N * s.M
    spread = s.at_once * (s.M - 1) / s.link
    sync = s.gpu.signal + (0.0 if answered else s.latency)
    far, near, memory = (s.N - 1) * s.part, s.N * (s.M - 1) * s.part, (2 + 2 * size) * s.part
    return s.estimate(far, near, memory, spread, sync, s.tasks(s.N) * s.M)


def scatter(s: Sizes, answered: bool = False) -> TwoLinks:
    """The first sums must be there before anything leaves."""
    first = s.at_once * (s.M - 1) / s.link
    sync = 2 * s.gpu.signal + (0.0 if answered else s.latency)
    far, near = (s.N - 1) * s.part, s.N * (s.M - 1) * s.part
    steps = s.tasks(s.N - 1) * s.M + s.tasks(1) * (s.M + s.N - 1)  # an element adds the other nodes' sums in turn
    return s.estimate(far, near, s.N * s.M * s.part + 3 * far + s.part, first, sync, steps)


def _sizes(config: Mapping[str, Any], key: Key, gpu: Gpu, part: float) -> Sizes:
    """Of a collective, whose setting `block` is the elements of a put."""
    block = config.get("block")
    return Sizes(key, gpu, part, piece=block * key["itemsize"] if block else None)


def gather_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_gather."""
    return gather(_sizes(config, key, gpu, _gathered(key)))


def scatter_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of reduce_scatter."""
    return scatter(_sizes(config, key, gpu, _split(key)))


def reduce_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_reduce."""
    sizes = _sizes(config, key, gpu, _split(key))
    return scatter(sizes, answered=True).then(gather(sizes, answered=True))


def exchange_seconds(config: Mapping[str, Any], key: Key, gpu: Gpu) -> TwoLinks:
    """Of all_to_all: the first pieces must be collected before anything leaves."""
    s = _sizes(config, key, gpu, _split(key))
    first = s.at_once * (s.M - 1) / s.link
    far, whole = (s.N - 1) * s.M * s.part, s.N * s.M * s.part
    sync = 2 * s.gpu.signal + s.latency
    steps = (s.tasks(s.N - 1) + s.tasks(s.N)) * s.M
    return s.estimate(far, s.N * (s.M - 1) * s.part, 2 * whole + 3 * far, first, sync, steps)
