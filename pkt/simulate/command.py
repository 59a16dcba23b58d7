"""The command `pkt simulate file.py[:function] --ranks 4 --seeds 1000`: explore the schedules of a function."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pkt.simulate.explore import simulate
from pkt.simulate.machine import MOST_SMS, SMS


def load(target: str) -> Callable[..., Any]:
    """Return the function `name` of "path/file.py:name", or `main` where no name is given."""
    path, _, name = target.partition(":")
    if not os.path.isfile(path):
        raise typer.BadParameter(f"no file {path}; wanted file.py or file.py:function")
    module_name = Path(path).stem
    while module_name in sys.modules:  # torch.py must not take the place of torch
        module_name += "_"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is no Python file; wanted file.py or file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit(0) in the file is no result of a simulation
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != spec.origin:
            trace = trace.tb_next
        shown = "".join(traceback.format_exception(error.with_traceback(trace)))
        typer.echo(f"{shown}{path} cannot be loaded", err=True)
        raise typer.Exit(2) from error
    fn = getattr(module, name or "main", None)
    if not callable(fn):
        offered = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == spec.name]
        raise typer.BadParameter(f"{path} has no function {name or 'main'}; it has {', '.join(offered) or 'none'}")
    return fn


def main(
    target: Annotated[str, typer.Argument(help="file.py or file.py:function; the function takes the world")],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="ranks to simulate")] = 4,
    seeds: Annotated[int, typer.Option(min=1, max=10**9, help="schedules to run")] = 1000,
    seed: Annotated[int | None, typer.Option(help="replay this one schedule")] = None,
    node_size: Annotated[int | None, typer.Option(min=1, help="ranks of a node; one node where not given")] = None,
    sms: Annotated[int, typer.Option(min=1, max=MOST_SMS, help="programs that fit on a rank at once")] = SMS,
    heap: Annotated[str | None, typer.Option(help="size of each rank's symmetric heap; PKT_HEAP, then 1GiB")] = None,
    races: Annotated[bool, typer.Option(help="detect data races")] = True,
    multicast: Annotated[bool, typer.Option(help="give the ranks a multicast window")] = True,
    mutants: Annotated[bool, typer.Option(help="break every wait, signal, barrier and fence in turn")] = False,
    lost_signals: Annotated[bool, typer.Option(help="drop every signal in turn")] = False,
    lost_ranks: Annotated[
        int, typer.Option(min=0, max=10**6, help="how often a rank stops or dies at a random point")
    ] = 0,
    compile: Annotated[str | None, typer.Option(help="compile the kernels for this target: sm_90 or sm_100")] = None,
) -> None:
    """Run a function on simulated ranks under many schedules; exit status 1 if anything is found."""
    function = load(target)
    report = simulate(
        function,
        ranks,
        seeds if seed is None else [seed],
        node_size=node_size,
        heap=heap,
        sms=sms,
        races=races,
        multicast=multicast,
        mutants=mutants,
        lost_signals=lost_signals,
        lost_ranks=lost_ranks,
        compile=compile,
    )
    print(report)
    raise typer.Exit(0 if report.ok else 1)
