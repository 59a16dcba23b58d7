"""`pkt doctor`: its report and exit status on many machines. It changes nothing on the GPUs."""

import importlib
import io
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rich.console import Console

import pkt
from pkt import cli, doctor
from pkt.errors import DriverError, RankFailed
from pkt.language.inspect import compile_only, device_world
from pkt.model import files, rates
from pkt.model.gpu import H100, H200
from pkt.runtime.gpu.topology import OFF_SWITCHES
from tests.runtime.fake_driver import FakeDriver, FakeGpu

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def a_plain_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PKT_TUNE_CACHE", str(tmp_path / "cache"))
    for name in (*OFF_SWITCHES, "PKT_HEAP", "PKT_TIMEOUT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def gpus(count, **attributes):
    return [FakeGpu(f"{i:032x}", attributes=dict(attributes)) for i in range(count)]


def examine(some, seen=None, cuda="13.0", drivers=None, error=None):
    """The report on a machine with these GPUs; with `error` its driver cannot be loaded."""

    def driver(rank):
        if error is not None:
            raise error
        made = FakeDriver(rank, gpus=some)
        made.gpus = some  # FakeDriver takes an empty list for its default
        (drivers if drivers is not None else []).append(made)
        return made

    with (
        mock.patch.object(doctor, "CudaDriver", driver),
        mock.patch.object(torch.cuda, "device_count", return_value=len(some) if seen is None else seen),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(doctor.nvml, "nvlinks", return_value=18),
    ):
        return doctor.examine()


def text(report):
    console = Console(width=120)
    with console.capture() as captured:
        doctor.show(report, console)
    return captured.get()


def row(page, start):
    """The cells of the table row that begins with `start`."""
    (line,) = [line for line in page.splitlines() if re.match(rf"│ {re.escape(start)} +│", line)]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_four_good_gpus():
    report = examine(gpus(4))
    assert (report.status, report.ranks) == (0, 4)
    assert not report.problems
    page = text(report)
    assert row(page, "0") == ["0", "FakeGPU", "9.0", "132", "140 GiB", "18", "no", "nothing"]
    assert row(page, "GPU 2") == ["GPU 2", "yes", "yes", "-", "yes"]
    assert row(page, "driver")[1].endswith("CUDA 13.1")
    assert row(page, "torch")[1] == torch.__version__
    assert row(page, "most memory of a rank's heap (PKT_HEAP)")[1] == "1 GiB"
    assert page.rstrip().endswith("pkt runs on 4 GPUs here: pkt.launch(fn, ranks=4)")


def test_a_single_gpu_is_enough():
    report = examine(gpus(1))
    assert (report.status, report.ranks) == (0, 1)
    assert "Peer access" not in text(report)


@pytest.mark.parametrize(
    ("access", "word", "why"),
    [((False, False), "no access", "GPU 1 -> 3: no peer access"), ((True, False), "no atomics", "no native atomics")],
)
def test_a_pair_without_access_leaves_the_other_gpus(access, word, why):
    some = gpus(4)
    some[1].peers = {3: access}
    report = examine(some)
    assert (report.status, report.ranks) == (0, 3)
    page = text(report)
    assert row(page, "GPU 1")[4] == word
    assert "note: not all 4 GPUs can work together" in page
    assert why in page
    assert "pkt runs on 3 GPUs here" in page


@pytest.mark.parametrize(
    ("change", "why", "lacks"),
    [
        ({"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}, "no virtual memory", "virtual memory"),
        ({"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0}, "no POSIX", "POSIX handles"),
        ({"COOPERATIVE_LAUNCH": 0}, "no cooperative launch", "cooperative launch"),
    ],
)
def test_gpus_that_lack_something(change, why, lacks):
    report = examine(gpus(2, **change))
    assert (report.status, report.ranks) == (1, 0)
    page = text(report)
    assert row(page, "1")[-1] == lacks
    assert "missing: no GPU here can run pkt" in page
    assert why in page
    assert 'pkt.launch(fn, ranks=4, device="cpu")' in page


def test_a_mig_slice():
    some = gpus(1)
    some[0].name = "H100 MIG 1g.10gb"
    report = examine(some)
    assert report.status == 1
    assert "turn MIG off" in text(report)


def test_torch_without_cuda_or_with_another_one():
    report = examine(gpus(2), cuda=None)
    assert report.status == 1
    assert f"torch {torch.__version__} was built without CUDA" in text(report)
    report = examine(gpus(2), seen=0)
    assert report.status == 1
    assert "torch sees 0 of 2 GPUs" in text(report)
    report = examine(gpus(4), seen=2)
    assert (report.status, report.ranks) == (0, 2)


def test_no_driver_no_bindings_no_gpu(monkeypatch):
    for error in (
        DriverError.failed(0, "cuInit", 100, "CUDA_ERROR_NO_DEVICE"),
        ImportError("No module named 'cuda.bindings'"),
        RuntimeError("libcuda.so.1 cannot be found\nhere or there"),
    ):
        report = examine([], error=error)
        page = text(report)
        assert report.status == 1
        assert f"missing: no GPU can be asked: {str(error).splitlines()[0]}" in " ".join(page.split())
        assert "GPUs\n" not in page
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = examine([])
    assert report.status == 1
    assert "CUDA_VISIBLE_DEVICES is ''" in text(report)


def test_missing_software_is_named(monkeypatch):
    before = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "cuda-bindings" else before(name))
    assert "pip install cuda-python" in text(examine(gpus(1)))
    monkeypatch.setattr(doctor, "_version", before)
    monkeypatch.setattr(doctor.triton, "__version__", "3.5.1+git")
    report = examine(gpus(1))
    assert report.status == 1
    assert "triton 3.5.1+git is too old" in text(report)
    monkeypatch.setattr(doctor.triton, "__version__", "3.10.0")
    assert examine(gpus(1)).status == 0
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "no C compiler" in text(examine(gpus(1)))


def test_settings_that_cannot_be_parsed_are_problems(monkeypatch):
    monkeypatch.setenv("PKT_HEAP", "8GiB")
    monkeypatch.setenv("PKT_TIMEOUT", "5")
    page = text(examine(gpus(1)))
    assert row(page, "most memory of a rank's heap (PKT_HEAP)")[1] == "8 GiB"
    assert row(page, "longest wait for a peer (PKT_TIMEOUT)")[1] == "5 s"
    monkeypatch.setenv("PKT_HEAP", "much")
    monkeypatch.setenv("PKT_TIMEOUT", "soon")
    report = examine(gpus(1))
    assert report.status == 1
    assert [p.what for p in report.problems] == [
        "PKT_HEAP: 'much' is not understood", "PKT_TIMEOUT: 'soon' is not understood"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- multicast
def test_multicast_in_words(monkeypatch):
    some = gpus(3, MULTICAST_SUPPORTED=1)
    page = text(examine(some))
    assert row(page, "supported")[1] == "yes"
    assert "it is not tried here" in row(page, "used")[1]
    some[2].attributes["MULTICAST_SUPPORTED"] = 0
    page = text(examine(some))
    assert row(page, "supported")[1] == "not by GPU 2"
    assert row(page, "used")[1].startswith("no: not supported")
    assert row(text(examine(gpus(2))), "supported")[1] == "no"
    assert row(text(examine(gpus(1, MULTICAST_SUPPORTED=1))), "used")[1] == "no: it takes two GPUs"
    for name, value in OFF_SWITCHES.items():
        with monkeypatch.context() as here:
            here.setenv(name, value)
            page = text(examine(gpus(2, MULTICAST_SUPPORTED=1)))
        assert row(page, "supported")[1] == "yes"
        assert row(page, "used")[1].startswith(f"no: switched off by {name}={value}")


def test_access_from_other_hosts_in_words(monkeypatch, tmp_path):
    def said(some):
        return row(text(examine(some)), "on other hosts")[1]

    some = gpus(2, HANDLE_TYPE_FABRIC_SUPPORTED=1)
    monkeypatch.setattr(doctor, "IMEX_CHANNELS", str(tmp_path / "channel*"))
    assert said(some) == "no: GPU 1 is in no NVLink domain that spans hosts"
    some[0].domain = some[1].domain = "c1/7"
    assert said(some).startswith("no: there is no IMEX channel here")
    (tmp_path / "channel0").touch()
    assert said(some) == "by fabric handles, with ranks on other GPUs of NVLink domain c1/7"
    some[1].attributes["HANDLE_TYPE_FABRIC_SUPPORTED"] = 0
    assert said(some) == "no: GPU 1 has no fabric handles"
    assert row(text(examine(some)), "on this host")[1] == "by file descriptors"


def test_examining_makes_nothing_on_the_gpu():
    drivers = []
    examine(gpus(4, MULTICAST_SUPPORTED=1), drivers=drivers)
    (driver,) = drivers
    assert not driver.leaks()
    assert set(driver.calls) == {"attribute", "domain"}, "only queries were wanted"


# ------------------------------------------------------------------------------------------------------ measuring
def test_the_trial_sends_and_checks_in_the_simulator():
    found = pkt.launch(doctor.trial, 3, "cpu", (2 * 128 * 128 * 4,), sms=4, races=False)
    assert found == [{"copy engine": 0.0, "registers": 0.0, "TMA": 0.0}] * 3


def test_the_trial_notices_missing_data(monkeypatch):
    def lost(*args, **options):
        pass

    monkeypatch.setattr(doctor, "push_tma_kernel", {(4,): lost})
    with pytest.raises(RankFailed, match=r"TMA: 65536 of 65536 elements differ from what rank"):
        pkt.launch(doctor.trial, 2, "cpu", (2 * 128 * 128 * 4,), sms=4, races=False)


@pytest.mark.parametrize("rank", [0, 1, 3])  # Triton makes a constant of the integer 1
@pytest.mark.parametrize("arch", [90, 100])
def test_the_kernels_compile(arch, rank):
    world, n = device_world(rank, 4), doctor.NBYTES // 2
    args = ("*bf16", "*bf16", n, world)
    registers = compile_only(doctor.push_registers_kernel, *args, 4096, arch=arch, num_warps=8)
    assert re.search(r"st\.global\.v(2\.b64|4\.b32)", registers.asm["ptx"]), "no stores of 16 bytes"
    tma = compile_only(doctor.push_tma_kernel, *args, 128, 128, arch=arch, num_warps=4)
    assert "cp.async.bulk.tensor.2d.global" in tma.asm["ptx"]
    assert tma.metadata.shared <= 227 << 10


def test_measuring_never_asks_for_multicast_and_shows_its_figures():
    asked = []

    def run(fn, ranks, device, args, **options):
        asked.append((fn, ranks, device, options["multicast"]))
        if fn is doctor.times:
            return [{"product": 250e-6, "copy": 0.5e-3}]
        assert options["heap"] >= 2 * args[0]
        return [{"copy engine": 390.4 + r, "TMA": 361.0} for r in range(ranks)]

    report = examine(gpus(3, MULTICAST_SUPPORTED=1))
    doctor.measure(report, run)
    assert asked == [(doctor.trial, 3, "cuda", False), (doctor.times, 1, "cuda", False)]
    page = text(report)
    assert row(page, "copy engine") == ["copy engine", "390", "391", "392"]
    assert "2 -> 0" in page
    assert re.search(r"pkt runs on 3 GPUs here \(tried, in \d+\.\d s\)", page)


def rates_kept(times, name="FakeGPU"):
    """The report, and the rates of the GPU that the model then has."""

    def run(fn, ranks, *_, **options):
        return [times() for _ in range(ranks)] if fn is doctor.times else [{"copy engine": 400.0}] * ranks

    report = examine(gpus(2))
    report.topology = replace(report.topology, gpus=tuple(replace(g, name=name) for g in report.topology.gpus))
    doctor.measure(report, run)
    return report, rates.measured(name)


def test_the_rates_of_other_gpus_are_kept_for_the_model():
    assert not rates.gpu_here("FakeGPU").measured
    report, kept = rates_kept(lambda: {"product": 100e-6, "copy": 0.2e-3})
    wanted = {"sms": 132, "product": 100e-6, "memory": 2 * doctor.COPIED / 0.2e-3, "link": 400e9}
    assert report.rates == kept == pytest.approx(wanted)
    page = text(report)
    assert row(page, "bf16 product, 4096 x 4096")[1] == "1374 TFLOP/s"
    assert row(page, "copy, read and written")[1] == "5369 GB/s"
    found = rates.gpu_here("FakeGPU")
    assert found.measured
    assert (found.memory, found.link) == (kept["memory"], 400e9)
    assert H200.flops < found.flops < 2 * H200.flops
    assert not rates.gpu_here("OtherGPU").measured
    rates_kept(lambda: {"product": 200e-6, "copy": 0.2e-3}, "OtherGPU")
    assert rates.gpu_here("FakeGPU") == found, "which was not forgotten"
    assert rates.gpu_here("OtherGPU").flops == pytest.approx(found.flops / 2)


def test_h200_s_rates_are_those_that_were_fitted():
    report, kept = rates_kept(lambda: pytest.fail("asked for what is known"), H200.name)
    assert (report.rates, kept) == ({}, None)
    assert rates.gpu_here(H200.name) == rates.gpu_with(H200.name, {"sms": 1}) == H200


def test_rates_measured_here_are_taken_before_those_of_other_h100s():
    assert rates.gpu_here(H100.name) == H100
    rates_kept(lambda: {"product": 200e-6, "copy": 0.2e-3}, H100.name)
    assert rates.gpu_here(H100.name).flops < H100.flops


def test_rates_that_cannot_be_measured_or_read_are_none(tmp_path):
    def fails():
        raise RuntimeError("out of memory")

    report, kept = rates_kept(fails)
    assert (report.status, kept) == (0, None)
    assert "note: the cost model has no rates of FakeGPU: RuntimeError: out of memory" in text(report)
    files.folder().mkdir(parents=True, exist_ok=True)
    for content in (
        "[]",
        "{",
        '{"format": 2, "gpus": {}}',
        '{"format": 1, "gpus": {"FakeGPU": {"sms": 132}}}',
        "[" * 100_000,
    ):
        (files.folder() / "rates.json").write_text(content)
        assert rates.measured("FakeGPU") is None


@pytest.mark.parametrize(
    "sms", [0, 0.5, 10**400, float("inf"), float("nan"), True, "132"], ids=lambda sms: str(sms)[:5]
)
def test_rates_that_no_gpu_has_are_none(sms):
    rates.store("FakeGPU", {"sms": sms, "product": 1e-4, "memory": 4e12, "link": 4e11})
    assert rates.measured("FakeGPU") is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_rates_are_read_from_a_regular_file_only(make):
    """Another one neither blocks nor raises: PKT_TUNE_CACHE may be a folder of others."""
    rates.store("FakeGPU", {"sms": 132, "product": 1e-4, "memory": 4e12, "link": 4e11})
    assert rates.measured("FakeGPU")
    path = files.folder() / "rates.json"
    path.rename(files.folder() / "elsewhere")
    make(path)
    assert rates.measured("FakeGPU") is None


def test_rates_that_two_programs_keep_at_once_are_both_kept(monkeypatch):
    given = {"sms": 132, "product": 1e-4, "memory": 4e12, "link": 4e11}
    other = threading.Thread(target=rates.store, args=("OtherGPU", given))
    read = rates._read

    def late():
        found = read()
        if other.ident is None:
            other.start()
            other.join(0.2)  # it would end in this time if it had not to wait
        return found

    with monkeypatch.context() as patch:
        patch.setattr(rates, "_read", late)
        rates.store("FakeGPU", given)
        other.join()
    assert rates.measured("FakeGPU") == rates.measured("OtherGPU") == given


def test_times_of_a_product_and_a_copy(monkeypatch):
    sent = []
    monkeypatch.setattr(doctor, "_seconds", lambda send, repeats: send() is None or sent.append(repeats) or 1e-3)
    world = SimpleNamespace(torch_device=torch.device("cpu"))
    assert doctor.times(world, 8, 64) == {"product": 1e-3, "copy": 1e-3}
    assert sent == [3, 3, 20, 20]


@pytest.mark.parametrize(("version", "told"), [("3.6.0", False), ("3.9.1", False), ("3.10.0", True)])
def test_which_triton_has_the_forms_in_gluon(monkeypatch, version, told):
    monkeypatch.setattr("triton.__version__", version)
    report = examine(gpus(2))
    assert report.ok
    assert ("note: the forms in Gluon" in text(report)) == told
    found = str(pkt.explain("ag_gemm", M=8192, N=2048, K=8192, gpu="NVIDIA H200"))
    assert ("mode=gluon" in found) != told
    assert (f"the form gluon does not run here: Triton {version}, not 3.6 to 3.9" in found) == told


def test_without_gpus_the_last_lines_say_what_works():
    page = text(examine([]))
    for line in ('device="cpu"', "pkt simulate file.py", "pkt explain ag_gemm", "A machine with GPUs needs"):
        assert line in page
    narrow = Console(width=80, file=io.StringIO(), force_jupyter=False)
    doctor.show(examine([]), narrow)
    assert page.rpartition("pkt does not run")[2] in narrow.file.getvalue(), "no line is broken on a narrow terminal"


def test_a_world_that_fails_is_fatal():
    def run(*args, **options):
        raise RankFailed.raised(2, "Traceback ...\nDriverError: cuMemMap failed")

    report = examine(gpus(4))
    assert report.status == 0
    doctor.measure(report, run)
    assert report.status == 1
    page = text(report)
    assert "missing: a world on 4 GPUs failed" in page
    assert "cuMemMap failed" in page
    assert "does not run on GPUs here" in page


# ------------------------------------------------------------------------------------------------------ the command
def command(*args, stdout=subprocess.PIPE):
    line = [sys.executable, "-m", "pkt.cli", *args]
    return subprocess.run(line, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_machine_without_a_gpu():
    done = command("doctor")
    assert done.returncode == 1, done.stderr
    assert "pkt does not run on GPUs here" in done.stdout
    assert "pkt simulate file.py" in done.stdout
    assert not done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    "args", [["--version"], ["explain", "gemm_rs", "--m", "64", "--n", "64", "--k", "64"], ["bench"]]
)
def test_output_that_cannot_be_written_is_one_message(args):
    with open("/dev/full", "w") as full:
        done = command(*args, stdout=full)
    assert (done.returncode, done.stderr) == (2, "pkt: the output cannot be written: No space left on device\n")


def test_every_benchmark_takes_help():
    for file in (ROOT / "benchmarks").glob("*.py"):
        text, main, block = file.read_text().partition('if __name__ == "__main__":\n')
        parses = "ArgumentParser(" in text or "_command import main" in text or "no_options(__doc__)" in block
        assert not main or parses, file


def test_simulate_is_the_same_as_python_m_pkt_simulate(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import pkt\n\n\ndef main(world):\n    x = pkt.ones(4)\n    assert x.sum() == 4\n\n\n"
        "def wrong(world):\n    assert world.rank != 1\n"
    )
    done = command("simulate", str(program), "--ranks", "2", "--seeds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert command("simulate", f"{program}:wrong", "--ranks", "2", "--seeds", "2").returncode == 1


def test_the_entry_point_and_the_help():
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]\n")[2].splitlines()[0]
    name, target = scripts.replace('"', "").split(" = ")
    module, _, attribute = target.partition(":")
    assert (name, getattr(importlib.import_module(module), attribute)) == ("pkt", cli.app)
    for package in ("pkt", "pkt.cli"):
        done = subprocess.run([sys.executable, "-m", package, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {"doctor", "simulate"} <= set(done.stdout.split())


@pytest.mark.gpu
def test_on_gpus():
    done = command("doctor")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"pkt runs on .*\(tried", done.stdout)
    if torch.cuda.device_count() > 1:
        speeds = [float(v) for name in ("copy engine", "registers", "TMA") for v in row(done.stdout, name)[1:]]
        assert min(speeds) > 10, "GB/s"
