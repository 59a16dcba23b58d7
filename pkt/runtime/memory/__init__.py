"""The symmetric heap: what the user holds (`factories`, `tensor`, `callsite`), where it lies (`heap`, `ledger`),
whether the ranks ask for the same (`agreement`), and torch's own allocations in it (`pool`)."""
