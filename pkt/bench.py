"""`python -m pkt.bench NAME [options]` runs the benchmark `benchmarks/NAME.py` of the checkout that holds this pkt.

The operators have short names, as in `python -m pkt.bench ag_gemm --ranks 4`. For an operator without a program of its
own, `benchmarks/forms.py` measures every form. `--help` after the name lists a benchmark's options.
"""

from __future__ import annotations

import runpy
import sys
import textwrap
from pathlib import Path

import torch

from pkt.errors import Unsupported
from pkt.kernels.operator import operators

CHECKOUT = Path(__file__).resolve().parents[1]


def short_names() -> dict[str, str]:
    """Short name -> name, of the operators that have one."""
    return {operator.tuning.short: name for name, operator in operators().items() if operator.tuning}


def main(arguments: list[str], checkout: Path = CHECKOUT) -> None:
    """Run the benchmark `arguments[0]` with the other arguments. Exits with status 2 if there is no such benchmark, and
    with 0 after a list of them, where it is --help."""
    files = sorted((checkout / "benchmarks").glob("[a-z]*.py"))
    programs = [file.stem for file in files if '__name__ == "__main__"' in file.read_text()]
    short = short_names()
    name, options = short.get(arguments[0], arguments[0]) if arguments else "", arguments[1:]
    if name not in programs and name in operators() and "forms" in programs:
        name, options = "forms", ["--sizes", f"pkt.{name} ", *options]
    if not programs:
        remedy = "they come with a clone of pkt: install that one, with pip install -e ."
        raise Unsupported.here(f"pkt bench {name}".rstrip(), f"found no benchmarks beside pkt in {checkout}", remedy)
    if name not in programs:
        print(_listed(short, [p for p in programs if p not in operators()]))
        if name != "--help":
            print(f"pkt bench: {f'found {name!r}, ' if name else ''}wanted one of these names", file=sys.stderr)
        sys.exit(0 if name == "--help" else 2)
    wants_gpus = name in {*operators(), "forms"} and not {"cpu", "--help"} & set(options)
    if wants_gpus and checkout == CHECKOUT and not torch.cuda.is_available():
        raise Unsupported.here(f"pkt bench {arguments[0]}", "found no GPU", "pkt explain predicts times without one")
    sys.path.insert(0, str(checkout))  # the ranks' processes import benchmarks by name, too
    sys.argv = [name, *options]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


def _listed(short: dict[str, str], others: list[str]) -> str:
    """The names of all benchmarks, in lines of 78 columns."""
    names = {name: f"{name} ({short_name})" for short_name, name in short.items()}
    lines = ["Usage: pkt bench NAME [options]      pkt bench NAME --help lists the options"]
    groups = {"Operators": [names.get(name, name) for name in operators()], "Others": others}
    for title, group in groups.items():
        words = [word.replace(" ", "\0") for word in group]  # a short name stays beside its name
        text = textwrap.fill(", ".join(words), 78, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
        lines += ["", f"{title}:", text.replace("\0", " ")]
    examples = "pkt bench ag_gemm --ranks 4", "pkt bench all_reduce --device cpu --quick", "pkt bench simulator --help"
    return "\n".join([*lines, "", "Examples:", *(f"  {line}" for line in examples)])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Unsupported as error:
        sys.exit(f"pkt: {error}")
