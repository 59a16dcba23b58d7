"""What an operator declares, held against a call: operands, their shapes by letters, keywords, and a form's needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch

from pkt.errors import DtypeError, ShapeError, Unsupported
from pkt.runtime.world import World
from pkt.wording import count_text, found_text

from . import traced
from .agreement import world_of
from .declaration import Call, Case, Check, Form, Operand, Shape, Tuning, choice, letter_of
from .gradients import Backward, Gradients, Recorded
from .shared import checks


class Declared:
    """An operator's declaration. The ops of compiled code, `torch.ops.pkt.NAME`, exist from it on."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        tensors: Mapping[str, Operand],
        result: str | Callable[[Call], str | Shape],
        forms: Mapping[str, Form],
        reference: Callable[..., Any],
        across: Mapping[str, Form] | None = None,
        also: Mapping[str, Operand] | None = None,
        dtype: Callable[[Call], torch.dtype] = lambda call: call.dtype,
        default: Callable[[Call], str] | None = None,
        arguments: Mapping[str, Check] | None = None,
        settings: Mapping[str, Check] | None = None,
        written: str = "out",
        gives: Callable[[Call], bool] | None = None,
        in_place: bool = False,
        place: Callable[[Call], int | None] = lambda call: None,
        private: str = "",
        most: Mapping[str, int] | None = None,
        least: Mapping[str, int] | None = None,
        always: bool | Callable[[Call], bool] = False,
        exact: bool = False,
        terms: Callable[[Mapping[str, int], int], int] = lambda sizes, size: size,
        bound: Callable[..., Sequence[torch.Tensor | float]] | None = None,
        tuning: Tuning | None = None,
        backward: Backward | Callable[[Recorded], Gradients] | None = None,
        cases: Sequence[Case] = (),
        called: str = "",
    ) -> None:
        """
        function: what users call.
        tensors, result: the operands; the shape of what the function returns, as of an `Operand`.
        dtype: of the result; the first operand's without it.
        forms: the ways to compute it, by name.
        across: the forms for worlds of several nodes, where no other runs and the first is the default.
        default: the form taken where the caller names none; the first of `forms` without it. Where the caller gives no
            setting either, an operator with `tuning` takes on GPUs the form that is expected to be the fastest.
        arguments, settings: the checks of keywords that change the result, and of those that change only how it is
            computed.
        reference(rank, **operands of all ranks, **arguments): the exact result of a rank, in fp64.
        bound(rank, dtype, roundings, **operands of all ranks, **arguments): how far each result may be from it, where
            that does not follow from `terms`.
        terms: how many numbers an element of the result is a sum of, from the sizes of the letters and of the world.
        exact: data is moved, not computed with.
        also: further results, by name, new at each call, of their first dtype or that of the first operand. They follow
            the operands and `out` when a plan launches, and make the launch, the call and the reference return a tuple.
            Where the function leaves out the last results of some calls, the reference does, too.
        written: the operand that is written.
        gives: of a broadcast, whether this rank's `written` is read, and not written.
        in_place: the function writes into the first operand where it is given no `out`.
        place: where x and `out` may share memory: the smaller one may be this part of the larger one, cut into parts of
            its size; None: nowhere.
        private: letters in which ranks may differ. most, least: the greatest and the least size of a letter.
        always: it launches for empty operands, too, which other ranks may need; or a function of a call that says
            whether it does.
        tuning: how the tuner sees it. backward: its backward pass, see gradients.py.
        cases: calls for the conformance suite.
        called: what errors call it, where users call another function.
        """
        self.function, self.name = function, function.__name__
        self.called = called or self.name
        self.tensors, self.result, self.forms, self.reference = dict(tensors), result, dict(forms), reference
        self.across = dict(across or {})
        self.dtype = dtype
        self.default = default or (lambda call: next(iter(self.forms)))
        self.arguments, self.settings = dict(arguments or {}), dict(settings or {})
        self.written, self.gives, self.place, self.private = written, gives, place, private
        self.exact, self.terms, self.tuning, self.cases = exact, terms, tuning, tuple(cases)
        self.also, self.bound, self.most, self.always = dict(also or {}), bound, dict(most or {}), always
        self.least = dict(least or {})
        self.backward = backward if backward is None or isinstance(backward, Backward) else Backward(backward)
        parameters = inspect.signature(function).parameters
        parts = {name: [n for n in self.tensors if n.startswith(f"{name}.")] for name in parameters}
        self._parts = {name: found for name, found in parts.items() if found}
        self._attributes = {
            name: [(part.partition(".")[2], self.tensors[part].optional) for part in found]
            for name, found in self._parts.items()
        }
        self.names = [
            n for name in parameters for n in self._parts.get(name, [name]) if n in self.tensors or n == "out"
        ]
        others = *self.names, *self._parts, "world", "workspace"
        self.keywords = [name for name in parameters if name not in others]
        declared = {*self.arguments, *self.settings, *self.tensors, "mode"}
        if missing := declared ^ ({*self.keywords, *self.names} - {"out"}) | ({written} - {*self.names}):
            raise TypeError(f"{self.name}: declared or taken, but not both: {', '.join(sorted(missing))}")
        self._defaults = {name: parameters[name].default for name in self.arguments}
        self.places = {name: at for at, name in enumerate(self.names)}
        self.read = [self.places[name] for name in self.tensors]
        self._written = self.places[written]
        at = {**dict(zip(self.tensors, range(len(self.tensors)))), written: -2}
        order = [at.get(name, -1) for name in self.names]
        self.arranged = itemgetter(*order) if len(order) > 1 else itemgetter(slice(-2, -1))
        """A call's tensors, in the order of the function's parameters, of (*operands, what is written, None)."""
        self.in_place = in_place or written in self.tensors
        self.op, self.op_out, self.op_several = traced.define(self)

    def __repr__(self) -> str:
        return f"Operator({self.name})"

    def form(self, mode: str) -> Form:
        """The form of that name, for a world of one node or of several."""
        return self.across[mode] if mode in self.across else self.forms[mode]

    def forms_of(self, world: World) -> Mapping[str, Form]:
        """The forms that may run in a world."""
        return self.across if world.nodes > 1 else self.forms

    def parameters(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by the names of operands, as the function takes them: operands "d.x" and "d.y" are parts of `d`."""
        whole = {name: SimpleNamespace() for name in self._parts}
        for name, parts in self._parts.items():
            for part in parts:
                setattr(whole[name], part.removeprefix(f"{name}."), tensors[part])
        return {n: t for n, t in tensors.items() if "." not in n} | whole

    def handle(self, name: str, value: Any, world: World | None) -> tuple[Any, ...]:
        """The operands that are parts of `value`, the function's parameter `name`; it may lack optional ones. Raises
        DtypeError."""
        parts = self._attributes[name]
        found = tuple([getattr(value, part, None) for part, _ in parts])
        missing = [part for (part, optional), x in zip(parts, found) if x is None and not optional]
        if missing and (lacks := [part for part in missing if not hasattr(value, part)]):
            rank = world_of(self.name, world).rank
            raise DtypeError.argument(self.name, name, found_text(value), f"what has {' and '.join(lacks)}", rank)
        return found

    # ------------------------------------------------------------------------------ a call against the declaration
    def _call(self, world: World, tensors: Mapping[str, Any], keywords: Mapping[str, Any]) -> Call:
        """A call that nothing has checked yet."""
        arguments = {name: keywords[name] for name in self.arguments}
        given = {name: keywords[name] for name in self.settings if keywords[name] is not None}
        return Call(self.called, world, tensors, arguments, given, keywords["mode"])

    def _check_operands(self, call: Call) -> None:
        """What does not depend on the form: dtypes, shapes, arguments, settings, and `out` where there is one."""
        world = call.world
        across = world.nodes > 1
        if across and not self.across:
            found = f"found a world of {world.nodes} nodes, and {self.name} works within one"
            remedy = "give it world=world.on_node; docs/scale-out.md lists the operators that work over nodes"
            raise Unsupported.here(f"rank {world.rank}: {self.name}", found, remedy)
        if call.asked is not None:
            forms = tuple(self.forms_of(world))
            known = isinstance(call.asked, str) and call.asked in (*self.forms, *self.across)
            if known and call.asked not in forms:
                found = f"found mode {call.asked!r} in a world of {world.nodes} node{'s' * across}"
                wanted = f"wanted {' or '.join(map(repr, forms))}"
                raise Unsupported.here(f"rank {world.rank}: {self.name}", found, wanted)
            choice(*forms)(call, "mode", call.asked)
        for name, operand in self.tensors.items():
            tensor = call.tensors[name]
            if tensor is None and operand.optional:
                continue
            checks.check_dense(call.name, name, tensor, world)
            stored = checks.stored(tensor)[0] if operand.transposed else tensor
            contiguous = self.tuning is not None and not operand.turned
            checks.check_tensor(call.name, name, stored, world, contiguous=contiguous, **self._dtypes(call, operand))
            if operand.turned:
                checks.check_turned(call.name, name, tensor, world)
        self._check_keywords(call)
        for name, operand in self.tensors.items():
            if call.tensors[name] is not None:
                self._bind(call, name, operand)
                for letter in self.most:
                    if call.sizes.get(letter, 0) > self.most[letter]:
                        found = tuple(call.tensors[name].shape)
                        raise call.refuse(name, found, f"a size of at most {self.most[letter]} for {letter}")
                for letter, least in self.least.items():
                    if call.sizes.get(letter, least) < least:
                        found = tuple(call.tensors[name].shape)
                        raise call.refuse(name, found, f"({operand.shape}) with {letter} at least {least}")
        self._bind_result(call)
        if call.tensors.get("out") is not None:
            checks.check_tensor(
                call.name, "out", call["out"], world, shape=call.shape, dtype=call.result_dtype,
                contiguous=self.tuning is not None,
            )  # fmt: skip

    def _dtypes(self, call: Call, operand: Operand) -> dict[str, Any]:
        """What `checks.check_dtype` takes: the dtypes that an operand may have."""
        if operand.dtypes:
            return {"dtypes": operand.dtypes}
        return {"dtype": self.dtype(call) if operand.as_result else call.tensors[next(iter(self.tensors))].dtype}

    def _check_keywords(self, call: Call) -> None:
        """Arguments and settings. None stands for a default: an argument may be None only where that is its default."""
        for name, value in call.arguments.items():
            call.arguments[name] = checked = self.arguments[name](call, name, value)
            if checked is None and self._defaults[name] is not None:
                raise DtypeError.argument(call.name, name, None, "a value", call.world.rank)
        call.given = self._checked(call, call.given)

    def blank(self, world: World, operands: Mapping[str, Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Empty results for operands whose shapes and dtypes alone are known. Raises what a plan would."""
        call = self._call(world, operands, keywords)
        for name, operand in self.tensors.items():
            if operands[name] is not None:
                checks.check_dtype(call.name, name, operands[name], world, **self._dtypes(call, operand))
        self._check_keywords(call)
        for name, operand in self.tensors.items():
            if operands[name] is not None:
                self._bind(call, name, operand)
        self._bind_result(call)
        first = next(iter(operands.values()))
        others = (first.new_empty(shape, dtype=dtype) for shape, dtype in self._others(call))
        return first.new_empty(call.shape, dtype=call.result_dtype), *others

    def _bind_result(self, call: Call) -> None:
        shape = self.result(call) if callable(self.result) else self.result
        call.shape = call.bound(shape)
        call.result_dtype = self.dtype(call)

    def _others(self, call: Call) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the further results."""
        return [(call.bound(o.letters(call)), o.dtypes[0] if o.dtypes else call.dtype) for o in self.also.values()]

    def _bind(self, call: Call, name: str, operand: Operand) -> None:
        """Learn the letters of an operand's shape, or hold the shape against them."""
        shape = operand.letters(call)
        if shape == "...":
            return
        found, rank, size = tuple(call.tensors[name].shape), call.world.rank, call.world.size
        words = shape.split() if isinstance(shape, str) else shape
        if len(words) != len(found):
            raise ShapeError.argument(call.name, name, found, count_text(len(words), "dimension"), rank)
        for at, word in enumerate(words):
            if not isinstance(word, str):
                continue  # a size
            letter, times = letter_of(word, size)
            if letter not in call.sizes and not letter.isdigit():
                if found[at] % times:
                    wanted = f"dimension {at} divisible by {times}" + " ranks" * word.startswith("W*")
                    raise ShapeError.argument(call.name, name, found, wanted, rank)
                call.sizes[letter] = found[at] // times
        bound = call.bound(shape)
        if found != bound:
            raise ShapeError.argument(call.name, name, found, str(bound), rank)

    def _fill(self, call: Call, form: Form) -> None:
        """The settings of a form: given, or the form's defaults."""
        for name, default in form.settings.items():
            call.settings[name] = (
                call.given[name] if name in call.given else default(call) if callable(default) else default
            )

    def _check_names(self, call: Call, mode: str) -> None:
        """The form takes every setting that is given. Raises ShapeError."""
        for name in call.given:
            if name not in self.form(mode).settings:
                raise call.refuse(name, call.given[name], f'none with mode "{mode}"')

    def _checked(self, call: Call, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings, each as its check returns it."""
        return {name: v if name == "mode" else self.settings[name](call, name, v) for name, v in settings.items()}

    def _check_form(self, call: Call, form: Form, staged: Sequence[str] = ()) -> None:
        """What depends on the form: who must be symmetric, and what may share memory. staged: operands that are copied
        to where peers reach them."""
        self._check_reach(call, form, staged)
        out = call.tensors.get("out")
        if out is not None:
            for name in self.tensors:
                if call.tensors[name] is not None and name not in staged:
                    checks.check_apart(call.name, call.tensors[name], out, call.world, self.place(call), name)

    def _check_reach(self, call: Call, form: Form, staged: Sequence[str] = ()) -> None:
        for name in (name for name in form.symmetric if name not in staged):
            checks.check_tensor(call.name, name, call.tensors[name], call.world, peers=True)
        first = next(iter(self.tensors))
        if form.dtypes:
            checks.check_tensor(call.name, first, call.tensors[first], call.world, dtypes=form.dtypes)
