"""The timeline's arithmetic. Its three outputs must agree with the events."""

import json

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import pkt.language as pl
from pkt import empty, signals
from pkt.simulate.run import execute
from pkt.trace import KINDS, Event, Signal, Timeline

TWO_RANKS = [
    Event(0, 0, "communicate", "copy", 0.0, 6.0),
    Event(0, 0, "wait", "wait flags[1]", 2.0, 5.0),
    Event(0, 1, "compute", "tile 0", 1.0, 10.0),
    Event(1, 0, "compute", "tile 1", 0.0, 5.0),
]


def test_a_wait_inside_another_event_counts_as_wait():
    lane = Timeline(TWO_RANKS).lanes(0)[0]
    assert [(e.kind, e.start_us, e.end_us) for e in lane] == [
        ("communicate", 0.0, 2.0),
        ("wait", 2.0, 5.0),
        ("communicate", 5.0, 6.0),
    ]


def test_summary_counts_over_the_span_of_all_ranks():
    first, second = Timeline(TWO_RANKS).summary()
    assert (first.rank, first.lanes) == (0, 2)
    assert (first.compute, first.communicate, first.wait) == pytest.approx((9 / 20, 3 / 20, 3 / 20))
    assert first.overlap == pytest.approx(2 / 3)  # it communicates in 0-2 and 5-6, and lane 1 computes from 1 on
    assert (second.compute, second.communicate, second.overlap) == (0.5, 0.0, None)


def test_time_in_which_several_lanes_communicate_counts_once():
    events = [Event(0, lane, "communicate", "", 0.0, 4.0) for lane in (0, 1)] + [Event(0, 2, "compute", "", 2.0, 4.0)]
    (row,) = Timeline(events).summary()
    assert row.overlap == pytest.approx(0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 12)),
        max_size=12,
    )
)
def test_the_event_that_began_last_holds_the_lane(rows):
    events = [Event(0, lane, kind, str(i), t, t + d) for i, (lane, kind, t, d) in enumerate(rows)]
    timeline = Timeline(events)
    lanes = timeline.lanes(0)
    for lane in {event.lane for event in events}:
        mine = [event for event in timeline.events if event.lane == lane]
        for t in np.arange(0.5, 45):  # events end at integers, so halves are never at an edge
            open_ = [event for event in mine if event.start_us < t < event.end_us]
            found = [event for event in lanes[lane] if event.start_us < t < event.end_us]
            assert len(found) == bool(open_), (t, found, open_)
            if open_:
                assert found[0].name == max(enumerate(open_), key=lambda x: (x[1].start_us, x[0]))[1].name
    for row in timeline.summary():
        assert 0 <= row.compute + row.communicate + row.wait <= 1 + 1e-9


def test_perfetto_keeps_every_event(tmp_path):
    path = Timeline(TWO_RANKS).to_perfetto(tmp_path / "trace.json")
    records = json.loads(path.read_text())["traceEvents"]
    slices = [r for r in records if r["ph"] == "X"]
    assert {(r["pid"], r["tid"], r["cat"], r["name"], r["ts"], r["dur"]) for r in slices} == {
        (e.rank, e.lane, e.kind, e.name, e.start_us, e.end_us - e.start_us) for e in TWO_RANKS
    }
    names = {(r["pid"], r["args"]["name"]) for r in records if r["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}


def test_the_clock_begins_at_zero():
    event = Event(0, 0, "wait", "wait flags[1]", 7.0, 9.0, signal=Signal(1, 0, 6.0))
    timeline = Timeline([event, Event(1, 0, "compute", "", 5.0, 6.5)])
    assert timeline.span_us == (0.0, 4.0)
    assert timeline.events[0].start_us == 2.0
    assert timeline.events[0].signal == Signal(1, 0, 1.0)


@triton.jit
def exchange(x, flags, world, N: tl.constexpr):
    i = tl.arange(0, N)
    other = 1 - world.rank
    pl.put(dst=x + i, src=x + i, peer=other, world=world)
    pl.signal(flags + 1, other, world)
    pl.wait(flags + 1, 1, world)


def swapped(world):
    flags = signals(2, name="flags")
    exchange[(1,)](empty(512), flags, world.device, 256)


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    timeline = execute(swapped, 2, trace=True).timeline()
    path = timeline.to_perfetto(tmp_path_factory.mktemp("trace") / "trace.json")
    return timeline, json.loads(path.read_text())["traceEvents"]


def test_a_wait_names_its_counter_and_an_arrow_leads_to_it_from_the_signal(exchanged):
    timeline, records = exchanged
    waits = [event for event in timeline.events if event.kind == "wait"]
    assert [(e.rank, e.name, e.args["counter"], e.signal.rank) for e in waits] == [
        (0, "wait flags[1] >= 1", "flags[1]", 1),
        (1, "wait flags[1] >= 1", "flags[1]", 0),
    ]
    begins, ends = ({r["id"]: r for r in records if r["ph"] == phase} for phase in "sf")
    assert len(begins) == 2
    assert begins.keys() == ends.keys()
    slices = [r for r in records if r["ph"] == "X"]
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] < end["ts"]
        assert begin["pid"] == 1 - end["pid"]
        for record, kind in ((begin, "communicate"), (end, "wait")):  # each end lies in the event it belongs to
            mine = [s for s in slices if s["pid"] == record["pid"] and s["ts"] <= record["ts"] <= s["ts"] + s["dur"]]
            assert [s["cat"] for s in mine] == [kind]


def test_a_counter_shows_how_many_lanes_do_what(exchanged):
    timeline, records = exchanged
    counts = [r for r in records if r["ph"] == "C" and r["pid"] == 0]
    assert {kind for r in counts for kind, n in r["args"].items() if n} >= {"communicate", "wait"}
    assert all(sum(r["args"].values()) == 1 for r in counts[:-1])  # one lane, never idle
    assert counts[-1]["args"] == dict.fromkeys(KINDS, 0)
    assert counts[-1]["ts"] == pytest.approx(max(e.end_us for e in timeline.events if e.rank == 0))


@triton.jit
def double(task, x):
    tl.store(x + task, 2 * tl.load(x + task))


@triton.jit
def in_tiles(x, queue, flags, world):
    pl.lcsc(double, double, (x,), 3, 0, queue, pl.epoch(flags, world), 1)


def doubled(world):
    in_tiles[(2,)](empty(8), signals(1), signals(1), world.device)


def test_perfetto_has_the_tile_of_an_event(tmp_path):
    path = execute(doubled, 1, trace=True).timeline().to_perfetto(tmp_path / "trace.json")
    slices = [r for r in json.loads(path.read_text())["traceEvents"] if r["ph"] == "X"]
    assert {r["name"] for r in slices if "tile" in r["args"]} == {"tile 0", "tile 1", "tile 2"}
    assert all(r["name"] == f"tile {r['args']['tile']}" for r in slices if "tile" in r["args"])
    assert {r["args"]["kernel"] for r in slices} == {"in_tiles"}


def test_the_table_has_a_row_for_each_rank():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(Timeline(TWO_RANKS, title="two ranks").table())
    rows = [line.replace("│", " ").split() for line in capture.get().splitlines() if "%" in line]
    assert rows == [
        ["0", "2", "45%", "15%", "15%", "25%", "67%"],
        ["1", "1", "50%", "0%", "0%", "50%", "-"],
    ]


def test_the_picture_shows_each_kind_in_its_colour(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    from matplotlib.colors import to_rgb

    from pkt.trace import COLOURS

    path = Timeline(TWO_RANKS, title="two ranks").to_png(tmp_path / "timeline.png", dpi=100)
    pixels = image.imread(path)[..., :3]
    share = {
        kind: float((np.abs(pixels - np.array(to_rgb(colour))).max(-1) < 0.02).sum())
        for kind, colour in COLOURS.items()
    }
    # rank 0: 9 units of compute in half its band; rank 1: 5 units in the whole of its band, which is as tall
    assert share["communicate"] == pytest.approx(share["wait"], rel=0.15)
    assert share["compute"] / share["wait"] == pytest.approx((9 + 2 * 5) / 3, rel=0.15)


def test_an_empty_timeline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    empty = Timeline([])
    assert empty.summary() == []
    assert empty.to_png(tmp_path / "empty.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Event(0, 0, "sleep", "", 0, 1), "kind is one of"),
        (Event(0, 0, "wait", "", 2, 1), "ends before it starts"),
    ],
)
def test_bad_events_are_refused(event, said):
    with pytest.raises(ValueError, match=said):
        Timeline([event])
