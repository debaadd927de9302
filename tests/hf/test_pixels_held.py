"""Pixels of prompts that were answered, or wait for a slot, are not held: many chats of one call fit into memory."""

import weakref

import pytest

import paceline.engine.request as front
from paceline import LLM, Choose, DraftModel, PromptLookup, SamplingParams
from paceline.core.vision import PromptImage
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import CacheFull, ConfigError
from paceline.hf import image_prompts
from paceline.methods.draft_model import vision as draft_vision
from paceline.policy import Fixed
from tests.vision.families import make_image, seeing, user

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
CHATS = [[user("see ", make_image(index, 40, 24), "what is it")] for index in range(6)]


def engine(drafter=None, **options) -> LLM:
    return LLM(seeing(), drafter=drafter, policy=Fixed(2) if drafter else None, max_num_seqs=2, **options)


def draft() -> DraftModel:
    return DraftModel(seeing(seed=1), vision="own")


class Alive:
    """How many images had pixels in memory whenever a prompt was admitted."""

    def __init__(self):
        self.made, self.counts = list[weakref.ref[object]](), list[int]()

    def clear(self):
        """Forget what was made so far, as for the check at load."""
        self.made.clear()
        self.counts.clear()


@pytest.fixture
def alive(monkeypatch):
    found = Alive()
    real, admit = image_prompts.PromptImage, SpeculativeDecoder.admit

    def counted(key, places, inputs, source=None):
        found.made.append(weakref.ref(inputs["pixel_values"]))
        return real(key, places, inputs, source)

    def admitting(self, seq, *rest):
        found.counts.append(sum(one() is not None for one in found.made))
        return admit(self, seq, *rest)

    monkeypatch.setattr(image_prompts, "PromptImage", counted)
    monkeypatch.setattr(SpeculativeDecoder, "admit", admitting)
    return found


def answers(llm: LLM, chats=CHATS, params=GREEDY) -> list[list[list[int]]]:
    return [[one.token_ids for one in result.outputs] for result in llm.generate(chats, params)]


@pytest.mark.parametrize("drafter", [None, draft])
def test_at_most_a_batch_has_pixels(alive, monkeypatch, drafter):
    monkeypatch.setattr(draft_vision, "_CACHE_BYTES", 0)  # the bounded cache of what the draft's own processor made
    most = 4 if drafter else 2  # two slots, for each of which the draft has pixels of its own
    llm = engine(drafter and drafter())
    alive.clear()
    expected = answers(llm)
    assert alive.counts[0] == len(CHATS)  # they are few: all are opened before the first is answered
    assert alive.counts[-1] <= most  # what was answered is gone
    assert answers(llm) == expected
    monkeypatch.setattr(front, "MAX_WAITING_PIXEL_BYTES", 0)
    llm = engine(drafter and drafter())
    alive.clear()
    assert answers(llm) == expected
    assert max(alive.counts) <= most
    assert [one[0].outputs[0].num_images for one in (llm.generate(chat, GREEDY) for chat in CHATS)] == [1] * len(CHATS)


def test_several_answers_share_one_opening(alive, monkeypatch):
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=4, ignore_eos=True)
    expected = answers(engine(), CHATS[:3], params)
    monkeypatch.setattr(front, "MAX_WAITING_PIXEL_BYTES", 0)
    llm = engine()
    alive.clear()
    assert answers(llm, CHATS[:3], params) == expected
    assert max(alive.counts) <= 2


def test_prompts_are_judged_before_any_is_answered(alive, monkeypatch):
    monkeypatch.setattr(front, "MAX_WAITING_PIXEL_BYTES", 0)
    llm = engine(max_model_len=60)
    alive.clear()
    for bad, error in (([user(make_image(1), "x" * 60)], CacheFull), ([user("<image>", make_image(1))], ConfigError)):
        with pytest.raises(error):
            llm.generate([*CHATS, bad], GREEDY)
    assert not alive.counts
    assert answers(llm, CHATS[:1])


def test_picture_that_changes_while_it_waits_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "picture.png"
    make_image(1).save(path)
    chat = [{"role": "user", "content": [{"type": "image", "image": str(path)}, {"type": "text", "text": "what"}]}]
    monkeypatch.setattr(front, "MAX_WAITING_PIXEL_BYTES", 0)
    real = SpeculativeDecoder.admit

    def admitting(self, seq, *rest):
        make_image(2).save(path)
        return real(self, seq, *rest)

    monkeypatch.setattr(SpeculativeDecoder, "admit", admitting)
    llm = engine()
    with pytest.raises(ConfigError, match="changed"):
        llm.generate([*CHATS[:2], chat], GREEDY)
    assert llm.runner.cache.num_free == 2


def test_without_pixels_is_all_but_the_pixels():
    (seq, *_) = engine(draft()).open_request(CHATS[0], GREEDY).seqs
    bare = seq.vision.without_pixels()
    assert (bare.keys, bare.num_tokens, bare.edge) == (seq.vision.keys, seq.vision.num_tokens, seq.vision.edge)
    assert all(isinstance(one, PromptImage) and not one.inputs and one.source is None for one in bare.images)
    image = seq.vision.images[0]
    assert image_prompts.pixel_bytes(seq.vision) == image.inputs["pixel_values"].nbytes + 40 * 24 * 4
    assert image_prompts.pixel_bytes(bare) == 0


def test_opened_images_are_kept_for_a_draft_that_reads_them():
    chat = [user(make_image(1, 5000, 40), "what is it")]
    for drafter, size in ((None, None), (PromptLookup(), None), (draft(), (1667, 14))):
        (image,) = engine(drafter).open_request(chat, GREEDY).seqs[0].vision.images
        assert (image.source and image.source.size) == size, "reduced to less than 2048 a side"
    chosen = engine(Choose([PromptLookup(), draft()])).open_request(chat, GREEDY)
    assert chosen.seqs[0].vision.images[0].source is not None
