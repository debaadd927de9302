"""Token for token the slow decoder's answer: every drafter, temperature, option, window and architecture."""

import pytest
import torch

from paceline import SamplingParams
from paceline.core.request import Sequence
from paceline.target import LoadedModel
from tests.exactness.drafters import DRAFTERS, END
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, loaded, oracle, prompt, runner
from tests.tiny import ARCHITECTURES


def decode(
    target: LoadedModel,
    drafter: str,
    params: list[SamplingParams],
    ids: list[int] = REPEATING,
    depth: int = 4,
    eos_ids: frozenset[int] = NO_EOS,
) -> list[Sequence]:
    """All of `params` in one batch; each row must equal its own slow decoding."""
    requests = [([*ids, 3 + row], one, SEED, eos_ids) for row, one in enumerate(params)]
    future = {tuple(request[0]): oracle(target, *request).token_ids for request in requests}
    return assert_identical(runner(target), DRAFTERS[drafter](target, future), requests, depth)


@pytest.mark.diagonal
@pytest.mark.usefixtures("checked_types")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_at_every_temperature(drafter, temperature):
    (seq,) = decode(loaded(), drafter, [SamplingParams(temperature=temperature, max_tokens=24)])
    if drafter == "all right":  # a perfect draft is accepted whole: 5 tokens a round, after one with the prompt
        assert [r.num_emitted for r in seq.rounds] == [1, 5, 5, 5, 5, 3]
    if drafter == "draft model, same weights":
        assert sum(r.num_accepted for r in seq.rounds) == sum(r.num_drafted for r in seq.rounds)


def halve_odd(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the user's, which depends on the whole past and on its length."""
    scores = scores.clone()
    scores[:, int(ids.sum()) % 2 :: 2] /= 2
    return scores - ids.shape[1]


OPTIONS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "no repeat": {"no_repeat_ngram_size": 3},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {7: 4.0, 9: -8.0, 5: 2.5}},
    "bad words": {"bad_words": ("ab", "c", "5")},
    "min tokens": {"min_tokens": 9},
    "top k": {"top_k": 5},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.1},
    "user's": {"logits_processors": (halve_odd,)},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 4,
        "frequency_penalty": 0.3,
        "logit_bias": {8: 1.5},
        "bad_words": ("xy", "z"),
        "min_tokens": 5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "logits_processors": (halve_odd,),
    },
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_option_in_one_batch(drafter):
    """Greedy and sampled rows side by side, more requests than slots, an end of text that is likely."""
    params = [
        SamplingParams(temperature=0.7 * (row % 2), max_tokens=14, **options)
        for row, options in enumerate(OPTIONS.values())
    ]
    decode(loaded(), drafter, params, eos_ids=frozenset({END, 30, 31}))


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_alone(options, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=16, **options)
    decode(loaded(), "right among wrong", [params])


@pytest.mark.diagonal
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("drafter", ["lookup recent", "draft model", "self int4", "random trees", "right among wrong"])
def test_every_window(drafter, depth):
    params = [SamplingParams(temperature=t, max_tokens=20) for t in (0.0, 1.0)]
    seqs = decode(loaded(), drafter, params, depth=depth)
    if depth == 0:
        assert all(r.num_nodes == 0 and r.num_emitted == 1 for seq in seqs for r in seq.rounds)


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", ["right among wrong", "random trees"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name, drafter):
    """Past the sliding windows of eight, by trees that have to be gathered and by random ones."""
    decode(loaded(name), drafter, [SamplingParams(temperature=t, max_tokens=9) for t in (0.0, 1.0)])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "opt", "qwen3", "gemma2"])
def test_self_draft_on_other_architectures(name):
    params = [SamplingParams(temperature=t, max_tokens=16) for t in (0.0, 1.0)]
    decode(loaded(name), "self int4", params)


@pytest.mark.parametrize("drafter", ["self int4", "random trees", "draft model, same weights"])
def test_float64(drafter):
    params = [SamplingParams(temperature=t, max_tokens=16) for t in (0.0, 1.0)]
    decode(loaded("llama", torch.float64), drafter, params)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_many_long_answers(drafter):
    """200 prompts of 128 tokens would be the paper's test; the slow decoder makes this one smaller."""
    for seed in range(10):
        params = [SamplingParams(temperature=t, max_tokens=100) for t in (0.0, 0.3, 0.7, 1.0, 1.5)]
        decode(loaded(), drafter, params, prompt(10 + 7 * seed, seed), depth=1 + seed)
