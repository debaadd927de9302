"""Every way for an answer to end, at every place inside a round."""

import pytest

from paceline import LLM, DraftModel, PromptLookup, SamplingParams
from paceline.core.round import Origin
from paceline.target import make_runner
from tests.adversaries import Scripted
from tests.exactness.drafters import DRAFTERS
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, loaded, oracle, prompt, runner, talking

DEPTH = 5
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24)


def decode(ids, params, eos_ids=NO_EOS, script=(None,)):
    """Loop and slow decoder; the drafter knows how the text would go on if nothing ended it."""
    target = loaded()
    endless = SamplingParams(temperature=params.temperature, max_tokens=60)
    drafter = Scripted({tuple(ids): oracle(target, ids, endless).token_ids}, script)
    return assert_identical(runner(target), drafter, [(ids, params, SEED, eos_ids)], DEPTH)[0]


@pytest.mark.diagonal
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("as_stop_id", [False, True])
@pytest.mark.parametrize("offset", range(DEPTH + 2))
def test_end_at_each_offset_inside_the_block(offset, as_stop_id, ignore_eos):
    answer = oracle(loaded(), REPEATING, SAMPLED).output_ids
    end = answer[DEPTH + 1 + offset]  # in the second round, unless the same token came earlier
    last = answer.index(end) + 1
    ids = {end}
    params = SamplingParams(
        temperature=1.0, max_tokens=24, ignore_eos=ignore_eos, stop_token_ids=tuple(ids) if as_stop_id else ()
    )
    seq = decode(REPEATING, params, NO_EOS if as_stop_id else frozenset(ids), script=(None, None, 3))
    if as_stop_id or not ignore_eos:
        assert seq.output_ids == answer[:last]
        assert (seq.finish_reason, seq.stop_reason) == ("stop", end if as_stop_id else None)
        assert len(seq.origins) == last
    else:
        assert seq.output_ids == answer
        assert seq.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, DEPTH, DEPTH + 1, DEPTH + 2, 2 * DEPTH + 2])
@pytest.mark.parametrize("script", [(None,), (0,), (2, None)])
def test_budget(max_tokens, script):
    seq = decode(REPEATING, SamplingParams(temperature=0.7, max_tokens=max_tokens), script=script)
    assert (seq.num_output, seq.finish_reason) == (max_tokens, "length")
    assert all(r.num_drafted < max_tokens for r in seq.rounds)  # nothing is drafted that could not be emitted


@pytest.mark.parametrize("min_tokens", [1, 2, 7, 12])
def test_min_tokens_masks_the_end_while_it_holds(min_tokens):
    """The end is likely everywhere, drafted everywhere, and must not come early."""
    params = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=min_tokens)
    ends = frozenset(range(3, 60))
    target, request = loaded(), (REPEATING, params, SEED, ends)
    future = {tuple(REPEATING): oracle(target, *request).token_ids + [4] * 20}
    for drafter in ("trees of endings", "all right", "draft model, same weights", "end at each offset"):
        (seq,) = assert_identical(runner(target), DRAFTERS[drafter](target, future), [request])
        assert seq.num_output >= min_tokens
        assert not set(seq.output_ids[: min_tokens - 1]) & ends


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral"])
@pytest.mark.parametrize("room", [1, 2, 3, DEPTH, DEPTH + 1, 9])
def test_end_of_the_context(name, room):
    """No position past the last exists (learned embeddings have no row for it); padding may not ask for one either."""
    target, params = loaded(name), SamplingParams(max_tokens=60)
    ids = prompt(target.context - room)
    requests = [(ids, params), (ids[:-4], params)]
    future = {tuple(request[0]): oracle(target, *request).token_ids for request in requests}
    for script in ((None,), (0, None)):
        for seq in assert_identical(runner(target), Scripted(future, script, branching=True), requests, DEPTH):
            assert (len(seq.token_ids), seq.finish_reason) == (target.context, "length")


@pytest.mark.diagonal
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limit", [20, 64, 65])
def test_shorter_context_than_the_models(drafter, limit):
    target, params = loaded(), SamplingParams(temperature=1.0, max_tokens=100)
    ids = REPEATING if limit == 20 else prompt(limit - 9)
    future = {tuple(ids): [*oracle(target, ids, SAMPLED).token_ids, *[17] * 60]}
    on = make_runner(target, 2, limit, invariant=False) if "space" in drafter else runner(target, 4, limit)
    (seq,) = assert_identical(on, DRAFTERS[drafter](target, future), [(ids, params, SEED, NO_EOS, limit)])
    assert len(seq.token_ids) == limit


def test_draft_with_a_shorter_context_than_the_target():
    """Past the draft's own context it proposes nothing and decoding goes on plainly."""
    target = loaded()
    draft = loaded("llama", seed=1, num_hidden_layers=1, max_position_embeddings=24)
    (seq,) = assert_identical(runner(target), DraftModel(draft), [(REPEATING, SAMPLED)])
    assert any(r.num_drafted == 0 for r in seq.rounds)
    assert seq.rounds[0].num_drafted > 0


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 514, 700])
def test_prompt_of_any_length(length):
    """One token (nothing to prefill) to more than one prefill chunk of 512."""
    target = loaded("llama", max_position_embeddings=2048)
    requests = [(prompt(length), SamplingParams(temperature=t, max_tokens=8)) for t in (0.0, 1.0)]
    for drafter in ("draft model", "self int4", "random trees"):
        assert_identical(runner(target), DRAFTERS[drafter](target, {}), requests)


@pytest.mark.parametrize(("begin", "length"), [(3, 2), (4, 4), (5, 3), (6, 4), (7, 2), (8, 3), (9, 2)])
def test_stop_string_wherever_it_straddles_rounds(begin, length):
    """Cut before it, whatever part of it came in which round; nothing is emitted after the token that completes it."""
    llm = LLM(talking(), drafter=PromptLookup(min_ngram=1))
    endless = SamplingParams(temperature=1.0, max_tokens=30, seed=5, ignore_eos=True)
    whole = llm.generate("abcabcabd", endless).pop().outputs[0]
    stop = whole.text[begin : begin + length]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=5, ignore_eos=True, stop=(stop, "not in the text"))
    future = {tuple(llm.encode("abcabcabd")): [*llm.encode("abcabcabd"), *whole.token_ids]}
    for script in ([None], [3, 0]):
        other = LLM(talking(), drafter=Scripted(future, script))
        (answer,) = other.generate("abcabcabd", params).pop().outputs
        end = whole.text.index(stop)
        assert answer.text == whole.text[:end]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert answer.token_ids == llm.plain().generate("abcabcabd", params).pop().token_ids
        assert "".join(c.text for c in other.stream("abcabcabd", params)) == answer.text


def test_origins_of_a_cut_round():
    """Accepted tokens behind the end are not counted as emitted, and no bonus follows."""
    answer = oracle(loaded(), REPEATING, SAMPLED).output_ids
    end = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    where = answer.index(end)
    seq = decode(REPEATING, SAMPLED, frozenset({end}))
    assert seq.rounds[-1].num_emitted == (where - 1) % (DEPTH + 1) + 1  # the first token came with the prompt
    assert seq.origins[-1] in (Origin.DRAFTED, Origin.BONUS)
