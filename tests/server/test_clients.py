"""The `openai` client, unchanged, against a server on a socket; and the process from its start to SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from paceline import SamplingParams
from tests.cli.helpers import paceline, save
from tests.server.helpers import ASK, listening, tiny_llm
from tests.server.test_tools import TOOL
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def client():
    with listening(api_keys=["secret"]) as (url, _, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def test_a_chat(client):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=20)
    messages = [{"role": "user", "content": "ab ab and more than a page of it"}]
    wanted = tiny_llm().chat(messages, params)[0]
    asked = {**ASK, "messages": messages, "temperature": 0.8, "seed": 4, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.completion_tokens == len(wanted.token_ids)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in pieces[:-1]) == wanted.text
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    for one in (whole, *pieces):
        type(one).model_validate(one.to_dict(), strict=True)  # the client itself takes anything
    assert 0 < pieces[-1].usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
    again = [*messages, whole.choices[0].message, {"role": "user", "content": "ab"}]
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


def test_a_taken_port_is_known_before_a_model_is_loaded():
    with listening() as (url, _, _):
        refused = paceline("serve", "no-such-model", "--port", url.rpartition(":")[2])
    assert refused.exit_code == 1
    assert "cannot be served" in refused.stderr
    assert "--port" in refused.stderr


@contextmanager
def served(folder, port=0):
    """The process of `paceline serve`, and its first line of output, which has its URL."""
    command = [sys.executable, "-m", "paceline", "serve", folder, "--port", str(port), "--json", "--log-format", "json"]
    command += ["--drafter", "lookup", "--drafter", "recycling", "--return-provenance", "--drain-timeout", "300"]
    made = subprocess.Popen(
        [*command, "--served-model-name", "tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PACELINE_API_KEY": "secret"},
    )  # fmt: skip
    try:
        yield made, json.loads(made.stdout.readline())
    finally:
        made.kill()
        made.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("served"), tiny_model("llama", max_position_embeddings=20_000))


@pytest.fixture(scope="module")
def process(folder):
    with served(folder) as made:
        yield made


def test_a_server_takes_predictions_and_has_several_drafters(process):
    headers, url = {"Authorization": "Bearer secret"}, process[1]["url"] + "/v1/completions"
    body = {"model": "tiny", "prompt": "w5 w9", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = httpx.post(url, json=body, headers=headers, timeout=60).json()
    prediction = {"type": "content", "content": plain["choices"][0]["text"]}
    wishes = [{"prediction": prediction}, {"speculative": {"method": "recycling"}}, {"speculative": {"method": "none"}}]
    answers = [httpx.post(url, json={**body, **wish}, headers=headers, timeout=60).json() for wish in wishes]
    assert {one["choices"][0]["text"] for one in answers} == {plain["choices"][0]["text"]}
    assert {one["origin"] for one in answers[2]["choices"][0]["provenance"]} == {"plain"}
    refused = httpx.post(url, json={**body, "speculative": {"method": "wat"}}, headers=headers, timeout=60).json()
    assert "none, prediction, lookup, recycling" in refused["error"]["message"]


def test_sigterm_finishes_what_is_being_answered(process):
    """And ends the process: the last test that has it."""
    made, told = process
    assert (told["served_model_name"], told["drafter"]) == ("tiny", "lookup+recycling")
    headers = {"Authorization": "Bearer secret"}
    body = {"model": "tiny", "prompt": "w5 w9", "max_tokens": 1200, "ignore_eos": True, "stream": True}
    body["return_provenance"] = False
    begun, pieces = threading.Event(), []

    def ask():
        with httpx.stream("POST", told["url"] + "/v1/completions", json=body, headers=headers, timeout=300) as answer:
            for line in answer.iter_lines():
                pieces.append(line)
                begun.set()

    client = httpx.Client(headers=headers, timeout=60)  # which takes long to make
    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    made.send_signal(signal.SIGTERM)
    refused = client.post(told["url"] + "/v1/completions", json=body)
    assert refused.status_code == 503
    asking.join(300)
    assert pieces[-2] == "data: [DONE]"
    assert json.loads(pieces[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    _, errors = made.communicate(timeout=60)
    assert made.returncode == 0, errors
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines][-2:] == [503, 200]
    assert (lines[-1]["completion_tokens"], lines[-1]["finish_reasons"]) == (1200, ["length"])
    assert all(line["request_id"].startswith("req_") for line in lines)
    assert "secret" not in errors
    assert "w5" not in errors


@pytest.mark.more
def test_after_kill_9_a_server_starts_again_at_once(folder):
    """On the same port, with the answers of before."""
    headers = {"Authorization": "Bearer secret"}
    body = {"model": "tiny", "prompt": "w5 w9", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with served(folder) as (made, told):
        url = told["url"] + "/v1/completions"
        before = httpx.post(url, json=body, headers=headers, timeout=60).json()["choices"][0]["text"]
        long = {**body, "max_tokens": 10_000, "stream": True}
        with httpx.stream("POST", url, json=long, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            made.kill()
            with pytest.raises(httpx.TransportError):  # a client is told that its answer is not whole
                list(lines)
    with served(folder, url.split(":")[2].split("/")[0]) as (_, told):
        assert told["url"] in url
        assert httpx.post(url, json=body, headers=headers, timeout=60).json()["choices"][0]["text"] == before
