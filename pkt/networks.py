"""What this host has for a network between nodes, for `pkt doctor`, read from /sys, /proc and /dev.

A rail joins the ranks with one local rank, one from each host (docs/scale-out.md). So each rank wants a card of its
own, in one order on every host.

NVSHMEM uses it, in worlds of several nodes (docs/scale-out.md). What it needs is from NVIDIA's NVSHMEM Installation
Guide, "Software Requirements". Tested with made-up trees, on no host with a network.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pkt.language.ptx import nvshmem

NVIDIA, DISPLAY = "0x10de", "0x03"  # a PCI device's vendor, and how the class of one that draws or computes begins
SWITCH, BRIDGE, HOST = "behind one PCI switch", "below one host bridge", "on the same host"


@dataclass(frozen=True)
class Nic:
    """A port of a network card that can write to memory of others. gigabits: a second. up: it has a link."""

    name: str
    gigabits: float
    layer: str
    up: bool


@dataclass(frozen=True)
class Fabric:
    """rows: (what, found) for a table. lacks: what is missing, each with a remedy. bare: the host has none of it."""

    rows: tuple[tuple[str, str], ...]
    lacks: tuple[str, ...]
    bare: bool


def examine(root: Path = Path("/")) -> Fabric:
    """What the host has. root: where sys, proc and dev are."""
    nics, gpus = _nics(root), _gpus(root)
    rows, lacks = [], []
    found = _installed(nvshmem.PACKAGES)
    rows.append(("NVSHMEM", found or "not installed"))
    if not found:
        lacks.append(f"NVSHMEM: {nvshmem.INSTALL}")
    elif why := nvshmem.refusal(found.split()[1]):
        package = found.split()[0]
        lacks.append(
            f"NVSHMEM of a version that was tried, not one {why}: pip install '{package}=={nvshmem.TRIED[-1]}'"
        )
    ibgda, remedy = _ibgda(root)
    gdrcopy = (root / "dev/gdrdrv").exists()
    peer_memory = (root / "sys/module/nvidia_peermem").exists()
    rows.append(("IBGDA: GPUs that drive a network card", ibgda))
    rows.append(("GDRCopy", "its driver is loaded" if gdrcopy else "no /dev/gdrdrv"))
    rows.append(("nvidia_peermem", "loaded" if peer_memory else "not loaded"))
    lacks += [remedy] if remedy else []
    if not gdrcopy:
        lacks.append("GDRCopy: install it, and load its driver gdrdrv; NVSHMEM's atomics over a network need it")
    ports = [f"{nic.name}: {nic.gigabits:g} Gb/s {nic.layer}{'' if nic.up else ', down'}" for nic in nics.values()]
    rows.append(("network cards", "\n".join(ports) or "none in /sys/class/infiniband"))
    mapped, rails, wrong = _rails(gpus, {place: nic for place, nic in nics.items() if nic.up})
    if rails:
        rows.append(("nearest to each GPU", "\n".join(mapped)))
        cards = ", ".join(f"{local} {nic.name}" for local, nic in enumerate(rails))
        rows.append(("rails: local rank and card", f"{cards}\nwanted: the same on every host"))
    lacks += wrong
    bare = not (nics or gdrcopy or peer_memory or found) and bool(remedy)
    return Fabric(tuple(rows), tuple(lacks), bare)


def _installed(names: Sequence[str]) -> str:
    """Name and version of the first that is installed; "" if none is."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def _text(path: Path) -> str:
    """What a small file says; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _ibgda(root: Path) -> tuple[str, str]:
    """(whether the driver lets GPUs map a network card, the remedy or "")."""
    options = _text(root / "proc/driver/nvidia/params")
    if re.search(r"PeerMappingOverride=1\b", options):
        return "the driver has PeerMappingOverride=1", ""
    remedy = 'IBGDA: load the driver with options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"'
    return ("the driver has no PeerMappingOverride=1" if options else "no NVIDIA driver in /proc"), remedy


def _gpus(root: Path) -> list[Path]:
    """Where the GPUs are in the tree of PCI devices, in the order of their addresses."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    ours = [d for d in devices if _text(d / "vendor") == NVIDIA and _text(d / "class").startswith(DISPLAY)]
    return [device.resolve() for device in ours]


def _nics(root: Path) -> dict[Path, Nic]:
    """The ports with a number 1, by where their card is in the tree of PCI devices."""
    found = {}
    for card in sorted((root / "sys/class/infiniband").glob("*")):
        port = card / "ports/1"
        rate = re.match(r"[\d.]+", _text(port / "rate"))  # "400 Gb/sec (4X NDR)"
        up = "ACTIVE" in _text(port / "state")  # "4: ACTIVE"
        layer = _text(port / "link_layer") or "unknown"
        found[(card / "device").resolve()] = Nic(card.name, float(rate[0]) if rate else 0.0, layer, up)
    return found


def _near(gpu: Path, card: Path) -> tuple[int, str]:
    """(how many steps of the tree of devices they share, in words)."""
    shared = [a for a, b in zip(gpu.parts, card.parts) if a == b]
    if any(re.match(r"[0-9a-f]{4}:[0-9a-f]{2}:", part) for part in shared):
        return len(shared), SWITCH
    return len(shared), BRIDGE if any(part.startswith("pci") for part in shared) else HOST


def _rails(gpus: Sequence[Path], nics: dict[Path, Nic]) -> tuple[list[str], list[Nic], list[str]]:
    """(each GPU's nearest card in words, the card of each local rank, what is wrong). Cards that are as near go to the
    GPUs in turn. Local ranks are taken to have the GPUs in the order of their PCI addresses."""
    if not gpus:
        return [], [], []
    if not nics:
        return [], [], ["network cards: none is up, so no GPU has one"]
    lines, used = [], dict.fromkeys(nics, 0)
    far, rails = [], []
    for number, gpu in enumerate(gpus):
        card = min(nics, key=lambda place: (-_near(gpu, place)[0], used[place], place))
        used[card] += 1
        words = _near(gpu, card)[1]
        lines.append(f"{gpu.name}: {nics[card].name}, {words}")
        rails.append(nics[card])
        far += [number] if words == HOST else []
    wrong = []
    if shared := [f"{nics[place].name} has {count}" for place, count in used.items() if count > 1]:
        found = f"{len(gpus)} GPUs, and cards that are up: {len(nics)}; {', '.join(shared)}"
        wrong.append(f"a card for each GPU: {found} GPUs, which share its link")
    if far and not shared:
        wrong.append(
            f"near cards: GPUs that reach theirs through the host's processors alone: {len(far)} of {len(gpus)}"
        )
    if len(kinds := dict.fromkeys(f"{nic.gigabits:g} Gb/s {nic.layer}" for nic in rails)) > 1:
        wrong.append(f"rails alike: found cards of {' and '.join(kinds)}; collectives are as fast as the slowest rail")
    return lines, rails, wrong
