"""Latent attention: the columns that it keeps, the widths of real models, and weights in blocks."""

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.hf.described import DescribedModel
from paceline.hf.experts import split_experts
from paceline.kernels import load
from paceline.quant.packed import QuantizedLinear
from paceline.target import ModelRunner, load_model, wrap_model
from paceline.target.load import with_activations, with_weights
from tests.helpers import loaded, prompt, tokenizer
from tests.kernels.test_passes import assert_same_rows, rows
from tests.tiny import LATENT, tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = {
    "num_attention_heads": 30, "num_key_value_heads": 30, "hidden_size": 240, "kv_lora_rank": 512, "q_lora_rank": 300,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 1,
}  # fmt: skip
"""A head of DeepSeek-V3, and more heads than a piece of work takes."""


@pytest.mark.parametrize("name", LATENT)
def test_a_column_takes_one_latent_and_one_rotated_key(name):
    """In the model's type, for all heads together; whether the cache is new, has grown, or was restored."""
    runner = ModelRunner(loaded(name, torch.bfloat16, max_position_embeddings=1024), 2, 1024)
    config = runner.loaded.model.config
    per_column = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    text = prompt(300)
    slots = [runner.cache.allocate() for _ in range(2)]
    runner.extend_cache(slots[0], text[:200])
    assert runner.cache.num_bytes == 2 * per_column * 2 * runner.cache.capacity
    runner.extend_cache(slots[0], text[200:])
    assert runner.cache.num_bytes == 2 * per_column * 2 * runner.cache.capacity
    page = runner.cache.copy_of(slots[0], 0, 300)
    assert sum(part.numel() for pair in page for part in pair) == 300 * per_column
    runner.cache.restore(slots[1], [page], 300)
    assert torch.equal(*(runner.forward([slot], TokenTree.chain([[7, 8]])) for slot in slots))


@pytest.mark.parametrize("name", ["deepseek_v3", *(name for name in LATENT if name != "axk1")])
def test_a_checkpoint_is_read_into_the_form_of_the_kernels(name, tmp_path):
    """With the bits of the model that was saved. DeepSeek-V2's sines come from complex numbers, rounded otherwise."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    both, tree = (load_model(str(tmp_path), device="cpu"), wrap_model(model)), TokenTree.chain([prompt(20)])
    assert isinstance(both[0].model, DescribedModel)
    runners = [ModelRunner(one, 1, 64) for one in both]
    read, saved = (on.forward([on.cache.allocate()], tree) for on in runners)
    assert torch.allclose(read, saved, atol=1e-4) if "v2" in name else torch.equal(read, saved)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_lora_rank", [None, 300])
def test_rows_of_real_widths(q_lora_rank, dtype, isa):
    """Many heads over a wide latent: the logits of transformers, in passes of any size with the bits of a row alone."""
    model = tiny_model("minicpm3", dtype, **{**WIDE, "q_lora_rank": q_lora_rank})
    assert_same_rows(model, prompt(60), (2, 3, 7, 13, 48, 60), isa)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["minicpm3", "deepseek_v2"])
def test_weights_in_blocks(name, weights):
    """Against transformers with the weights that blocks mean, and bit for bit against one row at a time."""
    widths = {"kv_lora_rank": 64, "q_lora_rank": 32, "v_head_dim": 16}
    model, tokens = with_activations(with_weights(loaded(name, **widths), weights)[0], "int16"), prompt(40)
    plain = tiny_model(name, **widths)
    split_experts(plain)
    rounded = {path: part for path, part in model.model.named_modules() if isinstance(part, QuantizedLinear)}
    assert any(path.endswith("kv_b_proj") for path in rounded)
    with torch.inference_mode():
        for path, part in rounded.items():
            plain.get_submodule(path).weight.copy_(part.weight)
        want = plain(torch.tensor([tokens])).logits[0]
    runner = ModelRunner(model, 1, 64)
    slot = runner.cache.allocate()
    got = runner.forward([slot], TokenTree.chain([tokens]))[0]
    assert (got - want).abs().max() / want.std() < 0.01
    assert torch.equal(got, rows(runner, slot, tokens))
