"""Every supported architecture: tree rows equal plain transformers, and the cache equals a fresh prefill."""

from dataclasses import replace

import pytest
import torch

from paceline.attention.masks import PromptRows
from paceline.core.tree import TokenTree
from paceline.errors import IncompatibleModels
from paceline.hf import routing
from paceline.hf.experts import Experts
from paceline.kernels import load
from paceline.target import ModelRunner, wrap_model
from paceline.target.self_test import check
from tests.tiny import ARCHITECTURES, EXPERTS, tiny_model

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


needs_native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma4-experts", "qwen3_next", *EXPERTS]
MORE = ["olmoe", "granitemoe", "qwen3_5_moe", "lfm2_moe", "granitemoehybrid_moe", "nemotron_h_moe"]


@needs_native
@pytest.mark.parametrize("name", [*MIXTURES, *(pytest.param(name, marks=pytest.mark.more) for name in MORE)])
def test_mixtures(name):
    """The rows of a tree have the bits of single rows; a pass tells the experts that it read."""
    loaded = wrap_model(tiny_model(name))
    assert loaded.is_native
    assert not loaded.mixes_rows
    runner, tree = ModelRunner(loaded, 2, 64), TokenTree.from_lists([TOKENS], [PARENTS])
    slot, other = runner.admit(PROMPT), runner.admit(PROMPT)
    runner.extend_cache(slot, PROMPT[:-1])
    rows = runner.forward([slot], tree)[0]
    together = loaded.decoder.experts_read
    for token in PROMPT[:-1]:
        runner.extend_cache(other, [token])
    alone = 0
    for node in [0, *tree.rows[0].path_to(6)]:
        row = runner.forward([other], TokenTree.chain([[TOKENS[node]]]))[0, 0]
        assert torch.equal(row, rows[node])
        alone = loaded.decoder.experts_read
        runner.commit([other], [[]])
    layers = [module for module in loaded.model.modules() if isinstance(module, Experts)]
    assert alone == 2 * len(layers) <= together <= sum(map(len, layers))


@needs_native
@pytest.mark.parametrize(
    ("name", "dtype", "mistake"),
    [
        ("glm4_moe", torch.float32, {"scoring": "softmax"}),
        ("minimax_m2", torch.float32, {"divides": False}),
        ("qwen3_moe", torch.bfloat16, {"divides": True}),
        ("mixtral", torch.bfloat16, {"divides": False}),
        ("gpt_oss", torch.bfloat16, {"clamped": False}),
    ],
)
def test_a_wrong_routing_is_refused(name, dtype, mistake, monkeypatch):
    model = tiny_model(name, dtype)
    wrap_model(model)
    monkeypatch.setitem(routing.ROUTINGS, name, replace(routing.ROUTINGS[name], **mistake))
    with pytest.raises(IncompatibleModels, match="for a tree"):
        wrap_model(model)


@needs_native
def test_near_ties_of_routers_are_no_difference():
    """In 16 bits a mixture is asked again, with other tokens; nothing else is."""
    kinds = ("mixtral", torch.bfloat16, True), ("mixtral", torch.float32, False), ("llama", torch.bfloat16, False)
    for name, dtype, again in kinds:
        model = tiny_model(name, dtype)
        loaded = wrap_model(model)
        mistaken = replace(loaded, reference=[row.flip(0) for row in loaded.reference])
        if again:
            asked = check(mistaken, lambda model=model: model)
            assert asked.attempt == 1
            check(asked)
        else:
            with pytest.raises(IncompatibleModels, match="for a tree"):
                check(mistaken, lambda model=model: model)


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
