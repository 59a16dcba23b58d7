"""The cache of choices: its keys, the ranks that read and write it, and files that others write or break."""

import datetime
import importlib.metadata
import json
import os
import warnings
from types import SimpleNamespace

import pytest

from pkt.model.config import Config
from pkt.tune import autotune, cache, choice, tune
from pkt.tune.target import Target
from tests.runtime.conftest import run as in_threads
from tests.runtime.forked import in_worlds
from tests.runtime.forked import run as in_processes

from .helpers import Rough, anything, candidates


def tuned(size=1, key=None, name="op", best=2, **options):
    """Tune `name` on threads so that Config(n=best) is chosen."""

    def main(world):
        return tune(
            anything, configs=candidates(4), key=key or {}, name=name,
            timer=lambda w: Rough(w, lambda n: 1.0 + abs(n - best)), **options,
        )  # fmt: skip

    return in_threads(size, main)[0]


def looked_up(size=1, key=None, name="op"):
    return in_threads(size, lambda world: choice(name, key or {}, world))


def content(folder, name="op"):
    return json.loads((folder / f"{name}.json").read_text())


# ------------------------------------------------------------------------------------------------------- what is kept
def test_a_choice_is_found_again(own_cache):
    tuned(key={"m": 64, "shape": (1, 2)})
    assert looked_up(key={"m": 64, "shape": (1, 2)}) == [Config(n=2)]
    assert looked_up(key={"shape": (1, 2), "m": 64}) == [Config(n=2)], "the order in a key does not matter"
    (choice_kept,) = content(own_cache)["choices"].values()
    today = datetime.date.today().isoformat()
    assert choice_kept == {"config": {"n": 2}, "seconds": 1.0, "date": today}


def test_pkt_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """pkt may run from its source tree; an operator looks for its choice there, too."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cache._versions.__wrapped__()["pkt"] == "source"


@pytest.mark.parametrize("change", ["key", "name", "size", "gpu", "sms", "topology", "versions"])
def test_choices_differ_by_case_name_size_machine_and_versions(change, monkeypatch):
    tuned(key={"m": 64})
    machine = cache.machine
    if change in ("gpu", "sms", "topology"):
        assert change in in_threads(1, machine)[0]
        monkeypatch.setattr(cache, "machine", lambda world: {**machine(world), change: "another"})
    if change == "versions":
        monkeypatch.setattr(cache, "_versions", lambda: {"pkt": "next"})
    size = 2 if change == "size" else 1
    found = looked_up(size, {"m": 65 if change == "key" else 64}, "other" if change == "name" else "op")
    assert found == [None] * size


def test_functions_without_a_source_differ_by_what_they_do():
    """As those typed into a Python before 3.13, or made by exec: their names may be the same."""

    def source(text):
        found = {"__name__": "typed"}
        exec(f"def layer(m, n): return {text}", found)
        return Target(found["layer"], "a test").source(simulated=False)

    texts = ["m + n", "m - n", "m + 1", "m + 2", "min(m, n)", "max(m, n)", "lambda: m + 1", "lambda: m + 2"]
    assert len({source(text) for text in texts}) == len(texts)
    assert [source(text) for text in texts] == [source(text) for text in texts]
    assert source("m in {0, 8}") == source("m in {8, 0}"), "a set's order is not part of what they do"


@pytest.mark.parametrize(("multicast", "topology"), [(True, "multicast"), (False, "peer")])
def test_a_machine_is_its_gpu_its_sms_and_whether_it_has_multicast(multicast, topology):
    world = SimpleNamespace(backend=SimpleNamespace(gpu="NVIDIA H200"), num_sms=132, multicast=multicast, size=2)
    assert cache.machine(world) == {"gpu": "NVIDIA H200", "sms": 132, "topology": topology}
    facts = json.loads(cache.case(world, "its source", {"m": 1}))
    assert facts == {
        "source": "its source", "key": {"m": 1}, "ranks": 2, **cache.machine(world), **cache._versions()
    }  # fmt: skip


def test_two_cases_live_in_one_file(own_cache):
    tuned(key={"m": 1}, best=1)
    tuned(key={"m": 2}, best=2)
    tuned(key={"m": 1}, best=3)
    assert len(content(own_cache)["choices"]) == 2
    assert looked_up(key={"m": 1}) == [Config(n=3)]
    assert looked_up(key={"m": 2}) == [Config(n=2)]


def test_a_changed_source_is_another_case(own_cache):
    def first(n):
        return n

    def second(n):
        return n + 0

    second.__name__ = "first"
    for fn in (first, second, first):
        in_threads(1, lambda world, fn=fn: tune(fn, configs=candidates(3), timer=Rough))
    assert len(content(own_cache, "first")["choices"]) == 2


def test_a_second_lookup_is_not_collective():
    def main(world):
        found = [choice("op", {"m": 1}, world)]
        world.backend.exchange = None
        found.append(choice("op", {"m": 1}, world))
        with pytest.raises(TypeError):  # another case is collective
            choice("op", {"m": 2}, world)
        return found

    tuned(2, key={"m": 1})
    assert in_threads(2, main) == [[Config(n=2)] * 2] * 2


def test_a_tuned_choice_is_seen_at_once():
    """Operators that already have plans see it, too."""

    def main(world):
        world.plans["an operator's"] = "with other settings"
        found = [choice("op", {"m": 1}, world)]
        tune(anything_in, world, configs=candidates(3), key={"m": 1}, timer=Rough)  # under no name
        found.append((choice("op", {"m": 1}, world), len(world.plans)))
        search = tune(anything_in, world, configs=candidates(3), key={"m": 1}, name="op", timer=Rough)
        found.append((choice("op", {"m": 1}, world) == search.best, len(world.plans)))
        return found

    assert in_threads(2, main) == [[None, (None, 1), (True, 0)]] * 2


def anything_in(world, n):
    """As `anything`, with a world."""


def test_rank_0_reads_for_all(tmp_path):
    """Each rank has a cache of its own with another choice in it; rank 1 has none."""

    def main(world):
        os.environ["PKT_TUNE_CACHE"] = str(tmp_path / str(world.rank))
        with world:
            if world.rank != 1:
                cache.store(world, "op", cache.case(world, "", {}), Config(n=world.rank), 1.0)
            return choice("op", {}, world)

    assert [end.value for end in in_worlds(3, main)] == [Config(n=0)] * 3


def test_names_that_cannot_be_file_names(own_cache):
    tuned(name="a/b c")
    tuned(name="a_b/c", best=1)
    assert looked_up(name="a/b c") == [Config(n=2)]
    assert looked_up(name="a_b/c") == [Config(n=1)]
    assert all(path.parent == own_cache for path in own_cache.rglob("*.json"))


def test_the_users_cache_is_the_default(monkeypatch, tmp_path):
    import platformdirs

    monkeypatch.delenv("PKT_TUNE_CACHE")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    tuned()
    assert content(tmp_path / "pkt" / "tune")["format"] == cache.FORMAT


# -------------------------------------------------------------------------------------------------- files of others
BROKEN = {
    "cut off": '{"format": 1, "choi',
    "empty": "",
    "bytes": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "somebody else's": '{"name": "thing", "version": 2}',
    "of a later format": '{"format": 2, "choices": {}}',
    "choices that are none": '{"format": 1, "choices": {"case": {"config": [1]}}}',
    "values that are none": '{"format": 1, "choices": {"case": {"config": {"n": {"x": 1}}}}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_ours_is_ignored_with_one_warning(text, own_cache):
    own_cache.mkdir()
    path = own_cache / "op.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert looked_up(2) == [None, None]
        assert tuned(2).best == Config(n=2)
        assert looked_up(2) == [None, None]
    said = [str(w.message) for w in caught if "pkt.tune" in str(w.message)]
    assert len(said) == 1
    assert str(path) in said[0]
    assert "remove it" in said[0]
    assert path.read_bytes() == before, "the file may be somebody else's"


def test_a_folder_that_cannot_be_made_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PKT_TUNE_CACHE", str(tmp_path / "file" / "x"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert tuned(2).best == Config(n=2)


def test_a_choice_that_is_no_longer_a_candidate_is_searched_again():
    def once(count):
        fn = autotune(candidates(count), timer=lambda w: Rough(w, lambda n: 9.0 - n))(lambda world, n: n)
        return in_threads(2, fn)

    assert once(8) == [7, 7]
    assert once(4) == [3, 3]


# ------------------------------------------------------------------------------------------------------------- races
def test_jobs_that_write_at_once_lose_nothing(own_cache):
    """7 processes write 30 choices each into one file. An eighth reads until all are there; the file is never cut."""
    measured, wanted = SimpleNamespace(backend=SimpleNamespace(timed=None)), 7 * 30

    def job(number):
        found = 0
        while number == 7 and found < wanted:
            choices = cache._read(cache._path("op"))
            assert choices is not None, "half a file"
            assert len(choices) >= found, "a choice is lost"
            found = len(choices)
        for i in range(30 if number < 7 else 0):
            cache.store(measured, "op", f"{number} {i}", Config(n=i), 1.0)
        return "done"

    ends = in_processes(8, job)
    assert [end.value for end in ends] == ["done"] * 8, [end.error for end in ends]
    assert set(content(own_cache)["choices"]) == {f"{number} {i}" for number in range(7) for i in range(30)}


def test_a_lock_of_a_dead_writer_is_free(own_cache):
    """The dead writer leaves a lock file, which nobody holds any more, and half of a new file."""
    own_cache.mkdir()
    (own_cache / "op.json.lock").touch()
    (own_cache / "op.json.new").write_text('{"format": 1, "cho')
    tuned()
    assert looked_up() == [Config(n=2)]
    assert not (own_cache / "op.json.new").exists()
