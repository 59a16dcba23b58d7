"""The reference page of the operators, from their declarations: `python -m pkt.kernels.page > docs/operators.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from .operator import Operator, operators

HEAD = """# Operators

Every operator in the registry: its signature, what it returns, and its forms, the values of `mode=`. W is the number of
ranks. The column "bytes" counts what leaves each rank. `python -m pkt.kernels.page` makes this page.
[Add an operator](adding-an-operator.md)
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(operator) for operator in operators().values())])


def section(operator: Operator) -> str:
    """What one operator takes, returns and raises, and a table of its forms."""
    signature = str(inspect.signature(operator.function)).replace("torch.", "").replace("'", "")
    lines = ["", *(f"| {' | '.join(row)} |" for row in forms(operator)), ""]
    doc = inspect.getdoc(operator.function) or ""
    return "\n".join([f"## pkt.{operator.name}", "", "```", f"{operator.name}{signature}", "", doc, "```", *lines])


def forms(operator: Operator) -> list[tuple[str, ...]]:
    """The rows of the table of forms, with the head."""
    rows: list[tuple[str, ...]] = [("mode", "how", "bytes", "settings", "symmetric"), ("---",) * 5]
    for mode, form in operator.forms.items():
        moves = form.moves.replace("|", "\\|")
        rows.append((f"`{mode}`", form.how, moves, names(form.settings), names(form.symmetric)))
    return rows


def names(of: Iterable[str]) -> str:
    """Names in code type, or a dash."""
    return ", ".join(f"`{name}`" for name in of) or "–"


if __name__ == "__main__":
    print(page(), end="")
