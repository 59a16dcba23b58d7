"""The page of the operators, from their declarations: `python -m benchmarks.reference > docs/operators.md`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

from benchmarks._harness import no_options
from pkt.kernels.operator import Operator, operators

HEAD = """# Operators

Every operator in the registry: its signature, what it returns, and its forms, the values of `mode=`. W is the number of
ranks. The column "bytes" counts the bytes that leave each rank. [Gradients](inside-torch.md) are collective calls, too.
A form that begins with "over nodes" is for worlds of several [nodes](scale-out.md), where no other form runs. N is the
number of nodes. These have run in the simulator and on [GPUs of one host](scale-out.md#runs-on-gpus).
`python -m benchmarks.reference > docs/operators.md` makes this page.
[Add an operator](adding-an-operator.md)

## What they share

- A *flagged word* is 12 bytes of data and a flag of 4 bytes. A reader that finds the flag has the data, so forms with flagged
  words need no barrier.
- In the fused products b may be the `w.t()` of a Linear's weight. A bias and relu, gelu or silu are applied before the result
  is rounded.
- Every operator but `broadcast` takes `out=`.
- The fused products take `workspace=pkt.Workspace()` if their buffers should not live as long as the world.
  `matmul_all_to_all` and `all_to_all_matmul` take none.
- pkt caches the launch setup, so a warm eager call is cheaper than a plain Triton launch of the same kernel. When a call of
  several kernels and copies has had the same addresses twice, pkt records it. Later calls with these addresses cost one driver
  call.

## Which form a call takes

Without `mode=`, a collective chooses by the operands and their size:

| collective | small: low-latency | then | `copy` from |
|---|---|---|---|
| `all_gather`, `all_to_all` | up to a megabyte or two | `push`; `pull` if only x is symmetric, `inbox` if nothing is | 256 MiB of a symmetric result |
| `reduce_scatter` | up to a megabyte or two | `push` | 512 MiB of x; on 2 ranks 2 GiB |
| `all_reduce` | up to a megabyte or two | `multimem` for sums where the ranks have multicast; else `two_shot`, and `two_shot_push` from 4 MiB; `inbox` if the result is not symmetric | 256 MiB of x, where neither `multimem` nor `inbox` is chosen |
| `broadcast` | up to a megabyte or two | `pass_on`; `inbox` if x is not symmetric | never |

A fused product on GPUs takes the form that was tuned on this machine, or was measured for a shape like this one. Otherwise it
takes the form with the least predicted time. `pkt.explain` names the form and the reason. In the simulator the default is
`push`, `add` or `lcsc`. `matmul_all_to_all` and `all_to_all_matmul` take `unfused`, or `push` for many rows. The other fused
products have these forms beside their own:

| `mode` | what it does | where it runs |
|---|---|---|
| `gluon` | the fused form in specialised warps | bf16 or fp16, rows of whole 16 bytes, 2 to 8 ranks, sm_90, Triton 3.6, A sharded by rows |
| `low_latency` | for few rows: one launch without a barrier reads the weights once | up to 8 ranks |
| `unfused` | cuBLAS and pkt's collective, one after the other | everywhere |
| `nccl` | cuBLAS and NCCL, through torch.distributed | GPUs in a process group |
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
    no_options(__doc__)
    print(page(), end="")
