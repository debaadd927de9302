"""Identity: the loop with `Coupled` gives plain decoding's tokens, whatever is drafted, at every temperature."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.core.draft import Draft, Law
from paceline.core.rng import Purpose, uniforms
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution
from paceline.verify import Coupled, Ratio, coupled
from tests.oracle import choose_token

pytestmark = pytest.mark.usefixtures("unchecked_types")  # thousands of walks
SIZE, LENGTH, PROMPT = 8, 16, 3
TARGET = torch.randn(SIZE, SIZE, SIZE, generator=torch.Generator().manual_seed(4)) * 1.5  # [two back, one back, next]
SEEDS = [11, -12]
TEMPERATURES = [0.0, 0.3, 0.7, 1.0, 1.5]
SHAPES = [(), (1,), (1, 1, 1, 1), (2, 1, 1), (3, 2)]

Logits = Callable[[list[int]], Tensor]
"""The tokens so far -> scores of the next [V]."""


def target_scores(path: list[int]) -> Tensor:
    scores = TARGET[path[-2], path[-1]].clone()
    scores[path[-1]] -= len(path) % 3  # a penalty: the distribution depends on the position too
    if len(path) % 5 == 0:
        scores[0] = -torch.inf  # a ban
    return scores


def shared(logits: Logits) -> Callable[..., list[int]]:
    """A drafter that draws from its own distribution with the target's noise, then offers the next most probable."""

    def propose(path: list[int], width: int, seed: int, temperature: float) -> list[int]:
        scores = logits(path)
        first = draw(scores, seed, len(path), temperature)
        others = [token for token in scores.argsort(descending=True).tolist() if token != first]
        return [first, *others][:width]

    return propose


def at_random(path: list[int], width: int, seed: int, temperature: float) -> list[int]:
    numbers = uniforms(torch.tensor([seed]), torch.tensor([[len(path)]]), Purpose.DRAFT, SIZE)[0, 0]
    return numbers.argsort()[:width].tolist()


DRAFTERS = {
    "the target": shared(target_scores),
    "uniform noise": at_random,
    "the least likely tokens": lambda path, width, *_: target_scores(path).argsort()[:width].tolist(),
    "one constant token": lambda path, width, *_: [5] * width,
    "the target with permuted tokens": shared(lambda path: target_scores(path).roll(1)),
    "a blurred target": shared(lambda path: target_scores(path) * 0.6),
}


def draw(scores: Tensor, seed: int, position: int, temperature: float) -> int:
    target = TargetDistribution(scores[None, None] / (temperature or 1), [temperature == 0])
    return int(choose_token(target, torch.tensor([seed]), torch.tensor([[position]])))


def plain(seed: int, temperature: float) -> list[int]:
    path = [1, 2, 3]
    for _ in range(LENGTH):
        path.append(draw(target_scores(path), seed, len(path), temperature))
    return path


def drafted(path: list[int], propose, shape: tuple[int, ...], seed: int, temperature: float):
    """Tokens, parents and paths of a tree; each level's first node carries the next level."""
    tokens, parents, paths, level = [path[-1]], [-1], [path], [0]
    for depth, width in enumerate(shape):
        below: list[int] = []
        for node in level if depth < 2 else level[:1]:
            for token in propose(paths[node], width, seed, temperature):
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                paths.append([*paths[node], token])
        level = below
    return tokens, parents, paths


def speculate(verifier, propose, shape, temperatures: list[float]) -> tuple[list[list[int]], list[float]]:
    """A ragged batch, one row per seed and temperature; also the fraction of the depth accepted, round by round."""
    rows = [(seed, temperature) for temperature in temperatures for seed in SEEDS]
    texts = [[1, 2, 3] for _ in rows]
    rates: list[float] = []
    while any(len(text) < PROMPT + LENGTH for text in texts):
        trees = [drafted(text, propose, shape, *row) for text, row in zip(texts, rows, strict=True)]
        tree = TokenTree.from_lists([tokens for tokens, _, _ in trees], [parents for _, parents, _ in trees])
        scores = torch.full((len(rows), tree.num_nodes, SIZE), torch.nan)  # the padding is never read
        for index, (_, _, paths) in enumerate(trees):
            scores[index, : len(paths)] = torch.stack([target_scores(path) for path in paths]) / (rows[index][1] or 1)
        target = TargetDistribution(scores, [temperature == 0 for _, temperature in rows])
        walks = verifier.verify(Draft(tree), target, [seed for seed, _ in rows], [len(text) for text in texts])
        for index, text in enumerate(texts):
            path, token, _ = walks[index]
            text += [trees[index][0][node] for node in path]
            text.append(token)
            rates += [len(path) / len(shape)] if shape else []
    return [text[: PROMPT + LENGTH] for text in texts], rates


PLAIN = [plain(seed, temperature) for temperature in TEMPERATURES for seed in SEEDS]


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_of_plain_decoding(name: str, shape: tuple[int, ...]) -> None:
    texts, rates = speculate(Coupled(), DRAFTERS[name], shape, TEMPERATURES)
    assert texts == PLAIN
    if name == "the target":
        assert set(rates) <= {1.0}


def test_seeds_and_temperatures_give_different_texts() -> None:
    """Identity would prove little if every row held the same text."""
    greedy, sampled = PLAIN[: len(SEEDS)], PLAIN[len(SEEDS) :]
    assert all(text == greedy[0] for text in greedy)
    assert len({tuple(text) for text in sampled}) == len(sampled)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2)])
def test_whole_tree_at_once_is_the_same(shape: tuple[int, ...]) -> None:
    assert speculate(Coupled(whole_tree=True), DRAFTERS["a blurred target"], shape, TEMPERATURES)[0] == PLAIN


def test_ratio_is_greedy_in_the_limit() -> None:
    """At T = 0, and at T = 1e-6 without the greedy flag, the ratio rules give greedy decoding's tokens."""
    greedy = PLAIN[: len(SEEDS)]
    for temperature in (0.0, 1e-6):
        for name in DRAFTERS:
            assert speculate(Ratio(), DRAFTERS[name], (2, 1), [temperature])[0] == greedy
    assert speculate(Coupled(), DRAFTERS["uniform noise"], (2, 1), [1e-6])[0] == greedy


def shifted(call):
    """Noise off by one position: in verification, not in plain decoding."""

    def wrong(target, seeds, places):
        return call(target, seeds, [(row, node, position + 1) for row, node, position in places])

    return wrong


def rowless(call):
    """Every row takes the first row's noise."""

    def wrong(target, seeds, places):
        return call(target, seeds[:1] * len(seeds), places)

    return wrong


def depthless(call):
    """The noise of the round's first position at every depth."""
    starts: dict[int, int] = {}

    def wrong(target, seeds, places):
        held = [(row, node, starts.setdefault(seeds[row], position)) for row, node, position in places]
        return call(target, seeds, held)

    return wrong


def greedy_only(call):
    """Greedy verification while the user asked to sample."""

    def wrong(target, seeds, places):
        return call(replace(target, is_greedy=[True] * len(seeds)), seeds, places)

    return wrong


def other_stream(call):
    """Noise drawn afresh, by another purpose."""

    def wrong(target, seeds, places):
        return call(target, [seed ^ 1 for seed in seeds], places)

    return wrong


@pytest.mark.parametrize("mutant", [shifted, rowless, depthless, greedy_only, other_stream])
def test_mutant_loses_identity(monkeypatch, mutant) -> None:
    monkeypatch.setattr(coupled, "choose_tokens", mutant(coupled.choose_tokens))
    texts, _ = speculate(Coupled(), DRAFTERS["uniform noise"], (2, 1), TEMPERATURES[2:4])
    assert texts != PLAIN[2 * len(SEEDS) : 4 * len(SEEDS)]


def test_uniform_draft_is_accepted_as_often_as_it_should() -> None:
    """Under the ratio rule sum of min(p, 1/V), exactly: here over 400 seeds, within five standard errors."""
    count, p = 400, TARGET[1, 2].softmax(0)
    tokens = uniforms(torch.arange(count), torch.zeros(count, 1, dtype=torch.long), Purpose.DRAFT, 1)[:, 0, 0]
    tree = TokenTree.chain([[0, int(u * SIZE)] for u in tokens])
    draft = Draft(tree, Law.IID, torch.full((count, 2, SIZE), 1 / SIZE))
    target = TargetDistribution(TARGET[1, 2].expand(count, 2, -1), [False] * count)
    walks = Ratio().verify(draft, target, range(count), [0] * count)
    rate = float(p.clamp(max=1 / SIZE).sum())
    error = (rate * (1 - rate) / count) ** 0.5
    assert abs(sum(len(walk.path) for walk in walks) / count - rate) < 5 * error
