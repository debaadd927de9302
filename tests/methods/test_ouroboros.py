"""Ouroboros against the paper, done slowly: both models pass over plain text, phrases are in one list."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline import Coupled, DraftModel, Fixed, Ouroboros, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.core.nodes import Tree
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods import ouroboros
from paceline.methods.draft_model import chain
from paceline.methods.ngram_pool import NgramPool
from paceline.sampling.draft_sampler import DraftSampler
from paceline.target import ModelRunner
from paceline.verify import Ratio
from tests.attention.common import agree, held, prefilled
from tests.exactness.drafters import small_draft, twin
from tests.helpers import REPEATING, admit, loaded, prompt, reading_apart, runner, sequence, tokenizer
from tests.methods.test_lookahead import paths
from tests.methods.test_ngram_pool import Slow
from tests.tiny import tiny_model

N, K, DEPTH = 3, 2, 6
CHAIN = DEPTH - N + 1  # tokens of the draft model; two of suffix
GREEDY = SamplingParams(max_tokens=150)  # so that no draft is cut by what is left


@cache
def plain_model(is_draft: bool):
    return tiny_model("llama", torch.float32, 1, num_hidden_layers=1) if is_draft else tiny_model("llama")


@cache
def top_token(is_draft: bool, text: tuple[int, ...]) -> int:
    with torch.inference_mode():
        return plain_model(is_draft).eval()(torch.tensor([text])).logits[0, -1].argmax().item()


def steps(drafter, ids=REPEATING, params=GREEDY, rounds=12, depth=DEPTH):
    """The text before each round, the tree that was drafted, and the runner and the sequence after it."""
    trees, observe = [], drafter.observe
    drafter.observe = lambda seqs, draft, *rest: (trees.append(draft.tree), observe(seqs, draft, *rest))
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(loaded(), 2)), drafter, Coupled(), Fixed(depth, 40))
    seq = sequence(loaded(), ids, params)
    admit(decoder, seq)
    for _ in range(rounds):
        text = list(seq.token_ids)
        decoder.step([seq])
        yield text, trees[-1], seq
        if seq.is_finished:
            break
    decoder.release(seq)


def is_as_in_the_paper(seed: int = 0) -> bool:
    """With seed 0 there are suffixes and recycled phrases."""
    ids = REPEATING + prompt(6, seed) + REPEATING
    pool, read, seen = Slow(K, 1000), 0, set[str]()
    for text, tree, seq in steps(Ouroboros(DraftModel(small_draft()), N, K), ids):
        if seq.is_finished:
            break
        while read + N <= len(text):
            pool.add(tuple(text[read : read + N]))
            read += 1
        chain = tuple[int, ...]()
        while len(chain) < CHAIN:
            chain += (top_token(True, (*text, *chain)),)
        branches = [chain + phrase for phrase in pool.after(chain[-1])]
        if paths(tree) != set(branches or [chain]):
            return False
        prefixes = [path[:end] for path in [chain, *branches] for end in range(len(path) + 1)]
        for start in dict.fromkeys(prefixes):
            gram, path = (*text, *start)[-1:], start
            while path in prefixes and len(gram) < N:
                gram += (top_token(False, (*text, *path)),)
                path += gram[-1:]
            if len(gram) == N:
                pool.add(gram)
                seen |= {"recycled"} if start else set()
        seen |= {"suffix"} if branches else set()
    return seed > 0 or seen == {"recycled", "suffix"}


@pytest.mark.parametrize("seed", range(3))
def test_it_drafts_what_the_paper_drafts(seed):
    assert is_as_in_the_paper(seed)


def as_drafted(pool, tree, top_tokens):
    """Phrases of what was drafted, confirmed or not."""
    pool.read(tree.token_ids, 0)


def nothing(*_):
    """Rejected tokens are thrown away."""


def behind_the_root(ids, parents, phrases, *sizes):
    """The suffix hangs below the root of the chain."""
    count = len(ids)
    add_branches(ids, parents, phrases, *sizes)
    parents[count:] = [0 if up == count - 1 else up for up in parents[count:]]


recycle, add_branches = ouroboros.recycle, ouroboros.add_branches
MUTANTS = {"recycle": as_drafted, "recycle ": nothing, "add_branches": behind_the_root}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(monkeypatch, name):
    monkeypatch.setattr(ouroboros, name.strip(), MUTANTS[name])
    assert not is_as_in_the_paper()


def test_recycling_as_in_the_figure():
    """R 0, x1 to x5 1 to 5, z 9; the target says 8 behind r and x1, and 3 4 9 behind x2 x3 x4."""
    pool = NgramPool(4, 4, 100)
    tree = Tree.of([0, 1, 2, 3, 4, 5, 3], [-1, 0, 1, 2, 3, 4, 2], [False] * 6 + [True])
    recycle(pool, tree, [8, 8, 3, 4, 9, 7, 4])
    assert [(key, pool.after(key)) for key in range(6) if pool.after(key)] == [(2, [(3, 4, 9)])]


def passes_and_drafts(drafter, temperature: float, verifier=Coupled, known=()) -> tuple[int, list[list[int]]]:
    """Passes of the draft model for one draft of two texts; the last token of each, and six drafted ones, no suffix.

    known: texts whose phrases are in the pool.
    """
    params = SamplingParams(temperature=temperature, max_tokens=60)
    drafter.bind(ModelRunner(loaded(), 2), verifier())
    for text in known:
        drafter.pool.read(text, 0)
    inner, passes = getattr(drafter, "draft", drafter).runner, []
    forward = inner.forward
    inner.forward = lambda *given: (passes.append(1), forward(*given))[1]
    seqs = [sequence(loaded(), ids, params) for ids in (prompt(30), REPEATING)]
    for slot, seq in enumerate(seqs):
        seq.slot = slot
    tree = drafter.propose(seqs, [DraftBudget(9, 40)] * 2).tree
    return len(passes), [row[:7] for row in tree.lists.token_ids]


def with_right_phrases(temperature: float, verifier=Coupled):
    """The plain drafts, and passes and drafts with phrases of them: in the second text they come one token later."""
    _, drafted = passes_and_drafts(DraftModel(small_draft()), temperature, verifier)
    known = [drafted[0], drafted[1][1:]]
    return drafted, *passes_and_drafts(Ouroboros(DraftModel(small_draft()), 4), temperature, verifier, known)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", [Coupled, Ratio])
def test_phrases_save_passes_of_the_draft_model_and_change_nothing(verifier, temperature):
    drafted, passes, same = with_right_phrases(temperature, verifier)
    assert (same, passes) == (drafted, 3)


def test_without_phrases_no_pass_is_saved(monkeypatch):
    """The mutant of the test above; six tokens are the draft model's, three a suffix."""
    monkeypatch.setattr(chain, "add_branches", lambda *_: {})
    assert with_right_phrases(0.0)[1] == 6


class AnyChild(dict):
    """The first phrase below a node is taken, whatever the draft model says there."""

    def get(self, key, default=None):
        return next((node for (parent, _), node in self.items() if parent == key[0]), default)


def without_agreement(*phrases):
    return AnyChild(add_branches(*phrases))


def the_node_before(*phrases):
    """The logits of the node beside the one that the draft model confirmed."""
    return {key: node - 1 for key, node in add_branches(*phrases).items()}


def the_row_beside(chains, own):
    """The logits of the neighbour in the batch."""
    return logits(chains, own.roll(1, 0))


def the_first_offset(sampler, own, seqs, offsets):
    """Each row takes the random number of the first row's position."""
    return sample(sampler, own, seqs, [offsets[0]] * len(offsets))


logits, sample = chain.Chains.logits, DraftSampler.sample
PHRASE_MUTANTS = [
    (chain, "add_branches", without_agreement),
    (chain, "add_branches", the_node_before),
    (chain.Chains, "logits", the_row_beside),
    (DraftSampler, "sample", the_first_offset),
]


@pytest.mark.parametrize("mutant", PHRASE_MUTANTS, ids=lambda mutant: mutant[2].__name__)
def test_a_pass_that_goes_on_wrongly_is_caught(monkeypatch, mutant):
    make = Ouroboros.propose
    monkeypatch.setattr(Ouroboros, "propose", lambda *given: (monkeypatch.setattr(*mutant), make(*given))[1])
    drafted, _, other = with_right_phrases(1.0)
    assert other != drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [small_draft, lambda: twin(loaded())])
def test_the_draft_cache_holds_a_prefix_of_the_text(make, temperature):
    drafter = Ouroboros(DraftModel(make()), N)
    for _, _, seq in steps(drafter, params=SamplingParams(temperature=temperature, max_tokens=40)):
        on = drafter.draft.runner
        cached = on.cache.lengths[seq.slot]
        assert 0 < cached < len(seq.token_ids)
        assert agree(held(on, seq.slot), prefilled(on.loaded, seq.token_ids[:cached]))


def test_the_pool_outlives_requests_and_the_drafter(tmp_path):
    drafter = Ouroboros(DraftModel(small_draft()), N)
    for _ in steps(drafter):
        pass
    count = len(drafter.pool)
    assert count > len(REPEATING)
    drafter.save(tmp_path / "pool.json")
    other = Ouroboros(DraftModel(small_draft()), N, pool_size=count - 3, pool_file=tmp_path / "pool.json")
    other.bind(runner(loaded()), Coupled())
    assert len(other.pool) == count - 3
    assert other.pool.after(REPEATING[-1])
    with pytest.raises(ConfigError, match="4 token ids"):
        Ouroboros(DraftModel(small_draft()), 4, pool_file=tmp_path / "pool.json").bind(runner(loaded()), Coupled())


def test_a_pool_of_another_tokenizer_is_refused(tmp_path):
    def bound(shift: int, **options) -> Ouroboros:
        draft, target = (replace(one, tokenizer=tokenizer(shift)) for one in (small_draft(), loaded()))
        made = Ouroboros(DraftModel(draft), N, **options)
        made.bind(runner(target), Coupled())
        return made

    bound(0).save(path := tmp_path / "pool.json")
    bound(0, pool_file=path)
    with pytest.raises(IncompatibleModels, match="another tokenizer"):
        bound(5, pool_file=path)


WRONG_BODIES = [None, {}, [[1, 2]], [[1, 2, -3]], [[1, 2, "3"]], [1, 2, 3]]


@pytest.mark.parametrize("ngrams", WRONG_BODIES, ids=str)
def test_a_file_that_is_no_pool_is_refused(tmp_path, ngrams):
    drafter = Ouroboros(DraftModel(small_draft()), 3)
    drafter.bind(runner(loaded()), Coupled())
    drafter.save(path := tmp_path / "pool.json")
    body = json.loads(path.read_text())
    for text in (json.dumps(body | {"ngrams": ngrams}), json.dumps(ngrams), ""):
        path.write_text(text)
        with pytest.raises(ConfigError):
            Ouroboros(DraftModel(small_draft()), 3, pool_file=path).bind(runner(loaded()), Coupled())


def test_a_token_that_the_draft_model_lacks_is_in_no_phrase():
    pool = NgramPool(3, 2, 10, vocab_size=50)
    pool.read([1, 2, 3, 50, 4, 5, 6], 0)
    assert len(pool) == 2


WRONG = {"ngram": (1, 17), "phrases": (0, 17), "pool_size": (0, 1 << 21), "pool_file": (3,)}


@pytest.mark.parametrize("wrong", [{key: value} for key, values in WRONG.items() for value in values], ids=str)
def test_what_is_refused(wrong):
    with pytest.raises(ConfigError):
        Ouroboros(DraftModel("small"), **wrong)
