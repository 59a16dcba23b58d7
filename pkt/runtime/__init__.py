"""Host side: worlds, the symmetric heap and what lies below it.

In the order data flows: `launcher` (many ranks from one call) or `bootstrap` (processes that are there already),
`world` (who takes part), `factories` and `tensor` (what the user holds; `callsite` names it), `heap` and `ledger`
(where it lies), `agreement` (do the ranks ask for the same; `journal` tells without waiting), `backend` (the seam).

Above the seam, for operators: `workspace` and `scratch` (what they keep), `streams` (one in flight), `launch` (on
GPUs), `groups` (torch's process group), `pool` (torch's allocations in the heap).

Below it, on GPUs: `cuda` (the Backend) over `driver`, `multicast`, `topology`, `nvml` and `handles`; between processes
`rendezvous` or `network` (how ranks meet), `transport` over `frames` and `wire`; `watch` (deadlines and lost peers).
`workers`, `worker` and `carry` are the processes of `launcher`, `interrupts` is Ctrl-C in what can be cut short.
"""
