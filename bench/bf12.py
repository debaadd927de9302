"""bfloat16 weights in twelve bits against 16 bits, in turns in one process: passes, and answers that must be the same.

    python bench/bf12.py MODEL [--prompts FILE.jsonl --drafter NAME] [--rows 1 4 8 12 16 32] [--repeat 40]

Prints the median milliseconds of a pass over so many rows behind 100 tokens, and the median ratio of a pair. With
--prompts (Spec-Bench's format), tokens a second of plain decoding and with the drafter, reading the prompt included.
Exits with 1 if an answer differs. Twelve bits are forced on kernels that would keep 16.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.config import parse
from paceline.core.tree import TokenTree
from paceline.kernels import load
from paceline.quant import packed
from paceline.system.hardware import set_waiting, use_threads
from paceline.target import ModelRunner, load_model
from paceline.zoo import resolve

KINDS = {"16 bits": "portable", "12 bits": "avx512"}  # as which kernels weights are packed


def both(make: Callable[[], Any]) -> dict[str, Any]:
    """What `make` makes with each kind of weights."""
    made, found = {}, load()
    for kind, isa in KINDS.items():
        packed.load = lambda isa=isa: replace(found, isa=isa)
        made[kind] = make()
    packed.load = load
    return made


def passes(model: str, rows: list[int], repeat: int) -> None:
    """Print the table of passes."""
    runners = both(lambda: ModelRunner(load_model(resolve(model)), 1, 1024))
    text = [i % 1000 + 5 for i in range(512)]
    slots = {kind: runner.cache.allocate() for kind, runner in runners.items()}
    for kind, runner in runners.items():
        runner.extend_cache(slots[kind], text[:100])
    print("rows", *(f"{kind:>9}" for kind in KINDS), "ratio")
    for count in rows:
        tree = TokenTree.from_lists([text[:count]], [list(range(-1, count - 1))])
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(repeat):
            for kind, runner in runners.items():
                begin = time.perf_counter()
                runner.forward([slots[kind]], tree)
                times[kind].append(1e3 * (time.perf_counter() - begin))
        wide, short = times.values()
        ratio = statistics.median(b / a for a, b in zip(wide, short, strict=True))
        print(f"{count:4d} {statistics.median(wide):9.2f} {statistics.median(short):9.2f}  {ratio:.2f}")


def answers(model: str, prompts: Path, count: int, drafter: str) -> bool:
    """Each prompt by both, plain and with the drafter, after a warm-up over all of them. True if all are the same."""
    asked = [json.loads(line)["turns"][0] for line in prompts.open()]
    chats = [[{"role": "user", "content": text}] for text in asked[:: max(1, len(asked) // count)]]
    llms = both(lambda: LLM(model, drafter=parse(drafter).build()[0], max_num_seqs=1))
    params, same = SamplingParams(temperature=0.0, max_tokens=96), True
    totals: dict[tuple[str, str], list[float]] = {}
    for turn in range(2):
        for index, chat in enumerate(chats):
            seen = set()
            for kind in list(KINDS)[:: 1 if index % 2 else -1]:
                for how, llm in (("plain", llms[kind].plain()), (drafter, llms[kind])):
                    begin = time.perf_counter()
                    tokens = llm.chat(chat, params)[0].token_ids
                    total = totals.setdefault((kind, how), [0.0, 0.0])
                    if turn:
                        total[0], total[1] = total[0] + len(tokens), total[1] + time.perf_counter() - begin
                    seen.add(tuple(tokens))
            same &= len(seen) == 1
    rates = {key: tokens / seconds for key, (tokens, seconds) in totals.items()}
    for how in ("plain", drafter):
        wide, short = (rates[kind, how] for kind in KINDS)
        print(f"{how}: {wide:.1f} and {short:.1f} tokens/s, {short / wide:.3f}")
    print(f"{len(chats)} chats, {'all identical' if same else 'some answers differ'}")
    return same


def main() -> None:
    """Measure passes, then answers."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 12, 16, 32])
    options.add_argument("--repeat", type=int, default=40)
    options.add_argument("--prompts", type=Path)
    options.add_argument("--num-prompts", type=int, default=20)
    options.add_argument("--drafter", default="lookup")
    given = options.parse_args()
    set_waiting()
    use_threads()
    print(f"kernels: {load()}")
    passes(given.model, given.rows, given.repeat)
    if given.prompts and not answers(given.model, given.prompts, given.num_prompts, given.drafter):
        sys.exit(1)


if __name__ == "__main__":
    main()
