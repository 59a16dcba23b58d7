"""Host side: worlds, the symmetric heap, and the machine below them.

| where | holds |
|---|---|
| `backend` | the protocol that CudaBackend and the simulator implement |
| `memory/` | the symmetric heap, symmetric tensors and their factories |
| `kept` | scopes: what operators keep between calls |
| `world` | World and Workspace: the ranks that work together |
| `groups` | torch's process group of a world |
| `launch/` | launches on GPUs, and their order on streams |
| `gpu/` | the CUDA driver, topology, multicast; deadlines of waits |
| `processes/` | rendezvous and messages between the ranks' processes |
| `workers/` | the processes of pkt.launch |
| `bootstrap` | from processes to a world, over all of these |

pkt.init and pkt.launch are in `pkt.launcher`, above this package. `tests/test_arrows.py` lists the allowed imports.
"""
