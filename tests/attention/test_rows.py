"""After every round the cache holds what a fresh prefill of the same text would hold, whatever was accepted."""

import random

import pytest
import torch

from paceline import SamplingParams
from paceline.attention.masks import PassLayout
from paceline.errors import IncompatibleModels
from paceline.target import ModelRunner, SlotCache
from paceline.target.self_test import check
from tests.adversaries import LeastLikely, RandomTrees, Scripted, Window
from tests.attention.common import (
    CACHE_MUTANTS,
    LAYOUT_MUTANTS,
    ForgetsToGrow,
    LateChunks,
    NoWindow,
    sound_after_every_round,
    with_cache,
    with_layout,
)
from tests.helpers import REPEATING, loaded, oracle, prompt

LONG = SamplingParams(temperature=1.0, max_tokens=60)
RANDOM = [random.Random(4).randint(0, 4) for _ in range(20)]
SCRIPTS = {"none": [0], "all": [None], "alternating": [None, 0], "random": RANDOM}


def scripted(name: str, script, ids=REPEATING, kind=Scripted, branching: bool = True, dtype=torch.float32):
    return kind({tuple(ids): oracle(loaded(name, dtype), ids, LONG).token_ids}, script, branching)


@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_scripted_acceptance(script, branching):
    drafter = scripted("llama", script, branching=branching)
    assert sound_after_every_round(ModelRunner(loaded(), 2), drafter, REPEATING, 10, LONG)


MORE = [pytest.param(name, marks=pytest.mark.more) for name in ("gemma3", "gemma3n", "cohere2")]


@pytest.mark.parametrize("name", ["mistral", "gpt2", "deepseek_v3", "gpt_oss", "gemma4", "llama4", *MORE])
def test_past_the_sliding_window(name):
    """Windows of eight, forty tokens: rows of the past stay although nobody sees them any more."""
    drafter = scripted(name, [None, 2, 3, None], kind=Window)
    assert sound_after_every_round(ModelRunner(loaded(name), 1), drafter, REPEATING, 9, LONG)


@pytest.mark.parametrize("drafter", [RandomTrees, LeastLikely])
def test_what_drafters_leave_behind_is_gone(drafter):
    assert sound_after_every_round(ModelRunner(loaded(), 1), drafter(), REPEATING, 6, LONG)


@pytest.mark.parametrize("length", [250, 254, 255, 256, 257])
def test_capacity_grows_in_the_middle(length):
    """The cache starts with 256 columns and doubles while a text is being written."""
    target = loaded("llama", max_position_embeddings=1024)
    ids = prompt(length)
    future = {tuple(ids): oracle(target, ids, SamplingParams(temperature=1.0, max_tokens=20)).token_ids}
    on = ModelRunner(target, 2)
    assert on.cache.capacity == 256
    assert sound_after_every_round(on, Scripted(future, [1, 2], True), ids, 3, LONG)
    assert on.cache.capacity == 512


@pytest.mark.parametrize("mutant", CACHE_MUTANTS)
def test_cache_mutants_are_caught(mutant):
    on = with_cache(ModelRunner(loaded(), 2), mutant)
    assert not sound_after_every_round(on, scripted("llama", [2, None]), REPEATING, 4, LONG)


@pytest.mark.parametrize("mutant", LAYOUT_MUTANTS)
def test_layout_mutants_are_caught(mutant, monkeypatch):
    on = ModelRunner(loaded("llama", torch.float64), 2)  # the torch path: native passes have mutants of their own
    drafter = scripted("llama", [2, None], dtype=torch.float64)
    with_layout(monkeypatch, on.loaded, mutant)
    assert not sound_after_every_round(on, drafter, REPEATING, 4, LONG)
    with pytest.raises(IncompatibleModels, match="same logits for a tree"):  # loading would have caught it as well
        check(on.loaded)


@pytest.mark.parametrize(("name", "mutant"), [("mistral", NoWindow), ("llama4", LateChunks)])
def test_a_lost_window_is_caught(name, mutant, monkeypatch):
    on, drafter = ModelRunner(loaded(name, torch.float64), 1), scripted(name, [2], dtype=torch.float64)
    with_layout(monkeypatch, on.loaded, mutant)
    assert not sound_after_every_round(on, drafter, REPEATING, 2, LONG)


def test_growth_that_forgets_is_caught():
    target = loaded("llama", max_position_embeddings=1024)
    on = with_cache(ModelRunner(target, 1), ForgetsToGrow)
    assert not sound_after_every_round(on, RandomTrees(), prompt(255), 2, LONG)


def test_the_checker_takes_the_library_s_own_classes(monkeypatch):
    """The same harness without a mutation passes: what the mutants fail is their fault alone."""
    on = with_cache(ModelRunner(loaded(), 2), SlotCache)
    drafter = scripted("llama", [2, None])
    with_layout(monkeypatch, on.loaded, PassLayout)
    assert sound_after_every_round(on, drafter, REPEATING, 4, LONG)
