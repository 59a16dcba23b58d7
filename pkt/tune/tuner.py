"""tune() searches; choice() looks up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pkt.errors import DtypeError, ShapeError
from pkt.kernels.operator import named
from pkt.model.config import NCCL, UNFUSED, Config, configs_of, nccl_wanted
from pkt.runtime.world import World
from pkt.tune import cache
from pkt.tune.search import MOST, Model, Search, search, slots
from pkt.tune.spread import by_model, spread
from pkt.tune.tables import nearest
from pkt.tune.target import Call, Check, Target, key_of, names_of, plain_key
from pkt.tune.timers import Timer, timer_of
from pkt.tune.votes import settle

Prune = Callable[[Sequence[Config], Mapping[str, Any]], Iterable[Config]]
"""prune(configs, arguments by name) -> those that are candidates for this call; the same on every rank."""
Bucket = Mapping[str, Callable[[Any], Any]]
"""Name in a key -> function from its value to the value that the choice is remembered by."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The arguments of a search, see `tune`. by_name: the choice does not depend on a source."""

    configs: Sequence[Config]
    key: Sequence[str] = ()
    bucket: Bucket = field(default_factory=dict)
    prune: Prune | None = None
    model: Model | None = None
    check: Check | None = None
    restore: Sequence[str] = ()
    most: float = MOST
    timer: Callable[[World], Timer] = timer_of
    by_name: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, (int, float)) or not 0 <= self.most <= 1:
            raise ShapeError.argument("a search", "most", repr(self.most), "a share of the candidates, from 0 to 1")
        for name in ("prune", "model", "check", "timer"):
            if not callable(value := getattr(self, name)) and value is not None:
                raise DtypeError.argument("a search", name, f"{value!r:.80}", "a function")
        if not isinstance(self.bucket, Mapping) or not all(map(callable, self.bucket.values())):
            raise DtypeError.argument("a search", "bucket", f"{self.bucket!r:.80}", "a function for each name")

    def candidates(self, call: Call) -> Sequence[Config]:
        """The configs that `prune` leaves for a call."""
        if self.prune is None:
            return self.configs
        return configs_of(call.target.call, self.prune(self.configs, call.arguments), "prune")

    def case(self, call: Call, world: World, key: Mapping[str, Any]) -> str:
        """The text that a choice is remembered by."""
        simulated = world.torch_device.type == "cpu"
        return cache.case(world, "" if self.by_name else call.target.source(simulated), key)


def tune(
    what: Any,
    *args: Any,
    configs: Iterable[Any],
    key: Sequence[str] | Mapping[str, Any] = (),
    grid: Any = None,
    name: str = "",
    bucket: Bucket | None = None,
    prune: Prune | None = None,
    model: Model | None = None,
    check: Check | None = None,
    restore: Sequence[str] = (),
    most: float = MOST,
    timer: Callable[[World], Timer] = timer_of,
    **named: Any,
) -> Search:
    """Search for the fastest config of `what(*args, **named)`, and remember it for this machine. Collective.

    what: a `@triton.jit` kernel, launched on `grid` (which may be a function of the settings, as in Triton), or a
        Python function; a config's settings are passed by keyword.
    configs: pkt.Config, mappings of settings or triton.Config, the same on every rank.
    key: names of the arguments that make this case (of tensors shape and dtype count), or the case itself.
    name: pkt.tune.choice finds the result under this name; without it, only the same source does.
    bucket: name in key -> function from its value to the value that the choice is remembered by.
    prune: says which configs are candidates, given the arguments by name.
    model: predicts the seconds of a config for a key; the configs with the least are measured. Without a model some
        that are evenly spread are.
    check: given the arguments by name and the returned value, whether both are right; a wrong config is dropped.
    restore: names of tensors that a run changes; they get their values back.
    most: largest share of the candidates that is measured; at least 8 are.
    timer: makes a timer for the world; the world's own where not given.

    The ranks measure in lock-step: a config that fails or is wrong on one rank is dropped on all, with the reason;
    Ctrl-C on one rank ends the search on all, with the best so far. The world is a World among the arguments, that of a
    symmetric tensor among them, or the current one. Raises CandidateMismatch, CollectiveMismatch, NoCandidate,
    ShapeError, DtypeError.
    """
    target = Target(what, "pkt.tune.tune")
    restore = names_of(target.call, "restore", restore)
    target.check_names("restore", restore)
    arguments = target.arguments(args, named)
    names = () if isinstance(key, Mapping) else names_of(target.call, "key", key)
    plan = Plan(
        configs_of(target.call, configs), names, bucket or {}, prune, model, check, restore, most, timer, bool(name)
    )
    if isinstance(key, Mapping):
        case = plain_key(target.call, key, bucket)
    else:
        case = key_of(target.call, names, arguments, bucket or {})
    world = target.world(arguments)
    call = Call(target, name or target.name, grid, args, named, check, restore, world)
    return tuned(call, world, case, plan, lambda: plan.candidates(call))


def tuned(call: Call, world: World, key: Mapping[str, Any], plan: Plan, of: Callable[[], Sequence[Config]]) -> Search:
    """Collective: search among the candidates `of()`, and remember the result unless the search was cut short."""

    def order(candidates: Sequence[Config]) -> list[tuple[int, float | None]]:
        if plan.model is not None:
            found = by_model(candidates, plan.model, key)
        else:
            found = [(i, None) for i in spread(candidates, slots(len(candidates), plan.most))]
        # The candidates that fuse nothing are always measured.
        return sorted(found, key=lambda pair: candidates[pair[0]] not in (NCCL, UNFUSED))

    candidates, said = settle(world, call.what, key, of, order)
    ordered = [(candidates[i], predicted) for i, predicted in said]
    found = search(world, plan.timer(world), call, key, ordered, plan.most)
    if world.rank == 0 and found.best is not None and not found.interrupted:
        time = next(c.time for c in found.candidates if c.config == found.best)
        assert time is not None
        cache.store(world, call.what, plan.case(call, world, key), found.best, time)
    if plan.by_name:  # operators must ask again
        for asked in ("tune.choices", "tune.settings"):
            world.lasting.pop(asked, None)
        world.forget_plans()
    return found


def known(call: Call, world: World, key: Mapping[str, Any], plan: Plan) -> tuple[Sequence[Config], Config | None]:
    """Collective: the candidates, and the only one, or the one that rank 0 remembers as the best; None without."""

    def offer(candidates: Sequence[Config]) -> int | None:
        if len(candidates) == 1:
            return 0
        kept = cache.load(world, call.what, plan.case(call, world, key))
        return candidates.index(kept) if kept in candidates else None

    candidates, at = settle(world, call.what, key, lambda: plan.candidates(call), offer)
    return candidates, None if at is None else candidates[at]


def choice(what: str, key: Mapping[str, Any], world: World) -> Config | None:
    """The config for the operator named `what` in the case `key`: the choice of a search under that name on this
    machine, else that of pkt's tables for the nearest shape, else None; with PKT_NCCL=0 never NCCL + cuBLAS. Collective
    the first time that a world asks; then a look into a dict."""
    choices: dict[Any, Config | None] = world.lasting.setdefault("tune.choices", {})
    case = plain_key("pkt.tune.choice", key)
    asked = (what, *case.items())
    if asked not in choices:

        def offer(_: Sequence[Config]) -> dict[str, Any] | None:
            found = cache.load(world, what, cache.case(world, "", case))
            if found is None or (found == NCCL and not nccl_wanted()):
                operator, gpu = named(what), cache.machine(world)["gpu"]
                found = nearest(operator, case, gpu, world.size) if operator else None
            return None if found is None else dict(found.settings)

        _, settings = settle(world, what, case, tuple, offer)
        choices[asked] = None if settings is None else Config(**settings)
    return choices[asked]
