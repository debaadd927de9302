"""Nothing is drafted behind a token that would end the answer: it could never be emitted, and costs passes."""

import pytest

from paceline import SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.core.request import TokenSequence
from paceline.core.round import Origin
from paceline.methods import DraftModel, PromptLookup
from paceline.target import ModelRunner
from tests.exactness.drafters import twin
from tests.helpers import REPEATING, SEED, assert_identical, loaded, oracle, reading_apart, runner, sequence

TARGET = loaded()
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
WINDOW = 8


def ended(params: SamplingParams = GREEDY) -> frozenset[int]:
    """The fourth token of the answer ends it."""
    return frozenset([oracle(TARGET, REPEATING, params).output_ids[3]])


def drafted(eos_ids: frozenset[int], params: SamplingParams = GREEDY) -> tuple[int, TokenSequence]:
    """Tokens that the model itself drafted, and the answer."""
    on, request = reading_apart(ModelRunner(TARGET, 4)), (REPEATING, params, SEED, eos_ids)
    (seq,) = assert_identical(on, DraftModel(twin(TARGET)), [request], WINDOW)
    return sum(one.num_drafted for one in seq.rounds), seq


def test_a_drafter_that_knows_the_end_stops_there():
    count, seq = drafted(ended())
    assert count <= seq.num_output <= 4, "a window of eight would have been drafted full"
    assert drafted(ended(), SamplingParams(max_tokens=24, ignore_eos=True))[0] >= WINDOW
    # Dropping the end, because of what it is, would make q another law (docs/exactness.md, lemma 4).
    assert seq.token_ids[-1] in ended()
    assert seq.origins[-1] is Origin.DRAFTED


def test_a_stop_token_of_the_request_ends_a_draft_too():
    count, seq = drafted(frozenset(), SamplingParams(max_tokens=24, stop_token_ids=tuple(ended())))
    assert count <= seq.num_output <= 4


def test_lookup_copies_up_to_the_end_of_an_earlier_answer():
    drafter, text = PromptLookup(), [5, 9, 31, 7, 2, 11, 12, 13, 5, 9, 31]
    drafter.bind(runner(TARGET), None)
    for eos_ids, expected in ((frozenset([2]), [7, 2]), (frozenset[int](), [7, 2, 11, 12, 13, 5])):
        seq = sequence(TARGET, text, GREEDY, eos_ids=eos_ids)
        assert drafter.propose([seq], [DraftBudget(6, 6)]).tree.token_ids[0, 1:].tolist() == expected
        drafter.release([seq.slot])


@pytest.mark.parametrize(
    ("params", "ahead", "ends"),
    [
        (GREEDY, 1, True),
        (SamplingParams(ignore_eos=True), 1, False),
        (SamplingParams(min_tokens=3), 2, False),
        (SamplingParams(min_tokens=3), 3, True),
        (SamplingParams(ignore_eos=True, stop_token_ids=(7,)), 1, True),
    ],
)
def test_what_would_end_an_answer_ends_it(params, ahead, ends):
    seq = sequence(TARGET, REPEATING, params, eos_ids=frozenset([7]))
    assert seq.would_end(7, ahead) is ends
    assert not seq.would_end(8, ahead)
    for _ in range(ahead - 1):
        seq.append(8, Origin.PLAIN, "")
    assert seq.append(7, Origin.PLAIN, "") is ends
