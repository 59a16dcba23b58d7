"""When nothing can run: make visible what is held back, let host code go on, or name the deadlock."""

from __future__ import annotations

import sys
from typing import Any

from pkt.errors import CollectiveMismatch, PeerLost
from pkt.simulate.findings import Deadlock, TooFewResident
from pkt.simulate.sites import host_call
from pkt.simulate.tasks import Launch, Task, Trial, Turn
from pkt.wording import FIRST_CALL, Waiting, call_text

LONGEST_TURN = 256  # steps
MOST_TRIED = 4096  # programs that a deadlock is tried with, all resident


def settle(machine: Any) -> bool:
    """Make one delayed signal, pending store or far call visible; return False if there is none."""
    if machine.late_signals:
        machine.late_signals.pop(0)()
        return True
    if machine.with_stores:
        machine.device.commit_one(surely=True)
        return True
    if machine.far:
        machine.device.deliver_one()
        return True
    return False


def hopeless(machine: Any) -> bool:
    """Whether the ready programs, which all spin, spin for ever. At each turn every store and signal that is held back
    becomes visible. If then all loops see the same values again for some iterations, nothing can change them."""
    while settle(machine):
        pass
    loops = [task.loops.values() for task in machine.ready]
    goes_on = all(any(loop.round == machine.round for loop in of_task) for of_task in loops)
    if goes_on and all(any(loop.stuck(machine) for loop in of_task) for of_task in loops):
        return True
    if not goes_on:
        machine.round += 1
        machine.polled.clear()
        machine.contended = False
    for loop in (loop for of_task in loops for loop in of_task if loop.spins and loop.round != machine.round):
        loop.round, loop.round_same, loop.round_sure = machine.round, 0, 0
    return False


def whose_turn(machine: Any) -> int:
    """The index of the ready program that runs next, where all of them spin. Programs take turns at random, a slow rank
    too. A turn mostly lasts for an iteration of the outermost loop, so that the program holds no lock when another one
    looks; or until the program would see the same again."""
    ready, turn = machine.ready, machine.turn
    if turn is not None and turn.task in ready and turn.loop.turns == turn.turns and machine.steps < turn.end:
        if max((loop.progress for loop in turn.task.loops.values()), default=machine.progress) != machine.progress:
            return ready.index(turn.task)
    at = machine.schedule.choose(len(ready))
    task, stays = ready[at], machine.schedule.stays()
    loop = next(iter(task.loops.values()), None)  # a program may not have begun one
    machine.turn = Turn(task, loop, loop.turns, machine.steps + LONGEST_TURN) if stays and loop is not None else None
    return at


def stands_still(machine: Any, spinning: list[Task]) -> None:
    """Let host code go on that only waits because this is seed 0. Else raise the deadlock, or first try whether
    more resident programs would mend it: then they are its cause."""
    behind = [host.task for host in machine.hosts if isinstance(host.task.blocked, Launch)]
    for task in behind:
        task.blocked = None
        machine.ready.append(task)
    if behind:
        return
    if machine.trial is not None:  # all programs are resident, and still wait
        del machine.findings[machine.trial.findings :]
        error = _deadlock(machine, spinning)
        for launch in machine.trial.launches:
            found = f"rank {launch.rank}: {machine.sms} of {launch.total} programs of {launch.name} fit at once"
            error.add_note(f"{found}; if all did, the deadlock would be the same")
        raise error
    short = [h.launch for h in machine.hosts if h.launch is not None and h.launch.next < h.launch.total]
    short = [launch for launch in short if launch.running and not machine.hosts[launch.rank].slots]
    if not short or machine.lost or sum(launch.total for launch in short) > MOST_TRIED:
        raise _too_few(machine, short[0], spinning) if short and not machine.lost else _deadlock(machine, spinning)
    machine.trial = Trial(short, _too_few(machine, short[0], spinning), len(machine.findings))
    for launch in short:
        machine.hosts[launch.rank].slots += range(machine.sms, machine.sms + launch.total - launch.next)
        machine.fill(launch)


def endless(machine: Any, task: Task) -> Deadlock:
    """The error of a run that takes too many steps, with the programs that are in a loop or a wait. task: would be
    next."""
    looping = [t for t in (task, *machine.ready) if t.loops]
    return Deadlock.endless(machine.max_steps, str(machine.schedule), _waits(machine, looping))


def ended_trial(machine: Any) -> Exception:
    """The error that began the trial: the programs go on if more of them are resident."""
    assert machine.trial is not None
    del machine.findings[machine.trial.findings :]
    return machine.trial.error


def _too_few(machine: Any, launch: Launch, spinning: list[Task]) -> TooFewResident:
    return TooFewResident.waiting(launch.rank, launch.name, launch.total, machine.sms, _waits(machine, spinning))


def _waits(machine: Any, spinning: list[Task]) -> list[Waiting]:
    waits = [t.blocked.waiting() for tasks in machine.waiting.values() for t in tasks]
    waits += [machine.device.spinning(t) for t in spinning if t.loops or not t.is_host]
    return sorted(waits, key=lambda w: (w.rank, w.program))


def _deadlock(machine: Any, spinning: list[Task]) -> Exception:
    waits = _waits(machine, spinning)
    lose = machine.faults.lose
    if machine.lost and lose is not None and lose.dies:
        survivor = next((w.rank for w in waits if w.rank != lose.rank), (lose.rank + 1) % machine.size)
        during = f"launch {waits[0].launch} of {waits[0].kernel}" if waits else "host code"
        lost = PeerLost.exited(survivor, {lose.rank: f"died at step {lose.step}"}, during)
        lost.add_note(str(Deadlock.among(waits)))
        return lost
    blocked = any(host.call for host in machine.hosts)
    if blocked and (mismatch := _planned_on_some(machine, waits)) is not None:
        return mismatch
    # A program waits for launches as old as its own. If all ranks have made these, no call is missing.
    calls_differ = not waits or len({host.launches for host in machine.hosts}) > 1
    error = Deadlock.among(waits, whereabouts(machine) if blocked else None, calls_differ)
    for note in _behind(machine):
        error.add_note(note)
    finished = [h.rank for h in machine.hosts if h.task.greenlet.dead]
    if finished and not blocked:
        error.add_note(f"ranks that have returned: {', '.join(map(str, finished))}")
    if machine.lost:
        error.add_note(str(lose))
    return error


def _behind(machine: Any) -> list[str]:
    """A note for each kernel that waits while its rank has other kernels in its queue, which may be what it needs."""
    behind: dict[str, dict[str, None]] = {}
    for launch, queue in ((host.launch, host.queue) for host in machine.hosts if host.launch is not None):
        names = dict.fromkeys(later.name for later in queue if later.name != launch.name)
        behind[launch.name] = behind.get(launch.name, {}) | names
    texts = {name: " and ".join(names) for name, names in behind.items() if names}
    return [
        f"{name} must end before {later} can begin on the same rank: if {name} waits for a signal of {later}, launch "
        f"{later} first"
        for name, later in texts.items()
    ]


def _planned_on_some(machine: Any, waits: list[Waiting]) -> CollectiveMismatch | None:
    """The error if some ranks make the first call of an operator, and wait to compare it, while others wait in a
    launch that those have not made: a call which they made before, and so do not compare."""
    for (among, _), meeting in machine.meetings.items():
        values = meeting.values.items()
        first = {r: call_text(what, value) for r, (value, what) in values if what.startswith(FIRST_CALL)}
        ahead = {w.rank: w for w in waits if w.rank in among and w.rank not in meeting.values}
        most = max((machine.hosts[rank].launches for rank in first), default=0)
        if not first or not ahead or any((w.launch or 0) <= most for w in ahead.values()):
            continue
        places = whereabouts(machine)
        said = {rank: f"{call} {places[rank]}" for rank, call in first.items()}
        for rank, wait in ahead.items():
            launch = machine.hosts[rank].launch
            call, line = launch.call if launch is not None else ("host code", None)
            at = f" at {line}" if line is not None else ""
            where = f"launch {wait.launch} of {wait.kernel}"
            said[rank] = f"{call}{at}, a call that it made before, and waits in {where}"
        return CollectiveMismatch.calls(said)
    return None


def whereabouts(machine: Any) -> dict[int, str]:
    """By rank, the call that its host code is in."""
    found = {}
    for host in machine.hosts:
        task = host.task
        closed = "" if host.closed is None else f", after close() at {host.closed}"
        if task.greenlet.dead:
            found[host.rank] = f"returned{closed}"
        else:
            running = sys._getframe() if task is machine.current else task.greenlet.gr_frame
            frame = running if task.aside is None else task.aside.frame
            behind = task.blocked if isinstance(task.blocked, Launch) else None
            call, line = host_call(frame, behind.name if behind else "")
            if line is None and host.launch is not None:  # its function has ended, and its launches have not
                call, line = f"the launch of {host.launch.name}", host.launch.call[1] or host.launch.site
            found[host.rank] = f"in {call}" + (f" at {line}" if line is not None else "") + closed
    return found
