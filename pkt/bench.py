"""`python -m pkt.bench NAME [options]` runs the benchmark `benchmarks/NAME.py` of the checkout that holds this pkt.

The operators have short names, as in `python -m pkt.bench ag_gemm --ranks 4`. `--help` after the name lists a
benchmark's options.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from pkt.kernels.operator import operators

CHECKOUT = Path(__file__).resolve().parents[1]


def short_names() -> dict[str, str]:
    """Short name -> name, of the operators that have one."""
    return {operator.tuning.short: name for name, operator in operators().items() if operator.tuning}


def main(arguments: list[str], checkout: Path = CHECKOUT) -> None:
    """Run the benchmark `arguments[0]` with the other arguments. Exits with status 2 if there is no such benchmark."""
    files = sorted((checkout / "benchmarks").glob("[a-z]*.py"))
    programs = [file.stem for file in files if '__name__ == "__main__"' in file.read_text()]
    short = short_names()
    name = short.get(arguments[0], arguments[0]) if arguments else ""
    if name not in programs:
        known = ", ".join([*short, *programs]) if programs else f"none in {checkout}: benchmarks come with a checkout"
        print(f"python -m pkt.bench NAME [options]; the names: {known}")
        sys.exit(2)
    sys.path.insert(0, str(checkout))  # the ranks' processes import benchmarks by name, too
    sys.argv = [name, *arguments[1:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
