"""What does fine-tuning the whole model cost in quality? The original against the tuned one, prompt by prompt.

    python bench/quality.py ORIGINAL TUNED [--gsm8k FILE] [--humaneval FILE --run-code] [--suites NAME_OR_FILE ...]
        [--data FOLDER] [--limit N] [--tokens 320] [--batch 8] [--dtype float32] [--numerics auto] [--json FILE]

--run-code EXECUTES PROGRAMS THAT THE MODELS WROTE. Each runs in a process of its own with limits of time, memory and
file size, in an empty folder, with an empty environment. That stops accidents, not attacks: such a program can still
read this user's files and use the network. Run it where that does not matter. Without it HumanEval is only compared.

Answers are greedy. agreement: of the tokens of the original's answers, the share that the tuned model also ranks first
after the same text; identical: answers with the same tokens; accuracy: GSM8K, the last number of the answer against
the last of the solution; HumanEval, pass@1 of the prompt's continuation, cut where the function ends. p: of McNemar's
exact test on the prompts that only one of the two models solves. `--limit` takes prompts evenly spread over each file.
"""

import argparse
import contextlib
import gc
import gzip
import importlib.util
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
from common import read_prompts

from paceline import LLM, PacelineError, RequestOutput, SamplingParams
from paceline.core.argmax import argmax
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError, IncompatibleModels
from paceline.llm import Prompt
from paceline.system.provenance import provenance, sha256_of

END_OF_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\n```")
# A sign is no sign between two numbers, as in 3-4.
_NUMBER = re.compile(r"((?<![\w.)$])-\$?|\$-?)?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?")
_LAUNCHER = """
import resource, sys
for name, most in (("CPU", {seconds}), ("AS", {memory}), ("FSIZE", 1 << 20), ("NOFILE", 32), ("NPROC", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
with open(sys.argv[1], encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "candidate", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True)
class Task:
    """A prompt. solves: whether an answer is right; None where nobody can tell."""

    id: str
    prompt: Prompt
    solves: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class TaskSet:
    """Prompts of one kind. stop: where their answers end."""

    name: str
    tasks: tuple[Task, ...]
    stop: tuple[str, ...] = ()


def last_number(text: str) -> Decimal | None:
    """The last number of a text, commas between thousands and a dollar sign left out; None where there is none."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    sign, whole, rest = found[-1].groups(default="")
    return Decimal(("-" if "-" in sign else "") + whole.replace(",", "") + rest)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p of the exact test: how likely so uneven a split is where either model may win with equal chance."""
    count, least = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(count, i) for i in range(least + 1)) / 2**count)


def runs(program: str, seconds: float = 10.0, memory: int = 1 << 30) -> bool:
    """Whether a program comes to its end without an error. It is EXECUTED: see the top of this file.

    A program that leaves early, or kills itself, does not pass: behind its last line it has to leave a word.
    """
    with tempfile.TemporaryDirectory() as folder:
        word, end, path = secrets.token_hex(16), Path(folder, "end"), Path(folder, "candidate.py")
        leave = f"__import__('pathlib').Path({str(end)!r}).write_text({word!r})"
        path.write_text(f"{program}\n\n{leave}\n", encoding="utf-8")
        launcher = _LAUNCHER.format(seconds=math.ceil(seconds) + 1, memory=memory)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", launcher, str(path)],
            cwd=folder, env={}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too; a session has its first process's number
            process.wait()
        return code == 0 and end.is_file() and end.read_text(encoding="utf-8", errors="replace") == word


def gsm8k(path: Path, limit: int | None) -> TaskSet:
    """Questions as chats, with the number behind "####" of the solution."""
    tasks = []
    for number, row in enumerate(_lines(path, ("question", "answer"), limit)):
        gold = last_number(row["answer"].rpartition("####")[2])
        if gold is None:
            raise ConfigError(f"no number in the solution of {row['question']!r}", expected="#### and a number")
        chat = [{"role": "user", "content": row["question"]}]
        tasks.append(Task(str(number), chat, lambda text, gold=gold: last_number(text) == gold))
    return TaskSet("GSM8K", tuple(tasks))


def humaneval(path: Path, limit: int | None, run_code: bool) -> TaskSet:
    """Heads of functions as bare text, without the line break at the end: tokens may begin with one."""
    tasks = []
    for row in _lines(path, ("task_id", "prompt", "test", "entry_point"), limit):
        head = row["prompt"].rstrip()

        def solves(text: str, head: str = head, row: dict = row) -> bool:
            return runs(f"{head}{text}\n\n{row['test']}\n\ncheck({row['entry_point']})\n")

        tasks.append(Task(row["task_id"], head, solves if run_code else None))
    return TaskSet("HumanEval", tuple(tasks), END_OF_FUNCTION)


def _lines(path: Path, keys: tuple[str, ...], limit: int | None) -> list[dict[str, str]]:
    """Rows of a file of JSON lines, `limit` of them, evenly spread."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(one) for one in raw.decode("utf-8").split("\n") if one.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read", got=error, expected="JSON lines") from error
    for row in rows:
        if missing := [key for key in keys if not isinstance(row, dict) or not isinstance(row.get(key), str)]:
            raise ConfigError(f"a line of {str(path)!r} is wrong", got=str(row)[:80], expected=", ".join(missing))
    count = len(rows) if limit is None else min(limit, len(rows))
    return [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]


def answers(llm: LLM, tasks: TaskSet, tokens: int, batch: int) -> list[RequestOutput]:
    """Greedy answers, with word of the progress."""
    params = SamplingParams(max_tokens=tokens, stop=tasks.stop)
    made: list[RequestOutput] = []
    for start in range(0, len(tasks.tasks), 4 * batch):
        made += llm.generate([task.prompt for task in tasks.tasks[start : start + 4 * batch]], params)
        print(f"{llm.loaded.name}: {tasks.name}, {len(made)} of {len(tasks.tasks)} answers", file=sys.stderr)
    return made


@torch.inference_mode()
def ranked_first(llm: LLM, prompt_ids: Seq[int], answer_ids: Seq[int]) -> int:
    """How many tokens of an answer the model ranks first, each after the prompt and the tokens before it."""
    runner = llm.runner
    slot = runner.admit(prompt_ids)
    try:
        runner.prefill(slot, prompt_ids[:-1])
        tree = TokenTree.chain([[prompt_ids[-1], *answer_ids[:-1]]], runner.loaded.device)
        best = argmax(runner.forward([slot], tree).logits[0]).tolist()  # [N]
    finally:
        runner.cache.release(slot)
    return sum(ours == theirs for ours, theirs in zip(best, answer_ids, strict=True))


def compare(tasks: TaskSet, first: Seq[RequestOutput], second: Seq[RequestOutput], tuned: LLM) -> dict[str, object]:
    """One row: the original's answers, the tuned model's, and how the tuned model ranks the original's tokens."""
    for task, one, other in zip(tasks.tasks, first, second, strict=True):
        if one.prompt_token_ids != other.prompt_token_ids:
            raise IncompatibleModels(
                f"the models read the prompt {task.id} of {tasks.name} as other tokens",
                expected="the same tokenizer and chat template",
            )
    tokens = sum(len(one.token_ids) for one in first)
    row: dict[str, object] = {
        "set": tasks.name,
        "prompts": len(first),
        "tokens": tokens,
        "agreement": sum(ranked_first(tuned, one.prompt_token_ids, one.token_ids) for one in first) / tokens,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True)),
    }
    judged = [(task, task.solves) for task in tasks.tasks if task.solves is not None]
    if len(judged) == len(tasks.tasks):
        right = [[solves(one.text) for (_, solves), one in zip(judged, side, strict=True)] for side in (first, second)]
        lost, won = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in (right, right[::-1]))
        row |= {"original": sum(right[0]), "tuned": sum(right[1]), "only_original": lost, "only_tuned": won}
        row |= {"p": mcnemar(lost, won)}
        ids = [[task.id for (task, _), good in zip(judged, side, strict=True) if good] for side in right]
        row |= {"solved_by_original": ids[0], "solved_by_tuned": ids[1]}
    return row


def table(rows: Seq[dict]) -> str:
    """The rows in markdown."""
    lines = [
        "| prompts | agreement | identical | original | tuned | only original | only tuned | p |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        count = row["prompts"]
        cells = [f"{row['set']}, {count}", f"{row['agreement']:.1%}", f"{row['identical']} of {count}"]
        if "p" in row:
            cells += [f"{row[side]} ({row[side] / count:.1%})" for side in ("original", "tuned")]
            cells += [row["only_original"], row["only_tuned"], f"{row['p']:.3g}"]
        else:
            cells += ["not measured"] * 5
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Answer with one model, then with the other: only one is in memory."""
    sets = [gsm8k(args.gsm8k, args.limit)] if args.gsm8k else []
    if args.humaneval:
        if args.run_code and not (importlib.util.find_spec("resource") and runs("x = 1") and not runs("1 / 0")):
            raise ConfigError("programs cannot be run with limits on this system", fix="leave out --run-code")
        sets.append(humaneval(args.humaneval, args.limit, args.run_code))
    for suite in args.suites:
        asked, _ = read_prompts([suite], args.data, args.limit)
        sets.append(TaskSet(Path(suite).stem, tuple(Task(one.id, one.prompt) for one in asked)))
    if not sets or not all(one.tasks for one in sets):
        raise ConfigError("there is nothing to compare on", expected="--gsm8k, --humaneval or --suites")

    def model(name: str) -> LLM:
        numerics = None if args.numerics == "auto" else args.numerics
        return LLM(
            name, dtype=args.dtype, numerics=numerics, max_batch_size=args.batch, max_model_len=args.max_model_len
        )

    llm = model(args.original)
    original = [answers(llm, tasks, args.tokens, args.batch) for tasks in sets]
    fingerprints = [llm.loaded.fingerprint]
    del llm
    gc.collect()
    llm = model(args.tuned)
    rows = [
        compare(tasks, first, answers(llm, tasks, args.tokens, args.batch), llm)
        for tasks, first in zip(sets, original, strict=True)
    ]
    files = {str(path): sha256_of(path) for path in (args.gsm8k, args.humaneval) if path}
    about = {"fingerprints": [*fingerprints, llm.loaded.fingerprint], "numerics": llm.numerics, "files_sha256": files}
    return {"settings": vars(args), **about, "rows": rows, "provenance": provenance()}


def main(given: list[str] | None = None) -> int:
    """Compare, print, write; 2 for what cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument("tuned")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--humaneval", type=Path, metavar="FILE")
    parser.add_argument("--run-code", action="store_true", help="EXECUTES what the models wrote, see above")
    parser.add_argument("--suites", nargs="+", default=[], metavar="NAME_OR_FILE", help="only compared, first turns")
    parser.add_argument("--data", help="the folder with the suites' folders")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--numerics", default="auto", choices=["auto", "invariant", "fast"])
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(given)
    try:
        result = measure(args)
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(table(result["rows"]))  # type: ignore[arg-type]
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
