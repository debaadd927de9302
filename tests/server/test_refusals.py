"""What is refused: with which status, in the form of the OpenAI API, and never with what a client may not know."""

import asyncio
import base64
import io
import json
from dataclasses import replace
from functools import cache

import httpx
import pytest
from PIL import Image

from paceline import LLM
from paceline.server.chats import LIMITS
from paceline.server.errors import as_api_error
from paceline.server.gate import Gate, Gated, GateSettings
from paceline.server.protocol import ChatRequest
from tests.hf.test_images import bomb
from tests.server.helpers import ASK, events, server, slowed
from tests.vision.families import seeing

CHAT = "/v1/chat/completions"


def post(body, path=CHAT, headers=None, **settings):
    """The status and the error."""

    async def ask():
        async with server(headers={"Content-Type": "application/json", **(headers or {})}, **settings) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content)

    answer = asyncio.run(ask())
    error = answer.json().get("error", {})
    if answer.status_code != 200:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    return answer.status_code, error


BIG = {"type": "object", "properties": {"x": {"enum": [2**53 + 1]}}}
WRONG = {
    "an unknown field": ({"wat": 1}, "unknown_parameter", "wat"),
    "an unknown field of a message": (
        {"messages": [{"role": "user", "content": "a", "wat": 1}]}, "unknown_parameter", "messages[0].wat",
    ),
    "a text for a number": ({"temperature": "1"}, "invalid_type", "temperature"),
    "a number for a text": ({"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content"),
    "NaN": ({"top_p": float("nan")}, "invalid_value", "top_p"),
    "no messages": ({"messages": []}, "invalid_value", "messages"),
    "a role that is none": ({"messages": [{"role": "x", "content": "a"}]}, "invalid_value", "messages[0].role"),
    "below the range": ({"temperature": -1}, "invalid_value", "temperature"),
    "above the range": ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
    "many choices": ({"n": 129}, "invalid_value", "n"),
    "no token": ({"logit_bias": {"97": 1}}, "invalid_value", None),
    "top_logprobs alone": ({"top_logprobs": 2}, "invalid_value", None),
    "both lengths": ({"max_completion_tokens": 3}, "invalid_value", "max_tokens"),
    "a number that no tensor holds": ({"top_k": 10**400}, "invalid_value", "top_k"),
    "a length beyond all": ({"max_tokens": 10**400}, "invalid_value", "max_tokens"),
    "no length": ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    "two forms": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "invalid_value", None,
    ),
    "a form that is none": ({"structured_outputs": {"regex": "("}}, "invalid_value", None),
    "no schema": ({"response_format": {"type": "json_schema"}}, "invalid_value", None),
    "a number that becomes another": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BIG}}},
        "invalid_value", None,
    ),
    "such a number of a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": BIG}}], "tool_choice": "required"},
        "invalid_value", None,
    ),
    "a prediction": ({"prediction": {"type": "content", "content": "a"}}, "unsupported_parameter", "prediction"),
    "a prediction without a text": (
        {"prediction": {"type": "content"}}, "missing_required_parameter", "prediction.content",
    ),
    "an unknown drafter": ({"speculative": {"method": "wat"}}, "invalid_value", "speculative.method"),
    "a negative draft": (
        {"speculative": {"num_speculative_tokens": -1}}, "invalid_value", "speculative.num_speculative_tokens",
    ),
    "old functions": ({"functions": []}, "unsupported_parameter", "functions"),
    "options of no stream": ({"stream_options": {}, "stream": None}, "invalid_value", "stream_options"),
    "a template": ({"chat_template_kwargs": {"chat_template": "a"}}, "invalid_value", None),
    "an option that no template reads": ({"chat_template_kwargs": {"thinking": 1}}, "invalid_value", None),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "a" * 4000}]}, "context_length_exceeded", None,
    ),
    "a prompt that is not even read": (
        {"messages": [{"role": "user", "content": "a" * 140_000}]}, "context_length_exceeded", None,
    ),
    "many messages": ({"messages": [{"role": "user", "content": "a"}] * 2049}, "invalid_value", "messages"),
    "a chat that is not even read": (
        {"messages": [{"role": "user", "content": "a" * 1000}] * 140}, "context_length_exceeded", None,
    ),
    "many stops": ({"stop": ["a"] * 65}, "invalid_value", "stop"),
    "a long stop": ({"stop": "a" * 257}, "invalid_value", "stop"),
    "a long stop of several": ({"stop": ["a", "a" * 257]}, "invalid_value", "stop[1]"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", None),
}  # fmt: skip


@pytest.mark.diagonal
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "code", "param"), WRONG.values(), ids=WRONG)
def test_wrong_fields(fields, code, param, stream):
    body = {**ASK, "stream": stream, **fields}
    status, error = post(body)
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert (error["code"], error["param"]) == (code, param), error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000])
def test_bodies_that_are_no_request(body):
    assert post(body)[0] == 400


HUGE = "x" * 100_000
FIELDS = [
    *({name: HUGE} for name in (*ChatRequest.model_fields, HUGE, "a.b" * 30_000)),
    *({name: {HUGE: HUGE}} for name in ChatRequest.model_fields),
    *({name: [HUGE, 10**4000]} for name in ChatRequest.model_fields),
    *({"structured_outputs": {name: HUGE}} for name in ("json", "regex", "grammar", "whitespace_pattern", HUGE)),
    {"structured_outputs": {"regex": f"({HUGE}"}},
    {"structured_outputs": {"json": {"type": HUGE, HUGE: 1}}},
    {"structured_outputs": {"json": {"const": 10**4000}}},
    {"response_format": {"type": HUGE}},
    {"speculative": {"method": HUGE}},
    {"logit_bias": {"9" * 4000: 1}},
    {"stop_token_ids": [10**4000]},
    {"allowed_token_ids": [10**300]},
    {"tool_choice": {"type": "function", "function": {"name": HUGE}}},
    {"messages": [{"role": HUGE, "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": HUGE, "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", HUGE: 1}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": HUGE, "arguments": "{"}}]}]},
    *(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        for url in (HUGE, f"data:{HUGE}", f"data:image/png;base64,{HUGE}", f"https://{HUGE}/a.png", f"ftp://{HUGE}")
    ),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"])
def test_an_error_repeats_little_of_what_was_sent(path):
    wanted = {
        CHAT: ASK,
        "/v1/responses": {"model": "tiny", "input": "a"},
        "/v1/completions": {"model": "tiny", "prompt": "a"},
    }

    async def ask():
        async with server(headers={"Content-Type": "application/json"}) as client:
            found = [await client.post(path, json={"max_tokens": 1, **wanted.get(path, {}), **one}) for one in FIELDS]
            long = [await client.get(f"/v1/models/{HUGE[:60_000]}"), await client.post(path, content=HUGE.encode())]
            return [*found, *long, await client.post(path, json={HUGE: 1, "model": HUGE}, headers={"x-a": HUGE})]

    answers = asyncio.run(ask())
    assert sum(answer.status_code >= 400 for answer in answers) > len(answers) // 3
    for answer, field in zip(answers, [*FIELDS, "a path", "a body", "headers"], strict=True):
        assert answer.status_code < 500, answer.text[:300]
        assert answer.status_code == 200 or len(answer.content) < 2000, str(field)[:100]
        assert len(str(answer.headers)) < 1000


@pytest.mark.parametrize("name", ["Host", "Authorization", "Origin", "Content-Type", "X-Request-Id"])
def test_an_error_repeats_little_of_a_header(name):
    async def ask():
        async with server(api_keys=["k"], allowed_hosts=["tiny"], allow_origins=["https://a.example"]) as client:
            return await client.post(CHAT, content=b"{}", headers={name: HUGE})

    answer = asyncio.run(ask())
    assert 400 <= answer.status_code < 500
    assert len(answer.content) + len(str(answer.headers)) < 2000


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("token", [-1, 97, 10**30])
def test_tokens_that_are_none(token, echo):
    assert post({"model": "tiny", "prompt": [5, token], "echo": echo}, "/v1/completions")[0] == 400
    assert post({"tokens": [5, token]}, "/detokenize")[0] == 400


def test_token_ids_that_are_not_even_read():
    for path, body in (("/v1/completions", {"prompt": [5] * 140_000}), ("/detokenize", {"tokens": [5] * 140_000})):
        status, error = post({"model": "tiny", **body}, path)
        assert (status, error["code"]) == (400, "context_length_exceeded")


def test_prompts_count_as_choices():
    status, error = post({"model": "tiny", "prompt": ["a"] * 10, "n": 13}, "/v1/completions")
    assert (status, error["param"]) == (400, "n")


def test_a_form_of_a_web_page_is_refused():
    """Browsers let any page send it without asking the server first."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}]}'
    assert post(body, headers={"Content-Type": "text/plain"})[0] == 400
    assert post(body)[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models", 405), ("/health", 405)])
def test_wrong_addresses(path, status):
    assert post(ASK, path)[0] == status


def test_another_model():
    for path in (CHAT, "/v1/completions"):
        body = {**ASK, "model": "other\ud800"} if path == CHAT else {"model": "other", "prompt": "a"}
        status, error = post(body, path)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer wrong", 401), ("Bearer ", 401), ("Basic key-2", 401), ("Bearer key-é", 401),
     ("Bearer key-2", 200), ("bearer key-1", 200)],
)  # fmt: skip
def test_keys(header, status):
    headers = {} if header is None else {"Authorization": header.encode()}
    got, error = post(ASK, headers=headers, api_keys=["key-1", "key-2"])
    assert got == status
    assert got == 200 or error["code"] == "invalid_api_key"
    assert "key-" not in str(error)


def test_pages_without_a_key():
    async def get():
        async with server(api_keys=["key"]) as client:
            paths = ("/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "//v1/models", "/v1")
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(get()) == [200, 200, 200, 200, 401, 401, 401, 401]


@pytest.mark.parametrize("is_counted", [True, False])
def test_large_bodies(is_counted):
    async def pieces():
        for _ in range(40):
            yield b" " * 1000

    async def ask():
        async with server(max_body_bytes=20_000) as client:
            body = b" " * 40_000 if is_counted else pieces()
            return await client.post(CHAT, content=body, headers={"Content-Type": "application/json"})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_full_queue_says_when_to_come_again():
    async def ask():
        async with server(max_waiting=1) as client:
            long = {**ASK, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
            running = [asyncio.create_task(client.post(CHAT, json=long)) for _ in range(2)]
            while client.engine.num_running < 2:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(client.post(CHAT, json=ASK))
            while client.engine.num_waiting < 1:
                await asyncio.sleep(0.01)
            refused = [await client.post(CHAT, json={**ASK, "stream": stream}) for stream in (False, True)]
            answered = await asyncio.gather(*running, waiting)
            return refused, answered

    refused, answered = asyncio.run(ask())
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) > 0
    assert [answer.status_code for answer in answered] == [200] * 3


def test_a_server_that_shuts_down_takes_nothing():
    async def ask():
        async with server() as client:
            client.models.is_draining = True
            return await client.post(CHAT, json=ASK), await client.get("/ready"), await client.get("/health")

    refused, ready, alive = asyncio.run(ask())
    assert (refused.status_code, ready.status_code, alive.status_code) == (503, 503, 200)
    assert "retry-after" in refused.headers


def test_what_nobody_expected_tells_nothing():
    error = as_api_error(RuntimeError("the secret path"))
    assert (error.status_code, "secret" in error.detail) == (500, False)


def test_what_nobody_expected_is_logged_as_an_error(caplog):
    async def broken(scope, receive, send):
        raise RuntimeError("the engine broke")

    async def ask():
        service = Gated()
        service.settings = GateSettings(model="it")
        transport = httpx.ASGITransport(Gate(broken, service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://it") as client:
            return await client.get("/v1/models")

    with caplog.at_level("INFO", "paceline.server"):
        assert asyncio.run(ask()).status_code == 500
    assert [record.fields["status"] for record in caplog.records] == [500]


def test_an_error_behind_the_first_piece_is_an_event(monkeypatch):
    slowed(monkeypatch)

    async def ask():
        async with server(request_timeout_s=3.0) as client:  # the first piece must come within it
            long = {**ASK, "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 0}
            return await client.post(CHAT, json=long)

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"]["code"] == "timeout"


def test_origins_of_browsers():
    async def preflight(**settings):
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with server(**settings) as client:
            return await client.options(CHAT, headers=headers)

    assert "access-control-allow-origin" not in asyncio.run(preflight()).headers
    for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
        assert asyncio.run(preflight(allow_origins=[origin], api_keys=["k"])).status_code == status


# Images


@cache
def seeing_llm() -> LLM:
    return LLM(seeing(), max_num_seqs=2)


def as_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def make_image(size: int = 8) -> str:
    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG")
    return as_url(file.getvalue())


def image(url, count=1):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}] * count}]}


@pytest.mark.parametrize(
    "url",
    ["/etc/passwd", "file:///etc/passwd", "https://example.org/a.png", "http://127.0.0.1:1/a.png",
     "data:image/png;base64,AAAA", "data:,", "ftp://example.org/a.png", ""],
)  # fmt: skip
def test_images_that_are_not_taken(url):
    status, error = post({**ASK, **image(url)}, llm=seeing_llm())
    assert (status, error["code"]) == (400, "invalid_value")
    assert url[:12] in error["message"], "what was got"
    assert "data:" in error["message"], "what is taken"
    assert "text alone" not in error["message"]


def test_a_file_of_the_server_is_no_image():
    """As the library would take it from its own user."""
    for part in ({"type": "image", "image": "/etc/passwd"}, {"type": "image", "path": "/etc/passwd"}):
        assert post({**ASK, "messages": [{"role": "user", "content": [part]}]})[0] == 400


def test_an_image_for_a_text_model_is_not_even_opened():
    status, error = post({**ASK, **image("data:image/png;base64,AAAA")})
    assert status == 400
    assert "text alone" in error["message"]


@pytest.mark.parametrize(
    ("url", "count", "limits", "words"),
    [
        (make_image(64), 1, {"max_pixels": 64 * 64}, None),
        (make_image(65), 1, {"max_pixels": 64 * 64}, "has too many pixels"),
        (make_image(64), 2, {"max_total_pixels": 2 * 64 * 64}, None),
        (make_image(64), 3, {"max_total_pixels": 2 * 64 * 64}, "too many pixels together"),
        (as_url(bomb(5000)), 5, {}, "too many pixels together"),
        (make_image(), 17, {}, "too many images"),
        ("http://b.example/a.png", 1, {"hosts": ("a.example",)}, "not allowed"),
        ("http://localhost:1/a.png", 1, {"hosts": ("localhost",)}, "private address"),
    ],
)
def test_limits_of_images(url, count, limits, words):
    """Of a whole request, on every path."""
    content = [{"type": "input_image", "image_url": url}] * count
    asked = {"model": "tiny", "input": [{"role": "user", "content": [*content, {"type": "input_text", "text": "a"}]}]}
    chat = image(url, count)
    chat["messages"][0]["content"].append({"type": "text", "text": "a"})
    for path, body in ((CHAT, {**ASK, **chat}), ("/v1/responses", asked), ("/tokenize", chat)):
        status, error = post(body, path, llm=seeing_llm(), images=replace(LIMITS, **limits))
        assert (status == 200) == (words is None)
        assert words is None or words in error["message"]
