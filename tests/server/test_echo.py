"""Log-probabilities of prompts: in vLLM's field, and in echoes as lm-eval reads them."""

import asyncio

import pytest

from paceline import SamplingParams
from tests.server.helpers import ASK, events, server, tiny_llm

COMPLETIONS, CHAT, TEXT = "/v1/completions", "/v1/chat/completions", "ab ab the cat"


def post(path: str, **body):
    async def ask():
        async with server() as client:
            return await client.post(path, json={"model": "tiny", "seed": 3, **body})

    return asyncio.run(ask())


def choice(**body) -> dict:
    answer = post(COMPLETIONS, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def read(ids, k=2):
    """What the library says of a prompt."""
    return tiny_llm().generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=k))[0].prompt_logprobs


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("is_text", [True, False])
def test_an_echo_has_the_logprobs_of_its_prompt(num_tokens, is_text):
    ids = tiny_llm().encode(TEXT)
    options = {"prompt": TEXT if is_text else ids, "echo": True, "max_tokens": num_tokens, "ignore_eos": True}
    made = choice(**options, logprobs=2)
    listed, entries = made["logprobs"], read(ids)
    assert len(listed["tokens"]) == len(ids) + num_tokens
    assert listed["token_logprobs"][0] is listed["top_logprobs"][0] is None
    assert listed["token_logprobs"][1 : len(ids)] == [entry.logprob for entry in entries[1:]]
    assert all(2 <= len(top) <= 3 for top in listed["top_logprobs"][1:])
    begins = listed["text_offset"]
    pieces = [made["text"][begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    assert "".join(pieces) == made["text"]
    assert made["text"].startswith(TEXT)
    assert pieces[: len(ids)] == listed["tokens"][: len(ids)]
    assert made["finish_reason"] == "length"
    alone = choice(**{**options, "echo": False, "max_tokens": max(num_tokens, 1)}, logprobs=2)["logprobs"]
    assert listed["token_logprobs"][len(ids) :] == alone["token_logprobs"][:num_tokens]


def test_an_answer_that_is_sent_back_has_the_logprobs_that_it_had():
    """Bit for bit, through the sampled answer, its tokens and its echo."""
    ids = tiny_llm().encode(TEXT)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)
    made = tiny_llm().generate([ids], params)[0]
    back = choice(prompt=[*ids, *made.token_ids], echo=True, max_tokens=0, logprobs=0)["logprobs"]
    assert back["token_logprobs"][len(ids) :] == [entry.logprob for entry in made.logprobs]


def test_a_streamed_echo_is_the_same():
    body = {"prompt": [TEXT, "x"], "echo": True, "max_tokens": 4, "logprobs": 1, "n": 2, "temperature": 1.0}
    whole, pieces = post(COMPLETIONS, **body).json()["choices"], events(post(COMPLETIONS, **body, stream=True).text)
    assert len(whole) == 4
    for one in whole:
        parts = [c for piece in pieces for c in piece["choices"] if c["index"] == one["index"]]
        assert "".join(part["text"] for part in parts) == one["text"]
        for name in one["logprobs"]:
            assert [item for part in parts for item in (part["logprobs"] or {name: []})[name]] == one["logprobs"][name]


def test_echo_alone():
    made = choice(prompt=TEXT, echo=True, max_tokens=0)
    assert (made["text"], made["logprobs"]) == (TEXT, None)
    usage = post(COMPLETIONS, prompt=TEXT, echo=True, max_tokens=0).json()["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == len(tiny_llm().encode(TEXT))


def test_prompt_logprobs_are_vllms():
    ids = tiny_llm().encode(TEXT)
    listed, entries = choice(prompt=TEXT, prompt_logprobs=2, max_tokens=1)["prompt_logprobs"], read(ids)
    assert listed[0] is None
    for one, entry in zip(listed[1:], entries[1:], strict=True):
        assert one == {str(token): dict(logprob._asdict()) for token, logprob in entry.items()}
    answer = post(CHAT, **{**ASK, "prompt_logprobs": 0, "max_tokens": 2}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]
    assert "prompt_logprobs" not in post(CHAT, **ASK).json()


REFUSED = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0, "n": 2, "temperature": 1.0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, None),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {**ASK, "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_refusals(path, body, param):
    answer = post(path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
