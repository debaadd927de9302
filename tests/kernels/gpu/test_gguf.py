"""GGUF files whose blocks stay as they are in the kernels of a GPU, against the same files in float32."""

from typing import Any

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.hf.fingerprint import fingerprint
from paceline.hf.gguf.load import open_gguf
from paceline.kernels.gpu.blocks import Blocks
from paceline.quant.blocks import BlockEmbedding, BlockLinear, BlockWeights
from paceline.quant.linears import quantize_target
from paceline.target import ModelRunner, load_model, wrap_model
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
TEXT = [5, 9, 31, 7, 80, 3]


def logits(loaded) -> torch.Tensor:
    runner = ModelRunner(loaded, 1, 16)
    slot = runner.cache.allocate()
    runner.extend_cache(slot, TEXT[:2])
    return runner.forward([slot], TokenTree.chain([TEXT[2:]]))[0]


def test_blocks_of_a_file_stay_packed(tmp_path):
    model = tiny_model("llama", torch.float32, vocab_size=300, **SIZES)
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", quantized=["Q8_0", "Q5_0", "Q4_1"])
    loaded = load_model(str(path))
    assert loaded.is_native
    held = [one for one in loaded.model.modules() if isinstance(one, BlockWeights)]
    assert {type(one) for one in held} == {BlockLinear, BlockEmbedding}
    assert {type(one.blocks) for one in held} == {Blocks}
    assert not any(type(one) is torch.nn.Linear for one in loaded.model.modules())
    plain = open_gguf(path, lambda config: torch.float32)[0]
    assert fingerprint(loaded.model) == fingerprint(open_gguf(path, lambda config: None)[0])
    with torch.inference_mode():
        want = plain(torch.tensor([TEXT])).logits[0, 2:]
    assert (logits(loaded) - want).abs().max() < 0.3 * want.std()  # weights and rows have 16 bits


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", pytest.param("q4_0", marks=pytest.mark.more)])
def test_a_model_is_rounded_for_the_kernels(weights):
    """Its logits are those of dense layers with the rounded weights."""
    model = tiny_model("llama", torch.float32, **SIZES)
    report = quantize_target(model, weights, 32)
    assert report.num_kept == 0
    assert report.num_quantized >= 7
    got = logits(loaded := wrap_model(model))
    assert loaded.is_native
    modules: list[tuple[str, Any]] = [*model.named_modules()]
    for name, module in modules:
        if hasattr(module, "matrix"):
            dense = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            dense.weight = torch.nn.Parameter(module.weight.float(), requires_grad=False)
            model.set_submodule(name, dense)
        elif isinstance(module, BlockEmbedding):
            table = torch.nn.Embedding.from_pretrained(module.weight)
            model.set_submodule(name, table)
    with torch.inference_mode():
        want = model(torch.tensor([TEXT])).logits[0, 2:]
    assert (got - want).abs().max() < (0.05 if weights == "fp8" else 1e-3) * want.std()  # read back as bfloat16
