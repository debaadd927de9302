"""Long texts: what passes take behind them, and the speeds of drafters on prompts of 1k to 8k tokens.

    python -m bench.long MODEL --data DIR --out FOLDER [-d lookup -d self-int4 ...] [--length 1024 4096 8000]
        [--kind rag summary code text] [--num-prompts 2] [--max-tokens 64] [--rows 1 2 4 8] [--synthetic 32768]
        [--window 128 512 2048] [--temperature 0]

DIR holds a folder for each suite; see `long_prompts` for the prompts. A piece (the passes behind one length, the
answers to one kind of prompts of one length) that is complete in FOLDER is not measured again, so a run that was
stopped goes on. Lengths of --synthetic are beyond the model's context: passes behind random numbers, no answers.

The first table is milliseconds: of passes of the target over 1, 2, ... rows, of a pass of the INT4 self-draft that
reads all columns or a window, and of a level or block of each head. The others are, for each kind and length, speed-up
over plain decoding, tokens a pass, and the share of drafting. Exits with 1 where an answer differs from plain decoding
by more than a near-tie.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.long_prompts import KINDS, long_prompts
from bench.speeds import estimated, warned
from paceline.cli.options import quieten
from paceline.cli.screen import duration
from paceline.errors import PacelineError
from paceline.system.hardware import use_threads

HEADS = ("head:smollm2-135m-eagle", "head:smollm2-135m-dflash")
DRAFTERS = (
    "lookup", "suffix", "self-int4:window=0", "self-int4", "lookup+self-int4",
    *HEADS, *(f"lookup+{name}" for name in HEADS),
)  # fmt: skip


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    """The median, after a first call."""
    times = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(times[1:]), 1)


def passes(llm: Any, length: int, given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of passes behind `length` columns of random numbers, by what is run."""
    import torch

    from paceline.config import parse
    from paceline.core.tree import TokenTree
    from paceline.methods.draft_window import DraftWindow
    from paceline.quant.linears import quantize_linears
    from paceline.target import ModelRunner
    from paceline.verify import Coupled

    most = length + 64
    runner = ModelRunner(replace(llm.loaded, context=max(most, llm.loaded.context)), 1, most)
    slot, found = runner.cache.allocate(), dict[str, float]()
    runner.cache.ensure(most)
    runner.prefill_chunk(slot, [5] * 8)
    with torch.inference_mode():
        for columns in (*runner.cache.keys, *runner.cache.values):
            columns.normal_()
    runner.cache.lengths[slot] = length
    for rows in given.rows:
        tree = TokenTree.chain([[5 + row for row in range(rows)]])
        found[f"{rows} rows"] = milliseconds(lambda tree=tree: runner.forward([slot], tree))

    def rounded(model: Any) -> None:
        quantize_linears(model, 32, "int4", 4)

    draft, root = runner.sharing_cache(rounded), TokenTree.chain([[5]])
    for size in (0, *given.window):
        draft.spans_of = DraftWindow(size).spans if size else None
        name = f"int4, {f'last {size}' if size else 'all'}"
        found[name] = milliseconds(lambda: draft.forward([slot], root))
    for name in [one for one in given.drafter if one.startswith("head:")]:
        head = parse(name).build()[0]
        head.bind(runner, Coupled())
        found[name] = round(1e3 * next(iter(head.seconds().values()))[0], 1)
    return found


def answers(llms: dict[str, Any], plain: Any, questions: Sequence[Any], given: argparse.Namespace) -> dict[str, Any]:
    """What each drafter reaches on these prompts."""
    from paceline.measure.run import PLAIN, BenchOptions, BenchRun, EngineSide
    from paceline.measure.summary import summarise

    sides = [EngineSide(name, llm) for name, llm in llms.items()]
    run = BenchRun(EngineSide(PLAIN, plain), sides, BenchOptions(given.max_tokens, given.temperature))
    with Progress(transient=True) as progress:
        tasks = {name: progress.add_task(name, total=None) for name in ("warming up", "measuring")}
        run.measure(questions, lambda what, done, total: progress.update(tasks[what], completed=done, total=total))
    found = {}
    for one in summarise(run, [*llms], {})["runs"]:  # type: ignore[attr-defined]
        spent = one["ms_per_round"]
        found[one["drafter"]] = {
            "speed": round(one["speedup"], 2),
            "tokens a pass": round(one["mean_acceptance_length"] or 1, 2),
            "drafting": round(spent["draft"] / spent["total"], 2),
            "bugs": one["verdicts"]["bug"],
            "sources": one["sources"],
        }
    return found


def table(title: str, columns: Sequence[str], rows: dict[str, Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {title} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(lines + [f"| {name} | {' | '.join(map(str, cells))} |" for name, cells in rows.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--data", type=Path, help="folder that holds a folder for each suite; without it they are fetched"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-d", "--drafter", action="append")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--length", type=int, nargs="*", default=[1024, 4096, 8000])
    parser.add_argument("--synthetic", type=int, nargs="*", default=[32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--window", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args(arguments)
    given.drafter = given.drafter or list(DRAFTERS)
    quieten(debug=False)
    use_threads()
    warned()
    try:
        return measure(given)
    except PacelineError as error:
        parser.exit(1, f"{error}\n")


def measure(given: argparse.Namespace) -> int:
    """Measure the pieces, and print their tables as they come."""
    from paceline import LLM
    from paceline.zoo import resolve

    given.out.mkdir(parents=True, exist_ok=True)
    llm: Any = LLM(resolve(given.model), max_num_seqs=1)
    llms = {name: llm.using(drafter=name) for name in given.drafter}

    def piece(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = given.out / f"{name}.json"
        if not path.exists():
            path.with_suffix(".part").write_text(json.dumps(make(), indent=1))
            path.with_suffix(".part").rename(path)
        return json.loads(path.read_text())

    lengths, texts = [*given.length, *given.synthetic], {}
    for kind in given.kind:
        for length in given.length:
            encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False, verbose=False)  # noqa: E731
            fits = min(length, llm.loaded.context - given.max_tokens - 64)
            texts[kind, length] = long_prompts(kind, fits, given.num_prompts, given.data, encode, llm.tokenizer.decode)
    missing = [
        one for key, some in texts.items() for one in some if not (given.out / f"{key[0]}-{key[1]}.json").exists()
    ]
    took = estimated(llm, missing, 1 + len(llms), given.max_tokens) if missing else 0.0
    print(f"Passes behind {lengths}, then {len(missing)} prompts, plainly and with {', '.join(llms)}.", end=" ")
    print(f"The prompts take about {duration(took)}, and longer where they are long: attention grows with them.")
    timed = {length: piece(f"passes-{length}", lambda length=length: passes(llm, length, given)) for length in lengths}
    rows = dict.fromkeys(name for found in timed.values() for name in found)
    print("\n" + table("ms behind", [f"{n} columns" for n in lengths], {
        name: [found.get(name, "") for found in timed.values()] for name in rows
    }))  # fmt: skip
    bugs = 0
    for (kind, length), some in texts.items():
        found = piece(f"{kind}-{length}", lambda some=some: answers(llms, llm.plain(), some, given))
        columns = ("speed", "tokens a pass", "drafting")
        print("\n" + table(f"{kind}, {length} tokens", columns, {
            name: [one[column] for column in columns] for name, one in found.items()
        }), flush=True)  # fmt: skip
        bugs += sum(one["bugs"] for one in found.values())
    return int(bugs > 0)


if __name__ == "__main__":
    raise SystemExit(main())
