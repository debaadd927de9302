"""Many sequences in one pass: no row minds the others, and greedy rows cost nothing."""

import pytest
import torch

from paceline.core.draft import Draft
from paceline.core.request import SamplingParams
from paceline.core.tree import TokenTree
from paceline.sampling.distribution import target_distribution
from paceline.verify import Coupled
from tests.oracle import choose_token
from tests.sampling.helpers import HISTORY, WARPS, V, every_score, sequence


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    g = torch.Generator().manual_seed(4)
    vocab, width = 5003, 3  # an odd vocabulary: rows start at odd addresses
    options = [{**h, **w} for h, w in zip(list(HISTORY.values()) * 2, list(WARPS.values()) * 4, strict=False)]
    options += list(WARPS.values())
    seqs = [sequence(SamplingParams(**o), [4, 5, 6, 7], [8, 9, i % 14]) for i, o in enumerate(options)]
    rows = [[s.token_ids[-1], 10, 11] for s in seqs]
    logits = torch.randn(len(seqs), width, vocab, generator=g) * torch.rand(len(seqs), 1, 1, generator=g) * 6
    for dtype in (torch.float32, torch.bfloat16):
        batch = every_score(target_distribution(logits.to(dtype), seqs, TokenTree.chain(rows)))
        for b, seq in enumerate(seqs):
            alone = every_score(target_distribution(logits[b : b + 1].to(dtype), [seq], TokenTree.chain([rows[b]])))
            assert torch.equal(alone[0].float(), batch[b]), options[b]
            if not seq.params.needs_history:  # nor does it matter how many nodes share the pass
                one = target_distribution(logits[b : b + 1, :1].to(dtype), [seq], TokenTree.chain([rows[b][:1]]))
                assert torch.equal(one.at([0], [0])[0].float(), batch[b, 0]), options[b]


def test_all_greedy_returns_the_logits_themselves() -> None:
    logits = torch.randn(2, 3, V, dtype=torch.bfloat16)
    seqs = [sequence(SamplingParams(top_k=3, min_tokens=2), [1, 2], [3, 4]) for _ in range(2)]
    target = target_distribution(logits, seqs, TokenTree.chain([[4, 5, 6]] * 2))
    assert target.scores is logits
    assert target.is_greedy == [True, True]


def test_a_mixed_batch_is_float32() -> None:
    logits = torch.randn(2, 1, V, dtype=torch.bfloat16)
    seqs = [sequence(SamplingParams(), [1]), sequence(SamplingParams(temperature=2.0), [1])]
    target = target_distribution(logits, seqs, TokenTree.chain([[1], [1]]))
    scores = target.at([0, 1], [0, 0])
    assert scores.dtype == torch.float32
    assert target.is_greedy == [True, False]
    assert torch.equal(scores[:1], logits[0].float())
    torch.testing.assert_close(scores[1:], logits[1].float() / 2)


@pytest.mark.parametrize("other", WARPS, ids=str)
def test_a_greedy_row_keeps_its_float64_beside_any_other(other: str) -> None:
    """Two scores that float32 cannot tell apart, the larger one second: alone, the row takes it."""
    logits = torch.zeros(2, 1, V, dtype=torch.float64)
    logits[:, 0, 4], logits[:, 0, 5] = 1.0, 1.0 + 1e-12
    seqs = [sequence(SamplingParams(), [1]), sequence(SamplingParams(**WARPS[other]), [1])]
    target = target_distribution(logits, seqs, TokenTree.chain([[1], [1]]))
    assert int(choose_token(target, torch.tensor([1, 1]), torch.tensor([[1], [1]]))[0, 0]) == 5
    draft = Draft(TokenTree.chain([[1], [1]]))
    assert Coupled().verify(draft, target, [1, 1], [1, 1])[0].next_token == 5
