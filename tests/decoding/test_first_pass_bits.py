"""The pass that reads a prompt's end beside the first draft has the bits of two passes."""

import pytest

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.errors import NumericsError
from tests.adversaries import RandomTrees
from tests.helpers import loaded, prompt

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.mark.parametrize("drafter", [PromptLookup, RandomTrees])
def test_soft_caps_keep_their_bits_in_batches_and_first_passes(drafter):
    """Prompts that end shortly behind a block of columns: log-probabilities to the last bit."""
    target = loaded("gemma2", max_position_embeddings=512)
    try:
        spec = LLM(target, drafter=drafter(), policy=Fixed(5, 10), max_batch_size=3, numerics="invariant")
    except NumericsError:
        pytest.skip("this device gives no row count whose multiples repeat bit for bit")
    alone = LLM(target, max_batch_size=1, numerics="invariant")
    params = SamplingParams(max_tokens=10, logprobs=0)
    for trial in range(4):
        texts = [(prompt(5 + i, trial) * 20)[: 66 + (7 * trial + 5 * i) % 24] for i in range(3)]
        want = [alone.generate(text, params)[0].outputs[0].logprobs for text in texts]
        for llm in (spec, spec.plain()):
            assert [one.outputs[0].logprobs for one in llm.generate(texts, params)] == want
