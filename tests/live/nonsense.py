"""What a server must refuse soon, whatever it says: bodies for `tests/live/soak.py`, and bytes that are no HTTP."""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Body: TypeAlias = bytes | Callable[[str], bytes]


def red_square(size: int) -> str:
    """A picture as a data URI."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _bomb() -> str:
    """A picture of few bytes and, as its head says, very many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = (head, b"IDAT" + zlib.compress(bytes(1000)), b"IEND")
    made = b"".join(struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + made).decode()


def _chat(**fields: Any) -> Callable[[str], bytes]:
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **fields}
    return lambda model: json.dumps({"model": model, **said}).encode()


def _image(url: str, count: int = 1) -> Callable[[str], bytes]:
    parts = [{"type": "image_url", "image_url": {"url": url}}] * count
    return _chat(messages=[{"role": "user", "content": parts}])


def _form(**form: Any) -> Callable[[str], bytes]:
    return _chat(structured_outputs=form)


def _schema(schema: dict[str, Any]) -> Callable[[str], bytes]:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _prompt(prompt: Any, **fields: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, "prompt": prompt, "max_tokens": 2, **fields}).encode()


def _nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


_CHATS: list[Body] = [
    b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b'{"model": "\xff"}', b"[" * 200_000, b'{"a":' * 100_000,
    b'{"model": "a", "model": "b"}', b'{"messages": 1e999}', b'{"n": ' + b"9" * 10_000 + b"}", b"\x00" * 1000,
    b" " * (9 << 20), b'{"messages": [' + b'{"role": "user", "content": "a"},' * 150_000 + b"]}",
    _chat(stop=["a"] * 100_000), _chat(stop=["x" * 100_000]), _chat(stop=""), _chat(stop=[""]),
    _chat(max_tokens=10**18), _chat(max_tokens=10**400), _chat(max_tokens=-1), _chat(max_tokens=1.5),
    _chat(min_tokens=10**9), _chat(min_tokens=9), _chat(n=128, max_tokens=10**9), _chat(n=129), _chat(n=0),
    _chat(logit_bias={"99999999": 1}), _chat(logit_bias={"-1": 1}), _chat(logit_bias={"a": 1}),
    _chat(logit_bias={str(i): 1 for i in range(300_000)}), _chat(logit_bias={str(10**30): 1}),
    _chat(seed=2**70), _chat(seed=-(2**63)), _chat(temperature=1e-300), _chat(temperature=1e308), _chat(top_p=0),
    _chat(top_k=-5), _chat(top_k=10**12), _chat(min_p=2), _chat(repetition_penalty=0), _chat(repetition_penalty=1e308),
    _chat(bad_words=[""]), _chat(bad_words=["a" * 10_000]), _chat(allowed_token_ids=[]),
    _chat(allowed_token_ids=[-1]), _chat(allowed_token_ids=[10**9]), _chat(stop_token_ids=[10**12]),
    _chat(no_repeat_ngram_size=10**12), _chat(top_logprobs=21, logprobs=True), _chat(metadata={"a": 1}),
    _chat(messages=[{"role": "tool", "content": "a"}]), _chat(messages=[{"role": "assistant", "content": None}]),
    _chat(messages=[{"role": "user", "content": None}]), _chat(messages=[{"role": "user", "content": "\ud800"}]),
    _chat(messages=[{"role": "user", "content": "\x00\u202e" * 100}]), _chat(messages=[{}] * 1000),
    _chat(messages=[{"role": "user", "content": "a" * (7 << 20)}]), _chat(continue_final_message=True),
    _chat(chat_template_kwargs={"messages": []}), _chat(chat_template_kwargs={"tools": 3}),
    _chat(chat_template_kwargs={"tokenize": False}), _chat(chat_template_kwargs={"": 1}),
    _chat(tool_choice="required"), _chat(tools=[], tool_choice="required"), _chat(tools=[{"type": "function"}]),
    _chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}], tool_choice="required"),
    _chat(tools=[{"type": "function", "function": {"name": "\n" * 9, "parameters": _nested(3)}}] * 500),
    _form(regex="("), _form(regex="(a|a)*b{1,100000000}"), _form(regex="((a{1,1000}){1,1000}){1,1000}"),
    _form(regex="a" * 200_000), _form(choice=[]), _form(choice=["a" * 50] * 50_000), _form(choice=[""]),
    _form(grammar="root ::= root"), _form(grammar="(" * 10_000), _form(json="{"), _form(wat=1), _form(),
    _schema({"$ref": "#"}), _schema({"type": "wat"}), _schema({"enum": []}), _schema(_nested(400)),
    _schema({"$ref": "http://127.0.0.1:1/a"}), _schema({"type": "string", "pattern": "(" * 1000}),
    _schema({"type": "array", "minItems": 10**9}), _schema({"anyOf": [_nested(3)] * 5000}),
    _schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
    _image("data:image/png;base64,AAAA"), _image("data:,"), _image("file:///etc/passwd"), _image("http://127.0.0.1/a"),
    _image(_bomb()), _image(red_square(4), 17), _image("data:image/svg+xml;base64,PHN2Zy8+"), _image("x" * (6 << 20)),
]  # fmt: skip
_PROMPTS: list[Body] = [
    _prompt(""), _prompt([]), _prompt([[]]), _prompt([-1]), _prompt([10**9]), _prompt([10**30]), _prompt([1.5]),
    _prompt(["a", 3]), _prompt(["a"] * 129), _prompt(["a"] * 128, n=2), _prompt([5] * 1_000_000), _prompt(None),
    _prompt("a b " * (1 << 20)), _prompt("a", best_of=3), _prompt("a", logprobs=21), _prompt("a", suffix="b"),
    _prompt("a", stream_options={"include_usage": True}), _prompt("\ud800"), _prompt("a", user=3),
]  # fmt: skip
BODIES: list[tuple[str, Body]] = [
    *((CHAT, body) for body in _CHATS),
    *((COMPLETION, body) for body in _PROMPTS),
    ("/tokenize", b'{"prompt": "' + b"a " * (3 << 20) + b'"}'),
    ("/tokenize", b'{"prompt": "a", "messages": []}'),
    ("/detokenize", json.dumps({"tokens": [5] * 1_000_000}).encode()),
    ("/detokenize", b'{"tokens": [-1]}'),
    ("/v1/embeddings", b'{"input": "a"}'),
    ("/v1/models/%ff%00", b""),
    ("/" + "a" * 5000, b""),
]
"""Paths and bodies, some of them functions of the model's name; a few can be answered, and may be."""


def raw_bytes(rng: random.Random) -> bytes:
    """No HTTP, half of it, or too much of it."""
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return rng.choice([
        b"\x16\x03\x01\x02\x00\x01" + rng.randbytes(300), rng.randbytes(2000), b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 5000, begin, begin + b"a: b\r\n" * 20_000, begin + b"a: " + b"b" * 300_000,
        begin + b"Content-Length: -1\r\n\r\n",
        begin + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", begin + b"Content-Length: 99\r\n\r\n{",
        begin + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
        begin + b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\nab",
        begin + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
        begin + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
    ])  # fmt: skip
