"""The command `pkt` with its subcommands doctor, simulate and tune."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from pkt.doctor import examine, measure, show
from pkt.simulate.__main__ import main as simulate
from pkt.tune.command import main as tune

app = typer.Typer(
    help="ParallelKittens for Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("simulate")(simulate)
app.command("tune")(tune)


@app.command()
def doctor(
    bandwidth: Annotated[bool, typer.Option(help="open a world on the GPUs and time transfers between them")] = True,
) -> None:
    """Show the GPUs and features that pkt can use here; exit status 0 only if pkt runs on GPUs here."""
    report = examine()
    if bandwidth and report.ok:
        measure(report)
    # For a file or a pipe rich assumes 80 columns, which would break the lines of tables.
    show(report, Console(width=None if sys.stdout.isatty() else 120))
    raise typer.Exit(report.status)


if __name__ == "__main__":
    app()
