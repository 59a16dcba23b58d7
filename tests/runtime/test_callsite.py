"""call_site finds the name that user code gives a result, even while another thread parses."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from pkt.runtime.memory import callsite
from pkt.runtime.memory.callsite import call_site


def test_the_name_is_found_where_another_thread_disturbs_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """gh-106905: two threads in ast.parse may end in a SystemError. Ranks that are threads would disagree on names."""
    disturbed = []

    def parse(source: str) -> Any:
        if not disturbed:
            disturbed.append(source)
            raise SystemError("AST constructor recursion depth mismatch")
        return ast.parse(source)

    monkeypatch.setattr(callsite, "ast", SimpleNamespace(**vars(ast) | {"parse": parse}))
    weights = call_site("call_site")
    assert (weights.assigned, len(disturbed)) == ("weights", 1)
