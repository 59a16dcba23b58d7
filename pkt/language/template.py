"""LCSC, ParallelKittens' template of a kernel: some programs load, compute and store while others communicate."""

from __future__ import annotations

import triton
import triton.language as tl

from . import ptx


@triton.jit
def lcsc(compute: tl.constexpr, communicate: tl.constexpr, args, num_tasks, num_comm_tasks, queue, epoch, num_comm_sms):
    """Run `compute(task, *args)` for num_tasks tasks and `communicate(task, *args)` for num_comm_tasks, overlapped.

    compute, communicate: @triton.jit functions of task (int32) and the elements of args.
    args: a tuple, written in this call: in a variable its constants would become run-time values.
    queue: scalar pointer to int32, zeroed once, from which programs claim compute tasks. All launches that use it must
        have the same num_tasks and the same grid.
    epoch: `epoch(flags, world)` of this launch.
    num_comm_sms: number of programs that communicate, 0 <= num_comm_sms < grid.

    The programs below num_comm_sms communicate: the hardware starts low indices first, and a program that others wait
    for must not wait for a slot. Each takes tasks index, index + num_comm_sms, ... and then joins the compute queue, so
    no SM idles. With num_comm_sms = 0 every program communicates its share when the compute queue is empty: no overlap,
    and no deadlock. A communicate task may wait for compute tasks. With num_comm_sms = 0 a compute task must not wait
    for communicate tasks of its own rank. Launch one program an SM, all resident.
    """
    ptx.retype_tuples(args)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    if pid < num_comm_sms:
        for task in range(pid, num_comm_tasks, num_comm_sms):
            ptx.mark("communicate", task)
            communicate(task, *args)
    ptx.mark("compute")
    # The queue is never reset. A launch makes one claim for each task and a last one in each program, so the value of
    # this launch's first claim is known. int32 wraps on both sides alike.
    first = (epoch - 1) * (num_tasks + programs)
    task = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu") - first
    while task < num_tasks:
        ptx.mark("compute", task)
        compute(task, *args)
        task = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu") - first
    if num_comm_sms == 0:
        for task in range(pid, num_comm_tasks, programs):
            ptx.mark("communicate", task)
            communicate(task, *args)
    ptx.mark("compute")
