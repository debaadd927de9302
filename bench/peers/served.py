"""A peer that already serves: llama.cpp's llama-server and vLLM's OpenAI server, asked over HTTP."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError

from .base import Peer, PeerAnswer, PeerFailed
from .workers.llamacpp_worker import answer_of, body_of


class _Server:
    """JSON over HTTP, without the proxies of the environment."""

    def __init__(self, name: str, url: str):
        self.name, self.url = name, url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> dict[str, Any]:
        """One JSON document. Raises `ConfigError` for a server that is not there or not what it should be."""
        try:
            with self._opener.open(self.url + path, timeout=10) as response:
                return json.load(response)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the {self.name} server does not answer", got=f"{self.url}{path}: {error}",
                expected=f"a running {self.name} server", fix="start it, and give its address as http://HOST:PORT",
            ) from error  # fmt: skip

    def post(self, path: str, body: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        """The reply line by line. Raises `PeerFailed`."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                yield from response
        except urllib.error.HTTPError as error:
            raise self.failed(f"status {error.code}: {error.read(500).decode(errors='replace')}") from error
        except OSError as error:
            raise self.failed(str(error)) from error

    def failed(self, got: str) -> PeerFailed:
        """The error for a request that came to nothing."""
        return PeerFailed(f"the {self.name} server at {self.url} did not answer the prompt", got=got,
                          fix="see the server's own log")  # fmt: skip


class ServedPeer(Peer):
    """A running server; whether and how it speculates was settled when it was started."""

    modes = ("served",)

    def __init__(self, url: str):
        self._server, self._about = _Server(self.name, url), dict[str, str]()

    def close(self) -> None:
        """Nothing: the server is its owner's."""

    def describe(self) -> dict[str, str]:
        return dict(self._about)


class LlamaServer(ServedPeer):
    """llama.cpp's llama-server."""

    name = "llama.cpp"

    def start(self) -> None:
        properties = self._server.get("/props")
        self._about = {
            "url": self._server.url,
            "version": str(properties.get("build_info", "unknown")),
            "model": str(properties.get("model_path", "unknown")),
        }

    def run(self, mode: str, token_ids: Sequence[int], max_tokens: int, temperature: float) -> PeerAnswer:
        """Answer by /completion, which takes token ids and reports the server's own times."""
        body = body_of(list(token_ids), max_tokens, temperature)
        lines = b"".join(self._server.post("/completion", body, _patience(max_tokens)))
        try:
            return PeerAnswer(**answer_of(json.loads(lines)))
        except (ValueError, KeyError, TypeError) as error:
            raise self._server.failed(f"no timings in {lines[:300]!r}") from error


class VllmServer(ServedPeer):
    """`vllm serve`."""

    name = "vllm"

    def __init__(self, url: str):
        super().__init__(url.removesuffix("/v1"))

    def start(self) -> None:
        models = self._server.get("/v1/models").get("data") or [{}]
        self._model = str(models[0].get("id", ""))
        version = str(self._server.get("/version").get("version", "unknown"))
        self._about = {"url": self._server.url, "version": version, "model": str(models[0].get("root") or self._model)}

    def run(self, mode: str, token_ids: Sequence[int], max_tokens: int, temperature: float) -> PeerAnswer:
        """Answer by a stream of /v1/completions, timed here: the server reports no times for one request."""
        body = {
            "model": self._model, "prompt": list(token_ids), "max_tokens": max_tokens, "temperature": temperature,
            "stream": True, "return_token_ids": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        }  # fmt: skip
        start, arrivals, ids, text = time.perf_counter(), [], [], []
        for line in self._server.post("/v1/completions", body, _patience(max_tokens)):
            choice = _choice(line)
            if choice is None:
                continue
            fresh = choice.get("token_ids")
            if fresh is None:
                raise self._server.failed("a stream without token ids; vLLM 0.10.2 or newer is needed")
            if fresh:
                arrivals.append((time.perf_counter(), len(fresh)))
                ids += fresh
            text.append(choice.get("text") or "")
        if not arrivals:
            raise self._server.failed("a stream without tokens")
        first, last = arrivals[0][0], arrivals[-1][0]
        answer = "".join(text)
        return PeerAnswer(ids, len(ids) - arrivals[0][1], answer, first - start, last - first, len(arrivals) - 1)


def _choice(line: bytes) -> dict[str, Any] | None:
    """The choice that an event of a stream carries; None for blank lines, comments and the end mark."""
    data = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    choices = json.loads(data).get("choices")
    return choices[0] if choices else None


def _patience(max_tokens: int) -> float:
    """Seconds without a byte after which a server counts as hung."""
    return 60 + 5 * max_tokens
