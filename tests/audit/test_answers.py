"""What is read of answers: texts and tokens, and no key in an error."""

import pytest

from paceline.audit.answers import Ask, Server, served_models
from paceline.audit.client import Client, NoAnswer, Unreachable
from paceline.audit.engines import Engine

KEY = "a-secret-key"
HALF = r"bytes:\xf0\x9f"


@pytest.fixture
def server() -> Server:
    return Server(Client("http://127.0.0.1:1", KEY), Engine("unknown"), "model", "the server")


def read(server: Server, monkeypatch, **choice):
    monkeypatch.setattr(server.client, "ask", lambda path, body, sent: {"choices": [choice]})
    return server.answer("hello", Ask())


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"token": "\ufffd", "bytes": [0xF0, 0x9F]}, HALF),
        ({"token": HALF, "bytes": [0xF0, 0x9F]}, HALF),
        ({"token": r"bytes:\xF0\x9F"}, HALF),
        ({"token": " a", "bytes": [32, 97]}, " a"),
        ({"token": "</s>", "bytes": []}, "</s>"),
        ({"token": "</s>", "bytes": None}, "</s>"),
        ({"token": "a", "bytes": [1.0, True, 300]}, "a"),
        ({"token": "bytes:"}, "bytes:"),
        ({"token": "\ufffd"}, "\ufffd"),
    ],
)
def test_one_name_of_a_token(server, monkeypatch, entry, name):
    content = [{**entry, "logprob": -1.0, "top_logprobs": [{**entry, "logprob": -1.0}]}]
    (token,) = read(server, monkeypatch, text="a", logprobs={"content": content}).tokens
    assert (token.text, token.top) == (name, {name: -1.0})
    if "bytes" not in entry:
        listed = {"tokens": [entry["token"]], "token_logprobs": [-1.0], "top_logprobs": [{entry["token"]: -1.0}]}
        assert read(server, monkeypatch, text="a", logprobs=listed).tokens == (token,)


def test_the_likelier_of_two_tokens_with_one_text(server, monkeypatch):
    top = [{"token": "a", "logprob": value} for value in (-0.5, -3.0)]
    content = [{"token": "a", "logprob": -0.5, "top_logprobs": top}]
    assert read(server, monkeypatch, text="a", logprobs={"content": content}).tokens[0].top == {"a": -0.5}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"reasoning_content": "4", "content": "4"}, "44"),
        ({"reasoning_content": "so ", "reasoning": "so ", "content": "4"}, "so 4"),
        ({"reasoning_content": None, "reasoning": "so ", "content": None}, "so "),
        ({"reasoning_content": 3, "content": "4"}, "4"),
    ],
)
def test_thoughts_are_said_once(server, monkeypatch, message, text):
    assert read(server, monkeypatch, message=message).text == text


def test_errors_hide_the_key(server, monkeypatch):
    monkeypatch.setattr(server.client, "ask", lambda path, body, sent: {"echo": KEY})
    monkeypatch.setattr(server.client, "get", lambda path: (200, f"<html>{'x' * 195}{KEY}"))
    with pytest.raises(NoAnswer) as error:
        server.answer("hello", Ask())
    assert "***" in str(error.value)
    assert KEY not in str(error.value)
    with pytest.raises(Unreachable) as error:
        served_models(server.client)
    assert KEY[:4] not in str(error.value).replace("***", "")
