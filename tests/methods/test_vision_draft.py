"""Draft models for targets that see: with their own tower, the target's, or none; the answer is the target's."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, Coupled, DraftModel, Eagle, Fixed, Ouroboros, PromptLookup, SamplingParams, SelfQuantized
from paceline.config import parse
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.hf.vision import SharedVisionTower
from paceline.target import LoadedModel, ModelRunner, wrap_model
from paceline.target.prompts import read_prompt
from tests.attention.common import agree, held
from tests.helpers import admit, sequence
from tests.methods.heads import random_head
from tests.methods.tokenizers_made import byte_level, reader
from tests.oracle import autoregressive
from tests.vision.families import make, make_image, seeing, user
from tests.vision.table import TEXT

CHATS = [
    [user(make_image(1), "what is it?")],
    [user("see ", make_image(2, 60, 24), " and ", make_image(3), " then say")],
    [user("no picture")],
]


@cache
def blind(seed: int = 1, **overrides: object) -> LoadedModel:
    """A text model of the target's tokenizer."""
    options = {key: value for key, value in TEXT.items() if key not in overrides}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**options, **overrides))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return wrap_model(model, seeing().tokenizer)


DRAFTS = {
    "none": lambda: DraftModel(blind()),
    "none, a model that could": lambda: DraftModel(seeing(seed=1), vision="none"),
    "own": lambda: DraftModel(seeing(seed=1)),
    "own, the same weights": lambda: DraftModel(twin()),
    "own, other pictures": lambda: DraftModel(coarse(), vision="own"),
    "shared, projected": lambda: DraftModel(seeing(seed=1), vision="shared"),
    "shared, a text model": lambda: DraftModel(blind(), vision="shared"),
    "pooled": lambda: DraftModel(seeing(seed=1), vision="pooled"),
    "pooled, a text model": lambda: DraftModel(blind(), vision="pooled"),
    "ouroboros": lambda: Ouroboros(DraftModel(seeing(seed=1)), 3),
    "another tokenizer": lambda: DraftModel(reader("byte level", 1)),
    "ouroboros, another tokenizer": lambda: Ouroboros(DraftModel(reader("sentencepiece", 1)), 3),
    "lookup": PromptLookup,
    "self-int4": lambda: SelfQuantized(lm_head="shared"),
    "eagle": lambda: Eagle(random_head(seeing(), 3)),
}


@cache
def twin() -> LoadedModel:
    model, processor = make("llava", 0)
    return wrap_model(copy.deepcopy(model), processor=processor)


@cache
def coarse() -> LoadedModel:
    """Patches twice as large: a quarter of the image tokens for the same image."""
    model, processor = make("llava", 0)
    config = type(model.config).from_dict(model.config.to_dict())
    config.vision_config.patch_size *= 2
    coarser = copy.copy(processor)
    coarser.patch_size = processor.patch_size * 2
    torch.manual_seed(4)
    return wrap_model(type(model)(config).eval(), processor=coarser)


def opened(drafter, name="llava"):
    return LLM(seeing(name), drafter=drafter, policy=Fixed(4, 12), numerics="fast", max_num_seqs=2)


@cache
def slow(name: str, which: int, temperature: float) -> list[int]:
    llm = LLM(seeing(name), numerics="fast")
    params = SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True, seed=5)
    (seq,) = llm.open_request(CHATS[which], params).seqs
    return autoregressive(seeing(name), seq).output_ids


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_are_the_target_s(draft, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True, seed=5)
    llm = opened(DRAFTS[draft]())
    got = [out.outputs[0] for out in llm.generate(CHATS, params)]
    assert [one.token_ids for one in got] == [slow("llava", i, temperature) for i in range(len(CHATS))]
    if draft == "own, the same weights":  # it sees all that the target sees: nothing is rejected
        assert all(r.num_accepted == r.num_drafted for one in got for r in one.rounds)


def test_no_prompt_of_others_is_found_in_the_draft_s_prefix_cache():
    llm, found = opened(drafter := DraftModel(twin())), list[int]()
    restore = drafter.runner.prefixes.restore
    drafter.runner.prefixes.restore = lambda *given: found.append(restore(*given)) or found[-1]
    for tenant in "AAB":
        llm.generate(CHATS[:1], SamplingParams(max_tokens=4, extra_args={"cache_salt": tenant}))
    assert found[1] > found[0] == found[2] == 0


def test_images_that_the_draft_s_processor_refuses_are_left_out(monkeypatch, caplog):
    def refuse(*given):
        raise ConfigError("the processor cannot read this chat")

    llm, params = opened(DraftModel(twin())), SamplingParams(max_tokens=9, ignore_eos=True, seed=5)
    monkeypatch.setattr("paceline.methods.draft_model.vision.read_chat", refuse)
    got = [out.outputs[0] for out in llm.generate(CHATS, params)]
    assert [one.token_ids for one in got] == [slow("llava", i, 0.0) for i in range(len(CHATS))]
    assert all(sum(record.num_drafted for record in one.rounds) for one in got)
    assert caplog.text.count("without its images") == 2  # once for each prompt that has some


def in_step(drafter: DraftModel, chat, rounds: int = 6) -> bool:
    """Whether after every round the draft's cache is that of a fresh runner which reads the same text."""
    on = ModelRunner(seeing(), 2)
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Fixed(3))
    ids, vision = read_prompt(on.loaded, chat, on.max_length)
    seq = replace(sequence(seeing(), ids, SamplingParams(max_tokens=40)), vision=vision)
    admit(decoder, seq)
    try:
        for _ in range(rounds):
            decoder.step([seq])
            runner, reading = drafter.runner, drafter._draft_vision.read(seq, drafter.runner)
            text, cached, last = reading.text(seq.token_ids), runner.cache.lengths[seq.slot], seq.rounds[-1]
            whole = last.num_drafted > 0 and last.num_accepted == last.num_drafted
            if cached != len(text) - (2 if whole else 1):
                return False
            fresh = ModelRunner(runner.loaded, 1)
            slot = fresh.admit(text, reading.vision)
            if drafter._vision in ("shared", "pooled"):
                drafter._draft_vision.read(seq, fresh)
            fresh.prefill(slot, [*text[:cached], 0], reading.vision)
            if not agree(held(runner, seq.slot), held(fresh, slot)):
                return False
        return True
    finally:
        decoder.release(seq)


KINDS = {
    "none": lambda kind=DraftModel: kind(blind()),
    "own": lambda kind=DraftModel: kind(seeing(seed=1), vision="own"),
    "shared": lambda kind=DraftModel: kind(seeing(seed=1), vision="shared"),
    "pooled": lambda kind=DraftModel: kind(blind(), vision="pooled"),
    "own, other pictures": lambda kind=DraftModel: kind(coarse(), vision="own"),
    "twin": lambda kind=DraftModel: kind(twin(), vision="own"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_draft_cache_is_in_step(kind):
    assert in_step(KINDS[kind](), CHATS[1])
    assert in_step(KINDS[kind](), CHATS[2])


class CountsTheTarget(DraftModel):
    """Rolls back to the target's length, not to that of what it reads itself."""

    def observe(self, seqs, draft, logits, walks):
        for seq in seqs:
            cached = self.runner.cache.lengths[seq.slot]
            self.runner.cache.truncate(seq.slot, min(cached, seq.num_cached))


class ForgetsPictures(DraftModel):
    """Reads placeholders as tokens."""

    def _prefill(self, seq, text, most):
        if self._prompts[seq.slot].vision is not None:
            self._prompts[seq.slot] = replace(self._prompts[seq.slot], vision=None)
        return super()._prefill(seq, text, most)


@pytest.mark.parametrize(
    ("mutant", "kind"), [(CountsTheTarget, "none"), (ForgetsPictures, "own"), (ForgetsPictures, "pooled")]
)
def test_mutants_are_out_of_step(mutant, kind):
    assert not in_step(KINDS[kind](mutant), CHATS[1], rounds=12)


def test_a_blind_draft_reads_the_text_between():
    drafter = DraftModel(blind())
    llm = opened(drafter)
    (seq,) = llm.open_request(CHATS[1], SamplingParams()).seqs
    reading = drafter._draft_vision.read(seq, drafter.runner)
    assert reading.prompt == [t for t in seq.prompt_ids if t not in llm.runner.banned_token_ids]
    assert 0 < len(reading.prompt) < len(seq.prompt_ids)
    assert reading.vision is None


def test_a_pooled_draft_reads_one_embedding_an_image():
    drafter = DraftModel(blind(), vision="pooled")
    llm = opened(drafter)
    (seq,) = llm.open_request(CHATS[1], SamplingParams()).seqs
    reading = drafter._draft_vision.read(seq, drafter.runner)
    assert len(reading.prompt) == len(seq.prompt_ids) - seq.vision.num_tokens + 2
    for image, one in zip(seq.vision.images, reading.vision.images, strict=True):
        assert reading.prompt[one.start] == seq.prompt_ids[image.start]
        (seen,) = drafter.runner.images.features.get(one.key).rows
        assert torch.equal(seen, llm.runner.image_features([image])[0].rows.mean(0))


def test_the_tower_runs_once_where_it_is_shared(monkeypatch):
    """With another hidden size, the target's tower output goes through the draft's own projector."""
    want = slow("llava", 0, 0.0)  # it runs the tower too
    wide = copy_with_hidden(16)
    drafter = DraftModel(wide, vision="shared")
    llm = opened(drafter)
    tower = llm.runner.loaded.vision.tower.vision_tower
    assert isinstance(tower, SharedVisionTower)
    assert not isinstance(llm.loaded.vision.tower.vision_tower, SharedVisionTower)  # what was given stays as it was
    runs = []
    real = type(tower.tower).forward
    monkeypatch.setattr(type(tower.tower), "forward", lambda self, *a, **k: runs.append(self) or real(self, *a, **k))
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=5)
    got = llm.generate([CHATS[0]], params)[0].outputs[0]
    assert got.token_ids == want
    assert len(runs) == 1
    assert sum(r.num_drafted for r in got.rounds) > 0


@cache
def copy_with_hidden(size: int) -> LoadedModel:
    """A LLaVA of the same tower whose language model is narrower."""
    model, processor = make("llava", 0)
    config = type(model.config).from_dict(model.config.to_dict())
    config.text_config.hidden_size = size
    config.text_config.head_dim = 8
    torch.manual_seed(3)
    return wrap_model(type(model)(config).eval(), processor=processor)


def other_words() -> LoadedModel:
    """A LLaVA with another tokenizer."""
    return replace(seeing(seed=1), tokenizer=byte_level())


@pytest.mark.parametrize(
    ("make_drafter", "error", "words"),
    [
        (lambda: DraftModel(blind(), vision="own"), IncompatibleModels, "no vision tower"),
        (lambda: DraftModel(blind(2, hidden_size=16), vision="shared"), IncompatibleModels, "no projector"),
        (lambda: DraftModel(blind(2, hidden_size=16), vision="pooled"), IncompatibleModels, "hidden size 16"),
        (lambda: DraftModel(reader("byte level"), vision="pooled"), IncompatibleModels, 'vision="none"'),
        (lambda: DraftModel(blind(), vision="half"), ConfigError, "DraftModel.vision"),
        (lambda: DraftModel(reader("byte level"), vision="own"), IncompatibleModels, "no vision tower"),
        (lambda: DraftModel(reader("byte level"), vision="shared"), IncompatibleModels, 'vision="none"'),
        (lambda: DraftModel(other_words()), IncompatibleModels, "reads images"),
    ],
)
def test_refusals(make_drafter, error, words):
    with pytest.raises(error, match=words):
        opened(make_drafter())


def test_a_draft_without_the_picture_is_told(caplog):
    drafter = DraftModel(seeing(seed=1))
    llm = opened(drafter)
    (seq,) = llm.open_request(CHATS[0], SamplingParams()).seqs
    bare = replace(seq.vision, images=tuple(replace(image, source=None) for image in seq.vision.images))
    assert drafter._draft_vision.read(replace(seq, vision=bare), drafter.runner).vision is None
    assert "needs the images" in caplog.text


def test_words():
    config = parse("model:small@int4,vision=none")
    assert (config.drafter.model, config.drafter.weights, config.drafter.vision) == ("small", "int4", "none")
    assert config.name == "model:small@int4,vision=none"
    for wrong in ("model:small,vision=some", "model:small,sight=none", "model:small,vision="):
        with pytest.raises(ConfigError):
            parse(wrong)
