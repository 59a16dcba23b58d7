"""The page of the operators, from their declarations: `python -m benchmarks.reference > docs/operators.md`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

from pkt.kernels.operator import Operator, operators

HEAD = """# Operators

Every operator in the registry: its signature, what it returns, and its forms, the values of `mode=`. W is the number of
ranks. The column "bytes" counts the bytes that leave each rank. [Gradients](inside-torch.md) are collective calls, too.
A form that begins with "over nodes" is for worlds of several [nodes](scale-out.md), where no other form runs. N is the
number of nodes. Such worlds run in the simulator only.
`python -m benchmarks.reference > docs/operators.md` makes this page.
[Add an operator](adding-an-operator.md)
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(operator) for operator in operators().values())])


def section(operator: Operator) -> str:
    """What one operator takes, returns and raises, and a table of its forms."""
    signature = re.sub(r"(?<=[:>] )'([^']*)'", r"\1", str(inspect.signature(operator.function))).replace("torch.", "")
    call = textwrap.fill(f"{operator.name}{signature}", 120, subsequent_indent="    ")
    backward = operator.backward
    gradient = "none" if backward is None else backward.how or "declared"
    lines = ["", *(f"| {' | '.join(row)} |" for row in forms(operator)), "", f"Gradient: {gradient}.", ""]
    doc = inspect.getdoc(operator.function) or ""
    return "\n".join([f"## pkt.{operator.name}", "", "```", call, "", doc, "```", *lines])


def forms(operator: Operator) -> list[tuple[str, ...]]:
    """The rows of the table of forms, with the head."""
    rows: list[tuple[str, ...]] = [("mode", "how", "bytes", "settings", "symmetric"), ("---",) * 5]
    for mode, form in (operator.forms | operator.across).items():
        how = f"over nodes: {form.how}" if mode in operator.across else form.how
        moves = form.moves.replace("|", "\\|")
        rows.append((f"`{mode}`", how, moves, names(form.settings), names(form.symmetric)))
    return rows


def names(of: Iterable[str]) -> str:
    """Names in code type, or a dash."""
    return ", ".join(f"`{name}`" for name in of) or "–"


if __name__ == "__main__":
    print(page(), end="")
