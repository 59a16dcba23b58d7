"""What the collectives should take over many nodes, by pkt's cost model, and what others have published.

    python -m benchmarks.scale_out

Nothing is measured. It writes benchmarks/results/scale_out.json (pkt.tune.predict, from 8 to 4,096 GPUs), its picture,
and benchmarks/results/scale_out_published.json (published times beside predicted ones). `python -m benchmarks.figures`
then writes the tables of docs/scale-out.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, no_options
from benchmarks._pictures import draw_if_possible
from pkt.model.gpu import H200
from pkt.tune import predict

NETWORK = "400Gb"
OPERATORS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MIB = (1, 16, 256)
"""Of x in bf16 on each rank; for all_gather, of the gathered tensor."""
NODES = ((2, 4), *((2**n, 8) for n in range(1, 10)))
"""(nodes, GPUs of a node)"""
DISPATCH, COMBINE = (128 * 8, (7168 + 16 + 7168 // 128 * 4) // 2), (128 * 8, 7168)
"""x in bf16 of the exchange of 128 tokens of 7168 elements with 8 experts each. To the experts an element has 1 byte,
128 elements a scale of 4 bytes and a token 16 bytes more, as in Triton-distributed's documentation of its kernel."""
SOURCES = [
    {
        "name": "DeepEP V1",
        "what": "low-latency kernels",
        "url": "https://github.com/deepseek-ai/DeepEP/blob/0297fc801788b14b338a46554faca28d419e518a/docs/legacy.md",
        "on": "H800, each with a 400 Gb/s InfiniBand card",
    },
    {
        "name": "Triton-distributed",
        "what": "low-latency all-to-all",
        "url": "https://github.com/ByteDance-Seed/Triton-distributed/blob/0e20c8d1b86cf2e3b81dac2929780defe5c3d7cf/README.md",
        "on": "H800 with a network that the page does not name",
    },
]
PUBLISHED = [  # source, what, x, GPUs, microseconds
    *((0, "dispatch", DISPATCH, n, us) for n, us in ((16, 118), (32, 155), (64, 173), (128, 192), (256, 194))),
    *((0, "combine", COMBINE, n, us) for n, us in ((16, 195), (32, 273), (64, 314), (128, 369), (256, 360))),
    (1, "dispatch", DISPATCH, 32, 137),
]
"""128 tokens on each GPU, 7168 elements, 8 experts a token; fp8 to the experts, bf16 back."""


def predicted() -> dict[str, Any]:
    """The content of scale_out.json, without the date and the like that a measurement has."""
    found = {name: {str(mib): [_row(name, mib, *nodes) for nodes in NODES] for mib in MIB} for name in OPERATORS}
    return {
        "benchmark": "scale_out", "command": "python -m benchmarks.scale_out", "kind": "predicted, not measured",
        "gpu": H200.name, "network": NETWORK, "mib": list(MIB), "predicted": found,
    }  # fmt: skip


def _row(name: str, mib: int, nodes: int, node_size: int) -> dict[str, Any]:
    gpus = nodes * node_size
    found = predict(name, (mib << 19) // (gpus if name == "all_gather" else 1), nodes, node_size, NETWORK)
    ms, efficiency = (float(f"{value:.4g}") for value in (1e3 * found.seconds, found.efficiency))
    return {"gpus": gpus, "nodes": nodes, "node_size": node_size, "ms": ms, "efficiency": efficiency}


def published() -> dict[str, Any]:
    """The content of scale_out_published.json."""
    rows = [
        {
            "source": source, "what": what, "gpus": gpus, "published_us": us,
            "predicted_us": float(f"{1e6 * predict('all_to_all', x, gpus // 8, 8, NETWORK).seconds:.4g}"),
        }
        for source, what, x, gpus, us in PUBLISHED
    ]  # fmt: skip
    return {
        "benchmark": "scale_out_published", "command": "python -m benchmarks.scale_out", "gpu": H200.name,
        "network": NETWORK, "sources": SOURCES, "compared": rows,
    }  # fmt: skip


def text(record: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    rows: list[str] = []

    def short(value: Any) -> Any:
        """`value` with a place in `rows` for each row of it."""
        if isinstance(value, dict) and "gpus" in value:
            rows.append(json.dumps(value))
            return f"@{len(rows) - 1}@"
        if isinstance(value, dict):
            return {name: short(part) for name, part in value.items()}
        return [short(part) for part in value] if isinstance(value, list) else value

    whole = json.dumps(short(record), indent=1)
    for at, row in enumerate(rows):
        whole = whole.replace(f'"@{at}@"', row)
    return whole + "\n"


def main(folder: Path = RESULTS) -> None:
    for record in (predicted(), published()):
        path = folder / f"{record['benchmark']}.json"
        path.write_text(text(record), encoding="utf-8")
        draw_if_possible(path)
        print(f"written: {path.name}")


if __name__ == "__main__":
    no_options(__doc__)
    main()
