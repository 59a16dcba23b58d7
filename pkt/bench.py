"""Run one of pkt's benchmarks from a checkout: python -m pkt.bench ag_gemm --ranks 4

The benchmarks are programs of the repository, in benchmarks/, not part of the installed package; what follows the name
goes to them (--help shows it).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from pkt.tune.explanation import NAMES

SHORT = {**NAMES, "variants": "all_gather_matmul_variants"}
"""What an operator is called in papers: the benchmark's file."""


def names(folder: Path) -> list[str]:
    """The benchmarks in `folder` that are programs."""
    files = sorted(folder.glob("[a-z]*.py"))
    return [file.stem for file in files if 'if __name__ == "__main__":' in file.read_text()]


def main(arguments: list[str], checkout: Path | None = None) -> int:
    """Run the benchmark `arguments[0]` with the others; an exit status. checkout: the folder that holds benchmarks/, by
    default the one this pkt was imported from."""
    checkout = checkout or Path(__file__).resolve().parents[1]
    folder = checkout / "benchmarks"
    if not folder.is_dir():
        print(f"pkt.bench: no folder {folder}: the benchmarks come with a checkout of pkt's repository, where")
        print("`python -m pkt.bench` runs them against the pkt beside them.")
        return 2
    found = names(folder)
    name = SHORT.get(arguments[0], arguments[0]) if arguments else ""
    if name not in found:
        shown = ", ".join([*SHORT, *(other for other in found if other not in SHORT.values())])
        print(f"python -m pkt.bench NAME [options]: NAME is one of {shown}")
        return 2
    sys.path.insert(0, str(checkout))  # benchmarks is imported by name, in the ranks' processes too
    sys.argv = [name, *arguments[1:]]
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
