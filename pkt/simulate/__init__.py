"""N ranks on the CPU: the kernel source itself under a seeded scheduler, with race and deadlock detection.

source        rewrites device functions as Python; interpreter runs them with patches of tl, on builder, numerics,
              libdevice, reductions, shortcuts with their constants; loops finds what decides when a `while` ends
front_end     has Triton compile each kernel first; accepted keeps its verdicts in files, skipped makes it quicker
machine       the ranks, the scheduler and the launches, on tasks and arguments; schedule makes every random choice
device        the memory accesses and the waits of programs, on accesses, atomics, flagged, multimem and blocked;
              memory is the address space, rows finds its regular accesses, bad_address explains a wrong address,
              cost is the modelled clock
detector      finds the accesses that nothing orders, by the clocks of races; sites finds a program's line
faults        the faults that can be injected
run           one run; explore: many seeds, mutants and lost signals, shared among processes; turns: one simulation
              at a time
"""
