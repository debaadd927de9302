"""Predicted outputs: no prediction changes the answer, and a good one is drafted wherever the answer has it."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from paceline import LLM, Choose, CostModel, Fixed, PredictedOutput, PromptLookup, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError
from tests.async_llm.common import TEXTS, answer, engine_of, tiny_llm
from tests.helpers import loaded, sequence

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
TARGET = loaded()
CHANGES = {
    "none": lambda ids: ids,
    "one replaced": lambda ids: [*ids[:12], 4, *ids[13:]],
    "some left out": lambda ids: ids[:10] + ids[16:],
    "some put in": lambda ids: [*ids[:10], 4, 4, *ids[10:]],
    "parts swapped": lambda ids: ids[20:] + ids[:20],
    "short": lambda ids: ids[:15],
    "noise": lambda ids: Random(0).sample(range(3, 97), 40),
    "one token again and again": lambda ids: [ids[0]] * 300,
    "an end of text": lambda ids: [*ids[:10], 2, *ids[10:]],
}


def llm_of(*members, policy=None, slots=4):
    return LLM(TARGET, drafter=Choose([PredictedOutput(), *members]), policy=policy or Fixed(8), max_num_seqs=slots)


def predicting(ids, params=PARAMS, **more):
    return replace(params, extra_args={"prediction": ids, **more})


@pytest.mark.parametrize("policy", [lambda: Fixed(8), lambda: CostModel()], ids=["fixed", "cost model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_without_a_prediction(temperature, policy):
    params = replace(PARAMS, temperature=temperature)
    llm = llm_of(PromptLookup(), policy=policy())
    wanted = llm.plain().generate([[5, 9, 31]], params)[0].token_ids
    predictions = [change(wanted) for change in CHANGES.values()]
    results = llm.generate([[5, 9, 31]] * len(predictions), [predicting(ids, params) for ids in predictions])
    assert [one.token_ids for one in results] == [wanted] * len(predictions)


def drafted(change, **more):
    """Tokens that came from the prediction, and passes."""
    llm = llm_of()
    params = replace(PARAMS, temperature=1.0)  # noise: no two places are alike
    wanted = llm.plain().generate([[5, 9, 31]], params)[0].token_ids
    result = llm.generate([[5, 9, 31]], predicting(change(wanted), params, **more))[0]
    assert result.token_ids == wanted
    return result.outputs[0].sources.count("prediction"), len(result.rounds)


def test_a_right_prediction_is_accepted_whole():
    count, passes = drafted(CHANGES["none"])
    assert passes == -(-40 // 9)
    assert count >= 40 - passes


@pytest.mark.parametrize(
    ("name", "most"), [("one replaced", 7), ("some left out", 6 + 6), ("some put in", 7), ("parts swapped", 8)]
)
def test_the_place_is_found_again(name, most):
    """Six passes or so, and one for each of the six tokens that a prediction may lack."""
    assert drafted(CHANGES[name])[1] <= most


def test_a_replaced_token_costs_one_round():
    """Its successor is drafted at once, though the last token of the answer is nowhere in the prediction."""
    seq = replace(sequence(TARGET, [5, 9], PARAMS), prediction=(20, 21, 22, 23), slot=0)
    drafter, budget = PredictedOutput(), DraftBudget(3, 3)
    assert drafter.propose([seq], [budget]).tree.lists.token_ids == [[9, 20, 21, 22]]
    seq.token_ids += [20, 50]
    assert drafter.propose([seq], [budget]).tree.lists.token_ids == [[50, 22, 23]]
    seq.token_ids += [22, 23]
    assert drafter.draft_options(seq)[0].hint == -1


def test_of_equal_places_the_nearest_is_taken():
    """`7 8` stands at three places; the answer left the second one."""
    prediction = (7, 8, 1, 7, 8, 2, 7, 8, 3)
    seq = replace(sequence(TARGET, [5, 9], PARAMS), prediction=prediction, slot=0)
    seq.token_ids += [7, 8, 1, 7, 50, 8]
    draft = PredictedOutput().propose([seq], [DraftBudget(2, 2)])
    assert draft.tree.lists.token_ids == [[8, 2, 7]]


def test_predictions_stay_with_their_requests():
    """Also of requests that come after others in the same slots, and beside those without one."""
    llm = tiny_llm(Choose([PredictedOutput(), PromptLookup()]), slots=2, policy=Fixed(6))
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=16, ignore_eos=True) for i in range(6)]
    wanted = [llm.plain().generate(TEXTS[0], one)[0].token_ids for one in params]
    given = [predicting(wanted[i], one) if i % 2 else one for i, one in enumerate(params)]

    async def main():
        async with engine_of(llm) as engine:
            return await asyncio.gather(*(answer(engine, TEXTS[0], one) for one in given))

    for i, one in enumerate(asyncio.run(main())):
        assert one.token_ids == wanted[i]
        assert ("prediction" in one.outputs[0].sources) == bool(i % 2)


@pytest.mark.parametrize("method", ["none", "lookup", "prediction"])
@pytest.mark.parametrize("policy", [lambda: Fixed(8), lambda: CostModel()], ids=["fixed", "cost model"])
def test_a_request_names_its_drafter(method, policy):
    llm = llm_of(PromptLookup(), policy=policy())
    wanted = llm.plain().generate([[5, 9, 31] * 3], PARAMS)[0].token_ids
    asked = [predicting(wanted, method=method), predicting(wanted)]
    results = llm.generate([[5, 9, 31] * 3] * 2, asked)
    assert [one.token_ids for one in results] == [wanted] * 2
    sources = {record.source for record in results[0].rounds if record.num_nodes}
    assert sources <= ({method} - {"none"})
    if isinstance(llm.decoder.policy, Fixed) and method != "none":
        assert sources == {method}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"method": "wat"}, "one of none, prediction, lookup"),
        ({"method": 3}, "the name of a drafter"),
        ({"prediction": 3}, "a text or a list"),
        ({"prediction": "half a character: \ud800"}, "a text or a list"),
        ({"prediction": [9999]}, "names no token"),
        ({"prediction": "text"}, "tokenizer"),
    ],
)
def test_what_is_refused(extra, words):
    with pytest.raises(ConfigError, match=words):
        llm_of(PromptLookup()).generate([[5, 9]], replace(PARAMS, extra_args=extra))


def test_a_prediction_needs_its_drafter():
    with pytest.raises(ConfigError, match=r"drafter='lookup\+prediction'"):
        LLM(TARGET, drafter=PromptLookup()).generate([[5, 9]], predicting([4]))
    with pytest.raises(ConfigError, match="drafter='prediction'"):
        LLM(TARGET).generate([[5, 9]], predicting([4]))
