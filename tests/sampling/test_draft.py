"""The draft's side of sampling: its draws, the distribution it reports, its confidence; and log-probabilities."""

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams, TokenSequence
from paceline.core.rng import Purpose, gumbel
from paceline.core.tree import TokenTree
from paceline.sampling.distribution import target_distribution
from paceline.sampling.draft_sampler import DraftSampler, confidence
from paceline.sampling.scores import token_logprob
from tests.sampling.helpers import EOS, HISTORY, WARPS, V, sequence


def draft_batch(params: list[SamplingParams], seed: int = 7) -> tuple[Tensor, list[TokenSequence]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(params), V, generator=g) * 2, [
        sequence(p, [4, 5], [6], seed=i * 97 - 3) for i, p in enumerate(params)
    ]


def test_coupled_draws_are_the_targets_own_when_the_laws_agree() -> None:
    logits, seqs = draft_batch([SamplingParams(**w) for w in WARPS.values()] * 3)
    offset = 2
    tokens, q = DraftSampler(coupled=True).sample(logits, seqs, [offset] * len(seqs))
    target = target_distribution(logits.unsqueeze(1), seqs, TokenTree.chain([[6]] * len(seqs)))
    seeds = torch.tensor([s.seed for s in seqs])
    noise = gumbel(seeds, torch.full((len(seqs), 1), 3 + offset), Purpose.TARGET, V)[:, 0]
    noise[torch.tensor(target.is_greedy)] = 0
    assert q is None
    assert torch.equal(tokens, (target.at([*range(len(seqs))], [0] * len(seqs)) + noise).argmax(-1))


def test_q_is_the_law_the_token_was_drawn_from() -> None:
    many = 4000
    params = SamplingParams(temperature=0.9, top_k=6, logit_bias={4: 1.0}, min_tokens=3)
    logits = (torch.randn(1, V, generator=torch.Generator().manual_seed(8)) * 2).expand(many, V)
    seqs = [sequence(params, [4, 5], [6], seed=i) for i in range(many)]
    tokens, q = DraftSampler(coupled=False).sample(logits, seqs, [1] * len(seqs))
    assert q is not None
    want = target_distribution(logits[:1, None], seqs[:1], TokenTree.chain([[6]])).at([0], [0])[0].double().softmax(0)
    torch.testing.assert_close(q[0].double(), want, atol=1e-6, rtol=1e-5)
    counts = torch.bincount(tokens, minlength=V).double()
    assert float(counts[q[0] == 0].sum()) == 0
    expected = q[0].double()[q[0] > 0] * many
    chi = float(((counts[q[0] > 0] - expected) ** 2 / expected).sum())
    assert chi < 25, f"chi-square {chi} with {len(expected) - 1} degrees of freedom"


def test_min_tokens_of_the_draft_counts_the_offset() -> None:
    logits = torch.zeros(1, V)
    logits[0, EOS] = 9.0
    seqs = [sequence(SamplingParams(min_tokens=3), [4, 5], [6])]
    drawn = [int(DraftSampler(coupled=True).sample(logits, seqs, [offset])[0]) for offset in range(4)]
    assert [token == EOS for token in drawn] == [False, False, True, True]


@pytest.mark.parametrize("coupled", [True, False])
def test_draft_rows_are_bitwise_independent(coupled: bool) -> None:
    """Also where they have drafted more or fewer tokens."""
    logits, seqs = draft_batch([SamplingParams(**{**h, **w}) for h in HISTORY.values() for w in WARPS.values()])
    offsets = [b % 3 for b in range(len(seqs))]
    tokens, q = DraftSampler(coupled).sample(logits, seqs, offsets)
    for b, seq in enumerate(seqs):
        token, drawn = DraftSampler(coupled).sample(logits[b : b + 1], [seq], [offsets[b]])
        assert int(token) == int(tokens[b])
        assert (drawn is None) == (q is None)
        assert drawn is None or q is None or torch.equal(drawn[0], q[b])
        if q is not None and seq.params.temperature == 0:
            assert float(q[b, tokens[b]]) == 1.0
            assert float(q[b].sum()) == 1.0


def test_confidence_is_the_softmax_of_the_token() -> None:
    logits = torch.randn(3, V)
    tokens = torch.tensor([1, 2, 3])
    want = logits.softmax(-1)[torch.arange(3), tokens]
    torch.testing.assert_close(confidence(logits, tokens), want)


def test_token_logprob() -> None:
    row = torch.randn(V)
    row[9] = 20.0
    want = torch.log_softmax(row, 0)
    got = token_logprob(row.bfloat16().float(), 4, 3)
    assert got.token_id == 4
    assert next(iter(got.top)) == 9
    assert len(got.top) == 3
    assert got.logprob == pytest.approx(float(want[4]), abs=0.2)
    assert token_logprob(row, 4, 0).top == {}
    assert token_logprob(row, 4, 0).logprob == pytest.approx(float(want[4]))
