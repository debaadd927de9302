"""How many tokens a second do servers of the OpenAI API give to 1, 2, 4, 8 and 16 clients at once, and how soon?

    python bench/serve_load.py MODEL --base-url ours=http://localhost:8000 --base-url vllm=http://localhost:8001
    python bench/serve_load.py MODEL --compare plain --drafter lookup
    python bench/serve_load.py MODEL --start 'llama.cpp=PYTHON bench/peers/llamacpp_server.py FILE.gguf --port {port}'

Each client asks its next chat when it has the answer to the last one, greedily and streamed. The servers take
turns: every number of clients at each server, before the next number. All get the same chats. Every chat of a run
begins with a number of its own, so that no server finds it in its cache; --repeat asks the same ones at every number
of clients. Tokens are counted by MODEL's tokenizer over the text of an answer, for all servers alike.

    tokens/s   of all clients together, from the first request to the last answer
    first      milliseconds until the first text of an answer: median, 95th and 99th percentile over the requests
    each       milliseconds for each further token of an answer, likewise
    pass       tokens per draft round, where /metrics tells: accepted drafts, and one more
    same       share of the answers that are those of the first server, character by character

The last line is JSON. --compare plain starts this checkout's server with and without drafting, and exits with 1 if an
answer differs. Nothing else may run on the machine while this does.
"""

import argparse
import asyncio
import json
import math
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

CLIENTS = (1, 2, 4, 8, 16)
START_S = 240.0  # until a server that is started here answers


@dataclass
class ServedAnswer:
    """One answer as it came: seconds from the request to its first text, and to its last."""

    text: str
    first_s: float
    last_s: float
    num_tokens: int = 0

    @property
    def each_s(self) -> float | None:
        """Seconds for each token after the first; None for answers of one."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass
class Served:
    """A server under a name. model: what it calls its model."""

    name: str
    url: str
    model: str = ""
    answers: dict[tuple[int, int], str] = field(default_factory=dict)

    def read_model(self) -> None:
        """Ask for its model. Raises `httpx.HTTPError`."""
        found = httpx.get(f"{self.url}/v1/models", timeout=10, trust_env=False).raise_for_status().json()
        self.model = found["data"][0]["id"]

    def counters(self) -> tuple[float, float]:
        """Draft rounds and accepted drafted tokens so far, by vLLM's names; zeros where there are none."""
        try:
            page = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        except httpx.HTTPError:
            page = ""
        names = "spec_decode_num_drafts", "spec_decode_num_accepted_tokens"
        found = (re.findall(rf"^\w+:{name}_total(?:{{.*}})? (\S+)$", page, re.MULTILINE) for name in names)
        drafts, accepted = (sum(map(float, one)) for one in found)
        return drafts, accepted


async def ask(http: httpx.AsyncClient, model: str, messages: Sequence[Any], max_tokens: int) -> ServedAnswer:
    """One streamed chat. Raises `httpx.HTTPError`, and RuntimeError for an error of the server."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    begin, first, last, text = time.perf_counter(), 0.0, 0.0, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"status {reply.status_code}: {(await reply.aread()).decode(errors='replace')[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line[6:])
            if "error" in piece:
                raise RuntimeError(str(piece["error"]))
            fresh = "".join(choice["delta"].get("content") or "" for choice in piece["choices"])
            if fresh:
                last = time.perf_counter() - begin
                first, text = first or last, text + fresh
    return ServedAnswer(text, first, last)


async def load(server: Served, chats: Sequence[Any], clients: int, max_tokens: int) -> tuple[list[ServedAnswer], float]:
    """The answers to these chats by so many clients, and the seconds from the first request to the last answer."""
    waiting, answers = list(enumerate(chats)), dict[int, ServedAnswer]()
    limits = httpx.Limits(max_keepalive_connections=0)  # llama.cpp closes some just when they are used again
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as http:

        async def client() -> None:
            while waiting:
                place, messages = waiting.pop(0)
                answers[place] = await ask(http, server.model, messages, max_tokens)

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        seconds = time.perf_counter() - begin
    return [answers[place] for place in range(len(chats))], seconds


def spread_ms(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 95th and 99th percentile (nearest rank) in milliseconds; None without values."""
    ordered = sorted(values)
    if not ordered:
        return {"median": None, "p95": None, "p99": None}
    p95, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.95, 0.99))
    return {
        "median": round(1e3 * statistics.median(ordered), 2),
        "p95": round(1e3 * p95, 2),
        "p99": round(1e3 * p99, 2),
    }


def measure(server: Served, chats: Sequence[Any], clients: int, max_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """One line of the table. Raises SystemExit, with the server's name, where a request fails."""
    before = server.counters()
    try:
        answers, seconds = asyncio.run(load(server, chats, clients, max_tokens))
    except* (httpx.HTTPError, RuntimeError) as failed:
        raise SystemExit(f"{server.name} failed with {clients} clients: {failed.exceptions[0]!r}") from failed
    drafts, accepted = (after - was for after, was in zip(server.counters(), before, strict=True))
    for place, one in enumerate(answers):
        one.num_tokens = len(tokenizer(one.text, add_special_tokens=False)["input_ids"])
        server.answers[clients, place] = one.text
    return {
        "server": server.name,
        "clients": clients,
        "requests": len(answers),
        "tokens": sum(one.num_tokens for one in answers),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(one.num_tokens for one in answers) / seconds, 2),
        "first_ms": spread_ms([one.first_s for one in answers if one.text]),
        "each_ms": spread_ms([one.each_s for one in answers if one.each_s is not None]),
        "tokens_per_draft_round": round(1 + accepted / drafts, 3) if drafts else None,
    }


def chats_of(questions: Sequence[Any], count: int, begin: int) -> list[list[dict[str, Any]]]:
    """So many chats, each with a number of its own before its first words."""
    found = []
    for number in range(begin, begin + count):
        messages = [dict(one) for one in questions[number % len(questions)].messages(())]
        messages[0]["content"] = f"({number}) {messages[0]['content']}"
        found.append(messages)
    return found


@contextmanager
def started(name: str, command: str) -> Iterator[Served]:
    """A server that runs while the block does. Raises SystemExit with its last words where it does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(command.replace("{port}", str(port)))
    server, end = Served(name, f"http://127.0.0.1:{port}"), time.monotonic() + START_S
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
        try:
            while not server.model:
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise SystemExit(f"{said.read()[-2000:]}\n{name} did not start: {shlex.join(words)}")
                try:
                    server.read_model()
                except (httpx.HTTPError, ValueError, LookupError):
                    time.sleep(0.5)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def show(rows: Sequence[dict[str, Any]], same: dict[str, float]) -> None:
    """The table."""

    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    print(f"{'server':<14}{'clients':>8}{'tokens/s':>10}{'first ms':>26}{'each ms':>22}{'pass':>7}{'same':>7}")
    for row in rows:
        spreads = [" / ".join(number(value, 1) for value in row[k].values()) for k in ("first_ms", "each_ms")]
        print(f"{row['server']:<14}{row['clients']:>8}{row['tokens_per_s']:>10.1f}{spreads[0]:>26}{spreads[1]:>22}"
              f"{number(row['tokens_per_draft_round'], 2):>7}{same[row['server']]:>7.0%}")  # fmt: skip


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE in two."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model that is served: its tokenizer counts")
    parser.add_argument("--base-url", type=named, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--start", type=named, action="append", default=[], metavar="NAME=COMMAND",
                        help="a server to start and end; {port} stands for its port")  # fmt: skip
    parser.add_argument("--compare", choices=["plain"], help="our own server with drafting and without")
    parser.add_argument("--drafter", default="lookup", help="of --compare")
    parser.add_argument("--serve-options", default="", help="further ones of --compare, for example '--dtype float32'")
    parser.add_argument("--suite", default="built-in", help="built-in, spec_bench, ..., or a file of prompts")
    parser.add_argument("--data", help="the folder of published suites")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--requests", type=int, help="at each number of clients; default: 4, or twice the clients")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", action="store_true", help="the same chats at every number of clients")
    parser.add_argument("--json", action="store_true", help="print the line of JSON and nothing else")
    given = parser.parse_args(arguments)
    if not (given.base_url or given.start or given.compare):
        parser.error("there is no server: give --base-url, --start or --compare")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, compare."""
    options = parse(arguments)
    from transformers import AutoTokenizer

    from paceline.measure.suites import choose, read_suite
    from paceline.zoo import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(options.model))
    questions = [one for one in choose(read_suite(options.suite, options.data)) if one.image is None]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = [Served(name, url.rstrip("/").removesuffix("/v1")) for name, url in options.base_url]
        commands = list(options.start)
        if options.compare:
            serve = f"{shlex.quote(sys.executable)} -m paceline serve {shlex.quote(options.model)} --port {{port}}"
            commands += [
                (name, f"{serve} --drafter {drafter} --max-num-seqs {max(options.clients)} {options.serve_options}")
                for name, drafter in (("drafting", options.drafter), ("plain", "none"))
            ]
        for server in servers:
            server.read_model()
        servers += [stack.enter_context(started(name, command)) for name, command in commands]
        for server in servers:  # what is compiled or mapped at the first request is not measured
            asyncio.run(load(server, chats_of(questions, 1, 10**6), 1, 8))
        begin = 0
        for clients in options.clients:
            count = options.requests or max(4, 2 * clients)
            chats = chats_of(questions, count, begin)
            begin += 0 if options.repeat else count
            for server in servers:
                rows.append(measure(server, chats, clients, options.max_tokens, tokenizer))
                print(f"{server.name}, {clients} clients: {rows[-1]['tokens_per_s']} tokens/s", file=sys.stderr)
    first = servers[0].answers
    same = {one.name: sum(first[key] == text for key, text in one.answers.items()) / len(first) for one in servers}
    if not options.json:
        show(rows, same)
    print(json.dumps({"model": options.model, "suite": options.suite, "max_tokens": options.max_tokens,
                      "rows": rows, "same_as_first": same}))  # fmt: skip
    return int(bool(options.compare) and same["plain"] != same["drafting"])


if __name__ == "__main__":
    sys.exit(main())
