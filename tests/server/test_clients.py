"""The `openai` client, unchanged, against a server on a socket; and the process from its start to SIGTERM."""

import json

import openai
import pytest

from paceline import SamplingParams
from tests.server.helpers import ASK, listening, tiny_llm
from tests.server.test_tools import TOOL


@pytest.fixture(scope="module")
def client():
    with listening(api_keys=["secret"]) as (url, _, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def test_a_chat(client):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=20)
    wanted = tiny_llm().chat(ASK["messages"], params)[0]
    asked = {**ASK, "temperature": 0.8, "seed": 4, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.completion_tokens == len(wanted.token_ids)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in pieces[:-1]) == wanted.text
    assert pieces[-1].usage == whole.usage
    again = [*ASK["messages"], whole.choices[0].message, {"role": "user", "content": "ab"}]
    assert client.chat.completions.create(**{**asked, "messages": again}).choices[0].message.role == "assistant"


def test_a_completion_and_the_models(client):
    wanted = tiny_llm().generate("ab ab", SamplingParams(max_tokens=12))[0]
    answer = client.completions.create(model="tiny", prompt="ab ab", max_tokens=12, temperature=0)
    assert answer.choices[0].text == wanted.text
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_parsed_answer_and_a_call(client):
    asked = {**ASK, "max_tokens": 300, "logit_bias": {"85": -100}}
    made = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required").choices[0]
    assert json.loads(made.message.tool_calls[0].function.arguments)["x"] in (1, 2, 3)
    extra = {"structured_outputs": {"choice": ["ab", "abab"]}, "top_k": 5}
    assert client.chat.completions.create(**asked, extra_body=extra).choices[0].message.content in ("ab", "abab")


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"model": "other"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError),
     ({"extra_body": {"wat": 1}}, openai.BadRequestError)],
)  # fmt: skip
def test_errors(client, change, kind):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**ASK, **change})
    assert caught.value.code


def test_a_wrong_key(client):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
