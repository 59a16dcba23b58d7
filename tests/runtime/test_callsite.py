"""call_site finds the name that user code gives a result, even while another thread parses."""

from __future__ import annotations

import ast
import linecache
import sys
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


NAMED = {  # a cell of a notebook -> the names of its calls
    "x, y = made(4), made(4)": ["x", "y"],
    "a = made(1); b = made(2)": ["a", "b"],
    "if True: c = made(1)": ["c"],
    "d, e = (\n    made(4),\n    made(4),\n)": ["d", "e"],
    "f = made(\n    4\n)": ["f"],
    "[g, (h)] = [made(4), made(4)]": ["g", "h"],
    "print(made(4), (i := made(4)))": ["", "i"],
    "j, k = [made(4) for _ in range(2)]": ["", ""],
    "é, m = made('é'), made(4)": ["é", "m"],
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="only newer Python knows the columns of calls")
@pytest.mark.parametrize("text", NAMED)
def test_each_call_has_its_name_and_its_cell(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites: list[callsite.CallSite] = []

    def made(_: Any) -> None:
        sites.append(call_site("made"))

    # call_site begins behind the frames of pkt.runtime, as which this file counts here.
    monkeypatch.setattr(callsite, "_RUNTIME", __file__)
    path = f"/tmp/ipykernel_1/{hash(text)}.py"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    shell = SimpleNamespace(
        compile=SimpleNamespace(format_code_name=lambda p: ("Cell", "In[3]") if p == path else None)
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    exec(compile(text, path, "exec"), {"made": made, "print": lambda *_, **__: None, "i": 0})
    assert [site.assigned for site in sites] == NAMED[text]
    assert all(site.text.startswith("In[3]:") for site in sites)
