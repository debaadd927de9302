"""A drafter that learns, on a tiny model, with rounds of training that take a moment."""

import time
from pathlib import Path
from typing import Any, cast

from paceline import LLM, Fixed, SamplingParams
from paceline.learn.drafter import Learned
from paceline.learn.folder import LearnFolder, LearnSettings
from paceline.learn.trainer import Gate, Trainer
from paceline.methods.spec import HeadSpec, spec_class
from paceline.target import LoadedModel
from tests.helpers import loaded, prompt

QUICK = LearnSettings(
    every=100, recent=4000, held_out=0.3, epochs=6, max_tokens=256, accumulate=1, lr=1e-2, trial=6, idle_s=0
)
PROMPTS = [prompt(5 + i % 7, seed=i) for i in range(16)]
GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=7)


def head_spec(folder: Path, method: str = "eagle") -> HeadSpec:
    return cast("Any", spec_class(method))(model=str(folder))


def learning_llm(
    folder: Path, head: HeadSpec | None = None, settings: LearnSettings = QUICK, trains: bool = False,
    target: LoadedModel | str | None = None, **how: Any,
) -> LLM:  # fmt: skip
    """By default the test trains, and not another process."""
    drafter = Learned(head, folder, settings, trains)
    return LLM(target or loaded(), drafter=drafter, policy=Fixed(3), max_num_seqs=4, **how)


def trainer(folder: Path, settings: LearnSettings = QUICK) -> Trainer:
    return Trainer(LearnFolder(folder), settings, Gate(is_open=True))


def until(is_true, seconds: float = 60.0) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def answers(llm: LLM, params=GREEDY, prompts=PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
