"""The mistakes: each is one plausible change of a line of pkt, and names the tests that have to fail with it."""

from tests.mutation.mutant import QUICK, Mutant

from . import (
    attention,
    collectives,
    experts,
    language,
    model,
    modules,
    operators,
    products,
    runtime,
    simulator,
    tools,
    tuner,
)

__all__ = ["MUTANTS", "QUICK", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *simulator.MUTANTS,
    *language.MUTANTS,
    *runtime.MUTANTS,
    *operators.MUTANTS,
    *collectives.MUTANTS,
    *products.MUTANTS,
    *experts.MUTANTS,
    *attention.MUTANTS,
    *tuner.MUTANTS,
    *model.MUTANTS,
    *tools.MUTANTS,
    *modules.MUTANTS,
)
