"""The registry: an operator is declared once, in its own file, and everything else reads the declaration.

A file declares an operator with a typed function that users call and an `Operator` that says what the call takes:

    def all_gather(x, out=None, *, dim=0, mode=None, block=None, world=None) -> torch.Tensor:
        \"""What the caller gets.\"""
        return OPERATOR((x, out), (dim, mode, block), world)

    OPERATOR = Operator(all_gather, tensors={...}, result=..., forms={...}, reference=..., cases=(...))

tensors: the operands, their shapes by letters; "d.x" is a part of the function's parameter d. arguments: keywords that
change the result. settings: keywords that change only how it is computed. forms: the ways to compute it, by the name
that `mode=` takes.

The first call with tensors of some shapes, dtypes, strides and alignment goes through `Operator.plan`: checks, the
choice of a form, agreement between the ranks, buffers. It returns a closure that only launches, which later calls with
tensors alike look up. The rules of autograd, aliases, empty tensors, fresh outputs and workspaces are here, for all
operators.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pkt.errors import DtypeError, HeapFull, PktError, ShapeError, Unsupported
from pkt.model.cost import DTYPES, Estimate
from pkt.model.gpu import Gpu
from pkt.model.network import Network, TwoLinks
from pkt.runtime.kept import Planned, by_types, planned, same
from pkt.runtime.memory.tensor import described, facts
from pkt.runtime.world import Workspace, World
from pkt.wording import dtype_text

from . import gradients, staging, traced
from .agreement import Agreed, check_agreed, world_of
from .declaration import Call, Case, Check, Form, Launch, Operand, Shape, Tuning, choice, letter_of
from .forecast import Described, Forecast, forecast, gpu_of, predicted
from .gradients import Backward, Gradients, Recorded
from .shared import checks

# Looked up once: each look-up in torch would cost a call of an operator 20 ns.
is_dynamo_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
increment_version = torch.autograd.graph.increment_version

Advice = Callable[["Operator", Mapping[str, Any], World], Mapping[str, Any]]
"""Settings that were tuned for an operator and a case, `mode` among them; {} where there are none. Collective."""
_advice: list[Advice] = []


def take_advice(advice: Advice) -> None:
    """From now on operators ask `advice` where the caller gives no settings. `pkt` hands the tuner in."""
    _advice[:] = [advice]


class Operator:
    """A declared operator; `register` adds it to the registry. Calling it is the body of the operator's function."""

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
        in_place: bool = False,
        place: Callable[[Call], int | None] = lambda call: None,
        private: str = "",
        most: Mapping[str, int] | None = None,
        always: bool = False,
        exact: bool = False,
        terms: Callable[[Mapping[str, int], int], int] = lambda sizes, size: size,
        bound: Callable[..., Sequence[torch.Tensor | float]] | None = None,
        tuning: Tuning | None = None,
        backward: Backward | Callable[[Recorded], Gradients] | None = None,
        cases: Sequence[Case] = (),
    ) -> None:
        """function: what users call. result: the shape of what it returns. dtype: its dtype; the first operand's
        without it. across: the forms for worlds of several nodes, where no other runs and the first is the default.
        also: further results, by name: they are new at each call, of their first dtype or that of the first operand,
        follow the operands and `out` when a plan launches, and make the launch, the call and the reference return a
        tuple. Where the function leaves out the last results of some calls, the reference does, too. default: the form
        taken where the caller names none; the first of `forms` without it. On GPUs an operator with `tuning` takes the
        form that is expected to be the fastest instead, where the caller gives no setting either. backward: its
        backward pass, see gradients.py. written: the operand that is written. in_place: the function writes into the
        first operand where it is given no `out`. place: which part of x, or of `out`, of the other's size the two may
        share. private: letters in which ranks may differ. most: the greatest size of a letter. always: it launches for
        empty operands, too, which other ranks may need. exact: data is moved, not computed with. terms: how many
        numbers an element of the result is a sum of, from the sizes of the letters and of the world. reference(rank,
        **operands of all ranks, **arguments): the exact result of a rank, in fp64. bound(rank, dtype, roundings,
        **operands of all ranks, **arguments): how far each result may be from it, where that does not follow from
        `terms`."""
        self.function, self.name = function, function.__name__
        self.tensors, self.result, self.forms, self.reference = dict(tensors), result, dict(forms), reference
        self.across = dict(across or {})
        self.dtype = dtype
        self.default = default or (lambda call: next(iter(self.forms)))
        self.arguments, self.settings = dict(arguments or {}), dict(settings or {})
        self.written, self.place, self.private = written, place, private
        self.exact, self.terms, self.tuning, self.cases = exact, terms, tuning, tuple(cases)
        self.also, self.bound, self.most, self.always = dict(also or {}), bound, dict(most or {}), always
        self.backward = backward if backward is None or isinstance(backward, Backward) else Backward(backward)
        parameters = inspect.signature(function).parameters
        self._defaults = {name: parameters[name].default for name in self.arguments}
        parts = {name: [n for n in self.tensors if n.startswith(f"{name}.")] for name in parameters}
        self._parts = {name: found for name, found in parts.items() if found}
        self.names = [
            n for name in parameters for n in self._parts.get(name, [name]) if n in self.tensors or n == "out"
        ]
        self.places = {name: at for at, name in enumerate(self.names)}
        self.read = [self.places[name] for name in self.tensors]
        self._written = self.places[written]
        self.in_place = in_place or written in self.tensors
        others = *self.names, *self._parts, "world", "workspace"
        self.keywords = [name for name in parameters if name not in others]
        declared = {*self.arguments, *self.settings, *self.tensors, "mode"}
        if missing := declared ^ ({*self.keywords, *self.names} - {"out"}):
            raise TypeError(f"{self.name}: declared or taken, but not both: {', '.join(sorted(missing))}")
        self.op, self.op_out, self.op_several = traced.define(self)

    def __repr__(self) -> str:
        return f"Operator({self.name})"

    def form(self, mode: str) -> Form:
        """The form of that name, for a world of one node or of several."""
        return self.across[mode] if mode in self.across else self.forms[mode]

    def forms_of(self, world: World) -> Mapping[str, Form]:
        """The forms that may run in a world."""
        return self.across if world.nodes > 1 else self.forms

    def function_of(self, name: str) -> Callable[..., Any]:
        """The function of another operator."""
        found = named(name)
        assert found is not None, f"{self.name}: no operator {name}"
        return found.function

    def __reduce__(self) -> Any:
        """For another process: one of pkt's by its name, another by what it declares, from which its ops are made."""
        if self.name in _modules() and _loaded(self.name) is self:
            return _loaded, (self.name,)
        ops = ("op", "op_out", "op_several")
        return _rebuilt, ({name: value for name, value in vars(self).items() if name not in ops},)

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
        parts = {part.partition(".")[2]: self.tensors[part].optional for part in self._parts[name]}
        if lacks := [part for part, optional in parts.items() if not optional and not hasattr(value, part)]:
            rank = world_of(self.name, world).rank
            raise DtypeError.argument(
                self.name, name, f"{type(value).__name__} {value!r:.40}", f"what has {' and '.join(lacks)}", rank
            )
        return tuple([getattr(value, part, None) for part in parts])

    # ------------------------------------------------------------------------------------------------------ each call
    def __call__(
        self,
        tensors: tuple[Any, ...],
        values: tuple[Any, ...],
        world: World | None = None,
        workspace: Workspace | None = None,
        needs: str | None = None,
    ) -> Any:
        """Run the operator: planned once for tensors of the same facts, launched each time. values: of its keywords, in
        the order of the function's parameters; packing them by name would cost the host a microsecond. needs: of a call
        that is recorded already, the operands that require grad."""
        if is_dynamo_compiling():
            return traced.call(self, tensors, values, world, workspace)
        if type(world) is not World:
            world = world_of(self.name, world, *tensors, workspace)
        if is_grad_enabled() and gradients.required(tensors):
            if traced.has_traced(tensors):
                return traced.call_of(self, tensors, values, world, workspace)
            return gradients.record(self, tensors, values, world, workspace, self.__call__)
        if workspace is not None:
            with world.using(workspace, self.name):
                return self(tensors, values, world, None, needs)
        out = tensors[self._written]
        plans = world.plans
        try:
            key = (self, values, needs, *facts(tensors, world, self.name, out))
            launch = plans.get(key)
            if type(launch) is Planned:
                launch, known = launch
                for at, value in known:
                    if values[at] is not value and not same(values[at], value):
                        key = by_types(key, values)
                        launch = plans.get(key)
                        break
        except (TypeError, RuntimeError):  # a list among the settings, or a tensor with no address: nothing to look up
            key = launch = None
        if launch is None:
            if key is None and traced.has_traced(tensors):
                return traced.call_of(self, tensors, values, world, workspace)
            launch = self.plan(world, tensors, dict(zip(self.keywords, values)), needs)
            if key is not None:
                plans[key] = planned(launch, key, values)
        result = launch(*tensors)
        if out is not None:
            increment_version(out)  # a backward pass that needs the old values raises
        return result

    # --------------------------------------------------------------------------------- the first with tensors alike
    def plan(
        self, world: World, tensors: Sequence[Any], keywords: Mapping[str, Any], needs: str | None = None
    ) -> Launch:
        """Check everything, agree with the other ranks, and make what launches. needs: as for a call. Collective.
        Raises NotSymmetric, ShapeError, DtypeError, Unsupported, CollectiveMismatch."""
        arguments = {name: keywords[name] for name in self.arguments}
        given = {name: keywords[name] for name in self.settings if keywords[name] is not None}
        call = Call(self.name, world, dict(zip(self.names, tensors)), arguments, given, keywords["mode"])
        self._check_operands(call)
        any_strides = [name for name, operand in self.tensors.items() if operand.strided]
        copies = staging.contiguous(call, self.written, any_strides) if self.tuning is None else {}
        form = self._choose(call)
        staged = staging.unreachable(call, form.symmetric) if self._stages(call) else []
        self._check_form(call, form, staged)
        self._agree(call, form, staged, needs)
        if form.complete is not None:
            try:
                call.settings = dict(form.complete(call))
            except (ShapeError, DtypeError, Unsupported) as error:
                if call.case is None:
                    raise
                self._ignored(error)  # on all ranks, which have these settings of rank 0
                world.lasting["tune.settings"][call.case] = {}
                return self.plan(world, tensors, keywords, needs)
        for name in staged:
            call.tensors[name] = memory = staging.buffer(call, name)
            copies[name] = functools.partial(_same, memory)
        launch = self._filled(call, form)
        if not copies:
            return launch
        places = {self.names.index(name): memory for name, memory in copies.items()}
        read = [at for at, name in enumerate(self.names) if name in self.tensors]
        return staging.staged(launch, places, read, self._written, world)

    def _stages(self, call: Call) -> bool:
        """Whether plain tensors are copied where peers access them: not if the caller asked for a form, and so for its
        requirements. Products choose forms by their operands, and refuse the others."""
        return call.asked is None and self.tuning is None

    def planned(self, world: World, *tensors: Any, **keywords: Any) -> Launch:
        """What launches a call, for operators that are made of others: for tensors of the same facts as these, and
        with no checks. Collective."""
        given = {**dict.fromkeys(self.keywords), **self._defaults, **keywords}
        return self.plan(world, tensors, given)

    def _check_operands(self, call: Call) -> None:
        """What does not depend on the form: dtypes, shapes, arguments, settings, and `out` where there is one."""
        world, first = call.world, next(iter(self.tensors))
        across = world.nodes > 1
        if across and not self.across:
            found = f"found a world of {world.nodes} nodes, and {self.name} works within one"
            remedy = "give it world=world.on_node; docs/scale-out.md lists the operators that work over nodes"
            raise Unsupported.here(f"rank {world.rank}: {self.name}", found, remedy)
        if call.asked is not None:
            forms = self.forms_of(world)
            if call.asked not in forms and call.asked in {**self.forms, **self.across}:
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
            given = {"dtypes": operand.dtypes} if operand.dtypes else {"dtype": call.tensors[first].dtype}
            checks.check_tensor(call.name, name, stored, world, contiguous=self.tuning is not None, **given)
        self._check_keywords(call)
        for name, operand in self.tensors.items():
            if call.tensors[name] is not None:
                self._bind(call, name, operand)
                for letter in self.most:
                    if call.sizes.get(letter, 0) > self.most[letter]:
                        found = tuple(call.tensors[name].shape)
                        raise call.refuse(name, found, f"a size of at most {self.most[letter]} for {letter}")
        self._bind_result(call)
        if call.tensors.get("out") is not None:
            checks.check_tensor(
                call.name, "out", call["out"], world, shape=call.shape, dtype=call.result_dtype,
                contiguous=self.tuning is not None,
            )  # fmt: skip

    def _check_keywords(self, call: Call) -> None:
        """Arguments and settings. None stands for a default: an argument may be None only where that is its default."""
        for name, value in call.arguments.items():
            call.arguments[name] = checked = self.arguments[name](call, name, value)
            if checked is None and self._defaults[name] is not None:
                raise DtypeError.argument(call.name, name, None, "a value", call.world.rank)
        call.given = self._checked(call, call.given)

    def blank(self, world: World, operands: Mapping[str, Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Empty results for operands of which only shapes and dtypes are known. Raises as a plan does for these."""
        arguments = {name: keywords[name] for name in self.arguments}
        given = {name: keywords[name] for name in self.settings if keywords[name] is not None}
        call = Call(self.name, world, operands, arguments, given, keywords["mode"])
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
        call.shape = call.bound(shape) if isinstance(shape, str) else tuple(shape)
        call.result_dtype = self.dtype(call)

    def _others(self, call: Call) -> list[tuple[Shape, torch.dtype]]:
        """Shapes and dtypes of the further results."""
        return [(call.bound(o.letters(call)), o.dtypes[0] if o.dtypes else call.dtype) for o in self.also.values()]

    def _bind(self, call: Call, name: str, operand: Operand) -> None:
        """Learn the letters of an operand's shape, or hold the shape against them."""
        shape = operand.letters(call)
        if shape == "...":
            return
        words, found, rank, size = shape.split(), tuple(call.tensors[name].shape), call.world.rank, call.world.size
        if len(words) != len(found):
            raise ShapeError.argument(call.name, name, found, f"{len(words)} dimensions", rank)
        for at, word in enumerate(words):
            letter, times = letter_of(word, size)
            if letter not in call.sizes:
                if found[at] % times:
                    wanted = f"dimension {at} divisible by {times}" + " ranks" * word.startswith("W*")
                    raise ShapeError.argument(call.name, name, found, wanted, rank)
                call.sizes[letter] = found[at] // times
        bound = call.bound(shape)
        if found != bound:
            raise ShapeError.argument(call.name, name, found, str(bound), rank)

    def _choose(self, call: Call) -> Form:
        """The form that the caller named, or that was tuned, or that is expected to be the fastest, or the default."""
        mode = call.asked
        if call.left and call.on_gpu and self.tuning:
            key = self._key(call)
            call.given = self._tuned(call, key)
            mode = call.given.pop("mode", None)
            if mode is None and not call.given:
                mode = self._fastest(call, self._forecast(call, key))
        across = call.world.nodes > 1
        call.mode = mode or (next(iter(self.across)) if across else self.default(call))
        form = self.form(call.mode)
        self._check_names(call, call.mode)
        unfit = form.fits(call)
        if unfit:
            remedy = "mode=None runs anywhere" if not across else "make a world or a team with such ranks"
            raise Unsupported.here(f"rank {call.world.rank}: {call.name}(mode={call.mode!r})", f"found {unfit}", remedy)
        self._fill(call, form)
        return form

    def _fill(self, call: Call, form: Form) -> None:
        """The settings of a form: given, or the form's defaults."""
        for name, default in form.settings.items():
            call.settings[name] = (
                call.given[name] if name in call.given else default(call) if callable(default) else default
            )

    def _key(self, call: Call) -> Mapping[str, Any]:
        """The case of a call, alike on all ranks: of sizes in which ranks may differ the greatest, that of the first
        call with these other sizes. Collective the first time where there are such sizes, not in a capture."""
        assert self.tuning is not None
        key = self.tuning.key(call)
        shared = {name: value for name, value in key.items() if name.lower() not in self.private}
        case = (self.name, *shared.values(), call.dtype)
        known: dict[Any, Mapping[str, Any]] = call.world.lasting.setdefault("pkt.kernels.cases", {})
        if case not in known:
            if call.world.capturing and len(shared) < len(key):
                raise Unsupported.captured(call.world.rank, case)
            sizes = {n: v if n in shared else max(call.world.all_gather_object(v)) for n, v in key.items()}
            known[case] = {**sizes, "dtype": call.dtype, "size": call.world.size}
        return known[case]

    def _tuned(self, call: Call, key: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that were tuned here for a case, or measured for a shape like it; {} where there are none, and where
        their form cannot run. Collective the first time, which may not be in a capture."""
        if not _advice or "shard" in key:
            return {}
        known: dict[Any, dict[str, Any]] = call.world.lasting.setdefault("tune.settings", {})
        case = (self.name, *key.values())
        if case not in known:
            if call.world.capturing:
                raise Unsupported.captured(call.world.rank, case)
            known[case] = dict(_advice[0](self, key, call.world))
        try:
            settings = self.settled(call, known[case])
            form = self.forms.get(settings.get("mode", ""))
            if form is not None:
                if form.fits(call):
                    return {}
                self._check_reach(call, form)
        except PktError as error:
            self._ignored(error)
            return {}
        call.case = case if settings else None
        return settings

    def _ignored(self, error: PktError) -> None:
        warnings.warn(f"pkt.tune: settings that were tuned for {self.name} are ignored: {error}", stacklevel=2)

    def settled(self, call: Call, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that a tuner or its cache offers, checked as if the caller had given them. Raises what the caller
        would get."""
        mode = settings.get("mode")
        if mode is not None:
            choice(*self.forms)(call, "mode", mode)
        given, call.given = call.given, {name: value for name, value in settings.items() if name != "mode"}
        try:
            self._check_names(call, mode or self.default(call))
        finally:
            call.given = given
        return self._checked(call, dict(settings))

    def _check_names(self, call: Call, mode: str) -> None:
        """The form takes every setting that is given. Raises ShapeError."""
        for name in call.given:
            if name not in self.form(mode).settings:
                raise call.refuse(name, call.given[name], f'none with mode "{mode}"')

    def _forecast(self, call: Call, key: Mapping[str, Any]) -> Forecast:
        """The forms for a case, kept in the world: ranks that call again must take the same."""
        known: dict[Any, Forecast] = call.world.lasting.setdefault("pkt.kernels.forecasts", {})
        case = (self.name, *key.values())
        if case not in known:
            known[case] = self.forecast(key, gpu_of(call.world, case))
        return known[case]

    def _fastest(self, call: Call, found: Forecast) -> str:
        """The first form of a forecast that can run a call. Some ask all ranks the first time: all have one order."""
        return next(name for name in found.order if not self.forms[name].fits(call))

    def order(self, call: Call) -> tuple[str, ...]:
        """All forms, those that are expected to be the fastest first."""
        return self._forecast(call, self._key(call)).order

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

    def _agree(self, call: Call, form: Form, staged: Sequence[str], needs: str | None) -> None:
        """Every rank makes this call, copies the same tensors, and needs the same gradients. Raises
        CollectiveMismatch."""
        known: dict[str, Any] = {}
        reached = [name for name in form.symmetric if name not in staged]
        for name, operand in self.tensors.items():
            tensor = call.tensors[name]
            known[name] = None if tensor is None else self._shared(call, name, operand, name in reached)
        if "out" in reached:
            known["out"] = call.tensors["out"]
        if staged:
            known["plain"] = " ".join(staged)
        if needs is not None:
            known["requires_grad"] = needs
        check_agreed(
            call.name, call.world, **known, **call.arguments, mode=call.mode, **call.given, **form.agrees(call)
        )

    def _shared(self, call: Call, name: str, operand: Operand, symmetric: bool) -> Any:
        """An operand as far as the ranks must agree on it: its place in the heap counts where peers access it."""
        tensor = call.tensors[name]
        if symmetric:
            return tensor
        shape = operand.letters(call)
        words = shape.split() if shape != "..." else [""] * tensor.ndim
        sizes = (word if word and letter_of(word, 1)[0] in self.private else n for n, word in zip(tensor.shape, words))
        return Agreed(tuple(sizes), tensor.dtype, None)

    def _filled(self, call: Call, form: Form) -> Launch:
        """What launches, with new results where the caller gives none; nothing is launched for empty ones."""
        new = functools.partial(torch.empty, call.shape, dtype=call.result_dtype, device=call.world.torch_device)
        given = "out" not in self.names or call.tensors["out"] is not None
        if not given:
            try:
                call.tensors["out"] = new()
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                nbytes = math.prod(call.shape) * call.dtype.itemsize
                raise HeapFull.result(call.name, nbytes, str(call.world.torch_device), call.world.rank) from error
        others = [
            functools.partial(torch.empty, shape, dtype=dtype, device=call["out"].device)
            for shape, dtype in self._others(call)
        ]
        launch = self._empty(call) or form.plan(call)
        if given and not others:
            return launch
        at = self.names.index("out")

        def launch_into_new(*tensors: Any) -> Any:
            full = list(tensors)
            if not given:
                full[at] = new()
            return launch(*full, *(make() for make in others))

        return launch_into_new

    def _empty(self, call: Call) -> Launch | None:
        """What "launches" where there is nothing to compute; None where there is."""
        written, size = call.tensors[self.written], call.world.size
        if self.always:
            return None
        if written.numel() == 0 and not self.also:
            return lambda *tensors: tensors[self._written]
        ranks_agree = not any(n == 0 for letter, n in call.sizes.items() if letter in self.private)
        if ranks_agree and any(t is not None and t.numel() == 0 for n, t in call.tensors.items() if n in self.tensors):
            arguments = dict(call.arguments)

            @torch.no_grad()  # as of kernels
            def launch(*tensors: Any) -> Any:
                named = zip(self.names, tensors)
                operands = {n: None if t is None else [t] * size for n, t in named if n in self.tensors}
                exact = self.reference(call.world.rank, **operands, **arguments)
                if not self.also:
                    return tensors[self._written].copy_(exact)
                written = (tensors[self._written], *tensors[len(self.names) :])
                return tuple(to.copy_(found) for to, found in zip(written, exact))

            return launch
        return None

    # --------------------------------------------------------------------------------------------- without a world
    def describe(self, key: Mapping[str, Any], gpu: Gpu | None = None) -> Call:
        """A call for a case that `tuning` describes, with tensors of no memory and a world that nobody joined. key: M,
        N, K of the product that each rank computes, dtype and size. gpu: of every rank; the simulator where None."""
        assert self.tuning is not None, f"{self.name} is not tuned"
        arguments = {**self._defaults, **{name: key[name] for name in self._defaults if name in key}}
        call = Call(self.name, Described(key["size"], gpu), {}, arguments, {}, None)  # type: ignore[arg-type]
        call.sizes = self.tuning.sizes(key)
        dtype = DTYPES[dtype_text(key["dtype"])]
        for name, operand in self.tensors.items():
            shape = call.bound(operand.letters(call))
            call.tensors[name] = None if operand.optional else torch.empty(shape, dtype=dtype, device="meta")
        self._bind_result(call)
        return call

    def collective(
        self, shape: Shape, dtype: torch.dtype, size: int, gpu: Gpu, symmetric: bool, multicast: bool
    ) -> tuple[str, dict[str, int]]:
        """The form that the operator, a collective, takes for x of a shape where the caller leaves all else out, and
        the bytes of the copies that each call makes, see `staging.copied`. symmetric: x and `out` are. gpu, multicast:
        of every rank. Raises ShapeError."""
        make = described if symmetric else functools.partial(torch.empty, device="meta")
        call = Call(self.name, Described(size, gpu, multicast), {}, self._defaults, {}, None)  # type: ignore[arg-type]
        call.tensors["x"] = make(shape, dtype=dtype)
        for name, value in call.arguments.items():
            call.arguments[name] = self.arguments[name](call, name, value)
        self._bind_result(call)
        if "out" in self.names:
            call.tensors["out"] = make(call.shape, dtype=dtype)
        mode = self.default(call)
        return mode, staging.copied(call, self.forms[mode].symmetric, self.tensors, self.written)

    def over_nodes(
        self, shape: Shape, dtype: torch.dtype, nodes: int, node_size: int, network: Network, gpu: Gpu
    ) -> tuple[str, TwoLinks]:
        """The form that the operator, a collective, takes over several nodes, and the parts of its predicted time, for
        an x of a shape where the caller leaves all else out. network, gpu: of every rank. Raises ShapeError."""
        call = Call(self.name, Described(nodes * node_size, gpu), {}, self._defaults, {}, None)  # type: ignore[arg-type]
        call.tensors["x"] = x = torch.empty(shape, dtype=dtype, device="meta")
        for name, value in call.arguments.items():
            call.arguments[name] = self.arguments[name](call, name, value)
        self._bind_result(call)
        mode, form = next(iter(self.across.items()))
        assert form.seconds is not None
        key = {"nbytes": x.nbytes, "nodes": nodes, "node_size": node_size, "network": network}
        found = form.seconds({}, key, gpu)
        assert isinstance(found, TwoLinks)
        return mode, found

    def predicted(self, config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu) -> Estimate | None:
        """The parts of the time of a config, `mode` and settings, in such a case; None where its form declares none."""
        form = self.forms.get(config.get("mode", ""))
        return None if form is None else predicted(self.name, config["mode"], form, config, key, gpu)

    def forecast(self, key: Mapping[str, Any], gpu: Gpu) -> Forecast:
        """The forms for such a case, with their predicted seconds."""
        return forecast(self.name, self.forms, key, gpu)

    def choose(self, key: Mapping[str, Any], gpu: Gpu | None = None) -> dict[str, Any]:
        """The form, as `mode`, and the settings that the operator takes for such a case by its own rule, where the
        caller gives none and none were tuned."""
        call = self.describe(key, gpu)
        call.mode = self.default(call) if gpu is None else self._fastest(call, self.forecast(key, gpu))
        form = self.forms[call.mode]
        self._fill(call, form)
        settings = form.complete(call) if form.complete else call.settings
        return {"mode": call.mode, **settings}


def _rebuilt(state: dict[str, Any]) -> Operator:
    operator = Operator.__new__(Operator)
    vars(operator).update(state)
    operator.op, operator.op_out, operator.op_several = traced.define(operator)
    return operator


def _same(memory: torch.Tensor) -> torch.Tensor:
    return memory


# ------------------------------------------------------------------------------------------------------ the registry
PACKAGE = "pkt.kernels"
_DECLARES = re.compile(r"^(OPERATOR = |from .* import .*\bOPERATOR\b)", re.MULTILINE)


@functools.cache
def _modules() -> dict[str, str]:
    """The modules and folders of kernels/ that declare an OPERATOR of their name, and the modules of a folder that do
    and whose names begin with the folder's, as ring_attention/ring_attention_backward.py. By name: the path behind
    pkt.kernels. Reads their text and loads none."""
    found = {}
    for name, spec in _specs(importlib.import_module(PACKAGE).__path__):
        found[name] = (name, spec.origin)
        inner = [(n, s) for n, s in _specs(spec.submodule_search_locations or ()) if n.startswith(f"{name}_")]
        found |= {n: (f"{name}.{n}", s.origin) for n, s in inner}
    return {name: at for name, (at, file) in found.items() if _DECLARES.search(Path(file).read_text(encoding="utf-8"))}


def _specs(folders: Iterable[str]) -> list[tuple[str, Any]]:
    return [(m.name, m.module_finder.find_spec(m.name, None)) for m in pkgutil.iter_modules(folders)]


def module_of(name: str) -> str:
    """The full name of the module that declares an operator of pkt."""
    return f"{PACKAGE}.{_modules()[name]}"


def names() -> list[str]:
    """The names of all operators. Loads none of them."""
    return [*_modules(), *registered]


def operators() -> dict[str, Operator]:
    """Every operator of pkt by name: each module or folder of kernels/ that declares an OPERATOR."""
    return {name: _loaded(name) for name in _modules()} | registered


def _loaded(name: str) -> Operator:
    return importlib.import_module(module_of(name)).OPERATOR


registered: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Add an operator from outside kernels/: `pkt.NAME`, the tuner and the conformance suite then find it."""
    registered[operator.name] = operator
    return operator


def named(name: str) -> Operator | None:
    """The operator of that name, or short name; only its own module is loaded where the name is a module's."""
    if name in registered:
        return registered[name]
    if name in _modules():
        return _loaded(name)
    return next((o for o in operators().values() if o.tuning and o.tuning.short == name), None)
