"""N ranks on the CPU: the real kernel source under a seeded scheduler, with race and deadlock detection.

source        device functions as Python; interpreter runs them; builder, numerics, reductions under it
machine       ranks, programs, the scheduler; schedule decides, device gives memory and signals their meaning
memory        the address space; races: vector clocks; faults: what can be broken on purpose
run           one run; explore: many seeds, mutants and lost signals
"""
