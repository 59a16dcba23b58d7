"""Launching on GPUs: cooperatively (`launch`), again with other addresses (`relaunch`), a whole call again (`replay`),
one at a time (`streams`)."""
