"""Runs of the Gluon kernel of flash decode on the machine of `gluon_machine`, see `gluon_runs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from pkt.kernels.flash_decode import gluon as decode
from pkt.kernels.flash_decode.attention import Decode

from .gluon_machine import Descriptor
from .gluon_runs import Broken, Wrong, assert_near, flat, poison, ready

ROWS, KEYS, PIECE = 4, 8, 4
D, E = 3 * PIECE, 2 * PIECE


def run_decode(
    lens: Sequence[Sequence[int]], heads: int, page: int, programs: int, seed: int, launches: int = 2,
    broken: Broken | None = None, stages: int = 2, cap: float | None = None, scale: float | None = None,
    fp8: bool = False,
) -> None:  # fmt: skip
    """Parts of the attention of sequences whose query tokens see lens[b][s] keys, in pages of `page`: units of ROWS
    rows and tiles of KEYS keys. Behind the keys of a sequence its pages are NaN, and so are other pages. fp8: the
    loader reads keys by their addresses."""
    machine, functions = ready(decode, 1, programs, seed, broken)
    functions |= {"SWIZZLED": PIECE, "ROWS": ROWS, "KEYS": KEYS, "STAGES": stages}  # rows lie as here
    rng, B, SQ = np.random.default_rng(seed), len(lens), len(lens[0])
    longest = [max(of) for of in lens]
    pages = [-(-n // page) for n in longest]
    pages_of, all_pages = max(*pages, 1), sum(pages) + 2
    blocks = -(-SQ * heads // ROWS)
    numbers = rng.permutation(all_pages)
    tables, caches, queries, stored = [], [], [], []
    for _ in range(launches):
        table, cache, first = np.zeros((B, pages_of), np.int64), poison(all_pages, page, D), 0
        for b, n in enumerate(longest):
            table[b, : pages[b]] = numbers[first : first + pages[b]]
            table[b, pages[b] :] = all_pages + 7  # there is no such page
            keys = rng.standard_normal((n, D)).astype(np.float32)
            for i in range(pages[b]):
                part = keys[i * page : (i + 1) * page]
                cache[numbers[first + i], : len(part)] = part
            first += pages[b]
        tables.append(table)
        caches.append(cache)
        queries.append(rng.standard_normal((1, B * SQ * heads, D)).astype(np.float32))
        stored.append(poison((programs + B * blocks) * ROWS * (E + 1)))

    def launch(e: int) -> Callable[[int], None]:
        numbers = {"B": B, "k_page": page * D, "k_token": D, "scale": D**-0.5, "cap": cap or 1.0}
        numbers |= {"pages_of": pages_of, "most": pages_of * page}
        constants = {"SQ": SQ, "HEADS": heads, "D": D, "E": E, "PAGE": page, "BLOCKS": blocks, "BATCH": B, "TOKENS": SQ}
        pointers = {"lens_ptr": flat(np.array(lens)), "table_ptr": flat(tables[e])}
        if fp8:
            pointers["k_ptr"] = flat(caches[e])
        if scale is not None:
            pointers["k_scale_ptr"] = flat(np.array([scale], np.float32))
        p = Decode(**{
            **dict.fromkeys(Decode._fields), **pointers, **numbers, **constants, "CAPPED": cap is not None,
        })  # fmt: skip
        q, k = Descriptor(queries[e], 1, ROWS, PIECE), None if fp8 else Descriptor(caches[e], 1, min(page, KEYS), PIECE)
        return lambda program: functions["gluon_decode_kernel"](q, k, flat(stored[e]), p, 4)

    machine.run([[launch(e) for e in range(launches)]])
    tiles = [max(-(-n // KEYS), 1) for n in longest]
    share = -(-sum(tiles) * blocks // programs)
    rows = SQ * heads
    for e in range(launches):
        parts = stored[e][: (programs + B * blocks) * ROWS * E].reshape(-1, ROWS, E)
        lses = stored[e][(programs + B * blocks) * ROWS * E :].reshape(-1, ROWS)
        begin = 0
        for b, block in product(range(B), range(blocks)):
            here = range(block * ROWS, min(block * ROWS + ROWS, rows))
            for program in range(begin // share, (begin + tiles[b] - 1) // share + 1):
                first = max(program * share - begin, 0) * KEYS
                last = min((program + 1) * share - begin, tiles[b]) * KEYS
                at = np.arange(first, min(last, longest[b]))
                keys = caches[e][tables[e][b, at // page], at % page].astype(float) * (scale or 1.0)
                scores = queries[e][0, b * rows : (b + 1) * rows][list(here)].astype(float) @ keys.T * D**-0.5
                if cap:
                    scores = cap * np.tanh(scores / cap)
                scores[at[None] >= np.array([lens[b][i // heads] for i in here])[:, None]] = -np.inf
                total = np.exp(scores).sum(1)
                with np.errstate(divide="ignore"):
                    wanted = np.log(total)
                part = program + b * blocks + block
                assert_near(lses[part, : len(here)], wanted)
                weights = np.exp(scores) / np.where(total, total, 1.0)[:, None]
                assert_near(parts[part, : len(here)], weights @ keys[:, :E])
                if not np.isnan(parts[part, len(here) :]).all():
                    raise Wrong("rows that do not exist were stored")
            begin += tiles[b]
