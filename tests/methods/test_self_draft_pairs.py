"""Targets whose own weights are rounded, with an INT4 draft of theirs: INT8 runs here, FP8 up to its kernels."""

import pytest
import torch

from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.quant import linears as linears_file
from paceline.quant.blocks import BlockLinear
from paceline.quant.fp8 import Fp8Linear
from paceline.quant.linears import quantize_linears, quantize_target
from paceline.quant.packed import PackedLinear, QuantizedLinear
from paceline.target.adapters import share_copy
from tests.helpers import REPEATING, loaded
from tests.quant.helpers import round_to_bits
from tests.tiny import tiny_model


def linears(model) -> set[str]:
    kinds = (torch.nn.Linear, PackedLinear, QuantizedLinear)
    found = [module for module in model.modules() if isinstance(module, kinds)]
    return {one.form.name if isinstance(one, BlockLinear) else type(one).__name__ for one in found}


LAYERS = 14
"""Linear layers of two decoder layers."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bits", [4, 2])
def test_an_int8_target_with_an_int4_draft(temperature, bits):
    drafter = SelfQuantized(lm_head="shared", bits=bits)
    llm = LLM(tiny_model("llama", intermediate_size=64), weights="int8", drafter=drafter, policy=Fixed(4))
    assert linears(llm.loaded.model) == {"Q8_0"}
    draft = drafter._runner.loaded.model  # type: ignore[union-attr]
    assert linears(draft) == {f"INT{bits}", "Q8_0"}  # the head is the target's
    assert drafter.report is not None
    assert drafter.report.num_quantized == LAYERS
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=3, ignore_eos=True)
    drafted = llm.generate(REPEATING, params)[0]
    assert drafted.token_ids == llm.plain().generate(REPEATING, params)[0].token_ids
    stood = sum(r.num_accepted for r in drafted.rounds) / sum(r.num_drafted for r in drafted.rounds)
    assert bits == 2 or stood > 0.1  # random weights, whose near ties 8 bits of inputs decide


def test_an_int4_draft_of_fp8_weights(monkeypatch):
    """Only weights are read for that, so that it can be tested where FP8 does not run."""
    monkeypatch.setattr(linears_file, "require_fp8", lambda device: None)
    model = share_copy(loaded("llama", intermediate_size=64).model)
    quantize_target(model, "fp8")
    fp8 = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert len(fp8) == LAYERS
    draft = share_copy(model)
    assert quantize_linears(draft, 32, "shared").num_quantized == LAYERS
    for name, old in fp8.items():
        made = draft.get_submodule(name)
        assert isinstance(made, BlockLinear)
        expected = round_to_bits(old.weight, 4, 32)
        torch.testing.assert_close(made(torch.eye(old.in_features)).t(), expected, atol=0.02, rtol=0.02)
        plain = loaded("llama", intermediate_size=64).model.get_submodule(name).weight
        torch.testing.assert_close(old.weight.float(), plain.float(), atol=0.05, rtol=0.07)
