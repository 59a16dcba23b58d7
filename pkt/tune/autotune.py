"""@pkt.autotune: a kernel or a function that chooses its own config, once a case, on all ranks alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pkt.errors import ShapeError, Unsupported
from pkt.model.config import Config, configs_of
from pkt.runtime.memory.tensor import SymmetricTensor
from pkt.runtime.world import World, current_world
from pkt.tune.compiling import only_compiling
from pkt.tune.search import MOST, Model, Search
from pkt.tune.target import Call, Check, Target, key_of, names_of, plain_key
from pkt.tune.timers import Timer, timer_of
from pkt.tune.tuner import Bucket, Plan, Prune, known, tuned
from pkt.tune.votes import case_text


def autotune(
    configs: Iterable[Any],
    key: Sequence[str] = (),
    *,
    bucket: Bucket | None = None,
    prune: Prune | None = None,
    model: Model | None = None,
    check: Check | None = None,
    restore: Sequence[str] = (),
    most: float = MOST,
    timer: Callable[[World], Timer] = timer_of,
) -> Callable[[Any], Autotuned]:
    """Decorate a `@triton.jit` kernel or a Python function with the configs it may run with.

        @pkt.autotune(configs=pkt.space(num_comm_sms=range(2, 66, 2), BLOCK_M=[64, 128]), key=["M", "N", "K"])
        @triton.jit
        def kernel(...): ...

        kernel[grid](...)  # without the settings; grid may be a function of them

    The first call of a case, by every rank, looks up the choice of earlier runs, or searches as pkt.tune.tune does,
    whose arguments these are. Later calls look into a dict. A case is the arguments that `key` names (of tensors shape
    and dtype), after `bucket`, and the dtypes of all tensors. While a CUDA graph is captured only known cases may be
    called; another case raises Unsupported.
    """
    found = configs_of("pkt.autotune", configs)
    keys, kept = names_of("pkt.autotune", "key", key), names_of("pkt.autotune", "restore", restore)
    plan = Plan(found, keys, bucket or {}, prune, model, check, kept, most, timer)
    return lambda fn: Autotuned(fn, plan)


class Autotuned:
    """A decorated kernel or function: called like the original, without the settings."""

    def __init__(self, fn: Any, plan: Plan) -> None:
        """Raises ShapeError if the plan names something that is no parameter."""
        self.target = Target(fn, f"pkt.autotune of {getattr(fn, '__name__', fn)}")
        for name, names in (("key", plan.key), ("bucket", plan.bucket), ("restore", plan.restore)):
            self.target.check_names(name, names)
        self.fn, self.plan = fn, plan
        self.searches: dict[str, Search] = {}
        """The searches of this process, by case."""
        self._places = [(name, self._place(name)) for name in plan.key]
        self._memory = ("tune.autotune", self)
        functools.update_wrapper(self, self.target.python)

    def _place(self, name: str) -> slice:
        """Where among the positional arguments of a call the values of a parameter are."""
        at, kind = list(self.target.parameters).index(name), self.target.parameters[name].kind
        if kind is inspect.Parameter.KEYWORD_ONLY:
            return slice(0)
        return slice(at, None if kind is inspect.Parameter.VAR_POSITIONAL else at + 1)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if not self.target.is_kernel:
            raise ShapeError.argument(self.target.call, "grid", repr(grid), "none: it is a function, call it without")
        return functools.partial(self._run, grid)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.target.is_kernel:
            raise ShapeError.argument(self.target.call, "grid", "none", f"a grid: {self.target.name}[grid](...)")
        return self._run(None, *args, **named)

    def _run(self, grid: Any, /, *args: Any, **named: Any) -> Any:
        world, case = self._case(args, named)
        chosen: dict[Any, Config] = world.lasting.setdefault(self._memory, {})
        config = chosen.get(case)
        if config is None and only_compiling():  # inside a call that is being tuned and will run later
            config = self.plan.configs[0]
        elif config is None:
            config = chosen[case] = self._choose(world, chosen, grid, args, named)
        if config.pre_hook is not None:
            config.pre_hook({**self.target.arguments(args, named), **config})
        fn = self.fn if grid is None else self.fn[grid]
        return fn(*args, **named, **config.settings)

    def _case(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[World, tuple[Any, ...]]:
        """The world of a call, as Target.world finds it, and the call's case before `bucket`. Quick to make, because
        every call passes here."""
        world: World | None = None
        case: list[Any] = []
        for value in (*args, *named.values()) if named else args:
            if isinstance(value, torch.Tensor):
                case.append(value.dtype)
                if world is None and isinstance(value, SymmetricTensor):
                    world = value.world
            elif isinstance(value, World):
                world = value
        for name, place in self._places:
            for value in args[place] or (named.get(name),):
                case.append(value.shape if isinstance(value, torch.Tensor) else value)
                if isinstance(value, (list, tuple)) or type(value).__hash__ is None:  # which may hold lists
                    case[-1] = plain_key(self.target.call, {name: value})[name]
        return world or current_world(self.target.call), tuple(case)

    def _choose(
        self, world: World, chosen: dict[Any, Config], grid: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> Config:
        """Collective unless the case, after `bucket`, is known."""
        plan, call = self.plan, self.target.call
        if len(plan.configs) == 1:
            return plan.configs[0]
        key = key_of(call, plan.key, self.target.arguments(args, named), plan.bucket)
        case, whole = case_text(key), ("key", *key.items())
        if whole in chosen:
            return chosen[whole]
        if world.capturing:
            found = f"the case {case} is not known yet, and a CUDA graph is being captured"
            raise Unsupported.here(f"rank {world.rank}: {call}", found, "call it once before the capture")
        given = sorted(set(plan.configs[0]) & set(named))
        if given:
            wanted = "no value: it is a setting of the configs"
            raise ShapeError.argument(call, given[0], repr(named[given[0]]), wanted, world.rank)
        job = Call(self.target, self.target.name, grid, args, named, plan.check, plan.restore, world)
        candidates, config = known(job, world, key, plan)
        if config is None:
            search = self.searches[case] = tuned(job, world, key, plan, lambda: candidates)
            config = search.best
            if config is None:  # interrupted before anything was measured
                raise KeyboardInterrupt
        chosen[whole] = config
        return config
