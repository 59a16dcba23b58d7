"""pkt.explain for a collective: the form for symmetric tensors and for plain ones, and what symmetric ones save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import Operator
from pkt.model.gpu import Gpu
from pkt.tune.prediction import check_held
from pkt.tune.printed import Printed
from pkt.wording import dtype_text, size_text

CALL = "pkt.explain"


@dataclass(frozen=True)
class Taken:
    """The form for one kind of tensors, and the bytes that a rank takes out of its inbox in each call. seconds: that
    the GPU's memory takes for these, beside the transfer; 0.0 without any, None for an unknown GPU."""

    tensors: str
    mode: str
    nbytes: int
    seconds: float | None


@dataclass(frozen=True, repr=False)
class Copies(Printed):
    """The answer of `explain` for a collective; str() gives the text that was printed.

    key: x, dtype, number of ranks and GPU. symmetric, plain: what is taken for tensors of pkt and for others.
    """

    operator: Operator
    key: Mapping[str, Any]
    symmetric: Taken
    plain: Taken

    def __rich__(self) -> Group:
        table = Table()
        for name in ("tensors", "form", "through an inbox, bytes", "about, us"):
            table.add_column(name, justify="left" if name in ("tensors", "form") else "right")
        for taken in (self.symmetric, self.plain):
            about = "" if taken.seconds is None else f"{1e6 * taken.seconds:.3g}"
            table.add_row(taken.tensors, taken.mode, f"{taken.nbytes:,}", about)
        case = ", ".join(f"{name}={value}" for name, value in self.key.items())
        return Group(Text(f"{self.operator.name}: {case}", style="bold"), table, Text(self._saved()))

    def __repr__(self) -> str:
        return f"Copies({self.operator.name}: {self.plain.nbytes} bytes for plain tensors)"

    def _saved(self) -> str:
        if not self.plain.nbytes:
            return "symmetric tensors save no copy: this form takes plain ones where they are"
        about = "" if self.plain.seconds is None else f", about {1e6 * self.plain.seconds:.3g} us of the GPU's memory"
        return f"symmetric tensors save the way of {size_text(self.plain.nbytes)} through an inbox{about}, in each call"


def copies(operator: Operator, shape: Any, dtype: Any, size: int, gpu: Gpu, multicast: bool) -> Copies:
    """What `operator` takes for x of a shape, with its other arguments left out. multicast: of the ranks. Raises
    ShapeError, DtypeError."""
    lengths = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else (-1,)
    if not all(type(n) is int and n >= 0 for n in lengths):
        raise ShapeError.argument(CALL, "shape", repr(shape), "the shape of x, as in (4096, 8192)")
    check_held(CALL, "shape", lengths)
    found = next((d for d in operator.tensors["x"].dtypes if dtype_text(d) == dtype_text(dtype)), None)
    if found is None:
        wanted = ", ".join(dtype_text(d) for d in operator.tensors["x"].dtypes)
        raise DtypeError.argument(CALL, "dtype", dtype, wanted)
    taken, names = [], " and ".join(name for name in ("x", "out") if name in operator.names)
    for kind, symmetric in (("symmetric", True), ("plain", False)):
        mode, nbytes = operator.collective(lengths, found, size, gpu, symmetric, multicast)
        seconds = 2 * nbytes / gpu.memory if gpu.measured else None  # read and written
        taken.append(Taken(f"{kind} {names}", mode, nbytes, seconds))
    key = {"x": lengths, "dtype": dtype_text(found), "size": size, "gpu": gpu.name}
    return Copies(operator, key, *taken)
