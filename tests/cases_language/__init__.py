"""Small programs that call every function of pkt.language and check their results, on any device and number of ranks.

A case is `fn(world)`, run on each rank by pkt.launch: in the simulator by test_cases_cpu, on GPUs by gpu/test_language.
A case does not know where it runs. Values are small integers, so results are exact in every dtype. Each kernel is
launched several times with no reset in between.
"""

from . import atomics, barriers, memory, multimem, orders, shmem, signals, tiles
from ._case import CASES, Case

__all__ = ["CASES", "Case", "atomics", "barriers", "memory", "multimem", "orders", "shmem", "signals", "tiles"]
