"""How the Gluon all_gather_matmul deals out its work by default."""

from pkt.kernels.all_gather_matmul.rules import PushPlan, push_plan

from .gluon_compiling import NARROW, TILES


def test_default_plans():
    """Copy engines move the shards if the product takes longer than the copies. They move chunks if the own shard is
    multiplied before a whole shard arrives. Pushing programs skip the rounds that pushing takes. The tiles after the
    last whole round are cut in two if the parts are less than a round, unless the links are the limit."""
    for side, copied, pushed in (
        (4096, PushPlan(0, 2048, 0, 0, 1, 0), PushPlan(8, 256, 0, 2, 1, 1)),
        (6144, PushPlan(0, 3072, 0, 0, 2, 2), PushPlan(8, 256, 0, 3, 1, 2)),
        (8192, PushPlan(0, 4096, 0, 0, 1, 3), PushPlan(8, 256, 0, 4, 2, 4)),
        (12288, PushPlan(0, 0, 0, 0, 1, 8), PushPlan(8, 256, 0, 6, 2, 9)),
        (16384, PushPlan(0, 0, 0, 0, 1, 15), PushPlan(8, 256, 0, 8, 1, 16)),
        (32768, PushPlan(0, 0, 0, 0, 2, 62), PushPlan(8, 256, 0, 15, 1, 62)),
    ):
        case = side // 4, side // 4, side, 4, TILES, 132
        assert push_plan(*case, num_comm_sms=0) == copied
        assert push_plan(*case, num_comm_sms=0, push_rows=2) == copied._replace(chunk=0, push_rows=2)
        assert push_plan(*case, num_comm_sms=8) == pushed
        assert push_plan(*case)[:2] == ((0, copied.chunk) if side >= 8192 else (16, 128))
        assert push_plan(*case) == push_plan(*case, num_comm_sms=0 if side >= 8192 else 16)
        assert push_plan(*case, num_comm_sms=8, rounds_alone=1) == pushed._replace(rounds_alone=1)
        assert push_plan(*case, num_comm_sms=8, chunk=64) == pushed._replace(chunk=64)
        assert push_plan(*case, chunk=64).num_comm_sms == push_plan(*case, rounds_alone=1).num_comm_sms == 16
    case = 8192, 8192, 512
    alone = {n: push_plan(*case, 4, TILES, 132, num_comm_sms=n).rounds_alone for n in (4, 8, 16)}
    assert alone == {4: 29, 8: 15, 16: 15}  # half the programs, twice the time; eight fill the links
    assert push_plan(*case, 4, NARROW, 132, num_comm_sms=8).rounds_alone == 29  # half the tile
    assert push_plan(128, 256, 512, 4, TILES, 2).num_comm_sms == 16  # more than there are programs
    assert push_plan(8192, 8192, 8192, 1, TILES, 132).num_comm_sms == 16  # nobody to copy to


def test_up_to_half_a_round_of_tiles_is_cut():
    """From one tile on. Each 256 columns have 4 tiles, for 7 programs; where programs push, the first round has one."""
    for num_comm, missing, cases in ((0, 0, {7: 0, 2: 1, 6: 3, 1: 4}), (8, 6, {2: 0, 4: 1, 1: 3, 3: 4})):
        for columns, left in cases.items():
            plan = push_plan(128, 256 * columns, 512, 4, TILES, 7, num_comm_sms=num_comm)
            assert 4 * columns == 7 * plan.whole_rounds - missing + left, plan
            assert plan.cut_last == (2 if left in (1, 3) else 1), (num_comm, left)
