"""The command `pkt` with its subcommands doctor, simulate, tune, explain, bench and demo."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import pkt
from pkt.bench import main as benchmark
from pkt.doctor import examine, measure, show
from pkt.errors import PktError
from pkt.simulate.command import main as simulate
from pkt.tune.command import main as tune
from pkt.tune.command import shape_of
from pkt.tune.explanation import explain as explained
from pkt.wording import columns


class _Commands(typer.core.TyperGroup):
    """Shows an error of pkt as one message, with exit status 2, as click shows a wrong option; output that cannot be
    written, too."""

    def main(self, *args: Any, **named: Any) -> Any:
        try:
            try:
                return super().main(*args, **named)
            finally:
                print(end="", flush=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EPIPE):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # at its end Python writes what is still in the buffer
            if error.errno == errno.EPIPE:
                sys.exit(1)  # as click does
            with contextlib.suppress(OSError):  # standard error may be full, too
                typer.echo(f"pkt: the output cannot be written: {error.strerror}", err=True)
            sys.exit(2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PktError as error:
            typer.echo(f"pkt: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"pkt {pkt.__version__}")
        raise typer.Exit


@app.callback(
    epilog=_examples(
        "pkt doctor                         what runs on this machine",
        "pkt simulate ring.py --ranks 4     1,000 schedules of main(world) in ring.py",
        "pkt COMMAND --help                 options and more examples",
    )
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """ParallelKittens for Triton: kernels that compute and communicate on several GPUs, and a simulator that runs and
    checks them with no GPU."""


@app.command(
    short_help="show what runs on this machine, and what it lacks",
    epilog=_examples("pkt doctor", "pkt doctor --no-bandwidth"),
)
def doctor(
    bandwidth: Annotated[bool, typer.Option(help="open a world on the GPUs and time transfers between them")] = True,
) -> None:
    """Show the GPUs and features that pkt can use here; exit status 0 only if pkt runs on GPUs here."""
    report = examine()
    if bandwidth and report.ok:
        measure(report)
    show(report, Console(width=columns(120)))
    raise typer.Exit(report.status)


app.command(
    "simulate",
    short_help="run a function under many schedules, without a GPU",
    epilog=_examples(
        "pkt simulate ring.py",
        "pkt simulate ring.py:main --ranks 8 --seeds 200 --mutants",
        "pkt simulate ring.py --seed 17",
    ),
)(simulate)
app.command(
    "tune",
    short_help="search for an operator's fastest settings",
    epilog=_examples(
        "pkt tune ag_gemm --ranks 4 --m 8192 --n 8192 --k 8192",
        "pkt tune gemm_ar --ranks 2 --device cpu --m 64 --n 64 --k 64",
        "pkt tune all_reduce --shape 4096 --ranks 8 --node-size 4 --device cpu",
        "pkt tune --all",
    ),
)(tune)


@app.command(
    short_help="say which settings an operator takes, and why",
    epilog=_examples(
        "pkt explain ag_gemm --m 8192 --n 2048 --k 8192",
        "pkt explain gemm_rs --m 512 --n 8192 --k 7168 --ranks 2",
        "pkt explain all_reduce --shape 4096x8192",
        "pkt explain all_reduce --shape 4096x8192 --ranks 64 --node-size 8",
    ),
)
def explain(
    operator: Annotated[str, typer.Argument(help="the operator's name, or its short one, as ag_gemm")],
    m: Annotated[int | None, typer.Option(min=1, help="rows of the product that each rank computes")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="columns of that product")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="what that product sums over")] = None,
    shape: Annotated[str | None, typer.Option(help="of a collective's x, in place of m, n and k: 4096x8192")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 4,
    node_size: Annotated[int | None, typer.Option(min=1, help="ranks of a node; all where left out")] = None,
    network: Annotated[str, typer.Option(help="between nodes: what a GPU's link carries in a second")] = "400Gb",
    gpu: Annotated[str, typer.Option(help="as torch names it")] = "NVIDIA H200",
) -> None:
    """Show which settings an operator takes where none are given, why, and the predicted and measured times."""
    lengths, size = shape_of("pkt explain", shape), node_size or ranks
    explained(
        operator, M=m, N=n, K=k, shape=lengths, dtype=dtype, size=ranks, node_size=size, network=network, gpu=gpu
    )  # fmt: skip


_ANY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(short_help="run a benchmark of a clone of pkt; without a name list them", context_settings=_ANY)
def bench(ctx: typer.Context) -> None:
    """Run a benchmark, as `python -m pkt.bench`; without a name it lists them."""
    benchmark(ctx.args)


@app.command(short_help="check, explore, break and draw a fused product, in a clone", context_settings=_ANY)
def demo(ctx: typer.Context) -> None:
    """Run the demo of a checkout: a fused GEMM + all-reduce on four simulated ranks, checked, explored and broken."""
    benchmark(["demo", *ctx.args])


if __name__ == "__main__":
    app()
