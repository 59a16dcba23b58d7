"""The symmetric heap. Below the world: `ledger`, `heap`, `agreement` (do all ranks allocate alike). Above it: `tensor`,
`factories` (pkt.empty, ...), `callsite` (names for messages), `pool` (pkt.mem_pool), `checks` (pkt.symmetric)."""
