"""The numbers of a benchmark, held against worked examples; each formula has a mutant that must fail."""

import math

import numpy as np
import pytest

from paceline import LLM
from paceline.config import parse
from paceline.measure.summary import acceptance_by_position, draft_fingerprints, speedup, trained_hash
from paceline.target import load_model
from paceline.zoo.packaged import head_folder
from tests.cli.helpers import save
from tests.tiny import tiny_model

PLAIN = [(100, 10.0), (20, 1.0)]
FAST = [(100, 5.0), (20, 2.0)]
"""Twice as fast on the long answer, half as fast on the short one."""
ROUNDS = [(3, 1), (3, 3), (1, 1), (0, 0)]


def is_right(function) -> bool:
    found = function(PLAIN, FAST)
    return math.isclose(found["speedup"], 11 / 7) and math.isclose(found["speedup_prompt_mean"], (2 + 0.5) / 2)


def test_speedup():
    assert is_right(speedup)
    assert set(speedup([], []).values()) == {None}


@pytest.mark.parametrize(
    "mutant",
    [
        lambda plain, fast: speedup(fast, plain),
        lambda plain, fast: speedup(plain, list(reversed(fast))),
        lambda plain, fast: speedup([np.sum(plain, 0)], [np.sum(fast, 0)]),
    ],
    ids=["upside down", "unpaired", "pooled before averaging"],
)
def test_a_wrong_speedup_is_noticed(mutant):
    assert not is_right(mutant)


def test_intervals_need_five_prompts():
    for count in (1, 4, 5):
        found = speedup([(10, 2.0)] * count, [(10, 1.0)] * count)
        bound = None if count < 5 else pytest.approx(2)  # of equal prompts it is a point
        assert (found["speedup"], found["speedup_low"], found["speedup_high"]) == (pytest.approx(2), bound, bound)
        assert (found["speedup_prompt_mean_low"], found["speedup_prompt_mean_high"]) == (bound, bound)


def test_interval_is_reproducible_and_covers_the_normal_one():
    plain = [(50, 1.0)] * 40
    fast = [(50, 1.0 / (1.5 + 0.01 * i)) for i in range(40)]  # ratios 1.50 to 1.89
    found = speedup(plain, fast, seed=3)
    assert found == speedup(plain, fast, seed=3)
    assert found != speedup(plain, fast, seed=4)
    half = 1.96 * 0.1155 / math.sqrt(40)  # by the normal distribution: standard deviation of the ratios over sqrt(n)
    assert found["speedup_prompt_mean"] == pytest.approx(1.695)
    assert found["speedup_prompt_mean_low"] == pytest.approx(1.695 - half, abs=0.006)
    assert found["speedup_prompt_mean_high"] == pytest.approx(1.695 + half, abs=0.006)


def acceptance_is_right(function) -> bool:
    return [*function(ROUNDS).values()] == [[1.0, 0.5, 0.5], [3, 2, 2]]


def test_acceptance_by_position():
    assert acceptance_is_right(acceptance_by_position)
    assert [*acceptance_by_position([(0, 0)]).values()] == [*acceptance_by_position([]).values()] == [[], []]


@pytest.mark.parametrize(
    "mutant",
    [
        lambda rounds: acceptance_by_position([(max(d for d, _ in rounds), a) for d, a in rounds]),
        lambda rounds: acceptance_by_position([(d, a + 1) for d, a in rounds]),
        lambda rounds: acceptance_by_position([(a, a) for _, a in rounds]),
    ],
    ids=["short drafts count as rejected", "the bonus token counts as accepted", "rejections forgotten"],
)
def test_wrong_acceptance_is_noticed(mutant):
    assert not acceptance_is_right(mutant)


def test_every_draft_is_named_by_its_weights(tmp_path):
    for name, seed in (("target", 0), ("draft", 1)):
        save(tmp_path / name, tiny_model("llama", seed=seed))
    draft = str(tmp_path / "draft")
    both = {"method": "choose", "drafters": [{"method": "ngram"}, {"method": "draft_model", "model": draft}]}
    configs = [parse(f"model:{draft}"), parse(both), parse("lookup")]
    target = load_model(str(tmp_path / "target"), "float32")
    llms = [LLM(target, drafter=config.build()[0], numerics="fast") for config in configs]
    known = load_model(draft).fingerprint
    assert draft_fingerprints(llms, configs) == {f"model:{draft}": known}
    assert draft_fingerprints(llms[1:], configs[1:]) == {f"model:{draft}": known}
    assert draft_fingerprints(llms[2:], configs[2:]) == {}
    assert known != target.fingerprint


def test_heads_are_named_by_their_files(tmp_path):
    name = "smollm2-135m-medusa"
    own = trained_hash(parse(f"head:{name}").drafter)
    other = tmp_path / "head"
    other.mkdir()
    for file in head_folder(name).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert own is not None
    assert trained_hash(parse(f"head:{other}").drafter) == own
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(bytes(data))
    assert trained_hash(parse(f"head:{other}").drafter) != own
    assert trained_hash(parse("self-int4").drafter) is None
