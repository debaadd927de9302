"""What every way to run a target keeps to: a pass changes nothing, a commit keeps one path, a slot comes back clean."""

import random
from collections.abc import Callable

import pytest
import torch

from paceline.core.tree import TokenTree
from paceline.target import ModelRunner, SlotCache, make_runner
from paceline.target.load import with_kv_cache, with_weights
from tests.attention.common import CACHE_MUTANTS, GathersWithoutACopy, agree, held, with_cache
from tests.helpers import loaded, on_torch, prompt
from tests.methods.space.common import adapter
from tests.tiny import tiny_model


def masked() -> ModelRunner:
    made = ModelRunner(loaded(), 3)
    made.attach_adapter(adapter())
    return made


TARGETS: dict[str, Callable[[], ModelRunner]] = {
    "native": lambda: ModelRunner(loaded(), 3),
    "native, invariant": lambda: make_runner(loaded(), 3, invariant=True),
    "native, windows": lambda: ModelRunner(loaded("mistral"), 3),
    "native, int8": lambda: ModelRunner(with_weights(loaded("llama", intermediate_size=64), "int8")[0], 3),
    "native, a cache in int8": lambda: ModelRunner(with_kv_cache(loaded(), "int8"), 3),
    "torch": lambda: ModelRunner(on_torch(tiny_model("llama")), 3),
    "torch, windows": lambda: ModelRunner(loaded("mistral", torch.float64), 3),
    "transformers' layers": lambda: ModelRunner(loaded("gpt2"), 3),
    "latent attention": lambda: ModelRunner(loaded("deepseek_v3"), 3),
    "with masks": masked,
}


def fresh(name: str, text: list[int]) -> list[torch.Tensor]:
    """The rows of another runner of this kind that read the text at once."""
    on = TARGETS[name]()
    slot = on.admit(text)
    on.extend_cache(slot, text)
    return held(on, slot)


@torch.inference_mode()
def sound(on: ModelRunner, name: str, seed: int = 0, turns: int = 10) -> bool:
    """Whether after random trees, commits, rollbacks and releases each slot holds what its text alone would leave."""
    rng, texts = random.Random(seed), dict[int, list[int]]()
    for _ in range(2):
        slot = on.admit([1])
        texts[slot] = prompt(6, slot)
        on.extend_cache(slot, texts[slot])
    for turn in range(turns):
        slot, extra = rng.choice(list(texts)), prompt(rng.randint(1, 9), 100 * seed + turn)
        parents = [-1, *(rng.randrange(i) for i in range(1, len(extra)))]
        tree, before = TokenTree.from_lists([extra], [parents]), held(on, slot)
        logits = on.forward([slot], tree).clone()
        if not all(torch.equal(a, b) for a, b in zip(before, held(on, slot), strict=True)):
            return False
        if not torch.equal(on.forward([slot], tree), logits):
            return False
        with on.tentative([slot]):
            on.commit([slot], [tree.rows[0].path_to(len(extra) - 1)])
        if turn % 4 == 3:  # for another tenant
            on.cache.release(slot)
            del texts[slot]
            other = on.admit([1])
            texts[other] = prompt(4, turn)
            on.extend_cache(other, texts[other])
        elif rng.random() < 0.7:
            path = tree.rows[0].path_to(rng.randrange(len(extra)))
            on.forward([slot], tree)
            on.commit([slot], [path])
            kept = [extra[0], *(extra[node] for node in path)]
            if rng.random() < 0.3:
                on.cache.truncate(slot, on.cache.lengths[slot] - len(kept))
            else:
                texts[slot] = texts[slot] + kept
    return all(
        on.cache.lengths[slot] == len(text) and agree(held(on, slot), fresh(name, text)) for slot, text in texts.items()
    )


@pytest.mark.parametrize("name", TARGETS)
def test_slots_hold_their_texts(name):
    assert sound(TARGETS[name](), name)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["native", "torch, windows"])
def test_other_walks(name, seed):
    assert sound(TARGETS[name](), name, seed)


class KeepsTheRejected(SlotCache):
    """Rows behind the accepted ones stay too."""

    def truncate(self, slot, length): ...


MUTANTS = [KeepsTheRejected, *(one for one in CACHE_MUTANTS if one is not GathersWithoutACopy)]
"""The one left out is in `tests/attention/test_rows.py`: few paths show it."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant):
    assert not sound(with_cache(TARGETS["native"](), mutant), "native")


@pytest.mark.parametrize("name", TARGETS)
def test_a_batch_is_its_rows(name):
    """Ragged texts in slots out of order."""
    on, texts = TARGETS[name](), [prompt(length, length) for length in (9, 40, 3)]
    slots = [on.admit(text) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        on.extend_cache(slot, text)
    tree = TokenTree.from_lists([[5, 9, 31], [7, 8, 6], [4, 3, 2]], [[-1, 0, 0], [-1, 0, 1], [-1, 0, 0]])
    order = [2, 0, 1]
    together = on.forward([slots[i] for i in order], tree.of_rows(order)).clone()
    for row, i in enumerate(order):
        torch.testing.assert_close(together[row], on.forward([slots[i]], tree.of_rows([i]))[0], atol=1e-4, rtol=1e-4)
    assert [on.cache.lengths[slot] for slot in slots] == [9, 40, 3]
