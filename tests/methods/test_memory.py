"""What drafters without weights hold, against the bounds that `paceline doctor` tells."""

import tracemalloc
from collections.abc import Callable
from random import Random

import pytest

from paceline import Coupled, Lookahead, SamplingParams, TokenRecycling
from paceline.config import parse
from paceline.core.interfaces import Drafter
from paceline.core.request import TokenSequence
from paceline.measure.doctor import drafter_memory
from paceline.methods.suffix.corpus import CorpusIndex, write_index

VOCAB, LONG = 49152, 30_000
OF_TEXTS = ("lookup", "suffix", "lookahead")


class Target:
    """As much of a model as these drafters look at."""

    vocab_size, max_length, banned_token_ids = VOCAB, LONG, frozenset[int]()


def bound_of(name: str, slots: int, length: int) -> int:
    return next(one.total for one in drafter_memory(VOCAB, slots, length) if one.drafter == name)


def bound(drafter: Drafter) -> Drafter:
    drafter.bind(Target(), Coupled())  # pyright: ignore[reportArgumentType]
    return drafter


def made(name: str) -> Drafter:
    return bound(parse(name).build()[0])


def random_text(length: int, seed: int = 0) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "random": random_text,
    "two tokens": lambda length: [1000 + token % 2 for token in random_text(length)],
    "most states": lambda length: [1000] + [2000] * (length - 1),
    "most edges": lambda length: [1000] + [2000] * (length - 2) + [3000],
    "copied": lambda length: random_text(length // 4) * 4,
}


def held_by(drafter: Drafter, texts: list[list[int]], released: bool = False) -> int:
    """Bytes that it holds after it was asked about each text, in a slot of its own."""
    seqs = [TokenSequence(text, SamplingParams(), 0, frozenset(), LONG) for text in texts]
    tracemalloc.start()
    for slot, seq in enumerate(seqs):
        seq.slot = slot
        drafter.draft_options(seq)
        if released:
            drafter.release([slot])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


@pytest.mark.diagonal
@pytest.mark.parametrize("name", OF_TEXTS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_stay_within_the_bound(name, text):
    size = held_by(made(name), [TEXTS[text](3000), TEXTS[text](1500)])
    assert size <= bound_of(name, 2, 3000)
    assert text != "random" or size > bound_of(name, 2, 3000) / 8, "a bound that tells something"


@pytest.mark.parametrize("name", OF_TEXTS)
def test_a_long_prompt_stays_within_the_bound(name):
    assert held_by(made(name), [random_text(LONG)]) <= bound_of(name, 1, LONG)


@pytest.mark.parametrize("name", OF_TEXTS)
def test_nothing_of_many_requests_remains(name):
    assert held_by(made(name), [random_text(50, seed) for seed in range(300)], released=True) < 50_000


def test_a_shared_pool_stays_within_the_bound_of_one():
    texts = [random_text(50, seed) for seed in range(1000)]
    size = held_by(bound(Lookahead(pool="shared")), texts, released=True)
    assert bound_of("lookahead", 1, 50) / 2 < size <= bound_of("lookahead", 1, 50) + 50_000


def test_the_matrix_of_recycling_has_one_size():
    drafter = made("recycling")
    assert isinstance(drafter, TokenRecycling)
    assert drafter.successors.of_tenant("").nbytes == bound_of("recycling", 8, LONG)
    assert held_by(drafter, [random_text(50, seed) for seed in range(100)], released=True) < 50_000


def test_a_corpus_is_not_read_into_memory(tmp_path):
    text = random_text(100_000)
    write_index(tmp_path / "index", [text], "", lambda *_: None)
    tracemalloc.start()
    index = CorpusIndex(tmp_path / "index")
    assert index.context(text[500:530]).length == 30
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= peak < 2 * len(text)  # a token takes more than that
