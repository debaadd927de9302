"""Did a change cost time, or a token? Two checkouts answer the same chats in turns, plainly and with drafters.

    python bench/pair.py OTHER_CHECKOUT                     this checkout against another one (`git worktree add`)
    python bench/pair.py OTHER_CHECKOUT --model FILE.gguf -d none -d lookup

Prints tokens per second of both, and the time of the other over that of this one: by the median and by the best of the
runs of each chat. Exits with 1 where the answers differ. Greedy, 96 tokens each; each run is a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

DRAFTERS = ("none", "lookup", "lookup+head:smollm2-135m-eagle")
TOKENS = 96
CHATS = (
    "Summarise in two sentences: The Danube is a river that rises in the Black Forest in Germany, flows through ten "
    "countries and ends in the Black Sea. It was a frontier of the Roman Empire, and is an important waterway today.",
    "Write a Python function that returns the n-th Fibonacci number, and one that tests it.",
    "What is the capital of France, and what is it known for?",
    "A train leaves at 9:40 and arrives at 13:05. How long does the trip take? Explain step by step.",
    "Translate to German: The weather is nice today and we go to the park.",
    "List ten fruits, one on each line, with a colour for each.",
    "Write a short story about a fox who learns to swim.",
    "Correct this text: he go to school yesterday and forget him books at home, so teacher were angry.",
    "Explain what photosynthesis is to a child.",
    "Write an SQL query that lists the customers with more than three orders.",
)


def answer(model: str, drafters: list[str]) -> dict[str, tuple[list[float], list[list[int]]]]:
    """Seconds and tokens of every chat, by drafter."""
    from paceline import LLM, SamplingParams

    params, answers = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), {}
    for drafter in drafters:
        llm = LLM(model, drafter=None if drafter == "none" else drafter)
        llm.chat([{"role": "user", "content": "Hello, who are you?"}], params)
        seconds, tokens = list[float](), list[list[int]]()
        for chat in CHATS:
            begin = time.perf_counter()
            tokens.append(llm.chat([{"role": "user", "content": chat}], params)[0].token_ids)
            seconds.append(time.perf_counter() - begin)
        answers[drafter] = seconds, tokens
    return answers


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("-d", "--drafter", action="append", help=f"default: {', '.join(DRAFTERS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    drafters = options.drafter or list(DRAFTERS)
    if options.worker:
        print(json.dumps(answer(options.model, drafters)))
        return
    sides = {"other": options.other.resolve(), "this": Path(__file__).resolve().parents[1]}
    flags = [flag for drafter in drafters for flag in ("-d", drafter)]
    command = [sys.executable, __file__, "--worker", "--model", options.model, *flags, "."]
    runs: dict[str, list[dict[str, tuple[list[float], list[list[int]]]]]] = {side: [] for side in sides}
    for run in range(options.runs):
        for side in list(sides)[:: 1 if run % 2 else -1]:
            environment = {**os.environ, "PYTHONPATH": f"{sides[side]}:{sides[side] / 'models'}"}
            done = subprocess.run(command, cwd=sides[side], env=environment, stdout=subprocess.PIPE, check=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{side}, run {run + 1} of {options.runs}", file=sys.stderr)
    print("| drafter | other, tokens/s | this, tokens/s | by medians | by bests | tokens |\n|---|---|---|---|---|---|")
    differ = False
    for drafter in drafters:

        def seconds(side: str, of_runs: Callable[[tuple[float, ...]], float], drafter: str = drafter) -> float:
            return sum(map(of_runs, zip(*(run[drafter][0] for run in runs[side]), strict=True)))

        same = len({json.dumps(run[drafter][1]) for side in sides for run in runs[side]}) == 1
        differ |= not same
        speeds = " | ".join(f"{len(CHATS) * TOKENS / seconds(side, median):.1f}" for side in sides)
        ratios = " | ".join(f"{seconds('other', how) / seconds('this', how):.3f}" for how in (median, min))
        print(f"| {drafter} | {speeds} | {ratios} | {'the same' if same else 'OTHERS'} |")
    sys.exit(differ)


if __name__ == "__main__":
    main()
