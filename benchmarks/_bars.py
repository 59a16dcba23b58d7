"""Bars: attention over ranks, decoding and experts beside what people run today, as the papers draw them: figures 10 to
12 of ParallelKittens, and figure 10 of The Three Taxes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._report import DEFAULT
from benchmarks._style import BASE, LIGHT, OTHER, PKT, SMALL, TORCH, Record, Series, canvas, plain

Times = Mapping[str, Mapping[str, float]]
"""Case -> variant -> milliseconds."""
BACKWARD = 3.5  # products of a forward and a backward pass of attention, in those of a forward pass
WIDE = 128  # elements of a head of ulysses_attention's cases
HIGH, LEAST = 2.1, 3  # inches of a panel, and cases for which it has room


def times(record: Record) -> Times:
    """Of runs that keep a row for each variant, and of runs whose rows are "case, variant"."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in record.get("measured", []):
        if "ms" in row:
            found[row["case"]][row["variant"]] = row["ms"]
    for row in [] if found else record["rows"]:
        case, variant = re.fullmatch(r"(.+?(?:D\d+|S = \d+)), (.+)", row["case"]).groups()  # type: ignore[union-attr]
        found[case][variant] = row["value"]
    return found


def bars(axes: Any, head: str, rows: Times, key: Mapping[str, Series]) -> None:
    """A group of bars for each case, a bar for each series, the figure above each bar of the first series."""
    plain(axes, head)
    axes.grid(axis="x", visible=False)
    wide = 0.8 / len(key)
    for number, (name, look) in enumerate(key.items()):
        at = [place + (number - (len(key) - 1) / 2) * wide for place, of in enumerate(rows.values()) if name in of]
        high = [of[name] for of in rows.values() if name in of]
        drawn = axes.bar(at, high, 0.92 * wide, color=look.colour)
        if not number:
            axes.bar_label(drawn, [f"{value:.0f}" for value in high], fontsize=SMALL, color=look.colour, padding=1)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_xlim(-0.6, max(len(rows), LEAST) - 0.4)
    axes.set_ylim(0, 1.12 * max(value for of in rows.values() for value in of.values()))


def panels(
    head: str, record: Record, found: Mapping[str, Times], key: Mapping[str, Series], foot: str,
    unit: str = "TFLOP/s a GPU",
) -> Any:  # fmt: skip
    """A picture of bars: a panel for each of `found`."""
    on = {**record, "ranks": record.get("ranks", len(record["host"]["gpus"]))}
    figure = canvas(f"{head}: {unit}", [on], 0.75 + HIGH * len(found), foot, key)
    for axes, (name, rows) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items()):
        bars(axes, name, rows, key)
    return figure


ATTENTION = {"pkt": PKT, "NCCL, then torch's attention": BASE, "torch's attention alone": TORCH}


def ring_attention(record: Record) -> Any:
    """Of all keys, not causal; pkt's fastest form."""
    ranks = len(record["host"]["gpus"])
    forms, theirs = ("parts", "fused", "copy", "unfused"), dict(zip([*ATTENTION][1:], ("NCCL + torch", "torch alone")))
    found: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "forward and backward": {}}
    for case, of in times(record).items():
        shape = re.fullmatch(r"full B(\d+) S(\d+) H(\d+)/\d+ D(\d+)", case)
        if shape is None:
            continue
        b, s, h, d = map(int, shape.groups())
        for rows, ends, factor in zip(found.values(), ("", ", forward + backward"), (1.0, BACKWARD)):
            work = factor * 4e-9 * b * h * s * s * d / ranks
            taken = {name: of[variant + ends] for name, variant in theirs.items() if variant + ends in of}
            taken["pkt"] = min(of[form + ends] for form in forms if form + ends in of)
            rows[f"S = {s:,}\nB = {b}"] = {name: work / ms for name, ms in taken.items()}
    foot = "Alone: of a rank's queries and all keys, which are there already."
    return panels("Ring attention, bf16", record, found, ATTENTION, foot)


def ulysses_attention(record: Record) -> Any:
    variants = dict(zip(ATTENTION, (DEFAULT, "NCCL + SDPA", "SDPA alone")))
    rows: dict[str, dict[str, float]] = {}
    for case, of in times(record).items():
        causal, heads, keys, b, s = re.fullmatch(  # type: ignore[union-attr]
            r"(causal, )?(\d+)/(\d+) heads, (?:(\d+) x )?S = (\d+)", case
        ).groups()
        work = 4e-9 * int(b or 1) * int(heads) * int(s) ** 2 * WIDE / record["ranks"] / (2 if causal else 1)
        label = f"{b + ' x ' if b else ''}S = {int(s):,}\n{causal or ''}{heads} heads, {keys} of keys"
        rows[label] = {name: work / of[variant] for name, variant in variants.items() if variant in of}
    foot = "Alone: of heads that are there already."
    return panels("Ulysses attention, bf16", record, {"forward": rows}, ATTENTION, foot)


def flash_decode(record: Record) -> Any:
    """By the launches of a call. One, and NCCL's, are captured; of two and three the launches are hidden."""
    key = {
        "pkt, one launch": PKT,
        "two": OTHER,
        "three": LIGHT,
        "torch's attention, NCCL": BASE,
        "attention alone": TORCH,
    }
    variants = dict(
        zip(key, (f"{DEFAULT}, captured", "pkt waits", "pkt unfused", "SDPA + NCCL, captured", "SDPA alone"))
    )
    rows: dict[str, dict[str, float]] = {}
    for case, of in times(record).items():
        if variants["pkt, one launch"] in of:
            label = case.replace(", heads ", "\n").replace(", S = ", "\n")
            rows[label] = {name: 1e3 * of[variant] for name, variant in variants.items() if variant in of}
    foot = "Batch; heads of queries / of keys; keys of all ranks. Two: the second waits for parts. Three: all-gather."
    return panels("Flash decode, bf16", record, {"a call": rows}, key, foot, "microseconds")


def experts(head: str, ours: str, alone: str) -> Callable[[Record], Any]:
    """A picture of experts' operators by tokens. ours, alone: the variants of pkt, and of its products alone."""
    key = {"pkt": PKT, "NCCL and torch._grouped_mm": BASE, "products alone": TORCH}
    variants = dict(zip(key, (ours, "NCCL + torch._grouped_mm", alone)))

    def draw(record: Record) -> Any:
        flops = {row["case"]: row["flops"] for row in record["measured"]}
        rows = {
            f"{int(case.split()[2].rstrip(',')):,}" + (f"\n{case.split(', ')[1]}" if "random" not in case else ""): {
                name: 1e-9 * flops[case] / of[variant] for name, variant in variants.items() if variant in of
            }
            for case, of in times(record).items()
        }
        foot = "Alone: pkt's grouped products of rows that are there already."
        return panels(head, record, {"by tokens of all ranks": rows}, key, foot)

    return draw


BARS: dict[str, Callable[[Record], Any]] = {
    "ring_attention": ring_attention, "ulysses_attention": ulysses_attention, "flash_decode": flash_decode,
    "dispatch_matmul": experts("Dispatch and the first product, bf16", f"{DEFAULT}, captured", "product alone"),
    "moe": experts("A layer of 256 experts, bf16", "pkt moe, captured", "products alone"),
}  # fmt: skip
