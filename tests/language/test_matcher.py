"""The reading of PTX in `compiled` is sharp: every way to break a synchronisation changes the list that the tests
compare."""

import re
from types import SimpleNamespace

import pytest

from pkt.language.inspect import device_world

from . import test_sync as sync
from .compiled import body, compiled, order, waits

WORLD = device_world(0, 4)
KERNELS = {
    "signal": (sync.signal_kernel, "*i32", 3, WORLD, "add"),
    "signal_all": (sync.signal_all_kernel, "*i32", WORLD),
    "test": (sync.poll_kernel, "*i32", 7, WORLD, "ge"),
    "barrier": (sync.barrier_kernel, "*i32", WORLD),
    "grid_barrier": (sync.grid_barrier_kernel, "*i32", WORLD),
    "world_barrier": (sync.world_barrier_kernel, "*i32", WORLD),
    "quiet": (sync.quiet_kernel, "*i32", WORLD),
    "epoch": (sync.epoch_kernel, "*i32", WORLD),
    "wait": (sync.wait_kernel, "*i32", 7, WORLD, "ge"),
}
WEAKER = [
    ("without its fence", r"\n\s*(fence|cp\.async\.bulk\.wait_group)[^\n]*", ""),
    ("without its barriers", r"\n\s*bar\.sync[^\n]*", ""),
    ("at the scope of one GPU", r"\.sys\b", ".gpu"),
    ("at the scope of the system", r"\.gpu\b", ".sys"),
    ("relaxed", r"\.(release|acquire|acq_rel)\b", ".relaxed"),
    ("by all threads", r"@%p\d+ ((?:red|atom|ld|st)\.global)", r"\1"),
    ("waiting only for TMA's reads", r"bulk\.wait_group", "bulk.wait_group.read"),
    ("gone", r"\n[^\n]*(red|atom)\.global[^\n]*", ""),
]


def seen(kernel):
    return order(kernel), [[x.op for x in block] for block in waits(kernel)]


def mutants(kernel):
    """Yield (change, kernel) for each single change that `WEAKER` makes to the kernel's text."""
    ptx = kernel.asm["ptx"]
    text = body(kernel)
    for name, pattern, weaker in WEAKER:
        for match in re.finditer(pattern, text):
            changed = text[: match.start()] + match.expand(weaker) + text[match.end() :]
            yield f"{name}: {match[0].strip()}", SimpleNamespace(asm={"ptx": ptx.replace(text, changed)})


@pytest.mark.parametrize("name", list(KERNELS))
def test_each_weakening_changes_the_reading(name):
    kernel = compiled(*KERNELS[name])
    right = seen(kernel)
    number = 0
    for what, mutant in mutants(kernel):
        number += 1
        if seen(mutant) == right:
            # Triton 3.9 has a barrier of its own beside pkt's: one of the two may be missing, not both
            assert "bar.sync" in what, what
            assert len(re.findall(r"bar\.sync", body(kernel))) > right[0].count("bar.sync"), what
    assert number >= {"test": 2, "wait": 4}.get(name, 3)


def test_accesses_of_every_thread_are_not_read_as_those_of_one():
    kernel = compiled(*KERNELS["signal"])
    assert order(kernel)[-1].startswith("one:")
    everywhere = kernel.asm["ptx"].replace("setp.eq.b32", "setp.ne.b32")
    assert not order(SimpleNamespace(asm={"ptx": everywhere}))[-1].startswith("one:")
    once_a_warp = kernel.asm["ptx"].replace("%tid.x", "%laneid")
    assert not order(SimpleNamespace(asm={"ptx": once_a_warp}))[-1].startswith("one:")
