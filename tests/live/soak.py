"""Random requests at a server for some minutes: does it leak slots, tasks or memory, and do answers stay the same?

    python -m tests.live.soak smollm2-135m --minutes 10
    python -m tests.live.soak tiny-vlm --minutes 10 --image
    python -m tests.live.soak smollm2-135m --minutes 10 --adapters 4 --second int8 --max-loaded-models 1

Starts `paceline serve` and asks whole answers, streams, forms, tools and images, several at a time, from a list of
seeded requests whose answers alone are known. Some clients go in the middle, some read slowly, some send nonsense
(nonsense.py). The last line is JSON: counts by kind and status, and `faults`, what must not have happened. Exit
code 1 where there is one.

With --adapters the model has so many random ones, and with --second another model is served: the same in such weights.
What both and each adapter answer is then compared with `LLM.plain()` in a process of its own, and one adapter is
unloaded and loaded again and again.

`memory_mb`, at the beginning and after each tenth of the time, while no request runs: `rss` of the server; `kv`, its KV
cache, which grows to the longest text; `prefixes`, its prefix cache, which grows to its size; `malloc`, what malloc has
given out, those two included; `free`, what malloc holds and nobody uses; `python_blocks`, thousands of small objects of
Python. `malloc` without `kv` and `prefixes`, and `python_blocks`, should stop growing.
"""

import argparse
import asyncio
import ctypes
import gc
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from tests.live.nonsense import BODIES, CHAT, COMPLETION, raw_bytes, red_square
from tests.live.soak_models import adapter_names, named, plain_answers, write_adapters

SLOTS, WAITING, WORKERS = 4, 4, 10
_TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                                     "additionalProperties": False}}  # fmt: skip
_FORMS = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _TOOL["parameters"]}}},
    {"structured_outputs": {"regex": "[0-9]{3,9} (km|miles)"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
)


def bodies(model: str, sees: bool) -> list[tuple[str, dict[str, Any]]]:
    """Requests whose answers depend on nothing but themselves, each with its path."""
    words = ("Name three rivers.", "Repeat: the cat sat on the mat, the dog sat on the rug.", "Count from 1 to 20.")
    made: list[tuple[str, dict[str, Any]]] = []
    for seed, text in enumerate(words * 3):
        said: dict[str, Any] = {"model": model, "seed": seed, "temperature": seed % 3 / 2, "max_tokens": 8 + 9 * seed}
        made.append((COMPLETION, {**said, "prompt": text, "logprobs": 2 if seed % 2 else None}))
        made.append((CHAT, {**said, "messages": [{"role": "user", "content": text}]}))
        made.append((CHAT, {**said, "messages": [{"role": "user", "content": text * 30}], "stop": ["river", "\n\n"]}))
    for seed, form in enumerate(_FORMS):
        made.append((CHAT, {"model": model, "seed": seed, "messages": [{"role": "user", "content": "Go"}], **form}))
    made.append((COMPLETION, {"model": model, "prompt": ["One, two,", "A, B,"], "n": 3, "seed": 5, "max_tokens": 12}))
    if sees:
        for size in (16, 40):
            parts = [{"type": "image_url", "image_url": {"url": red_square(size)}}, {"type": "text", "text": "Colour?"}]
            said = {"model": model, "seed": size, "max_tokens": 16, "messages": [{"role": "user", "content": parts}]}
            made.append((CHAT, said))
    return made


@dataclass
class Soak:
    """A server under test, and what was seen."""

    client: httpx.AsyncClient
    pool: list[tuple[str, dict[str, Any]]]
    alone: list[Any] = field(default_factory=list[Any])
    patience_s: float = 30  # for what no server can use
    switched: tuple[str, str] = ("", "")  # an adapter that is unloaded and loaded again and again, and its folder
    counts: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])

    async def ask(self, which: int) -> Any:
        """What a whole answer says, or its status."""
        path, body = self.pool[which]
        answer = await self.client.post(path, json=body)
        return said_by(answer.json()["choices"]) if answer.status_code == 200 else answer.status_code

    async def stream(self, which: int, pause_s: float = 0.0) -> Any:
        """The same from a stream, read with pauses."""
        path, body = self.pool[which]
        choices = dict[int, dict[str, Any]]()
        async with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        return piece["error"]["code"]
                    join(choices, piece["choices"])
                    await asyncio.sleep(pause_s)
        return said_by([choices[index] for index in sorted(choices)])

    async def leave(self, which: int, stream: bool, after_s: float) -> str:
        """Go in the middle."""
        asking = self.stream(which) if stream else self.ask(which)
        try:
            await asyncio.wait_for(asking, after_s)
        except TimeoutError:
            return "gone"
        return "answered"

    async def nonsense(self, rng: random.Random) -> int | str:
        """Something no server can use, which it must say soon, or should rather not be asked."""
        path, content = rng.choice(BODIES)
        body = content(self.pool[0][1]["model"]) if callable(content) else content
        begin = time.monotonic()
        asking = self.client.post(path, content=body, headers={"Content-Type": "application/json"})
        try:
            answer = await asyncio.wait_for(asking, 60)
        except TimeoutError:  # some are accepted, such as 128 answers as long as the context
            return "gone"
        seconds = time.monotonic() - begin
        if answer.status_code >= 500 or (seconds > self.patience_s and answer.status_code != 200):  # 200: it waited
            self.faults.append(f"nonsense: {answer.status_code} after {seconds:.1f} s: {path} {body[:200]!r}")
        return answer.status_code

    async def raw(self, rng: random.Random) -> str:
        """Bytes that are no HTTP, or half of it."""
        url = self.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(raw_bytes(rng))
            await writer.drain()
            return (await asyncio.wait_for(reader.read(12), 1)).decode("latin-1")
        except (TimeoutError, ConnectionError) as error:
            return type(error).__name__
        finally:
            writer.close()

    async def switch(self, path: str, more: dict[str, Any]) -> int:
        """Load or unload an adapter."""
        return (
            await self.client.post(f"/v1/{path}_lora_adapter", json={"lora_name": self.switched[0], **more})
        ).status_code

    async def one(self, rng: random.Random) -> None:
        """One request of a random kind."""
        kinds, weights = ("whole", "stream", "slow", "leave", "nonsense", "raw", "switch"), [5, 5, 1, 4, 3, 1, 1]
        kind = rng.choices(kinds, weights if self.switched[0] else [*weights[:-1], 0])[0]
        which = rng.randrange(len(self.pool))
        if kind == "switch":
            more = {"lora_path": self.switched[1], "base_model_name": "first"}
            told: Any = await (self.switch("unload", {}) if rng.random() < 0.5 else self.switch("load", more))
            if told not in (200, 400, 404, 429):  # it is there, it is not, or too many wait for its model
                self.faults.append(f"switch: {told}")
        elif kind == "leave":
            told = await self.leave(which, rng.random() < 0.5, rng.uniform(0, 1.5))
        elif kind in ("nonsense", "raw"):
            told = await (self.nonsense(rng) if kind == "nonsense" else self.raw(rng))
        else:
            got = await (self.ask(which) if kind == "whole" else self.stream(which, 0.02 * (kind == "slow")))
            told = got if isinstance(got, int | str) else "same" if got == self.alone[which] else "DIFFERENT"
            is_gone = told in (400, 404, "invalid_value") and self.pool[which][1]["model"] == self.switched[0]
            if told not in ("same", 429) and not is_gone:
                self.faults.append(f"{kind}: {told}: {self.pool[which]}: {got} instead of {self.alone[which]}"[:1500])
        self.counts[f"{kind} {told}"] += 1
        if told == 429:
            await asyncio.sleep(rng.uniform(0, 1))

    async def run(self, seconds: float, seed: int) -> None:
        """Workers until the time is over."""
        end = time.monotonic() + seconds

        async def work(rng: random.Random) -> None:
            while time.monotonic() < end:
                try:
                    await self.one(rng)
                except httpx.HTTPError as error:
                    self.faults.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(work(random.Random(seed + index)) for index in range(WORKERS)))


def join(choices: dict[int, dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Add pieces of a stream to the choices they belong to."""
    for piece in pieces:
        to = choices.setdefault(piece["index"], {"text": "", "calls": [], "finish_reason": None})
        delta = piece.get("delta", {})
        to["text"] += piece.get("text") or delta.get("content") or ""
        for one in delta.get("tool_calls", ()):
            to["calls"] += [] if one["index"] < len(to["calls"]) else [{**one["function"], "arguments": ""}]
            to["calls"][one["index"]]["arguments"] += one["function"]["arguments"]
        to["finish_reason"] = piece["finish_reason"] or to["finish_reason"]


def said_by(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each choice its text, its calls and why it ended."""
    found = []
    for one in choices:
        message = one.get("message", {})
        calls = one.get("calls", [call["function"] for call in message.get("tool_calls", ())])
        found.append((one.get("text") or message.get("content") or "", calls, one["finish_reason"]))
    return found


async def soak(url: str, options: argparse.Namespace, inspect: Any, plain: list[str]) -> dict[str, Any]:
    """Ask alone, then all at once, then look what is left. plain: answers of `plain_answers`."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        seen = Soak(client, bodies(model, options.image))
        if options.adapters:
            seen.switched = adapter_names(options)[-1], adapter_names(options)[-1]
        seen.patience_s = 30 if options.max_loaded_models > 1 else 60  # it may wait for its model
        names = (
            ["first", *adapter_names(options), *(["second"] if options.second else [])] if options.is_several else []
        )
        apart = [body for name in names for body in named(name)]
        seen.pool += apart
        idle = inspect()
        seen.alone = [await seen.ask(which) for which in range(len(seen.pool))]
        for body, got, want in zip(apart, seen.alone[-len(apart) :], plain, strict=False):
            seen.faults += [] if got[0][0] == want else [f"not plain: {body}: {got} instead of {want!r}"]
        seen.faults += [f"alone: {one}: {seen.pool[at]}" for at, one in enumerate(seen.alone) if isinstance(one, int)]
        await seen.run(min(30.0, options.minutes * 15), options.seed)  # what is allocated once
        memory = [(await at_rest(inspect, idle["tasks"]))["memory_mb"]]
        for part in range(10):
            await seen.run(options.minutes * 6, options.seed + 1000 * (part + 1))
            after = await at_rest(inspect, idle["tasks"])
            memory.append(after["memory_mb"])
            faults = f"{len(seen.faults)} faults {seen.faults[-1:]}"
            print(f"{part + 1}/10: {memory[-1]}, {faults}", file=sys.stderr, flush=True)
        if after["running"] or after["waiting"] or after["tasks"] > idle["tasks"]:
            seen.faults.append(f"left behind: {after}")
        if after["free_slots"] != SLOTS:
            seen.faults.append(f"{after['free_slots']} free slots of {SLOTS}")
        own = [one["rss"] - one["kv"] - one["prefixes"] for one in memory]
        if max(own[-3:]) > 1.2 * max(own[:4]) + 100:
            seen.faults.append(f"memory grows: {own}")
        if options.adapters:
            await seen.switch("load", {"lora_path": seen.switched[1], "base_model_name": "first"})
        again = [await seen.ask(which) for which in range(len(seen.pool))]
        seen.faults += ["answers alone are others afterwards"] if again != seen.alone else []
    return {"minutes": options.minutes, "counts": dict(sorted(seen.counts.items())), "faults": seen.faults,
            "server": after, "memory_mb": memory}  # fmt: skip


async def at_rest(inspect: Any, idle_tasks: int, seconds: float = 20.0) -> dict[str, Any]:
    """What the server holds once it has nothing to do, or after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        held = inspect()
        if (not held["running"] and not held["waiting"] and held["tasks"] <= idle_tasks) or time.monotonic() > end:
            return held
        await asyncio.sleep(0.2)


def memory_of(runners: list[Any]) -> dict[str, int]:
    """Memory of this process in MB, see the module's docstring."""
    malloc = _malloc()
    held = {
        "rss": psutil.Process().memory_info().rss,
        "kv": sum(t.nbytes for one in runners for t in (*one.cache.keys, *one.cache.values)),
        "prefixes": sum(one.prefixes.num_bytes for one in runners),
        "malloc": malloc.uordblks + malloc.hblkhd,
        "free": malloc.fordblks,
    }
    blocks = {"python_blocks": round(sys.getallocatedblocks() / 1e3)}
    return {name: round(size / 1e6) for name, size in held.items()} | blocks


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: sums over all arenas, in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def _malloc() -> _MallInfo:
    """What malloc holds; zeros without glibc."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", _MallInfo)
    function.restype = _MallInfo
    return function()


def child(arguments: list[str]) -> None:
    """`paceline serve`, which says for each line on stdin what it holds."""
    from paceline.cli import main as paceline

    def tell() -> None:
        from paceline.async_llm import AsyncLLM

        for _ in sys.stdin:
            gc.collect()
            objects = gc.get_objects()
            engines = [one for one in objects if isinstance(one, AsyncLLM) and one.is_alive]
            tasks = sum(isinstance(one, asyncio.Task) and not one.done() for one in objects)
            del objects  # or the next list would hold this one
            if engines:
                told = {"running": sum(one.num_running for one in engines), "tasks": tasks,
                        "waiting": sum(one.num_waiting for one in engines), "threads": threading.active_count(),
                        "free_slots": min(one.stats().free_slots for one in engines),
                        "fds": psutil.Process().num_fds(),
                        "memory_mb": memory_of([one.llm.runner for one in engines])}  # fmt: skip
                del engines
                print(json.dumps(told), flush=True)

    threading.Thread(target=tell, daemon=True).start()
    sys.argv = ["paceline", "serve", *arguments]
    paceline()


def main() -> None:
    """Start the server, soak it, stop it, read its log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--image", action="store_true", help="the model sees")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="the server's stderr")
    parser.add_argument("--adapters", type=int, default=0, help="random LoRA adapters of the model")
    parser.add_argument("--second", default="", metavar="WEIGHTS", help="serve a second model, in these weights")
    parser.add_argument("--max-loaded-models", type=int, default=2)
    parser.add_argument("--plain", type=Path, default=None, help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    options = parser.parse_args()
    options.is_several = bool(options.adapters or options.second)
    if options.plain is not None:
        plain_answers(options, options.plain)
        return
    with TemporaryDirectory(prefix="soak-") as folder:
        result = served(options, Path(folder))
    print(json.dumps(result))
    sys.exit(bool(result["faults"]))


def served(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the server and soak it. folder: for adapters."""
    plain = list[str]()
    limits = ["--max-num-seqs", str(SLOTS), "--max-waiting", str(WAITING), "--max-body-mb", "8"]
    limits += ["--max-model-len", "2048"]  # nonsense may ask for answers as long as that
    limits += ["--drafter", options.drafter]
    own = [options.model]
    if options.is_several:
        write_adapters(options, folder)
        asked = [sys.executable, "-m", "tests.live.soak", *sys.argv[1:], "--plain", str(folder)]
        plain = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
        adapters = {name: str(folder / name) for name in adapter_names(options)}
        first = {"model": options.model, "name": "first", "adapters": adapters}
        second = {"model": options.model, "name": "second", "weights": options.second}
        models = [first, second] if options.second else [first]
        own = [word for one in models for word in ("--models", json.dumps(one))]
        own += ["--max-loaded-models", str(options.max_loaded_models), "--adapter-dir", str(folder)]
    command = [sys.executable, "-m", "tests.live.soak", "--child", *own]
    command += ["--port", "0", "--json", "--log-format", "json", *limits]
    with options.log.open("w") as log:
        pipe = subprocess.PIPE
        made = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
    assert made.stdin is not None
    assert made.stdout is not None
    stdin, stdout = made.stdin, made.stdout

    def inspect() -> dict[str, Any]:
        stdin.write("\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        url = json.loads(stdout.readline())["url"]
        result = asyncio.run(soak(url, options, inspect, plain))
        made.send_signal(signal.SIGTERM)
        result["exit_code"] = made.wait(60)
    finally:
        made.kill()
    said = options.log.read_text().splitlines()
    lines = itertools.dropwhile(lambda line: not line.startswith("{"), said)  # words of libraries at their import
    bad = [line for line in lines if not line.startswith("{") or json.loads(line).get("level") == "error"]
    result["faults"] += [f"log: {line}" for line in bad] + ([] if result["exit_code"] == 0 else ["exit code"])
    return result


if __name__ == "__main__":
    main()
