"""A prefix that is found has the bits of reading anew: keys, values, watched states and logits."""

import itertools

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.attention.kv_cache import SlotCache
from paceline.attention.recurrent import RecurrentStates
from paceline.core.interfaces import DrafterInfo
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.policy import Fixed
from paceline.target import LoadedModel, ModelRunner, make_runner, prefix_cache
from paceline.target.prefix_cache import PAGE, PrefixCache, page_ends
from paceline.verify import Coupled
from tests.adversaries import RandomTrees
from tests.helpers import admit, loaded, on_torch, prompt, sequence
from tests.tiny import tiny_model

LAYERS = (0, 1, 2)
BASE = prompt(100)
KINDS = {
    "native": lambda: loaded(),
    "native bfloat16": lambda: loaded(dtype=torch.bfloat16),
    "native, sliding": lambda: loaded("gemma3"),
    "native, latent": lambda: loaded("minicpm3"),
    "native, hybrid": lambda: loaded("qwen3_5"),
    "torch": lambda: on_torch(tiny_model("llama")),
}


def runner_of(model: LoadedModel, keeps: bool = True, chunk: int = 24) -> ModelRunner:
    made = make_runner(model, 2)
    made.chunk = chunk
    made.watch_states(LAYERS)
    made.prefixes.resize((1 << 30) * keeps)
    return made


def bits(runner: ModelRunner, ids: list[int], defer: bool = False) -> tuple[int, list[torch.Tensor]]:
    """How many columns were found, and all that the slot holds once the text is read, with the logits of its root."""
    slot = runner.admit(ids)
    found = runner.restore_prefix(slot, ids, None, defer)
    for _ in runner.prefill_chunks(slot, ids, None, defer):
        pass
    length = runner.cache.lengths[slot]
    root = TokenTree.chain([[ids[-1]]])
    logits = runner.forward([slot], root, ids[length:-1]).clone()
    length = runner.cache.lengths[slot]
    rows = [layer[slot, :, :length].clone() for layer in (*runner.cache.keys, *runner.cache.values)]
    rows += [logits, runner.read_states(slot, 0, length, LAYERS).clone()]
    runner.keep_prefix(slot, ids)
    runner.cache.release(slot)
    return found, rows


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


TEXTS = [
    BASE,
    *(BASE[:shared] + prompt(30, seed=shared) for shared in (1, 15, 16, 17, 48, 63, 64, 96, 99)),
    BASE[:64],
    BASE[:65],
    BASE,
    BASE + prompt(50, seed=7),
    *2 * [prompt(16, seed=3) + BASE[16:]],
]


def finds_what_it_would_read(model: LoadedModel, defer: bool = False, texts=TEXTS) -> tuple[bool, list[int]]:
    """Whether every text has the bits that it has without a prefix cache, and how much of each was found."""
    ours, fresh, right, counts = runner_of(model), runner_of(model, keeps=False), True, list[int]()
    for ids in texts:
        found, got = bits(ours, ids, defer)
        none, want = bits(fresh, ids, defer)
        assert (none, want[0].shape[1]) == (0, len(ids) - 1)
        counts.append(found)
        right &= same(got, want)
    return right, counts


@pytest.mark.parametrize("defer", [False, True], ids=["whole", "last chunk deferred"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_has_the_bits_of_reading_anew(kind, defer):
    model = KINDS[kind]()
    right, counts = finds_what_it_would_read(model, defer)
    assert right
    if kind == "native, hybrid":  # from a column where some text ended or two parted before
        assert counts == [0, 0, 0, 0, 16, 16, 48, 48, 96, 96, 48, 64, 96, 96, 0, 96]
    elif model.is_native:
        assert counts == [0, 0, 0, 16, 16, 48, 48, 64, 96, 96, 63, 64, 96, 96, 0, 96]
    else:  # whole chunks of 24 alone, and none that would have shared its pass with the root
        assert counts == [0, 0, 0, 0, 0, 48, 48, 48, 96, 96, 48, 48, 96, 96, 0, 96]


def test_a_page_that_lacks_a_column_has_no_state():
    """The same prompt twice, up to the last token of a page, and longer ones behind it."""
    text = BASE[: 2 * PAGE]
    right, counts = finds_what_it_would_read(
        loaded("qwen3_5"), texts=[text, text, *(text + [9 + i] * 20 for i in range(3))]
    )
    assert right
    assert counts == [0, 16, 16, 16, 32]


def test_rings_of_recurrent_layers_hold_what_waits_alone():
    """However long the text is that was read, or found."""
    runner = runner_of(loaded("qwen3_5", max_position_embeddings=1024), chunk=512)
    for _ in range(2):
        bits(runner, prompt(900))
    assert runner.cache.recurrent is not None
    assert runner.cache.recurrent.capacity <= 32


def with_answer(model: LoadedModel, keeps: bool) -> tuple[int, list[torch.Tensor]]:
    """The next turn after an answer that came through trees; its drafter watches states."""
    runner, drafter = runner_of(model, keeps), RandomTrees(4)
    drafter.info = DrafterInfo(branches=9, reads_states=True)
    decoder = SpeculativeDecoder(runner, drafter, Coupled(), Fixed(4, 20))
    seq = sequence(model, BASE[:40], SamplingParams(max_tokens=50, temperature=1.0))
    admit(decoder, seq)
    while not seq.is_finished:
        decoder.step([seq])
    decoder.release(seq)
    return bits(runner, [*seq.token_ids, *prompt(20)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_finds_the_answer(kind):
    model = KINDS[kind]()
    found, got = with_answer(model, keeps=True)
    none, want = with_answer(model, keeps=False)
    assert (found, none) == (80 if model.is_native else 24, 0)
    assert same(got, want)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(15, []), (16, [16]), (47, [16, 32]), (48, [16, 32, 48])],
)
def test_pages_of_a_text(length, expected):
    assert list(page_ends(length, None)) == expected


def one_column_more(self, slot, pages, length, state=(), restore=SlotCache.restore):
    restore(self, slot, pages, length, state)
    self.begin([slot], 1)
    self.lengths[slot] += 1


@torch.inference_mode()
def states_one_short(self, slot, *rest, restore=PrefixCache.restore):
    length = restore(self, slot, *rest)
    if length:
        self._states._rows[slot, length - 1] = 0
    return length


def columns_too_far_on(self, slot, begin, end, copy_of=SlotCache.copy_of):
    return copy_of(self, slot, begin + 1, end + 1)


def keys_for_values(*given, copy_of=SlotCache.copy_of):
    return [(keys, keys) for keys, _ in copy_of(*given)]


def forgets_a_token(token_ids, vision, begin, end, read=prefix_cache._read_by):
    return read(token_ids, vision, begin + 1, end)


MUTANTS = {
    "one column more than was found": (SlotCache, "restore", one_column_more),
    "columns one too far on": (SlotCache, "copy_of", columns_too_far_on),
    "values are keys": (SlotCache, "copy_of", keys_for_values),
    "states one short": (PrefixCache, "restore", states_one_short),
    "a page behind any text": (prefix_cache.itertools, "count", lambda *given: itertools.repeat(1)),
    "a key that forgets a token": (prefix_cache, "_read_by", forgets_a_token),
}


def state_of_no_text(self, slot, base, copy, restore=RecurrentStates.restore):
    restore(self, slot, base, [torch.zeros_like(kept) for kept in copy[: len(self.states)]] + copy[len(self.states) :])


def no_rows_before_the_state(self, slot, base, copy, restore=RecurrentStates.restore):
    restore(self, slot, base, copy[: len(self.states)] + [torch.zeros_like(kept) for kept in copy[len(self.states) :]])


OF_STATES = {
    "a state of no text": (RecurrentStates, "restore", state_of_no_text),
    "no rows before the state": (RecurrentStates, "restore", no_rows_before_the_state),
}


@pytest.mark.parametrize("name", OF_STATES)
def test_mutants_of_states_are_caught(name, monkeypatch):
    monkeypatch.setattr(*OF_STATES[name])
    assert not finds_what_it_would_read(loaded("qwen3_5"))[0]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    texts = [*TEXTS, [BASE[0] + 1, *BASE[1:]]]
    monkeypatch.setattr(*MUTANTS[name])
    assert not finds_what_it_would_read(loaded(), texts=texts)[0]


def test_pages_of_answers_are_caught_in_torch(monkeypatch):
    """Mutant: columns that rounds made, found for a prompt. In torch a row's bits depend on its pass."""
    model = KINDS["torch"]()
    want = with_answer(model, keeps=False)[1]
    monkeypatch.setattr(ModelRunner, "keep_prefix", lambda self, slot, ids, vision=None: self.prefixes.keep(
        slot, ids, vision, range(24, len(ids), 24)
    ))  # fmt: skip
    found, got = with_answer(model, keeps=True)
    assert found == 72
    assert not same(got, want)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tenant_finds_its_own_texts_alone(is_shared, monkeypatch):
    """Mutant: the prefixes of all tenants are one."""
    if is_shared:
        monkeypatch.setattr(SamplingParams, "tenant", "")
    llm, found = LLM(loaded(), prefix_cache_bytes=1 << 20), list[int]()
    for salt in ({}, {"cache_salt": "A"}, {"cache_salt": "B"}, {"cache_salt": "A"}, {}):
        params = SamplingParams(max_tokens=2, extra_args=salt)
        found.append(llm.generate({"prompt_token_ids": BASE}, params)[0].num_cached_tokens)
    assert found == ([0, 96, 96, 96, 96] if is_shared else [0, 0, 0, 96, 96])


# Memory


def held(runner: ModelRunner) -> int:
    return sum(page.num_bytes for page in runner.prefixes._held.values())


def test_the_least_recent_text_goes_first_and_from_its_end():
    runner = runner_of(loaded())
    texts = [prompt(64, seed) for seed in range(4)]
    bits(runner, texts[0])
    one = runner.prefixes.num_bytes
    runner.prefixes.resize(2 * one + one // 2)
    bits(runner, texts[1])
    bits(runner, texts[0])
    bits(runner, texts[2])
    bits(runner, texts[3])
    assert runner.prefixes.num_bytes == held(runner) <= runner.prefixes.max_bytes
    found = [bits(runner, [*text[:-1], 5])[0] for text in (texts[3], texts[2], texts[0], texts[1])]
    assert found[:2] == [48, 48]
    assert found[2] < 48
    assert found[3] == 0


def test_a_text_larger_than_the_budget_keeps_its_beginning():
    runner = runner_of(loaded())
    bits(runner, BASE[: PAGE + 1])
    runner.prefixes.resize(3 * runner.prefixes.num_bytes)
    bits(runner, BASE)
    assert bits(runner, BASE)[0] == 3 * PAGE
    assert runner.prefixes.num_bytes == held(runner) <= runner.prefixes.max_bytes


def test_any_texts_hold_the_budget():
    runner, fresh = runner_of(loaded()), runner_of(loaded(), keeps=False)
    runner.prefixes.resize(60_000)
    draw = torch.Generator().manual_seed(1)
    found = 0
    for _ in range(60):
        shared, own = (int(torch.randint(high, (), generator=draw)) for high in (90, 60))
        ids = prompt(90, seed=own % 3)[:shared] + prompt(10 + own, seed=own)
        count, got = bits(runner, ids)
        found += count
        assert runner.prefixes.num_bytes == held(runner) <= 60_000
        assert same(got, bits(fresh, ids)[1])
    assert found > 0


def test_off_by_default_and_by_size():
    for cache, most in ((make_runner(loaded(), 2).prefixes, None), (runner_of(loaded(), keeps=False).prefixes, 0)):
        assert cache.keeps_text is (most is not None)
    llm = LLM(loaded(), prefix_cache_bytes=None)
    assert [llm.generate([BASE])[0].num_cached_tokens for _ in range(2)] == [0, 0]
    llm = LLM(loaded(), prefix_cache_bytes=1 << 20)
    first, second = (llm.generate([BASE], SamplingParams(max_tokens=9, logprobs=2))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert first.outputs[0].logprobs == second.outputs[0].logprobs
    assert second.to_dict()["num_cached_tokens"] == 96
