"""Settings of all tests: GPU tests need a GPU, and hypothesis has no wall-clock deadlines."""

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# Before numpy and torch are imported: one thread a process, as pytest's workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

# A test process keeps millions of objects, and a full collection of garbage takes 0.3 s to look through them. As a rule
# one follows on 70,000 new objects, here on two million.
gc.set_threshold(2_000, 10, 100)

# A first call compiles or builds caches and may take long; failing examples print how to reproduce them.
hypothesis.settings.register_profile("pkt", deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.load_profile("pkt")


pytest_plugins = ["tests.explored"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def quick_front_end() -> Iterator[None]:
    """Kernels that tests compile for GPUs pass through Triton's front end in two thirds of its time."""
    from triton.compiler import code_generator

    from pkt.simulate.skipped import quicker

    whole = code_generator.ast_to_ttir

    @functools.wraps(whole)
    def ast_to_ttir(*args: Any, **named: Any) -> Any:
        with quicker():
            return whole(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_generator, "ast_to_ttir", ast_to_ttir)
        yield
