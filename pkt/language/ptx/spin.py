"""`wait`, and the spin loop under it, which ends when its condition holds, at its deadline, or at another wait's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from triton.language import core

from .. import world as page
from .order import proxy_fences
from .primitive import asm, element, member, plain, primitive, simulator

WAIT_MARKER = "// pkt.wait"
"""Comment in the assembly of a wait, as SIGNAL_MARKER."""

POLLS_PER_CHECK = 1024
"""Polls between two checks of the abort word and the clock: a millisecond or two, so that polls stay fast."""
FIRST_CHECK = 64
"""Polls before the first check, so that a kernel whose waits all leave because of an abort ends soon."""
NAP, LONGEST_NAP = 32, 1024
"""Nanoseconds between polls of a counter: NAP more after each one, and LONGEST_NAP in the end."""
_NAP = f"""sub.u32 a, n, {POLLS_PER_CHECK - FIRST_CHECK}; mul.lo.u32 a, a, {NAP}; min.u32 a, a, {LONGEST_NAP};
nanosleep.u32 a;
"""


def _kernel_name() -> str:
    """Name of the kernel that is being compiled, or "" if Triton does not reveal it."""
    frame = sys._getframe()
    while frame is not None:
        generator = frame.f_locals.get("self")
        if getattr(generator, "is_kernel", False) is True:
            return str(getattr(generator, "function_name", ""))
        frame = frame.f_back
    return ""


# The tests of each comparison, on found - wanted as a signed number, which is right across a wrap of the counter.
_HOLDS = {
    "ge": "sub.s{bits} ahead, {found}, {want}; setp.ge.s{bits} p, ahead, 0;",
    "gt": "sub.s{bits} ahead, {found}, {want}; setp.gt.s{bits} p, ahead, 0;",
    "le": "sub.s{bits} ahead, {found}, {want}; setp.le.s{bits} p, ahead, 0;",
    "lt": "sub.s{bits} ahead, {found}, {want}; setp.lt.s{bits} p, ahead, 0;",
    "eq": "setp.eq.s{bits} p, {found}, {want};",
    "ne": "setp.ne.s{bits} p, {found}, {want};",
    "flip": "xor.b{bits} ahead, {found}, {want}; setp.lt.s{bits} p, ahead, 0;",
}

# The fast path is {poll}, {holds} and the branch. Behind it the threads nap. The rest runs every POLLS_PER_CHECK polls:
# - if the abort word is set, leave;
# - if the value found has changed, restart the clock;
# - if the deadline has passed, write one record a program and set the abort word of every rank.
# The threads of a program choose the record's writer by compare-and-swap on the slot's owner word. There is no trap,
# because a trap loses the CUDA context.
_SPIN = """{{
{marker}
.reg .pred p, q, late;
.reg .b32 d, n, a, code, prog, own, i;
.reg .b64 now, since, limit, at, off;
.reg .b{bits} ahead, last;
{before}
mov.b32 n, {first_count}; mov.b64 since, 0; mov.b{bits} last, {want};
$$PKT_POLL_${{:uid}}:
{poll}
{holds}
@p bra $$PKT_DONE_${{:uid}};
add.u32 n, n, 1;
{nap}and.b32 a, n, {mask};
setp.ne.u32 q, a, 0;
@q bra $$PKT_POLL_${{:uid}};
{look}
mov.b32 code, {code};
ld.relaxed.sys.global.b32 a, [{status} + {abort}];
setp.eq.s32 late, a, 0;
@!late or.b32 code, code, {aborted};
@!late bra $$PKT_LEAVE_${{:uid}};
mov.u64 now, %globaltimer;
setp.eq.u64 q, since, 0;
setp.ne.or.u{bits} q, {found}, last, q;
mov.b{bits} last, {found};
@q mov.b64 since, now;
ld.relaxed.sys.global.b64 limit, [{status} + {deadline}];
setp.eq.s64 q, limit, 0;
@q bra $$PKT_POLL_${{:uid}};
sub.s64 now, now, since;
setp.lt.s64 q, now, limit;
@q bra $$PKT_POLL_${{:uid}};
$$PKT_LEAVE_${{:uid}}:
mov.u32 prog, %nctaid.y; mov.u32 a, %ctaid.z; mov.u32 d, %ctaid.y; mad.lo.u32 prog, a, prog, d;
mov.u32 a, %nctaid.x; mov.u32 d, %ctaid.x; mad.lo.u32 prog, prog, a, d;
add.u32 own, prog, 1;
mov.b32 i, 0; add.s64 at, {status}, {first};
$$PKT_CLAIM_${{:uid}}:
{loop}atom.relaxed.sys.global.cas.b32 a, [at + {owner}], 0, own;
setp.eq.u32 q, a, own;
@q bra $$PKT_ABORT_${{:uid}};
setp.eq.u32 q, a, 0;
@q bra $$PKT_RECORD_${{:uid}};
add.u32 i, i, 1; add.s64 at, at, {record};
setp.lt.u32 q, i, {records};
@q bra $$PKT_CLAIM_${{:uid}};
bra $$PKT_ABORT_${{:uid}};
$$PKT_RECORD_${{:uid}}:
sub.s64 off, {where}, {status};
st.relaxed.sys.global.b32 [at], {rank};
st.relaxed.sys.global.b32 [at + 4], prog;
st.relaxed.sys.global.b32 [at + 8], code;
{values}
mov.b64 {{a, d}}, off;
st.relaxed.sys.global.b32 [at + 20], a;
st.relaxed.sys.global.b32 [at + 24], d;
st.relaxed.sys.global.b32 [at + 28], 0;
st.relaxed.sys.global.b32 [at + 32], {site};
red.release.sys.global.add.u32 [{status} + {count}], 1;
$$PKT_ABORT_${{:uid}}:
@!late bra $$PKT_DONE_${{:uid}};
{first_rank}mul.lo.s64 off, off, {stride}; sub.s64 at, {status}, off;
$$PKT_RAISE_${{:uid}}:
{loop}{home}st.relaxed.sys.global.b32 [at + {abort}], 1;
add.u32 i, i, 1; add.s64 at, at, {stride};
setp.lt.u32 q, i, {size};
@q bra $$PKT_RAISE_${{:uid}};
$$PKT_DONE_${{:uid}}:
{after}
}}"""


def _everybody(rank: str, status: str, world: Any) -> dict[str, Any]:
    """How an expired wait reaches the ranks that it aborts: all whose memory this one reaches, also those outside a
    team. Waits of other nodes end at their own deadline. rank, status: operands, this rank in the world of all ranks
    and its status page.

    size, stride: of those ranks. first_rank: sets `off` to the strides from the first one's window to mine, and the
    index i to 0. home: corrects the address `at` of the i-th rank's status page."""
    size, stride, team = plain(world.size), plain(world.stride), plain(world.team)
    if plain(world.network):
        network = page.Network.of(plain(world.network))
        around = f"rem.u32 own, {rank}, {network.node_size}; cvt.s64.s32 off, own; sub.s64 off, off, {network.ring};"
        home = f"setp.eq.u32 q, i, own; @q mov.b64 at, {status};\n"  # the ring of windows begins with mine
        return {"size": network.node_size, "stride": stride, "first_rank": f"{around} mov.b32 i, 0; ", "home": home}
    if team:
        size, _, step = page.Team.of(team)
        stride = stride if plain(world.table) else stride // step
    return {"size": size, "stride": stride, "first_rank": f"mov.b32 i, 0; cvt.s64.s32 off, {rank}; ", "home": ""}


def _stored(bits: int, value: str, field: str) -> str:
    """The instructions that store the value of a wait in a record."""
    low = 4 * page.RECORD_FIELDS.index(field)
    if bits == 32:
        return f"st.relaxed.sys.global.b32 [at + {low}], {value};"
    high = 4 * page.RECORD_FIELDS.index(f"{field}_high")
    halves = f"mov.b64 {{a, d}}, {value};"
    return f"{halves} st.relaxed.sys.global.b32 [at + {low}], a; st.relaxed.sys.global.b32 [at + {high}], d;"


def _mixed(data: Sequence[str]) -> list[str]:
    """The instructions that store a mix of these registers in a record."""
    if not data:
        return []
    mix = [f"xor.b32 a, a, {register};" for register in data]
    return ["mov.b32 a, 0;", *mix, _stored(32, "a", "data")]


def spin(
    poll: str, holds: str, found: str, where: str, operand: int, cmp: str, world: Any,
    before: str = "", look: str = "", after: str = "", small: bool = False, bits: int = 32, data: Sequence[str] = (),
    naps: bool = False,
) -> str:  # fmt: skip
    """Assembly that runs `before`, repeats `poll` until `holds` sets the predicate p, and runs `after`.

    found, where: registers of the value found and of its address, for the record; `look` sets them if polls do not.
    operand: number of the first of `arguments`. cmp: of CMP_CODES, for the record. small: emit less code, which loads
    sooner where time is short, but makes kernels that are short of registers spill more. bits: of the value. data:
    registers of 32 bits that a poll loads with the value; the record uses them all, because ptxas loads only the parts
    of a word that are used, each by itself. naps: the threads nap between polls, longer each time, because the polls of
    many programs slow down what they wait for.
    """
    want, status, rank = (f"${operand + i}" for i in range(3))
    return _SPIN.format(
        marker=WAIT_MARKER,
        before=before,
        poll=poll,
        holds=holds,
        look=look,
        after=after,
        bits=bits,
        values="\n".join([*(_stored(bits, *value) for value in ((want, "wanted"), (found, "found"))), *_mixed(data)]),
        found=found,
        where=where,
        loop='.pragma "nounroll";\n' if small else "",
        want=want,
        status=status,
        rank=rank,
        first_count=POLLS_PER_CHECK - FIRST_CHECK,
        mask=POLLS_PER_CHECK - 1,
        nap=_NAP if naps else "",
        code=page.CMP_CODES[cmp] | (page.CMP_WIDE if bits == 64 else 0),
        aborted=page.CMP_ABORTED,
        abort=4 * page.STATUS_ABORT,
        deadline=4 * page.STATUS_DEADLINE,
        count=4 * page.STATUS_RECORDS,
        first=4 * page.STATUS_FIRST_RECORD,
        record=4 * page.RECORD_WORDS,
        records=page.MAX_RECORDS,
        owner=4 * page.RECORD_FIELDS.index("owner"),
        site=page.site_hash(_kernel_name()),
        **_everybody(rank, status, world),
    )


def arguments(want: Any, world: Any, semantic: Any, dtype: Any = core.int32) -> list:
    """The operands of `spin`: the wanted value as a `dtype`, the status page and the rank, of all ranks."""
    want = core.cast(semantic.to_tensor(want), dtype, _semantic=semantic)
    rank = member(world.rank, world, _semantic=semantic) if plain(world.team) else plain(world.rank)
    rank = core.cast(semantic.to_tensor(rank), core.int32, _semantic=semantic)
    return [want, world.status, rank]


def _both_lanes(found: str, where: str, status: str, bits: int, world: Any) -> tuple[str, str, str]:
    """The instructions before a poll, of a poll and behind the last one, of a counter with a lane for the network: see
    `far.lane`. A counter of 32 bits takes the low half of the lane, in which the network adds modulo 2^64.

    An acquire lets no later load begin before it ends. So a poll has one, and its loads are under way at once. The
    counter itself is acquired behind the last poll: what it holds then follows all that the poll found in it."""
    arena = page.Network.of(plain(world.network)).arena
    before = f"""
.reg .b64 lane, far; .reg .b32 low;
sub.s64 lane, {where}, {status}; shl.b64 lane, lane, 1; add.s64 lane, lane, {status}; add.s64 lane, lane, {arena};"""
    poll = f"ld.relaxed.sys.global.b{bits} {found}, [{where}];\nld.acquire.sys.global.b64 far, [lane];\n"
    add = f"cvt.u32.u64 low, far; add.s32 {found}, {found}, low;" if bits == 32 else f"add.s64 {found}, {found}, far;"
    return before, poll + add, f"ld.acquire.sys.global.b{bits} ahead, [{where}];\n"


@primitive
def wait(ptr, want, cmp, world, _semantic=None):
    """Spin on `ld.acquire.sys` until `*ptr cmp want`; then order TMA loads and multimem accesses after it.

    ptr: scalar pointer to int32 or int64; want: of that type; cmp: ge gt le lt eq ne (safe across a wrap) or flip (the
    top bit differs from that of `want`). Returns the value that this thread found. Threads may find different values;
    `sync.wait` makes them uniform.
    """
    if cmp not in page.CMP_CODES:
        raise ValueError(f"cmp is one of {', '.join(page.CMP_CODES)}, not {cmp!r}")
    if not ptr.type.is_ptr() or element(ptr).name not in ("int32", "uint32", "int64", "uint64"):
        raise ValueError(f"a counter is a scalar pointer to int32 or int64, not {ptr.type}")
    bits = element(ptr).primitive_bitwidth
    if cmp == "flip" and bits != 32:
        raise ValueError(f"a barrier's counter is a scalar pointer to int32, not {ptr.type}")
    machine = simulator(_semantic)
    if machine is not None:
        return machine.wait(ptr, want, cmp)
    holds = _HOLDS[cmp].format(found="$0", want="$2", bits=bits)
    before, load, after = "", f"ld.acquire.sys.global.b{bits} $0, [$1];", ""
    if plain(world.network):
        before, load, after = _both_lanes("$0", "$1", "$3", bits, world)
    after += proxy_fences(world, _semantic)
    text = spin(load, holds, "$0", "$1", 2, cmp, world, before=before, after=after, bits=bits, naps=True)
    register, dtype = ("r", core.int32) if bits == 32 else ("l", core.int64)
    if bits == 64:  # Triton wants the pointers of one assembly, the status page's too, to be of one type
        ptr = core.cast(ptr, world.status.dtype, _semantic=_semantic)
    # "=&": the result is written while the inputs are still needed.
    constraints = f"=&{register},l,{register},l,r"
    return asm(text, constraints, [ptr, *arguments(want, world, _semantic, dtype)], dtype, _semantic)
