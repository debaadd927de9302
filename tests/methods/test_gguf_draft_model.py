"""A draft model from a GGUF file: its matrices stay in blocks, unless the draft is to be in other bits."""

import pytest

from paceline import LLM, DraftModel, Fixed, SamplingParams
from paceline.kernels import load
from tests.gguf_files import vocabulary, write_gguf
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"dtype": "float32"}])
def test_its_blocks_stay_packed(options, tmp_path, caplog):
    model = tiny_model("llama", vocab_size=len(vocabulary()), intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", model, quantized="Q8_0")
    llm = LLM(path, drafter=DraftModel(path, **options), policy=Fixed(3))
    assert ("Q8_0 weights become" in caplog.text) == bool(options)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    (drafted,), (plain,) = (one.generate([[5, 9, 3]], params) for one in (llm, llm.plain()))
    assert drafted.token_ids == plain.token_ids
    if not options:  # the numbers of the target, so every draft is right
        assert drafted.outputs[0].mean_acceptance_length > 3
