"""Peers that serve: what is asked of them, and what is made of their answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.peers import PeerFailed, PeerOptions, open_peer
from paceline.errors import ConfigError

LLAMA_ANSWER = {
    "content": "The Danube.",
    "tokens": [7, 8, 9, 10],
    "timings": {"prompt_n": 3, "prompt_ms": 250.0, "predicted_n": 5, "predicted_ms": 500.0, "draft_n_accepted": 1},
}
VLLM_EVENTS = [[4], [5, 6, 7], [], [8]]


class Handler(BaseHTTPRequestHandler):
    """llama-server and vLLM in one; `server.seen` keeps the bodies, `server.broken` makes every POST fail."""

    def log_message(self, format, *args):
        pass

    def send(self, content: bytes, status: int = 200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        replies = {
            "/props": {"build_info": "b9999", "model_path": "/models/x.gguf"},
            "/v1/models": {"data": [{"id": "x", "root": "/models/x"}]},
            "/version": {"version": "0.32.0"},
        }
        reply = replies.get(self.path)
        self.send(json.dumps(reply).encode(), 200 if reply else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.server.broken:
            self.send(b"the context is full", 400)
        elif self.path == "/completion":
            self.send(json.dumps(LLAMA_ANSWER).encode())
        else:
            events = [{"choices": [{"text": f"<{ids}>", "token_ids": ids}]} for ids in VLLM_EVENTS]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events] + [": ping\n\n", "data: [DONE]\n\n"]
            self.send("".join(lines).encode())


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.broken = [], False
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def served(name: str, server):
    return open_peer(f"{name}=http://127.0.0.1:{server.server_port}/", "unused", PeerOptions())


def test_llama_server(server):
    with served("llama.cpp", server) as peer:
        assert peer.modes == ("served",)
        assert peer.describe()["version"] == "b9999"
        answer = peer.run("served", [1, 2, 3], 5, 0.0)
    ((path, body),) = server.seen
    assert (path, body["prompt"], body["n_predict"], body["temperature"]) == ("/completion", [1, 2, 3], 5, 0.0)
    assert body["cache_prompt"] is False, "a prompt asked twice would have no prefill the second time"
    assert answer.num_tokens == 4, "the first of five tokens belongs to the prompt's pass"
    assert (answer.prefill_s, answer.decode_s, answer.num_passes) == (0.25, 0.5, 3)
    assert (answer.token_ids, answer.text) == ([7, 8, 9, 10], "The Danube.")


def test_vllm_server(server):
    with served("vllm", server) as peer:
        assert peer.describe()["model"] == "/models/x"
        answer = peer.run("served", [1, 2, 3], 5, 0.7)
    ((path, body),) = server.seen
    assert (path, body["model"], body["prompt"]) == ("/v1/completions", "x", [1, 2, 3])
    assert answer.token_ids == [4, 5, 6, 7, 8]
    assert (answer.num_tokens, answer.num_passes) == (4, 2), "an event without tokens is no pass"
    assert answer.prefill_s > 0
    assert answer.text == "<[4]><[5, 6, 7]><[]><[8]>"


@pytest.mark.parametrize("name", ["llama.cpp", "vllm"])
def test_failures_are_named(server, name):
    with served(name, server) as peer:
        server.broken = True
        with pytest.raises(PeerFailed, match="the context is full"):
            peer.run("served", [1], 5, 0.0)
    with pytest.raises(ConfigError, match="does not answer"):
        open_peer(f"{name}=http://127.0.0.1:{server.server_port}/elsewhere", "unused", PeerOptions()).start()


def test_nobody_listens(server):
    port = server.server_port
    server.shutdown()
    server.server_close()
    with pytest.raises(ConfigError, match="start it"):
        open_peer(f"llama.cpp=http://127.0.0.1:{port}", "unused", PeerOptions()).start()
