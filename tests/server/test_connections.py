"""Clients that are slow, and pages that pretend: no connection is held for ever, and no foreign name is answered."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest

from paceline.cli.server_options import LOCAL_NAMES, ListenOptions
from paceline.server import connections, gate
from tests.server.helpers import ASK, listening, server, slowed

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200),
     ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil", 403),
     ("", 403)],
)  # fmt: skip
def test_a_local_server_answers_to_local_names(host, status):
    async def get(path):
        async with server(allowed_hosts=LOCAL_NAMES) as client:
            return await client.get(path, headers={"Host": host})

    answer = asyncio.run(get("/v1/models"))
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"
    assert asyncio.run(get("/ready")).status_code == 200, "probes call it by its address"


@pytest.mark.parametrize(
    ("options", "named"),
    [({}, {*LOCAL_NAMES}), ({"host": "0.0.0.0"}, set()), ({"allowed_hosts": ["*"]}, set()),
     ({"allowed_hosts": ["Our.Example"]}, {*LOCAL_NAMES, "our.example"}),
     ({"host": "0.0.0.0", "allowed_hosts": ["our.example"]}, {*LOCAL_NAMES, "our.example"})],
)  # fmt: skip
def test_names_follow_the_address(options, named):
    assert set(ListenOptions(**options).gate()["allowed_hosts"]) == named


def wait_until(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def connect(url, **options) -> socket.socket:
    made = socket.socket()
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    made.settimeout(120)
    made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return made


def drained(raw) -> bytes:
    """All that comes until the end; b"reset" at the end if that was rough."""
    read = b""
    try:
        while piece := raw.recv(1 << 16):
            read += piece
    except ConnectionResetError:
        read += b"reset"
    return read


def noted_ends(monkeypatch) -> list[tuple[float, float]]:
    """Of each request that comes when its head was read, and when its time is over."""
    ends, real = list[tuple[float, float]](), gate.Gate._with_body

    async def noted(self, scope, receive):
        ends.append((time.monotonic(), scope["end_at"]))
        return await real(self, scope, receive)

    monkeypatch.setattr(gate.Gate, "_with_body", noted)
    return ends


def head(framing: str | int) -> bytes:
    """Of a chat with a body of this many bytes, or framed in another way."""
    framing = f"Content-Length: {framing}" if isinstance(framing, int) else framing
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()


def request(body: dict) -> bytes:
    content = json.dumps(body).encode()
    return head(len(content)) + content


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come(sent, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with listening() as (url, _, _), connect(url) as raw:
        with suppress(ConnectionError):  # it may be closed before all is sent
            for byte in sent:
                raw.sendall(bytes([byte]))
                time.sleep(0.02)
        assert drained(raw) in (b"", b"reset"), "closed"


def test_a_head_that_never_ends():
    with listening() as (url, _, _), connect(url) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        for _ in range(300):
            try:
                raw.sendall(b"a: " + b"b" * 1000 + b"\r\n")
            except ConnectionError:
                break
        assert drained(raw)[:12] in (b"HTTP/1.1 400", b"reset")


def test_a_slow_request_that_is_whole_is_answered(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    sent = request(ASK)
    with listening() as (url, _, _), connect(url) as raw:
        raw.sendall(sent[:-5])
        time.sleep(1.5)
        raw.sendall(sent[-5:])
        assert raw.recv(15) == b"HTTP/1.1 200 OK"


def test_the_time_of_a_request_begins_with_its_first_byte(monkeypatch):
    """With that of its head; not with that of the connection, of its body, or of the request before it."""
    ends, real, came = noted_ends(monkeypatch), connections.Connection.data_received, threading.Event()

    def received(self, data):
        real(self, data)
        came.set()

    monkeypatch.setattr(connections.Connection, "data_received", received)
    whole = request(ASK)
    with listening(request_timeout_s=30) as (url, _, _), connect(url) as raw:
        for number in range(2):
            time.sleep(0.05)
            begin, seen = time.monotonic(), list[float]()
            for piece in (whole[:10], whole[10:20], whole[20:-1], whole[-1:]):
                came.clear()
                raw.sendall(piece)
                assert came.wait(30)
                seen.append(time.monotonic())
            answer = raw.recv(1 << 16)
            while not answer.endswith(b"}}"):
                answer += raw.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert begin <= ends[number][1] - 30 <= seen[0]


def test_an_answer_is_late_once_its_time_is_over(monkeypatch):
    """Its head and its body took most of it."""
    slowed(monkeypatch)
    long = request({**ASK, "max_tokens": 2000, "ignore_eos": True, "temperature": 0})
    with listening(request_timeout_s=1.2) as (url, _, _), connect(url) as raw:
        begin = time.monotonic()
        for piece in (long[:10], long[10:-1]):
            raw.sendall(piece)
            time.sleep(0.4)
        raw.sendall(long[-1:])
        assert raw.recv(12) == b"HTTP/1.1 504"
        assert 1.1 < time.monotonic() - begin < 10


def test_a_request_behind_another_has_its_whole_time(monkeypatch):
    slowed(monkeypatch)
    ask, ends = request({**ASK, "max_tokens": 200, "ignore_eos": True}), noted_ends(monkeypatch)
    with listening(request_timeout_s=30) as (url, _, service), connect(url) as raw:
        raw.sendall(ask + ask)
        wait_until(lambda: len(ends) == 2 and sum(service.metrics.finished.values()) == 2)
    (first, _), (second, end_at) = ends
    assert first + 0.5 < end_at - 30 <= second, "the first one takes longer than half a second"


def test_a_client_that_reads_nothing(monkeypatch):
    monkeypatch.setattr(connections, "STALL_S", 0.3)
    body = {**ASK, "max_tokens": 1900, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": True}
    with listening() as (url, engine, service), connect(url, SO_RCVBUF=2048) as raw:
        raw.sendall(request({**body, "n": 4}))
        wait_until(lambda: engine.num_running)
        wait_until(lambda: not engine.num_running and sum(service.metrics.finished.values()) == 4)
        assert httpx.post(url + CHAT, json=ASK, timeout=30).status_code == 200
        assert not drained(raw).endswith(b"0\r\n\r\n"), "a whole answer"


@pytest.mark.parametrize("length", ["10", "99999999999", "-1", "abc", None])
def test_a_length_that_lies(length):
    """What is read is what was announced, or what fits the limit; the connection goes on or is closed."""
    chunked = f"{200_000:x}\r\n".encode() + b" " * 200_000 + b"\r\n0\r\n\r\n"
    how = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    with listening(max_body_bytes=100_000) as (url, engine, _), connect(url) as raw:
        raw.sendall(head(how))
        try:
            raw.sendall(chunked if length is None else b" " * 20)
            status = raw.recv(12)[9:]
        except ConnectionError:
            status = b"413"
        assert status == (b"413" if length in (None, "99999999999") else b"400")
        assert httpx.post(url + CHAT, json=ASK, timeout=30).status_code == 200
        assert not engine.num_running


def test_more_connections_than_the_server_takes(monkeypatch):
    monkeypatch.setattr(connections, "REFUSED", 1)
    with listening(max_connections=2) as (url, _, _), connect(url) as first, connect(url), connect(url) as third:
        third.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert drained(third).startswith(b"HTTP/1.1 200"), "probes are answered"
        with connect(url) as third:
            third.sendall(request(ASK))
            told = drained(third)
            assert told.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in told
            assert b'"code":"too_many_connections"' in told
        with connect(url), connect(url) as fourth:
            assert drained(fourth) in (b"", b"reset"), "closed unheard"
        first.sendall(request(ASK))
        assert first.recv(15) == b"HTTP/1.1 200 OK", "those that were there go on"
    with listening(max_connections=1) as (url, _, _):
        for _ in range(3):
            assert httpx.get(url + "/v1/models").status_code == 200, "closed connections do not count"


def test_bodies_that_are_too_large_together(monkeypatch):
    monkeypatch.setattr(gate, "HELD_BODIES", 2)
    with listening(max_body_bytes=1000) as (url, _, _), connect(url) as first, connect(url) as second:
        for raw in (first, second):
            raw.sendall(head(900) + b" " * 890)
        wait_until(lambda: status_of(url) == 429)
        first.close()
        wait_until(lambda: status_of(url) == 200)


def status_of(url) -> int:
    """Of a request with a body of more than 220 bytes."""
    body = {**ASK, "user": "u" * 200}
    return httpx.post(url + CHAT, json=body, timeout=30).status_code
