"""The symmetric heap.

| module | holds |
|---|---|
| `ledger`, `heap` | which bytes are taken; blocks, and physical memory behind them |
| `agreement` | the check that all ranks allocate and free alike |
| `tensor`, `factories` | SymmetricTensor; pkt.empty, pkt.zeros, ... |
| `callsite` | the line and the variable of the user's code, for messages |
| `pool`, `checks` | pkt.mem_pool; pkt.symmetric |

The world lies between `heap` and `tensor`.
"""
