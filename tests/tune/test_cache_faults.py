"""Files of the cache that somebody else made: links, FIFOs, locks that are held, and whatever can stand in a file. Each
costs one warning at most, and changes nothing outside the cache."""

import fcntl
import json
import os
import random
import signal
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import pkt
from pkt.kernels import choosing, declaration
from pkt.kernels import operator as operators
from pkt.model import files
from pkt.model.config import Config
from pkt.model.gpu import H200
from pkt.runtime.processes import wire
from pkt.tune import cache
from pkt.tune.explanation import explain

from .helpers import OPERATORS

CASES = int(os.environ.get("PKT_FUZZ_CACHE", "300"))
"""Malformed caches; 10,000 take some minutes."""
MOST_SECONDS = 2.0  # of one case, which takes milliseconds
KEY = {"M": 4096, "N": 4096, "K": 4096, "dtype": "bf16", "size": 2}
WHAT = "matmul_all_reduce"


def world(size=2):
    """As much of a world of GPUs as the cache looks at."""
    backend = SimpleNamespace(timed=None, gpu=H200.name)
    return SimpleNamespace(backend=backend, size=size, num_sms=H200.sms, multicast=False)


def case(key=None):
    return cache.case(world(), "", KEY if key is None else key)


def both_ways(what=WHAT):
    """What is loaded before and after a store, and the warnings of pkt."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = cache.load(world(), what, case())
        cache.store(world(), what, case(), Config(mode="lcsc"), 1e-3)
        after = cache.load(world(), what, case())
    return before, after, [str(w.message) for w in caught]


class Hangs(BaseException):
    """Raised in a test that takes too long; no handler of errors takes it for one of theirs."""


@pytest.fixture(autouse=True)
def ends(request):
    """A test that hangs fails."""

    def late(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20 + CASES // 5 if "malformed" in request.node.name else 20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(own_cache):
    own_cache.mkdir()
    return own_cache


# ------------------------------------------------------------------------------------------------- links and devices
@pytest.mark.parametrize("suffix", ["", ".lock", ".new"])
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_no_symbolic_link_is_followed(folder, tmp_path, suffix, there):
    """The file behind the link is neither read, nor made, nor written, nor cut off."""
    target = tmp_path / "target"
    text = json.dumps({"format": 1, "choices": {case(): {"config": {"mode": "gluon"}, "seconds": 1.0}}})
    if there:
        target.write_text(text)
    (folder / f"{WHAT}.json{suffix}").symlink_to(target)
    before, after, said = both_ways()
    assert before is None
    if suffix == ".new":  # what a dead writer may have left: replaced
        assert (after, said) == (Config(mode="lcsc"), [])
        assert not (folder / f"{WHAT}.json").is_symlink()
    else:
        assert after is None
        assert len(said) == 1
        assert str(folder) in said[0]
    assert target.exists() == there
    assert not there or target.read_text() == text


@pytest.mark.parametrize("suffix", ["", ".lock"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_neither_blocks_nor_raises(folder, suffix, make):
    make(folder / f"{WHAT}.json{suffix}")
    start = time.monotonic()
    before, after, said = both_ways()
    assert (before, after, len(said)) == (None, None, 1)
    assert time.monotonic() - start < MOST_SECONDS


def test_a_hard_link_is_not_cut_off(folder, tmp_path):
    """Of any name that the cache writes: each may lead to a file of the user's."""
    (tmp_path / "mine").write_text("mine")
    for suffix in (".lock", ".new"):
        (folder / f"{WHAT}.json{suffix}").hardlink_to(tmp_path / "mine")
    assert both_ways() == (None, Config(mode="lcsc"), [])
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_that_is_held_costs_a_warning(folder, monkeypatch):
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with open(folder / f"{WHAT}.json.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        before, after, said = both_ways()
        assert 0.1 <= time.monotonic() - start < MOST_SECONDS
    assert (before, after) == (None, None)
    assert len(said) == 1
    assert "another process has held" in said[0]
    assert both_ways()[1:] == (Config(mode="lcsc"), [])


def test_a_lock_that_is_let_go_in_time_is_taken(folder, monkeypatch):
    held = open(folder / f"{WHAT}.json.lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: held.close())
    assert both_ways()[1:] == (Config(mode="lcsc"), [])


def test_a_file_that_is_too_long_is_not_read_or_written(folder, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 2000)
    path = folder / f"{WHAT}.json"
    path.write_text(json.dumps({"format": 1, "choices": {case(): {"config": {}, "seconds": 1.0}}}) + 2000 * " ")
    before, after, said = both_ways()
    assert (before, after, len(said)) == (None, None, 1)
    assert "longer than 2000 bytes" in said[0]
    path.unlink()
    cache._warned.clear()
    for number in range(20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache.store(world(), WHAT, case({"number": number}), Config(n=number), 1.0)
        assert path.stat().st_size <= 2000
        if caught:
            break
    assert number > 2
    assert "would be longer" in str(caught[0].message)
    assert cache.load(world(), WHAT, case({"number": 0})) == Config(n=0)


@pytest.mark.parametrize(
    "config", [Config(n=float("nan")), Config(n=1 << 64), Config(n="x" * 5000), Config(n="\ud800")]
)
def test_nothing_is_written_that_would_not_be_read(folder, config):
    cache.store(world(), WHAT, case(), Config(mode="lcsc"), 1.0)
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.store(world(), WHAT, case(), config, 1.0)
    assert cache.load(world(), WHAT, case()) == Config(mode="lcsc")


@pytest.mark.parametrize("given", ["~nobody-of-this-name/x", None])
def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # in no list of users
    if given is None:
        monkeypatch.delenv("PKT_TUNE_CACHE")
    else:
        monkeypatch.setenv("PKT_TUNE_CACHE", given)
    before, after, said = both_ways()
    assert (before, after, len(said)) == (None, None, 1)
    assert "set HOME or PKT_TUNE_CACHE" in said[0]
    assert cache.kept(WHAT, KEY, 2, {}) is None
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ bad settings
BAD = {
    "mode": {"mode": "pull"},
    "mode of another type": {"mode": [1]},
    "name": {"mode": "lcsc", "num_comm_sm": 4},
    "name of another form": {"mode": "lcsc", "lag": 4},
    "another type": {"mode": "lcsc", "num_comm_sms": "4"},
    "value": {"mode": "lcsc", "num_comm_sms": -1},
    "tiles": {"mode": "lcsc", "tiles": [3, 3, 3]},
    "tiles of another type": {"mode": "lcsc", "tiles": [[1], 2]},
    "without a mode": {"block": 3},
}


def called():
    """What a call of the operator gives on simulated ranks."""

    def main(world):
        a = torch.full((16, 16), 1.0 + world.rank, dtype=torch.bfloat16)
        return pkt.matmul_all_reduce(a, a)[0, 0].item()

    return pkt.launch(main, ranks=2, device="cpu")


@pytest.fixture
def tuned_on_cpu(monkeypatch):
    """Operators ask for tuned settings in the simulator, too."""
    monkeypatch.setattr(declaration.Call, "on_gpu", True)

    def give(settings):
        monkeypatch.setattr(choosing, "_advice", [lambda operator, key, world: settings])

    return give


@pytest.mark.parametrize("settings", BAD.values(), ids=BAD)
def test_bad_settings_are_dropped_with_a_warning(tuned_on_cpu, settings):
    """As if the caller had given them, they are refused; as nobody did, the operator goes on by its own rule."""
    tuned_on_cpu({})
    wanted = called()
    tuned_on_cpu({**Config(**settings)})
    with pytest.warns(UserWarning, match=f"settings that were tuned for {WHAT} are ignored"):
        assert called() == wanted


def test_a_form_that_needs_symmetric_operands_is_dropped_for_others(monkeypatch):
    """It is looked up after the operands were checked."""
    operator = operators.named(WHAT)
    forms = {**operator.forms, "lcsc": operator.forms["lcsc"]}
    forms["peers"] = replace(forms["lcsc"], symmetric=("a",), fits=lambda call: "")
    monkeypatch.setattr(operator, "forms", forms)
    monkeypatch.setattr(declaration.Call, "on_gpu", True)
    monkeypatch.setattr(choosing, "_advice", [lambda *_: {"mode": "peers"}])

    def main(world):
        a = torch.ones(16, 16, dtype=torch.bfloat16)
        return pkt.matmul_all_reduce(a, a)[0, 0].item()

    with pytest.warns(UserWarning, match="are ignored.*symmetric"):
        assert pkt.launch(main, ranks=2, device="cpu") == [32.0, 32.0]


# ------------------------------------------------------------------------------------------------------------- fuzzing
STRANGE = [
    None, True, False, 0, -1, 1 << 70, 1e308, float("nan"), float("inf"), "", "x" * 2000, "\ud800", "lcsc", "gluon",
    "nccl", "pull", [], {}, [[]], [[[[[[1]]]]]], {"config": {}}, [16, 16, 16], [128, 128, 64, 8, 8, 3, 0, 0, 0], "\x00",
    -(1 << 63),
]  # fmt: skip
MILD = [None, True, 0, 3, -1, 4.5, "lcsc", "x", [16, 16, 16], [128, 128, 64, 8, 8, 3, 0], [1, [2]], []]
"""What may stand in a file, though not for every setting."""
NAMES = ["mode", "tiles", "num_comm_sms", "lag", "split_k", "chunk", "self", "call", "", "\ud800", "value", "config"]


def strange_value(pick):
    value = pick.choice(STRANGE)
    return [strange_value(pick) for _ in range(pick.randrange(4))] if pick.random() < 0.1 else value


def strange_choice(pick, mild):
    if mild:
        settings = {pick.choice(NAMES[:6]): pick.choice(MILD) for _ in range(pick.randrange(3))}
        return {"config": settings | {"mode": pick.choice(["lcsc", "gluon", "nccl"])}, "seconds": 1e-3}
    if pick.random() < 0.1:
        return strange_value(pick)
    settings = {pick.choice(NAMES): strange_value(pick) for _ in range(pick.randrange(4))}
    if pick.random() < 0.6:
        settings["mode"] = pick.choice(["lcsc", "gluon", "low_latency", "unfused", "nccl", "pull"])
    choice = {"config": settings, "seconds": 1e-3, "date": "2026-11-22"}
    if pick.random() < 0.3:
        choice[pick.choice(["config", "seconds", "date", "more"])] = strange_value(pick)
    if pick.random() < 0.1:
        del choice[pick.choice(list(choice))]
    return choice


def strange_file(pick):
    """The bytes of a cache that is broken in some way, or in none."""
    texts = [case(), "", "[]", "null", "1", "{", "[" * 3000, '{"key": {}}', "\ud800", case().replace("H200", "B200")]
    mild = pick.random() < 0.5
    choices = {text: strange_choice(pick, mild) for text in [case(), *pick.sample(texts, pick.randrange(4))]}
    content = {"format": 1, "choices": choices}
    if mild:
        return json.dumps(content).encode()
    if pick.random() < 0.15:
        content[pick.choice(["format", "choices"])] = strange_value(pick)
    written = json.dumps(strange_value(pick) if pick.random() < 0.05 else content).encode()
    broken = pick.randrange(12)
    if broken == 0:
        written = written[: pick.randrange(len(written))]
    elif broken == 1:
        at = pick.randrange(len(written))
        written = written[:at] + bytes(pick.randrange(256) for _ in range(pick.randrange(1, 9))) + written[at + 1 :]
    elif broken == 2:
        deep = pick.choice([b"[", b'{"a":', b'{"format": 1, "choices": {"x": ']) * pick.choice([1, 900, 100_000])
        written = deep + pick.choice([b"", b"1"])
    elif broken == 3:
        written = b'{"format": 1, "choices": {"x": {"config": {"n": ' + b"9" * 6000 + b"}}}}"
    return written


def test_a_malformed_cache_costs_no_more_than_a_warning(folder, monkeypatch, capsys):
    """Looked up, explained, checked by the operator and tuned anew: no exception other than pkt's, which the operator
    turns into a warning, and no hang."""
    path = folder / f"{WHAT}.json"
    operator = OPERATORS[WHAT]
    counts = {"read": 0, "refused by the operator": 0, "written": 0, "warned": 0}
    worst = 0.0
    for seed in range(CASES):
        pick = random.Random(seed)
        written = strange_file(pick)
        path.write_bytes(written)
        cache._warned.clear()
        start = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = cache.load(world(), WHAT, case())
                if found is not None:
                    counts["read"] += 1
                    assert Config(**wire.decode(wire.encode(dict(found.settings)))) == found
                    try:
                        operator.settled(operator.describe(KEY, H200), found)
                    except pkt.PktError:
                        counts["refused by the operator"] += 1
                explain(WHAT, **{name: KEY[name] for name in "MNK"}, size=2, gpu=H200.name)
                cache.store(world(), WHAT, case(), Config(mode="lcsc"), 1e-3)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {written[:300]!r}") from error
        capsys.readouterr()
        worst = max(worst, time.monotonic() - start)
        assert worst < MOST_SECONDS, f"seed {seed}: {written[:300]!r}"
        assert len(caught) <= 1, (seed, [str(w.message) for w in caught])
        counts["warned"] += len(caught)
        stored = path.read_bytes() != written
        counts["written"] += stored
        assert stored == (cache.load(world(), WHAT, case()) == Config(mode="lcsc")) or found == Config(mode="lcsc"), (
            seed
        )
        assert stored or caught or found == Config(mode="lcsc"), seed
    with capsys.disabled():
        print(f"\n{CASES} caches: {counts}, at most {1e3 * worst:.0f} ms each")
    assert all(counts.values())
