"""A plugin of SGLang whose tensor-parallel groups all-reduce with pkt.

SGLang calls `register` in each of its processes if the package is installed (`pip install ./examples/engines`): the
entry point is in the group "sglang.srt.plugins". A group asks dispatch_custom_allreduce() for its class; versions
before that take CustomAllreduce. Looked at: custom_all_reduce.py at commit 004e6561cb8a. SGLang turns its custom
all-reduce off for several hosts and with --disable-custom-all-reduce; then this one is off, too.
"""

from __future__ import annotations

import importlib
import sys

from pkt_engines_all_reduce import PktAllReduce

MODULE = "sglang.srt.distributed.device_communicators.custom_all_reduce"
NAMES = ("dispatch_custom_allreduce", "CustomAllreduce")


def dispatch() -> type[PktAllReduce]:
    """In the place of dispatch_custom_allreduce."""
    return PktAllReduce


def register() -> None:
    """Put PktAllReduce in the place of SGLang's classes, also in modules that have imported them. It may be called
    again."""
    module = importlib.import_module(MODULE)
    if not any(hasattr(module, name) for name in NAMES):
        raise ImportError(f"{MODULE} has none of {', '.join(NAMES)}: this plugin was written for another SGLang")
    for name, ours in zip(NAMES, (dispatch, PktAllReduce)):
        old = getattr(module, name, None)
        for other in list(sys.modules.values()):
            where = getattr(other, "__name__", "")
            if old is not None and where.startswith("sglang.") and vars(other).get(name) is old:
                setattr(other, name, ours)
