"""examples/llama_tp.py on GPUs: gradients are those of the unsplit model, and prefill, decode and training run."""

from __future__ import annotations

from typing import Any

import torch

import pkt
from tests.gpu.run import launch, on_ranks
from tests.nn.helpers import part
from tests.nn.test_llama_tp import example

LIMIT = 3e-2  # of the norm of a gradient in bf16, after some ten roundings


def trained(world: Any) -> None:
    llama = example()
    shape = llama.Shape(vocabulary=256, features=256, layers=2, heads=8, kv_heads=4, hidden=512)
    data = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1), device="cpu").to(world.torch_device)
    model = llama.Stack("pkt", pkt.parallelize, world, world.torch_device).model(shape, llama.training())
    llama.loss_of(model, data).backward()
    torch.manual_seed(0)
    exact = llama.Llama(shape).bfloat16().double()
    llama.loss_of(exact, data).backward()
    for name, parameter in model.named_parameters():
        wanted = part(exact.get_parameter(name).grad, parameter, world)
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        distance = (gradient.double() - wanted).norm() / wanted.norm()
        assert distance < LIMIT, f"{name}: {distance:.3g}"
    llama.main(world, shape, 64, 2, 2)


@on_ranks(2, 4)
def test_gradients_are_those_of_the_unsplit_model(ranks: int) -> None:
    launch(trained, ranks)
