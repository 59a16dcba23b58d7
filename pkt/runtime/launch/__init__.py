"""Launching on GPUs: cooperatively (`launch`), again with other addresses (`relaunch`), one at a time (`streams`)."""
