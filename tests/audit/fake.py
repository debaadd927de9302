"""A server of the OpenAI API in this process, with a law of tokens instead of a model, and with planted faults.

The law of a token depends on the prompt and on the tokens before it; it fixes greedy answers, and those of a seed.
"""

import json
import math
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = [f" w{i}" for i in range(12)]
OFF = {"method": "none"}


@cache
def law(before: str, flat: bool = False) -> tuple[float, ...]:
    """Log-probabilities of the words; the first two are far apart, or 0.02 nats."""
    draw = random.Random(before)
    scores = [draw.uniform(-2, 0) for _ in WORDS]
    first, second = sorted(range(len(WORDS)), key=scores.__getitem__)[:-3:-1]
    scores[first] = 0.9
    scores[second] = 0.88 if flat else 0.0
    total = math.log(sum(map(math.exp, scores)))
    return tuple(score - total for score in scores)


@dataclass
class Faults:
    """What is wrong with a server; nothing by default.

    together, drafts, again: the token (from 0) that is the second choice in batches, with drafts, or every second time;
    flat: laws of near-ties; drops: the last token is lost with drafts; sharpened: with drafts, samples are of this
    temperature; counts: added to the tokens of usage; greedy: the token that is the second choice always. accepted:
    tokens of each draft; tells: every second answer tells its own drafts, as vLLM or llama.cpp does; metrics: of this
    engine; unread: readings of the metrics that fail, by number. context: its characters and tokens
    together. broken: what happens to a request by number.
    """

    together: int | None = None
    drafts: int | None = None
    again: int | None = None
    flat: bool = False
    drops: bool = False
    sharpened: float = 1.0
    ignores_seed: bool = False
    counts: int = 0
    greedy: int | None = None
    accepted: int = 2
    tells: str | None = None
    metrics: str = "vllm"
    unread: tuple[int, ...] = ()
    nulls: bool = False
    context: int = 1 << 20
    logprobs: bool = True
    refuses: tuple[str, ...] = ()
    empty: bool = False
    models: tuple[str, ...] = ("fake",)
    key: str | None = None
    chats: bool = True
    broken: dict[int, str] = field(default_factory=dict)
    always: str | None = None


class Fake:
    """The server itself: what was asked, and how many requests are running."""

    def __init__(self, faults: Faults):
        self.faults, self.asked, self.running, self.most = faults, list[dict](), 0, 0
        self.passes, self.readings, self.lock = 0, 0, threading.Lock()
        self.seen = dict[str, int]()

    def answer(self, prompt: str, body: dict) -> tuple[list[str], list[dict[str, float]], str]:
        """Tokens, the laws that they are from, and why they end."""
        faults, drafts = self.faults, body.get("speculative") != OFF
        seed = body.get("seed", 0) if not faults.ignores_seed else random.random()
        text, tokens, laws = prompt, list[str](), list[dict[str, float]]()
        with self.lock:
            self.seen[prompt] = self.seen.get(prompt, 0) + 1
            is_again, together = self.seen[prompt] % 2 == 1, self.running > 1
        planted = (
            (faults.greedy, True),
            (faults.drafts, drafts),
            (faults.together, together),
            (faults.again, is_again),
        )
        wrong = [place for place, happens in planted if happens]
        for place in range(min(body["max_tokens"], faults.context - len(prompt))):
            logs = law(text, faults.flat)
            order = sorted(range(len(WORDS)), key=logs.__getitem__, reverse=True)
            choice = order[0]
            if body.get("temperature"):
                heat = faults.sharpened if drafts and place else 1.0
                noise = random.Random(f"{seed}/{text}")
                choice = max(order, key=lambda i: logs[i] / heat - math.log(-math.log(noise.random() or 1e-9)))
            elif place in wrong:
                choice = order[1]
            tokens.append(WORDS[choice])
            laws.append({WORDS[i]: logs[i] for i in order[:5]} | {WORDS[choice]: logs[choice]})
            text += WORDS[choice]
        if drafts:
            with self.lock:
                self.passes += 10
        if faults.drops and drafts and not body.get("temperature"):
            tokens, laws = tokens[:-1], laws[:-1]
        return tokens, laws, "length"

    def metrics(self) -> str:
        """As vLLM names them, or TGI."""
        if self.faults.metrics == "tgi":
            counts = {"sum": self.faults.accepted * self.passes, "count": self.passes}
            return "".join(f"tgi_request_skipped_tokens_{name} {count}\n" for name, count in counts.items())
        counts = {"drafts": self.passes, "draft_tokens": 4 * self.passes}
        counts["accepted_tokens"] = self.faults.accepted * self.passes
        return "".join(f"paceline:spec_decode_num_{name}_total {count}\n" for name, count in counts.items())

    def told(self) -> dict:
        """What an answer says of its own drafts."""
        accepted = 10 * self.faults.accepted
        if self.faults.tells == "llama.cpp":
            return {"timings": {"predicted_n": accepted + 31, "draft_n": 40, "draft_n_accepted": accepted}}
        own = {"num_draft_tokens": 40, "num_accepted_draft_tokens": accepted, "num_spec_steps": 10}
        return {"metrics": {"speculative_decoding": own}}


def _choice(tokens: list[str], laws: list[dict[str, float]], reason: str | None, chat: bool, listed: bool) -> dict:
    text = "".join(tokens)
    logprobs: dict | None = None
    if listed and chat:
        content = [
            {"token": token, "logprob": top[token], "bytes": list(token.encode()),
             "top_logprobs": [{"token": word, "logprob": value} for word, value in top.items()]}
            for token, top in zip(tokens, laws, strict=True)
        ]  # fmt: skip
        logprobs = {"content": content}
    elif listed:
        own = [top[token] for token, top in zip(tokens, laws, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": own, "top_logprobs": laws}
    return {"index": 0, "finish_reason": reason, "logprobs": logprobs, "text": text}


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    faults = fake.faults

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status: int, body: object, **headers: str) -> None:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def is_refused(self) -> bool:
            if faults.key is not None and self.headers["Authorization"] != f"Bearer {faults.key}":
                said = f"Incorrect API key provided: {self.headers['Authorization']}"
                self.reply(401, {"error": {"message": said}})
                return True
            return False

        def do_GET(self):
            if self.is_refused():
                return
            if self.path == "/v1/models":
                self.reply(200, {"data": [{"id": name, "owned_by": "paceline"} for name in faults.models]})
            elif self.path == "/version":
                self.reply(200, {"version": "1"})
            elif self.path == "/metrics":
                fake.readings += 1
                is_read = fake.readings - 1 not in faults.unread
                self.reply(200 if is_read else 503, fake.metrics())
            else:
                self.reply(404, {"error": "not here"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.is_refused():
                return
            with fake.lock:
                number = len(fake.asked)
                fake.asked.append(body)
                fake.running += 1
                fake.most = max(fake.most, fake.running)
            try:
                time.sleep(0.01 if faults.together is not None else 0)
                self.answer(body, faults.broken.get(number, faults.always))
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with fake.lock:
                    fake.running -= 1

        def answer(self, body: dict, breaks: str | None) -> None:
            is_chat = "messages" in body
            for name in faults.refuses:
                if name in body:
                    self.reply(400, {"error": {"message": f"{name} is not supported"}})
                    return
            if is_chat and not faults.chats:
                self.reply(400, {"error": {"message": "the model has no chat template"}})
                return
            if breaks == "busy":
                self.reply(429, {"error": {"message": "slow down"}}, Retry_After="0")
            elif breaks == "for long":
                self.reply(429, {"error": {"message": "slow down"}}, Retry_After="3600")
            elif breaks == "fails":
                self.reply(500, {"error": {"message": "out of memory"}})
            elif breaks == "text":
                self.reply(200, "<html>hello</html>")
            elif breaks == "missing":
                self.reply(404, {"error": {"message": "no such model"}})
            elif breaks == "moved":
                self.reply(307, "", Location="http://elsewhere:1/")
            elif breaks == "echo":
                self.reply(200, {"error": f"no such key: {self.headers['Authorization']}"})
            elif breaks == "no choices":
                self.reply(200, {"choices": []})
            elif breaks == "sleeps":
                time.sleep(1.0)
                self.reply(200, {})
            elif breaks in ("drops", "drips"):
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                for _ in range(1 if breaks == "drops" else 40):
                    self.wfile.write(b'{"choices": [')
                    time.sleep(0.05 if breaks == "drips" else 0)
                self.close_connection = True
            else:
                self.whole(body, is_chat)

        def whole(self, body: dict, is_chat: bool) -> None:
            prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
            tokens, laws, reason = fake.answer(prompt, body)
            if faults.empty:
                tokens, laws, reason = [], [], "stop"
            listed = faults.logprobs and "logprobs" in body
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens) + faults.counts}

            def shaped(choice: dict, key: str) -> dict:
                return choice if not is_chat else {**choice, key: {"role": "assistant", "content": choice.pop("text")}}

            if not body.get("stream"):
                choice = shaped(_choice(tokens, laws, reason, is_chat, listed), "message")
                told = fake.told() if faults.tells and len(fake.asked) % 2 else {}
                self.reply(200, {"choices": [choice], "usage": usage, **told})
                return
            pieces = [
                {"choices": [shaped(_choice([token], [top], None, is_chat, listed), "delta")]}
                for token, top in zip(tokens, laws, strict=True)
            ]
            pieces += [{"choices": [shaped(_choice([], [], reason, is_chat, False), "delta")]}]
            pieces += [{"choices": [], "usage": usage}]
            pieces = [{**piece, "error": None} if faults.nulls else piece for piece in pieces]
            text = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
            self.reply(200, text, Content_Type="text/event-stream")

    return Handler


@contextmanager
def serving(faults: Faults | None = None, **planted):
    """A server on a port of its own; yields its URL and what it counted."""
    fake = Fake(faults or Faults(**planted))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
