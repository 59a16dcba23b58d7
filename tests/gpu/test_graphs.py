"""CUDA graphs with changing inputs and eager calls between, skewed ranks, two streams."""

import pytest

from tests.gpu.cases_graphs import (
    PROGRAMS,
    Product,
    back_to_back,
    given_back,
    not_called_before,
    recorded,
    replays,
    skewed,
    two_streams,
    written_beside,
)
from tests.gpu.run import launch, on_ranks, scaled

REPLAYS = scaled("REPLAYS", 10**4)
LAUNCHES = scaled("LAUNCHES", 500)
BACK_TO_BACK = scaled("BACK_TO_BACK", 10**5)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_with_eager_calls_between(name: str, ranks: int) -> None:
    taken = launch(replays, ranks, name, REPLAYS)
    print(f"{name}, {ranks} ranks: {REPLAYS} replays, {max(taken):.1f} us each")


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if issubclass(program, Product)])
def test_a_capture_is_refused_until_the_operator_was_called(name: str, ranks: int) -> None:
    launch(not_called_before, ranks, name, 100)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_back_to_back_with_stragglers(name: str, ranks: int) -> None:
    taken = launch(back_to_back, ranks, name, BACK_TO_BACK)
    print(f"{name}, {ranks} ranks: {BACK_TO_BACK} launches back to back, {max(taken):.1f} us each")


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_skewed_ranks(name: str, ranks: int) -> None:
    launch(skewed, ranks, name, LAUNCHES)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("operators", [False, True])
def test_two_streams(operators: bool, ranks: int) -> None:
    launch(two_streams, ranks, LAUNCHES, operators)


@on_ranks(2, 4)
@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 24])
def test_no_kernel_of_an_operator_is_cooperative_in_a_graph(nbytes: int, ranks: int) -> None:
    assert launch(recorded, ranks, nbytes) == [[False, True]] * ranks


@on_ranks(1, 2)
def test_words_are_written_while_a_graph_is_recorded(ranks: int) -> None:
    launch(written_beside, ranks)


@on_ranks(2, 4)
def test_memory_that_torch_gives_back_between_recorded_calls(ranks: int) -> None:
    launch(given_back, ranks)
