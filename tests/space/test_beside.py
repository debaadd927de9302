"""SPACE beside other drafters, on one target and on two; the states that those read survive passes with masks."""

import pytest
import torch

from paceline import Choose, SamplingParams, SelfQuantized
from paceline.attention.states import StateStore
from paceline.core.interfaces import DraftBudget
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods import Medusa, Space
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.parallel.head import MedusaConfig, MedusaHead
from paceline.policy import Fixed
from paceline.target import ModelRunner, make_runner, wrap_model
from paceline.verify import Coupled
from tests.helpers import REPEATING, VOCAB, Budgets, assert_identical, loaded, prompt, run, sequence
from tests.methods.common import new_head
from tests.space.common import adapter, hung
from tests.space.foresight import KNOWN, SAMPLED, future, overfitted
from tests.tiny import tiny_model

SQUARE = {"intermediate_size": 64}  # all inputs divisible by 32, for INT4
OTHERS = {
    "eagle": (lambda: Eagle(new_head("eagle")), {}),
    "eagle3": (lambda: Eagle(new_head("eagle3")), {}),
    "medusa": (lambda: Medusa(MedusaHead(MedusaConfig(32, (2,), VOCAB, VOCAB, 2))), {}),
    "self_int4": (lambda: SelfQuantized(lm_head="shared"), SQUARE),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", OTHERS)
def test_choose(kind, order):
    """Both in turns, two rounds each, so that masks are hung and read; ragged rows, sampled and not."""
    make, sizes = OTHERS[kind]
    target = wrap_model(tiny_model("llama", **sizes))
    given = adapter(num_masks=3, **sizes) if sizes else overfitted()
    on = make_runner(target, 2, invariant=kind != "self_int4")
    turns = Budgets(lambda seq: DraftBudget(3, 5, (len(seq.rounds) // 2 + seq.slot) % 2))
    requests = [(ids, SamplingParams(temperature=t, max_tokens=16)) for ids in (KNOWN, prompt(60)) for t in (0.0, 1.0)]
    seqs = assert_identical(on, Choose([Space(given, 2), make()][::order]), requests, 3, policy=turns)
    drafted = {r.source for seq in seqs for r in seq.rounds if r.num_drafted}
    assert drafted == {"space", make().name}


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
