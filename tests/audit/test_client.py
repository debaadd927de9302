"""What servers do wrong: each has a message in words and an end, and none a stack trace."""

import json
import socket
import threading
import time

import pytest

from paceline.audit.answers import Ask, Server, chosen_model
from paceline.audit.audit import Audit, Plan
from paceline.audit.client import Client, NoAnswer, Stopped, Unreachable
from paceline.audit.engines import Engine, identify
from paceline.errors import ConfigError

from .fake import serving

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 3}


@pytest.mark.parametrize(
    ("breaks", "kind", "words"),
    [
        ("fails", NoAnswer, "answered 500"),
        ("for long", NoAnswer, "answered 429"),
        ("text", NoAnswer, "no JSON object|broke off"),
        ("drops", NoAnswer, "broke off in the middle"),
        ("drips", NoAnswer, "no whole answer .* within 0.5 s"),
        ("sleeps", NoAnswer, "no whole answer .* within 0.5 s"),
        ("missing", Unreachable, "check the address"),
        ("moved", Unreachable, "redirects"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_broken_answers(breaks, kind, words, streamed):
    with serving(always=breaks) as (url, _):
        client, begin = Client(url, timeout_s=0.5), time.monotonic()
        ask = (lambda *request: [*client.stream(*request)]) if streamed else client.ask
        with pytest.raises(kind, match=words):
            ask("/v1/completions", ASK)
        assert time.monotonic() - begin < 5


def test_busy_server_is_waited_for():
    with serving(broken=dict.fromkeys(range(3), "busy")) as (url, fake):
        assert Client(url).ask("/v1/completions", ASK)["choices"]
        assert len(fake.asked) == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_waits_for_a_busy_server_are_not_its_speed(streamed):
    with serving(broken=dict.fromkeys(range(3), "busy")) as (url, _):
        client, begin = Client(url), time.perf_counter()
        found = Server(client, Engine("unknown"), "fake", "it").answer("hello", Ask(), streamed)
        assert time.perf_counter() - begin - found.seconds > 0.1
        assert (found.first_s or 0.0) <= found.seconds


def test_waiting_has_an_end():
    with serving(always="busy") as (url, fake), pytest.raises(NoAnswer, match="429"):
        Client(url).ask("/v1/completions", ASK)
    assert len(fake.asked) == 6


def test_keys_are_sent_and_never_told():
    with serving(key="sk-secret") as (url, _):
        assert chosen_model(Client(url, "sk-secret"), None) == "fake"
        for key in (None, "sk-wrong"):
            with pytest.raises(Unreachable, match="refuses the key") as caught:
                chosen_model(Client(url, key), None)
            assert "sk-wrong" not in str(caught.value)


@pytest.mark.parametrize("key", ["text", "choices", "w1"])
def test_a_key_that_is_a_word_of_an_answer(key):
    with serving() as (url, _):
        found, expected = Client(url, key), Client(url)
        assert found.ask("/v1/completions", ASK) == expected.ask("/v1/completions", ASK)
        assert [*found.stream("/v1/completions", ASK)] == [*expected.stream("/v1/completions", ASK)]


def test_an_error_that_repeats_the_key():
    with serving(always="echo") as (url, _):
        client = Client(url, "sk-secret")
        with pytest.raises(NoAnswer, match=r"no such key: Bearer \*\*\*") as caught:
            Server(client, identify(client), "fake", "").answer("hello", Ask())
        assert "sk-secret" not in str(caught.value)
    long = client.refusal("/", 500, "x" * 295 + "sk-secret")
    assert "sk" not in str(long)


def test_half_a_surrogate_pair_in_an_error():
    assert str(Client("http://host").refusal("/", 500, '{"error": "\\ud83d"}')).encode()


def test_an_error_that_is_null():
    with serving(nulls=True) as (url, _):
        assert len([*Client(url).stream("/v1/completions", ASK)]) == 5


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://host:port",
        "http://host:99999",
        "http://a b",
        "http://host/v1?key=1",
        "ftp://host",
    ],
)
def test_addresses_that_are_none(url):
    with pytest.raises((ConfigError, Unreachable)):
        Client(url, timeout_s=0.5).get("/v1/models")


@pytest.mark.parametrize("url", ["http://name:secret@host", "http://host:1"])
def test_keys_in_addresses_are_not_told(url):
    with pytest.raises((ConfigError, Unreachable)) as caught:
        Client(url, timeout_s=0.5).get("/v1/models")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_keys_that_no_header_can_hold(key):
    with pytest.raises(ConfigError, match="no header") as caught:
        Client("http://host", key)
    assert key not in str(caught.value)


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Unreachable, match="no server answers"):
            Client(url).get("/v1/models")


def test_a_server_that_is_none():
    """It closes every connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(NoAnswer, match="broke off"):
            Client(f"http://127.0.0.1:{server.getsockname()[1]}").get("/v1/models")
        thread.join()


def test_several_models_and_none():
    with serving(models=("a", "b")) as (url, _):
        with pytest.raises(ConfigError, match=r"serves 2 models.*a, b.*--served-model"):
            chosen_model(Client(url), None)
        assert chosen_model(Client(url), "b") == "b"
    with serving(models=()) as (url, _), pytest.raises(ConfigError, match="serves 0 models"):
        chosen_model(Client(url), None)


def test_stop_ends_requests_of_other_threads():
    with serving(always="drips") as (url, _):
        client, raised = Client(url, timeout_s=30), list[Exception]()

        def ask():
            try:
                client.ask("/v1/completions", ASK)
            except Exception as error:
                raised.append(error)

        thread, begin = threading.Thread(target=ask), time.monotonic()
        thread.start()
        time.sleep(0.2)
        client.stop()
        thread.join(10)
        assert time.monotonic() - begin < 5
    assert isinstance(raised[0], Stopped)


def test_stop_ends_a_handshake():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"https://127.0.0.1:{silent.getsockname()[1]}", timeout_s=30)
        threading.Timer(0.2, client.stop).start()
        begin = time.monotonic()
        with pytest.raises(Stopped):
            client.get("/v1/models")
        assert time.monotonic() - begin < 5


def test_connecting_has_an_end(monkeypatch):
    """Though each address of a host had the whole time."""
    monkeypatch.setattr("http.client.HTTPConnection.connect", lambda _: time.sleep(1.5))
    begin = time.monotonic()
    with pytest.raises(NoAnswer, match=r"within 0\.2 s"):
        Client("http://host", timeout_s=0.2).get("/v1/models")
    assert time.monotonic() - begin < 1


def sides_of(url: str, timeout_s: float = 5.0) -> list[Server]:
    client = Client(url, timeout_s=timeout_s)
    return [Server(client, identify(client), "fake", "the server")]


def audited(url: str, count: int = 8, **more) -> Audit:
    prompts = [[{"role": "user", "content": str(i)}] for i in range(count)]
    return Audit(sides_of(url, **more), Plan(prompts, max_tokens=4, temperature=None, repeats=1, timings=0))


def test_one_failed_answer_is_a_finding():
    with serving(broken={3: "fails"}) as (url, _):
        audit = audited(url)
        audit.run()
    failed = [one for one in audit.record.failures() if "failed" in one]
    assert len(failed) == 3  # again, in another order, together
    assert "out of memory" in next(case.worst.reason for case in audit.record.comparisons[0].cases if case.prompt == 2)


def test_a_server_that_dies_ends_the_audit():
    with serving(broken=dict.fromkeys(range(12, 100), "drops")) as (url, fake):
        audit = audited(url)
        with pytest.raises(Unreachable, match="5 requests in a row"):
            audit.run()
        assert len(fake.asked) == 17
    assert not audit.record.is_complete
    assert audit.record.comparisons[0].cases  # what was found before


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"chats": False}, "no chat template.*--raw"),
        ({"always": "fails"}, "out of memory"),
        ({"always": "no choices"}, "without choices"),
    ],
)
def test_what_fails_at_once_ends_it(planted, words):
    with serving(**planted) as (url, fake), pytest.raises(Unreachable, match=words):
        audited(url).run()
    assert len(fake.asked) == 1


def test_empty_answers():
    with serving(empty=True) as (url, _):
        audit = audited(url, count=2)
        audit.run()
    assert "every answer is empty" in json.dumps(audit.record.failures())


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"text": None, "logprobs": 3, "finish_reason": 4}], "usage": []},
        {
            "choices": [{"message": [], "logprobs": {"content": [1, {"token": 2, "top_logprobs": 5}]}}],
            "usage": {"x": 1},
        },
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": "?", "top_logprobs": [None]}}]},
        {
            "choices": [
                {"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [True], "top_logprobs": [{"a": "b"}]}}
            ]
        },
    ],
)
def test_odd_replies_are_read(monkeypatch, reply):
    with serving() as (url, _):
        side = sides_of(url)[0]
        monkeypatch.setattr(side.client, "ask", lambda path, body, sent: reply)
        answer = side.answer("hello", Ask())
    assert answer.completion_tokens is None
    assert answer.finish_reason is None
    assert all(token.logprob is None for token in answer.tokens)
