"""The network between nodes as the cost model sees it, and the parts of a time over two kinds of links.

No figure here is measured: pkt has sent nothing over a network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pkt.errors import ShapeError
from pkt.model.cost import Estimate

LATENCY = 5e-6
"""Seconds one way, as the simulator's clock has it. Assumed."""
PUT = 1e-6
"""Seconds that a program takes to issue a put. Assumed."""
_GIGABITS = re.compile(r"(\d+(?:\.\d+)?) ?Gb(?:/s)?")


@dataclass(frozen=True)
class Network:
    """The network link of one GPU. rate: bytes a second, out and at the same time in. latency: seconds one way. put:
    seconds that a program takes to issue a put."""

    name: str
    rate: float
    latency: float = LATENCY
    put: float = PUT

    @classmethod
    def parse(cls, call: str, text: object) -> Network:
        """A network by the bits that a GPU's link carries in a second, as "400Gb": the line rate, which no network
        reaches. Raises ShapeError for `call`."""
        found = _GIGABITS.fullmatch(text) if isinstance(text, str) else None
        if found is None or not float(found[1]):
            wanted = 'gigabits a second for each GPU, as "400Gb", or a pkt.model.network.Network'
            raise ShapeError.argument(call, "network", repr(text), wanted)
        return cls(found[0], float(found[1]) * 1e9 / 8)


@dataclass(frozen=True)
class TwoLinks(Estimate):
    """An estimate whose communication is the longest of three. network, node: seconds of the two kinds of links. waits:
    seconds of what one program does in turn, see kernels/shared/nodes_rules.py. limit: seconds that the bytes of the
    slower kind of link take at its full rate, or a product in the tensor cores at theirs, if that is longer."""

    network: float = 0.0
    node: float = 0.0
    waits: float = 0.0
    limit: float = 0.0

    def then(self, other: TwoLinks) -> TwoLinks:
        """Both, one after the other."""
        return TwoLinks(**{name: value + getattr(other, name) for name, value in vars(self).items()})
