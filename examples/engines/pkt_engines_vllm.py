"""A plugin of vLLM whose tensor-parallel groups all-reduce with pkt.

vLLM calls `register` in each of its processes, before it makes groups, if the package is installed
(`pip install ./examples/engines`): the entry point is in the group "vllm.general_plugins". CudaCommunicator imports the
class CustomAllreduce when it is made. Looked at: vllm/plugins/__init__.py at commit 01425553bdbe and
cuda_communicator.py at 00b5a01dd29b. Versions that have further all-reduces ask these first: turn them off.
"""

from __future__ import annotations

from pkt_engines_all_reduce import PktAllReduce

MODULE = "vllm.distributed.device_communicators.custom_all_reduce"


def register() -> None:
    """Put PktAllReduce in the place of CustomAllreduce. It may be called again."""
    import importlib

    module = importlib.import_module(MODULE)
    if not hasattr(module, "CustomAllreduce"):
        raise ImportError(f"{MODULE} has no CustomAllreduce: this plugin was written for another version of vLLM")
    module.CustomAllreduce = PktAllReduce  # type: ignore[attr-defined]
