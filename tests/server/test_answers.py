"""Answers are those of the library with the same seed, whole or in pieces, in the form of the OpenAI API."""

import asyncio
import json

import pytest

from paceline import SamplingParams, __version__
from paceline.core.round import Origin
from tests.server.helpers import ASK, events, joined, server, tiny_llm

CHAT = "/v1/chat/completions"
OPTIONS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"85": 30, "9": -100}},
    "stop": {"stop": ["b", "1"]},
    "stop token": {"stop_token_ids": [40, 41, 42, 43], "include_stop_str_in_output": True},
    "lengths": {"min_tokens": 20, "max_tokens": 30, "ignore_eos": True},
    "several": {"n": 3},
    "form": {"structured_outputs": {"regex": "[0-9]{5,9}cm"}},
}


async def ask(path, **body):
    async with server() as client:
        return await client.post(path, json=body)


def expected(**options):
    params = SamplingParams(**{"temperature": 1.0, "seed": ASK["seed"], "max_tokens": ASK["max_tokens"], **options})
    return tiny_llm().chat(ASK["messages"], params)[0]


def as_library(options):
    """The same options as `SamplingParams` has them."""
    bias = {int(token): value for token, value in options.get("logit_bias", {}).items()}
    return {**options, "logit_bias": bias or None}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_chat_answers_as_the_library_does(options):
    async def both():
        async with server() as client:
            whole = await client.post(CHAT, json={**ASK, **options})
            streamed = await client.post(CHAT, json={**ASK, **options, "stream": True})
        return whole.json(), events(streamed.text)

    whole, pieces = asyncio.run(both())
    wanted = expected(**as_library(options))
    assert [one["message"]["content"] for one in whole["choices"]] == [one.text for one in wanted.outputs]
    assert [one["finish_reason"] for one in whole["choices"]] == [one.finish_reason for one in wanted.outputs]
    num_tokens = sum(len(one.token_ids) for one in wanted.outputs)
    num_prompt = len(wanted.prompt_token_ids)
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] < num_prompt
    assert whole["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens,
    }  # fmt: skip
    for answer in wanted.outputs:
        assert joined(pieces, answer.index) == answer.text
        ends = [one["finish_reason"] for piece in pieces for one in piece["choices"] if one["index"] == answer.index]
        assert ends[-1] == answer.finish_reason
        assert not any(ends[:-1])
    assert len({piece["id"] for piece in pieces}) == 1


def test_the_first_piece_says_who_speaks_and_the_last_how_long():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = events(asyncio.run(ask(CHAT, **ASK, **options)).text)
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(piece["usage"] is None for piece in pieces[:-1])
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] == len(expected().token_ids)


def test_every_piece_says_how_long_if_asked():
    """As load generators do, which count tokens by it."""
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    pieces = events(asyncio.run(ask(CHAT, **ASK, **options)).text)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == len(expected().token_ids)


NO_SPECIAL = {"logit_bias": {"0": -100, "1": -100, "2": -100}}  # whose text is left out


def test_log_probabilities():
    answer = expected(logprobs=3, **as_library(NO_SPECIAL)).outputs[0]
    wanted, body = answer.logprobs, {**ASK, **NO_SPECIAL, "logprobs": True, "top_logprobs": 3}
    whole = asyncio.run(ask(CHAT, **body)).json()["choices"][0]["logprobs"]["content"]
    pieces = events(asyncio.run(ask(CHAT, **body, stream=True)).text)
    assert [one["logprob"] for one in whole] == [one.logprob for one in wanted]
    assert [[top["logprob"] for top in one["top_logprobs"]] for one in whole] == [[*one.top.values()] for one in wanted]
    listed = [one for p in pieces for c in p["choices"] if c["logprobs"] for one in c["logprobs"]["content"]]
    assert listed == whole
    assert "".join(one["token"] for one in whole) == answer.text
    assert bytes(byte for one in whole for byte in one["bytes"]).decode() == answer.text


def test_completions_take_several_prompts_and_give_them_back():
    body = {"model": "tiny", "prompt": ["ab ab", "cd"], "n": 2, "seed": 5, "max_tokens": 8, "echo": True}
    whole = asyncio.run(ask("/v1/completions", **body)).json()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, n=2)
    wanted = tiny_llm().generate(["ab ab", "cd"], params)
    texts = [one.prompt + answer.text for one in wanted for answer in one.outputs]
    assert [one["text"] for one in whole["choices"]] == texts
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in wanted)
    pieces = events(asyncio.run(ask("/v1/completions", **body, stream=True)).text)
    assert [joined(pieces, index) for index in range(4)] == texts


def test_completions_of_token_ids_with_log_probabilities():
    body = {"model": "tiny", "prompt": [5, 9, 5, 9], "seed": 5, "logprobs": 2, **NO_SPECIAL}
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "logprobs": 2}
    wanted = tiny_llm().generate([5, 9, 5, 9], SamplingParams(**as_library({**params, **NO_SPECIAL})))[0]
    choice = asyncio.run(ask("/v1/completions", **body)).json()["choices"][0]
    assert choice["text"] == wanted.text
    given = choice["logprobs"]
    assert given["token_logprobs"] == [one.logprob for one in wanted.logprobs]
    assert all(
        choice["text"][at:].startswith(text) for at, text in zip(given["text_offset"], given["tokens"], strict=True)
    )
    assert all(2 <= len(top) <= 3 for top in given["top_logprobs"])


def test_provenance_names_every_token_and_its_text():
    wanted = expected(temperature=0.0, max_tokens=40)
    body = {**ASK, "temperature": 0, "max_tokens": 40, "return_provenance": True}
    choice = asyncio.run(ask(CHAT, **body)).json()["choices"][0]
    told = choice["provenance"]
    assert [one["id"] for one in told] == wanted.token_ids
    assert "".join(one["text"] for one in told) == choice["message"]["content"] == wanted.text
    assert {one["origin"] for one in told} <= {origin.value for origin in Origin}
    pieces = events(asyncio.run(ask(CHAT, **body, stream=True)).text)
    streamed = [one for piece in pieces for choice in piece["choices"] for one in choice["provenance"]]
    assert [(one["id"], one["text"]) for one in streamed] == [(one["id"], one["text"]) for one in told]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"type": "json_object"}, None),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
        }}}, {"a"}),
    ],
)  # fmt: skip
def test_response_format(given, keys):
    form = {"response_format": given, "max_tokens": 400, "logit_bias": {"85": -100}}
    choice = asyncio.run(ask(CHAT, **{**ASK, **form})).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        read = json.loads(choice["message"]["content"])
        assert keys is None or set(read) == keys
    else:
        assert keys is None  # any object may become long
        assert choice["message"]["content"].lstrip().startswith("{")


def test_metrics_come_with_an_answer_where_asked_for():
    async def answers():
        async with server(return_metrics=True) as client:
            whole = await client.post(CHAT, json={**ASK, "temperature": 0})
            streamed = await client.post(CHAT, json={**ASK, "temperature": 0, "stream": True})
        return whole.json()["metrics"], events(streamed.text)[-1]["metrics"]

    wanted = expected(temperature=0.0).outputs[0]
    for metrics in asyncio.run(answers()):
        assert 0 < metrics["time_to_first_token_s"] <= metrics["seconds"]
        told = metrics["speculative_decoding"]
        assert told["mean_acceptance_length"] == pytest.approx(len(wanted.token_ids) / len(wanted.rounds), rel=1)
        assert 0 <= told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]


def test_tokenize_and_back():
    async def there_and_back():
        async with server() as client:
            one = (await client.post("/tokenize", json={"prompt": "ab 12", "return_token_strs": True})).json()
            chat = (await client.post("/tokenize", json={"messages": ASK["messages"]})).json()
            text = (await client.post("/detokenize", json={"tokens": one["tokens"]})).json()
        return one, chat, text

    one, chat, text = asyncio.run(there_and_back())
    assert text == {"prompt": "ab 12", "content": "ab 12"}
    assert one["count"] == len(one["tokens"]) == len(one["token_strs"])
    assert chat["tokens"] == tiny_llm().encode(ASK["messages"])
    assert chat["max_model_len"] == tiny_llm().runner.max_length


def test_models_health_and_ready():
    async def get():
        async with server() as client:
            paths = ("/v1/models", "/v1/models/tiny", "/version", "/health", "/ready")
            return [await client.get(path) for path in paths]

    models, one, version, *alive = asyncio.run(get())
    assert version.json() == {"version": __version__}
    assert models.json()["data"] == [one.json()]
    assert one.json()["id"] == "tiny"
    assert [answer.status_code for answer in alive] == [200, 200]
