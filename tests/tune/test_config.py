"""Configs are values, spaces are products in a fixed order."""

import json
import pickle

import numpy as np
import pytest
import triton

import pkt
from pkt.errors import DtypeError, NoCandidate, ShapeError
from pkt.model.config import configs_of


def test_a_config_is_a_value():
    config = pkt.Config(num_comm_sms=16, BLOCK_M=128, num_warps=8)
    same = pkt.Config(num_warps=8, BLOCK_M=128, num_comm_sms=16)
    assert config == same
    assert hash(config) == hash(same)
    assert config != pkt.Config(num_comm_sms=16, BLOCK_M=128)
    assert dict(**config) == {"num_comm_sms": 16, "BLOCK_M": 128, "num_warps": 8}
    assert list(config.settings) == ["num_comm_sms", "BLOCK_M", "num_warps"]
    assert repr(config) == "Config(num_comm_sms=16, BLOCK_M=128, num_warps=8)"
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(TypeError):
        config.settings["BLOCK_M"] = 64


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ("1", 1), (None, "None")])
def test_values_of_different_kinds_differ(one, other):
    assert pkt.Config(x=one) != pkt.Config(x=other)


def test_a_config_read_from_a_file_is_equal():
    config = pkt.Config(tiles=(128, 256, (1, 2)), mode="push", n=np.int64(3), f=0.1, off=None, on=True)
    assert pkt.Config(**json.loads(config.text)) == config
    assert config["tiles"] == (128, 256, (1, 2))
    assert type(config["n"]) is int


@pytest.mark.parametrize("value", [{}, object(), len, triton.jit, (1, {2})])
def test_values_that_cannot_be_kept_are_refused(value):
    with pytest.raises(ShapeError, match=r"pkt.Config: x: found .*, wanted None, bool, int"):
        pkt.Config(x=value)


def test_of_takes_configs_dicts_and_tritons_configs():
    hook = print
    theirs = triton.Config({"BLOCK": 64}, num_warps=8, num_stages=4, pre_hook=hook)
    config = pkt.Config.of(theirs)
    assert dict(config) == {"BLOCK": 64, "num_warps": 8, "num_ctas": 1, "num_stages": 4}
    assert config.pre_hook is hook
    assert pkt.Config.of(config) is config
    assert pkt.Config.of({"a": 1}) == pkt.Config(a=1)
    with pytest.raises(ShapeError, match="found 5, wanted a pkt.Config"):
        pkt.Config.of(5)


def test_the_last_axis_of_a_space_varies_fastest():
    found = pkt.space(a=range(1, 3), b=["x", "y"], num_warps=8)
    assert [tuple(c.values()) for c in found] == [(1, "x", 8), (1, "y", 8), (2, "x", 8), (2, "y", 8)]
    assert pkt.space(mode="push") == [pkt.Config(mode="push")]
    assert pkt.space(tiles=[(1, 2)]) == [pkt.Config(tiles=(1, 2))]
    assert pkt.space(n=(i for i in range(2))) == [pkt.Config(n=0), pkt.Config(n=1)]


def test_constraints_and_duplicates():
    assert pkt.space(where=lambda c: c["a"] < c["b"], a=range(3), b=range(3)) == [
        pkt.Config(a=0, b=1), pkt.Config(a=0, b=2), pkt.Config(a=1, b=2),
    ]  # fmt: skip
    both = [lambda c: c["a"] > 0, lambda c: c["a"] < 3]
    assert pkt.space(where=both, a=[0, 1, 1, 2, 3, 2]) == [pkt.Config(a=1), pkt.Config(a=2)]


def test_empty_spaces_say_why():
    with pytest.raises(NoCandidate, match="the axis b has no values"):
        pkt.space(a=[1], b=range(0))
    for wrong in (5, "x", [3]):
        with pytest.raises(DtypeError, match="where: found .*, wanted a function of a config, or a list of them"):
            pkt.space(where=wrong, a=range(3))
    with pytest.raises(NoCandidate, match="none of 6 configs meets `where`"):
        pkt.space(where=lambda c: False, a=range(3), b=range(2))
    with pytest.raises(NoCandidate, match="no axis"):
        pkt.space()
    with pytest.raises(NoCandidate, match="tune: configs is empty"):
        configs_of("tune", [])
