"""Every exception carries its facts, reads well, and survives pickling."""

import pickle

import pytest

from pkt import errors, wording
from pkt.simulate import findings
from pkt.wording import Access, Waiting

WAIT = Waiting(
    rank=2,
    program=(1, 0, 0),
    kernel="all_gather",
    counter="flags[7]",
    wanted=3,
    found=2,
    launch=41,
    owner=1,
    site="k.py:9",
)
ACCESS = Access(rank=1, program=4, kernel="k", kind="store", tensor="rank 0's x[17]", site="k.py:12")
BUILT = {
    errors.WaitTimeout.after(
        30, [WAIT]
    ): "rank 2: all_gather program 1 waits on flags[7] of rank 1 at k.py:9 after 30.0 s: "
    "wanted >= 3, found 2, launch 41",
    errors.WaitTimeout.rendezvous(0, "barrier", 2.5, [1, 3]): "rank 0: barrier waits for rank 1, rank 3 after 2.5 s",
    findings.Deadlock.among([WAIT, WAIT], {0: "barrier()"}): "deadlock: 2 programs wait",
    findings.Deadlock.among([WAIT]): "deadlock: 1 program waits and nothing can move",
    findings.TooFewResident.waiting(1, "k", 5, 4): "rank 1: k has 5 programs but only 4 are resident",
    findings.TooFewResident.waiting(1, "k", 5, 1): "but only 1 is resident, and it waits for the others",
    errors.GridTooLarge.resident(
        "k", 264, 132, 1
    ): "k: grid 264 > 132 resident programs (132 SMs x 1): lower the grid or num_stages",
    findings.DataRace.between(
        ACCESS, ACCESS, "x"
    ): "data race: store of rank 0's x[17] by rank 1 k program 4 at k.py:12",
    findings.StaleFlag.found(WAIT, 40): "written in launch 40",
    findings.OutOfBounds.outside(ACCESS, "x"): "out of bounds: store",
    errors.UseAfterFree.device(ACCESS, "a.py:3"): "freed at a.py:3",
    findings.MisalignedAccess.element(ACCESS, 4, 2): "an element of 4 bytes, 2 past a multiple of 4",
    findings.MulticastAccess.plain(ACCESS): "plain access to the multicast window",
    errors.LostSignal.unread(0, "flags[1]", 4, "rank 2"): "rank 0: flags[1] was signalled to 4 by rank 2",
    errors.LostSync.compiled("k", "wait", 2, 1): "k: 2 wait in the source, 1 in the PTX",
    errors.LostSync.specialized("k", "wait", 1): "k: 1 wait inside tl.range(warp_specialize=True)",
    errors.LostSync.specialized("k", "signal", 2): "k: 2 signals inside",
    errors.HeapFull.wanted(
        512 << 20, 600 << 20, 256 << 20
    ): "heap full: wanted 512 MiB, free 600 MiB, largest block 256 MiB; raise heap= or PKT_HEAP",
    errors.HeapFull.wanted(
        4 << 20, (4 << 20) - 8192, (4 << 20) - 8192
    ): "heap full: wanted 4 MiB, free 3.9 MiB, largest block 3.9 MiB; raise heap= or PKT_HEAP",
    errors.PeerLost.exited(0, {3: "(pid 812) exited"}, "launch 41"): "rank 0: rank 3 (pid 812) exited during launch 41",
    errors.RankFailed.raised(1, "Traceback ...\nZeroDivisionError: x", seed=7): "rank 1 raised:\n\nTraceback",
    errors.Unsupported.captured(1, ("inbox", 4)): "rank 1: buffers ('inbox', 4): found a CUDA graph being captured",
    errors.DriverError.failed(
        2, "cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"
    ): "rank 2: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)",
}


@pytest.mark.parametrize("error", BUILT, ids=lambda e: type(e).__name__)
def test_the_wording_of_messages(error):
    assert BUILT[error] in str(error)
    assert isinstance(error, errors.PktError)
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)


def test_sizes_and_ranks_in_words():
    assert [wording.size_text(n) for n in (0, 1023, 1024, 1536 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "3 TiB",
    ]
    assert wording.ranks_text({0: "a", 2: "a", 1: "b"}) == "ranks 0, 2: a; rank 1: b"
    assert [wording.program_text(p) for p in (3, (3, 0, 0), (0, 0, 0), (3, 1, 0))] == ["3", "3", "0", "(3, 1)"]


def test_long_tables_are_cut():
    text = wording.waiting_table([WAIT] * 40, limit=5)
    assert text.count("flags[7]") == 5
    assert text.endswith("... and 35 more")
