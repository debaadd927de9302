"""The pass that reads a prompt's end beside the first draft has the bits of two passes."""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.core.tree import TokenTree
from paceline.decoding import first_pass
from paceline.errors import NumericsError
from paceline.runner import ModelRunner, attention, one_pass, wrap_model
from paceline.runner.joined import JoinedLayout
from tests.adversaries import RandomTrees
from tests.helpers import loaded, prompt
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_types")


def not_padded(*args, parts, **options):
    """A layout whose draft has the rows that were drafted, and not those of a pass of its own."""
    if len(parts) == 2:
        part, given = parts[1], parts[1].num_given
        tree = TokenTree(part.tree.token_ids[:, :given], part.tree.parents[:, :given], part.tree.is_probe[:, :given])
        parts = (parts[0], replace(part, num_nodes=given, tree=tree))
    return JoinedLayout(*args, parts=parts, **options)


def test_attention_by_hand_is_given_the_rows_of_two_passes(monkeypatch):
    """Soft caps are computed by a product that may mind how many rows it has: here one that surely does."""
    on = ModelRunner(loaded("gemma2", max_position_embeddings=512), 1, 512)
    on.invariant, on.row_multiple = True, 4
    real = attention._attend

    def minds_rows(query, *rest):
        return real(query, *rest) * (1 + 1e-4 * (query.shape[1] % 4))

    monkeypatch.setattr(attention, "_attend", minds_rows)
    monkeypatch.setattr(one_pass, "_MEASURED", {})
    assert one_pass._passes_repeat(on)
    monkeypatch.setattr(one_pass, "JoinedLayout", not_padded)
    assert not one_pass._passes_repeat(on)


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


def test_bits(monkeypatch):
    """With invariant numerics: keys, values and logits of text and draft, bit for bit, at any row of a pass."""
    on = ModelRunner(wrap_model(tiny_model("llama")), 2, None, None)
    if not (on.invariant and on.joins):
        pytest.skip("this device gives no row count whose multiples repeat bit for bit")
    slot, tokens = on.cache.allocate(), prompt(240)
    for start, rows in ((0, 1), (0, 37), (60, 5), (64, 64), (5, 180)):
        for nodes in (1, 3, 7):
            assert one_pass._same_bits(on, slot, tokens, start, rows, nodes), (start, rows, nodes)
    real = one_pass.text_layout

    def one_column_more(runner, slot, rows):
        made = real(runner, slot, rows)
        made.max_length = 10  # positions stop growing: what follows has other keys
        return made

    monkeypatch.setattr(first_pass, "read_and_verify", None)
    tree = TokenTree.chain([tokens[40:43]])
    on.cache.truncate(slot, 0)
    straight = one_pass.read_and_verify(on, slot, tokens[:40], tree).clone()
    on.cache.truncate(slot, 0)
    monkeypatch.setattr(one_pass, "text_layout", one_column_more)
    assert not torch.equal(one_pass.read_and_verify(on, slot, tokens[:40], tree), straight)
