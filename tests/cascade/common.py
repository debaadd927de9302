"""A small and a large model whose answers are short and often, not always, the same; and made-up calibrations."""

from functools import cache

import torch

from paceline import LLM, SamplingParams
from paceline.cascade import Calibration, Signal
from paceline.cascade.bound import Point
from paceline.cascade.calibration import ModelId
from tests.helpers import prompt, tokenizer
from tests.tiny import tiny_model

BIAS = {2: 4.0}  # the end of the text, so that most answers are short
PARAMS = SamplingParams(logit_bias=BIAS, max_tokens=40, seed=1)
LIMIT = 4
PROMPTS = [prompt(6, seed) for seed in range(300)]


def perturbed(noise: float, **overrides: object):
    """The tiny model with noise on its weights."""
    model, rng = tiny_model("llama", **overrides), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.add_(noise * torch.randn(parameter.shape, generator=rng))
    return model


@cache
def large() -> LLM:
    return LLM(tiny_model("llama"), tokenizer=tokenizer(), numerics="fast", max_num_seqs=4)


@cache
def small() -> LLM:
    return LLM(perturbed(0.03), tokenizer=tokenizer(), numerics="fast", max_num_seqs=4)


def made_up(threshold: float, small_llm: LLM | None = None, **changes) -> Calibration:
    """A calibration whose threshold is this."""
    given: dict = {
        "small": ModelId.of(small_llm or small()),
        "large": ModelId.of(large()),
        "count": 400,
        "ended": 300,
        "curves": {Signal.MIN_PROB: (Point(1.0, 0, 0), Point(threshold, 100, 0))},
        "short_limit": LIMIT,
        "small_context": (small_llm or small()).runner.max_length,
        "max_disagreement": 0.01,
        "confidence": 0.95,
        "sampling": {"logit_bias": {"2": 4.0}},
    }
    return Calibration(**{**given, **changes})
