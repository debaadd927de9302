"""What threads of torch that spin between passes cost a program that imports torch before paceline.

    python bench/torch_first.py MODEL [--drafter recycling] [--tokens 80] [--turns 5]

GNU OpenMP's threads spin for milliseconds after a parallel loop, against the native pass that follows. The engine lets
torch work in the calling thread there (`system.hardware.one_thread`). Both ways take turns in one process, greedy and
at temperature 1, plain and with a drafter that drafts nothing. Prints medians of seconds, and their ratio.
"""

import argparse
import statistics

import torch

from paceline import LLM, Fixed, SamplingParams
from paceline.config import parse
from paceline.system import hardware


def main() -> None:
    """Print a line for each engine and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="recycling")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    few, prompt = hardware._FEW_NUMBERS, "Write a story about a dog."
    drafting = LLM(args.model, drafter=parse(args.drafter).build()[0], policy=Fixed(0), max_num_seqs=1)
    print(f"{torch.get_num_threads()} threads; seconds of {args.tokens} tokens")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
        for name, llm in (("plain", drafting.plain()), (args.drafter, drafting)):
            seconds: dict[int, list[float]] = {few: [], 0: []}
            for turn in range(args.turns + 1):
                for limit in (few, 0) if turn % 2 else (0, few):
                    hardware._FEW_NUMBERS = limit
                    took = llm.generate(prompt, params)[0].metrics.decode
                    seconds[limit] += [took] * (turn > 0)  # the first warms up
            one, all_threads = (statistics.median(seconds[limit]) for limit in (few, 0))
            ratio = all_threads / one
            print(f"{name:12} temperature {temperature:g}: {one:.2f} one thread, {all_threads:.2f} all, {ratio:.2f}")


if __name__ == "__main__":
    main()
