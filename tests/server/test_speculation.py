"""What a request may say about drafts, and what it is told of them. The answer is always the same."""

import asyncio
from random import Random

import pytest

from paceline.core.round import Origin
from tests.server.helpers import ASK, choosing_llm, events, joined, server, tiny_llm

CHAT = "/v1/chat/completions"
WORDS = "Say the same, but with one word less."


def ask(*bodies, path=CHAT, llm=None, **settings):
    """The answers, from one server."""

    async def each():
        async with server(llm or choosing_llm(), **settings) as client:
            return await asyncio.gather(*(client.post(path, json={**ASK, **body}) for body in bodies))

    return asyncio.run(each())


def content(answer):
    return answer.json()["choices"][0]["message"]["content"]


def predicted(text):
    return {"prediction": {"type": "content", "content": text}}


# Predicted Outputs

NO_SPECIAL = {"logit_bias": {"0": -100, "1": -100, "2": -100}, "max_tokens": 40}  # whose text is left out


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_predictions_leave_the_answer_as_it_is(temperature):
    fields = {**NO_SPECIAL, "temperature": temperature}
    (plain,) = ask(fields, llm=tiny_llm())
    text = content(plain)
    near = text[:15] + text[18:]
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    predictions = [text, near, text[::-1], WORDS, "", parts]
    bodies = [{**fields, **predicted(one), "stream": stream} for one in predictions for stream in (False, True)]
    for answer, body in zip(ask(*bodies), bodies, strict=True):
        said = joined(events(answer.text)) if body["stream"] else content(answer)
        assert said == text


def details(answer):
    return answer.json()["usage"]["completion_tokens_details"]


def test_accepted_and_rejected_tokens_of_a_prediction():
    fields = {**NO_SPECIAL, "return_provenance": True}
    text = content(ask(fields)[0])
    right, wrong, whole = ask(*({**fields, **predicted(one)} for one in (text, text[20:] * 3, text)))
    for answer in (right, wrong):
        told = answer.json()
        sources = [one["source"] for one in told["choices"][0]["provenance"]]
        assert details(answer)["accepted_prediction_tokens"] == sources.count("prediction")
        assert told["usage"]["completion_tokens"] == len(sources) == 40
    assert details(right)["accepted_prediction_tokens"] >= 30
    assert details(whole) == details(right)
    assert details(wrong)["rejected_prediction_tokens"] > details(right)["rejected_prediction_tokens"]


def test_usage_of_predictions_comes_with_a_stream_and_with_several_answers():
    fields = {**NO_SPECIAL, "n": 2, **predicted(WORDS)}
    whole, streamed = ask(fields, {**fields, "stream": True, "stream_options": {"include_usage": True}})
    assert events(streamed.text)[-1]["usage"] == whole.json()["usage"]
    assert set(details(whole)) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_completions_take_predictions_too():
    body = {"model": "tiny", "prompt": "ab ab", "max_tokens": 20, "temperature": 0}

    async def both():
        async with server(choosing_llm()) as client:
            plain = (await client.post("/v1/completions", json=body)).json()
            given = predicted(plain["choices"][0]["text"])
            return plain, (await client.post("/v1/completions", json={**body, **given})).json()

    plain, again = asyncio.run(both())
    assert again["choices"] == plain["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


# The drafter of a request


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_request_names_its_drafter(temperature):
    """Side by side, each with another one; the answers are one, and their drafts are those that were asked for."""
    fields = {**NO_SPECIAL, "temperature": temperature, "return_provenance": True, **predicted("ab ab ab")}
    wishes = [None, *({"method": name} for name in ("none", "lookup", "recycling", "prediction"))]
    answers = ask(*({**fields, "speculative": wish} for wish in wishes))
    assert len({content(answer) for answer in answers}) == 1
    for wish, answer in zip(wishes, answers, strict=True):
        told = answer.json()
        sources = {one["source"] for one in told["choices"][0]["provenance"]} - {""}
        drafted = told["metrics"]["speculative_decoding"]["num_draft_tokens"]
        if wish is not None:
            assert sources <= {wish["method"]}
            assert (drafted == 0) == (wish["method"] == "none")


def test_a_request_says_how_much_is_drafted():
    wishes = [{"num_speculative_tokens": most} for most in (0, 2, 64)]
    answers = ask(*({**NO_SPECIAL, "return_provenance": True, "speculative": wish} for wish in wishes))
    places = [a.json()["metrics"]["speculative_decoding"]["num_accepted_tokens_per_pos"] for a in answers]
    assert [len(one) for one in places] == [0, 2, 6]
    assert len({content(answer) for answer in answers}) == 1


def test_an_unknown_drafter_is_told_which_there_are():
    for path, body in ((CHAT, {}), ("/v1/responses", {"input": "a"})):
        given = {"model": "tiny", "speculative": {"method": "eagle3"}, **body}

        async def one(path=path, given=given):
            async with server(choosing_llm()) as client:
                return await client.post(path, json={**given, **({} if "input" in given else ASK)})

        answer = asyncio.run(one())
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "speculative.method"
        assert "none, prediction, lookup, recycling" in answer.json()["error"]["message"]


# What an answer tells


def test_a_server_tells_provenance_unless_a_request_wants_none():
    told, silent = ask({}, {"return_provenance": False}, return_provenance=True)
    assert told.json()["choices"][0]["provenance"]
    assert "metrics" in told.json()
    assert "provenance" not in silent.json()["choices"][0]
    assert "metrics" not in silent.json()


def test_metrics_count_what_provenance_lists():
    fields = {**NO_SPECIAL, "return_provenance": True, "temperature": 0}
    whole, streamed = ask(fields, {**fields, "stream": True})
    pieces = events(streamed.text)
    for metrics, answer in ((whole.json()["metrics"], whole.json()["choices"][0]), (pieces[-1]["metrics"], None)):
        told = metrics["speculative_decoding"]
        assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
        places = told["num_accepted_tokens_per_pos"]
        assert places == sorted(places, reverse=True)
        assert max(places) <= told["num_spec_steps"]
        if answer is not None:
            origins = [one["origin"] for one in answer["provenance"]]
            assert told["num_accepted_draft_tokens"] == origins.count(Origin.DRAFTED.value)
            assert sum(places) >= told["num_accepted_draft_tokens"]  # an answer may end inside a draft
            assert {one["source"] for one in answer["provenance"] if one["origin"] == "drafted"} <= {
                "lookup", "recycling", "prediction",
            }  # fmt: skip


def test_many_at_once_with_any_wishes():
    chance = Random(1)
    methods = [None, "none", "lookup", "recycling", "prediction"]
    bodies = [
        {**NO_SPECIAL, "seed": seed, "speculative": {"method": chance.choice(methods)}, **predicted("ab ab")}
        for seed in range(8)
    ]
    plain = ask(*({**NO_SPECIAL, "seed": seed} for seed in range(8)), llm=tiny_llm())
    assert [content(one) for one in ask(*bodies)] == [content(one) for one in plain]
