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
tensors alike look up. For all operators, `declared.py` holds a call against the declaration, `choosing.py` takes a form
and settings, and here are agreement, empty tensors, new results, plans and the list of operators.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pkt.errors import Closed, DtypeError, HeapFull, ShapeError, Unsupported
from pkt.runtime.kept import Planned, by_types, planned, same
from pkt.runtime.memory.tensor import facts
from pkt.runtime.world import Workspace, World

from . import gradients, staging, traced
from .agreement import Agreed, check_agreed, world_of
from .choosing import Choosing
from .declaration import Call, Form, Launch, Operand, letter_of, making

# Looked up once: each look-up in torch would cost a call of an operator 20 ns.
is_dynamo_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
increment_version = torch.autograd.graph.increment_version
dispatch_modes, forward_ad = torch._C._len_torch_dispatch_stack, torch.autograd.forward_ad


class Operator(Choosing):
    """A declared operator; `register` adds it to the registry. Calling it is the body of the operator's function."""

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
        if (forward_ad._current_level >= 0 or dispatch_modes()) and traced.is_recorded(tensors, self.name, world):
            return traced.call_of(self, tensors, values, world, workspace)
        if is_grad_enabled() and gradients.required(tensors):
            if traced.has_traced(tensors):
                return traced.call_of(self, tensors, values, world, workspace)
            return gradients.record(self, tensors, values, world, workspace, self.__call__)
        if workspace is not None:
            with world.using(workspace, self.name):
                return self(tensors, values, world, None, needs)
        out = tensors[self._written]
        try:
            plans = world.plans
        except Closed:
            raise world.closed_error(self.name) from None
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
        if torch.jit.is_tracing():
            found = "found torch.jit.trace around the call, which sees no operator"
            raise Unsupported.here(f"rank {world.rank}: {self.name}", found, "use torch.export or torch.compile")
        call = self._call(world, dict(zip(self.names, tensors)), keywords)
        self._check_operands(call)
        if self.tuning is None:
            call.tensors |= staging.foreign(call, () if call.asked is None else self.form(call.asked).symmetric)
        any_strides = [name for name, operand in self.tensors.items() if operand.strided or operand.turned]
        copies = staging.contiguous(call, self.written, any_strides) if self.tuning is None else {}
        form = self._choose(call)
        staged = staging.unreachable(call, form.symmetric)
        if not self._stages(call):  # then only those that peers reach, and that are copied for their strides
            staged = [name for name in staged if name in copies and staging.reached(tensors[self.places[name]], world)]
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
        gives = None if self.gives is None else self.gives(call)
        return staging.staged(launch, places, [] if gives is False else self.read, self._written, world, not gives)

    def _stages(self, call: Call) -> bool:
        """Whether plain tensors are copied where peers access them: not if the caller asked for a form, and so for its
        requirements. Products choose forms by their operands, and refuse the others."""
        return call.asked is None and self.tuning is None

    def planned(self, world: World, *tensors: Any, **keywords: Any) -> Launch:
        """What launches a call, for operators that are made of others: for tensors of the same facts as these, and
        with no checks. Collective."""
        given = {**dict.fromkeys(self.keywords), **self._defaults, **keywords}
        return self.plan(world, tensors, given)

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
        words = shape.split() if isinstance(shape, str) and shape != "..." else [""] * tensor.ndim
        sizes = (word if word and letter_of(word, 1)[0] in self.private else n for n, word in zip(tensor.shape, words))
        return Agreed(tuple(sizes), tensor.dtype, None)

    def _filled(self, call: Call, form: Form) -> Launch:
        """What launches, with new results where the caller gives none; nothing is launched for empty ones."""
        device, fresh = call.world.torch_device, list(self._others(call))
        given = "out" not in self.names or call.tensors["out"] is not None
        if not given:
            fresh.insert(0, (call.shape, call.result_dtype))
            try:
                call.tensors["out"] = torch.empty(call.shape, dtype=call.result_dtype, device=device)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                nbytes = math.prod(call.shape) * call.dtype.itemsize
                raise HeapFull.result(call.name, nbytes, str(device), call.world.rank) from error
        launch = self._empty(call) or form.plan(call)
        if not fresh:
            return launch
        make = making(fresh, device)
        if given:
            return lambda *tensors: launch(*tensors, *make())
        before, behind = slice(self.places["out"]), slice(self.places["out"] + 1, None)

        def launch_into_new(*tensors: Any) -> Any:
            out, *others = make()
            return launch(*tensors[before], out, *tensors[behind], *others)

        return launch_into_new

    def _empty(self, call: Call) -> Launch | None:
        """What "launches" where there is nothing to compute; None where there is."""
        written, size = call.tensors[self.written], call.world.size
        if self.always(call) if callable(self.always) else self.always:
            return None
        if written.numel() == 0 and not self.also:
            return lambda *tensors: tensors[self._written]
        if self.private:  # other ranks may have more of these, so only the other letters say that all have nothing
            counts = [n for letter, n in call.sizes.items() if letter not in self.private]
        else:
            counts = [t.numel() for n, t in call.tensors.items() if n in self.tensors and t is not None]
        if 0 in counts:
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
