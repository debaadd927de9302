"""What is kept of images: one run of the tower for each, pages by what is in them, bits of reading anew."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.attention.recurrent import RecurrentStates
from paceline.core.tree import TokenTree
from paceline.core.vision import PromptImage, VisionPrompt
from paceline.hf.vision import BoundedCache, Vision
from paceline.target import prefix_cache
from paceline.target import runner as model_runner
from paceline.target.prefill import chunks
from tests.attention.common import held
from tests.vision.families import make_image, seeing, user

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
FAMILIES = ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "paligemma", "smolvlm", "qwen3_5", "minicpmv4_7", "gemma4"]


@pytest.fixture
def looks(monkeypatch):
    """How often the tower ran."""
    counted = list[str]()
    real = Vision.features

    def features(self, image):
        counted.append(image.key)
        return real(self, image)

    monkeypatch.setattr(Vision, "features", features)
    return counted


def engine(name: str = "llava", **options) -> LLM:
    return LLM(seeing(name), max_num_seqs=2, **options)


def answer(llm: LLM, *parts) -> list[int]:
    return llm.generate([user(*parts)], GREEDY)[0].outputs[0].token_ids


def test_tower_runs_once_for_each_image(looks):
    llm = engine()
    looks.clear()
    answer(llm, make_image(1), "one", make_image(1), "two")
    assert len(looks) == 1
    answer(llm, make_image(1), "another question", make_image(2), "and a picture")
    assert len(looks) == 2
    llm.generate([user(make_image(3), "what")], SamplingParams(n=3, max_tokens=3, temperature=1.0, ignore_eos=True))
    assert len(looks) == 3


def test_vision_has_a_time_of_its_own():
    llm = engine()
    first = llm.generate([user("a ", make_image(1), "b")], GREEDY)[0].metrics
    again = llm.generate([user("a ", make_image(1), "b")], GREEDY)[0].metrics
    assert first.vision > 0
    assert first.prefill > 0
    assert again.vision == 0


def test_another_image_of_equal_size_does_not_hit(looks):
    llm = engine()
    looks.clear()
    first, second = answer(llm, make_image(1), "what"), answer(llm, make_image(2), "what")
    assert len(set(looks)) == 2
    assert first != second
    assert second == answer(engine(), make_image(2), "what")


def test_key_by_text_alone_is_caught(monkeypatch):
    """Mutant."""
    expected = answer(engine(), make_image(2), "what")
    read = prefix_cache._read_by
    monkeypatch.setattr(prefix_cache, "_read_by", lambda ids, vision, begin, end: read(ids, None, begin, end))
    llm = engine()
    answer(llm, make_image(1), "what")
    assert answer(llm, make_image(2), "what") != expected


def bits(llm: LLM, token_ids, vision) -> tuple[int, list[torch.Tensor]]:
    """How many columns the prefix cache had, and everything that is there once the text is read."""
    slot = llm.runner.admit(token_ids, vision)
    found = llm.runner.restore_prefix(slot, token_ids, vision)
    llm.runner.cache.release(slot)
    slot = llm.runner.admit(token_ids, vision)
    llm.runner.prefill(slot, token_ids, vision)
    length = llm.runner.cache.lengths[slot]
    assert length == len(token_ids) - 1
    states = llm.runner.states.read(slot, 0, length, (0, 1, 2)).clone()
    rows = [*held(llm.runner, slot), states, llm.runner.forward([slot], TokenTree.chain([[token_ids[-1]]])).clone()]
    llm.runner.cache.release(slot)
    return found, rows


def watching(name: str, chunk: int = 512) -> LLM:
    llm = engine(name)
    llm.runner.chunk = chunk
    llm.runner.states.watch([0, 1, 2])
    return llm


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


PARTS = ("see ", make_image(1, 40, 24), "and ", make_image(2, 24, 40), "what is it")
LATER = {
    "another question": (*PARTS[:-1], "where is it"),
    "another image": (*PARTS[:3], make_image(3, 24, 40), "what is it"),
    "one more image": (*PARTS, make_image(3), "and this"),
    "a longer text": (*PARTS, " and why is it there, and since when, and who put it there"),
    "the same": PARTS,
}


@cache
def anew(name: str, chunk: int, later: str) -> list[torch.Tensor]:
    """By an engine that has read nothing before."""
    llm = watching(name, chunk)
    (seq,) = llm.open_request([user(*LATER[later])], GREEDY).seqs
    found, rows = bits(llm, seq.token_ids, seq.vision)
    assert found == 0
    return rows


@pytest.mark.diagonal
@pytest.mark.parametrize(("chunk", "keeps_text"), [(512, False), (7, True), (512, True), (7, False)])
@pytest.mark.parametrize("name", FAMILIES)
def test_hits_have_the_bits_of_reading_anew(name, chunk, keeps_text):
    for later in LATER:
        llm = watching(name, chunk)
        llm.runner.prefixes.keeps_text = keeps_text
        for text in ("the same", later, later):
            (seq,) = llm.open_request([user(*LATER[text])], GREEDY).seqs
            found, got = bits(llm, seq.token_ids, seq.vision)
            assert same(got, anew(name, chunk, text)), (found, len(seq.token_ids))
        assert found >= min(seq.vision.edge, len(seq.token_ids) - 1)


def second_question(llm: LLM) -> tuple[bool, int]:
    """Whether a second question about the same images has the bits of reading anew, and where it goes on from."""
    for text in ("the same", "another question"):
        (seq,) = llm.open_request([user(*LATER[text])], GREEDY).seqs
        found, got = bits(llm, seq.token_ids, seq.vision)
    return same(got, anew("qwen3_5", 512, text)), found - seq.vision.edge


@pytest.mark.parametrize("keeps_text", [False, True])
def test_states_of_recurrent_layers_stop_at_the_end_of_the_images(keeps_text):
    llm = watching("qwen3_5")
    if keeps_text:
        llm.runner.prefixes.resize(1 << 30)
    assert second_question(llm) == (True, 0)


def test_states_of_the_text_before_the_images_are_caught(monkeypatch):
    """Mutant."""

    def of_no_text(self, slot, base, copy, restore=RecurrentStates.restore):
        restore(self, slot, base, [*map(torch.zeros_like, copy[: len(self.states)]), *copy[len(self.states) :]])

    monkeypatch.setattr(RecurrentStates, "restore", of_no_text)
    assert second_question(watching("qwen3_5")) == (False, 0)


def test_pages_that_cut_a_block_are_caught(monkeypatch):
    """Mutant: Gemma-3's images see both ways, so that no page of them holds for another image behind it."""
    ends = prefix_cache.page_ends
    monkeypatch.setattr(model_runner, "page_ends", lambda length, vision: ends(length, None, 2))
    read = prefix_cache._read_by
    monkeypatch.setattr(prefix_cache, "_read_by", lambda ids, vision, begin, end: read(ids, None, begin, end))
    llm = watching("paligemma")
    llm.runner.prefixes.keeps_text = True
    ids = llm.open_request([user(make_image(1), "what is it")], GREEDY).seqs[0]
    other = llm.open_request([user(make_image(1), "what is this")], GREEDY).seqs[0]
    bits(llm, ids.token_ids, ids.vision)
    _, got = bits(llm, other.token_ids, other.vision)
    assert not same(got, bits(watching("paligemma"), other.token_ids, other.vision)[1])


def test_a_prefix_that_ended_with_its_prompt_is_not_taken_for_a_longer_text():
    """PaliGemma's prompt is one block: its last token is the root first, and part of the page of what follows it."""
    llm = watching("paligemma")
    (seq,) = llm.open_request([user(make_image(1), "what is it")], GREEDY).seqs
    edge = seq.vision.edge
    assert edge == len(seq.token_ids)
    texts = (seq.token_ids, seq.token_ids, [*seq.token_ids, 5, 6], [*seq.token_ids, 5, 6], seq.token_ids)
    assert [bits(llm, ids, seq.vision)[0] for ids in texts] == [0, edge - 1, 0, edge, edge - 1]


def test_a_page_without_the_states_asked_for_is_read_again():
    llm = engine()
    (seq,) = llm.open_request([user("a", make_image(1), "b")], GREEDY).seqs
    found = []
    for layers in ([], [1], []):
        llm.runner.states.watch(layers)
        slot = llm.runner.admit(seq.token_ids, seq.vision)
        found.append(llm.runner.restore_prefix(slot, seq.token_ids, seq.vision))
        llm.runner.cache.truncate(slot, 0)
        for _ in llm.runner.prefill_chunks(slot, seq.token_ids, seq.vision):
            pass
        llm.runner.cache.release(slot)
    assert found == [0, 0, seq.vision.edge]


def test_positions_count_in_pages_of_images_alone():
    """So that the next turn, whose prompt has the answer in it, finds the pages of the answer."""
    ids, positions = [*range(40)], torch.arange(40).expand(3, -1)
    prompt = VisionPrompt((PromptImage("an image", (1, 2), {}),), positions[:, :20])
    later, moved = replace(prompt, position_ids=positions), replace(prompt, position_ids=positions[:, :20] + 1)
    pages = [[prefix_cache._read_by(ids, one, *page) for page in ((0, 16), (16, 32))] for one in (prompt, later, moved)]
    assert pages[0] == pages[1]
    assert pages[0][0] != pages[2][0]


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_change_nothing_but_rounding(name):
    """Gemma-3's images and PaliGemma's prompts see both ways: a chunk that cut them would hide what is behind it."""
    whole, cut = engine(name), engine(name)
    cut.runner.chunk = 5
    assert answer(whole, *PARTS) == answer(cut, *PARTS)


def test_cut_blocks_are_caught(monkeypatch):
    parts = ("see ", make_image(1), "what is it")
    expected = answer(engine("gemma3"), *parts)
    monkeypatch.setattr(model_runner, "chunks", lambda end, blocks, most: chunks(end, (), most))
    cut = engine("gemma3")
    cut.runner.chunk = 5
    assert answer(cut, *parts) != expected


@pytest.mark.parametrize(
    ("end", "blocks", "most", "expected"),
    [
        (10, [(3, 7)], 4, [(0, 3), (3, 7), (7, 10)]),
        (10, [], 4, [(0, 4), (4, 8), (8, 10)]),
        (9, [(0, 9)], 4, [(0, 9)]),
        (9, [(2, 9)], 4, [(0, 2), (2, 9)]),
        (6, [(0, 2), (2, 5)], 3, [(0, 2), (2, 5), (5, 6)]),
        (0, [], 4, []),
    ],
)
def test_chunks(end, blocks, most, expected):
    assert list(chunks(end, blocks, most)) == expected


def test_least_recent_goes_first():
    kept: BoundedCache[str, int] = BoundedCache(10, lambda size: size)
    for name, size in (("a", 4), ("b", 4)):
        kept.put(name, size)
    assert kept.get("a") == 4
    kept.put("c", 5)
    assert kept.get("b") is None
    assert kept.get("a") == 4
    assert kept.num_bytes == 9
    kept.put("huge", 11)
    assert len(kept) == 2
    kept.put("a", 1)
    assert kept.num_bytes == 6


def test_caches_are_bounded(looks):
    llm = engine()
    answer(llm, make_image(1), "what")
    one, pages = llm.runner.images.features.num_bytes, llm.runner.prefixes
    llm.runner.images.features.max_bytes = 2 * one
    pages.max_bytes = most = pages.num_bytes
    for index in (2, 3, 4):
        answer(llm, make_image(index), "what")
        assert pages.num_bytes <= most
    assert len(llm.runner.images.features) == 2
    looks.clear()
    answer(llm, make_image(4), "what")
    answer(llm, "x", make_image(3), "what")
    assert not looks
    answer(llm, make_image(1), "what")
    assert len(looks) == 1
