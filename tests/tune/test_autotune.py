"""@pkt.autotune in the simulator and on threads: cases, buckets, graphs, and what is refused."""

import math
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import pkt
import pkt.language as pl
from pkt.errors import CollectiveMismatch, DtypeError, NoCandidate, ShapeError, Unsupported
from pkt.model.config import Config
from pkt.runtime.workers.carry import dumps, loads
from pkt.runtime.world import World
from pkt.simulate import cost
from pkt.tune import bench
from pkt.tune.autotune import autotune
from tests.runtime.conftest import run as in_threads

from .helpers import Rough, candidates


@triton.jit
def scale_kernel(x_ptr, n, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * factor, mask=offs < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


# ------------------------------------------------------------------------------------------------------ the simulator
def test_a_kernel_tunes_on_the_modelled_clock():
    """Four small blocks are work for 4 SMs; one large block is work for one SM."""
    tuned = pkt.autotune(pkt.space(BLOCK=[4096, 16384], num_warps=4), key=["n"], restore=["x_ptr"])(scale_kernel)

    def main(world):
        x = torch.full((16384,), 3.0)
        tuned[grid](x, 16384, 2.0)
        tuned[grid](x, 16384, factor=2.0)
        return x.unique().tolist()

    assert pkt.launch(main, 2, device="cpu", sms=4) == [[12.0]] * 2
    (search,) = tuned.searches.values()
    assert search.key == {"n": 16384, "dtypes": "fp32"}
    times = {c.config["BLOCK"]: c.time for c in search.candidates}
    assert search.best == Config(BLOCK=4096, num_warps=4)
    launch = 1e-6 * cost.LAUNCH_US
    assert times[16384] - launch == pytest.approx(4 * (times[4096] - launch))


def test_triton_configs_and_their_hooks():
    hooked = []
    configs = [triton.Config({"BLOCK": b}, num_warps=4, pre_hook=lambda named: hooked.append(named)) for b in (8, 64)]
    tuned = pkt.autotune(configs, key=["n"])(scale_kernel)

    def main(world):
        x = torch.ones(64)
        tuned[grid](x, 64, 1.0)

    pkt.launch(main, 1, device="cpu", sms=4)
    assert sorted(h["BLOCK"] for h in hooked[:2]) == [8, 64]
    (search,) = tuned.searches.values()
    assert hooked[-1]["BLOCK"] == search.best["BLOCK"]
    assert hooked[-1]["n"] == 64
    assert hooked[-1]["num_warps"] == 4
    assert len(hooked) == 3, "one run of each config, and the call"


CHUNK = tl.constexpr(64)


@triton.jit
def split_kernel(x_ptr, inbox_ptr, flags, out_ptr, queue, world, tasks, num_comm_sms):
    epoch = pl.epoch(flags, world)
    half = inbox_ptr + (epoch & 1) * tasks * CHUNK
    pl.lcsc(_compute, _push, (x_ptr, half, flags, out_ptr, world, epoch), tasks, tasks, queue, epoch, num_comm_sms)


@triton.jit
def _compute(task, x_ptr, half, flags, out_ptr, world, epoch):
    offs = task * CHUNK + tl.arange(0, CHUNK)
    pl.wait(flags + task, epoch, world)
    tl.store(out_ptr + offs, tl.load(half + offs) * 2)


@triton.jit
def _push(task, x_ptr, half, flags, out_ptr, world, epoch):
    offs = task * CHUNK + tl.arange(0, CHUNK)
    peer = 1 - tl.cast(world.rank, tl.int32)
    pl.store(half + offs, tl.load(x_ptr + offs), peer, world)
    pl.signal(flags + task, peer, world)


def test_the_split_of_an_overlapped_kernel_is_tuned_and_right():
    """With one communicating program all others wait for it. Results are right for every split."""
    tuned = pkt.autotune(
        pkt.space(num_comm_sms=[1, 2, 3, 4]), check=lambda named, _: bool((named["out_ptr"] > 0).all())
    )(split_kernel)
    tasks = 24

    def main(world):
        x = torch.full((tasks * CHUNK.value,), 1.0 + world.rank)
        inbox = pkt.empty(2, tasks * CHUNK.value)
        flags = pkt.signals(tasks + 1)
        out = torch.empty(tasks * CHUNK.value)
        for _ in range(3):
            tuned[(6,)](x, inbox, flags, out, flags[-1:], world.device, tasks)
        return out.unique().tolist()

    assert pkt.launch(main, 2, device="cpu", sms=6) == [[4.0], [2.0]]
    (search,) = tuned.searches.values()
    times = {c.config["num_comm_sms"]: c.time for c in search.candidates}
    assert len(times) == 4
    assert search.best["num_comm_sms"] > 1
    assert times[1] > 1.2 * min(times.values())


def test_a_new_run_reuses_the_choice_for_a_function():
    @pkt.autotune(pkt.space(chunk=[16, 64]), key=["x"], restore=["x"])
    def double(x, chunk):
        ran.append(chunk)
        scale_kernel[(triton.cdiv(len(x), chunk),)](x, len(x), 2.0, chunk)
        return x

    def main(world):
        return double(torch.ones(64)).tolist()

    ran = []
    assert pkt.launch(main, 2, device="cpu", sms=4) == [[2.0] * 64] * 2
    assert sorted(ran) == [16, 16, 16, 16, 64, 64], "4 programs for 4 SMs"
    ran.clear()
    pkt.launch(main, 2, device="cpu", sms=4)
    assert ran == [16, 16], "the choice of the first run"
    assert list(double.searches) == ["x=(64, 'fp32'), dtypes=fp32"]
    assert double.__name__ == "double"


def test_simulate_runs_the_chosen_config():
    tuned = pkt.autotune(pkt.space(BLOCK=[8, 64]), key=["n"])(scale_kernel)

    def main(world):
        x = torch.ones(64)
        tuned[grid](x, 64, 2.0)

    assert pkt.simulate(main, ranks=2, seeds=5).ok
    assert len(tuned.searches) == 1


def test_a_tuned_function_can_be_sent_to_workers():
    """As pkt.launch on GPUs sends it to its processes. The case is known here, and not there."""
    tuned = pkt.autotune(pkt.space(BLOCK=[8, 64]), key=["n"], bucket={"n": lambda n: n})(scale_kernel)

    def main(world):
        x = torch.ones(64)
        tuned[grid](x, 64, 2.0)
        return list(tuned.searches)

    assert pkt.launch(main, 1, device="cpu", sms=4) == [["n=64, dtypes=fp32"]]
    assert pkt.launch(loads(dumps(main)), 2, device="cpu", sms=4) == [["n=64, dtypes=fp32"]] * 2


# --------------------------------------------------------------------------------------------------------------- cases
def counting(**options):
    """An autotuned function of two arguments, which returns the setting n that it ran with."""

    def fn(m, k, n):
        return n

    return autotune(candidates(4), timer=lambda w: Rough(w, lambda n: 9.0 - n), **options)(fn)


def test_a_case_is_searched_once():
    tuned = counting(key=["m"])

    def main(world):
        found = [tuned(1, 5), tuned(2, k=5), tuned(m=1, k=7), tuned(2, 8)]
        world.backend.exchange = None  # from now on nothing is collective
        return [*found, tuned(1, 9), tuned(2, 9)]

    assert in_threads(2, main) == [[3] * 6] * 2
    assert list(tuned.searches) == ["m=1", "m=2"]


def test_tensors_enter_the_case_by_shape_and_dtype():
    tuned = counting(key=["m"])

    def main(world):
        for m in (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 2), torch.zeros(2, 3).half()):
            tuned(m, 1)
        tuned(torch.zeros(2, 3), torch.zeros(1).bfloat16())

    in_threads(1, main)
    assert list(tuned.searches) == [
        "m=(2, 3, 'fp32'), dtypes=fp32",
        "m=(3, 2, 'fp32'), dtypes=fp32",
        "m=(2, 3, 'fp16'), dtypes=fp16",
        "m=(2, 3, 'fp32'), dtypes=fp32, bf16",
    ]


def test_lists_enter_the_case_as_tuples():
    tuned = counting(key=["m"])

    def main(world):
        tuned([2, [4]], 1)
        world.backend.exchange = None
        return tuned((2, (4,)), 1)

    assert in_threads(1, main) == [3]
    assert list(tuned.searches) == ["m=(2, (4,))"]


def test_numbers_of_numpy_are_numbers():
    tuned = counting(key=["m"])

    def main(world):
        tuned(np.int64(3), 1)
        world.backend.exchange = None
        return tuned(3, 1)

    assert in_threads(1, main) == [3]
    assert list(tuned.searches) == ["m=3"]


def test_keys_behind_other_positional_arguments_are_told_apart():
    tuned = autotune(candidates(4), key=["more", "k"], timer=lambda w: Rough(w, lambda n: 9.0 - n))(
        lambda m, *more, k=0, n: n
    )

    def main(world):
        for args, named in (
            ((1, 2, 3), {"k": 4}),
            ((1, 2, 3), {"k": 5}),
            ((1, 2, 4), {"k": 5}),
            ((1,), {"k": 5}),
            ((1,), {}),
        ):
            tuned(*args, **named)

    in_threads(1, main)
    assert list(tuned.searches) == [
        "more=(2, 3), k=4", "more=(2, 3), k=5", "more=(2, 4), k=5", "more=(), k=5", "more=(), k=0"
    ]  # fmt: skip


def test_buckets_share_a_choice_also_where_ranks_differ():
    tuned = counting(key=["m", "k"], bucket={"m": triton.next_power_of_2})

    def main(world):
        tuned(100 + world.rank, 1)
        tuned(128 - world.rank, 1)
        tuned(129, 1)

    in_threads(3, main)
    assert list(tuned.searches) == ["m=128, k=1", "m=256, k=1"]


def test_a_bucket_also_goes_with_a_key_that_is_a_mapping():
    def main(world):
        options = {"timer": lambda w: Rough(w, lambda n: 9.0 - n), "bucket": {"m": triton.next_power_of_2}}
        return dict(pkt.tune.tune(lambda n: n, configs=candidates(4), key={"m": 100, "k": [2]}, **options).key)

    assert in_threads(2, main) == [{"m": 128, "k": (2,)}] * 2


def test_sizes_of_one_bucket_are_searched_once():
    tuned = counting(key=["m"], bucket={"m": triton.next_power_of_2})

    def main(world):
        tuned(100, 1)
        world.backend.exchange = None
        return tuned(100 + world.rank, 1)

    assert in_threads(2, main) == [3, 3]


def test_a_case_that_differs_between_ranks_is_an_error_on_all():
    tuned = counting(key=["m"])

    def main(world):
        with pytest.raises(CollectiveMismatch, match="rank 0: tune fn for m=0; rank 1: tune fn for m=1"):
            tuned(world.rank, 1)

    in_threads(2, main)


def test_one_config_needs_no_search():
    tuned = autotune([{"n": 5}])(lambda m, n: n)

    def main(world):
        world.backend.exchange = None
        return tuned(1)

    assert in_threads(2, main) == [5, 5]


def test_pruning_is_asked_once_and_may_leave_one():
    asked = []

    def prune(configs, arguments):
        asked.append(arguments["m"])
        return [c for c in configs if c["n"] < arguments["m"]]

    tuned = counting(key=["m"], prune=prune)
    assert in_threads(1, lambda world: [tuned(m, 1) for m in (1, 3, 1, 3)]) == [[0, 2, 0, 2]]
    assert asked == [1, 3]
    assert list(tuned.searches) == ["m=3"], "a single config needs no search"


# ------------------------------------------------------------------------------------------------------- CUDA graphs
def test_a_capture_needs_a_known_case(monkeypatch):
    tuned = counting(key=["m"])
    monkeypatch.setattr(World, "capturing", True)

    def main(world):
        with pytest.raises(Unsupported, match="the case m=1 is not known yet, and a CUDA graph .* call it once before"):
            tuned(1, 1)
        with monkeypatch.context() as outside:
            outside.setattr(World, "capturing", False)
            tuned(1, 1)
        return tuned(1, 2)

    assert in_threads(1, main) == [3]


# -------------------------------------------------------------------------------------------------------------- refused
def test_wrong_arguments_are_refused_when_decorated():
    with pytest.raises(ShapeError, match=r"key: found 'k', wanted parameters of scale_kernel: x_ptr, n, factor, BLOCK"):
        pkt.autotune([{"BLOCK": 8}], key=["k"])(scale_kernel)
    with pytest.raises(ShapeError, match="restore: found 'y'"):
        pkt.autotune([{"BLOCK": 8}], restore=["y"])(scale_kernel)
    with pytest.raises(NoCandidate, match="configs is empty"):
        pkt.autotune([])(scale_kernel)
    with pytest.raises(ShapeError, match="wanted a @triton.jit kernel or a function"):
        pkt.autotune([{"BLOCK": 8}])(5)
    for name in ("key", "restore"):
        for names in ("n", 5, None):
            with pytest.raises(DtypeError, match=f"{name}: found {names!r}, wanted a list of names"):
                pkt.autotune([{"BLOCK": 8}], **{name: names})
            with pytest.raises(DtypeError, match=f"pkt.tune.tune: {name}: found {names!r}, wanted a list of names"):
                pkt.tune.tune(scale_kernel, configs=[{"BLOCK": 8}], **{name: names})
    for configs in (5, None, "all", {"BLOCK": 8}, pkt.Config(BLOCK=8)):
        with pytest.raises(DtypeError, match="configs: found .*, wanted a list of configs, as pkt.space makes it"):
            pkt.autotune(configs)
    for name in ("prune", "model", "check", "timer"):
        with pytest.raises(DtypeError, match=f"{name}: found 5, wanted a function"):
            pkt.autotune([{"BLOCK": 8}], **{name: 5})
    for bucket in (5, ["n"], {"n": 5}):
        with pytest.raises(DtypeError, match="bucket: found .*, wanted a function for each name"):
            pkt.autotune([{"BLOCK": 8}], bucket=bucket)
    for most in (-1, 2, math.nan, "all"):
        with pytest.raises(ShapeError, match="most: found .*, wanted a share of the candidates, from 0 to 1"):
            pkt.autotune([{"BLOCK": 8}], most=most)


def test_a_prune_that_returns_no_list_is_refused():
    def main(world):
        with pytest.raises(DtypeError, match="prune: found None, wanted a list of configs"):
            counting(prune=lambda configs, arguments: None)(1, 2)

    in_threads(1, main)


def test_wrong_arguments_are_refused_when_called():
    with pytest.raises(ShapeError, match=r"a grid: scale_kernel\[grid\]"):
        pkt.autotune([{"BLOCK": 8}])(scale_kernel)(1)
    with pytest.raises(ShapeError, match="call it without"):
        counting()[(1,)]
    with pytest.raises(Unsupported, match="there is no world"):
        counting()(1, 2)

    def main(world):
        with pytest.raises(ShapeError, match="n: found 3, wanted no value: it is a setting"):
            counting()(1, 2, n=3)
        with pytest.raises(ShapeError, match="key 'm': found no value"):
            counting(key=["m"])(k=2)
        with pytest.raises(ShapeError, match="bucket: found 'k', wanted names of the key: m"):
            counting(key=["m"], bucket={"k": triton.next_power_of_2})(1, 2)
        for value in (object(), {"a": 1}, {1}, np.ones(2)):
            with pytest.raises(pkt.DtypeError, match=f"key 'm': found {type(value).__name__}, wanted a tensor"):
                counting(key=["m"])(value, 2)
        with pytest.raises(pkt.DtypeError, match="rank 0: pkt.autotune of fn: restore 'm': found 1, wanted a tensor"):
            counting(restore=["m"])(1, 2)
        with pytest.raises(pkt.DtypeError, match="restore 'm': found None, wanted a tensor"):
            counting(restore=["m"])(k=2)

    in_threads(1, main)


# ----------------------------------------------------------------------------------------------- Triton's own autotuner
class Bench(Rough):
    """Times calls that have no config."""

    def first(self, config, run):
        return super().first(Config(n=0), run)

    def times(self, config, run, repeats):
        return super().times(Config(n=0), run, repeats)


def test_do_bench_gives_every_rank_the_same_times(monkeypatch):
    rough = {"seconds": lambda n: 1e-3, "noise": 0.5}
    monkeypatch.setattr(bench, "timer_of", lambda world: Bench(world, **rough))

    def main(world):
        calls = []
        times = bench.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2, 0.8))
        return calls, times, bench.do_bench(lambda: None)

    first, *others = in_threads(3, main)
    assert all(other == first for other in others)
    calls, (median, low, high), alone = first
    assert calls == [1]
    assert 1.0 < low < median < high < 1.5, "milliseconds"
    assert isinstance(alone, float)


def test_do_bench_is_infinite_on_all_ranks_if_one_fails(monkeypatch):
    monkeypatch.setattr(bench, "timer_of", Bench)

    def main(world):
        def run():
            if world.rank == 1:
                raise RuntimeError("no")

        return bench.do_bench(run, quantiles=(0.5, 0.2)), bench.do_bench(run)

    with pytest.warns(UserWarning, match="a config is left out: rank 1: RuntimeError: no"):
        assert in_threads(2, main) == [([float("inf")] * 2, float("inf"))] * 2


def test_tritons_autotuner_chooses_the_same_on_every_rank(monkeypatch):
    """By its own times rank 0 would take BLOCK=8 and rank 1 BLOCK=16; over both BLOCK=32 is the fastest."""
    seconds = {8: (1.0, 9.0), 16: (9.0, 1.0), 32: (2.0, 2.0)}
    ran = threading.local()

    class Last(Rough):
        def times(self, config, run, repeats):
            run()
            return [seconds[ran.block][self.world.rank]] * repeats

        def first(self, config, run):
            run()

    def launch(self, *args, grid, warmup, **named):
        ran.block = named["BLOCK"]

    monkeypatch.setattr(bench, "timer_of", Last)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", launch)

    def main(world):
        configs = [triton.Config({"BLOCK": block}) for block in seconds]
        kernel = triton.autotune(configs, key=["n"], do_bench=pkt.tune.do_bench)(
            scale_kernel
        )  # each process has its own
        kernel[(1,)](torch.zeros(4), 4, 2.0)
        return kernel.best_config.kwargs

    assert in_threads(2, main) == [{"BLOCK": 32}] * 2
