"""All drafting methods on all kinds of prompts, in one table.

    python bench/methods.py MODEL --data DIR --out FOLDER -d lookup -d suffix -d head:NAME [--suite spec_bench ...]
        [--temperature 0 1] [--budget cost_model equal] [--num-prompts 24] [--max-tokens 128] [--nodes 7] [--runs 1]
        [--no-memory]

Every piece (budget, temperature, suite, run) is a benchmark run of all drafters in turns, kept in FOLDER as `paceline
bench` keeps it; `paceline show` reads it. A piece that is complete is not run again, so a run that was stopped goes on
where it was. DIR holds a folder for each suite. A drafter that cannot be used is refused before anything is measured.

With several `--runs`, each with new engines that have learnt nothing, an answer counts with its fastest run, on every
side. That takes out most of the noise of a machine that does other work. The drafter `none` is plain decoding once
more: how far its row is from 1 is the noise that is left.

budget "cost_model": the default policy decides how much to draft. "equal": every round, chains of `--nodes` tokens, and
trees of as many nodes, five deep.

memory: what a process with the drafter holds after an answer beyond one that decodes plainly (`memory.py`), in MB of
10^6 bytes; about 3 MB is noise.

Writes table.md and table.json; bars.svg, a picture of the speed-ups; and spec_bench/METHOD.jsonl, the answers in the
format that Spec-Bench's evaluation/speed.py reads. A drafter with an answer that differs from plain decoding by more
than a near-tie of the logits is left out of the table, and the script exits with 1.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import Progress

from paceline.cli.options import quieten
from paceline.errors import PacelineError
from paceline.system.hardware import set_waiting, use_threads

TREE_DEPTH = 5
SUITES = ("spec_bench", "humaneval", "gsm8k", "mbpp")


def open_engines(model, drafters, budget="cost_model", nodes=7):
    """(configs, engines) of all drafters, on the same weights. Raises `PacelineError` for one that cannot be used."""
    from paceline import LLM
    from paceline.config import parse
    from paceline.zoo import resolve

    configs = [within(parse(text), budget, nodes) for text in drafters]
    built = [config.build() for config in configs]  # what has no weights is refused before the model is loaded
    llms, loaded = [], resolve(model)
    for drafter, policy, verifier in built:
        llms.append(LLM(loaded, drafter=drafter, policy=policy, verifier=verifier, max_num_seqs=1))
        loaded = llms[-1].loaded
    return configs, llms


def run_piece(args, folder, suite, temperature, budget, progress):
    """Measure all drafters on one suite."""
    from paceline.measure.result_folder import claim
    from paceline.measure.run import PLAIN, BenchOptions, BenchRun, EngineSide, fitting
    from paceline.measure.suites import choose, read_suite
    from paceline.measure.summary import about_run, summarise

    configs, llms = open_engines(args.model, args.drafter, budget, args.nodes)
    questions = read_suite(suite, args.data)
    prompts, left_out = fitting(llms[0], choose(questions, args.num_prompts))
    options = BenchOptions(max_tokens=args.max_tokens, temperature=temperature, seed=args.seed)
    with claim(folder, args.model, args.drafter) as results:
        sides = [EngineSide(name, llm) for name, llm in zip(args.drafter, llms, strict=True)]
        plain = EngineSide(PLAIN, llms[0].plain())
        names = {PLAIN, *args.drafter}
        run = BenchRun(plain, sides, options, lambda answers: results.add(answers, names, llms[0].tokenizer))
        run.measure(prompts, progress)
        about = about_run(llms, configs, prompts, len(questions), left_out, {})
        summary = {"model": args.model, "suite": suite, **summarise(run, args.drafter, {}), **about}
        results.finish(summary)


def check(args):
    """Raise `PacelineError` where a drafter or a suite cannot be used."""
    from paceline.measure.suites import read_suite

    for suite in args.suite:
        read_suite(suite, args.data)
    open_engines(args.model, args.drafter, args.budget[0], args.nodes)


def memory_of(args):
    """Drafter -> MB that it adds to a process, measured once for each of them; None with --no-memory."""
    if args.no_memory:
        return dict.fromkeys(args.drafter)
    path = args.out / "memory.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if missing := [name for name in args.drafter if name not in known]:
        command = [sys.executable, str(Path(__file__).with_name("memory.py")), args.model]
        for name in ("none", *missing):
            command += ["--drafter", name]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        plain, *rows = (row["resident_mb"] for row in json.loads(told.splitlines()[-1])["rows"])
        known |= {name: max(0, row - plain) for name, row in zip(missing, rows, strict=True)}
        path.write_text(json.dumps(known), encoding="utf-8")
    return known


def within(config, budget, nodes):
    """The same drafter with this budget."""
    if budget == "cost_model":
        return config
    if config.drafter.tree_nodes(TREE_DEPTH) is None:
        return replace(config, policy="fixed", num_speculative_tokens=nodes)
    depth = min(TREE_DEPTH, nodes)
    return replace(config, policy="fixed", num_speculative_tokens=depth, num_draft_nodes=nodes)


def read_piece(runs):
    """(category, prompt) -> side -> tokens, seconds, passes, drafting seconds; and the differences of each side.

    runs: the folders of the same piece. Each answer counts with its fastest run.
    """
    answers, verdicts = {}, defaultdict(Counter)
    for folder in runs:
        for line in map(json.loads, (folder / "answers.jsonl").open(encoding="utf-8")):
            rounds = [one for one in line["rounds"] if not one["with_prompt"]]
            drafting = sum(one["draft_s"] for one in line["rounds"])
            found = line["num_tokens"], line["seconds"], len(rounds), drafting
            key = line["category"], line["index"], line["turn"], line["side"]
            answers[key] = min(answers.get(key, found), found, key=lambda one: one[1])
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for one in summary["runs"]:
            verdicts[one["drafter"]].update(one["verdicts"])
    cells = defaultdict(lambda: defaultdict(lambda: np.zeros(4)))
    for (category, index, _, side), found in answers.items():
        cells[category, index][side] += found
    return cells, verdicts


def rows_of(suites, drafters, memory, seed):
    """The rows of a table: numbers of each drafter, overall and by category. suites: name -> folders of its runs."""
    from paceline.measure.summary import speedup

    cells, verdicts = {}, defaultdict(Counter)
    for suite, runs in suites.items():
        found, counts = read_piece(runs)
        cells |= {(category, suite, index): sides for (category, index), sides in found.items()}
        for side, mine in counts.items():
            verdicts[side].update(mine)
    names = dict.fromkeys(key[0] for key in cells)
    rows = []
    for side in drafters:
        groups = {name: [cell for key, cell in cells.items() if key[0] == name] for name in names}
        rows.append({"drafter": side, "memory_mb": memory[side], "verdicts": dict(verdicts[side]), "categories": {}})
        for name, group in {**groups, "all": list(cells.values())}.items():
            tokens, seconds, passes, drafting = sum(cell[side] for cell in group)
            found = speedup([cell["plain"][:2] for cell in group], [cell[side][:2] for cell in group], seed)
            rows[-1]["categories"][name] = {
                **{key: found[key] for key in ("speedup", "speedup_low", "speedup_high")},
                "tokens_per_pass": tokens / passes if passes else None,
                "drafting_share": drafting / seconds,
                "prompts": len(group),
            }
    return rows


def markdown(title, rows):
    """A table: speed-up, and tokens a pass in brackets."""
    names = list(rows[0]["categories"])
    lines = [
        f"### {title}",
        "",
        "| drafter | " + " | ".join(names) + " | 95% interval | drafting | memory | identical |",
    ]
    lines.append("|---" * (len(names) + 5) + "|")
    for row in rows:
        numbers = row["categories"]
        whole, verdicts = numbers["all"], row["verdicts"]
        shown = [f"{one['speedup']:.2f} ({one['tokens_per_pass'] or 0:.2f})" for one in numbers.values()]
        low, high = whole["speedup_low"], whole["speedup_high"]
        spread = "–" if low is None else f"{low:.2f}–{high:.2f}"
        drafting = f"{whole['drafting_share']:.0%}"
        same = f"{verdicts.get('identical', 0)} of {sum(verdicts.values())}"
        memory = "" if row["memory_mb"] is None else f"{row['memory_mb']} MB"
        lines.append("| " + " | ".join([row["drafter"], *shown, spread, drafting, memory, same]) + " |")
    return "\n".join(lines) + "\n"


def bars(tables, path):
    """Speed-ups by category, one panel a table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3 * len(tables)), layout="constrained")
    for axes, (title, rows) in zip(np.atleast_1d(figure.subplots(len(tables), 1)), tables.items(), strict=True):
        names = list(rows[0]["categories"])
        for place, row in enumerate(rows):
            at = np.arange(len(names)) + 0.8 * (place + 0.5) / len(rows) - 0.4
            axes.bar(at, [one["speedup"] for one in row["categories"].values()], 0.8 / len(rows), label=row["drafter"])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(title=title, ylabel="speed-up", xticks=range(len(names)), xticklabels=names)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path)


def spec_bench_answers(folder, out):
    """Answers in Spec-Bench's format: one file for each side, one line for each question."""
    lines = defaultdict(dict)
    for one in map(json.loads, (folder / "answers.jsonl").open(encoding="utf-8")):
        fresh = {"turns": [], "decoding_steps": [], "new_tokens": [], "wall_time": [], "accept_lengths": []}
        line = lines[one["side"]].setdefault(
            one["id"],
            {"question_id": one["id"], "category": one["topic"] or one["category"], "model_id": one["side"],
             "choices": [{"index": 0, **fresh}], "tstamp": time.time()},
        )  # fmt: skip
        choice, rounds = line["choices"][0], [r for r in one["rounds"] if not r["with_prompt"]]
        choice["turns"].append(one["text"])
        choice["decoding_steps"].append(len(rounds))
        choice["new_tokens"].append(one["num_tokens"])
        choice["wall_time"].append(one["seconds"])
        choice["accept_lengths"] += [r["num_emitted"] for r in rounds]
    out.mkdir(exist_ok=True)
    for side, found in lines.items():
        name = side.replace("/", "_").replace(":", "_")
        (out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found.values()), encoding="utf-8")


def is_complete(folder, drafters):
    """Whether this piece was measured to its end, with these drafters."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return summary["complete"] and [run["drafter"] for run in summary["runs"]] == drafters


def main():
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", "-d", action="append", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", nargs="+", default=SUITES)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--budget", nargs="+", default=["cost_model", "equal"], choices=["cost_model", "equal"])
    parser.add_argument("--num-prompts", type=int, default=24, help="of each suite")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1, help="of every piece; an answer counts with its fastest run")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, which loads the model often")
    args = parser.parse_args()
    if len(set(args.drafter)) < len(args.drafter):
        parser.error("the same drafter is given twice")
    quieten(debug=False)
    set_waiting()
    use_threads()
    try:
        check(args)
    except PacelineError as error:
        parser.error(str(error))
    pieces = {
        (budget, heat): {
            suite: [args.out / f"{budget}-t{heat:g}-{suite}-{run}" for run in range(1, args.runs + 1)]
            for suite in args.suite
        }
        for budget in args.budget
        for heat in args.temperature
    }
    args.out.mkdir(parents=True, exist_ok=True)
    memory = memory_of(args)
    with Progress(transient=True) as progress:
        for (budget, heat), suites in pieces.items():
            for suite, folder in ((suite, folder) for suite, runs in suites.items() for folder in runs):
                if is_complete(folder, args.drafter):
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                task = progress.add_task(folder.name)

                def report(what, done, total, task=task):
                    progress.update(task, completed=done, total=total)

                run_piece(args, folder, suite, heat, budget, report)
                progress.remove_task(task)
    tables, wrong = {}, False
    for (budget, heat), suites in pieces.items():
        rows = rows_of(suites, args.drafter, memory, args.seed)
        wrong |= any(row["verdicts"].get("bug") for row in rows)
        how = "the cost model decides" if budget == "cost_model" else f"{args.nodes} nodes every round"
        tables[f"temperature {heat:g}, {how}"] = [row for row in rows if not row["verdicts"].get("bug")]
        if heat == 0 and budget == "cost_model" and "spec_bench" in suites:
            spec_bench_answers(suites["spec_bench"][0], args.out / "spec_bench")
    text = "\n".join(markdown(title, rows) for title, rows in tables.items())
    (args.out / "table.md").write_text(text, encoding="utf-8")
    (args.out / "table.json").write_text(json.dumps(tables, indent=1), encoding="utf-8")
    bars(tables, args.out / "bars.svg")
    print(text)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
