"""The operators of one world run one after the other in the order of the calls, on whatever streams."""

import ast
import contextlib
import contextvars
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pkt
from pkt.errors import Unsupported
from pkt.runtime.launch import launch
from pkt.runtime.launch.streams import OneInFlight

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


class Stream:
    """A stream, as the set of calls that surely end before the next call on it starts."""

    def __init__(self, number):
        self.cuda_stream = number
        self.before = set()
        self.capture = None

    def wait_stream(self, other):
        # CUDA refuses such edges: cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureMerge.
        assert other.capture == self.capture, "the edge leaves or enters a graph"
        Cuda.waits += 1
        self.before |= other.before


class Cuda:
    """The part of torch.cuda that OneInFlight uses. `asked` counts all queries but the one for the current stream."""

    waits = asked = 0

    def __init__(self, streams=4):
        self.streams = [Stream(16 * i) for i in range(streams)]
        self.now = self.streams[0]
        Cuda.waits = 0

    def current_stream(self, device):
        assert device == 3
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def is_current_stream_capturing(self):
        self.asked += 1
        assert self.now.cuda_stream, "cudaErrorStreamCaptureImplicit"
        return self.now.capture is not None


def guard(cuda):
    return OneInFlight(torch.device("cuda", 3), lambda: cuda.Stream(3), cuda)


def test_one_stream_costs_a_comparison():
    cuda = Cuda()
    order = guard(cuda)
    order.follow()
    asked = cuda.asked
    for _ in range(100):
        order.follow()
    assert (cuda.asked, Cuda.waits) == (asked, 0)


def test_another_stream_waits_once_for_the_last():
    cuda = Cuda()
    order = guard(cuda)
    order.follow()
    cuda.now = cuda.streams[1]
    order.follow()
    order.follow()
    assert Cuda.waits == 1


def test_every_call_reports_that_a_graph_is_recorded():
    cuda = Cuda()
    order = guard(cuda)
    assert not order.follow()
    cuda.now, cuda.streams[1].capture = cuda.streams[1], 1
    assert order.follow()
    assert order.follow()
    cuda.streams[1].capture = None
    assert not order.follow()


def test_an_eager_call_gets_the_streams_handle_and_a_captured_one_none():
    """Also where the stream of the last call has begun to record since, which `follow` does not notice."""
    cuda = Cuda()
    order = guard(cuda)
    assert [order.eager(), order.eager()] == [0, 0]
    cuda.now = cuda.streams[1]
    assert (order.eager(), Cuda.waits) == (16, 1)
    cuda.now.capture = 1
    assert (order.follow(), order.eager()) == (False, None)
    cuda.now = cuda.streams[2]
    assert order.eager() == 32


def test_calls_that_are_recorded_leave_no_trace():
    """They are made on a stream of their own, which records nothing that other streams wait for."""
    cuda = Cuda()
    cuda.Stream = lambda device: Stream(99)
    order = guard(cuda)
    order.follow()
    before = cuda.now
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), order.recording() as free:
            assert free
            assert cuda.now.cuda_stream == 99
            cuda.now.capture = 1
            assert order.follow()
            cuda.now.capture = None
            raise ZeroDivisionError
        assert cuda.now is before
        asked = cuda.asked
        assert not order.follow()
        assert (Cuda.waits, cuda.asked) == (0, asked)


def test_nothing_is_recorded_while_the_user_records():
    cuda = Cuda()
    order = guard(cuda)
    order.follow()
    cuda.now, cuda.streams[1].capture = cuda.streams[1], 1
    assert order.follow()
    cuda.now = cuda.streams[0]
    with order.recording() as free:
        assert not free
        assert cuda.now is cuda.streams[0]
    assert order.follow() is False


def test_calls_are_recorded_on_a_stream_that_is_made_for_them_once():
    """One of torch's may be the caller's, or record another graph."""
    cuda, made = Cuda(), []

    def make():
        made.append(Stream(99))
        return made[-1]

    order = OneInFlight(torch.device("cuda", 3), make, cuda)
    for _ in range(2):
        with order.recording():
            assert cuda.now is made[0]
    assert len(made) == 1


# ("use", stream), ("begin", stream): capture into a graph, ("fork", stream): that stream joins it, ("end", 0)
STEPS = st.lists(st.tuples(st.sampled_from(["use", "use", "use", "begin", "fork", "end"]), st.integers(0, 3)))


@settings(max_examples=500)
@given(STEPS)
@example([("use", 1), ("begin", 1), ("fork", 2), ("use", 2), ("use", 1)])
@example([("use", 1), ("begin", 3), ("fork", 1), ("use", 1), ("use", 0), ("use", 3)])
def test_every_call_runs_after_the_last_one_in_its_graph_or_outside(steps):
    """On any streams and captures, no two calls may run at the same time, and CUDA accepts every edge."""
    cuda = Cuda()
    order = guard(cuda)
    graphs, calls, graph, apart = 0, {None: set()}, None, set()
    for number, (step, index) in enumerate(steps):
        stream = cuda.streams[index]
        if step in ("begin", "fork") and not stream.cuda_stream:
            continue  # the legacy stream cannot be captured
        if step == "begin" and graph is None:
            graphs += 1
            graph = graphs
            calls[graph], apart = set(), set()
            for other in cuda.streams:  # torch synchronises the device before it captures
                other.before |= calls[None]
            root, stream.capture, stream.outside = stream, graph, stream.before
            stream.before = set()
        elif step == "fork" and graph is not None and stream.capture is None and stream not in apart:
            stream.capture, stream.outside, stream.before = graph, stream.before, set(root.before)
        elif step == "end" and graph is not None:
            for other in cuda.streams:
                if other.capture is not None:
                    other.capture, other.before = None, other.outside
            graph = None
        elif step == "use":
            cuda.now = stream
            noticed = order.follow()
            assert not noticed or stream.capture is not None
            assert calls[stream.capture] <= stream.before
            stream.before.add(number)
            calls[stream.capture].add(number)
            if graph is not None and stream.capture is None:
                apart.add(stream)  # a stream used beside a capture is not ordered if it joins later, so it never joins


def test_a_capture_makes_no_buffers(ranks):
    """New buffers are refused before any allocation, and only on the capturing stream. Existing ones are returned."""

    def main(world):
        cuda = Cuda()
        world.streams = guard(cuda)

        def make():
            return pkt.signals(4, world=world)

        before = world.keep("before", make)
        asked, free, live = cuda.asked, world.heap.ledger.free_bytes, len(world.heap.live)
        cuda.now = cuda.streams[1]
        cuda.now.capture = 1
        with pytest.raises(Unsupported) as refused:
            world.keep(("pkt.all_reduce", "inbox"), make)
        assert world.heap.ledger.free_bytes == free
        assert len(world.heap.live) == live
        assert cuda.asked == asked + 1
        assert world.keep("before", make) is before
        assert cuda.asked == asked + 1, "existing buffers need no query"
        cuda.now = cuda.streams[0]  # beside the capture
        inbox = world.keep(("pkt.all_reduce", "inbox"), make)
        cuda.now = cuda.streams[1]
        assert world.keep(("pkt.all_reduce", "inbox"), make) is inbox
        return str(refused.value)

    assert ranks(2, main) == [
        f"rank {rank}: buffers ('pkt.all_reduce', 'inbox'): found a CUDA graph being captured, and these buffers do "
        "not exist yet: call the operator once, with arguments of the same shapes, before the capture"
        for rank in range(2)
    ]


def test_a_capture_refuses_an_operator_that_was_not_called_before(ranks):
    """The call is refused before anything is launched or exchanged, and no plan is left."""

    def main(world):
        x = pkt.ones(8, world=world)
        cuda = Cuda()
        world.streams = guard(cuda)
        cuda.now = cuda.streams[1]
        cuda.now.capture = 1
        for call in (pkt.all_reduce, pkt.reduce_scatter, pkt.all_gather):
            with pytest.raises(Unsupported, match=f"rank {world.rank}: buffers .* before the capture"):
                call(x, world=world)
        return len(world.plans), len(world.heap.live)

    assert ranks(2, main) == [(0, 1)] * 2


def test_cooperative_orders_before_it_launches():
    said = []

    class Streams:
        def follow(self):
            said.append("order")

    class World:
        streams = Streams()

    class Kernel:
        def run(self, *args, **options):
            said.append((args, options))

    # It runs in its own context: it gives Triton an allocator, which later tests must not find.
    contextvars.copy_context().run(launch.cooperative, World, Kernel(), (5,), 1, num_warps=8)
    options = {"grid": (5,), "warmup": False, "num_warps": 8, "launch_cooperative_grid": True}
    assert said == ["order", ((1,), options)]
    World.streams = None  # a world on the CPU
    launch.cooperative(World, Kernel(), (5,), 1)
    assert len(said) == 3


LAUNCHERS = {"cooperative_launch", "resident_launch", "beside_launch", "beside", "pushed", "over_tiles"}
"""resident_launch, pushed of dispatch and over_tiles of the norms are the operators' own, and call
cooperative_launch."""


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_every_operator_launches_through_cooperative(path):
    """kernel[grid](...) and kernel.run(...) would be neither ordered with other streams nor refused in captures."""
    jitted, calls = _kernels_and_calls(path)
    assert not [ast.unparse(c) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "run"]
    subscripts = [c.func for c in calls if isinstance(c.func, ast.Subscript)]
    assert not [ast.unparse(s) for s in subscripts if not isinstance(s.value, ast.Dict)]  # a table is no kernel
    if any(name.endswith("_kernel") for name in jitted):
        # The kernels of a folder may be launched by another of its files.
        files = [path] if path.parent == KERNELS else path.parent.glob("*.py")
        launching = {_last_name(c.func) for file in files for c in _kernels_and_calls(file)[1]}
        assert launching & LAUNCHERS, "launches nothing?"


def _kernels_and_calls(path):
    """The names of a file's jitted functions, and the calls in its other functions."""
    functions = [f for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef)]
    jitted = {f.name for f in functions if "jit" in map(_last_name, f.decorator_list)}
    wrappers = [f for f in functions if f.name not in jitted]
    return jitted, [node for f in wrappers for node in ast.walk(f) if isinstance(node, ast.Call)]


def _last_name(node):
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# ------------------------------------------------------------------------------------------------------------ on GPUs
def two_streams(world, rounds, size):
    """Run operators on two streams in turn, each with its own data and no other synchronization; check every round."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [pkt.zeros(n, name=f"x{i}") for i, n in enumerate((size, 3 * size + 1))]
    sums = [torch.zeros(rounds, 2, device=world.torch_device) for _ in xs]
    for s in streams:
        s.wait_stream(torch.cuda.current_stream())
    for i in range(rounds):
        for j, (stream, x) in enumerate(zip(streams, xs)):
            with torch.cuda.stream(stream):
                x.fill_(i + j + world.rank)
                if j == i % 2:
                    torch.cuda._sleep(20_000 * (1 + (i + world.rank) % 3))  # ranks and streams drift apart
                pkt.all_reduce(x, mode=("one_shot", "two_shot")[i % 3 == 0])
                sums[j][i, 0], sums[j][i, 1] = x.min(), x.max()
    world.synchronize()
    ranks = sum(range(world.size))
    for j, found in enumerate(sums):
        wanted = torch.arange(rounds, device=found.device) * world.size + j * world.size + ranks
        assert found[:, 0].eq(wanted).all(), f"stream {j}: too small from round {found[:, 0].ne(wanted).nonzero()[0]}"
        assert found[:, 1].eq(wanted).all(), f"stream {j}: too large from round {found[:, 1].ne(wanted).nonzero()[0]}"
    return rounds


def captured_fork(world, replays):
    """A graph that forks: two operators on two streams of one capture, replayed."""
    x, y = pkt.zeros(5000, name="x"), pkt.zeros(70_000, name="y")
    for tensor in (x, y):
        pkt.all_reduce(tensor)  # compiled and agreed
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        x.fill_(world.rank + 1)
        pkt.all_reduce(x)
        with torch.cuda.stream(side):
            y.fill_(world.rank + 2)
            pkt.all_reduce(y)
        main.wait_stream(side)
    for i in range(replays):
        graph.replay()
        if i % 3 == 0:
            pkt.all_reduce(y.fill_(1))
            assert y.eq(world.size).all()
    world.synchronize()
    total = sum(range(world.size)) + world.size
    graph.replay()
    return bool(x.eq(total).all()), bool(y.eq(total + world.size).all())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_streams_on_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    for size in (1000, 1 << 20):
        assert pkt.launch(two_streams, count, "cuda", (300, size), multicast=False, timeout=20) == [300] * count
    assert pkt.launch(captured_fork, count, "cuda", (1000,), multicast=False, timeout=20) == [(True, True)] * count


@pytest.mark.gpu
def test_the_order_of_streams_is_cheap_on_gpus():
    def main(world):
        import time

        follow, rounds = world.streams.follow, 100_000
        follow()
        start = time.perf_counter()
        for _ in range(rounds):
            follow()
        return (time.perf_counter() - start) / rounds * 1e6

    (us,) = pkt.launch(main, 1, "cuda", multicast=False, timeout=20)
    print(f"order of streams: {us:.2f} us a launch")
    assert us < 2
