"""A head that is always right is accepted whole: the target's next token depends on the current one alone."""

import pytest
import torch

from paceline import Ratio, SamplingParams
from paceline.core.interfaces import Verifier
from paceline.methods import Eagle
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.target import LoadedModel, ModelRunner
from tests.helpers import SEED, memoryless, prompt, run, sequence
from tests.methods.heads import random_head


def knowing_head(target: LoadedModel) -> EagleHead:
    """Of [embedding; state] fc keeps the embedding, the layer adds nothing."""
    config = EagleConfig(32, (2,), target.vocab_size, target.vocab_size, 48, 4, 2, 8, 1, 32)
    head = EagleHead(config).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[:, :32] = torch.eye(32)
    return head


def accepted(drafter: Eagle, temperature: float, nodes: int = 4, verifier: Verifier | None = None) -> float:
    """Tokens accepted per round of depth 4, the last rounds left out, where less may be drafted."""
    target = memoryless(eps=1e-30)
    params = SamplingParams(temperature=temperature, max_tokens=31)
    seqs = [sequence(target, prompt(length, length), params, SEED) for length in (3, 30)]
    run(ModelRunner(target, 2), drafter, seqs, 4, nodes, verifier)
    counts = [record.num_accepted for seq in seqs for record in seq.rounds[1:-1]]  # the first came with the prompt
    return sum(counts) / len(counts)


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["dynamic", "chain"])
def test_a_head_that_knows_is_accepted_whole(tree, temperature):
    """With the noise of the position shared, sampled tokens are predicted like the most probable ones."""
    nodes = 4 if tree == "chain" else 6 + 3 * 36  # all that is expanded: a flat distribution makes wide trees
    most = accepted(Eagle(knowing_head(memoryless(eps=1e-30)), tree, top_k=6), temperature, nodes)
    assert most == 4.0 if tree == "chain" else most > 3.5  # the best six of a level are not always the right path
    assert accepted(Eagle(random_head(memoryless(eps=1e-30), 1), tree, top_k=6), temperature, nodes) < 2.0


def test_noise_is_shared_with_the_exact_rule_alone():
    """Another rule's tests would not be independent of the draft; there the most probable tokens are drafted."""
    knowing = knowing_head(memoryless(eps=1e-30))
    without = accepted(Eagle(knowing, "chain"), 1.5, verifier=Ratio())
    assert 0 < without < 3.0


class NoiseOff(Eagle):
    """The noise of the position before."""

    def _children(self, logits, seqs, level):
        return super()._children(logits, seqs, level - 1)


def test_wrong_noise_is_noticed():
    assert accepted(NoiseOff(knowing_head(memoryless(eps=1e-30)), "chain"), 1.5) < 3.0


def test_a_tree_finds_more_than_a_chain():
    """Where the head errs a little, siblings catch it."""
    knowing = knowing_head(memoryless(eps=1e-30))
    torch.manual_seed(0)
    with torch.no_grad():
        knowing.fc.weight[:, :32] += 0.07 * torch.randn(32, 32)
    chain, tree = (accepted(Eagle(knowing, shape), 0.0, 20) for shape in ("chain", "dynamic"))
    assert 0.3 < chain < tree
