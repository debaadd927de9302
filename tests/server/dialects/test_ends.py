"""Clients that go, and errors behind the first event, in each dialect."""

import pytest

from tests.server.dialects.common import ANTHROPIC, LLAMA, OLLAMA, SAID, ask, pieces
from tests.server.helpers import listening, out_of_time, tiny_llm
from tests.server.test_connections import connect, request, wait_until

NO_END = {"logit_bias": {token: -100.0 for token in tiny_llm().loaded.eos_ids}, "temperature": 0.0}
LONG = {
    OLLAMA: {"messages": SAID, "options": {"num_predict": 2000}},
    "/api/generate": {"prompt": "ab", "raw": True, "options": {"num_predict": 2000}},
    ANTHROPIC: {"messages": SAID, "max_tokens": 2000},
    LLAMA: {"prompt": "ab", "n_predict": 2000},
}
TIMEOUT = {
    OLLAMA: {"error": "The answer took longer than this server allows."},
    "/api/generate": {"error": "The answer took longer than this server allows."},
    ANTHROPIC: {
        "type": "error",
        "error": {"type": "timeout_error", "message": "The answer took longer than this server allows."},
    },
    LLAMA: {
        "error": {"code": 504, "type": "server_error", "message": "The answer took longer than this server allows."}
    },
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_goes_frees_its_slot(path, stream):
    with listening(defaults=NO_END) as (url, engine, service):
        with connect(url) as raw:
            sent = request({"model": "tiny", **LONG[path], "stream": stream})
            raw.sendall(sent.replace(b"/v1/chat/completions", path.encode(), 1))
            wait_until(lambda: engine.num_running)
        wait_until(lambda: not engine.num_running and sum(service.metrics.finished.values()))
        assert service.metrics.finished["abort"] == 1


@pytest.mark.parametrize("path", LONG)
def test_an_error_behind_the_first_event_has_the_form_of_its_dialect(path, monkeypatch):
    out_of_time(monkeypatch)
    body = {**LONG[path], "stream": True}
    (answer,) = ask((path, body), llm=tiny_llm(), defaults=NO_END)
    *begun, last = pieces(answer)
    assert (answer.status_code, len(begun) > 1) == (200, True)
    assert last == TIMEOUT[path]
