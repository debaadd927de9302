"""`Ratio` through the real loop: the distribution of three tokens, against every text scored by plain transformers."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from paceline import DraftModel, Ratio, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import Verifier
from paceline.engine.loop import SpeculativeDecoder
from paceline.policy import Fixed
from paceline.target import LoadedModel, ModelRunner
from tests.adversaries import RandomTrees, Wide
from tests.helpers import changed, generate, loaded, sequence
from tests.tiny import tiny_model

VOCAB, LENGTH, ROWS = 5, 3, 128
PROMPT = [1, 4, 0, 3]
FALSE_ALARM = 1e-6
"""Of one test, if the distribution is right; the seeds are fixed, so a test that passed once passes always."""
PARAMS = SamplingParams(temperature=0.9, max_tokens=LENGTH, ignore_eos=True)
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def target() -> LoadedModel:
    return loaded("llama", **SMALL)


def draft() -> LoadedModel:
    return loaded("llama", seed=3, **SMALL)


@cache
def joint_law() -> dict[tuple[int, ...], float]:
    """p(x1) p(x2|x1) p(x3|x1 x2) of every text, from the untouched forward pass at temperature 0.9."""
    found = {}
    plain = tiny_model("llama", **SMALL)
    for text in product(range(VOCAB), repeat=LENGTH):
        with torch.inference_mode():
            logits = plain(torch.tensor([[*PROMPT, *text]])).logits[0].double() / PARAMS.temperature
        steps = logits.log_softmax(-1)[len(PROMPT) - 1 :]
        found[text] = math.exp(sum(float(steps[i, token]) for i, token in enumerate(text)))
    assert abs(sum(found.values()) - 1) < 1e-6
    return found


def sample(drafter, verifier: Verifier, count: int, depth: int = 2) -> Counter:
    on = ModelRunner(target(), ROWS)
    decoder = SpeculativeDecoder(on, drafter, verifier, Fixed(depth, 64))
    seqs = [sequence(target(), PROMPT, PARAMS, seed) for seed in range(count)]
    for _ in generate(decoder, seqs):
        pass
    return Counter(tuple(seq.output_ids) for seq in seqs)


def p_value(counts: Counter) -> float:
    """Of Pearson's chi-square; texts expected fewer than 5 times share a bin."""
    total = sum(counts.values())
    bins: list[list[float]] = [[0.0, 0.0]]
    for text, p in joint_law().items():
        if p * total >= 5:
            bins.append([counts[text], p * total])
        else:
            bins[0][0] += counts[text]
            bins[0][1] += p * total
    bins = [b for b in bins if b[1] > 0]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "drafter",
    [lambda: DraftModel(draft()), lambda: RandomTrees(tokens=range(VOCAB)), Wide],
    ids=["draft model", "random trees", "every token"],
)
def test_joint_law(drafter):
    assert p_value(sample(drafter(), Ratio(), 300)) > FALSE_ALARM


@pytest.mark.slow
def test_joint_law_of_many():
    assert p_value(sample(DraftModel(draft()), Ratio(), 20000)) > FALSE_ALARM


class SoftArgmax(DraftModel):
    """Mutant: the most probable tokens, handed over with the soft distribution they were not drawn from."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        if made.q is None:
            return made
        best = made.q[:, :-1].argmax(-1).tolist()
        tokens = [[ids[0], *row[: len(ids) - 1]] for ids, row in zip(made.tree.lists.token_ids, best, strict=True)]
        return replace(made, tree=changed(made.tree, token_ids=tokens))


class FlatLaw(DraftModel):
    """Mutant: q at another temperature than the tokens were drawn at."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        if made.q is None:
            return made
        flat = made.q**0.05
        return Draft(made.tree, made.law, flat / flat.sum(-1, keepdim=True).clamp(min=1e-9), made.source)


class ByRound(Verifier):
    """Mutant: noise keyed by the round, which here always stands for the same position."""

    name, lossless, exact = "by round", True, False

    def verify(self, draft, target, seeds, positions):
        return Ratio().verify(draft, target, seeds, [0] * len(positions))


@pytest.mark.parametrize(
    ("drafter", "verifier", "count"),
    [(SoftArgmax, Ratio, 200), (FlatLaw, Ratio, 500), (DraftModel, ByRound, 300)],
    ids=["argmax with soft q", "q of another temperature", "noise keyed by round"],
)
def test_mutants_are_caught(drafter, verifier, count):
    assert p_value(sample(drafter(draft()), verifier(), count)) < FALSE_ALARM
