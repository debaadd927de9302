"""SPACE in the loop: ends inside a draft, the cache, other drafters; the states that those read survive its masks."""

import pytest
import torch

from paceline import Choose, PromptLookup, SamplingParams
from paceline.attention.states import StateStore
from paceline.core.interfaces import DraftBudget
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods import Medusa, Space
from paceline.methods.parallel.head import MedusaConfig, MedusaHead
from paceline.policy import Fixed
from paceline.target import ModelRunner, make_runner, wrap_model
from paceline.verify import Coupled
from tests.attention.common import CACHE_MUTANTS, GathersWithoutACopy, sound_after_every_round, with_cache
from tests.helpers import (
    NO_EOS,
    REPEATING,
    SEED,
    VOCAB,
    Budgets,
    assert_identical,
    loaded,
    prompt,
    run,
    sequence,
)
from tests.methods.space.common import adapter, hung
from tests.methods.space.foresight import SAMPLED, decreed, errs, future, knows
from tests.tiny import tiny_model

# States


def states_after(tree: TokenTree, path: list[int], plain: list[int], invariant: bool) -> tuple[torch.Tensor, ...]:
    """Of a runner that took a pass with masks and of one that decoded the path token by token."""
    layers, text, read = (0, 1, 2), prompt(60), []
    for masked in (True, False):
        on = make_runner(loaded(), 1, invariant=invariant)
        on.states.watch(layers)
        slot = on.admit(text)
        on.extend_cache(slot, text)
        if masked:
            on.attach_adapter(adapter(num_masks=3))
            on.forward([slot], tree)
            on.commit([slot], [path])
        else:
            for token in plain:
                on.forward([slot], TokenTree.chain([[token]]))
                on.commit([slot], [[]])
        read.append(on.states.read(slot, 0, len(text) + len(plain), layers))
    return tuple(read)


BRANCHING = [5, 9, 31, 7, 9, 40], [-1, 0, 1, 0, 3, 3]


@pytest.mark.parametrize(("path", "plain"), [([3, 5], [5, 7, 40]), ([1, 2], [5, 9, 31]), ([], [5])])
def test_states_after_masks_have_the_bits_of_plain_decoding(path, plain):
    ours, theirs = states_after(hung([BRANCHING[0]], [BRANCHING[1]], [3]), path, plain, True)
    assert torch.equal(ours, theirs)


def test_states_of_another_branch_are_noticed(monkeypatch):
    monkeypatch.setattr(StateStore, "commit", lambda *_: None)
    ours, theirs = states_after(hung([BRANCHING[0]], [BRANCHING[1]], [3]), [3, 5], [5, 7, 40], True)
    assert not torch.equal(ours, theirs)


def test_states_of_a_mask_are_noticed():
    ours, theirs = states_after(hung([BRANCHING[0]], [BRANCHING[1]], [3]), [6], [5, 0], True)
    assert torch.equal(ours[:61], theirs[:61])
    assert not torch.equal(ours, theirs)


# Binding


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (lambda: Space(adapter(seed=2)), ConfigError),
        (lambda: Medusa(MedusaHead(MedusaConfig(16, (2,), VOCAB, VOCAB, 2))), IncompatibleModels),
    ],
)
@pytest.mark.parametrize("attached", [False, True])
def test_a_choice_that_is_refused_leaves_nothing_on(second, error, attached):
    on, first = ModelRunner(loaded(), 1), adapter(seed=1)
    if attached:
        on.attach_adapter(first)
    before = on.loaded
    with pytest.raises(error):
        SpeculativeDecoder(on, Choose([Space(first), second()]), Coupled(), Fixed(3))
    assert on.loaded is before
    other = first if attached else adapter(seed=2)
    seq = sequence(loaded(), REPEATING, SAMPLED)
    run(on, Space(other), [seq], 3)
    assert seq.token_ids == future()


def test_a_target_of_another_size_is_refused_and_changes_nothing():
    drafter, on = Space(adapter(num_masks=3, transition_rank=2), 2), ModelRunner(loaded(), 1)
    drafter.bind(on, Coupled())
    rows, held = drafter._rows, drafter._adapter
    for sizes in ({"vocab_size": 131}, {"hidden_size": 64}):
        with pytest.raises(IncompatibleModels, match="does not fit"):
            drafter.bind(ModelRunner(wrap_model(tiny_model("llama", **sizes)), 1), Coupled())
    other = ModelRunner(loaded(), 1)
    other.attach_adapter(adapter(seed=9))
    with pytest.raises(ConfigError, match="another SPACE adapter"):
        drafter.bind(other, Coupled())
    assert drafter._target is on
    assert drafter._rows is rows
    assert drafter._adapter is held


# Ends


def predicted(params, eos=NO_EOS):
    """Loop and slow decoder, where every draft is right as far as the text goes on."""
    on, drafter = decreed(loaded(), knows, 1), Space(adapter(num_masks=3), 1)
    return assert_identical(on, drafter, [(REPEATING, params, SEED, eos)], 3, 15)[0]


@pytest.mark.parametrize("offset", range(8))
def test_ends_inside_a_draft(offset):
    answer = future()[len(REPEATING) :]
    end = answer[4 + offset]
    for params, eos in (
        (SAMPLED, frozenset({end})),
        (SamplingParams(temperature=1.0, max_tokens=40, stop_token_ids=(end,)), NO_EOS),
        (SamplingParams(temperature=1.0, max_tokens=40, min_tokens=4 + offset), frozenset({end})),
    ):
        seq = predicted(params, eos)
        assert seq.finish_reason == "stop"
        assert seq.output_ids == answer[: len(seq.output_ids)]


def test_both_draft_and_both_are_right():
    """Rounds of lookup leave no masks; the next of SPACE begins anew."""
    on = decreed(loaded(), knows, 2)
    turns = Budgets(lambda seq: DraftBudget(2, 8, (len(seq.rounds) // 3 + seq.slot) % 2))
    seqs = [sequence(on.loaded, REPEATING, SAMPLED) for _ in range(2)]
    for seq in run(on, Choose([PromptLookup(), Space(adapter(num_masks=3), 1)]), seqs, policy=turns):
        assert seq.token_ids == future()
        mine = [r for r in seq.rounds if r.source == "space" and r.num_drafted]
        assert len(mine) > 2
        assert all(r.num_accepted == r.num_drafted for r in mine)


# The cache


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_cache_is_plain_decodings_after_every_round(top_k):
    """With top_k 2 second siblings are accepted, whose rows have to be gathered."""
    on, drafter = decreed(loaded(), errs, 1), Space(adapter(num_masks=3), top_k)
    assert sound_after_every_round(on, drafter, REPEATING, 8, SAMPLED, depth=3)


@pytest.mark.parametrize("mutant", [one for one in CACHE_MUTANTS if one is not GathersWithoutACopy])
def test_cache_faults_are_noticed(mutant):
    """The one left out errs where accepted nodes lie one off their places: no order that these trees have."""
    on = with_cache(decreed(loaded(), errs, 1), mutant)
    assert not sound_after_every_round(on, Space(adapter(num_masks=3), 2), REPEATING, 10, SAMPLED, depth=3)
