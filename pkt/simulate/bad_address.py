"""The errors of bad addresses: outside a tensor, freed, of no rank, of a plain tensor, beside the counters.

No text contains a raw address: addresses differ from run to run, and the same finding should read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pkt import errors, wording
from pkt.simulate import findings
from pkt.simulate.detector import accessed
from pkt.simulate.faults import Site
from pkt.simulate.memory import OUTSIDE, Access, Unmapped
from pkt.simulate.sites import site

FARTHEST = 1 << 16  # windows: what is farther away is at the same place of one by chance
EPOCH_BYTES = 8  # the word that `epoch` counts in


def check_counters(machine: Any, access: Access, kind: str) -> None:
    """Raise SignalIndexError unless `access` touches only the counters of `pkt.signals`, or the word of `epoch` at the
    beginning. The other words are pkt's own."""
    region = access.region
    low, high = access.span()
    if (low >= region.header and high <= region.header + region.itemsize * region.shape[0]) or (low, high) == (
        0,
        EPOCH_BYTES,
    ):
        return
    at = site()
    outside = low if low < region.header else high - access.itemsize
    found = accessed(machine.current, kind, f"rank {region.rank}'s {region.element(region.base + outside)}", at)
    if at.call == "epoch":
        raise errors.SignalIndexError.epoch(found)
    raise errors.SignalIndexError.beside(found, region.name, region.shape[0])


def check_kind(machine: Any, parts: Sequence[tuple[Access, Any]], kind: str, at: Site) -> None:
    """Raise SignalIndexError unless `parts`, which a signal, wait or barrier accesses, are counters of pkt.signals."""
    for access, _ in parts:
        region = access.region
        if region.kind != "signals":
            tensor = f"rank {region.rank}'s {region.element(access.first())}"
            raise errors.SignalIndexError.data(accessed(machine.current, kind, tensor, at), at.call)


def misaligned(machine: Any, access: Access, kind: str) -> Exception:
    """The error of an access of the current program with an element that begins at no multiple of its bytes."""
    region, nbytes = access.region, access.itemsize
    first = next(a for a in (access.byte_offsets() + region.base).tolist() if a % nbytes)
    tensor = region.element(first) if region.kind == "local" else f"rank {region.rank}'s {region.element(first)}"
    at = site()
    found = accessed(machine.current, kind, tensor, at)
    if at.call == "epoch":
        return errors.SignalIndexError.epoch(found)
    return findings.MisalignedAccess.element(found, nbytes, first % nbytes)


def check_near(machine: Any, access: Access, kind: str) -> None:
    """Raise FarAccess if the memory belongs to a rank of another node than that of the current program."""
    region, task = access.region, machine.current
    if region.kind == "local" or region.rank // machine.node_size == task.rank // machine.node_size:
        return
    tensor = f"rank {region.rank}'s {region.element(access.first())}"
    found = accessed(task, kind, tensor, site())
    raise findings.FarAccess.device(found, region.rank, machine.node_size, _instead(kind))


def _instead(kind: str) -> str:
    """What to call where an access of this kind goes to a rank of another node."""
    if "TMA" in kind:
        return "TMA stays within a node: keep the tile in this rank's heap, and pl.put(nbytes=) sends it"
    if "load" in kind or kind == "wait":
        return "the network cannot be read through: let that rank put the data here, with pl.put_signal"
    if kind == "atomic":
        return "pl.signal adds to a counter of pkt.signals on any node"
    return "pl.put(dst=, src=, nbytes=, peer=, world=) sends a run of bytes to any node"


def bad_address(machine: Any, unmapped: Unmapped, kind: str) -> Exception:
    """The error of an access of the current program to an address that no live region holds."""
    space, address, at, rank = machine.space, unmapped.address, site(), machine.current.rank
    window = (address - space.base) // space.stride
    home = address - (window - rank) * space.stride  # the same place in the program's own window
    mine, exists = space.holding(home), 0 <= window < space.size

    def access(tensor: str) -> wording.Access:
        return accessed(machine.current, kind, tensor, at)

    if unmapped.region is not None:
        freed = unmapped.region
        return errors.UseAfterFree.device(access(f"rank {freed.rank}'s {freed.element(address)}"), freed.freed_at)
    if at.call == "epoch":
        return errors.SignalIndexError.epoch(access("memory that is no counter"))
    for distance in range(-space.size, space.size + 1):
        here = address - distance * space.stride
        local = space.holding(here)
        if local is not None and local.kind == "local":
            peer = f"rank {rank + distance}'s {local.element(here)}, a peer's copy of a plain tensor"
            return findings.OutOfBounds.outside(access(peer), f"allocate {local.name} with pkt.empty or its like")
    strayed = mine is not None and any(mine.base <= stray < mine.end for stray in machine.current.strays)
    if window == space.size and machine.multicast and not at.call and mine is not None and not strayed:
        return findings.MulticastAccess.plain(access(f"the multicast window at {mine.element(home)}"))
    origin = address - OUTSIDE * space.stride
    if (meant := space.holding(origin)) is not None:  # see `shortcuts.peer`
        found = f"a copy of {meant.element(origin)} on a rank that the team does not have"
        return findings.OutOfBounds.outside(access(found), "a team's peers are its own ranks, from 0")
    if not exists and mine is not None and abs(window) < FARTHEST:
        element, peers = f"rank {window}'s {mine.element(home)}", f"peers are ranks 0 to {space.size - 1}"
        return findings.OutOfBounds.outside(access(element), peers)
    heap = f"byte {address - space.window(window)} of rank {window}'s heap"
    hint = ""
    before, after = space.nearest(address), space.following(address)
    past = address - before.end + 1 if before is not None else space.stride
    short = after.base - address if after is not None else space.stride
    near = before if past <= short else after
    if near is not None and (near.rank == window if exists else min(past, short) < space.stride):
        apart = min(past, short)
        verb, side = ("ends", "before") if near is before else ("begins", "after")
        hint = f"nearest: {near.name} of rank {near.rank}, which {verb} {apart} byte{'s'[: apart > 1]} {side}"
    nowhere = "memory of no tensor" if hint and near.kind == "local" else "an address in no rank's heap"
    return findings.OutOfBounds.outside(access(heap if exists else nowhere), hint)
