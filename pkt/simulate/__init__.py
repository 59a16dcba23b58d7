"""N ranks on the CPU: the real kernel source under a seeded scheduler, with race and deadlock detection.

source        device functions as Python; interpreter runs them; builder, numerics, reductions, shortcuts under it
machine       ranks, the scheduler and launches; tasks and arguments are theirs; schedule decides
device        what the programs do to memory and to each other; memory is the address space, astray says what is not in
              it, cost is the modelled clock
detector      what orders the accesses, by the clocks of races; sites say where a program stands
faults        what can be broken on purpose
run           one run; explore: many seeds, mutants and lost signals
"""
