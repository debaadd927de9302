"""Logits processors against transformers' own, and what users' processors may not do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from paceline.core.request import SamplingParams
from paceline.errors import ConfigError, NumericsError
from paceline.sampling.distribution import target_distribution
from tests.sampling.helpers import HISTORY, WARPS, V, hf_processors, hf_warpers, root_only, sequence


@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("history", ["bias", "bad words", "min tokens", "repetition", "bigrams", "trigrams"])
def test_plain_sequences_match_transformers(history: str, warps: str) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        params = SamplingParams(**HISTORY[history], **WARPS[warps])
        prompt = torch.randint(0, 14, (8,), generator=g).tolist()
        seq = sequence(params, prompt, torch.randint(4, 14, (3,), generator=g).tolist())
        logits = torch.randn(1, 1, V, generator=g) * 3
        chain = hf.LogitsProcessorList(
            [*hf_processors(params, len(prompt), history == "bad words"), *hf_warpers(params)]
        )
        want = chain(torch.tensor([seq.token_ids]), logits[0].double())
        got = target_distribution(logits, [seq], root_only(seq)).at([0], [0])
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        torch.testing.assert_close(got.double().softmax(-1), want.softmax(-1), atol=1e-6, rtol=1e-5)


def returns_nothing(ids: Tensor, scores: Tensor) -> None:
    scores[:] = 0


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (returns_nothing, "returns_nothing.*NoneType"),
        (lambda ids, scores: scores[0], r"lambda.*\(40,\)"),
        (lambda ids, scores: scores * -torch.inf, "forbid|NaN"),
        (lambda ids, scores: torch.full_like(scores, -torch.inf), "forbid every token .*token 1 of the answer"),
        (lambda ids, scores: scores * torch.nan, "NaN"),
    ],
)
def test_bad_processors_are_named(processor: Callable[..., Tensor], words: str) -> None:
    seq = sequence(SamplingParams(logits_processors=(processor,)), [1, 2])
    target = target_distribution(torch.zeros(1, 1, V), [seq], root_only(seq))
    assert not bool(target.at([0], [0]).max().isfinite())
    with pytest.raises((ConfigError, NumericsError), match=words):
        raise target.error(0, 0, 1)
