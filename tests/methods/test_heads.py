"""Medusa and blockwise drafters: what they read and propose, and that answers stay those of plain decoding."""

import math
from dataclasses import replace

import pytest
import torch

from paceline import SamplingParams
from paceline.core.request import TokenSequence
from paceline.core.walk import TargetDistribution
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.heads.top_tokens import TokenRanking
from paceline.methods.parallel.drafter import Blockwise, Medusa
from paceline.methods.parallel.head import MedusaConfig, MedusaHead
from paceline.sampling.warpers import warp
from paceline.target import ModelRunner
from paceline.verify import Coupled, Typical
from tests.helpers import Budgets, assert_identical, loaded, prompt, run, runner, sequence
from tests.methods.heads import SOME, attached, blockwise, last_states, medusa, random_head, watched
from tests.oracle import choose_token

PROMPTS = [prompt(5), prompt(2, 1), prompt(11, 2)]
DOUBLE = torch.float64


def not_of_the_last_state(kind, make, dtype) -> list[str]:
    """The rounds in which some head i's token is not the most probable by its distribution at f_{T-2}."""
    target = loaded("llama", dtype)
    head = attached(make(target), target)
    seen, wrong = 0, list[str]()

    def check(seqs, budgets, made):
        nonlocal seen
        for row, seq in enumerate(seqs):
            seen += 1
            # T tokens x_0 .. x_{T-1}, the last one the root; f_{T-2} is the newest state the target has
            state = last_states(target, seq.token_ids)[len(seq.token_ids) - 2]
            probs = [head.logits(head.hidden(state, i), i).softmax(-1) for i in range(3)]
            tokens = made.tree.token_ids[row][~made.tree.is_probe[row]].tolist()
            sure = made.confidence[row, 1:4].double()
            best = [int(one.argmax()) for one in probs]
            expected = torch.stack([one.max() for one in probs]).double()
            if tokens[1:] != best or not torch.allclose(sure, expected, atol=1e-6, rtol=1e-3):
                wrong.append(f"{seq.token_ids}: {tokens[1:]} of {sure}, not {best} of {expected}")

    watched(kind(head, ngrams=False), target, PROMPTS, check)
    assert seen == 30
    return wrong


class Older(Blockwise):
    """Reads f_{T-3}, the state before the last."""

    def bind(self, target, verifier):
        super().bind(target, verifier)
        read = target.read_states
        self._target = type("Shifted", (), {})()
        self._target.loaded, self._target.vocab_size = target.loaded, target.vocab_size
        self._target.read_states = lambda s, b, e, n: read(s, max(0, b - 1), max(1, e - 1), n)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=str)
def test_blockwise_reads_the_state_before_the_root(dtype):
    assert not not_of_the_last_state(Blockwise, blockwise, dtype)
    assert not_of_the_last_state(Older, blockwise, dtype)


@pytest.mark.parametrize("own", [False, True])
def test_packed_heads_say_what_they_said(own):
    """Where native kernels run them, in float32 whatever the weights are."""
    target = loaded("llama", torch.bfloat16)
    head = attached(medusa(target, 3, SOME, bias=True, own_lm_head=own), target)
    drafter = Medusa(head)
    drafter.bind(ModelRunner(target, 1), Coupled())
    states = torch.randn(2, 32).bfloat16()
    want, got = head(states).float(), drafter.heads(states.float())
    assert got.dtype is torch.float32
    assert (got - want).abs().max() < 0.1 * want.std()


def test_fresh_heads_say_what_the_target_says():
    """Of the token after t, not of the one after that: W starts at zero."""
    target = loaded("llama", DOUBLE)
    fresh = MedusaHead(MedusaConfig(32, (2,), 97, 97, 2, bias=True)).double()
    states = last_states(target, prompt(6))
    expected = states @ target.model.get_output_embeddings().weight.detach().T
    assert torch.allclose(attached(fresh, target)(states), expected.unsqueeze(1).expand(-1, 2, -1))


def test_names_are_those_of_published_files():
    head = medusa(loaded(), 2, SOME, num_layers=2, bias=True, own_lm_head=True)
    assert set(head.state_dict()) == {
        "draft_ids",
        *(f"blocks.{i}.layers.{j}.{part}" for i in (0, 1) for j in (0, 1) for part in ("weight", "bias")),
        "lm_heads.0.weight",
        "lm_heads.1.weight",
    }
    states = torch.randn(3, 32)
    h = states + torch.nn.functional.silu(head.blocks[1].layers[0](states))
    h = h + torch.nn.functional.silu(head.blocks[1].layers[1](h))
    assert torch.allclose(head(states)[:, 1], h @ head.lm_heads[1].weight.T)
    assert head(states, 1).shape == (3, 1, len(SOME))


def drafted(budget: Budgets, top_k: int = 4, ids=None, temperature: float = 0.0):
    """(tokens, parents, confidences) of every Medusa draft, root first."""
    target, found = loaded(), []

    def check(seqs, budgets, made):
        for row in range(len(seqs)):
            kept = ~made.tree.is_probe[row]
            found.append([t[row][kept].tolist() for t in (made.tree.token_ids, made.tree.parents, made.confidence)])

    watched(
        Medusa(medusa(target, 3, ids), top_k, ngrams=False), target, PROMPTS, check, budget, temperature=temperature
    )
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_medusa_trees_keep_their_budgets(temperature):
    for tokens, parents, sure in drafted(Budgets(depth=2, nodes=9), ids=SOME, temperature=temperature):
        assert len(tokens) == 10
        assert all(token in SOME for token in tokens[1:])
        siblings = list(zip(parents[1:], tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings)
        assert all(parents.count(parent) <= 4 for parent in parents)
        stands, depth = [1.0], [0]
        for parent, p in zip(parents[1:], sure[1:], strict=True):
            stands.append(stands[parent] * p)
            depth.append(depth[parent] + 1)
        assert max(depth) == 2
    for _, parents, sure in drafted(Budgets(depth=3, nodes=30, min_probs=[0.02]), temperature=temperature):
        stands = [1.0]
        for parent, p in zip(parents[1:], sure[1:], strict=True):
            stands.append(stands[parent] * p)
        assert min(stands) >= 0.02
    assert all(len(tokens) == 1 for tokens, _, _ in drafted(Budgets(depth=3, nodes=30, min_probs=[1.0])))
    one_level = drafted(Budgets(depth=3, nodes=30, should_continue=lambda sure: False))
    assert all(set(parents[1:]) == {0} for _, parents, _ in one_level)


def test_a_prompt_of_one_token_has_no_state_to_draft_from():
    target = loaded()
    for drafter in (Medusa(medusa(target)), Blockwise(blockwise(target))):
        (seq,) = assert_identical(runner(target), drafter, [([7], SamplingParams(max_tokens=8))], 2)
        assert seq.rounds[0].num_drafted == 0
        assert seq.rounds[1].num_drafted == 2


def test_sampled_rows_draft_the_target_s_own_choice():
    """With q = p and the noise of rule R7, the most probable is what `Coupled` emits; at another position it is not."""
    target = loaded()
    logits = torch.randn(64, 97, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_k=30)
    seqs = [sequence(target, prompt(3 + n % 5, n), params, seed=n) for n in range(64)]
    target = TargetDistribution(warp(logits, [params] * 64).unsqueeze(1), [False] * 64)
    positions = torch.tensor([[len(seq.token_ids) + 2] for seq in seqs])
    expected = choose_token(target, torch.arange(64), positions).squeeze(1).tolist()
    ids = torch.arange(97)

    def agreement(offset: int, coupled: bool) -> float:
        tokens, logps = TokenRanking(ids, coupled).top(logits, seqs, offset, 5)
        assert all(row == sorted(row, reverse=True) and math.fsum(map(math.exp, row)) <= 1.001 for row in logps)
        return sum(row[0] == token for row, token in zip(tokens, expected, strict=True)) / 64

    assert agreement(2, True) == 1
    assert agreement(3, True) < 0.3
    assert agreement(2, False) < 0.3


def test_a_pass_finds_the_best_tokens_only_where_scores_are_logits_and_noise():
    """Then the two together are the scores, in batches of greedy and sampled rows as well."""
    target, logits, ids = loaded(), torch.randn(2, 97), torch.arange(97)

    def given(*params: SamplingParams) -> list[TokenSequence]:
        return [sequence(target, prompt(3 + n, n), each, seed=n) for n, each in enumerate(params)]

    greedy, cool, hot = (SamplingParams(temperature=temperature) for temperature in (0.0, 0.6, 1.5))
    exact, lossless = TokenRanking(ids, True), TokenRanking(ids, False)
    for mixed in (given(greedy, cool), given(hot, cool)):
        count, noise = exact.in_pass(mixed, 2, 5)
        assert count == 5
        assert noise is not None
        assert torch.allclose(logits + noise, exact.scores(logits, mixed, 2), atol=1e-6)
    assert exact.in_pass(given(greedy, greedy), 2, 5) == lossless.in_pass(given(greedy, cool), 2, 5) == (5, None)
    top_p = SamplingParams(temperature=0.6, top_p=0.9)
    assert exact.in_pass(given(greedy, top_p), 2, 5) == lossless.in_pass(given(greedy, hot), 2, 5) == (0, None)
    assert replace(exact, banned=torch.tensor([3])).in_pass(given(greedy, greedy), 2, 5) == (0, None)


def test_medusa_with_typical_acceptance():
    target, params = loaded(), SamplingParams(temperature=1.0, max_tokens=24)
    seqs = [sequence(target, ids, params) for ids in PROMPTS]
    run(runner(target), Medusa(medusa(target)), seqs, 3, 30, Typical(allow_lossy=True))
    assert all(seq.num_output == 24 for seq in seqs)
    assert sum(r.num_accepted for seq in seqs for r in seq.rounds) > 0


def test_what_does_not_fit_is_refused():
    target = loaded()
    other = MedusaHead(MedusaConfig(16, (2,), 97, 97, 2))
    with pytest.raises(IncompatibleModels, match="hidden size 16"):
        run(runner(target), Medusa(other), [])
    early = MedusaHead(MedusaConfig(32, (1,), 97, 97, 2))
    with pytest.raises(IncompatibleModels, match="states"):
        run(runner(target), Medusa(early), [])
    with pytest.raises(ConfigError, match=r"wrong value.*MedusaHead"):
        run(runner(target), Medusa(blockwise(target)), [])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="top_k"):
        Medusa(medusa(target), 0)
    capped = loaded("gemma2")
    with pytest.raises(IncompatibleModels, match="final_logit_softcapping"):
        run(runner(capped), Eagle(random_head(capped, 3)), [])


def test_measured_times():
    target = loaded()
    drafter = Medusa(medusa(target), 6)
    run(runner(target), drafter, [sequence(target, prompt(4), SamplingParams(max_tokens=3))])
    per_token, per_pending = drafter.seconds()["medusa"]
    assert per_token > 0
    assert per_pending == 0
    offer = drafter.draft_options(sequence(target, prompt(4), SamplingParams()))[0]
    assert (offer.branches, offer.steps(3)) == (6, 1)
    assert drafter.draft_options(sequence(target, [5], SamplingParams()))[0].hint == -1
