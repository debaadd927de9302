"""Random operations on a runner with recurrent layers: every logit has the bits of decoding token by token."""

import random

import pytest
import torch

from paceline.attention.kv_cache import SlotCache
from paceline.attention.recurrent import RecurrentStates
from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, make_runner
from paceline.target.prefix_cache import PAGE, PrefixCache
from tests.helpers import loaded, prompt
from tests.tiny import NATIVE, RECURRENT

HYBRIDS = [name for name in RECURRENT if name in NATIVE]
SLOTS, LONGEST = 3, 120


class Plain:
    """Logits after texts, read token by token in a slot of its own."""

    def __init__(self, model: LoadedModel):
        self.on, self.known = make_runner(model, 1), dict[tuple[int, ...], torch.Tensor]()

    def __call__(self, text: list[int]) -> torch.Tensor:
        if tuple(text) not in self.known:
            slot = self.on.admit(text)
            for end, token in enumerate(text, 1):
                self.known[tuple(text[:end])] = self.on.forward([slot], TokenTree.chain([[token]]))[0, 0].clone()
                self.on.commit([slot], [[]])
            self.on.cache.release(slot)
        return self.known[tuple(text)]


class Operations:
    """A runner, the text that each slot holds, and random things that are done to them."""

    def __init__(self, name: str, seed: int):
        self.rng, model = random.Random(seed), loaded(name)
        self.plain, self.on = Plain(model), make_runner(model, SLOTS)
        self.texts = dict[int, list[int]]()
        self.wrong = self.compared = self.found = 0
        self.pool = [prompt(90, seed) for seed in range(2)]
        self.resize()

    def run(self, count: int) -> None:
        """So many operations, or until a logit is wrong."""
        kinds = (self.begin, self.begin, self.begin, self.tree, self.tree, self.extend, self.fused, self.tentative,
                 self.apart, self.truncate, self.uncommitted, self.keep, self.release, self.release)  # fmt: skip
        for _ in range(count):
            self.rng.choice(kinds)()
            if self.wrong:
                return
            if self.rng.random() < 0.02:
                self.resize()
            held = self.on.cache.recurrent
            assert held is not None
            for slot, text in self.texts.items():
                assert held.bases[slot] <= self.on.cache.lengths[slot] == len(text)

    def tokens(self, most: int, least: int = 1) -> list[int]:
        return [self.rng.randrange(3, 6) for _ in range(self.rng.randint(least, most))]

    def slots(self, room: int = 24) -> list[int]:
        """Some slots with room for this many tokens."""
        every = [slot for slot, text in self.texts.items() if len(text) + room < LONGEST]
        return self.rng.sample(every, self.rng.randint(min(1, len(every)), len(every)))

    def check(self, text: list[int], logits: torch.Tensor) -> None:
        self.compared += 1
        self.wrong += not torch.equal(self.plain(text), logits)

    def resize(self) -> None:
        self.on.prefixes.resize(self.rng.choice((0, 40_000, 200_000, 200_000, 1 << 30, 1 << 30)))

    def begin(self) -> None:
        """A new text, which may begin as others do; it is read in chunks, and others run in between."""
        if len(self.texts) == SLOTS:
            return
        shared = self.rng.choice(self.pool)[: self.rng.choice((1, PAGE, PAGE + 1, 2 * PAGE, 40, 5 * PAGE, 90))]
        text = shared + self.tokens(self.rng.choice((1, 2, 30)))
        self.on.chunk, defer = self.rng.choice((1, 5, PAGE, 23, 512)), self.rng.random() < 0.5
        slot = self.on.admit(text)
        self.found += self.on.restore_prefix(slot, text, None, defer)
        for _ in self.on.prefill_chunks(slot, text, None, defer):
            if self.rng.random() < 0.5:
                self.tree()
        left = text[self.on.cache.lengths[slot] : -1]
        self.texts[slot] = text[: self.on.cache.lengths[slot]]
        self.passed([slot], left, text[-1])
        self.commit()

    def passed(self, slots: list[int], text: list[int] | None = None, root: int | None = None) -> None:
        """A pass over random trees, to be committed."""
        text = text or []
        rows = [[root or self.tokens(1)[0], *self.tokens(9, 0)] for _ in slots]
        tree = TokenTree.from_lists(rows, [[-1, *(self.rng.randrange(n) for n in range(1, len(row)))] for row in rows])
        logits = self.on.forward(slots, tree, text)
        for slot in slots if text else ():
            self.texts[slot] = self.texts[slot] + text
        self.paths = dict[int, tuple[list[int], list[int]]]()
        for slot, row, tokens, own in zip(slots, tree.rows, rows, logits, strict=True):
            for node in self.rng.sample(range(len(row)), min(len(row), 3)):
                self.check(self.texts[slot] + [tokens[n] for n in (0, *row.path_to(node))], own[node])
            path = row.path_to(self.rng.randrange(len(row)))
            self.paths[slot] = path, [tokens[n] for n in (0, *path)]

    def commit(self) -> None:
        for slot, (path, tokens) in self.paths.items():
            self.on.commit([slot], [path])
            self.texts[slot] = self.texts[slot] + tokens

    def tree(self) -> None:
        if slots := self.slots():
            self.passed(slots)
            self.commit()

    def uncommitted(self) -> None:
        if slots := self.slots():
            self.passed(slots)

    def apart(self) -> None:
        """Two passes of other slots, and their commits after both."""
        if len(slots := self.slots()) > 1:
            self.passed(slots[:1])
            first = self.paths
            self.passed(slots[1:])
            self.paths |= first
            self.commit()

    def extend(self) -> None:
        for slot in self.slots(40)[:1]:
            self.on.chunk, text = self.rng.choice((1, 7, 512)), self.tokens(38)
            self.on.extend_cache(slot, text)
            self.texts[slot] = self.texts[slot] + text

    def fused(self) -> None:
        for slot in self.slots(50)[:1]:
            self.passed([slot], self.tokens(38))
            self.commit()

    def tentative(self) -> None:
        slots, before = self.slots(60), dict(self.texts)
        if slots:
            with self.on.tentative(slots):
                for _ in range(self.rng.randint(0, 3)):
                    self.passed(slots[: self.rng.randint(1, len(slots))])
                    self.commit()
                if self.rng.random() < 0.3:
                    self.on.extend_cache(slots[0], self.tokens(20))
            self.texts = before

    def truncate(self) -> None:
        for slot in self.slots(0)[:1]:
            text = self.texts[slot]
            self.on.cache.truncate(slot, max(0, len(text) - self.rng.randint(0, 12)))
            self.texts[slot] = text[: self.on.cache.lengths[slot]]

    def keep(self) -> None:
        for slot in self.slots(0):
            self.on.keep_prefix(slot, [*self.texts[slot], 5])

    def release(self) -> None:
        for slot in self.slots(0)[:1]:
            self.keep()
            self.on.cache.release(slot)
            del self.texts[slot]
        for slot, text in [*self.texts.items()]:
            if len(text) > LONGEST - 30:
                self.on.cache.release(slot)
                del self.texts[slot]


@pytest.mark.parametrize(("name", "seed"), [
    ("qwen3_5", 1),
    *(pytest.param(name, 2, marks=pytest.mark.more) for name in HYBRIDS),
    *(pytest.param(name, seed, marks=pytest.mark.slow) for name in HYBRIDS for seed in range(3, 6)),
])  # fmt: skip
def test_random_operations(name, seed):
    made = Operations(name, seed)
    made.run(200)
    assert made.wrong == 0
    assert made.compared > 150
    assert made.found > 100


def state_as_it_was(self, slot, length, truncate=SlotCache.truncate):
    self.lengths[slot] = length


def copies_of_any_end(self, slot, token_ids, vision, ends, keep=PrefixCache.keep):
    copies = self._cache.recurrent.copies[slot]
    copies.update({end: next(iter(copies.values())) for end in range(0, 200, PAGE) if copies})
    keep(self, slot, token_ids, vision, ends)


def rings_too_small(self, room, ensure=RecurrentStates._ensure):
    ensure(self, min(room, self.capacity))


MUTANTS = {
    "a state ahead of its text": (SlotCache, "truncate", state_as_it_was),
    "a state at another page": (PrefixCache, "keep", copies_of_any_end),
    "rings that are too small": (RecurrentStates, "_ensure", rings_too_small),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    made = Operations("qwen3_5", 1)
    try:
        made.run(200)
    except AssertionError:
        return
    assert made.wrong > 0
