"""Every supported architecture: tree rows equal plain transformers, and the cache equals a fresh prefill."""

import pytest
import torch

from paceline.attention.masks import PromptRows
from paceline.core.tree import TokenTree
from paceline.target import ModelRunner, wrap_model
from tests.tiny import ARCHITECTURES, tiny_model

PROMPT = [5, 9, 31, 7, 64, 3, 22, 18, 90, 11, 40, 41, 8, 77]  # longer than the sliding windows
TOKENS = [PROMPT[-1], 10, 20, 30, 11, 21, 55]
PARENTS = [-1, 0, 0, 1, 1, 2, 4]


def plain_logits(model, ids):
    """The oracle: transformers' own attention, no cache, one row."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    return [int(tree.token_ids[0, i]) for i in tree.rows[0].path_to(node)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tree_rows_equal_plain_transformers(name):
    model = tiny_model(name)
    tree = TokenTree.from_lists([TOKENS], [PARENTS])
    expected = [plain_logits(model, PROMPT + path_tokens(tree, node)) for node in range(tree.num_nodes)]
    accepted = [1, 4, 6]
    after = PROMPT + path_tokens(tree, 6)
    follow = [plain_logits(model, [*after, 33]), plain_logits(model, [*after, 33, 44])]

    runner = ModelRunner(wrap_model(model), max_num_seqs=2)
    slot = runner.admit(PROMPT)
    runner.extend_cache(slot, PROMPT[:-1])
    logits = runner.forward([slot], tree)[0].float()
    for node, row in enumerate(expected):
        torch.testing.assert_close(logits[node], row, atol=2e-4, rtol=1e-4, msg=lambda m, n=node: f"node {n}: {m}")

    # What was accepted stays, what was rejected leaves no trace.
    runner.commit([slot], [accepted])
    assert runner.cache.lengths[slot] == len(after)
    fresh = ModelRunner(runner.loaded, max_num_seqs=1)
    other = fresh.admit(after)
    fresh.extend_cache(other, after)
    for ours, theirs in zip(
        runner.cache.keys + runner.cache.values, fresh.cache.keys + fresh.cache.values, strict=True
    ):
        torch.testing.assert_close(ours[slot, :, : len(after)], theirs[other, :, : len(after)], atol=1e-4, rtol=1e-4)
    chain = runner.forward([slot], TokenTree.chain([[33, 44]]))[0].float()
    for row, oracle in zip(chain, follow, strict=True):
        torch.testing.assert_close(row, oracle, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma4", torch.float32), ("gemma4", torch.float64), ("gemma3n", torch.float64)]
)
def test_images_have_the_per_layer_inputs_of_padding(name, dtype):
    model, ids = tiny_model(name, dtype), torch.tensor([PROMPT])
    embeds, is_image = model.get_input_embeddings()(ids), torch.zeros_like(ids, dtype=torch.bool)
    is_image[0, 3:6] = True
    embeds[is_image] = torch.randn(3, 32, dtype=dtype)
    layers = model.base_model.get_per_layer_inputs(ids.masked_fill(is_image, model.config.pad_token_id))
    want = model(inputs_embeds=embeds, per_layer_inputs=layers, use_cache=False).logits[0]
    runner = ModelRunner(wrap_model(model), 1, 64)
    rows = PromptRows(embeds, is_image=is_image)
    layout = runner.loaded.begin(runner.cache, [runner.admit(PROMPT)], len(PROMPT), rows=rows)
    got = runner.loaded.forward(ids, layout, runner.cache)[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
