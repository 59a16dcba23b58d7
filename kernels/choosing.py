"""Which form of an operator a call takes, and with which settings: the caller's, tuned ones, or those of the form that
is expected to be the fastest."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pkt.errors import PktError, ShapeError, Unsupported
from pkt.model.cost import DTYPES, Estimate
from pkt.model.gpu import Gpu
from pkt.model.network import Network
from pkt.runtime.memory.tensor import described
from pkt.runtime.world import World
from pkt.wording import dtype_text

from .declaration import Call, Form, Shape, choice
from .declared import Declared
from .forecast import Described, Forecast, forecast, gpu_of, predicted

Advice = Callable[[str, Mapping[str, Any], World], Mapping[str, Any]]
"""Settings that were tuned for an operator, by its name, and a case, `mode` among them; {} where there are none.
Collective."""
_advice: list[Advice] = []


def take_advice(advice: Advice) -> None:
    """From now on operators ask `advice` where the caller gives no settings. `pkt` hands the tuner in."""
    _advice[:] = [advice]


class Choosing(Declared):
    """An operator that chooses the form of a call, and that tells what it would choose for a case, without a world."""

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

    def _key(self, call: Call) -> Mapping[str, Any]:
        """The case of a call, alike on all ranks: the greatest of sizes in which ranks may differ. Collective the first
        time where there are such sizes, not in a capture."""
        assert self.tuning is not None
        key = dict(self.tuning.key(call))
        for name in key:
            if name.lower() in self.private:
                key[name] = call.greatest(name.lower())
        return {**key, "dtype": call.dtype, "size": call.world.size}

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
            known[case] = dict(_advice[0](self.name, key, call.world))
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
    ) -> tuple[str, int]:
        """The form that the operator, a collective, takes for x of a shape where the caller leaves all else out, and
        the bytes that a rank takes out of its inbox where a symmetric tensor would have them in their places.
        symmetric: x and `out` are. gpu, multicast: of every rank. Raises ShapeError."""
        make = described if symmetric else functools.partial(torch.empty, device="meta")
        call = self._described_call(make(shape, dtype=dtype), Described(size, gpu, multicast))
        if "out" in self.names:
            call.tensors["out"] = make(call.shape, dtype=dtype)
        mode, nbytes = self.default(call), math.prod(call.shape) * dtype.itemsize
        own = nbytes // size if self.written == "out" else 0  # a broadcast brings all of x
        return mode, nbytes - own if mode == "inbox" else 0

    def _described_call(self, x: torch.Tensor, world: Described) -> Call:
        """A collective's call with its default arguments. Raises ShapeError."""
        call = Call(self.name, world, {"x": x}, self._defaults, {}, None)  # type: ignore[arg-type]
        for name, value in call.arguments.items():
            call.arguments[name] = self.arguments[name](call, name, value)
        self._bind_result(call)
        return call

    def over_nodes(
        self, shape: Shape, dtype: torch.dtype, nodes: int, node_size: int, network: Network, gpu: Gpu
    ) -> tuple[str, dict[str, Any]]:
        """The form that the operator, a collective or a product, takes over several nodes where the caller leaves all
        else out, and the case as that form's `space` and `seconds` take it. shape: of x; of a product M, N and K that
        each rank computes. network, gpu: of every rank. Raises ShapeError."""
        mode, size = next(iter(self.across)), nodes * node_size
        links = {"nodes": nodes, "node_size": node_size, "network": network}
        if self.tuning is not None:
            wanted = "(M, N, K) of the product that each rank computes"
            if len(shape) != 3:
                raise ShapeError.argument(self.name, "shape", shape, wanted)
            if "m" in self.tuning.shared and shape[0] % size:
                raise ShapeError.argument(self.name, "shape", shape, f"{wanted}, M divisible by {size} ranks")
            return mode, {**dict(zip("MNK", shape)), "dtype": dtype_text(dtype), "size": size, **links}
        x = torch.empty(shape, dtype=dtype, device="meta")
        self._described_call(x, Described(size, gpu))  # raises what a call would
        return mode, {"nbytes": x.nbytes, "itemsize": x.itemsize, **links}

    def predicted(self, config: Mapping[str, Any], key: Mapping[str, Any], gpu: Gpu) -> Estimate | None:
        """The parts of the time of a config, `mode` and settings, in such a case; None where its form declares none."""
        form = self.forms.get(config.get("mode", ""))
        return None if form is None else predicted(self.name, config["mode"], form, config, key, gpu)

    def forecast(self, key: Mapping[str, Any], gpu: Gpu) -> Forecast:
        """The forms for such a case, with their predicted seconds."""
        like = self.tuning.like if self.tuning else ""
        return forecast(like or self.name, self.forms, key, gpu)

    def choose(self, key: Mapping[str, Any], gpu: Gpu | None = None) -> dict[str, Any]:
        """The form, as `mode`, and the settings that the operator takes for such a case by its own rule, where the
        caller gives none and none were tuned."""
        call = self.describe(key, gpu)
        call.mode = self.default(call) if gpu is None else self._fastest(call, self.forecast(key, gpu))
        form = self.forms[call.mode]
        self._fill(call, form)
        settings = form.complete(call) if form.complete else call.settings
        return {"mode": call.mode, **settings}
