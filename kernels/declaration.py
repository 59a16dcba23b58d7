"""What an operator declares: operands, forms, cases and checks of its keywords; and a call that is being planned."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

import torch

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.model.config import Config
from pkt.model.cost import Estimate
from pkt.model.gpu import Gpu
from pkt.runtime.world import World, check_rank
from pkt.wording import found_text, value_text

Launch = Callable[..., torch.Tensor]
"""launch(*tensors) -> the result, for tensors like those it was planned with. It keeps none of them."""
Shape = tuple[int, ...]
MAX_BLOCK = 1 << 20
"""Most elements of a block in Triton."""
MAX_INT = (1 << 31) - 1
"""Greatest int32."""
MAX_STAGES = 16
"""Most loads of a loop at once: more of the smallest tiles that are of use do not fit into shared memory."""


def letter_of(word: str, size: int) -> tuple[str, int]:
    """The letter of a shape's word, and how often it is taken in a world of `size`: of "W*m" m and size, of "2*n" n and
    2."""
    times, _, letter = word.rpartition("*")
    return letter, size if times == "W" else int(times or 1)


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator takes.

    shape: a letter for each dimension, such as "m k", with "W*" before one that is a multiple of the world size, and
        "2*" before one that is even; "..." for any shape; or a function of the call that returns one of these. Of a
        further result it may also return the sizes.
    dtypes: those it may have; () for that of the first operand.
    strided: plans take it with any strides, so it is never copied.
    as_result: it has the result's dtype.
    optional: None may be given. transposed: it may also be the transposed view of a contiguous matrix. turned: it is
        such a view. same: it has the same elements on every rank.
    make: how tests make one that not every value suits, such as indices; standard normal or small numbers if None. Its
        call.world has the rank, the number of ranks as `size`, and the number of the launch as `launch`.
    """

    shape: str | Callable[[Call], str | Shape]
    dtypes: tuple[torch.dtype, ...] = ()
    as_result: bool = False
    optional: bool = False
    transposed: bool = False
    turned: bool = False
    same: bool = False
    strided: bool = False
    make: Callable[[Shape, torch.Generator, Call], torch.Tensor] | None = None

    def letters(self, call: Call) -> str | Shape:
        """The shape in a call."""
        return self.shape(call) if callable(self.shape) else self.shape


@dataclass(frozen=True)
class Form:
    """One way to compute an operator, chosen by `mode=` or by the operator's default.

    plan: makes buffers and returns what launches; collective.
    how, moves: for the reference page: what it does in a few words; the bytes that leave a rank.
    settings: keywords that it takes, with their defaults; a default may be a function of the call.
    several: plans calls that are alike but for the second operand, `out` and bias, and returns what launches them as
        one, launch(a, bs, outs, biases); a is moved once. The first call has the settings. None: it takes one only.
    complete: settles the settings together, where one follows from another; may be collective.
    fits: why it cannot run a call, in words; "" where it can. Alike on all ranks.
    symmetric: operands that peers access.
    dtypes: fewer than the operands', where it takes fewer.
    agrees: further facts in which all ranks must agree.
    gpu: it runs on GPUs alone.
    space: its candidates for the tuner, for a case (`Tuning.key`, dtype and size) and a pkt.model.gpu.Gpu; none where
        it cannot run. seconds: the parts of a candidate's predicted time there.
    one_shape: settings that are right for one shape only; the tuner carries none of them to another shape.
    settles: its own rule settles all its settings well; to another shape the tuner carries only the mode.
    outruns: forms that do the same and were not found faster, on GPUs that run Gluon forms. None is expected to be as
        fast there.
    roundings: how often an element of the result is rounded to its dtype, for a world size.
    small: settings for shapes of some dozen elements, as tests simulate them.
    """

    plan: Callable[[Call], Launch]
    how: str = ""
    moves: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    several: Callable[[Sequence[Call]], Callable[..., None]] | None = None
    complete: Callable[[Call], Mapping[str, Any]] | None = None
    fits: Callable[[Call], str] = lambda call: ""
    symmetric: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    agrees: Callable[[Call], Mapping[str, Any]] = lambda call: {}
    gpu: bool = False
    space: Callable[[Mapping[str, Any], Gpu], Sequence[Config]] | None = None
    seconds: Callable[[Mapping[str, Any], Mapping[str, Any], Gpu], Estimate] | None = None
    one_shape: tuple[str, ...] = ()
    settles: bool = False
    outruns: tuple[str, ...] = ()
    roundings: Callable[[int], int] = lambda size: 1
    small: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A small call that breaks things, for the conformance suite.

    sizes: of the letters of the shapes. shapes: of operands of any shape. arguments: keywords of the call, `mode` and
    settings among them. ranks, sms, multicast, node_size: of the world; node_size None: it has one node. launches: how
    many, with other inputs and nothing reset between. out: "new", "given", "symmetric", or "x" for the operand x
    itself. explore: run it under many schedules, and with every piece of synchronisation broken in turn. dtype: of the
    first operand where it is explored; kernels are compiled for a form's first case, and for those of another dtype
    than fp32. large: sizes of the letters for which they are; a few hundred each where none are given.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, str | Shape] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 3
    sms: int = 2
    multicast: bool = True
    node_size: int | None = None
    launches: int = 2
    out: str = "symmetric"
    explore: bool = True
    dtype: torch.dtype = torch.float32
    large: Mapping[str, int] = field(default_factory=dict)


class Tuning(NamedTuple):
    """How the tuner sees an operator that multiplies.

    short: its short name, as "ag_gemm". sent: least bytes that leave a GPU, for a key with dtype and size. shared: the
    letters m, n and k of the whole product (m, k) @ (k, n) that the ranks share. columns: its argument `shard` may be
    "columns", with which the ranks share k, and not m. Only the others are searched, and looked up in tables. like: the
    operator by whose measurements its predicted times are corrected; "": by its own.
    """

    short: str
    sent: Callable[[Mapping[str, Any]], float]
    shared: tuple[str, ...]
    columns: bool = False
    like: str = ""

    def key(self, call: Call) -> dict[str, Any]:
        """M, N and K of the product that each rank computes; and shard="columns" where that is so."""
        m, N, k, size = call["m"], call["b"].shape[1], call["k"], call.world.size
        if self.columns and call["shard"] == "columns":
            return {"M": m, "N": N, "K": size * k, "shard": "columns"}
        return {"M": m * (size if "m" in self.shared else 1), "N": N, "K": k}

    def sizes(self, key: Mapping[str, Any]) -> dict[str, int]:
        """The letters m, n and k of the operands' shapes for such a key."""
        if key.get("shard") == "columns":
            return {"m": key["M"], "n": key["N"], "k": key["K"] // key["size"]}
        return {"m": key["M"] // (key["size"] if "m" in self.shared else 1), "n": key["N"], "k": key["K"]}


class Call:
    """A call that is being planned: call["m"] is an operand, an argument, a setting or the size of a letter."""

    def __init__(
        self, name: str, world: World, tensors: Mapping[str, Any], arguments: Mapping[str, Any],
        given: Mapping[str, Any], mode: str | None,
    ) -> None:  # fmt: skip
        self.name, self.world = name, world
        self.tensors, self.arguments = dict(tensors), dict(arguments)
        self.given = dict(given)
        """Settings as the caller gave them, or the tuner found them."""
        self.asked = mode
        """The form that the caller named."""
        self.case: tuple[Any, ...] | None = None
        """The case that the tuner's settings are for; None if they are not the tuner's."""
        self.mode = ""
        """The form that is taken."""
        self.settings: dict[str, Any] = {}
        """All settings of that form."""
        self.sizes: dict[str, int] = {}
        self.shape: Shape = ()
        """Of the result."""
        self.result_dtype: torch.dtype | None = None
        """Of the result."""

    def __getitem__(self, name: str) -> Any:
        for space in (self.tensors, self.arguments, self.settings, self.given, self.sizes):
            if name in space:
                return space[name]
        raise KeyError(name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first operand."""
        return next(iter(self.tensors.values())).dtype

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.world.torch_device).type == "cuda"

    @property
    def left(self) -> bool:
        """The caller has left the form and all settings open, and nothing was tuned."""
        return self.asked is None and not self.given

    def greatest(self, letter: str, alone: bool = False) -> int:
        """The greatest size of `letter`, in which ranks may differ, on any rank. Collective the first time, which may
        not be in a capture.

        alone: a rank's size may change while the others' stay. They would not ask again, so nobody does: the answer of
        the first call with these other sizes holds.
        """
        return max(self._everywhere(letter, alone))

    def alike(self, letter: str) -> bool:
        """Whether all ranks have one size of `letter`, and it is not 0. Collective as `greatest`."""
        sizes = set(self._everywhere(letter))
        return len(sizes) == 1 and 0 not in sizes

    def _everywhere(self, letter: str, alone: bool = False) -> Sequence[int]:
        case = (self.name, *(n for name, n in self.sizes.items() if not (alone and name == letter)), self.dtype)
        known: dict[Any, Sequence[int]] = self.world.lasting.setdefault("pkt.kernels.sizes", {})
        if case not in known:
            if self.world.capturing:
                raise Unsupported.captured(self.world.rank, case)
            what = f"{self.name}: the first call with this {letter}"
            known[case] = self.world.backend.exchange(self.sizes[letter], what)
        return known[case]

    def bound(self, shape: str | Shape) -> Shape:
        """`shape` in numbers, once its letters are known."""
        if not isinstance(shape, str):
            return tuple(shape)
        found = (letter_of(word, self.world.size) for word in shape.split())
        return tuple((int(letter) if letter.isdigit() else self.sizes[letter]) * times for letter, times in found)

    def refuse(self, name: str, found: Any, wanted: str) -> ShapeError:
        """The error to raise for argument `name`."""
        return ShapeError.argument(self.name, name, found, wanted, self.world.rank)


# ---------------------------------------------------------------------------------------------- checks of keywords
Check = Callable[["Call", str, Any], Any]
"""check(call, name, value) -> the value to use; raises one of pkt's errors, naming both."""


def integer(least: int | None = None, most: int = MAX_INT) -> Check:
    """None or an int from `least` to `most`; without them what an int32 of a kernel holds."""

    def check(call: Call, name: str, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            found = found_text(value)
            raise DtypeError.argument(call.name, name, found, "an integer", call.world.rank)
        low = -MAX_INT if least is None else least
        if value < low:
            raise call.refuse(name, value, f"at least {low}")
        if value > most:
            raise call.refuse(name, value, f"at most {most}")
        return value

    return check


def number(above: float = -math.inf) -> Check:
    """None or a finite number greater than `above`."""

    def check(call: Call, name: str, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            found = found_text(value)
            raise DtypeError.argument(call.name, name, found, "a number", call.world.rank)
        if not above < value < math.inf:
            raise call.refuse(name, value, "a finite number" if above == -math.inf else f"more than {above}")
        return value

    return check


def choice(*choices: str | None) -> Check:
    """One of `choices`."""

    def check(call: Call, name: str, value: Any) -> Any:
        if not isinstance(value, (str, NoneType)) or value not in choices:
            where, found = f"rank {call.world.rank}: {call.name}", f"found {name} {value_text(value)}"
            raise Unsupported.here(where, found, f"wanted {' or '.join(map(repr, choices))}")
        return value

    return check


def flag(call: Call, name: str, value: Any) -> bool:
    """The check of a keyword that is True or False."""
    if not isinstance(value, bool):
        found = found_text(value)
        raise DtypeError.argument(call.name, name, found, "True or False", call.world.rank)
    return value


def block(call: Call, name: str, value: Any) -> Any:
    """None, or a power of two that Triton takes as the length of a block."""
    integer()(call, name, value)
    if value is not None and (not 1 <= value <= MAX_BLOCK or value & (value - 1)):
        raise call.refuse(name, value, f"a power of two up to {MAX_BLOCK}")
    return value


def rank(call: Call, name: str, value: Any) -> int:
    """A rank of the world."""
    return check_rank(value, call.world, call.name)


# ------------------------------------------------------------------------------------------------------- new tensors
_modes, _deterministic = torch._C._len_torch_dispatch_stack, torch._C._get_deterministic_algorithms


def making(of: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """make(): empty contiguous tensors of these shapes and dtypes, on the current GPU where `device` is one.

    By the function that torch's compiled code calls: `torch.empty` takes 1.4 us of Python and dispatch, and this 0.6. A
    dispatch mode of torch does not see it, and torch's deterministic mode does not fill what it makes, so neither uses
    it. It is private to torch: another release may not have it."""
    plain = [functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device) for shape, dtype in of]
    guards: Any = getattr(torch._C._dynamo, "guards", None)
    empty = getattr(guards, f"_empty_strided_{device.type}", None)
    quick = plain
    if empty is not None:
        strides = [torch.empty(tuple(shape), device="meta").stride() for shape, _ in of]
        quick = [functools.partial(empty, tuple(shape), how, dtype) for (shape, dtype), how in zip(of, strides)]
    return lambda: [new() for new in (plain if _modes() or _deterministic() else quick)]
