"""Which candidates are measured, how often, and which one wins: ties, noise, failures, votes."""

import io
import math
import sys
from collections import Counter
from functools import partial

import pytest

from pkt.errors import CandidateMismatch, CollectiveMismatch, NoCandidate, RankFailed, WaitTimeout
from pkt.model.config import Config, space
from pkt.tune import RecordedTimer, tune
from pkt.tune import search as rules
from tests.runtime.conftest import run as in_threads

from .helpers import Rough, anything, candidates


def searched(size, count=8, configs=None, options=None, **rough):
    """The Search, the same on every rank, and the (n, repeats) that its timer was asked for."""

    def main(world):
        timers = []

        def timer(world):
            timers.append(Rough(world, **rough))
            return timers[0]

        found = tune(anything, configs=configs or candidates(count), timer=timer, **(options or {}))
        return found, timers[0].asked

    results = in_threads(size, main)
    assert all(found == results[0][0] for found, _ in results), "the ranks disagree"
    assert all(asked == results[0][1] for _, asked in results), "the ranks measured different things"
    return results[0]


# -------------------------------------------------------------------------------------------------- how many, how often
@pytest.mark.parametrize(
    ("count", "most", "measured"), [(1, 0.12, 1), (8, 0.12, 8), (50, 0.12, 8), (100, 0.12, 12), (100, 1.0, 100)]
)
def test_the_budget_is_a_share_of_the_space_and_at_least_eight(count, most, measured):
    found, asked = searched(1, count, seconds=lambda n: 1.0 + n, options={"most": most})
    assert len({n for n, _ in asked}) == measured
    assert sum(bool(c.times) for c in found.candidates) == measured
    assert len(found.candidates) == count


def test_a_clear_winner_is_not_measured_again():
    found, asked = searched(2, 100, seconds=lambda n: 1.0 + abs(n - 40), options={"most": 1.0})
    assert found.best == Config(n=40)
    assert asked == [(c.config["n"], 1) for c in found.candidates] * rules.REPEATS, "in turns"


def test_ever_fewer_noisy_candidates_are_measured_again():
    """All are within 10% of noise. After each round at most half of the candidates are measured again, twice as often.
    With this seed no candidate that was left out is measured again later."""
    found, asked = searched(2, 16, seconds=lambda n: 1.0 + 0.01 * n, noise=0.1, seed=5, options={"most": 1.0})
    rounds = Counter(repeats for _, repeats in asked[16 * rules.REPEATS :])
    assert rounds[1] <= 8 * rules.REPEATS
    assert rounds[2] <= 4 * rules.REPEATS
    assert rounds[4] <= 2 * rules.REPEATS
    assert max(len(c.times) for c in found.candidates) <= rules.MOST_REPEATS
    assert len(asked) > 16 * rules.REPEATS, "nothing was looked at again"
    assert found.best["n"] <= 3


def test_two_that_overlap_are_measured_to_the_end():
    found, asked = searched(1, 2, seconds=lambda n: 1.0 + 0.05 * n, noise=0.2, seed=1)
    assert [repeats for _, repeats in asked] == [1] * 12 + [2] * 6 + [4] * 6
    measured = [n for n, _ in asked]
    assert all({a, b} == {0, 1} for a, b in zip(measured[::2], measured[1::2])), "in turns"
    assert [len(c.times) for c in found.candidates] == [24, 24]


def test_candidates_too_close_to_matter_are_not_measured_again():
    _, asked = searched(1, 8, seconds=lambda n: 1.0 + 0.0001 * n, noise=0.001)
    assert len(asked) == 8 * rules.REPEATS


def test_slow_functions_are_warmed_up_first():
    """Only once, and only if a function is so slow that power may limit the clock. Those times do not count."""
    found, asked = searched(2, 2, seconds=lambda n: 0.01 * (1 + n))
    first = found.candidates[0].config["n"]
    assert asked[:3] == [
        (first, 1),
        (first, math.ceil(rules.HEAT / (0.01 * (1 + first)))),
        (first, 1),
    ]
    assert all(len(c.times) == rules.REPEATS for c in found.candidates)
    for seconds in (0.5 * rules.HEATING, rules.HEAT):
        _, asked = searched(1, 2, seconds=lambda n, seconds=seconds: seconds * (1 + n))
        assert [repeats for _, repeats in asked] == [1] * 2 * rules.REPEATS


def test_a_failure_in_warming_up_drops_that_candidate_alone():
    class Tired(Rough):
        def times(self, config, run, repeats):
            found = super().times(config, run, repeats)
            if config["n"] == 0 and len(self.asked) > 1:
                raise RuntimeError("too hot")
            return found

    def main(world):
        return tune(
            anything, configs=candidates(9), timer=partial(Tired, seconds=lambda n: 0.01 * (1 + n)), model=first
        )

    def first(config, key):
        return config["n"]

    for found in in_threads(2, main):
        assert "too hot" in found.candidates[0].dropped
        assert found.best == Config(n=1)
        assert sum(bool(c.times) and not c.dropped for c in found.candidates) == 8


def test_a_lucky_first_look_does_not_win():
    """Candidate 2 was too slow to be measured again, until 0 and 1 became slower than it. Before it can win it is
    measured again, and is slower than both."""
    looks = {0: [1.0] * 3 + [1.3] * 21, 1: [1.05, 1.2, 1.1] + [1.3] * 21, 2: [1.12, 1.12, 1.12] + [1.5] * 21}
    seen = Counter()

    def main(world):
        class Drifting(Rough):
            def times(self, config, run, repeats):
                start = seen[config["n"]]
                seen[config["n"]] += repeats
                return looks[config["n"]][start : start + repeats]

        return tune(anything, configs=candidates(3), timer=lambda world: Drifting(world, seconds=lambda n: 1.0))

    found = in_threads(1, main)[0]
    assert found.best != Config(n=2)
    assert min(len(c.times) for c in found.candidates) > rules.REPEATS


def test_the_first_of_equal_times_wins():
    found, _ = searched(3, 8, seconds=lambda n: 1.0)
    assert found.best == found.candidates[0].config


def test_a_time_is_the_median_over_repeats_of_the_maximum_over_ranks():
    """Candidate 0 is fast on rank 0 and slow on rank 1; candidate 1 is in between on both."""

    class OneSlow(Rough):
        def times(self, config, run, repeats):
            start = sum(n for of, n in self.asked if of == config["n"])
            super().times(config, run, repeats)
            slow, fast = ([2.0, 9.0, 2.0], [2.0, 2.0, 2.0]) if config["n"] else ([3.0, 3.0, 8.0], [1.0, 1.0, 1.0])
            return ((slow if self.world.rank else fast) * 8)[start : start + repeats]

    def main(world):
        return tune(anything, configs=candidates(2), timer=OneSlow)

    first, second = in_threads(2, main)
    assert first == second
    assert {c.config["n"]: c.times[:3] for c in first.candidates} == {0: (3.0, 3.0, 8.0), 1: (2.0, 9.0, 2.0)}
    assert [c.time for c in sorted(first.candidates, key=lambda c: c.config["n"])] == [3.0, 2.0]
    assert first.best == Config(n=1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_any_number_of_ranks(size):
    found, _ = searched(size, 9, seconds=lambda n: 1.0 + 0.1 * n, noise=0.02, slow=(size - 1,))
    assert found.best == Config(n=0)


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    searched(2, 8, seconds=lambda n: 1e-3 * (1 + n))
    assert "tuning anything" in screen.getvalue()
    assert "best 1,000.0 µs" in screen.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    searched(2, 8)
    assert not sys.stderr.getvalue(), "a file stays clean"


# ------------------------------------------------------------------------------------------------------------ the order
def test_the_model_chooses_the_measured_candidates():
    def model(config, key):
        return None if config["n"] == 0 else abs(config["n"] - key["near"])

    found, asked = searched(
        2, 100, seconds=lambda n: 1.0 + n, options={"most": 0.1, "model": model, "key": {"near": 50}}
    )
    assert {n for n, _ in asked} == {46, 47, 48, 49, 50, 51, 52, 53, 54, 45}
    assert found.best == Config(n=45)
    assert found.candidates[0].predicted == 0
    assert found.candidates[-1] == rules.Candidate(Config(n=0))


def test_rank_0_alone_asks_the_model():
    def main(world):
        def model(config, key):
            assert world.rank == 0
            return config["n"] % 4

        return tune(anything, configs=candidates(8), model=model, timer=Rough)

    found = in_threads(3, main)
    assert found[0] == found[1] == found[2]


def test_without_a_model_the_order_is_spread_and_fixed():
    configs = space(a=range(10), b=range(10))

    def main(world):
        return tune(anything_of_two, configs=configs, timer=lambda w: RecordedTimer(lambda config: 1.0))

    found = in_threads(1, main)[0]
    measured = [c.config for c in found.candidates if c.times]
    assert len(measured) == 12
    assert [c.config for c in in_threads(1, main)[0].candidates] == [c.config for c in found.candidates]
    assert sorted({(c["a"] // 5, c["b"] // 5) for c in measured}) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({c["a"] for c in measured}) > 6
    assert len({c["b"] for c in measured}) > 6


def anything_of_two(a, b):
    """As `anything`, with two settings."""


# ------------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("where", ["first", "times"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no such luck"), WaitTimeout.of("rank 1: it took too long")], ids=["fails", "times out"]
)
def test_a_failure_on_one_rank_drops_a_candidate_on_all(where, error):
    found, _ = searched(3, seconds=lambda n: 1.0 + n, where=where, fails={(1, 0): error})
    dropped = {c.config["n"]: c.dropped for c in found.candidates if c.dropped}
    assert dropped == {0: f"rank 1: {type(error).__name__}: {error}"}
    assert found.best == Config(n=1)


def test_reasons_of_several_ranks_are_kept():
    fails = {(0, 2): ValueError("a"), (2, 2): ValueError("a"), (1, 2): KeyError("b")}
    found, _ = searched(3, seconds=lambda n: 3.0 - n, count=3, fails=fails)
    assert {c.dropped for c in found.candidates} == {"", "ranks 0, 2: ValueError: a; rank 1: KeyError: 'b'"}


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0])
def test_impossible_times_drop_a_candidate(time):
    found, _ = searched(2, seconds=lambda n: 1.0 if n else time)
    assert [c.config["n"] for c in found.candidates if c.dropped] == [0]
    assert next(c.dropped for c in found.candidates if c.dropped) == f"ranks 0, 1: took {time} s"


def test_a_wrong_result_on_one_rank_is_dropped_on_all():
    def main(world):
        def square(x, n):
            return x * n + (world.rank == 1 and n == 3)

        return tune(
            square, 2, configs=candidates(8), timer=lambda w: Rough(w, lambda n: 9.0 - n),
            check=lambda arguments, result: result % arguments["x"] == 0,
        )  # fmt: skip

    found = in_threads(3, main)
    assert found[0] == found[1] == found[2]
    dropped = {c.config["n"]: c.dropped for c in found[0].candidates if c.dropped}
    assert list(dropped) == [3]
    assert dropped[3].startswith("rank 1: ")
    assert "wrong result" in dropped[3]
    assert found[0].best == Config(n=7)


def test_other_candidates_replace_failed_ones():
    """The budget counts only candidates that were measured."""
    fails = {(0, n): RuntimeError("no") for n in range(0, 100, 2)}
    found, asked = searched(1, 100, seconds=lambda n: 1.0 + n, fails=fails)
    assert len({n for n, _ in asked}) == 12
    assert all(n % 2 for n, _ in asked)


def test_nothing_left_is_an_error_on_every_rank():
    def main(world):
        fails = {(1, n): RuntimeError(f"no {n}") for n in range(8)}
        with pytest.raises(NoCandidate, match=r"tuning anything: every candidate.*\n.*Config\(n=\d\): rank 1: .* no"):
            tune(anything, configs=candidates(8), timer=lambda w: Rough(w, fails=fails))
        return world.all_gather_object("still here")

    in_threads(2, main)


class Compiling:
    """Work whose every third config cannot be compiled on rank 1."""

    what, restores = "kernel", False

    def __init__(self, world):
        self.world, self.ran, self.batches = world, [], []

    def compile(self, configs, threads, begin):
        assert (threads, begin) == (4, self.world.rank / 2)
        self.batches.append([c["n"] for c in configs])
        return {i: "out of registers" for i, c in enumerate(configs) if c["n"] % 3 == 0 and self.world.rank == 1}

    def scope(self):
        return self.world.scratch()

    def run(self, config):
        self.ran.append(config["n"])

    def verify(self, config, result):
        pass


def test_a_compile_error_on_one_rank_drops_a_candidate_on_all():
    """Candidates are compiled in batches, before any of a batch runs."""

    def main(world):
        work, timer = Compiling(world), Rough(world, lambda n: 1.0 + n)
        timer.threads = 4
        found = rules.search(world, timer, work, {}, [(c, None) for c in candidates(12)], most=0.5)
        return found.best, work.ran, work.batches, [c.dropped for c in found.candidates]

    first, second = in_threads(2, main)
    assert first == second
    assert first[2] == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
    best, ran, _, dropped = first
    assert best == Config(n=1)
    assert ran == [1, 2, 4, 5, 7, 8, 10, 11]
    assert dropped[0] == "rank 1: out of registers"
    assert dropped[1] == ""


def test_nothing_more_is_compiled_after_an_interrupt():
    def main(world):
        class Interrupted(Compiling):
            def run(self, config):
                raise KeyboardInterrupt

        work, timer = Interrupted(world), Rough(world)
        timer.threads = 4
        found = rules.search(world, timer, work, {}, [(c, None) for c in candidates(20)])
        return found.best, found.interrupted, len(work.batches)

    assert in_threads(2, main) == [(None, True, 1)] * 2


# ------------------------------------------------------------------------------------------------------ different lists
def test_different_lists_are_an_error_on_every_rank():
    def main(world):
        configs = candidates(8)
        if world.rank == 2:
            configs[5] = Config(n=77)
        with pytest.raises(CandidateMismatch) as caught:
            tune(anything, configs=configs, timer=Rough)
        return str(caught.value)

    said = in_threads(3, main)
    assert said[0] == said[1] == said[2]
    assert "ranks 0, 1: 8 configs, number 5 is Config(n=5); rank 2: 8 configs, number 5 is Config(n=77)" in said[0]


def test_a_list_that_ends_sooner_is_different_too():
    def main(world):
        with pytest.raises(
            CandidateMismatch, match=r"rank 0: 3 configs, number 3 is none; rank 1: 4 configs, number 3 is"
        ):
            tune(anything, configs=candidates(3 + world.rank), timer=Rough)

    in_threads(2, main)


def test_different_cases_are_an_error_on_every_rank():
    def main(world):
        with pytest.raises(CollectiveMismatch, match="rank 0: tune anything for m=0; rank 1: tune anything for m=1"):
            tune(anything, configs=candidates(3), key={"m": world.rank}, timer=Rough)

    in_threads(2, main)


def test_pruning_that_raises_on_one_rank_is_an_error_on_every_rank():
    def main(world):
        def prune(configs, arguments):
            if world.rank == 1:
                raise ZeroDivisionError("in prune")
            return configs[: arguments["x"]]

        with pytest.raises(ZeroDivisionError if world.rank == 1 else RankFailed, match="in prune"):
            tune(lambda x, n: None, 3, configs=candidates(8), prune=prune, timer=Rough)

    in_threads(2, main)


def test_pruning_leaves_the_candidates():
    def main(world):
        def prune(configs, arguments):
            return [c for c in configs if c["n"] % arguments["x"] == 0]

        return tune(lambda x, n: None, 3, configs=candidates(8), prune=prune, timer=Rough)

    assert sorted(c.config["n"] for c in in_threads(2, main)[0].candidates) == [0, 3, 6]


def test_a_model_that_raises_is_an_error_on_every_rank():
    def main(world):
        def model(config, key):
            raise ZeroDivisionError("in model")

        with pytest.raises(RankFailed if world.rank else ZeroDivisionError, match="in model"):
            tune(anything, configs=candidates(8), model=model, timer=Rough)

    in_threads(2, main)


# -------------------------------------------------------------------------------------------------------------- restore
def test_restore_gives_changed_arguments_their_values_back():
    import torch

    def main(world):
        x = torch.full((3,), 5.0)
        seen = []

        def add(x, n):
            seen.append(x[0].item())
            x += 1

        tune(add, x, configs=candidates(4), restore=["x"], timer=Rough)
        return seen, x.tolist()

    for seen, x in in_threads(2, main):
        assert seen == [5.0] * 4
        assert x == [5.0] * 3


@pytest.mark.parametrize(("count", "stay"), [(3, 2), (5, 3), (7, 4), (8, 4)])
def test_of_an_odd_number_the_greater_half_stays(count, stay):
    """The times scatter more than the candidates differ, so no candidate is left behind for its time."""
    _, asked = searched(1, count, seconds=lambda n: 1.0 + 0.01 * n, noise=5.0, seed=count)
    later = [n for n, _ in asked[count * rules.REPEATS :]]
    assert later.index(later[0], 1) == stay
    assert set(later[:stay]) == set(later[stay : 2 * stay])


@pytest.mark.parametrize(("count", "most", "wanted"), [(100, 0.12, 12), (100, 0.01, 8), (5, 0.5, 5), (40, 1.0, 40)])
def test_how_many_candidates_are_measured(count, most, wanted):
    assert rules.slots(count, most) == wanted
