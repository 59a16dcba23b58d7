"""N ranks in one process: every program of every grid is a greenlet, and a seeded schedule decides which one runs.

A rank has one stream: its launches run one after the other, while its host code goes on until it waits for them (see
pkt.simulate.stream). In seed 0 the host code of a rank goes on only when nothing else can. Ranks do not wait for each
other, so a fast rank's next launch can overtake a slow rank's current one.
"""

from __future__ import annotations

import heapq
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import greenlet
import torch

from pkt.errors import (
    GridTooLarge,
    PktError,
    RankFailed,
    ShapeError,
    Unsupported,
)
from pkt.runtime.world import check_counts, check_flags
from pkt.simulate import cost, modes, standstill
from pkt.simulate.arguments import Taken, bind, parameters, register
from pkt.simulate.faults import NO_FAULTS, Census, Faults
from pkt.simulate.front_end import Launched, Usage, check_compile, check_compiles
from pkt.simulate.interpreter import argument, builder, interpret, interpreting, launch_options, refuse_gluon
from pkt.simulate.memory import AddressSpace
from pkt.simulate.races import COLUMNS, Clocks
from pkt.simulate.schedule import Schedule
from pkt.simulate.sites import host_call, of_task, site
from pkt.simulate.stream import Stream
from pkt.simulate.tasks import Host, Launch, Meeting, Stopped, Task, Trial, Turn, events, runner
from pkt.trace import Event
from pkt.wording import HOST, count_text

SMS = 132  # programs that fit on a rank at once, one an SM, as on an H200
MOST_SMS = 1 << 16  # each takes memory, even where nothing runs on it
MAX_STEPS = 20_000_000  # steps after which a run counts as endless
_NO_GPU = "A simulation has no GPU: take the device from world.torch_device, and wait with world.synchronize()."


class Machine:
    """Runs `ranks` host functions and the kernels that they launch, once. `execute` in pkt.simulate.run makes one."""

    def __init__(
        self,
        ranks: int,
        *,
        seed: int = 0,
        sms: int = SMS,
        stride: int = 1 << 30,
        multicast: bool = True,
        races: bool = True,
        trace: bool = False,
        faults: Faults = NO_FAULTS,
        max_steps: int = MAX_STEPS,
        compile: str | None = None,
        node_size: int | None = None,
        brief: bool = False,
    ) -> None:
        check_counts("the simulator", ranks=ranks)
        self.node_size = ranks if node_size is None else node_size  # ranks of a node
        check_counts("the simulator", node_size=self.node_size)
        if ranks % self.node_size:
            wanted = f"a divisor of the {count_text(ranks, 'rank')}"
            raise ShapeError.argument("the simulator", "node_size", node_size, wanted)
        self.apart = self.node_size < ranks  # there are several nodes
        check_compile("the simulator", compile)
        check_counts("the simulator", sms=sms)
        if sms > MOST_SMS:
            raise ShapeError.argument("the simulator", "sms", sms, f"at most {MOST_SMS}")
        check_counts("the simulator", max_steps=max_steps)
        check_flags("the simulator", multicast=multicast, races=races, trace=trace)
        if not isinstance(faults, Faults):
            raise ShapeError.argument("the simulator", "faults", repr(faults), "a pkt.simulate.faults.Faults")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ShapeError.argument("the simulator", "seed", repr(seed), "an integer")
        self.size, self.sms, self.multicast = ranks, sms, multicast and not self.apart
        self.schedule = Schedule(seed, ranks, by_time=trace)
        self.space = AddressSpace(ranks, stride)
        self.races, self.tracing, self.faults = races, trace, faults
        self.census = Census()
        self.findings: list[Any] = []
        self.events: list[Event] = []
        self.clocks = Clocks()
        self.brief = brief  # the run ends at the first race
        self.compile = compile
        self.usage: dict[Usage, None] = {}  # of the compiled kernels, in the order of their first launches
        self.taken = Taken()
        self.mapped: dict[tuple[int, int], Any] = {}  # (rank, offset) -> memory that another rank has mapped for it
        self.binding = False  # Triton reads the arguments of a launch
        self.hosts = [Host(r, sms) for r in range(ranks)]
        self.ready: list[Task] = []
        self.waiting: dict[int, list[Task]] = {}  # address of the counter -> programs that wait on it
        self.meetings: dict[
            tuple[tuple[int, ...], int], Meeting
        ] = {}  # by the ranks that meet, and which of their calls
        self.with_stores: list[Task] = []  # tasks with pending stores
        self.late_signals: list[Callable[[], None]] = []
        self.far: list[Any] = []  # calls to other nodes that have not arrived
        self.progress = 0
        self.steps = 0  # switches between programs, and accesses of a program that makes many before one
        self.round = 0  # number of the round in which all programs spin; a new one where anything else happens
        self.polled: set[int] = set()  # addresses that the loops of this round poll
        self.contended = False  # one of those words has changed in this round
        self.turn: Turn | None = None  # of a program, when all spin
        self.programs = 0
        self.most_columns = (COLUMNS // ranks - 1) // 2  # of a rank's programs; with more of them, some share theirs
        self.order = 0  # a hash of which task ran when, and which store became visible when
        self.max_steps = max_steps
        self.ended = False
        self.trial: Trial | None = None
        self.freed = False  # a tensor of the heap was freed
        self.lost = False  # a fault has kept a task from running
        self.timing = 0  # hosts inside timed()
        self._was_by_time = False
        self.current: Task | None = None
        self.random_of: Host | None = None  # the rank whose random state torch has now
        self.guard: modes.Guard | None = None  # of the host code that ran last
        self.hub: Any = None
        self.thread = threading.get_ident()  # that all ranks run in
        from pkt.simulate.device import SimulatedDevice  # here, because importing pkt should load little

        self.device: Any = SimulatedDevice(self)
        self.stream: Any = Stream(self)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Run `body(rank)` on every rank and return the results in rank order. Raises the first error of any rank."""
        from pkt.simulate.engine import running  # here, because importing pkt should load little

        self.hub = greenlet.getcurrent()
        saved, own, threads = torch.get_rng_state(), modes.modes(), torch.get_num_threads()
        torch.set_num_threads(1)  # tiles are small: several threads would mostly wait for each other
        outer, builder.pkt = builder.pkt, self.device  # `outer`: of an enclosing run
        try:
            with interpreting(self.launch), running(self):
                for host in self.hosts:
                    self._start_host(host, body, saved)
                try:
                    self._loop()
                finally:
                    self._end()
        finally:
            builder.pkt = outer
            torch.set_rng_state(saved)
            modes.enter(own)
            torch.set_num_threads(threads)
        return [host.result for host in self.hosts]

    def _start_host(self, host: Host, body: Callable[[int], Any], random: torch.Tensor) -> None:
        def run() -> None:
            host.result = body(host.rank)
            self.finish_launches()

        task = Task(greenlet.greenlet(run, self.hub), host.rank, HOST)
        task.column = self.clocks.column()
        task.clock = self.clocks.zero()
        task.clock[task.column] = 1
        host.task, host.random, host.settled = task, random, self.clocks.zero()
        self.ready.append(task)

    def _loop(self) -> None:
        schedule, losing = self.schedule, self.faults.lose is not None
        while True:
            if self.with_stores and schedule.commits():
                self.device.commit_one()
            if self.far and schedule.commits():
                self.device.deliver_one()
            if not self.ready:
                if standstill.settle(self):
                    continue
                if all(h.task.greenlet.dead for h in self.hosts):
                    return
                standstill.stands_still(self, [])
                continue
            at = schedule.pick(self.ready)
            task = self.ready.pop(at)
            if losing and self._stopped(task):
                continue
            loop = task.spins if task.loops else None
            if loop is not None:
                self.ready.append(task)
                others = [i for i, t in enumerate(self.ready) if t.spins is None]
                if not others:
                    if standstill.hopeless(self):
                        standstill.stands_still(self, self.ready)
                        continue
                    at = standstill.whose_turn(self)
                elif loop.progress == self.progress:  # it would see the same again
                    at = others[schedule.pick([self.ready[i] for i in others])]
                else:
                    at = -1
                task = self.ready.pop(at)
                if losing and self._stopped(task):
                    continue
                loop = task.spins
            if loop is None:
                self.round += 1
            self.steps += 1
            if self.steps > self.max_steps:
                if self.trial is not None:
                    raise standstill.ended_trial(self)
                raise standstill.endless(self, task)
            self._switch(task)
            if self.brief and self.findings and self.trial is None:
                raise self.findings[0]

    def _switch(self, task: Task) -> None:
        host = self.hosts[task.rank]
        launch, guard = task.launch, None
        if launch is None:
            self._take_random(host)
            guard = modes.Guard(self.stream.watched(host), self.guard)
        else:
            builder.grid_idx, builder.grid_dim = task.program, launch.grid
        self.current = task
        self.order = hash((self.order, task.column, task.accesses))
        try:
            task.greenlet.switch()
        except (Exception, SystemExit) as error:  # sys.exit ends a rank, as on GPUs, and not the caller
            if self.trial is not None:
                raise standstill.ended_trial(self) from error
            raise self._failed(task, error)  # noqa: B904 (an error of pkt's would become its own cause)
        finally:
            self.current = None
            if guard is not None:
                host.modes, self.guard = guard.leave(), guard
        if task.ended or task.greenlet.dead:
            self.progress += 1
            if launch is not None:
                self._finish(task, launch)

    def _take_random(self, host: Host) -> None:
        """Give torch the random state of a rank, and keep that of the rank whose host code ran before."""
        last = self.random_of
        if last is not host:
            if last is not None:
                last.random = torch.default_generator.get_state()
            torch.default_generator.set_state(host.random)
            self.random_of = host

    def _finish(self, task: Task, launch: Launch) -> None:
        host = self.hosts[task.rank]
        launch.running -= 1
        self.device.check_exit(task)
        launch.clock = task.clock if launch.clock is None else self.clocks.join(launch.clock, task.clock)
        launch.time = max(launch.time, task.time)
        heapq.heappush(host.slots, task.lane)
        if self.tracing:
            self.events += events(task)
        self.fill(launch)
        if launch.done:
            if self.trial is not None and all(t.done for t in self.trial.launches):
                raise standstill.ended_trial(self)
            self.device.commit_rank(task.rank)
            self._ended(host, launch)

    def _ended(self, host: Host, launch: Launch) -> None:
        """Begin the rank's next launch, and wake its host if that waits for `launch` or for all of them."""
        host.finished = launch.clock if host.finished is None else self.clocks.join(host.finished, launch.clock)
        host.finished_at = launch.time
        host.launch = None
        for base in launch.local:
            self.space.drop_local(base)
        if host.queue:
            self._begin(host)
        if host.task.blocked is launch or (host.task.blocked is host and not host.launched):
            host.task.blocked = None
            self.ready.append(host.task)

    def _begin(self, host: Host) -> None:
        """Begin the first launch of a rank's queue."""
        launch = host.launch = host.queue.popleft()
        if host.finished is not None:
            launch.before = self.clocks.join(launch.before, host.finished)
        launch.begin = launch.time = max(launch.begin, host.finished_at)
        self.fill(launch)

    def fill(self, launch: Launch) -> None:
        """Start programs of `launch` while its rank has free slots."""
        host = self.hosts[launch.rank]
        while launch.next < launch.total and host.slots:
            index, program = launch.take()
            task = Task(runner(self.hub), launch.rank, launch.name)
            task.launch, task.program, task.index = launch, program, index
            task.lane = heapq.heappop(host.slots)
            while len(host.columns) <= index and len(host.columns) < self.most_columns:
                host.columns.append(self.clocks.column(2))
            task.column = host.columns[index % len(host.columns)]
            task.clock = self.clocks.fit(launch.before).copy()
            task.clock[task.column] += 1
            task.async_clock = int(task.clock[task.column + 1]) + 1
            task.tma_clock = task.clock.copy()
            task.clock[task.column] += 1  # TMA loads are not ordered after the program's own plain stores
            task.time = launch.time if index >= self.sms else launch.begin
            launch.running += 1
            self.programs += 1
            self.ready.append(task)

    def _end(self) -> None:
        self.ended = True
        hosts = [host.task for host in self.hosts]
        for task in [*hosts, *self.ready, *(t for tasks in self.waiting.values() for t in tasks)]:
            if not task.greenlet.dead:
                guard = None
                if task.is_host:
                    self._take_random(self.hosts[task.rank])
                    guard = modes.Guard(self.hosts[task.rank].modes)
                with suppress(Exception):  # raised in a `finally` of the task: the run has ended for an earlier reason
                    task.greenlet.throw(Stopped)
                if guard is not None:
                    guard.leave()

    def close(self) -> None:
        """Keep what the run has found, and drop what it ran on. That refers to itself in many ways, and would otherwise
        stay, heaps included, until the garbage collector finds it: a tenth of the time of a small schedule."""
        self.space.close()
        self.stream.close()
        for host in self.hosts:
            del host.modes  # with its watch, which refers to the host
        self.device = self.stream = self.hub = self.random_of = self.guard = None
        for tasks in (self.hosts, self.ready, self.with_stores, self.late_signals, self.far):
            tasks.clear()
        self.waiting.clear()
        self.meetings.clear()

    # -- switching, called from inside a task -----------------------------------------------------------------------

    def pause(self) -> None:
        """Let another task run; the current task stays ready."""
        task = self.current
        assert task is not None
        self.ready.append(task)
        if task.aside is not None or self.ended:
            self._leave()
        else:  # as `_leave`, in the most frequent case
            self.hub.switch()

    def block(self, blocked: Any) -> None:
        """Suspend the current task until something puts it back into `ready`."""
        task = self.current
        assert task is not None
        task.blocked = blocked
        self._leave()

    def _leave(self) -> None:
        if self.ended:
            raise Stopped
        aside = self.current.aside if self.current is not None else None
        if aside is not None:
            aside.leave()
        else:
            self.hub.switch()

    def wake(self, address: int) -> None:
        """Make the programs ready that wait on the counter at `address` and whose condition holds now."""
        tasks = self.waiting.get(address)
        if not tasks:
            return
        still = []
        for task in tasks:
            if task.blocked.holds():
                task.blocked = None
                self.ready.append(task)
            else:
                still.append(task)
        if still:
            self.waiting[address] = still
            self.round += 1  # the counter may come nearer to the value that they wait for
        else:
            del self.waiting[address]

    # -- launching --------------------------------------------------------------------------------------------------

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Launched | None:
        """Launch `kernel[grid](*args, **named)` on the rank whose host runs now, after its earlier launches. warmup:
        only compile it."""
        host = self.host("a kernel launch")
        host.task.loops.clear()
        refuse_gluon(kernel)
        with self.stream.launching(host):
            compiled, launch = self._prepared(host, kernel, args, grid, warmup, named)
        if launch is None:
            return compiled
        host.queue.append(launch)
        if not host.launched:
            self._begin(host)
        if host.task.aside is not None:  # autograd's engine reads the results at once
            self.finish_launches()
        elif self.schedule.seed:
            self.pause()
        else:
            self.block(launch)
            if not host.launched:
                self.finish_launches()
        return compiled

    def finish_launches(self) -> None:
        """Wait until the launches of the rank whose host runs now have ended. What they did is ordered before what the
        host code does afterwards."""
        host = self.host("waiting for launches")
        if host.launched:
            self.block(host)
        if host.finished is not None:
            task = host.task
            task.clock = self.clocks.join(task.clock, host.finished)
            task.clock[task.column] += 1
            task.time = max(task.time, host.finished_at)
            host.finished = None

    def _prepared(
        self, host: Host, kernel: Any, args: tuple, grid: Any, warmup: bool, named: dict[str, Any]
    ) -> tuple[Launched | None, Launch | None]:
        """What the launch returns, and the launch, or None where nothing runs."""
        names = {name for name, *_ in parameters(kernel)}
        options = {k: v for k, v in named.items() if k not in names}
        unknown = options.keys() - launch_options()
        if unknown:
            raise KeyError(f"{kernel.fn.__name__}: keyword {min(unknown)!r} is neither a parameter nor a launch option")
        bound = bind(kernel, args, {k: v for k, v in named.items() if k in names})
        for hook in getattr(kernel, "pre_run_hooks", ()):
            hook(*args, **named)
        where = (1,) if warmup else grid(bound) if callable(grid) else grid
        name = kernel.fn.__name__
        sizes = where if isinstance(where, (tuple, list)) else ()
        if not 1 <= len(sizes) <= 3 or not all(hasattr(n, "__index__") and n >= 0 for n in sizes):
            raise ShapeError.argument(name, "grid", where, "a tuple of one to three integers from 0", host.rank)
        shape: tuple[int, int, int] = (*map(int, sizes), 1, 1)[:3]  # type: ignore[assignment]
        total = shape[0] * shape[1] * shape[2]
        if options.get("launch_cooperative_grid") and total > self.sms:
            raise GridTooLarge.resident(name, total, self.sms, 1, rank=host.rank)
        self.binding = True
        try:
            compiled = check_compiles(kernel, bound, options, self.compile)
        finally:
            self.binding = False
        if compiled is not None and compiled.usage is not None:
            self.usage[compiled.usage] = None
        if warmup or total == 0:
            return compiled, None
        function = interpret(kernel)
        values = {
            n: bound[n] if fixed else argument(bound[n], special, type_)
            for n, fixed, special, type_ in parameters(kernel)
        }
        local = register(bound, self.space, host.rank, name) + self.taken.register(self.space, host.rank)
        host.launches += 1
        launch = Launch(host.rank, name, shape, host.launches, lambda: function(**values), local, site())
        launch.call = host_call(sys._getframe())
        launch.num_warps = options.get("num_warps", launch.num_warps)
        task = host.task
        launch.before = self.clocks.fit(task.clock).copy()
        task.clock[task.column] += 1
        launch.begin = task.time = task.time + cost.LAUNCH_US
        return compiled, launch

    # -- hosts ------------------------------------------------------------------------------------------------------

    def host(self, call: str) -> Host:
        """The host that runs now. Raises Unsupported where a program of a kernel or another thread makes the call."""
        self.check_thread(call)
        task = self.current
        if task is None or not task.is_host:
            raise Unsupported.in_kernel(call)
        if task.aside is None and greenlet.getcurrent() is not task.greenlet:
            found = "found a call by a rank of a pkt.launch inside of this one"
            raise Unsupported.here(f"rank {task.rank}: {call}", found, "use the world that its function is given")
        return self.hosts[task.rank]

    def check_thread(self, call: str) -> None:
        """Raise Unsupported in another thread than that of the ranks, or of a backward pass of the current one."""
        aside = self.current.aside if self.current is not None else None
        if threading.get_ident() != (self.thread if aside is None else aside.thread):
            raise Unsupported.thread(call, threading.current_thread().name)

    def settle(self) -> None:
        """Note that all work which the host code that runs now has queued so far has been done."""
        host = self.host("synchronize()")
        host.settled = host.task.clock.copy()
        host.task.clock[host.task.column] += 1

    def meet(self, value: Any, what: str, among: tuple[int, ...], queued: bool = True) -> list[tuple[Any, str]]:
        """Return the (value, what) of the hosts of the ranks `among`, in this order, once all of them have called.
        Everything before the call is ordered before everything after it, on these ranks. queued: false for a call that
        on GPUs waits for no device work, so that it orders only what the host code knows to be done."""
        host = self.host(what)
        task = host.task
        task.loops.clear()
        host.calls[among] += 1
        host.call = what
        ordinal = among, host.calls[among]
        meeting = self.meetings.setdefault(ordinal, Meeting())
        meeting.values[host.rank] = (value, what)
        clock = task.clock if queued else self.clocks.fit(host.settled)
        meeting.clock = clock if meeting.clock is None else self.clocks.join(meeting.clock, clock)
        meeting.time = max(meeting.time, task.time)
        if len(meeting.values) < len(among):
            self.block(meeting)
        else:
            del self.meetings[ordinal]
            for other in (self.hosts[rank] for rank in sorted(among)):
                if other is not host:
                    other.task.blocked = None
                    self.ready.append(other.task)
        host.call = ""
        host.settled = self.clocks.join(host.settled, meeting.clock)
        task.clock = self.clocks.join(task.clock, meeting.clock)
        task.clock[task.column] += 1
        task.time = meeting.time
        return [meeting.values[r] for r in among]

    def timed(self, run: Callable[[], Any], among: tuple[int, ...]) -> tuple[Any, float]:
        """Return the result of `run()` on the calling host, and the microseconds that it took on the modelled clock.

        Collective among these ranks: their hosts begin at the same time. In seed 0 programs meanwhile run in the order
        of that clock, as for a timeline, so that they take tasks from a queue in that order.
        """
        self.finish_launches()
        self.meet(None, "timed()", among)
        task = self.host("timed()").task
        if not self.timing:
            self._was_by_time, self.schedule.by_time = self.schedule.by_time, self.schedule.seed == 0
        self.timing += 1
        begin = task.time
        try:
            result = run()
            self.finish_launches()
            return result, task.time - begin
        finally:
            self.timing -= 1
            if not self.timing:
                self.schedule.by_time = self._was_by_time

    def _stopped(self, task: Task) -> bool:
        lose = self.faults.lose
        stopped = lose is not None and task.rank == lose.rank and self.steps >= lose.step
        self.lost = self.lost or stopped
        return stopped

    def _failed(self, task: Task, error: Exception | SystemExit) -> Exception:
        """The error itself if it is one of pkt's, else RankFailed with the rank's traceback."""
        if isinstance(error, PktError):
            return error
        error.__traceback__ = of_task(error.__traceback__, Machine._switch.__code__)
        text, frames = "".join(traceback.format_exception(error)), [*traceback.walk_tb(error.__traceback__)]
        of_cuda = frames[-1][0].f_globals.get("__name__", "").startswith("torch.cuda") if frames else False
        failed = RankFailed.raised(task.rank, text, self.schedule.seed or None, remedy=_NO_GPU if of_cuda else "")
        failed.__cause__ = error
        return failed
