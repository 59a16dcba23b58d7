"""Column-parallel Linears of one module that take one input, as q, k and v: one product for all of them.

Their weights lie below each other in memory, and each parameter is a view of its rows. The first Linear that is called
with an input multiplies it with all rows; the others, called with the same input, find their columns computed. So an
input that is split is gathered once, and few or narrow weights do not cost a launch each.

A Linear that does not take its columns is not expected to again. That is decided before the first call inside
torch.utils.checkpoint, which later calls the Linears once more and must see the same products. Weights that something
moved, as `to` or `deepcopy` do, are laid below each other once more in the next call that is not compiled; until then
each has a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import CompileContext
from torch.nn import functional

from pkt.errors import Unsupported
from pkt.kernels.all_gather_matmul import all_gather_matmul

from . import rows
from .exchange import autocast, sum_gradient
from .linear import ColumnParallelLinear, multiplied
from .parted import parted
from .sharded import is_dtensor

_PLAIN = (torch.Tensor, nn.Parameter)
_library = torch.library.Library("pkt", "FRAGMENT")
_library.define("check_below(Tensor[] parts) -> ()")
_library.define("check_unwritten(Tensor x, bool again) -> ()")


def are_below(parts: Sequence[torch.Tensor]) -> bool:
    """Whether each of several contiguous tensors begins where the one before ends, in one storage and not in several
    that are neighbours by chance."""
    address = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != address:
            return False
        address += part.nbytes
    storage = parts[0].untyped_storage()
    return address <= storage.data_ptr() + storage.nbytes()


def _check_below(parts: Sequence[torch.Tensor]) -> None:
    if not are_below(parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        found = f"found weights {shapes} that do not lie below each other, as they did when it was compiled"
        remedy = "call the model once without compiled code, or compile it again"
        raise Unsupported.here("compiled code of pkt.parallelize", found, remedy)


# Compiled code reads all rows from the first weight's address: without this check it would read whatever is there.
_library.impl("check_below", _check_below, "CompositeExplicitAutograd")
torch.library.register_fake("pkt::check_below", lambda parts: None, lib=_library)
torch.fx.node.has_side_effect(torch.ops.pkt.check_below.default)


def _check_unwritten(x: torch.Tensor, again: bool) -> None:
    """While the compiler looks at a graph: that x, which is given `again`, has the elements that it had before."""
    if not again:
        x.multiplied_version = x._version  # type: ignore[attr-defined]
    elif x._version != getattr(x, "multiplied_version", x._version):
        found = "found a write to the input of Linears between their calls"
        raise Unsupported.here("compiled code of pkt.parallelize", found, "write to another tensor, as x = x * 2")


_library.impl("check_unwritten", lambda x, again: None, "CompositeExplicitAutograd")
torch.library.register_fake("pkt::check_unwritten", _check_unwritten, lib=_library)


class _Joined(torch.autograd.Function):
    """Weights that lie below each other as one, without a copy."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)  # whose reading notices a write to any of them since
        return _as_one(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.split([len(weight) for weight in ctx.saved_tensors])


def _as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())


class Siblings:
    """Linears that are expected to take one input, in the order in which their weights lie in memory."""

    def __init__(self, linears: Iterable[ColumnParallelLinear]) -> None:
        self.linears = list(linears)
        self.lie = False
        """Whether the weights lay below each other when that was last seen."""
        self.fixed = False
        """Whether no Linear is left out any more: torch.utils.checkpoint must find the products that it saw before."""
        self.given: Any = None
        """The input of which results wait, with what tells that it is the same; and the results, by Linear."""
        self.ahead: list[tuple[Any, torch.Tensor]] = []
        self.lay()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lie": False, "given": None, "ahead": []}  # a copy's weights lie elsewhere

    def lay(self) -> None:
        """Put the weights below each other, where they can be."""
        held = [linear.held("weight") for linear in self.linears]
        parts = [_memory(one) for one in held]
        if self.lie and are_below(parts):
            return
        self.lie = len({id(one) for one in held}) == len(held) > 1 and _are_alike(held, parts)
        if not self.lie or are_below(parts):
            return
        if parts[0].is_cuda and torch.cuda.is_current_stream_capturing():  # a graph would copy them at each replay
            self.lie = False
            return
        whole = torch.cat([part.data for part in parts])
        for part, its in zip(parts, whole.split([len(part) for part in parts])):
            part.data = its

    def product(self, linear: Any, given: Any, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """What the Linear computes of x. given: what it was called with. dim: that is split, see `multiplied`."""
        if torch.compiler.is_dynamo_compiling() and _is_inner_graph():  # where no object from outside may be changed
            return self._own(linear, x, dim)
        again = self.given is not None and self.given[0] is given and self.given[1] == self._state(x)
        if not again:
            self.forget()
            if _saving_hooks() is not None and torch.is_grad_enabled():
                self.fixed = True
            state = self._state(x)  # of the Linears that are left
            if state is not None and len(self.linears) > 1 and any(one is linear for one in self.linears):
                self.given, self.ahead = (given, state), list(zip(self.linears, self._products(linear.keep, x, dim)))
                self._watch(state)
        if torch.compiler.is_compiling():
            torch.ops.pkt.check_unwritten(x, again)
        for one, y in self.ahead:
            if one is linear:
                self.ahead = [each for each in self.ahead if each[0] is not linear]
                self.given = self.given if self.ahead else None
                return y
        return self._own(linear, x, dim)

    def _own(self, linear: Any, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return multiplied(x, linear.local("weight"), linear.local("bias"), dim, linear.keep, linear.world)

    def _state(self, x: torch.Tensor) -> tuple[Any, ...] | None:
        """What differs where a result of x, computed ahead, is not what its Linear would compute now; None where torch
        does not tell of writes."""
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
        if torch.compiler.is_compiling():
            return *modes, _compilation()  # in one graph, see _check_unwritten; another one may run after writes
        held = [one for linear in self.linears for one in linear._parameters.values() if one is not None]
        read = [x, *map(_memory, held)]
        if any(tensor.is_inference() for tensor in read):
            return None
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        return *modes, stream, _saving_hooks(), *[tensor._version for tensor in read]

    def _watch(self, state: tuple[Any, ...]) -> None:
        """Forget the results that wait when a backward pass goes through the others: it frees the graph of all."""

        def passed(grad: torch.Tensor) -> None:
            if self.given is not None and self.given[1] is state:
                self.forget()

        for _, y in self.ahead:
            if y.requires_grad and not torch.compiler.is_compiling():
                y.register_hook(passed)

    def forget(self) -> None:
        """The input was given to all Linears that take it. Those that did not are not expected again."""
        if self.ahead and not self.fixed:
            unused = [one for one, _ in self.ahead]
            left = [all(one is not other for other in unused) for one in self.linears]
            self.linears = [one for one, taken in zip(self.linears, left) if taken]
            self.lie = self.lie and True in left and all(left[left.index(True) :][: sum(left)])  # no gap
        self.given, self.ahead = None, []

    def _are_elsewhere(self) -> bool:
        """Whether compiled code takes other weights: those of an exported program, or of torch.func.functional_call."""
        exporting = not torch.compiler.is_dynamo_compiling()
        return exporting or not all(isinstance(one.held("weight"), nn.Parameter) for one in self.linears)

    def _products(self, keep: Any, x: torch.Tensor, dim: int | None) -> Sequence[torch.Tensor]:
        compiling, world = torch.compiler.is_compiling(), self.linears[0].world
        if not compiling:
            self.lay()
        weights = [linear.local("weight") for linear in self.linears]
        biases = None if self.linears[0].bias is None else [linear.local("bias") for linear in self.linears]
        if self.lie and not (compiling and self._are_elsewhere()):
            if compiling:
                torch.ops.pkt.check_below(weights)
            needs = torch.is_grad_enabled() and any(one.requires_grad for one in weights)
            weight = _Joined.apply(*weights) if needs else _as_one(weights)  # torch.compile fails where none is needed
            y = multiplied(x, weight, None if biases is None else torch.cat(biases), dim, keep, world)
            widths = [len(each) for each in weights]
            return parted(y, widths)
        if dim is None:
            x = sum_gradient(x, world)
            operands = zip(weights, biases or [None] * len(weights))
            return [functional.linear(*autocast(x, weight, bias)) for weight, bias in operands]
        flat, *weights = autocast(rows.rows(x), *weights)
        biases = None if biases is None else list(autocast(*biases))
        each = all_gather_matmul(flat, [weight.t() for weight in weights], bias=biases, world=world)
        return [rows.from_ranks(y, x.shape, dim, world.size) for y in each]


def _saving_hooks() -> Any:
    """What packs tensors that are saved here for a backward pass: other functions in each region of
    torch.utils.checkpoint, and in each recomputation of it. None: nothing does, or a compiler looks on."""
    return None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(True)


@torch.compiler.assume_constant_result
def _compilation() -> str:
    """The name of the graph that the compiler makes."""
    return str(CompileContext.current_compile_id())


@torch.compiler.assume_constant_result
def _is_inner_graph() -> bool:
    """Whether the compiler makes a graph inside of another one, as of torch.utils.checkpoint."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded by the compiler

    return InstructionTranslator.current_tx().output.current_tracer.parent is not None


def group(linears: Iterable[Any]) -> None:
    """Make those Linears siblings whose inputs and results are alike."""
    alike: dict[Any, list[Any]] = {}
    for one in linears:
        key = one.in_features, one.bias is None, one.sequence_dim, one.keep, one.local("weight").requires_grad
        alike.setdefault(key, []).append(one)
    for each in alike.values():
        siblings = Siblings(each)
        for one in each:
            one.siblings = siblings


def _memory(parameter: Any) -> torch.Tensor:
    """The tensor that has the elements of this rank's part of it."""
    return parameter._local_tensor if is_dtensor(parameter) else parameter


def _are_alike(held: Sequence[Any], parts: Sequence[torch.Tensor]) -> bool:
    """Whether parameters, of which `parts` are this rank's, can lie below each other."""
    plain = all(isinstance(one, nn.Parameter) for one in held) and all(type(p) in _PLAIN for p in parts)
    first = parts[0]
    return (
        plain
        and not first.is_meta
        and all(
            p.is_contiguous() and (p.dtype, p.device, p.shape[1]) == (first.dtype, first.device, first.shape[1])
            for p in parts
        )
    )
