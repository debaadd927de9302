"""Short and long answers on a cache of a third of their need: is one lost, and how long do the short ones take?

    python -m bench.full smollm2-135m --minutes 2

Clients ask one request after another: some for long answers, others for short ones with a pause in between. The same
load runs with a cache and slots for all of them at once ("room"), and with a third of that ("full"); with --compare
also with that third where no answer gives its slot to another ("waits"). Before, one client asks the short ones alone.
Every answer must be the one of plain decoding without others; exit code 1 if one is not, or if one fails.

    p50, p95   seconds of a short answer from the request to its end
    ratio      p95 against "room", where it waits for nobody, and rounds are shared as here
    long       seconds of a long answer: median, and the longest
    waits      the longest time between two outputs of an answer, and before its first
"""

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.engine.loop import SpeculativeDecoder

TEXTS = (
    "Once upon a time there was a fox who",
    "The history of the railway begins in",
    "Here is a list of rivers and where they flow:",
    "def quicksort(items):",
    "Dear Sir or Madam, I am writing to",
    "The most important thing about bread is",
    "In the beginning of the nineteenth century,",
    "A recipe for soup: take",
)
PAUSE_S = 0.5


class Waiting(SpeculativeDecoder):
    """Answers have their slots, and all the columns that they may need, until they end."""

    @property
    def can_resume(self) -> bool:
        return False


def asks(count: int, max_tokens: int) -> list[tuple[str, SamplingParams]]:
    """Requests, greedy and sampled in turns."""
    return [
        (
            TEXTS[place % len(TEXTS)],
            SamplingParams(0.8 * (place % 2), seed=place, max_tokens=max_tokens, ignore_eos=True),
        )
        for place in range(count)
    ]


@dataclass
class Seen:
    """What clients saw. seconds: of each answer, by kind. waits: its longest time without an output."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"short": [], "long": []})
    waits: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    preemptions: int = 0

    def row(self, name: str) -> dict[str, Any]:
        """A line of the table."""
        short, long = sorted(self.seconds["short"]), self.seconds["long"]
        return {
            "load": name,
            "short": len(short),
            "p50_s": round(statistics.median(short), 2),
            "p95_s": round(short[math.ceil(0.95 * len(short)) - 1], 2),
            "long": len(long),
            "long_s": round(statistics.median(long), 1) if long else None,
            "longest_s": round(max(long), 1) if long else None,
            "waits_s": round(max(self.waits), 1),
            "preemptions": self.preemptions,
            "faults": len(self.faults),
        }


async def ask(engine: AsyncLLM, seen: Seen, kind: str, text: str, params: SamplingParams, want: list[int]) -> None:
    """One request, whose answer must be this one."""
    begin = last = time.perf_counter()
    longest, got = 0.0, list[int]()
    try:
        async for output in engine.generate(text, params):
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            got += output.token_ids
    except Exception as error:  # whatever it is, it must not be
        seen.faults.append(repr(error))
        return
    seen.seconds[kind].append(last - begin)
    seen.waits.append(longest)
    if got != want:
        seen.faults.append(f"another answer to {text!r}, seed {params.seed}")


async def client(
    engine: AsyncLLM, seen: Seen, kind: str, place: int, step: int, given: Sequence[Any], end: float, pause: float
) -> None:
    """Ask again and again until the time is over."""
    while time.perf_counter() < end:
        (text, params), want = given[place % len(given)]
        await ask(engine, seen, kind, text, params, want)
        place += step
        await asyncio.sleep(pause)


async def load(llm: LLM, short: Sequence[Any], long: Sequence[Any], clients: tuple[int, int], seconds: float) -> Seen:
    """What so many clients for short and for long answers see."""
    engine, seen = AsyncLLM(llm, prefix_cache_bytes=0), Seen()
    try:
        end = time.perf_counter() + seconds
        many = [client(engine, seen, "short", place, clients[0], short, end, PAUSE_S) for place in range(clients[0])]
        many += [client(engine, seen, "long", place, clients[1], long, end, 0) for place in range(clients[1])]
        await asyncio.gather(*many)
        seen.preemptions = engine.stats().preemptions
    finally:
        engine.shutdown()
    return seen


def plain(model: str, asked: Sequence[tuple[str, SamplingParams]]) -> list[tuple[Any, list[int]]]:
    """The requests with their answers by plain decoding."""
    texts, options = zip(*asked, strict=True)
    outputs: list[RequestOutput] = LLM(model).generate(list(texts), list(options))
    return [(one, output.token_ids) for one, output in zip(asked, outputs, strict=True)]


def main() -> int:
    """Run the loads, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the full cache; the others take a quarter")
    parser.add_argument("--drafter")
    parser.add_argument("--short", type=int, nargs=2, default=(3, 32), metavar=("CLIENTS", "TOKENS"))
    parser.add_argument("--long", type=int, nargs=2, default=(6, 600), metavar=("CLIENTS", "TOKENS"))
    parser.add_argument("--share", type=float, default=3.0, help="the need divided by the cache")
    parser.add_argument("--compare", action="store_true", help="also where no answer gives its slot to another")
    args = parser.parse_args()
    short, long = plain(args.model, asks(16, args.short[1])), plain(args.model, asks(args.long[0], args.long[1]))
    clients, seconds = (args.short[0], args.long[0]), 60 * args.minutes
    slots = sum(clients)

    def made(share: float, waits: bool) -> LLM:
        llm = LLM(args.model, drafter=args.drafter, max_num_seqs=max(1, round(slots / min(share, 2))))
        need = sum(number * (tokens + 32) for number, tokens in (args.short, args.long))
        llm.runner.cache.limit(int(need / share) * llm.runner.cache.column_bytes)
        if waits:
            llm.decoder = Waiting(llm.runner, llm.decoder.drafter, llm.verifier, llm.decoder.policy)
        return llm

    runs = [
        ("alone", 1.0, (1, 0), seconds / 8),
        ("room", 0.5, clients, seconds / 4),
        ("full", args.share, clients, seconds),
        *[("waits", args.share, clients, seconds)] * args.compare,
    ]
    rows = list[dict[str, Any]]()
    faults = list[str]()
    for name, share, some, time_s in runs:
        seen = asyncio.run(load(made(share, name == "waits"), short, long, some, time_s))
        rows.append(seen.row(name))
        faults += seen.faults
        print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ", flush=True)
    print(f"p95 of short answers, full against room: {rows[2]['p95_s'] / rows[1]['p95_s']:.2f}")
    print(*faults[:5], sep="\n")
    print(json.dumps({"rows": rows, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
