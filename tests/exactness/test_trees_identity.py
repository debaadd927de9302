"""Trees of EAGLE change no answer, and a head that knows the target is accepted whole."""

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from paceline import Choose, PromptLookup, Ratio, SamplingParams
from paceline.core.interfaces import DraftBudget, DraftPolicy, Verifier
from paceline.core.request import Sequence
from paceline.errors import IncompatibleModels
from paceline.methods import DFlash, Eagle
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.target import LoadedModel, ModelRunner, make_runner
from tests.exactness.test_identity import OPTIONS
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, loaded, memoryless, prompt, run, sequence
from tests.methods.heads import random_head

ENDS = frozenset({2, 30, 31, 60})


class Varying(DraftPolicy):
    """Another budget every round, sometimes none, sometimes of one arm, sometimes of the other."""

    def __init__(self, arms: int = 1, seed: int = 0):
        self.rng, self.arms = random.Random(seed), arms

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        return [self.budget() for _ in seqs]

    def budget(self) -> DraftBudget:
        depth = self.rng.choice([0, 1, 2, 3, 5])
        last = self.rng.randint(1, 9)
        return DraftBudget(
            depth,
            self.rng.choice([depth, 2 * depth, 20]),
            self.rng.randrange(self.arms),
            self.rng.choice([None, lambda sure: len(sure) < last]),
            self.rng.choice([(), (0.001,), (0.0, 0.0, 0.01, 0.05)]),
        )


def decode(drafter, params, slots=4, invariant=False, arms=1, eos=NO_EOS, ids=REPEATING, target=None):
    on = make_runner(target or loaded(), slots, invariant=invariant)
    requests = [([*ids, 3 + row], one, SEED, eos) for row, one in enumerate(params)]
    made = assert_identical(on, drafter, requests, depth=5, policy=Varying(arms))
    assert sum(r.num_nodes for seq in made for r in seq.rounds), "nothing was drafted"
    return made


@pytest.mark.diagonal
@pytest.mark.parametrize(("slots", "invariant"), [(1, False), (1, True), (4, True)])
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "peagle", "dflash"])
def test_every_tree(method, tree, slots, invariant):
    masks = {"mask_token_id": 7, "num_speculative_tokens": 3} if method == "peagle" else {}
    head = random_head(loaded(), {"eagle": 1, "dflash": "dflash"}.get(method, 3), **masks)
    drafter = (DFlash if method == "dflash" else Eagle)(head, tree)
    params = [SamplingParams(temperature=t, max_tokens=12) for t in (0.0, 0.8) for _ in range(2)]
    made = decode(drafter, params, slots, invariant)
    assert {source for seq in made for source in seq.sources} <= {"", method}


def test_every_option():
    params = [SamplingParams(t, max_tokens=12, **options) for options in OPTIONS.values() for t in (0.0, 0.8)]
    decode(Eagle(random_head(loaded(), 3)), params, eos=ENDS)


def test_stop_tokens():
    params = [
        SamplingParams(temperature=0.8, max_tokens=40, stop_token_ids=(9 * k, 9 * k + 1)) for k in range(1, 10, 2)
    ]
    made = decode(Eagle(random_head(loaded(), 3)), params)
    assert any(seq.finish_reason == "stop" for seq in made)


@pytest.mark.parametrize("tree", ["dynamic", "chain"])
def test_beside_lookup(tree):
    params = [SamplingParams(temperature=t, max_tokens=24) for t in (0.0, 0.8, 0.0, 1.2)]
    made = decode(Choose([PromptLookup(), Eagle(random_head(loaded(), 3), tree)]), params, arms=2)
    drafters = {record.source for seq in made for record in seq.rounds if record.num_nodes}
    assert drafters == {"lookup", "eagle"}


def test_two_heads_on_one_target():
    """They watch different states."""
    both = Choose([Eagle(random_head(loaded(), 1)), Eagle(random_head(loaded(), 3), "static")])
    decode(both, [SamplingParams(temperature=t, max_tokens=16) for t in (0.0, 0.8)], arms=2)


def test_caches_that_grow(monkeypatch):
    monkeypatch.setattr("paceline.methods.eagle.passes.CHUNK", 16)
    params = [SamplingParams(temperature=t, max_tokens=30) for t in (0.0, 0.8)]
    decode(Eagle(random_head(loaded(), 3)), params, ids=prompt(90))


def test_a_target_that_does_more_to_its_logits_is_refused():
    with pytest.raises(IncompatibleModels, match="final_logit_softcapping"):
        decode(Eagle(random_head(loaded("gemma2"), 3)), [SamplingParams(max_tokens=4)], target=loaded("gemma2"))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_architectures(name):
    params = [SamplingParams(temperature=t, max_tokens=12) for t in (0.0, 0.8)]
    decode(Eagle(random_head(loaded(name), 3)), params, target=loaded(name))


# A head that is always right: the target's next token depends on the current one alone, and so does the head's.


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
