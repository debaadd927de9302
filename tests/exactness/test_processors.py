"""Processors are asked as in plain decoding: never behind a rejected draft, where they may raise or forbid all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline import LLM, Fixed, Ratio, SamplingParams, Typical
from paceline.core.request import TokenSequence
from paceline.errors import ConfigError, NumericsError
from paceline.sampling import distribution as law_module
from tests.adversaries import Constant, Scripted
from tests.exactness.drafters import DRAFTERS, runner_for
from tests.helpers import REPEATING, all_free, loaded, oracle, result, run, runner, sequence, talking


def by_the_past(ids: Tensor, scores: Tensor) -> Tensor:
    """Favours another seventh of the vocabulary for every past."""
    scores = scores.clone()
    scores[:, int(ids.sum()) % 7 :: 7] += 3
    return scores


def refuse(ids: Tensor, scores: Tensor) -> Tensor:
    raise KeyError(f"the grammar has no state for {ids[0].tolist()}")


TROUBLES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "raises": refuse,
    "NaN": lambda ids, scores: scores * torch.nan,
    "forbids all": lambda ids, scores: torch.full_like(scores, -torch.inf),
    "no scores": lambda ids, scores: None,
}


class Grammar:
    """Knows the pasts of plain decoding; on any other one it is trouble. With memory: it wants them in order."""

    def __init__(self, plain: TokenSequence, trouble: str):
        self.first, self.text, self.trouble = len(plain.prompt_ids), plain.token_ids, TROUBLES[trouble]
        self.asked, self.troubled = 0, False

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids[0].tolist() != self.text[: self.first + self.asked]:
            self.troubled = True
            return self.trouble(ids, scores)  # type: ignore[return-value]
        self.asked += 1
        return by_the_past(ids, scores)


def plain_and_grammar(temperature: float, trouble: str) -> tuple[TokenSequence, Grammar, SamplingParams]:
    plain = oracle(loaded(), REPEATING, SamplingParams(temperature, max_tokens=20, logits_processors=(by_the_past,)))
    grammar = Grammar(plain, trouble)
    return plain, grammar, SamplingParams(temperature, max_tokens=20, logits_processors=(grammar,))


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_trouble_behind_a_rejected_draft_is_nobodys(drafter, temperature):
    plain, grammar, params = plain_and_grammar(temperature, "raises")
    seq = sequence(loaded(), REPEATING, params)
    made = DRAFTERS[drafter](loaded(), {tuple(REPEATING): plain.token_ids})
    run(runner_for(drafter), made, [seq])
    assert result(seq) == result(plain)
    assert grammar.asked == seq.num_output, "once for every token"
    assert not grammar.troubled


@pytest.mark.parametrize("verifier", [Ratio, lambda: Typical(allow_lossy=True)])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_other_rules_stop_where_there_is_no_law(trouble, verifier):
    """Only pasts that end in an even token have a distribution; the answer must stay among them."""

    def even(ids: Tensor, scores: Tensor) -> Tensor:
        if int(ids[0, -1]) % 2 and ids.shape[1] > len(REPEATING):
            return TROUBLES[trouble](ids, scores)  # type: ignore[return-value]
        scores[:, 1::2] = -torch.inf
        return scores

    seq = sequence(loaded(), REPEATING, SamplingParams(0.9, max_tokens=20, logits_processors=(even,)))
    run(runner(loaded()), Scripted({tuple(REPEATING): [*REPEATING, *[5, 4] * 20]}, [None]), [seq], verifier=verifier())
    assert seq.num_output == 20
    assert not any(token % 2 for token in seq.output_ids)


def test_the_law_of_every_node_at_once_is_caught(monkeypatch):
    """Mutant: the processors are asked about the whole tree before the walk, as they once were."""
    real = law_module.target_distribution

    def eager(logits, seqs, tree):
        target = real(logits, seqs, tree)
        for node in range(tree.num_nodes):
            target.at([0], [node])
        return target

    plain, grammar, params = plain_and_grammar(0.0, "raises")
    monkeypatch.setattr("paceline.engine.loop.target_distribution", eager)
    drafter = Scripted({tuple(REPEATING): plain.token_ids}, [1], branching=True)
    with pytest.raises(KeyError):
        run(runner(loaded()), drafter, [sequence(loaded(), REPEATING, params)])
    assert grammar.troubled


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_trouble_on_the_way_is_the_answers(drafter):
    """The same error as plain decoding, whatever was drafted; every slot comes back."""
    plain = oracle(loaded(), REPEATING, SamplingParams(0.8, max_tokens=20, logits_processors=(by_the_past,)))

    def late(ids: Tensor, scores: Tensor) -> Tensor:
        return refuse(ids, scores) if ids.shape[1] == len(REPEATING) + 9 else by_the_past(ids, scores)

    params = SamplingParams(0.8, max_tokens=20, logits_processors=(late,))
    on, made = runner_for(drafter), DRAFTERS[drafter](loaded(), {tuple(REPEATING): plain.token_ids})
    with pytest.raises(KeyError) as told:
        run(on, made, [sequence(loaded(), REPEATING, params)])
    assert str(plain.token_ids[: len(REPEATING) + 9]) in str(told.value)
    assert all_free(on)


@pytest.mark.parametrize(
    ("trouble", "error"), [("NaN", NumericsError), ("forbids all", ConfigError), ("no scores", ConfigError)]
)
def test_what_a_processor_did_is_told(trouble, error):
    seq = sequence(loaded(), REPEATING, SamplingParams(max_tokens=4, logits_processors=(TROUBLES[trouble],)))
    with pytest.raises(error, match=r"token 1 of the answer|did not return scores"):
        run(runner(loaded()), Constant(), [seq])


def test_bad_words_that_leave_nothing_behind_an_unsaid_token():
    plain = oracle(loaded(), REPEATING, SamplingParams(max_tokens=20))
    unsaid = next(token for token in range(3, 97) if token not in plain.token_ids)
    seq = sequence(loaded(), REPEATING, SamplingParams(max_tokens=20, bad_words=("x",)))
    seq.bad_word_ids = tuple((unsaid, token) for token in range(loaded().vocab_size))
    run(runner(loaded()), Constant(unsaid), [seq])
    assert result(seq) == result(plain)


@pytest.mark.parametrize("min_tokens", [0, 7])
def test_nothing_is_asked_behind_a_stop_string(min_tokens):
    """A guided choice that a stop string ends inside a draft that would be accepted further."""
    plain = LLM(talking(), max_num_seqs=1)
    answer = plain.generate(REPEATING, SamplingParams(max_tokens=24))[0].outputs[0]
    drafter = Scripted({tuple(REPEATING): [*REPEATING, *answer.token_ids]}, [None])
    drafted = LLM(talking(), drafter=drafter, policy=Fixed(12), max_num_seqs=1)
    for length in range(1, 6):
        stop = answer.text[5 : 5 + length]
        for llm in (plain, drafted):
            asked: list[int] = []

            def count(ids: Tensor, scores: Tensor, asked: list[int] = asked) -> Tensor:
                asked.append(ids.shape[1])
                return scores

            params = SamplingParams(max_tokens=24, stop=stop, min_tokens=min_tokens, logits_processors=(count,))
            done = llm.generate(REPEATING, params)[0].outputs[0]
            assert asked == list(range(len(REPEATING), len(REPEATING) + len(done.token_ids)))
            assert done.token_ids == answer.token_ids[: len(done.token_ids)]
            assert len(done.token_ids) == 24 or (done.finish_reason, done.stop_reason) == ("stop", stop)
            assert llm is plain or done.mean_acceptance_length > 4


def test_neighbours_with_processors_do_not_share_their_trouble():
    plain, grammar, params = plain_and_grammar(0.0, "raises")
    other, second, others = plain_and_grammar(0.8, "NaN")
    seqs = [sequence(loaded(), REPEATING, one) for one in (params, SamplingParams(max_tokens=20), others)]
    run(runner(loaded()), Scripted({tuple(REPEATING): plain.token_ids}, [None, 1], branching=True), seqs)
    assert result(seqs[0]) == result(plain)
    assert result(seqs[2]) == result(other)
    assert result(seqs[1]) == result(oracle(loaded(), REPEATING, SamplingParams(max_tokens=20)))
    assert grammar.asked == second.asked == 20
