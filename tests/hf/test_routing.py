"""Layers of experts that contradict themselves are refused."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import IncompatibleModels
from paceline.hf import routing
from paceline.hf.describe import describe
from paceline.hf.experts import split_experts
from paceline.kernels import load
from paceline.quant.packed import pack_linears
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def of() -> tuple[Any, Any]:
    """A model whose experts are taken apart, and the block of its second layer."""
    model: Any = tiny_model("qwen3_moe")
    split_experts(model)
    return model, model.model.layers[1].mlp


def described(model: Any) -> Any:
    pack_linears(model)
    return describe(model)


def test_more_experts_than_kernels_have_room_for(monkeypatch):
    monkeypatch.setattr(routing, "MAX_EXPERTS", 3)
    with pytest.raises(IncompatibleModels, match=r"too many experts. Got: 4. Expected: at most 3"):
        described(of()[0])


def test_a_router_that_does_not_fit():
    model, block = of()
    block.gate.weight = nn.Parameter(torch.randn(5, 32))
    with pytest.raises(IncompatibleModels, match=r"another number of experts. Got: 5. Expected: 4"):
        described(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_router_that_is_broken(value):
    model, block = of()
    block.gate.weight.data[2, 3] = value
    with pytest.raises(IncompatibleModels, match="not finite"):
        described(model)


@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_chosen_than_there_are(chosen):
    model, block = of()
    block.gate.top_k = model.config.num_experts_per_tok = chosen
    with pytest.raises(IncompatibleModels, match=rf"Got: {chosen} of 4. Expected: 1 to 4.*num_experts_per_tok"):
        described(model)


@pytest.mark.parametrize(
    ("name", "outs", "ins"), [("gate", 25, 32), ("up", 24, 40), ("down", 32, 25), ("down", 31, 24)]
)
def test_an_expert_of_another_shape(name, outs, ins):
    model, block = of()
    setattr(block.experts[3], f"{name}_proj", nn.Linear(ins, outs, bias=False))
    with pytest.raises(IncompatibleModels, match=rf'"{name}_proj" of expert 3 .*Got: \[{outs}, {ins}\]'):
        described(model)
