"""Whether the GPUs of a world can work together, found out before anything is created.

A refusal prints the whole matrix, so that one message shows which pairs are at fault and which are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pkt.errors import Unsupported
from pkt.runtime.gpu.driver import CudaDriver
from pkt.runtime.gpu.sharing import may_share
from pkt.runtime.gpu.votes import Votes
from pkt.wording import table

# Each of these turns multicast off before any call of the driver: pkt's switch, and those of other libraries.
OFF_SWITCHES = {
    "PKT_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
ACROSS = (
    "ranks on several hosts need GPUs of one NVLink domain (GB200 NVL72) with nvidia-imex running on every host, or "
    "as many ranks on each host, in order, which then are nodes over NVSHMEM; otherwise make a world a host, "
    "pkt.init(group=)"
)


def multicast_off(environment: Mapping[str, str] = os.environ) -> str:
    """The switch that turns multicast off ("NCCL_NVLS_ENABLE=0"); "" if none does."""
    for name, value in OFF_SWITCHES.items():
        if environment.get(name, "").strip() == value:
            return f"{name}={value}"
    return ""


@dataclass(frozen=True)
class Gpu:
    """One rank's GPU. `device` is its ordinal in that rank's process, -1 if the process does not see it."""

    device: int
    uuid: str
    name: str
    num_sms: int
    capability: tuple[int, int]
    virtual_memory: bool
    posix_fds: bool
    fabric_handles: bool
    cooperative_launch: bool
    multicast: bool  # supported and not switched off; whether it is used is a vote
    may_share: bool = False  # with another rank
    host: str = ""
    domain: str = ""  # of NVLink over several hosts, "cluster/clique"; "" if ranks are on one host


@dataclass(frozen=True)
class Link:
    """What one GPU can do in another's memory; None if the process does not see the other GPU."""

    access: bool | None
    atomics: bool | None


@dataclass(frozen=True)
class Topology:
    """The GPUs by rank, and links[a][b]: what rank a's GPU can do in rank b's memory."""

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[Link, ...], ...]

    @property
    def spans(self) -> bool:
        """Whether the ranks are on several hosts."""
        return len({gpu.host for gpu in self.gpus}) > 1

    @property
    def multicast(self) -> bool:
        """Whether every GPU supports it; whether it is used is a vote."""
        return all(gpu.multicast for gpu in self.gpus)

    def access(self, a: int, b: int) -> str:
        """What rank a's GPU can do in rank b's memory, in a word or two."""
        link = self.links[a][b]
        if a == b or link.access is None:
            return "-" if a == b else "?"
        return "no access" if not link.access else "no atomics" if link.atomics is False else "yes"

    def matrix(self) -> str:
        """A line per rank: its GPU, its fabric if there are several hosts, its access to each other rank's memory."""
        rows = []
        for a, gpu in enumerate(self.gpus):
            cells = [self.access(a, b) for b in range(len(self.gpus))]
            fabric = (gpu.host, "yes" if gpu.fabric_handles else "no", gpu.domain or "none") if self.spans else ()
            rows.append((f"rank {a}", gpu.device, gpu.name, *fabric, *cells))
        fabric = ("host", "fabric handles", "NVLink domain") if self.spans else ()
        return table(("", "GPU", "model", *fabric, *(f"-> {r}" for r in range(len(self.gpus)))), rows)

    def check(self, one_node: bool = True) -> None:
        """Raise Unsupported, with the matrix, if the GPUs cannot work together. one_node: each reaches the memory of
        all. Otherwise those of one host do: over what else NVSHMEM reaches them was never tried."""
        problem = self._problem(one_node)
        if problem:
            found, remedy = problem
            raise Unsupported.here("pkt.init", found, f"{remedy}\n{self.matrix()}")

    def _problem(self, one_node: bool) -> tuple[str, str] | None:
        owner: dict[str, int] = {}
        first = self.gpus[0]
        for rank, gpu in enumerate(self.gpus):
            other = owner.setdefault(gpu.uuid, rank)
            if other != rank and not (gpu.may_share and self.gpus[other].may_share):
                found = f"ranks {other} and {rank} are on the same GPU ({gpu.name})"
                remedy = "give every rank a GPU of its own: torch.cuda.set_device(local_rank)"
                return found, f"{remedy}; to test a program slowly on fewer GPUs, set PKT_SHARE_GPU=1 on every rank"
            if "MIG" in gpu.name:
                found = f"rank {rank} is on a MIG slice ({gpu.name})"
                return found, "slices have no peer access: turn MIG off or use whole GPUs"
            for what, has in (
                ("virtual memory management", gpu.virtual_memory),
                ("POSIX file descriptor handles", gpu.posix_fds or self.spans),
                ("cooperative launch", gpu.cooperative_launch),
            ):
                if not has:
                    found = f"rank {rank}'s GPU ({gpu.name}) has no {what}"
                    return found, "use GPUs of compute capability 9.0 or later"
            if gpu.capability != first.capability:
                found = f"rank 0 is on a {first.name} and rank {rank} on a {gpu.name}"
                return found, "a world needs GPUs of one compute capability: choose them with CUDA_VISIBLE_DEVICES"
        for a, row in enumerate(self.links):
            for b, link in enumerate(row):
                pair = f"GPU {self.gpus[a].device} -> {self.gpus[b].device}"
                if a != b and link.access is False:
                    return f"{pair}: no peer access", "ranks need GPUs joined by NVLink, or PCIe with P2P enabled"
                if a != b and link.atomics is False:
                    return f"{pair}: no native atomics", "signals need NVLink between the ranks' GPUs"
        return self._apart() if self.spans and one_node else None

    def _apart(self) -> tuple[str, str] | None:
        """Why ranks on several hosts cannot reach each other's memory, and a remedy; None if they can."""
        first = self.gpus[0]
        away = next(rank for rank, gpu in enumerate(self.gpus) if gpu.host != first.host)
        ranks = f"rank 0 runs on host {first.host} and rank {away} on {self.gpus[away].host}"
        for rank, gpu in enumerate(self.gpus):
            for what, has in (
                ("has no fabric handles", gpu.fabric_handles),
                ("is in no NVLink domain that spans hosts", gpu.domain),
                (f"is in NVLink domain {gpu.domain} and rank 0's in {first.domain}", gpu.domain == first.domain),
            ):
                if not has:
                    return f"{ranks}, but rank {rank}'s GPU ({gpu.name}) {what}", ACROSS
        return None


def probe(driver: CudaDriver, device: int, host: str, spans: bool) -> dict[str, Any]:
    """This rank's GPU, and its links to every GPU that this process sees, by uuid, as JSON values.

    spans: also ask NVML for the GPU's NVLink domain."""
    flag = driver.attribute
    major, minor = flag(device, "COMPUTE_CAPABILITY_MAJOR"), flag(device, "COMPUTE_CAPABILITY_MINOR")
    gpu = Gpu(
        device=device,
        uuid=driver.uuid(device),
        name=driver.name(device),
        num_sms=flag(device, "MULTIPROCESSOR_COUNT"),
        capability=(major, minor),
        virtual_memory=bool(flag(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        posix_fds=bool(flag(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        fabric_handles=bool(flag(device, "HANDLE_TYPE_FABRIC_SUPPORTED")),
        cooperative_launch=bool(flag(device, "COOPERATIVE_LAUNCH")),
        multicast=not (multicast_off() or may_share()) and bool(flag(device, "MULTICAST_SUPPORTED")),
        may_share=may_share(),
        host=host,
        domain=driver.domain(device) if spans else "",
    )
    links = {
        driver.uuid(peer): [
            bool(driver.p2p(device, peer, "ACCESS_SUPPORTED")),
            bool(driver.p2p(device, peer, "NATIVE_ATOMIC_SUPPORTED")),
        ]
        for peer in range(driver.device_count())
        if peer != device
    }
    return {"gpu": asdict(gpu), "links": links}


def node_size(votes: Votes, driver: CudaDriver, device: int, hosts: Sequence[str]) -> int:
    """Collective: the number of ranks of a node, of which a host or an NVLink domain over several hosts is one; all
    ranks where the nodes would be unequal, or their ranks not follow each other: `Topology.check` then says why not."""
    size = len(hosts)
    if len(set(hosts)) == 1:
        return size
    said = votes.transport.exchange(votes.attempt(lambda: driver.domain(device)), "NVLink domains")
    votes.check(said, "NVLink domains")
    places = [one["value"] or host for one, host in zip(said, hosts, strict=True)]
    count = len(set(places))
    near = size // count
    equal = all(len(set(places[first : first + near])) == 1 for first in range(0, size, near))
    return near if size % count == 0 and equal else size


def assemble(probes: Sequence[Mapping[str, Any]]) -> Topology:
    """The topology of a world from every rank's probe, in rank order."""
    gpus = tuple(Gpu(**{**p["gpu"], "capability": tuple(p["gpu"]["capability"])}) for p in probes)
    rows = []
    for mine, gpu in zip(probes, gpus, strict=True):
        known = {**mine["links"], gpu.uuid: (True, True)}
        rows.append(tuple(Link(*known.get(peer.uuid, (None, None))) for peer in gpus))
    return Topology(gpus, tuple(rows))
