"""The first table of docs/results.md on this machine: plain decoding and drafters answer the same questions in turns.

    make bench                                 or python -m bench.speeds
    make bench ARGS="--quick"                  a minute, eight built-in prompts, keeps nothing
    make bench ARGS="--gguf FILE.gguf --update"

Says first how long it will take, and whether the machine is quiet. Writes the record of this machine to bench/results/,
and with --update docs/results.md and the table of README.md. --gguf: then also decodes the model's GGUF file. The
suites are fetched once, unless --data names a folder that holds a folder for each. Exits with 1 where an answer differs
from plain decoding by more than a near-tie.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench import results
from bench.methods import open_engines
from paceline.cli.options import quieten
from paceline.cli.screen import duration
from paceline.errors import PacelineError
from paceline.measure.record import Cell, Record, measured_on, read_records, record_of
from paceline.system.hardware import use_threads, watch_load

MODEL = "smollm2-135m"
DRAFTERS = ("none", *results.NEEDS, "head:smollm2-135m-dspark", "head:smollm2-135m-jetspec")
FILE_DRAFTERS = ("none", "lookup", "lookup+head:smollm2-135m-dflash")
QUICK_DRAFTERS = ("lookup", "head:smollm2-135m-dflash", "lookup+head:smollm2-135m-dflash")
SUITES = {"spec_bench": "", "humaneval": "HumanEval", "gsm8k": "GSM8K", "mbpp": "MBPP"}
CATEGORIES = {"mt_bench": "MT-bench", "summarization": "summary", "qa": "QA", "math_reasoning": "maths", "rag": "RAG"}
EACH, TOKENS, QUICK_TOKENS = 12, 96, 48


def questions_of(data: Path | None, quick: bool) -> list[Any]:
    """The same questions every time, each with the name of its column as category."""
    from paceline.measure.suites import BUILT_IN, choose, read_suite

    if quick:
        return [replace(question, category="built-in") for question in read_suite(BUILT_IN)]
    found = []
    for suite, column in SUITES.items():
        for question in choose(read_suite(suite, data, download=data is None), EACH):
            found.append(replace(question, category=column or CATEGORIES.get(question.category, question.category)))
    return found


def estimated(llm: Any, questions: Sequence[Any], sides: int, max_tokens: int) -> float:
    """Seconds of a run in which no answer ends early and no draft is accepted."""
    turns = sum(len(question.turns) for question in questions)
    prompts = sum(len(llm.encode(question.messages([]))) for question in questions) * turns / len(questions)
    return sides * (turns * max_tokens * llm.runner.pass_seconds(1) + prompts * llm.runner.pass_seconds(32) / 32)


def measure(model: str, drafters: Sequence[str], questions: Sequence[Any], max_tokens: int) -> dict[str, Any]:
    """The summary of a benchmark run, see `paceline.measure.summary`."""
    from paceline.measure.run import PLAIN, BenchOptions, BenchRun, EngineSide, fitting
    from paceline.measure.summary import summarise

    _, llms = open_engines(model, drafters)
    llm, sides = llms[0], [EngineSide(name, one) for name, one in zip(drafters, llms, strict=True)]
    prompts, _ = fitting(llm, questions)
    took = duration(estimated(llm, prompts, 1 + len(sides), max_tokens))
    print(f"{model}: {len(prompts)} questions, plainly and with {', '.join(drafters)}. This takes up to {took}.")
    run = BenchRun(EngineSide(PLAIN, llm.plain()), sides, BenchOptions(max_tokens=max_tokens))
    with Progress(transient=True) as progress:
        tasks = {name: progress.add_task(name, total=None) for name in ("warming up", "measuring")}
        run.measure(prompts, lambda what, done, total: progress.update(tasks[what], completed=done, total=total))
    return summarise(run, drafters, {})


def table_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Columns and rows of a record: speed-ups by category and over all."""
    runs = summary["runs"]
    categories = list(runs[0]["categories"])
    columns = {"drafter": "", "speed": "tokens/s", **dict.fromkeys((*categories, "all", "95% interval"), "x")}
    columns |= {"tokens a pass": "tokens", "drafting": "share", "identical": ""}
    rows: list[list[Cell]] = [["plain", round(summary["plain_tokens_per_s"], 1), *[None] * (len(columns) - 2)]]
    for run in runs:
        speeds = [round(one["speedup"], 3) for one in (*run["categories"].values(), run)]
        low, high, spent = run["speedup_low"], run["speedup_high"], run["ms_per_round"]
        interval = None if low is None else (round(low, 3), round(high, 3))
        more = [interval, round(run["mean_acceptance_length"] or 1, 3), round(spent["draft"] / spent["total"], 3)]
        same = f"{run['verdicts']['identical']} of {sum(run['verdicts'].values())}"
        rows.append([run["drafter"], round(run["speculative_tokens_per_s"], 1), *speeds, *more, same])
    return {"columns": columns, "rows": rows}


def machine_of(about: dict[str, Any], name: str | None) -> str:
    """What tables call this machine: the name given, or that of a record of the same processor."""
    here = tuple(about[key] for key in ("cpu", "isa", "cores"))
    known = [record.machine for record in read_records(results.RECORDS)]
    names = [one.name for one in known if (one.cpu, one.isa, one.cores) == here]
    return name or next(iter(names), f"{about['cores']} cores of {about['cpu']}")


def warned() -> bool:
    """Whether other programs disturb the timings, said where they do."""
    if (load := watch_load()).disturbs:
        print(
            f"Others use {load.busy_cores or 0:.1f} cores: timings taken now mean little. Stop them, and begin again."
        )
    return load.disturbs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update", action="store_true", help="write docs/results.md and README.md too")
    parser.add_argument("--data", type=Path, help="folder that holds a folder for each suite")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of the model, measured too")
    parser.add_argument("--machine", help='what tables call this one, such as "two Zen 3 cores"')
    given = parser.parse_args(arguments)
    if given.quick and given.update:
        parser.error("--quick keeps nothing, so there is nothing to --update")
    quieten(debug=False)
    use_threads()
    plans = [("drafters", "Greedy answers", MODEL, QUICK_DRAFTERS if given.quick else DRAFTERS)]
    if given.gguf:
        title = f"Greedy answers from a GGUF file ({given.gguf.name}, {given.gguf.stat().st_size / 1e9:.2f} GB)"
        plans.append(("gguf-drafters", title, str(given.gguf), FILE_DRAFTERS))
    about, busy, wrong, made = measured_on(), warned(), 0, list[Record]()
    machine = machine_of(about, given.machine)
    try:
        questions = questions_of(given.data, given.quick)
        for table, title, model, drafters in plans:
            summary = measure(model, drafters, questions, QUICK_TOKENS if given.quick else TOKENS)
            busy = warned() or busy
            wrong += sum(run["verdicts"]["bug"] for run in summary["runs"])
            notes = ["Measured beside other work."] if busy else []
            fields = {"table": table, "title": title, "model": MODEL, "notes": notes, **table_of(summary)}
            made.append(record_of(about, machine, "make bench", **fields))
            print(f"\n{results.rendered(made[-1])}")
    except PacelineError as error:
        parser.error(str(error))
    if not given.quick:
        print(*(f"kept in {record.save(results.RECORDS)}" for record in made), sep="\n")
    return max(int(wrong > 0), results.main([]) if given.update else 0)


if __name__ == "__main__":
    sys.exit(main())
