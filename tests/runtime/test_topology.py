"""GPUs that cannot work together are refused before anything is allocated.

The error names the pair at fault and shows the matrix of all pairs.
"""

import random

import pytest

from pkt.errors import Unsupported
from pkt.runtime.gpu.sharing import device_of
from pkt.runtime.gpu.topology import OFF_SWITCHES, assemble, multicast_off, node_size, probe
from pkt.runtime.gpu.votes import Votes

from .fake_driver import FakeDriver, FakeGpu


def topology(gpus, hosts=None):
    """The topology of `gpus`, one per rank. hosts: each rank's host; with it a rank sees only the GPUs of its host."""
    if hosts is None:
        return assemble([probe(FakeDriver(r, gpus=gpus), r, "host", spans=False) for r in range(len(gpus))])
    here = [[gpu for gpu, host in zip(gpus, hosts, strict=True) if host == mine] for mine in hosts]
    return assemble(
        [
            probe(FakeDriver(r, gpus=here[r]), here[r].index(gpus[r]), hosts[r], spans=len(set(hosts)) > 1)
            for r in range(len(gpus))
        ]
    )


def gpus(count, **attributes):
    return [FakeGpu(f"uuid-{i}", attributes=dict(attributes)) for i in range(count)]


def test_a_good_topology_passes_and_prints():
    found = topology(gpus(3))
    found.check()
    assert found.matrix().splitlines()[1].split() == ["rank", "0", "0", "FakeGPU", "-", "yes", "yes"]


@pytest.mark.parametrize("seed", range(50))
def test_50_topologies(seed):
    """One random pair without access or atomics: that pair is named, and the matrix has exactly that cell."""
    pick = random.Random(seed)
    count = pick.randint(2, 8)
    some = gpus(count)
    here, there = pick.sample(range(count), 2)
    access = pick.random() < 0.5
    some[here].peers = {there: (access, False)}
    with pytest.raises(Unsupported) as caught:
        topology(some).check()
    what = "no native atomics" if access else "no peer access"
    head, *matrix = str(caught.value).splitlines()
    assert head.startswith(f"pkt.init: GPU {here} -> {there}: {what}: ")
    cells = [line.replace("no access", "no").replace("no atomics", "no").split()[4:] for line in matrix[1:]]
    assert [(a, b) for a, row in enumerate(cells) for b, cell in enumerate(row) if cell == "no"] == [(here, there)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: setattr(g[1], "uuid", "uuid-0"), "ranks 0 and 1 are on the same GPU"),
        (lambda g: setattr(g[1], "name", "H100 MIG 1g.10gb"), "rank 1 is on a MIG slice"),
        (
            lambda g: g[1].attributes.update(COMPUTE_CAPABILITY_MAJOR=10),
            "rank 0 is on a FakeGPU and rank 1 on a FakeGPU",
        ),
        (
            lambda g: g[0].attributes.update(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=0),
            "rank 0's GPU .* has no virtual memory",
        ),
        (
            lambda g: g[1].attributes.update(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=0),
            "rank 1's GPU .* has no POSIX",
        ),
        (lambda g: g[1].attributes.update(COOPERATIVE_LAUNCH=0), "rank 1's GPU .* has no cooperative launch"),
    ],
)
def test_topologies_that_cannot_work_are_refused(change, message):
    some = gpus(2)
    change(some)
    with pytest.raises(Unsupported, match=message):
        topology(some).check()


def on_two_hosts():
    """Two GPUs on host a and one on host b, in one NVLink domain, without POSIX descriptors."""
    some = gpus(3, HANDLE_TYPE_FABRIC_SUPPORTED=1, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=0)
    for gpu in some:
        gpu.domain = "c1/7"
    return some


def test_two_hosts_of_one_domain():
    found = topology(on_two_hosts(), "aab")
    found.check()
    assert found.spans
    assert found.matrix().splitlines()[3].split() == "rank 2 0 FakeGPU b yes c1/7 ? ? -".split()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda gpu: gpu.attributes.update(HANDLE_TYPE_FABRIC_SUPPORTED=0), "has no fabric handles"),
        (lambda gpu: setattr(gpu, "domain", ""), "is in no NVLink domain that spans hosts"),
        (lambda gpu: setattr(gpu, "domain", "c1/8"), "is in NVLink domain c1/8 and rank 0's in c1/7"),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_two_hosts_that_nvlink_does_not_join(rank, change, why):
    some = on_two_hosts()
    change(some[rank])
    message = rf"rank 0 runs on host a and rank 2 on b, but rank {rank}'s GPU \(FakeGPU\) {why}: .*nvidia-imex"
    with pytest.raises(Unsupported, match=message) as caught:
        topology(some, "aab").check()
    assert [line.split()[4] for line in str(caught.value).splitlines()[2:]] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("hosts", "domains", "wanted"),
    [
        ("aabb", ["", "", "", ""], 2),
        ("abcd", ["", "", "", ""], 1),
        ("aabb", ["c/1", "c/1", "c/1", "c/1"], 4),
        ("abcd", ["c/1", "c/1", "c/2", "c/2"], 2),
        ("aaaa", ["c/1", "", "", ""], 4),  # one host: nobody asks
        ("aaab", ["", "", "", ""], 4),  # unequal nodes, or ranks that do not follow each other: Topology.check refuses
        ("aabbb", ["", "", "", "", ""], 5),
        ("abab", ["", "", "", ""], 4),
    ],
)
def test_a_host_or_an_nvlink_domain_is_a_node(hosts, domains, wanted):
    class Everybody:
        """Votes and transport of a rank, to which the others say what their GPUs are."""

        rank = 0
        check = Votes.check
        attempt = Votes.attempt

        @property
        def transport(self):
            return self

        def exchange(self, mine, what):
            assert mine == {"value": domains[0]}
            return [{"value": domain} for domain in domains]

    driver = FakeDriver(0, gpus=[FakeGpu("uuid", domain=domains[0])])
    assert node_size(Everybody(), driver, 0, [f"host {host}" for host in hosts]) == wanted


def test_on_one_host_the_nvlink_domain_is_not_asked_for():
    driver = FakeDriver(0)
    probe(driver, 0, "a", spans=False)
    assert driver.calls["domain"] == 0


def test_gpus_that_a_process_does_not_see_are_not_refused():
    alone = [[FakeGpu(f"uuid-{r}")] for r in range(2)]  # CUDA_VISIBLE_DEVICES=r in each process
    found = assemble([probe(FakeDriver(r, gpus=alone[r]), 0, "host", spans=False) for r in range(2)])
    found.check()
    assert "?" in found.matrix()


def test_multicast_needs_every_gpu(monkeypatch):
    for name in OFF_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    some = gpus(3, MULTICAST_SUPPORTED=1)
    assert topology(some).multicast
    some[2].attributes["MULTICAST_SUPPORTED"] = 0
    assert not topology(some).multicast


def test_off_switches():
    assert multicast_off({}) == ""
    for name, value in OFF_SWITCHES.items():
        assert multicast_off({name: value}) == f"{name}={value}"
        assert multicast_off({name: "1" if value == "0" else "0"}) == ""


def test_ranks_share_a_gpu_only_where_all_of_them_ask_for_it(monkeypatch):
    some = gpus(3)
    some[1].uuid = some[2].uuid = "uuid-0"
    monkeypatch.setenv("PKT_SHARE_GPU", "1")
    probes = [probe(FakeDriver(r, gpus=some), r, "host", spans=False) for r in range(3)]
    assert not assemble(probes).multicast
    assemble(probes).check()
    probes[2]["gpu"]["may_share"] = False
    with pytest.raises(Unsupported, match=r"ranks 0 and 2 are on the same GPU .* set PKT_SHARE_GPU=1 on every rank"):
        assemble(probes).check()


@pytest.mark.parametrize(("share", "devices"), [("", [0, 1, 2]), ("1", [0, 1, 0])])
def test_ranks_take_shared_gpus_in_turns(share, devices, monkeypatch):
    monkeypatch.setenv("PKT_SHARE_GPU", share)
    assert [device_of(rank, 2) for rank in range(3)] == devices
