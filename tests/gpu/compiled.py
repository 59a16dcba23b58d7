"""Compile the kernels of tests/gpu and benchmarks.link, without a GPU.

`python -m tests.gpu.compiled [-k PART] [--arch 90]`

Each program runs in the simulator, which records its launches. Then each kernel is compiled with the arguments of its
launches, rank by rank, as Triton would do on the GPU. A wait or signal that the compiler drops is an error, too.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import pkt
from pkt.language.inspect import Pointer, compile_only
from pkt.simulate.machine import Machine

Launch = tuple[Any, tuple, dict[str, Any]]


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect the launches of the simulations inside the `with` block, with arguments that outlive the simulations."""
    noted: list[Launch] = []
    original = Machine.launch

    def launch(self: Machine, kernel: Any, *args: Any, **named: Any) -> None:
        noted.append((kernel, tuple(map(_kept, args)), {k: _kept(v) for k, v in named.items()}))
        original(self, kernel, *args, **named)

    Machine.launch = launch  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Machine.launch = original  # type: ignore[method-assign]


def _kept(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(str(x.dtype).removeprefix("torch."), 4096 + x.data_ptr() % 256)
    if isinstance(x, tuple):
        return type(x)(*map(_kept, x)) if hasattr(x, "_fields") else tuple(map(_kept, x))
    return x


def compile_launches(fn: Callable[..., Any], ranks: int, arch: int = 90, **options: Any) -> int:
    """Run `fn(world)` on simulated ranks without multicast and compile its kernels. Returns the number of kernels."""
    with launches() as noted:
        pkt.launch(fn, ranks=ranks, device="cpu", multicast=False, **options)
    compiled = set()
    for kernel, args, named in noted:
        named.pop("warmup", None)
        named["grid"] = (1,)
        compiled.add(compile_only(kernel, *args, arch=arch, **named).hash)
    return len(compiled)


def programs() -> Iterator[tuple[str, Callable[[Any], Any], int, dict[str, Any]]]:
    """(name, fn, ranks, options) of everything that tests/gpu and benchmarks.link run."""
    from benchmarks import link_measure as link
    from pkt.kernels.operator import operators
    from tests import cases_language, cases_litmus
    from tests.conformance.checks import explored, name_of
    from tests.gpu import cases_graphs

    for ranks in (2, 3, 4):
        for case in cases_language.CASES:
            yield f"{case.name} on {ranks}", case.fn, ranks, {}
        for name, fn in cases_litmus.LITMUS.items():
            yield f"litmus {name} on {ranks}", lambda world, fn=fn: fn(world, 3, 4), ranks, {}
        for name, fn in cases_graphs.CASES.items():
            yield f"{name} on {ranks}", fn, ranks, {}
        yield f"link on {ranks}", lambda world: link.measure(world, link.Plan.simulated()), ranks, {}
    for operator in operators().values():
        for case in (case for case in operator.cases if case.explore and case.node_size is None):
            yield f"{name_of(operator, case)} on {case.ranks}", explored(operator, case), case.ranks, {"sms": case.sms}


def main() -> int:
    """Compile all; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only programs whose name matches this regular expression")
    parser.add_argument("--arch", type=int, default=90)
    given = parser.parse_args()
    failed = []
    for name, fn, ranks, options in programs():
        if not re.search(given.k, name):
            continue
        start = time.perf_counter()
        try:
            print(f"{name}: {compile_launches(fn, ranks, given.arch, **options)} kernels, ", end="")
            print(f"{time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {failed}" if failed else "all compiled")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
