"""Words of 128 or 64 bits that carry data and its flag."""

from __future__ import annotations

from typing import Any

from triton.language import core

from .order import SIGNAL_MARKER
from .primitive import asm, element, simulated
from .spin import arguments, spin

VALUES = 3
"""Number of int32 of a long word that are data; the fourth is the flag. A short word has one, and the flag."""
_WORDS = {1: "two", VALUES: "four"}


def _check(ptr: Any, values: int, call: str) -> None:
    if values not in _WORDS:
        raise ValueError(f"{call}: a word has 1 or {VALUES} values, not {values}")
    if not ptr.type.scalar.is_ptr() or element(ptr).name not in ("int32", "uint32"):
        raise ValueError(f"{call} takes pointers to int32, {_WORDS[values]} of them a word, not {ptr.type}")


def _int32(x: Any, semantic: Any) -> Any:
    return core.cast(semantic.to_tensor(x), core.int32, _semantic=semantic)


def _guard(mask: Any, semantic: Any) -> list:
    """The mask as int32 in a list, or an empty list."""
    return [] if mask is None else [_int32(mask, semantic)]


def masks_of(mask: Any, parts: int) -> tuple:
    """Each part's own mask, or an empty tuple if one is for all."""
    if not isinstance(mask, (tuple, core.tuple)):
        return ()
    if len(mask) != parts:
        raise ValueError(f"take_flagged_all: {len(mask)} masks for the words of {parts} ranks, wanted one for each")
    return tuple(mask)


@simulated
def put_flagged(ptr, values, flag, mask, _semantic=None):
    """Store `values` and `flag` in each word by one `st.relaxed.sys.global.b128`, or `.b64` if there is one value.

    ptr: scalar or block of pointers to int32; values: a tuple of three or one, int32 of that shape; flag: int32 scalar;
    mask: bool block or None. Not `.v2.b32`: for the memory model that is two accesses, in any order.
    """
    _check(ptr, len(values), "put_flagged")
    guard = _guard(mask, _semantic)
    inputs = [ptr, *(_int32(value, _semantic) for value in values), _int32(flag, _semantic), *guard]
    short = len(values) == 1
    registers, pack = ".reg .b64 word;", "mov.b64 word, {$2, $3};"
    if not short:
        registers = ".reg .b64 low, high; .reg .b128 word;"
        pack = "mov.b64 low, {$2, $3}; mov.b64 high, {$4, $5}; mov.b128 word, {low, high};"
    text = [
        f"{{ {SIGNAL_MARKER}",
        f".reg .pred p; {registers}",
        f"setp.ne.b32 p, ${len(values) + 3}, 0;" if guard else "",
        pack,
        f"{'@p ' if guard else ''}st.relaxed.sys.global.{'b64' if short else 'b128'} [$1], word;",
        "mov.b32 $0, 0; }",
    ]
    constraints = "=r,l" + ",r" * (len(inputs) - 1)
    asm("\n".join(line for line in text if line), constraints, inputs, core.int32, _semantic)


@simulated
def take_flagged(ptr, stride, parts, flag, mask, world, values=VALUES, _semantic=None):
    """Spin on the words of `parts` parts by `ld.relaxed.sys.global.b128` until the last int32 of each is `flag`.

    Returns for each part a tuple of the other `values` (3, or 1: then by `.b64`), int32, 0 where masked. ptr: to the
    words of the first part; mask: of each part; both as for `put_flagged`, but a tuple of masks has each part's own;
    stride: int32 from one part to the next. A thread loads its words of all parts together, in one flight, until all
    have the flag. Leaves at the deadline, as `wait` does.
    """
    if parts == 0:
        return core.tuple([])
    _check(ptr, values, "take_flagged")
    apiece = masks_of(mask, parts)
    guard = [_int32(each, _semantic) for each in apiece] if apiece else _guard(mask, _semantic)
    stride = core.cast(_semantic.to_tensor(stride), core.int64, _semantic=_semantic)
    inputs = [ptr, *arguments(flag, world, _semantic), stride, *guard]
    short, results = values == 1, values * parts
    first, want, apart, taken = (f"${results + i}" for i in (0, 1, 4, 5))
    last, others = parts - 1, range(1, parts)
    kinds = ".reg .b64 word{0}, at{0};" if short else ".reg .b64 low{0}, high{0}, at{0}; .reg .b128 word{0};"
    before = [
        ".reg .b32 flag; .reg .b64 there;",
        *(f".reg .b32 flag{i}; {kinds.format(i)}" for i in range(parts)),
        f"mov.b64 at0, {first}; shl.b64 there, {apart}, 2;",
        *(f"add.s64 at{i}, at{i - 1}, there;" for i in others),
    ]
    if apiece:  # a word that is not wanted is there, with zeros
        before += [".reg .b32 zero; mov.b32 zero, 0;"]
        for i in range(parts):
            before += [f".reg .pred wanted{i}; setp.ne.b32 wanted{i}, ${results + 5 + i}, 0;"]
            if short:
                before += [f"mov.b64 word{i}, {{zero, {want}}};"]
            else:
                before += [f"mov.b64 low{i}, {{zero, zero}}; mov.b64 high{i}, {{zero, {want}}};"]
                before += [f"mov.b128 word{i}, {{low{i}, high{i}}};"]
    elif guard:
        before += [f"mov.b32 ${i}, 0;" for i in range(results)]
        before += [f"setp.eq.b32 q, {taken}, 0;", "@q bra $$PKT_DONE_${:uid};"]
    load = f"ld.relaxed.sys.global.{'b64' if short else 'b128'}"
    poll = [f"{f'@wanted{i} ' if apiece else ''}{load} word{i}, [at{i}];" for i in range(parts)]
    for i in range(parts):
        if short:
            poll += [f"mov.b64 {{${i}, flag{i}}}, word{i};"]
            continue
        a, b, c = (f"${VALUES * i + j}" for j in range(VALUES))
        poll += [f"mov.b128 {{low{i}, high{i}}}, word{i};"]
        poll += [f"mov.b64 {{{a}, {b}}}, low{i};", f"mov.b64 {{{c}, flag{i}}}, high{i};"]
    behind = 4 * values  # bytes before the flag
    holds = [f"setp.eq.s32 p, flag0, {want};", *(f"setp.eq.and.s32 p, flag{i}, {want}, p;" for i in others)]
    look = [f"mov.b32 flag, flag{last}; add.s64 there, at{last}, {behind};"]  # names the first that has not arrived
    for i in reversed(range(last)):
        look += [f"setp.ne.s32 q, flag{i}, {want};", f"@q mov.b32 flag, flag{i};"]
        look += [f"@q add.s64 there, at{i}, {behind};"]
    text = spin(
        "\n".join(poll), "\n".join(holds), "flag", "there", results + 1, "eq", world,
        before="\n".join(before), look="\n".join(look), small=True, data=[f"${i}" for i in range(results)],
    )  # fmt: skip
    constraints = ",".join(["=&r"] * results + ["l,r,l,r,l"] + ["r"] * len(guard))
    found = list(asm(text, constraints, inputs, (core.int32,) * results, _semantic))
    return core.tuple([core.tuple(found[i : i + values]) for i in range(0, results, values)])
