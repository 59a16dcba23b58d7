"""Communication between the ranks' processes.

| module | holds |
|---|---|
| `rendezvous`, `network` | how ranks find and prove each other, on one host and on several |
| `frames`, `transport` | one connection; collective calls over all of them |
| `wire` | Python values as JSON text |
| `journal` | a log that other ranks read without waiting |
"""
