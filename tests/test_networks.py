"""What `pkt doctor` finds for several nodes, in made-up trees of /sys, /proc and /dev."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from rich.console import Console

from pkt import doctor, networks

Slot = tuple[str, ...]  # the bridges and switches above a device, and its address
GOOD = [("pci0000:10", "0000:10:01.0", f"0000:{at}:00.0") for at in range(11, 15)]


def tree(root: Path, gpus: list[Slot], cards: list[tuple[Slot, str]], params: str = "", gdrdrv: bool = False) -> Path:
    """A host with GPUs and cards at places of the PCI tree. cards: with the state of their port."""
    folders = [root / "sys/bus/pci/devices", root / "sys/class/infiniband", root / "dev", root / "proc/driver/nvidia"]
    for folder in folders:
        folder.mkdir(parents=True)
    devices, classes, dev, driver = folders
    for place in gpus:
        folder = root.joinpath("sys/devices", *place)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (devices / place[-1]).symlink_to(folder)
    bridge = root / "sys/devices/other/0000:ff:00.0"  # an NVSwitch: NVIDIA's, and no GPU
    bridge.mkdir(parents=True)
    (bridge / "vendor").write_text("0x10de\n")
    (bridge / "class").write_text("0x068000\n")
    (devices / bridge.name).symlink_to(bridge)
    for number, (place, state) in enumerate(cards):
        folder = root.joinpath("sys/devices", *place)
        folder.mkdir(parents=True, exist_ok=True)
        port = classes / f"mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (classes / f"mlx5_{number}/device").symlink_to(folder)
    if params:
        (driver / "params").write_text(params)
    if gdrdrv:
        (dev / "gdrdrv").write_text("")
    return root


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The distributions that are installed, by name; empty at first."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(networks.importlib.metadata, "version", version)
    return found


def beside(slots: list[Slot], by: int = 100) -> list[Slot]:
    """Places behind the same switches."""
    return [(*slot[:-1], f"0000:{by + at:02x}:00.0") for at, slot in enumerate(slots)]


def page(found: networks.Fabric) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        doctor._show_fabric(found, console)
    return captured.get()


def test_a_host_without_any_network(tmp_path: Path, packages: dict[str, str]) -> None:
    found = networks.examine(tree(tmp_path, [], []))
    assert found.bare
    assert page(found).splitlines() == [
        "Several nodes: no network card, NVSHMEM, IBGDA or GDRCopy here.",
        "Worlds of several nodes have never run over a network (docs/scale-out.md).",
    ]
    assert networks.examine(tmp_path / "nothing").bare


def test_a_host_that_lacks_nothing(tmp_path: Path, packages: dict[str, str]) -> None:
    packages |= {"nvidia-nvshmem-cu13": "3.4.5"}
    slots = [(f"pci0000:{at:02x}", f"0000:{at:02x}:01.0", f"0000:{at + 1:02x}:00.0") for at in (16, 32, 48, 64)]
    cards = [(place, "4: ACTIVE") for place in reversed(beside(slots))]
    params = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
    found = networks.examine(tree(tmp_path, slots, cards, params, gdrdrv=True))
    assert (found.lacks, found.bare) == ((), False)
    rows = dict(found.rows)
    assert rows["NVSHMEM"] == "nvidia-nvshmem-cu13 3.4.5"
    assert rows["network cards"].splitlines()[0] == "mlx5_0: 400 Gb/s InfiniBand"
    assert rows["nearest to each GPU"].splitlines() == [
        f"{slot[-1]}: mlx5_{3 - at}, behind one PCI switch" for at, slot in enumerate(slots)
    ]
    assert rows["rails: local rank and card"].splitlines() == [
        "0 mlx5_3, 1 mlx5_2, 2 mlx5_1, 3 mlx5_0",
        "wanted: the same on every host",
    ]
    assert "have never run over a network" in page(found)


def test_a_version_that_kernels_are_not_linked_with(tmp_path: Path, packages: dict[str, str]) -> None:
    packages |= {"nvidia-nvshmem-cu12": "3.8.0"}
    (found,) = [line for line in networks.examine(tree(tmp_path, [], [])).lacks if "NVSHMEM of" in line]
    assert found == (
        "NVSHMEM of a version that was tried, not one whose bitcode is newer than the LLVM of Triton 3.6: "
        "pip install 'nvidia-nvshmem-cu12==3.4.5'"
    )


def test_what_is_missing_is_named(tmp_path: Path, packages: dict[str, str]) -> None:
    slots = [("pci0000:10", "0000:10:01.0", "0000:11:00.0"), ("pci0000:20", "0000:20:01.0", "0000:21:00.0")]
    cards = [(place, "4: ACTIVE") for place in beside(slots)[:1]] + [(beside(slots)[1], "1: DOWN")]
    found = networks.examine(tree(tmp_path, slots, cards, 'RegistryDwords: ""\n'))
    assert not found.bare
    text = page(found)
    for wanted in (
        "NVSHMEM: pip install 'pkt-triton[nvshmem]'",
        'IBGDA: load the driver with options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"',
        "GDRCopy: install it",
        "a card for each GPU: 2 GPUs, and cards that are up: 1; mlx5_0 has 2 GPUs, which share its link",
        "mlx5_1: 400 Gb/s InfiniBand, down",
        "0000:21:00.0: mlx5_0, on the same host",
        "0 mlx5_0, 1 mlx5_0",
    ):
        assert wanted in text, (wanted, text)


def test_gpus_without_a_card_or_with_far_ones(tmp_path: Path, packages: dict[str, str]) -> None:
    found = networks.examine(tree(tmp_path / "none", GOOD, []))
    assert "network cards: none is up, so no GPU has one" in found.lacks
    far = [(("pci0000:80", f"0000:80:0{at}.0", f"0000:8{at}:00.0"), "4: ACTIVE") for at in range(1, 5)]
    found = networks.examine(tree(tmp_path / "far", GOOD, far))
    assert "near cards: GPUs that reach theirs through the host's processors alone: 4 of 4" in found.lacks


def test_cards_that_are_as_near_are_shared_evenly(tmp_path: Path, packages: dict[str, str]) -> None:
    cards = [(place, "4: ACTIVE") for place in beside(GOOD)]
    found = networks.examine(tree(tmp_path, GOOD, cards))
    names = [line.split(": ")[1].split(",")[0] for line in dict(found.rows)["nearest to each GPU"].splitlines()]
    assert sorted(names) == [f"mlx5_{at}" for at in range(4)]


def test_rails_that_differ_are_named(tmp_path: Path, packages: dict[str, str]) -> None:
    root = tree(tmp_path, GOOD, [(place, "4: ACTIVE") for place in beside(GOOD)])
    assert not [lack for lack in networks.examine(root).lacks if "rails" in lack]
    (root / "sys/class/infiniband/mlx5_2/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    (root / "sys/class/infiniband/mlx5_3/ports/1/link_layer").write_text("Ethernet\n")
    (lack,) = [lack for lack in networks.examine(root).lacks if "rails" in lack]
    assert "found cards of 400 Gb/s InfiniBand and 200 Gb/s InfiniBand and 400 Gb/s Ethernet; collectives" in lack


def test_a_host_without_a_card_that_is_up_has_no_rails(tmp_path: Path, packages: dict[str, str]) -> None:
    found = networks.examine(tree(tmp_path, GOOD, [(place, "1: DOWN") for place in beside(GOOD)]))
    assert not [what for what, _ in found.rows if "rails" in what or "nearest" in what]
