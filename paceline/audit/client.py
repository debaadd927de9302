"""A client for any server of the OpenAI API, in threads, with an end to every wait.

A failure is an `AuditError` with its reason in words: `Unreachable` where the server itself is at fault, which ends an
audit, `NoAnswer` where one request is, which is a finding. Redirects are not followed, since they would take the key
elsewhere.
"""

import json
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR, socket
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import ConfigError, PacelineError

MAX_BYTES = 64 << 20
"""The longest answer that is read."""
RETRIES, MAX_WAIT_S = 6, 60.0
"""How often a busy server is asked again, and the longest single wait for it."""
_BUSY = (429, 502, 503, 504)

Sent: TypeAlias = Callable[[], None]
"""Called right before a request is sent, also when a busy server is asked again."""


def _nothing() -> None:
    pass


class AuditError(PacelineError):
    """A request that has no answer."""


class Unreachable(AuditError):
    """The server cannot be audited: it is not there, refuses the key, or has no such endpoint."""


class NoAnswer(AuditError):
    """One request failed. status: of HTTP, if there was one."""

    status: int | None = None


class Stopped(AuditError):
    """The audit was stopped meanwhile."""


class Reply(NamedTuple):
    """What the server sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body, whatever its bytes."""
        return self.body.decode("utf-8", "replace")


class Client:
    """One server. url: with or without /v1. timeout_s: of one answer, from its request to its last byte.

    Threads may share it. `stop` ends all requests, also those that wait.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 120.0):
        parts = _split(url)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.parts, self.timeout_s = parts, timeout_s
        self.url = f"{parts.scheme}://{parts.netloc}{self.base}"
        key = api_key or ""
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError("the key holds characters that no header can have", expected="printable ASCII")
        self._headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "paceline-check"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._key = key
        self._sockets, self._dials = set[socket](), set[threading.Event]()
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page. Raises `Unreachable`."""
        reply = self._send("GET", path, None)
        return reply.status, reply.text

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of an answer, of whatever status. A busy server is waited for. Raises `AuditError`."""
        reply = self._patiently(path, body)
        return reply.status, reply.text

    def ask(self, path: str, body: Mapping[str, Any], sent: Sent = _nothing) -> dict[str, Any]:
        """The JSON object that answers a request. Raises `AuditError` for anything else."""
        reply = self._patiently(path, body, sent)
        if reply.status != 200:
            raise self.refusal(path, reply.status, reply.text)
        found = _object(self, reply.text, self.url + path)
        # What is no answer is only shown.
        return found if found.get("choices") else _object(self, self.hidden(reply.text), self.url + path)

    def stream(self, path: str, body: Mapping[str, Any], sent: Sent = _nothing) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises `AuditError`, also where the stream breaks off before [DONE]."""
        where, ended = self.url + path, False
        for data in self._events(path, {**body, "stream": True}, sent):
            if ended := data.strip() == "[DONE]":
                break
            piece = _object(self, data, where)
            if error := piece.get("error"):
                raise NoAnswer(f"{where} failed in the middle of an answer", got=_short(self.hidden(str(error))))
            yield piece
        if not ended:
            raise NoAnswer(f"{where} broke off in the middle of an answer", expected="data: [DONE] at the end")

    def stop(self) -> None:
        """End all requests of all threads: they raise `Stopped`."""
        self._stopped.set()
        with self._lock:
            for dial in self._dials:
                dial.set()
            for sock in self._sockets:
                with suppress(OSError):
                    socket.shutdown(sock, SHUT_RDWR)

    def refusal(self, path: str, status: int, text: str) -> AuditError:
        """The error for a reply that is no answer."""
        where, said = self.url + path, _short(self.hidden(_message(text)))
        if status in (401, 403):
            fix = "give the key with --api-key or in OPENAI_API_KEY"
            return Unreachable(f"{where} refuses the key", got=f"{status}: {said}", fix=fix)
        if status == 404:
            fix = "check the address and --served-model; --raw asks /v1/completions, --chat /v1/chat/completions"
            return Unreachable(f"there is no {where}", got=f"{status}: {said}", fix=fix)
        error = NoAnswer(f"{where} answered {status}", got=said)
        error.status = status
        return error

    def hidden(self, text: str) -> str:
        """A text of the server without the key, which some repeat in their errors."""
        return text.replace(self._key, "***") if len(self._key) > 3 else text

    # Helpers

    def _patiently(self, path: str, body: Mapping[str, Any], sent: Sent = _nothing) -> Reply:
        """As `_send`; asks again where the server is busy."""
        attempt = 0
        while True:
            sent()
            reply = self._send("POST", path, body)
            if reply.status not in _BUSY or not self._waits(reply, attempt):
                return reply
            attempt += 1

    def _waits(self, reply: Reply, attempt: int) -> bool:
        """Wait as long as the server asked for; whether that was possible."""
        asked = _retry_after(reply.headers.get("retry-after"))
        if attempt == RETRIES - 1 or (asked is not None and asked > MAX_WAIT_S):
            return False
        if self._stopped.wait(min(2.0**attempt, MAX_WAIT_S) if asked is None else max(asked, 0.05)):
            raise Stopped("the audit was stopped")
        return True

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Reply:
        with _Visit(self, method, path, body) as visit:
            content = b"".join(visit.pieces())
            return Reply(visit.reply.status, _lower(visit.reply), content)

    def _events(self, path: str, body: Mapping[str, Any], sent: Sent) -> Iterator[str]:
        """The data of server-sent events. Raises as `stream` does."""
        for attempt in range(RETRIES):
            sent()
            with _Visit(self, "POST", path, body) as visit:
                status, headers = visit.reply.status, _lower(visit.reply)
                if status == 200:
                    yield from _data(visit.pieces())
                    return
                reply = Reply(status, headers, b"".join(visit.pieces()))
            if status not in _BUSY or not self._waits(reply, attempt):
                raise self.refusal(path, status, reply.text)


class _Visit:
    """One request and its reply. Raises `AuditError`."""

    def __init__(self, client: Client, method: str, path: str, body: Mapping[str, Any] | None):
        self.client, self.method, self.path = client, method, path
        self.content = None if body is None else json.dumps(body).encode()
        self.end = time.monotonic() + client.timeout_s
        self.connection, self.sock, self.reply = _connection(client), None, cast("HTTPResponse", None)

    def __enter__(self) -> "_Visit":
        client = self.client
        try:
            self._check()
            self._connect()
            self.sock = self.connection.sock
            with client._lock:
                client._sockets.add(self.sock)
            self._check()
            path = client.base + self.path
            self.connection.request(self.method, path, self.content, client._headers)
            self.reply = self.connection.getresponse()
        except BaseException as error:
            self.__exit__()
            raise self._named(error) from error
        if 300 <= self.reply.status < 400:
            to = self.reply.headers.get("Location", "nowhere")
            self.__exit__()
            to = _short(client.hidden(to))
            raise Unreachable(f"{client.url} redirects", got=to, fix="give the address it redirects to")
        return self

    def __exit__(self, *_: object) -> None:
        with self.client._lock:
            self.client._sockets.discard(self.sock)  # type: ignore[arg-type]
        self.connection.close()
        if self.reply is not None:
            self.reply.close()

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes."""
        size, due = 0, self.reply.headers.get("Content-Length", "")
        try:
            while piece := self.reply.read1(1 << 16):
                size += len(piece)
                if size > MAX_BYTES:
                    raise NoAnswer(f"{self.client.url + self.path} sends more than {MAX_BYTES >> 20} MB")
                yield piece
                self._check()
            if due.isdigit() and size < int(due) and self.method != "HEAD":
                raise ConnectionError(f"{size} of {due} bytes")
        except (OSError, HTTPException, ValueError) as error:
            raise self._named(error) from error

    def _connect(self) -> None:
        """Connect in a thread of its own: neither a look-up of a name nor a handshake can be ended from outside."""
        client, connection, done = self.client, self.connection, threading.Event()
        failed = list[BaseException]()

        def is_first() -> bool:
            with client._lock:
                found = done in client._dials
                client._dials.discard(done)
            return found

        def dial() -> None:
            try:
                connection.connect()
            except BaseException as error:
                failed.append(error)
            if not is_first():
                connection.close()
            done.set()

        with client._lock:
            client._dials.add(done)
        try:
            self._check()
            threading.Thread(target=dial, name="audit: connect", daemon=True).start()
            done.wait(max(self.end - time.monotonic(), 0.0))
        finally:
            if given_up := is_first():
                self.connection = _connection(client)  # the thread closes the other one
        self._check()
        if given_up or failed:
            raise TimeoutError if given_up else failed[0]

    def _check(self) -> None:
        if self.client._stopped.is_set():
            raise Stopped("the audit was stopped")
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self.sock is not None:
            with suppress(OSError):  # closed behind its last byte
                self.sock.settimeout(max(left, 0.01))

    def _named(self, error: BaseException) -> BaseException:
        """The error in words, of the class that says whose fault it is."""
        client, where = self.client, self.client.url
        if client._stopped.is_set() and not isinstance(error, KeyboardInterrupt):
            return Stopped("the audit was stopped")
        if isinstance(error, PacelineError) or not isinstance(error, Exception):
            return error
        if isinstance(error, TimeoutError):
            what = f"no whole answer of {where + self.path} within {client.timeout_s:g} s"
            return NoAnswer(what, fix="raise --timeout, or lower --max-tokens")
        if isinstance(error, ssl.SSLError):
            return Unreachable(f"no secure connection to {where}", got=_short(str(error)))
        if self.sock is None and isinstance(error, OSError):
            got = _short(str(error.strerror or error))
            return Unreachable(f"no server answers at {where}", got=got, fix="start it, and give http://HOST:PORT")
        got = _short(str(error) or type(error).__name__)
        return NoAnswer(f"{where + self.path} broke off in the middle of an answer", got=got)


def _split(url: str) -> SplitResult:
    """The parts of a server's address. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises for one that is no number
    except ValueError as error:
        raise ConfigError("this is no address of a server", got=_short(url), expected="http://HOST:PORT") from error
    if "@" in parts.netloc:
        raise ConfigError("the address holds a name or a key", fix="give the key with --api-key or in OPENAI_API_KEY")
    is_odd = not url.isprintable() or " " in url or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or is_odd:
        raise ConfigError("this is no address of a server", got=_short(url), expected="http://HOST:PORT")
    return parts


def _connection(client: Client) -> HTTPConnection:
    """A connection to the server; a secure one through the proxy of the environment, if there is one."""
    parts = client.parts
    host, secure = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    kind = HTTPSConnection if secure else HTTPConnection
    proxy = getproxies().get("https") if secure else None
    if proxy is None or proxy_bypass(host):
        return kind(host, port, timeout=client.timeout_s)
    through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    connection = kind(str(through.hostname), through.port or 80, timeout=client.timeout_s)
    connection.set_tunnel(host, port)
    return connection


def _data(pieces: Iterator[bytes]) -> Iterator[str]:
    """The data of each event; comments and other fields are left out."""
    left = b""
    for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        yield from _of(lines)
    yield from _of([left])


def _of(lines: list[bytes]) -> Iterator[str]:
    for line in lines:
        if line.startswith(b"data:") and (text := line[5:].strip()):
            yield text.decode("utf-8", "replace")


def _object(client: Client, text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NoAnswer(f"{where} sends no JSON object", got=_short(client.hidden(text)))
    return value


def _message(text: str) -> str:
    """What an error says, out of the forms that servers give it."""
    try:
        value = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and key in value:
                value = value[key]
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, str) else json.dumps(value)


def _retry_after(text: str | None) -> float | None:
    """Seconds, which may be given as a date; None where nothing is."""
    if text is None:
        return None
    with suppress(ValueError):
        return seconds if math.isfinite(seconds := float(text)) else None
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(text).timestamp() - time.time()
    return None


def _lower(reply: HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items()}


def _short(text: str, most: int = 300) -> str:
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."
