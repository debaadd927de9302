"""The answers of a server of the OpenAI API, whichever of its forms they have."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..errors import ConfigError
from ..measure.prompts import Prompt
from .client import AuditError, Client, NoAnswer, Unreachable
from .engines import Acceptance, Engine, drafts_of

NUM_TOP = 5
"""The most likely tokens of a position that are asked for: no server of the OpenAI API gives fewer at most."""
Piece: TypeAlias = Mapping[str, Any]
_OPTIONAL = {"logprobs": ("logprobs", "top_logprobs"), "seed": ("seed",), "stream_options": ("stream_options",)}
_OPTIONAL["max_tokens"] = ("max_completion_tokens",)  # its name for some models of OpenAI
"""What some servers refuse, with the words that name it in their errors."""
_REASONS = {"eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop", "max_tokens": "length"}
"""Other words for why an answer ended."""


class Token(NamedTuple):
    """One token of an answer. text: as its server wrote it, a part of a character as `bytes:\\xf0\\x9f`.

    top: the log-probabilities of the most likely tokens there, by their text; of two with one text the higher.
    """

    text: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """One answer. tokens: empty where the server gives no log-probabilities.

    first_s: until the first text of a streamed answer; seconds: until its end. drafts: what it says of them.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    first_s: float | None = None
    drafts: Acceptance | None = None

    @property
    def num_tokens(self) -> int | None:
        """As the server counts them, or as it listed them; None where it says neither."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.tokens) or None


class Ask(NamedTuple):
    """How an answer is asked for."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = 0


class Side(Protocol):
    """What answers prompts: a server in one of its settings, or a local model.

    name: for reports.
    """

    name: str

    @property
    def about(self) -> dict[str, Any]:
        """What is known of it, for reports."""
        ...

    @property
    def most(self) -> int:
        """Requests that it takes at a time."""
        ...

    def answer(self, prompt: Prompt, ask: Ask, streamed: bool = False) -> Answer:
        """Answer a prompt. Raises `AuditError`."""
        ...

    def stop(self) -> None:
        """End the requests of all threads."""
        ...


@dataclass
class Server:
    """A `Side` that is a server. extra: further keys of every request. refused: optional fields it does not take."""

    client: Client
    engine: Engine
    model: str
    name: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refused: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def most(self) -> int:
        """As the engine's quirks say."""
        return self.engine.most or 1 << 30

    @property
    def about(self) -> dict[str, Any]:
        """For reports."""
        known = {
            "url": self.client.url,
            "model": self.model,
            "engine": self.engine.name,
            "version": self.engine.version,
        }
        return known | ({"with": json.dumps(dict(self.extra))} if self.extra else {})

    @property
    def hides_logprobs(self) -> bool:
        """Whether its log-probabilities are not those of its tokens; without drafts they are."""
        return not self.engine.logprobs and self.extra != self.engine.off

    def stop(self) -> None:
        """End the requests of all threads."""
        self.client.stop()

    def metrics(self) -> str | None:
        """The text of its metrics; None where it has none."""
        try:
            status, text = self.client.get("/metrics")
        except AuditError:
            return None
        return text if status == 200 else None

    def answer(self, prompt: Prompt, ask: Ask, streamed: bool = False) -> Answer:
        """Answer a prompt; an optional field that the server refuses is left out from then on, see `refused`."""
        path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
        while True:
            body = self._body(prompt, ask, streamed)
            clock = _Clock()
            try:
                if not streamed:
                    return self._whole(path, self.client.ask(path, body, clock.start), clock)
                return _joined(self.client.stream(path, body, clock.start), clock)
            except NoAnswer as error:
                name = _refused_field(error, body)
                if name is None:
                    raise
                self.refused[name] = str(error.got)

    def _whole(self, path: str, reply: Piece, clock: "_Clock") -> Answer:
        seconds, choice = clock.seconds(), _choice(reply)
        if choice is None:
            got = self.client.hidden(str(reply))[:200]
            raise NoAnswer(f"{self.client.url + path} sends an answer without choices", got=got)
        tokens, drafts = tuple(_tokens(choice)), drafts_of(reply)
        return Answer(_text(choice), tokens, _reason(choice), *_usage(reply), seconds, drafts=drafts)

    def _body(self, prompt: Prompt, ask: Ask, streamed: bool) -> dict[str, Any]:
        is_chat = not isinstance(prompt, str)
        logprobs: dict[str, Any] = {"logprobs": NUM_TOP}
        if is_chat:
            logprobs = {"logprobs": True, "top_logprobs": NUM_TOP}
        optional: dict[str, dict[str, Any]] = {
            "seed": {} if ask.seed is None else {"seed": ask.seed},
            "logprobs": {} if self.hides_logprobs else logprobs,
            "stream_options": {"stream_options": {"include_usage": True}} if streamed else {},
        }
        length = "max_completion_tokens" if "max_tokens" in self.refused else "max_tokens"
        body = {"model": self.model, "messages" if is_chat else "prompt": prompt, length: ask.max_tokens}
        body |= {"temperature": ask.temperature, "top_p": 1.0}
        for name, fields in optional.items():
            body |= {} if name in self.refused else fields
        return body | dict(self.engine.neutral) | dict(self.extra)


def served_models(client: Client) -> list[str]:
    """The names that /v1/models lists. Raises `Unreachable`."""
    status, text = client.get("/v1/models")
    if status != 200:
        raise client.refusal("/v1/models", status, text)
    try:
        names = [entry["id"] for entry in json.loads(text)["data"]]
        assert all(isinstance(name, str) for name in names)
    except (ValueError, LookupError, TypeError, AssertionError, RecursionError) as error:
        got = client.hidden(text)[:200]
        raise Unreachable(f"{client.url}/v1/models lists no models", got=got, expected="the OpenAI API") from error
    return names


def chosen_model(client: Client, wanted: str | None) -> str:
    """The model to ask. Raises `ConfigError` where there are several and none is named."""
    if wanted is not None:
        return wanted
    names = served_models(client)
    if len(names) != 1:
        got = ", ".join(names[:20]) or "none"
        raise ConfigError(f"{client.url} serves {len(names)} models", got=got, fix="name one with --served-model")
    return names[0]


# Reading


def _refused_field(error: NoAnswer, body: Mapping[str, Any]) -> str | None:
    """The optional field of a request at which the server took offence."""
    if error.status not in (400, 422, 501):
        return None
    said = str(error.got).lower()
    return next(
        (name for name, words in _OPTIONAL.items() if name in body and any(word in said for word in words)), None
    )


class _Clock:
    """Seconds since a request was sent: the last time, where a busy server was asked again."""

    begin = 0.0

    def start(self) -> None:
        self.begin = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.begin


def _joined(pieces: Iterable[Piece], clock: _Clock) -> Answer:
    """A streamed answer."""
    texts, tokens, reason, usage, first = list[str](), list[Token](), None, (None, None), None
    for piece in pieces:
        usage = _usage(piece) if piece.get("usage") else usage
        choice = _choice(piece)
        if choice is None:
            continue
        if text := _text(choice):
            first = clock.seconds() if first is None else first
            texts.append(text)
        tokens += _tokens(choice)
        reason = _reason(choice) or reason
    return Answer("".join(texts), tuple(tokens), reason, *usage, clock.seconds(), first)


def _choice(reply: Piece) -> Piece | None:
    """The one choice of an answer or of a chunk."""
    choices = reply.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(choice: Piece) -> str:
    """What a choice says, thoughts first."""
    if isinstance(choice.get("text"), str):
        return choice["text"]
    message = choice.get("message") or choice.get("delta") or {}
    if not isinstance(message, dict):
        return ""
    thoughts = message.get("reasoning_content") or message.get("reasoning")  # some send both, with one text
    return "".join(part for part in (thoughts, message.get("content")) if isinstance(part, str))


def _reason(choice: Piece) -> str | None:
    reason = choice.get("finish_reason")
    return _REASONS.get(reason, reason) if isinstance(reason, str) else None


def _usage(reply: Piece) -> tuple[int | None, int | None]:
    usage = reply.get("usage")
    counts = [usage.get(key) if isinstance(usage, dict) else None for key in ("prompt_tokens", "completion_tokens")]
    prompt, answer = (count if type(count) is int else None for count in counts)
    return prompt, answer


def _tokens(choice: Piece) -> Iterator[Token]:
    """The tokens of a choice in either form; none where something is missing or out of shape."""
    listed = choice.get("logprobs")
    if not isinstance(listed, dict):
        return
    if isinstance(listed.get("content"), list):  # of chats, and of llama.cpp in both
        for entry in listed["content"]:
            if isinstance(entry, dict):
                tops = entry.get("top_logprobs")
                tops = [one for one in tops if isinstance(one, dict)] if isinstance(tops, list) else []
                top = _top((_name(one), one.get("logprob")) for one in tops)
                yield Token(_name(entry), _number(entry.get("logprob")), top)
        return
    texts, own, tops = (listed.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
    if isinstance(texts, list):
        for index, text in enumerate(texts):
            value = own[index] if isinstance(own, list) and index < len(own) else None
            top = tops[index] if isinstance(tops, list) and index < len(tops) else None
            top = _top((_canonical(str(key)), one) for key, one in top.items()) if isinstance(top, dict) else {}
            yield Token(_canonical(str(text)), _number(value), top)


def _name(entry: Piece) -> str:
    """The text of a token; its bytes where they are no whole characters."""
    raw = entry.get("bytes")
    if isinstance(raw, list) and raw and all(type(byte) is int and byte in range(256) for byte in raw):
        return _named(bytes(raw))
    return _canonical(str(entry.get("token", "")))


def _canonical(text: str) -> str:
    data = spelled(text) if text.startswith("bytes:") else None
    return text if data is None else _named(data)


def _named(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{repr(data)[2:-1]}"


def spelled(text: str) -> bytes | None:
    """The bytes of a token by its text; None where that does not tell them."""
    if "\ufffd" in text:
        return None
    if text.startswith("bytes:") and "\\x" in text:
        with suppress(UnicodeError):
            return text[6:].encode("latin-1").decode("unicode_escape").encode("latin-1")
    return text.encode("utf-8", "surrogatepass")


def _number(value: object) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def _top(listed: Iterable[tuple[str, object]]) -> dict[str, float]:
    top = dict[str, float]()
    for text, value in listed:
        if (number := _number(value)) is not None:
            top[text] = max(number, top.get(text, number))
    return top
