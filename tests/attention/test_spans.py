"""Passes that read some of the committed columns, against transformers with a mask and against passes that read all."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from paceline.attention.masks import PassLayout
from paceline.core.tree import TokenTree
from paceline.kernels import load
from paceline.target import ModelRunner, wrap_model
from paceline.target.load import with_kv_cache
from tests.helpers import on_torch, prompt
from tests.kernels.test_passes import random_tree
from tests.tiny import tiny_model

LENGTH = 40
SPANS = {
    "a beginning and an end": [(0, 4), (31, 40)],
    "three parts": [(0, 16), (17, 19), (39, 40)],
    "no beginning": [(5, 9), (12, 40)],
    "nothing": [(0, 0)],
    "everything": [(0, 40)],
}
native = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")


def said(model, text, tree, spans):
    """Logits [N, V] of transformers after a text and along a tree whose nodes see some columns of the text."""
    length, nodes = len(text), tree.num_nodes
    seen = torch.ones(length + nodes, length + nodes).tril().bool()
    seen[length:] = False
    for first, last in spans:
        seen[length:, first:last] = True
    seen[length:, length:] = tree.ancestor_mask[0]
    positions = torch.cat([torch.arange(length), length + tree.depth[0]])[None]
    ids = torch.tensor([[*text, *tree.rows[0].token_ids]])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(ids, attention_mask=mask, position_ids=positions).logits[0, length:]


def reads_spans(name: str = "llama", is_native: bool = True, invariant: bool = False, cases=tuple(SPANS)) -> bool:
    """Whether two slots, each with spans of its own, get the logits that transformers gives them."""
    model, rng = tiny_model(name), random.Random(3)
    plain, runner = copy.deepcopy(model), ModelRunner(wrap_model(model) if is_native else on_torch(model), 2, 128)
    assert runner.loaded.is_native == is_native
    if invariant:
        runner.use(replace(runner.settings, invariant=True))
    texts, trees = [prompt(LENGTH, 1), prompt(LENGTH, 2)], [random_tree(7, rng), random_tree(9, rng)]
    slots = [runner.cache.allocate() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        runner.extend_cache(slot, text)
    for case, other in zip(cases, cases[1:] + cases[:1], strict=True):
        spans = [SPANS[case], SPANS[other]]
        runner.spans_of = lambda slot, length, spans=spans: spans[slots.index(slot)]
        got = runner.forward(slots, TokenTree.of(tree.rows[0] for tree in trees))
        for row, (text, tree, one) in enumerate(zip(texts, trees, spans, strict=True)):
            if (got[row, : tree.num_nodes] - said(plain, text, tree, one)).abs().max() > 1e-4:
                return False
    return True


@native
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", pytest.param("deepseek_v2", marks=pytest.mark.more)])
def test_native_passes_read_their_spans(name):
    assert reads_spans(name)


@pytest.mark.parametrize("invariant", [False, True])
def test_torch_reads_its_spans(invariant):
    assert reads_spans(is_native=False, invariant=invariant)


def test_a_mask_without_spans_is_seen(monkeypatch):
    visible = PassLayout._visible
    monkeypatch.setattr(PassLayout, "_visible", lambda self, row, window: visible(replace(self, spans=()), row, window))
    assert not reads_spans(is_native=False)


@native
@pytest.mark.parametrize("form", [None, "int8"])
def test_what_is_read_decides_the_bits(form):
    """Everything in any number of spans has the bits of a pass without spans; a tree those of its chains."""
    model = wrap_model(tiny_model("llama", torch.bfloat16))
    runner, rng = ModelRunner(model if form is None else with_kv_cache(model, form), 2, 128), random.Random(1)
    slots, tree = [runner.cache.allocate(), runner.cache.allocate()], random_tree(9, rng)
    for slot in slots:
        runner.extend_cache(slot, prompt(LENGTH, 4))
    whole = runner.forward(slots[:1], tree)
    for spans in ([(0, LENGTH)], [(0, 7), (7, 7), (7, 33), (33, LENGTH)], [(0, 0), (0, LENGTH)]):
        runner.spans_of = lambda slot, length, spans=spans: spans
        assert torch.equal(whole, runner.forward(slots[:1], tree))
    runner.spans_of = lambda slot, length: [(0, 4), (30 - slot, length)]
    own = runner.forward(slots[:1], tree)[0]
    both = runner.forward(slots, TokenTree.of([tree.rows[0]] * 2))
    assert torch.equal(own, both[0])
    assert not torch.equal(own, both[1])
    runner.spans_of = lambda slot, length: [(0, 4), (30, LENGTH)]
    for path in tree.rows[0].paths:
        chain = TokenTree.chain([tree.token_ids[0, path].tolist()])
        assert torch.equal(own[path], runner.forward(slots[:1], chain)[0])


@native
def test_layers_with_a_window_read_that():
    runner = ModelRunner(wrap_model(tiny_model("mistral")), 1, 128)
    slot, tree = runner.cache.allocate(), random_tree(9, random.Random(2))
    runner.extend_cache(slot, prompt(LENGTH, 4))
    whole = runner.forward([slot], tree)
    runner.spans_of = lambda slot, length: [(0, 1), (length - 1, length)]
    assert torch.equal(whole, runner.forward([slot], tree))
