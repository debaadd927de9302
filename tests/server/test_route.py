"""The confidence switch across two live servers: who answers, what is said of it, and what is passed on."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from functools import cache, wraps

import httpx
import pytest

from paceline import LLM, SamplingParams
from paceline.cascade import Calibration, Signal
from paceline.cascade.bound import Point
from paceline.cascade.calibration import ModelId, confidences
from paceline.errors import ConfigError
from paceline.server.errors import ApiError
from paceline.server.route import DECIDED_BY, Router, RouteSettings, make_router_app, read_logprobs
from paceline.server.streams import EventStream
from paceline.server.upstream import Upstream
from tests.cascade.common import perturbed
from tests.cli.helpers import refusal
from tests.server.helpers import TEMPLATE, events, joined, listening
from tests.structured.common import byte_tokenizer

LIMIT = 8
BIAS = {"2": 5.0}  # the end of the text, so that most answers are short
TEXTS = [f"{a}{b} {b}{a}" for a in "abcdef" for b in "ghij"]
ASK = {"model": "cascade", "max_tokens": 24, "logit_bias": BIAS}
CHAT = "/v1/chat/completions"


def awaited(test):
    """A test that awaits, for pytest."""

    @wraps(test)
    def run(*args, **given):
        asyncio.run(test(*args, **given))

    return run


@cache
def llm(noise: float = 0.0) -> LLM:
    """The tiny model, with noise on its weights."""
    model = perturbed(noise, max_position_embeddings=2048)
    return LLM(model, tokenizer=byte_tokenizer(TEMPLATE), max_num_seqs=2)


def calibration(threshold: float, **changes) -> Calibration:
    """One whose threshold is this."""
    one = ModelId("tiny", "sha256:0", "", "float32")
    given = {
        "small": one, "large": one, "count": 400, "ended": 300, "short_limit": LIMIT, "small_context": 2048,
        "curves": {Signal.MIN_PROB: (Point(1.0, 0, 0), Point(threshold, 100, 0))},
        "max_disagreement": 0.05, "confidence": 0.95, "sampling": {"logit_bias": BIAS},
    }  # fmt: skip
    return Calibration(**{**given, **changes})


@pytest.fixture(scope="module")
def servers():
    """The addresses of the small and the large model."""
    with listening(llm(0.03)) as (small, *_), listening(llm()) as (large, *_):
        yield small, large


@asynccontextmanager
async def routing(servers, threshold: float, headers=None, changes=None, **settings):
    """A client of a router before two servers; the router is `client.router`."""
    given = {"model": "cascade", "audit_share": 0.0, **settings}
    upstreams = [Upstream.open(url) for url in servers]
    router = Router(*upstreams, calibration(threshold, **(changes or {})), RouteSettings(**given))
    transport = httpx.ASGITransport(make_router_app(router), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://r", headers=headers, timeout=60) as client:
        client.router = router
        yield client


def asked(text: str, **more) -> dict:
    return {**ASK, "messages": [{"role": "user", "content": text}], **more}


def direct(url: str, text: str, **more) -> dict:
    """What a server itself says, greedily."""
    body = {**asked(text, **more), "model": "tiny", "temperature": 0}
    return httpx.post(url + CHAT, json=body, timeout=60).json()


def confidence_of(url: str, text: str) -> float | None:
    """The confidence of the small answer, None where it did not end."""
    found = direct(url, text, max_tokens=LIMIT, logprobs=True, top_logprobs=2)
    ended = found["choices"][0]["finish_reason"] == "stop"
    return confidences(read_logprobs(found, url))[Signal.MIN_PROB] if ended else None


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


@awaited
async def test_each_model_answers_where_it_should(servers):
    """Whole and streamed: the small model's own answer above the threshold, the large one's below."""
    small, large = servers
    found = {text: confidence_of(small, text) for text in TEXTS[::2]}
    ended = sorted(one for one in found.values() if one is not None)
    threshold = ended[len(ended) // 2]
    by = {"small": 0, "large": 0}
    async with routing(servers, threshold) as client:
        for text, confidence in found.items():
            reason = "long" if confidence is None else "confident" if confidence >= threshold else "unsure"
            decided_by = "small" if reason == "confident" else "large"
            expected = text_of(direct(small if decided_by == "small" else large, text))
            whole = await client.post(CHAT, json=asked(text))
            assert whole.headers[DECIDED_BY] == decided_by
            told = whole.json()["cascade"]
            assert (told["decided_by"], told["reason"], told["confidence"]) == (decided_by, reason, confidence)
            assert told["lossless"] is (decided_by == "large")
            assert text_of(whole.json()) == expected
            stream = await client.post(CHAT, json=asked(text, stream=True, stream_options={"include_usage": True}))
            assert stream.headers[DECIDED_BY] == decided_by
            pieces = events(stream.text)
            assert joined(pieces) == expected
            assert all(piece["cascade"] == told for piece in pieces)
            assert pieces[-1]["usage"] == whole.json()["usage"]
            by[decided_by] += 2
        page = (await client.get("/metrics")).text
    assert min(by.values()) > 0, "the test needs both"
    for model, count in by.items():
        assert f'paceline:route_requests_total{{model_name="cascade",decided_by="{model}"}} {count}' in page


def test_confidence_is_the_cascades(servers):
    """What comes over HTTP gives the very numbers that the library calibrates with."""
    for text in TEXTS[:6]:
        params = SamplingParams(max_tokens=LIMIT, logprobs=2, logit_bias={2: 5.0})
        own = llm(0.03).generate([{"role": "user", "content": text}], params)[0]
        given = direct(servers[0], text, max_tokens=LIMIT, logprobs=True, top_logprobs=2)
        assert confidences(read_logprobs(given, "")) == confidences(own.logprobs)


@awaited
async def test_clients_get_the_log_probabilities_that_they_ask_for(servers):
    async with routing(servers, 0.0) as client:
        for more, tops in (({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 1}, 1)):
            choice = (await client.post(CHAT, json=asked("ag ga", **more))).json()["choices"][0]
            given = choice["logprobs"]
            assert given is None if tops is None else {len(one["top_logprobs"]) for one in given["content"]} == {tops}


@pytest.mark.parametrize("more", [{"temperature": 0.5}, {"n": 2, "temperature": 1}, {"logit_bias": {}}, {"stop": "q"}])
@awaited
async def test_other_sampling_goes_to_the_large_model(servers, more):
    async with routing(servers, 0.0) as client:
        told = (await client.post(CHAT, json=asked("ag ga", **more))).json()["cascade"]
    assert (told["decided_by"], told["reason"]) == ("large", "other_sampling")


@awaited
async def test_what_a_request_leaves_open_the_calibration_decides(servers):
    body = asked("ag ga")
    del body["logit_bias"]
    async with routing(servers, 0.0) as client:
        answer = (await client.post(CHAT, json=body)).json()
    assert answer["cascade"]["reason"] == "confident"
    assert text_of(answer) == text_of(direct(servers[0], "ag ga"))


@awaited
async def test_prompts_too_long_for_the_small_model(servers):
    tight = LLM(llm(0.03).loaded, max_model_len=16)
    with listening(tight) as (url, *_):
        async with routing((url, servers[1]), 0.0) as client:
            told = (await client.post(CHAT, json=asked("ag ga " * 9))).json()["cascade"]
    assert told["reason"] == "no_room"


@awaited
async def test_the_alarm_ends_the_trust(servers):
    """With a small model that is often wrong, the audits soon find out; from then on the large one answers all."""
    with listening(llm(0.5)) as (wrong, *_):
        async with routing((wrong, servers[1]), 0.0, audit_share=1.0) as client:
            reasons = []
            for text in [*TEXTS, *TEXTS]:
                reasons.append((await client.post(CHAT, json=asked(text))).json()["cascade"]["reason"])
            page = (await client.get("/metrics")).text
        assert client.router.alarm.raised
    assert "confident" in reasons
    first = reasons.index("alarm")
    assert set(reasons[first:]) == {"alarm"}
    assert 'paceline:route_alarm{model_name="cascade"} 1' in page
    assert f'paceline:route_audits_total{{model_name="cascade"}} {first}' in page


@awaited
async def test_audits_of_equal_models_find_nothing(servers):
    async with routing((servers[1], servers[1]), 0.0, audit_share=1.0) as client:
        for text in TEXTS:
            await client.post(CHAT, json=asked(text))
        alarm = client.router.alarm
    assert (alarm.seen, alarm.differed) == (len(TEXTS), 0)


@awaited
async def test_refusals(servers):
    async with routing(servers, 0.0, api_keys=["k"]) as client:
        assert (await client.post(CHAT, json=asked("a"))).status_code == 401
        client.headers["Authorization"] = "Bearer k"
        assert (await client.post(CHAT, json=asked("a", model="other"))).status_code == 404
        assert (await client.post(CHAT, json=asked("a", colour="red"))).json()["error"]["code"] == "unknown_parameter"
        passed_on = await client.post(CHAT, json=asked("a", temperature=0.5, max_tokens=-1))
        assert passed_on.status_code == 400
        assert "max_tokens" in passed_on.json()["error"]["message"]
        client.router.is_draining = True
        assert (await client.post(CHAT, json=asked("a"))).status_code == 503


@awaited
async def test_a_drain_waits_for_a_stream_that_has_not_begun(servers, monkeypatch):
    begun, ended, send = asyncio.Event(), [], EventStream.__call__

    async def late(*given):
        begun.set()
        await asyncio.sleep(0.1)
        await send(*given)
        ended.append(True)

    monkeypatch.setattr(EventStream, "__call__", late)
    async with routing(servers, 0.0) as client:
        asking = asyncio.create_task(client.post(CHAT, json=asked("a", stream=True)))
        await begun.wait()
        await client.router.drain(30)
        assert ended
        assert events((await asking).text)
        assert (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@awaited
async def test_a_server_that_is_gone_is_an_error(servers, stream):
    """Never an answer of the other model."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with routing(servers, 0.0) as client:
        client.router.large = Upstream(gone, "tiny")
        answer = await client.post(CHAT, json=asked("a", temperature=0.5, stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_upstream")
        client.router.small = Upstream(gone, "tiny")
        assert (await client.post(CHAT, json=asked("a"))).status_code == 502
    with pytest.raises(ConfigError, match="no server"):
        Upstream.open(gone)


def test_log_probabilities_that_are_missing_are_an_error(servers):
    whole = direct(servers[0], "ag ga", logprobs=True, top_logprobs=2)
    read_logprobs(whole, "x")
    for spoil in (
        lambda one: one["choices"][0].update(logprobs=None),
        lambda one: one["choices"][0]["logprobs"]["content"].pop(),  # the end of the text
    ):
        spoilt = json.loads(json.dumps(whole))
        spoil(spoilt)
        with pytest.raises(ApiError, match="A router needs them for all"):
            read_logprobs(spoilt, "x")


def test_a_small_model_with_more_room_is_refused(servers):
    upstreams = [Upstream.open(url) for url in servers]
    with pytest.raises(ConfigError, match="context is longer"):
        Router(*upstreams, calibration(0.0, small_context=100), RouteSettings(model="cascade"))


def test_the_command_asks_for_consent(tmp_path):
    file = tmp_path / "c.json"
    calibration(0.5).save(file)
    options = ("route", "--small", "http://127.0.0.1:9", "--large", "http://127.0.0.1:9", "--calibration", str(file))
    assert "--allow-lossy" in refusal(*options)
    assert "no server of the OpenAI API answers" in refusal(*options, "--allow-lossy", "--port", "0")
