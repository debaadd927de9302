"""With invariant numerics, candidates before mask tokens have the bits of plain decoding; so the answers do too."""

import random
from functools import cache

import pytest
import torch

from paceline import Coupled, SamplingParams
from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, ModelRunner, make_runner, wrap_model
from tests.adversaries import Adversary, Nodes
from tests.attention.common import held
from tests.helpers import VOCAB, on_torch, oracle, prompt, result, run, sequence
from tests.kernels.test_passes import rows
from tests.methods.space.common import adapter, hung, hung_chain
from tests.tiny import tiny_model

K = 5
WIDE = {"hidden_size": 256, "intermediate_size": 688, "head_dim": 64, "max_position_embeddings": 512}
"""Large enough that a matrix product has several kernels to choose from."""
KINDS = [
    ("llama", torch.float32),
    ("torch llama", torch.float32),
    ("llama", torch.bfloat16),
    ("qwen2-sliding", torch.float32),
    ("gemma3", torch.float32),
]
"""The last has a window too, and layers as transformers has them: masks reach it through `inputs_embeds`."""
BRANCHING = [5, 9, 31, 7, 9, 40], [-1, 0, 1, 0, 3, 3]


@cache
def target(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = tiny_model(name.split()[-1], dtype, **WIDE)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(0.3)  # or attention picks one column, and no order of sums shows
    return on_torch(model) if name.startswith("torch ") else wrap_model(model)


@cache
def attached(name: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    runner = make_runner(target(name, dtype), 3, invariant=True)
    runner.attach_adapter(adapter(name.split()[-1], K, strength=0.1, **WIDE))
    return runner


def same_bits(runner: ModelRunner, lengths: list[int], tree: TokenTree) -> bool:
    """Whether every candidate of a tree has the bits of plain decoding, behind texts of these lengths."""
    texts = [prompt(length, seed=length) for length in lengths]
    slots = [runner.admit(text) for text in texts]
    try:
        for slot, text in zip(slots, texts, strict=True):
            runner.extend_cache(slot, text)
        expected = []
        for row, slot in enumerate(slots):
            for node in range(tree.num_nodes):
                if not tree.is_probe[row, node]:
                    path = [0, *tree.path_to(row, node)]
                    expected.append(rows(runner, slot, [int(tree.token_ids[row, i]) for i in path])[-1])
        logits = runner.forward(slots, tree)
        return torch.equal(logits[~tree.is_probe], torch.stack(expected))
    finally:
        for slot in slots:
            runner.cache.release(slot)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [3, 40, 59, 61, 63, 64, 127])
def test_chains_before_masks(kind, length):
    assert same_bits(attached(*kind), [length], hung_chain([[5, 9, 31, 7, 9, 40]], [K]))
    assert same_bits(attached(*kind), [length], hung_chain([[5]], [K]))


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [3, 60, 62, 127])
def test_branching_trees_before_masks(kind, length):
    assert same_bits(attached(*kind), [length], hung([BRANCHING[0]], [BRANCHING[1]], [K]))


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_rows_of_a_batch(kind):
    assert same_bits(attached(*kind), [60, 5, 130], hung_chain([[5, 9, 31, 7], [8], [7, 4, 50]], [4, 5, 0]))
    tokens, parents = [BRANCHING[0], [8, 3, 3], [6]], [BRANCHING[1], [-1, 0, 0], [-1]]
    assert same_bits(attached(*kind), [62, 5, 130], hung(tokens, parents, [2, 0, 5]))


def test_what_the_bits_rest_on(monkeypatch):
    runner, tree = attached("torch llama"), hung([BRANCHING[0]], [BRANCHING[1]], [K])
    monkeypatch.setattr(runner, "invariant", False)  # one call for all nodes, as with fast numerics
    assert not all(same_bits(runner, [length], tree) for length in (60, 62, 127))


class Hangs(Adversary):
    """Some tokens of the answer, some wrong ones, then K masks below each: a chain, or with a wrong sibling a tree."""

    def __init__(self, answers: dict[int, list[int]], branches: bool = False):
        self.answers, self.wide, self.rng = answers, branches, random.Random(0)

    def nodes(self, seq, budget) -> Nodes:
        nodes: Nodes = []
        if not budget.nodes:
            return nodes
        depth = self.rng.randint(0, budget.depth)
        known = self.answers[seq.prompt_ids[0]][seq.num_output : seq.num_output + depth]
        up = 0
        for index, token in enumerate(known):
            wrong = self.rng.random() < 0.2
            nodes.append(((token + 1) % VOCAB if wrong else token, up, False))
            up = len(nodes)
            if self.wide and index == 0:
                nodes.append(((token + 2) % VOCAB, 0, False))
        for node in range(len(nodes) + 1):
            for mask in range(self.rng.randint(0, K)):
                nodes.append((VOCAB + mask, len(nodes) if mask else node, True))
        return nodes


PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.8, repetition_penalty=1.3, logprobs=2),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"{p.temperature}-{p.repetition_penalty}")
def test_answers_in_the_loop(params, branches):
    runner, prompts = attached("llama", torch.float32), [prompt(n, seed=n) for n in (9, 61, 30)]
    expected = [oracle(runner.loaded, ids, params) for ids in prompts]
    answers = {ids[0]: seq.output_ids for ids, seq in zip(prompts, expected, strict=True)}
    assert len(answers) == 3
    seqs = [sequence(runner.loaded, ids, params) for ids in prompts]
    done = run(runner, Hangs(answers, branches), seqs, depth=K, nodes=99, verifier=Coupled())
    assert [result(seq) for seq in done] == [result(seq) for seq in expected]
    assert any(record.num_accepted > 1 for seq in done for record in seq.rounds)


def test_the_context_ends_and_the_cache_grows():
    """(k + 1)^2 rows reach past the context and past the columns there are; what is committed keeps its bits."""
    for limit, length in ((64, 58), (512, 250), (512, 505)):
        runner = make_runner(target("llama", torch.float32), 2, limit, invariant=True)
        runner.attach_adapter(adapter("llama", K, strength=0.1, **WIDE))
        slot = runner.admit(prompt(length))
        runner.extend_cache(slot, prompt(length))
        before = held(runner, slot)
        tree = hung_chain([[5, 9, 31, 7, 9, 40]], [K])
        expected = rows(runner, slot, [5, 9, 31, 7, 9, 40])
        logits = runner.forward([slot], tree)[0]
        assert torch.isfinite(logits).all()
        assert torch.equal(logits[:6], expected)
        assert all(torch.equal(a, b) for a, b in zip(held(runner, slot), before, strict=True))
        runner.commit([slot], [[1, 2, 3]])
        assert runner.cache.lengths[slot] == length + 4
        again = rows(runner, slot, [9, 40])
        assert torch.equal(again, expected[4:])


def test_masks_left_in_the_cache_would_show(monkeypatch):
    """The check above can fail: one column too many is kept."""
    runner = attached("llama", torch.float32)
    slot = runner.admit(prompt(20))
    runner.extend_cache(slot, prompt(20))
    expected = rows(runner, slot, [5, 9])
    runner.forward([slot], hung_chain([[5]], [K]))
    runner.commit([slot], [[1]])
    assert not torch.equal(rows(runner, slot, [9])[0], expected[1])
    runner.cache.release(slot)


def test_static_passes_take_no_masks(monkeypatch):
    runner = ModelRunner(target("torch llama"), 1, static=True)
    slot = runner.admit(prompt(20))
    runner.extend_cache(slot, prompt(20))
    tree, plain = hung_chain([[5, 9]], [2]), TokenTree.chain([[5, 9]])
    before = runner.forward([slot], plain)
    runner.attach_adapter(adapter("llama", 2, strength=0.1, **WIDE))
    runs = runner.static.num_runs
    assert torch.equal(runner.forward([slot], plain), before)
    assert runner.static.num_runs == runs + 1
    assert torch.allclose(runner.forward([slot], tree)[:, :2], before, atol=1e-4)
    assert runner.static.num_runs == runs + 1
