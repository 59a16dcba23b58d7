"""One small run of every kernel, to be run under a checker of memory accesses:

compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 python -m tests.gpu.sanitize [RANKS]
"""

from __future__ import annotations

import os
import sys
import time

from pkt.kernels.operator import operators
from tests.cases_language import CASES
from tests.cases_litmus import LITMUS
from tests.conformance import checks
from tests.gpu import cases_graphs
from tests.gpu.run import FOUND, launch, one_after_the_other

SECONDS = 120.0  # a checked program is a hundred times slower


def main(ranks: int) -> int:
    """Every program once on that many GPUs, in one world."""
    if ranks > FOUND:
        print(f"needs {ranks} GPUs, found {FOUND}")
        return 2
    # torch's cache would keep the memory around a tensor allocated, so accesses beyond the tensor would pass.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    programs = [(case.name, case.fn) for case in CASES]
    for operator in operators().values():
        explored = [case for case in operator.cases if case.explore and case.ranks == ranks and case.node_size is None]
        programs += [(f"kernels.{checks.name_of(operator, c)}", checks.explored(operator, c)) for c in explored]
    if ranks > 1:
        programs += [(f"litmus {name}", lambda world, fn=fn: fn(world, 6, 8)) for name, fn in LITMUS.items()]
        programs.append(("two streams", lambda world: cases_graphs.two_streams(world, 3)))
        for name in cases_graphs.PROGRAMS:  # the operators' forms for GPUs, Gluon included
            programs.append((name, lambda world, name=name: cases_graphs.back_to_back(world, name, 2)))
    start = time.perf_counter()
    launch(one_after_the_other, ranks, programs, timeout=SECONDS)
    print(f"{len(programs)} programs on {ranks} ranks: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else min(2, FOUND)))
