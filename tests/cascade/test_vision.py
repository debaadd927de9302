"""A cascade of vision-language models: images go to both, and what the large one decides is its own answer."""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline import LLM, Fixed, SamplingParams
from paceline.cascade import Cascade, Reason, Signal, calibrate
from paceline.cascade.calibration import ModelId
from paceline.errors import IncompatibleModels
from paceline.target import wrap_model
from tests.cascade.common import made_up
from tests.vision.families import make, make_image, user

pytestmark = pytest.mark.filterwarnings("ignore::paceline.cascade.DriftWarning")
CHATS = [[user(make_image(i, 32 + i % 3, 40), f"what is it {i}")] for i in range(24)]


def engine(noise: float, where: str = "") -> LLM:
    """noise: on the weights whose name holds `where`."""
    model, processor = make("llava")
    model = copy.deepcopy(model)  # that one is made once for all tests
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if noise and where in name and parameter.dim() >= 2:
                parameter.add_(noise * torch.randn(parameter.shape, generator=rng))
    return LLM(wrap_model(model, processor=processor), numerics="fast", max_num_seqs=4)


@cache
def pair() -> tuple[LLM, LLM]:
    return engine(0.02), engine(0.0)


def params() -> SamplingParams:
    return SamplingParams(max_tokens=20, seed=1, logit_bias={token: 4.0 for token in pair()[1].loaded.eos_ids})


def cascade(threshold: float, **options) -> Cascade:
    small, large = pair()
    bias = {str(token): value for token, value in params().logit_bias.items()}
    made = made_up(threshold, small, large=ModelId.of(large), sampling={"logit_bias": bias}, short_limit=6)
    return Cascade(small, large, made, allow_lossy=True, policy=Fixed(2), **options)


def test_pictures_go_to_both():
    own = pair()[1].plain().generate(CHATS, params())
    sure = sorted(one.confidence or 0.0 for one in cascade(0.0, audit_share=0.0).generate(CHATS, params()))
    ours = cascade(sure[len(sure) // 2], audit_share=1.0, on_alarm="warn")
    results, counts = ours.generate(CHATS, params()), ours.stats().audits
    seen = Counter(one.reason for one in results)
    assert seen[Reason.CONFIDENT] > 0
    assert seen[Reason.UNSURE] > 0
    assert any(one.small.token_ids != one.token_ids for one in results), "the two models are not one"
    for one, two in zip(results, own, strict=True):
        if one.decided_by == "large":
            assert one.token_ids == two.token_ids
    alone = [(one, two) for one, two in zip(results, own, strict=True) if one.decided_by == "small"]
    assert counts.checked == len(alone)
    assert counts.differed == sum(one.token_ids != two.token_ids for one, two in alone)


def test_the_same_words_about_otherprompt_images():
    """Predictions go to the requests in their order: same text and seed, another image, another answer."""
    chats = [[user(make_image(i), "what")] for i in range(8)]
    results = cascade(1.0, audit_share=0.0).generate(chats, params())
    own = pair()[1].plain().generate(chats, params())
    assert [one.token_ids for one in results] == [two.token_ids for two in own]
    assert all(one.output.rounds[0].token_ids[1:] == tuple(one.small.token_ids) for one in results)


def test_calibrating_onprompt_images():
    small, large = pair()
    made = calibrate(small, large, CHATS, max_disagreement=0.5, short_limit=6, params=params())
    own = large.plain().generate(CHATS, params())
    theirs = small.plain().generate(CHATS, params())
    ended = [(a, b) for a, b in zip(theirs, own, strict=True) if len(a.token_ids) <= 6 and a.finish_reason == "stop"]
    last = made.curves[Signal.MIN_PROB][-1]
    assert (last.covered, last.differ) == (len(ended), sum(a.token_ids != b.token_ids for a, b in ended))


def test_another_tower_is_another_model():
    small, large = pair()
    other = engine(0.02, "vision_tower")
    assert ModelId.of(other).vision != ModelId.of(large).vision
    assert ModelId.of(other).fingerprint == ModelId.of(large).fingerprint
    made = made_up(0.5, small, large=ModelId.of(large))
    with pytest.raises(IncompatibleModels, match="vision"):
        made.check_models(ModelId.of(small), replace(ModelId.of(large), vision=ModelId.of(other).vision))
