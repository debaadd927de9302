"""Lookahead against the paper, done slowly: every guess of the window by a pass of its own over plain text."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from paceline import Coupled, Fixed, Lookahead, SamplingParams
from paceline.config import parse
from paceline.core.interfaces import DraftBudget
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError
from paceline.methods import lookahead
from paceline.target import ModelRunner
from tests.helpers import REPEATING, admit, loaded, reading_apart, run, runner, sequence
from tests.tiny import tiny_model

GREEDY = SamplingParams(max_tokens=24)
SIZES = {"paper": (3, 4, 2), "bigrams": (4, 2, 3), "one column": (1, 3, 2), "one guess": (5, 3, 1)}
Path = tuple[int, ...]


@dataclass
class Slow:
    """The paper's algorithm with lists: positions are places in `text + path`, the mask is what the path leaves out."""

    W: int
    N: int
    G: int
    first_row: list[int]
    rows: list[list[int]] = field(default_factory=list)
    pool: list[Path] = field(default_factory=list)  # the newest last

    def __post_init__(self):
        self.rows = [self.first_row]

    def add(self, gram):
        gram = tuple(gram)
        self.pool = [one for one in self.pool if one != gram] + [gram]
        same = [one for one in self.pool if one[0] == gram[0]]
        if len(same) > self.G:
            self.pool.remove(same[0])

    def candidates(self, text: list[int]) -> list[Path]:
        return [gram[1:] for gram in reversed(self.pool) if gram[0] == text[-1]]

    def step(self, text: list[int]):
        """One Jacobi iteration beside the pass that follows `text`."""
        self.rows[0][0] = text[-1]
        new = []
        for j in range(len(self.rows[0])):
            path = self.rows[0][1 : j + 1] + [row[j] for row in self.rows[1:]]
            new.append(top_token([*text, *path]))
        if len(self.rows) < self.N - 1:
            self.rows = [row[1:] for row in [*self.rows, new]]
            return
        for j in range(self.W):
            self.add([*(row[j] for row in self.rows), new[j]])
        self.rows = [*self.rows[1:], new]


def top_token(text: list[int]) -> int:
    with torch.inference_mode():
        return plain_model()(torch.tensor([text])).logits[0, -1].argmax().item()


@cache
def plain_model():
    return tiny_model("llama", torch.float32, 0).eval()


def paths(tree: TokenTree) -> set[Path]:
    """The candidates from the root to each leaf."""
    ids, ups, probes = (rows[0] for rows in tree.lists)
    nodes = [node for node in range(1, len(ids)) if not probes[node]]
    leaves = [node for node in nodes if node not in [ups[other] for other in nodes]]
    return {tuple(ids[node] for node in tree.rows[0].path_to(leaf)) for leaf in leaves}


def rounds(drafter: Lookahead, params: SamplingParams) -> list[tuple[list[int], TokenTree]]:
    """The text before each round and the tree that was drafted behind it."""
    seen, observe = [], drafter.observe
    drafter.observe = lambda seqs, draft, logits, walks: (
        seen.append((seqs[0].token_ids[: -seqs[0].rounds[-1].num_emitted], draft.tree)),
        observe(seqs, draft, logits, walks),
    )
    run(reading_apart(ModelRunner(loaded(), 1)), drafter, [sequence(loaded(), REPEATING, params)], 16)
    return seen


def is_as_in_the_paper(size: tuple[int, int, int], params: SamplingParams = GREEDY) -> bool:
    W, N, G = size
    drafted = rounds(Lookahead(*size), params)
    text, tree = drafted[0]
    chain = [token for token, is_probe in zip(tree.lists.token_ids[0], tree.lists.is_probe[0], strict=True) if is_probe]
    slow, read = Slow(W, N, G, [text[-1], *chain]), 0
    for text, tree in drafted[:-1]:  # the last one has no budget for a whole n-gram
        while read + N <= len(text):
            slow.add(text[read : read + N])
            read += 1
        expected = {path[: len(REPEATING) + params.max_tokens - len(text) - 1] for path in slow.candidates(text)}
        leaves = {one for one in expected if not any(o != one and o[: len(one)] == one for o in expected)}
        if paths(tree) != leaves:
            return False
        slow.step(text)
    return True


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_it_drafts_what_the_paper_drafts(size, temperature):
    assert is_as_in_the_paper(size, SamplingParams(max_tokens=24, temperature=temperature))


def cut_off(ids, parents, rows):
    """The columns hang below the root: a guess does not see the columns of row 0."""
    ends = add_window(ids, parents, rows)
    for end in ends if len(rows) > 1 else ():
        parents[end - len(rows) + 2] = 0
    return ends


def stuck(rows, last, pool):
    """Nothing moves on: the window keeps its oldest row."""
    return rows if len(rows) == pool.ngram - 1 else next_rows(rows, last, pool)


def unshifted(rows, last, pool):
    """A new row is taken for one place earlier than it is."""
    return [row[:-1] for row in [*rows, last]] if len(rows) < pool.ngram - 1 else next_rows(rows, last, pool)


add_window, next_rows = lookahead.add_window, lookahead.next_rows
MUTANTS = {"add_window": cut_off, "next_rows": stuck, "next_rows ": unshifted}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_window_is_caught(monkeypatch, name):
    monkeypatch.setattr(lookahead, name.strip(), MUTANTS[name])
    assert not is_as_in_the_paper(SIZES["paper"])


def test_the_window_of_the_figure():
    """The example of the module: c 0, a 1 2, b 3 4 5, d 6 7 8."""
    ids, parents = [0], [-1]
    assert lookahead.add_window(ids, parents, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]) == [4, 6, 8]
    assert ids == [0, 1, 2, 3, 6, 4, 7, 5, 8]
    assert parents == [-1, 0, 1, 0, 3, 1, 5, 2, 7]
    assert TokenTree.from_lists([ids], [parents]).depth.tolist() == [[0, 1, 2, 1, 2, 2, 3, 3, 4]]


def bound(drafter: Lookahead, max_length: int | None = None) -> Lookahead:
    drafter.bind(runner(loaded(), 4, max_length), Coupled())
    return drafter


def test_no_budget_no_window():
    drafter = bound(Lookahead())
    seq = sequence(loaded(), REPEATING, GREEDY, slot=0)
    assert drafter.propose([seq], [DraftBudget(0, 0)]).tree.num_nodes == 1
    assert drafter.propose([seq], [DraftBudget(1, 1)]).tree.num_nodes > 2


def test_the_policy_is_told_how_many_rows_the_window_has():
    drafter = Lookahead(window=4, ngram=3)
    seq = sequence(loaded(), [*REPEATING, 7], GREEDY)  # 7 is followed by 44
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(loaded(), 1)), drafter, Coupled(), Fixed(2, 20))
    admit(decoder, seq)
    for _ in range(5):
        (look,) = drafter.draft_options(seq)
        decoder.step([seq])
        assert seq.rounds[-1].num_rows == 1 + seq.rounds[-1].num_nodes + look.probes
        assert look.hint == (0 if seq.rounds[-1].num_nodes else -1)
    assert look.probes == 4 * 2 - 1
    decoder.release(seq)


def test_the_window_stays_within_the_context():
    """Learned positions, as GPT-2 has them, end with the context."""
    target = loaded("gpt2")
    ids = (REPEATING * 20)[: target.context - 12]
    (seq,) = run(runner(target), Lookahead(), [sequence(target, ids, SamplingParams(max_tokens=100))])
    assert len(seq.token_ids) == target.context


@pytest.mark.parametrize("pool", ["request", "prompt", "shared"])
def test_what_a_pool_holds(pool):
    """The text 5 6 7 was seen in an earlier request, 8 9 10 in this prompt, 11 12 13 in the answer."""
    drafter = bound(Lookahead(ngram=3, pool=pool))
    for text, answer in (([5, 6, 7], []), ([8, 9, 10], [11, 12, 13])):
        seq = sequence(loaded(), text, GREEDY)
        seq.slot, seq.token_ids = 0, text + answer
        drafter.draft_options(seq)
        found = [first for first in (5, 8, 11) if drafter._states[0].pool.after(first)]
        drafter.release([0])
    assert found == {"request": [11], "prompt": [8, 11], "shared": [5, 8, 11]}[pool]
    assert not drafter._states


@pytest.mark.parametrize("pool", ["request", "prompt", "shared"])
def test_a_pool_keeps_the_newest_and_no_more_than_its_size(pool):
    drafter = bound(Lookahead(ngram=3, pool=pool, pool_size=4))
    for request in range(3):
        text = [10 * request + token for token in range(5, 15)]
        seq = sequence(loaded(), [1, 2], GREEDY)
        seq.slot, seq.token_ids = 0, [1, 2, *text]
        drafter.draft_options(seq)
        held = drafter._states[0].pool
        assert len(held) == 4
        assert [token for token in text if held.after(token)] == text[-6:-2]
        drafter.release([0])


WRONG = {"window": (0, 65, 2.0), "ngram": (1, 17), "guesses": (0, 65), "pool": ("all",), "pool_size": (0, 1 << 21)}


@pytest.mark.parametrize("wrong", [{key: value} for key, values in WRONG.items() for value in values], ids=str)
def test_what_is_refused(wrong):
    with pytest.raises(ConfigError):
        Lookahead(**wrong)
    ((option, value),) = wrong.items()
    with pytest.raises(ConfigError, match=option):
        parse(f"lookahead:{option}={value}")


def test_a_window_wider_than_the_context_is_refused():
    bound(Lookahead(window=11, ngram=5), max_length=16)
    with pytest.raises(ConfigError, match="wider than the context"):
        bound(Lookahead(window=12, ngram=5), max_length=16)
