"""examples/llama_tp.py: the split Llama's losses and gradients are those of the unsplit one, and it runs."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pkt

from .helpers import near, on_ranks, part

PATH = Path(__file__).resolve().parents[2] / "examples" / "llama_tp.py"


@functools.cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PATH.stem] = module
    spec.loader.exec_module(module)
    return module


def test_losses_and_gradients_are_those_of_the_unsplit_model() -> None:
    llama = example()
    shape = llama.SHAPES["tiny"]._replace(layers=1)

    def run(world: Any) -> None:
        stack = llama.Stack("pkt", pkt.parallelize, world, torch.device("cpu"))
        data = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        exact = llama.Llama(shape).double()
        # The same loss, but for its logits, which it computes in fp32.
        wanted = torch.nn.functional.cross_entropy(
            exact(data[:, :-1], torch.arange(8)).flatten(0, 1), data[:, 1:].flatten()
        )
        wanted.backward()
        model = stack.model(shape, llama.training())
        loss = llama.loss_of(model, data)
        loss.backward()
        near(loss.detach(), wanted.detach(), "loss")
        for name, parameter in model.named_parameters():
            near(parameter.grad, part(exact.get_parameter(name).grad, parameter, world), name)

    on_ranks(2, run)


def test_a_cache_gives_what_whole_prompts_give() -> None:
    llama = example()
    shape = llama.SHAPES["tiny"]._replace(layers=1)

    def run(world: Any) -> None:
        stack = llama.Stack("pkt", pkt.parallelize, world, torch.device("cpu"))
        prompt = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(1))
        prefill, decode = llama.serve(stack, shape, prompt, world.size, room=4)
        model, caches = stack.model(shape, llama.serving()), [tuple(torch.zeros(2, 1, 8, 8) for _ in range(2))]
        torch.manual_seed(0)
        whole, tokens, given, at = llama.Llama(shape).double(), prompt, prompt, torch.arange(5)
        for step in (prefill, decode, decode):
            exact = whole(tokens, torch.arange(tokens.shape[1]))[:, -1:].detach()
            near(model(given, at, caches).detach(), exact)
            given, at = exact.argmax(-1), at[-1:] + 1
            assert torch.equal(step(), given)
            tokens = torch.cat((tokens, given), dim=1)

    on_ranks(2, run)


def test_it_prints_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    llama = example()
    shape = llama.SHAPES["tiny"]._replace(layers=1)
    found = pkt.launch(llama.main, 2, device="cpu", args=(shape, 8, 2, 1))
    assert [list(one) for one in found] == [["prefill", "decode", "training", "loss"]] * 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "tokens a second on 2 ranks (simulated, which says nothing of a GPU): pkt"
    assert len(printed) == 5
