"""Every function of pkt.language in a small program that checks its own result, on any device and number of ranks.

A case is `fn(world)`, run on each rank by pkt.launch: in the simulator by test_cases_cpu, on GPUs by gpu/test_language.
Nothing in it knows which. Values are small integers, so results are exact in every dtype, and each kernel is launched
more than once with nothing reset between.
"""

from . import atomics, barriers, memory, multimem, orders, shmem, signals, tiles
from ._case import CASES, Case

__all__ = ["CASES", "Case", "atomics", "barriers", "memory", "multimem", "orders", "shmem", "signals", "tiles"]
