"""The distribution of every node of a draft tree, given the path that leads to it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams, TokenSequence
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution
from paceline.errors import NumericsError
from paceline.sampling.distribution import target_distribution
from tests.sampling.helpers import EOS, HISTORY, WARPS, V, check_target, edit_in_place, every_score, sequence


def random_tree(generator: torch.Generator, roots: list[int], nodes: int, low: int = 0, high: int = 14) -> TokenTree:
    """Branching trees over a few tokens, so that n-grams, bad words and endings do occur; some probes."""
    batch = len(roots)
    tokens = torch.randint(low, high, (batch, nodes), generator=generator)
    tokens[:, 0] = torch.tensor(roots)
    parents = torch.tensor(
        [[-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]] * batch
    )
    leaf = torch.ones(batch, nodes, dtype=torch.bool).scatter_(1, parents.clamp(min=0), False)
    probe = leaf & (torch.rand(batch, nodes, generator=generator) < 0.2)
    probe[:, 0] = False
    return TokenTree.from_lists(tokens.tolist(), parents.tolist(), probes=probe.tolist())


@pytest.mark.diagonal
@pytest.mark.parametrize("warps", WARPS, ids=str)
@pytest.mark.parametrize("history", HISTORY, ids=str)
def test_every_node_of_a_branching_tree(history: str, warps: str) -> None:
    g = torch.Generator().manual_seed(0)
    params = SamplingParams(**HISTORY[history], **WARPS[warps])
    seqs = [
        sequence(
            params, torch.randint(0, 14, (9,), generator=g).tolist(), torch.randint(4, 14, (n,), generator=g).tolist()
        )
        for n in (0, 4)
    ]
    tree = random_tree(g, [s.token_ids[-1] for s in seqs], 8)
    logits = torch.randn(2, 8, V, generator=g) * 2
    before = logits.clone()
    assert check_target(target_distribution(logits, seqs, tree), logits, seqs, tree) >= 4
    assert torch.equal(logits, before), "the logits were written to"


def law_of_root_prefix(logits: Tensor, seqs: list[TokenSequence], tree: TokenTree) -> TargetDistribution:
    """Mutant: the processors see the committed prefix, whatever the node."""
    parts = [
        target_distribution(logits[:, i : i + 1], seqs, TokenTree.chain([[s.token_ids[-1]] for s in seqs]))
        for i in range(8)
    ]
    return TargetDistribution(torch.cat([every_score(p) for p in parts], 1), parts[0].is_greedy)


def law_of_rows_above(logits: Tensor, seqs: list[TokenSequence], tree: TokenTree) -> TargetDistribution:
    """Mutant: the processors see the rows above in the tree instead of the path."""
    return target_distribution(logits, seqs, TokenTree.chain(tree.lists.token_ids))


@pytest.mark.parametrize("mutant", [law_of_root_prefix, law_of_rows_above])
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bigrams", "bad words", "min tokens", "user"])
def test_the_checker_catches_a_wrong_path(mutant: Callable[..., TargetDistribution], name: str) -> None:
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        seq = sequence(SamplingParams(**HISTORY[name]), [4, 7, 9, 10], [12, 8, 4, 7])
        tree = random_tree(g, [7], 8, low=4)
        logits = torch.randn(1, 8, V, generator=g)
        check_target(target_distribution(logits, [seq], tree), logits, [seq], tree)
        try:
            check_target(mutant(logits, [seq], tree), logits, [seq], tree)
        except AssertionError:
            return
    pytest.fail("never caught")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("node", [0, 2])
def test_bad_logits_are_named_where_the_walk_meets_them(value: float, node: int) -> None:
    seq = sequence(SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.3), [1, 2, 3])
    tree = TokenTree.from_lists([[3, 4, 5]], [[-1, 0, 1]])
    logits = torch.randn(1, 3, V)
    want = every_score(target_distribution(logits, [seq], tree))
    logits[0, node, 7] = value
    target = target_distribution(logits, [seq], tree)
    got = every_score(target)
    for other in range(3):
        assert torch.equal(got[0, other], want[0, other]) == (other != node)
    assert not bool(got[0, node].max().isfinite())
    with pytest.raises(NumericsError, match=f"token {1 + node} of the answer"):
        raise target.error(0, node, 1 + node)


def test_a_law_asks_no_processor_before_a_node_is_read() -> None:
    seen: list[list[int]] = []

    def record(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return edit_in_place(ids, scores)

    seq = sequence(SamplingParams(logits_processors=(record,)), [1, 2])
    tree = TokenTree.from_lists([[2, 2, 9, EOS, 9, 4, 9]], [[-1, 0, 1, 0, 3, 0, 5]])
    target = target_distribution(torch.randn(1, 7, V), [seq], tree)
    assert seen == []
    target.at([0, 0, 0], [0, 6, 3])
    assert seen == [[1, 2], [1, 2, 4, 9]], "node 3 ends the answer: nothing comes after it"
